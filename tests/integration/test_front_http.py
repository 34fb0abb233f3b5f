"""Connections of the front: limits while reading, order of answers, who may ask, where it listens."""

import asyncio
import logging
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from frame_workers import SLOW
from served_front import Client, encode_request, serving, until

from gen_worker.errors import StartupError
from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.front import Front, FrontOptions
from gen_worker.inference.front.http.connection import MAX_AHEAD, MAX_HEAD_BYTES

ROWS = {"rows": [{"x": [1, 2, 3, 4]}]}


def test_requests_that_are_sent_ahead_are_answered_in_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            for number in range(3 * MAX_AHEAD):  # more than are read before the first answers
                client.send("GET", "/health", x_request_id=f"h{number}")
                client.send(
                    "POST", "/v1/predict", {"rows": [{"x": [number, 0, 0, 0]}]}, x_request_id=f"p{number}"
                )
            for number in range(3 * MAX_AHEAD):
                assert (await client.read()).headers["x-request-id"] == f"h{number}"
                reply = await client.read()
                assert reply.headers["x-request-id"] == f"p{number}"
                assert reply.values == [float(number)]

    run(main())


def test_a_request_may_come_in_any_pieces(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            for byte in encode_request("POST", "/v1/predict", ROWS):
                client.writer.write(bytes((byte,)))
                await client.writer.drain()
                await asyncio.sleep(0)
            assert (await client.read()).values == [10.0]
            head = b"POST /v1/predict HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            client.writer.write(
                head + b'8\r\n{"rows":\r\n12;e=1\r\n [{"x":[1,2,3,4]}]\r\n1\r\n}\r\n0\r\n\r\n'
            )
            assert (await client.read()).values == [10.0]

    run(main())


def test_a_head_that_was_read_before_means_the_same_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            known = served.front.reception.known
            one, other = await served.connect(), await served.connect()
            for number in range(4):
                for client in (one, other):
                    body = {"rows": [{"x": [number, 0, 0, 0]}]}
                    reply = await client.ask("POST", "/v1/predict", body, x_deadline_ms="60000")
                    assert reply.values == [float(number)]
            assert len(known) == 1
            request = encode_request("POST", "/v1/predict", ROWS, x_deadline_ms="60000")
            one.writer.write(request + request)
            one.writer.write(request[:-9])
            await one.writer.drain()
            assert [(await one.read()).values for _ in range(2)] == [[10.0]] * 2
            one.writer.write(request[-9:])
            assert (await one.read()).values == [10.0]
            wrong = await one.ask("POST", "/v1/predict", b"x" * len(request), content_type="application/json")
            assert wrong.status == 400
            assert (await one.ask("POST", "/v1/predict", ROWS, x_deadline_ms="60000")).values == [10.0]
            assert {reply.headers["x-request-id"] for reply in [reply, wrong]} != {""}
            large = {"rows": [{"x": [number, 0, 0, 0]} for number in range(1000)]}
            for _ in range(3):
                assert (await one.ask("POST", "/v1/predict", large)).values == [*map(float, range(1000))]
            for number in range(3):
                await one.ask("POST", "/v1/predict", ROWS, x_request_id=f"id-{number}")
            assert len(known) == 3, "heads with an id are kept"

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/predict HTTP/1.1\ncontent-length: 4\n\n\r\n\r\n{}",
        b"GET /health HTTP/1.1\n\nPOST /v1/predict HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        b"\r\n\r\nPOST /v1/predict HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/predict HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_plain_head_are_parsed_each_time(tmp_path: Path, sent: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            client.writer.write(sent)
            assert await client.reader.readexactly(9) == b"HTTP/1.1 "
            assert len(served.front.reception.known) == 0

    run(main())


def test_a_body_is_asked_for_where_the_client_waits_to_be_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            request = encode_request("POST", "/v1/predict", ROWS, expect="100-continue")
            head, _, body = request.partition(b"\r\n\r\n")
            client.writer.write(head + b"\r\n\r\n")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(body)
            assert (await client.read()).values == [10.0]

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\na: " + b"x" * MAX_HEAD_BYTES,
        b"POST /v1/predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nt: " + b"x" * MAX_HEAD_BYTES,
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001,
        b"POST /v1/predict HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
    ],
)
def test_what_is_too_large_is_refused_while_it_is_read(tmp_path: Path, sent: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path, options=FrontOptions(max_body_bytes=1000)) as served:
            client = await served.connect()
            client.writer.write(sent)
            reply = await client.read()
            assert (reply.status, reply.error["kind"]) == (413, "too_large")
            assert await client.read_to_end() == b""
            assert served.front.reception.unfinished_bytes == 0
            assert (await served.predict([1, 2, 3, 4])).values == [10.0]

    run(main())


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, options=FrontOptions(max_body_bytes=1000)) as served:
            client = await served.connect()
            client.writer.write(
                b"POST /v1/predict HTTP/1.1\r\ncontent-length: 1001\r\nexpect: 100-continue\r\n\r\n"
            )
            assert (await client.read()).status == 413

    run(main())


def test_bodies_that_are_being_received_are_bounded_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_unfinished_bytes=2500) as served:
            unfinished = b"POST /v1/predict HTTP/1.1\r\ncontent-length: 1100\r\n\r\n" + b"x" * 1000
            slow = [await served.connect() for _ in range(2)]
            for client in slow:
                client.writer.write(unfinished)
            await until(lambda: served.front.reception.unfinished_bytes == 2000)
            refused = await served.connect()
            refused.writer.write(unfinished)
            reply = await refused.read()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            slow[0].abort()
            await until(lambda: served.front.reception.unfinished_bytes == 1000)
            assert (await served.predict([1, 2, 3, 4])).values == [10.0]

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nx: y",
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: 100\r\n\r\n{",
        b"\r\n",
        encode_request("GET", "/health") + b"GET /hea",
    ],
)
def test_a_slow_sender_is_cut_off(tmp_path: Path, sent: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path, head_s=0.2, body_s=0.2) as served:
            client = await served.connect()
            client.writer.write(sent)
            rest = await client.read_to_end()
            assert rest.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nGET")
            assert not served.front.reception.connections

    run(main())


def test_a_request_that_is_computed_for_long_is_not_a_slow_sender(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, head_s=0.05, body_s=0.05) as served:
            client = await served.connect()
            for _ in range(3):
                reply = await client.ask("POST", "/v1/predict", {"rows": [{"x": [SLOW, 0, 0, 0]}]})
                assert reply.values == [SLOW]

    run(main())


def test_a_client_that_does_not_read_its_answers_is_cut_off_and_not_buffered_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, unread_s=0.3) as served:
            client = await served.connect()
            request = encode_request("GET", "/openapi.json")
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.writer.write(request * 5000)
            await until(lambda: served.front.reception.connections)
            (connection,) = served.front.reception.connections
            await until(lambda: not served.front.reception.connections)
            await until(lambda: connection.is_lost)
            assert served.front.reception.unfinished_bytes == 0

    run(main())


def test_idle_connections_keep_nobody_out_and_busy_ones_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_connections=4) as served:
            busy = await served.connect()
            busy.send("POST", "/v1/predict", {"rows": [{"x": [SLOW, 0, 0, 0]}]})
            await until(lambda: not served.pool.is_idle)
            idle = [await served.connect() for _ in range(8)]
            assert (await served.ask("GET", "/health")).status == 200
            assert len(served.front.reception.connections) <= 4
            for client in idle[:4]:
                assert await client.read_to_end() == b""
            assert (await busy.read()).values == [SLOW]

    run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        b"POST /v1/predict HTTP/1.1\r\ncontent-length: -5\r\n\r\nabcde",
        b"POST /v1/predict HTTP/1.1\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nnul: \0\r\n\r\n",
    ],
)
def test_what_can_be_read_in_two_ways_is_refused_and_the_connection_closed(
    tmp_path: Path, sent: bytes
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            client.writer.write(sent + encode_request("GET", "/health"))
            reply = await client.read()
            assert (reply.status, reply.error["kind"]) == (400, "input")
            assert await client.read_to_end() == b"", "what followed was answered, too"

    run(main())


def test_a_path_or_method_that_is_not_there_is_said_and_the_connection_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = await served.connect()
            for path in (
                "/",
                "/v1",
                "/v1/predict/",
                "/v1/../health",
                "//health",
                "/v1%2fpredict",
                "/v1/load",
            ):
                reply = await client.ask("GET", path)
                assert (reply.status, reply.error["kind"]) == (404, "not_found"), path
            wrong = await client.ask("GET", "/v1/predict")
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            assert (await client.ask("DELETE", "/health")).status == 405
            text = await client.ask("POST", "/v1/predict", b"{}", content_type="text/plain")
            assert (text.status, text.error["kind"]) == (415, "media_type")
            assert (await client.ask("GET", "/health?x=1")).status == 200

    run(main())


def test_an_id_that_could_not_be_a_header_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            given = ["ok-1.a:b_c", "x" * 129, "a b", 'a"b', "ä", ""]
            ids = [
                (await served.ask("GET", "/health", x_request_id=each)).headers["x-request-id"]
                for each in given
            ]
            assert ids[0] == given[0]
            assert set(ids[1:]) & set(given) == set()
            assert len(set(ids)) == len(ids)

    run(main())


async def _open(options: FrontOptions, address: str) -> tuple[Front, str]:
    front = Front(options, name="demo", log=logging.getLogger("test.front"))
    return front, await front.open(address)


def test_a_tcp_address_needs_the_bearer_on_every_route_but_health(tmp_path: Path) -> None:
    async def main() -> None:
        front, url = await _open(FrontOptions(bearer="s3cret"), "127.0.0.1:0")
        port = int(url.rpartition(":")[2])

        async def status(path: str, **headers: str) -> int:
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            method = "POST" if path.startswith("/v1") or path.endswith("infer") else "GET"
            reply = await client.ask(method, path, **headers)
            if reply.status == 401:
                assert reply.headers["www-authenticate"] == "Bearer"
                assert await client.read_to_end() == b"", "a refused connection goes on"
            await client.close()
            return reply.status

        needed = [
            "/v1/predict",
            "/v1/stream",
            "/v1/feedback",
            "/v2",
            "/v2/models/demo",
            "/v2/models/demo/infer",
        ]
        for path in [*needed, "/metrics", "/openapi.json", "/nothing"]:
            assert await status(path) == 401, path
            for wrong in (
                "",
                "s3cret",
                "Bearer",
                "Bearer s3cre",
                "Bearer s3cret2",
                "Basic s3cret",
                "Bearer \xe4",
            ):
                assert await status(path, authorization=wrong) == 401, (path, wrong)
            assert await status(path, authorization="Bearer s3cret") != 401, path
            assert await status(path, authorization="bearer  s3cret") != 401, path
        for path in ("/health", "/v2/health/live", "/v2/health/ready", "/v2/models/demo/ready"):
            assert await status(path) in (200, 503), path
        for authorization, expected in (
            ("Bearer s3cret", 503),
            ("Bearer s3creT", 401),
            ("Bearer s3cret", 503),
        ):
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            for _ in range(2 if expected == 503 else 1):  # the second time its head is known
                reply = await client.ask("POST", "/v1/predict", {"rows": []}, authorization=authorization)
                assert reply.status == expected
            await client.close()
        assert len(front.reception.known) == 1
        await front.drain(0)

    run(main())


def test_nothing_listens_without_bearer_or_beyond_the_loopback_without_tls(tmp_path: Path) -> None:
    async def main() -> None:
        for options, address, words in (
            (FrontOptions(), "127.0.0.1:0", "needs a bearer"),
            (FrontOptions(bearer="s"), "0.0.0.0:0", "not the loopback"),
            (FrontOptions(bearer="s"), "example.org:80", "not the loopback"),
            (FrontOptions(bearer="s", certificate="/nowhere.pem"), "0.0.0.0:0", "cannot be used"),
            (FrontOptions(bearer="s"), "127.0.0.1", "expected HOST:PORT"),
            (FrontOptions(bearer="s"), "127.0.0.1:70000", "expected HOST:PORT"),
            (FrontOptions(bearer="s"), "unix:", "expected unix:PATH"),
            (FrontOptions(bearer="s"), f"unix:{tmp_path}/{'x' * 120}", "cannot be used"),
        ):
            with pytest.raises(StartupError, match=words):
                await _open(options, address)

    run(main())


def test_tls_is_spoken_where_a_certificate_is_given(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)

    async def main() -> None:
        options = FrontOptions(bearer="s", certificate=str(certificate), key=str(key))
        front, url = await _open(options, "127.0.0.1:0")
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        connection = await asyncio.open_connection(
            "127.0.0.1", int(url.rpartition(":")[2]), ssl=context, server_hostname="localhost"
        )
        client = Client(*connection)
        assert (await client.ask("GET", "/v2/health/live")).json == {"live": True}
        await client.close()
        await front.drain(0)

    run(main())


def test_a_unix_socket_is_for_its_user_alone_and_replaces_one_that_nobody_listens_on(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        front, url = await _open(FrontOptions(), f"unix:{path}")
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(StartupError, match="another process listens"):
            await _open(FrontOptions(), f"unix:{path}")
        await front.drain(0)
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        front, _ = await _open(FrontOptions(), f"unix:{path}")
        await front.drain(0)
        path.write_text("mine")
        with pytest.raises(StartupError, match="there is a file of that name"):
            await _open(FrontOptions(), f"unix:{path}")
        assert path.read_text() == "mine"

    run(main())
