"""What nobody gets from the gateway without a credential, or by a trick with one: each hole that others had is tried."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from daemon_process import DEADLINE_S
from gateway_process import EventReader, GatewayWorld

import trn
from trn.gateway.app import ENDPOINTS
from trn.gateway.gate.guard import API, LOGIN, MAX_BODY_BYTES

TRAINERS = Path(__file__).parent / "trainers"
SECRET = "the-content-that-nobody-may-read"
SCRIPT = "<script>alert(1)</script>"
ROUTES = [(each.method, each.path) for each in ENDPOINTS]
CHANGES = [(method, path) for method, path in ROUTES if method != "GET"]
TRAVERSALS = [
    "..",
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e%2fsecret.txt",
    "%252e%252e%252fsecret.txt",
    "..%5csecret.txt",
    "....//secret.txt",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "file:%2f%2f%2fetc%2fpasswd",
    "one%00.txt",
    "one/../../secret.txt",
    "one%2f..%2f..%2fsecret.txt",
    "%c0%ae%c0%ae/secret.txt",
    "one;/../secret.txt",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayWorld]:
    """`one` has ended; its names are what an attacker would choose."""
    folder = tmp_path_factory.mktemp("secure")
    with GatewayWorld(folder / "home") as world:
        (world.home.root / "secret.txt").write_text(SECRET)
        (world.home.runs / "secret.txt").write_text(SECRET)
        (folder / "witness").mkdir()
        config = {
            "run_id": "one",
            "name": SCRIPT,
            "trainer": "witnessed:Witnessed",
            "mock_batches": [1, 2, 3],
            "metric_every": 1,
            "resources": {"devices": ["cpu"]},
            "hyperparams": {"witness": str(folder / "witness"), "step_ms": 0},
            "tags": {SCRIPT: SCRIPT},
        }
        with trn.Client(world.home.root) as client:
            client.submit(config, base_dir=TRAINERS)
            assert client.wait("one", DEADLINE_S).state == "COMPLETED"
        with world.home.run("one").log.open("a") as log:
            log.write(f"\n{SCRIPT}\n")
        yield world


def fill(path: str, value: str = "one") -> str:
    """The route's path with this in every place."""
    for name in ("run_id", "artifact_id", "sha256", "name"):
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path
    return f"{API}{path}"


def json_headers(world: GatewayWorld, **more: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Origin": world.gateway.url, **more}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_a_credential(world: GatewayWorld, method: str, path: str) -> None:
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {'x' * 43}"},
        {"Authorization": f"Basic {world.gateway.bearer}"},
        {"Authorization": world.gateway.bearer},
        {"Cookie": f"trn_session_{world.host.rpartition(':')[2]}={'x' * 43}"},
        {"Cookie": f"{world.log_in()['Cookie']}x"},
        # A wrong bearer is not helped by a right cookie.
        {"Authorization": "Bearer wrong", "Cookie": world.log_in()["Cookie"]},
    ]
    for headers in wrong:
        for verb in (method, "HEAD") if method == "GET" else (method,):
            answer = world.ask(
                verb,
                fill(path),
                b"{}" if verb not in ("GET", "HEAD") else None,
                json_headers(world, **headers),
            )
            if f"{API}{path}" == LOGIN:
                assert answer.status == 400  # it takes a token, and there was none
            else:
                assert answer.status == 401, (verb, path, headers)
                assert verb == "HEAD" or set(answer.data) == {"error"}


def test_paths_that_are_no_route_and_methods_that_no_route_has_need_a_credential_too(
    world: GatewayWorld,
) -> None:
    for path in (
        "/api",
        "/api/",
        "/api/v1",
        "/api/v1/",
        "/api/v2/runs",
        "/api/v1/runs/",
        "/api/v1/login/x",
        "/api/v1/login/",
    ):
        for method in (
            "GET",
            "POST",
            "PUT",
            "DELETE",
            "PATCH",
            "OPTIONS",
            "TRACE",
            "CONNECT",
            "PROPFIND",
            "BREW",
        ):
            answer = world.ask(method, path, None, json_headers(world))
            assert answer.status in (401, 405), (method, path)
    assert world.ask("GET", "/API/v1/runs").status in (200, 404)  # at most the page itself
    assert b"runs" not in world.ask("GET", "/API/v1/runs").body[:200].replace(b"/runs", b"")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_host_that_is_not_ours_is_refused_on_every_route(
    world: GatewayWorld, method: str, path: str
) -> None:
    port = world.host.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1.evil.example:{port}",
        "",
        "127.0.0.2:80",
    ):
        headers = {**world.bearer, "Content-Type": "application/json", "Host": host}
        answer = world.ask(method, fill(path), None if method == "GET" else b"{}", headers)
        assert (answer.status, answer.data["error"]["code"]) == (403, "forbidden"), (host, path)
    assert world.ask("GET", "/", headers={"Host": "evil.example"}).status == 403
    assert (
        world.ask("GET", f"{API}/runs", headers={**world.bearer, "Host": f"localhost:{port}"}).status == 200
    )


def test_two_hosts_are_refused(world: GatewayWorld) -> None:
    host, port = world.host.split(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as link:
        link.sendall(f"GET {API}/runs HTTP/1.1\r\nHost: {world.host}\r\nHost: evil.example\r\n\r\n".encode())
        assert b" 400 " in link.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_requests_of_other_sites_are_refused_with_and_without_a_credential(
    world: GatewayWorld, method: str, path: str
) -> None:
    cookie = {"Cookie": world.log_in()["Cookie"]}
    body = None if method == "GET" else b"{}"
    for credential in (cookie, world.bearer):
        for origin in (
            "http://evil.example",
            "null",
            "https://" + world.host,
            f"http://localhost.evil:{1}",
            "",
        ):
            headers = {**credential, "Content-Type": "application/json", "Origin": origin}
            assert world.ask(method, fill(path), body, headers).status == 403, (origin, path)
        for site in ("cross-site", "same-site"):
            headers = {**json_headers(world), **credential, "Sec-Fetch-Site": site}
            assert world.ask(method, fill(path), body, headers).status == 403, (site, path)


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_a_change_needs_json_and_from_a_browser_our_origin(
    world: GatewayWorld, method: str, path: str
) -> None:
    cookie = {"Cookie": world.log_in()["Cookie"]}
    if f"{API}{path}" != LOGIN:
        without = {**cookie, "Content-Type": "application/json"}
        assert world.ask(method, fill(path), b"{}", without).status == 403
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonx",
    ):
        headers = {**world.bearer, "Content-Type": kind} if kind else dict(world.bearer)
        assert world.ask(method, fill(path), b"{}", headers).status == 415, kind
    assert world.get("/runs/one").data["run"]["state"] == "COMPLETED"


def test_a_link_from_another_site_opens_the_page_but_no_data(world: GatewayWorld) -> None:
    """`trn ui` itself opens the link from a file, which is another site for a browser."""
    elsewhere = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Cookie": world.log_in()["Cookie"],
    }
    assert world.ask("GET", "/runs/one", headers=elsewhere).status == 200
    assert world.ask("GET", f"{API}/runs/one", headers=elsewhere).status == 403


def test_there_is_no_cors(world: GatewayWorld) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = world.ask("OPTIONS", f"{API}/runs", headers=headers)
    assert answer.status in (403, 405)
    for found in (answer, world.get("/runs"), world.ask("GET", "/")):
        assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if "{" in route[1]])
def test_no_path_leads_out_of_where_it_belongs(world: GatewayWorld, method: str, path: str) -> None:
    for text in TRAVERSALS:
        headers = {**world.bearer, "Content-Type": "application/json"}
        answer = world.ask(method, fill(path, text), None if method == "GET" else b"{}", headers)
        assert answer.status in (400, 404, 405, 415), (path, text)
        assert SECRET.encode() not in answer.body
        assert b"root:" not in answer.body


def test_no_query_or_body_leads_out_either(world: GatewayWorld) -> None:
    for each in ENDPOINTS:
        if each.is_stream:
            continue
        for field in each.query_fields:
            for text in TRAVERSALS:
                once = quote(text, safe="%")
                path = f"{fill(each.path)}?{field.name}={once}"
                headers = {**world.bearer, "Content-Type": "application/json"}
                answer = world.ask(each.method, path, None if each.method == "GET" else b"{}", headers)
                assert answer.status < 500, path
                assert SECRET.encode() not in answer.body, path
                assert b"root:" not in answer.body, path
    for text in TRAVERSALS:
        for path in (f"/{text}", f"/assets/{text}", f"/static/{text}"):
            answer = world.ask("GET", path)
            assert SECRET.encode() not in answer.body
            assert b"root:" not in answer.body
    for checkpoint in TRAVERSALS:
        assert world.send("POST", "/runs/one/resume", {"checkpoint": checkpoint}).status == 400


def test_no_address_that_a_request_names_is_fetched(world: GatewayWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inner:
        inner.setblocking(False)
        url = f"http://127.0.0.1:{inner.getsockname()[1]}/secret"
        headers = {**world.bearer, "Content-Type": "application/json"}
        for each in ENDPOINTS:
            for field in [] if each.is_stream else each.query_fields:
                path = f"{fill(each.path)}?{field.name}={quote(url, safe='')}"
                world.ask(each.method, path, None if each.method == "GET" else b"{}", headers)
        config = {
            "run_id": "fetcher",
            "trainer": "witnessed:Witnessed",
            "max_steps": 1,
            "inputs": {
                "base_model_ref": url,
                "dataset_parquet_refs": [url],
                "resume_checkpoint_ref": url,
            },
            "uploads": {"metrics_url": url, "sample_url": url},
        }
        checked = world.send("POST", "/runs?dry_run=1", {"config": config, "base_dir": str(TRAINERS)})
        assert checked.status in (200, 422), checked
        by_path = {**config, "inputs": {}, "dataset": {"parquet_paths": [url]}}
        assert world.send("POST", "/runs?dry_run=1", {"config": by_path, "base_dir": "/"}).status in (
            200,
            422,
        )
        text = f"trainer: a:b\n<<: {url}\n"
        assert world.send("POST", "/parse-job", {"text": text, "format": "yaml"}).status < 500
        with pytest.raises(BlockingIOError):
            inner.accept()
        socket.create_connection(inner.getsockname()).close()
        inner.accept()[0].close()  # it would have been seen


def test_targets_that_are_no_plain_paths_are_refused(world: GatewayWorld) -> None:
    host, port = world.host.split(":")
    for target in (
        f"http://{world.host}{API}/runs",
        "*",
        "//api/v1/runs",
        "/api//v1/runs",
        "/./api/v1/runs",
        "/%61pi/v1/runs",
        "/api/v1%2fruns",
    ):
        with socket.create_connection((host, int(port)), DEADLINE_S) as link:
            link.sendall(f"GET {target} HTTP/1.1\r\nHost: {world.host}\r\nConnection: close\r\n\r\n".encode())
            status = int(link.recv(4096).split()[1])
        assert status in (400, 401, 404), target


def test_text_of_others_is_data_and_never_a_page(world: GatewayWorld) -> None:
    for path in (
        "/runs",
        "/runs/one",
        f"/runs?name={quote(SCRIPT)}",
        f"/runs/one/metrics?name={quote(SCRIPT)}",
        "/runs/one/log",
        "/runs/one/events",
        f"/runs?{quote(SCRIPT)}=1",
        f"/runs/{quote(SCRIPT)}",
        "/runs/one/documents/job",
    ):
        answer = world.get(path)
        kind = answer.headers["content-type"]
        assert kind.startswith(("application/json", "text/plain")), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert world.get("/runs/one").data["run"]["name"] == SCRIPT
    page = world.ask("GET", f"/runs/{quote(SCRIPT)}")
    assert SCRIPT.encode() not in page.body
    policy = world.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_what_a_browser_could_run_is_saved_and_never_shown(world: GatewayWorld) -> None:
    from trn.core.artifacts.records import MEDIA_TYPES
    from trn.gateway.routes.artifacts import PLAIN, SHOWN

    for kind in MEDIA_TYPES.values():
        if "html" in kind or "svg" in kind or "xml" in kind:
            assert kind not in SHOWN | PLAIN
    assert "image/svg+xml" in MEDIA_TYPES.values()


def test_a_login_token_works_once_and_sits_in_the_fragment(world: GatewayWorld) -> None:
    made = world.send("POST", "/login-tokens").data
    assert made["url"] == f"{world.gateway.url}/#token={made['token']}"
    first = world.ask("POST", LOGIN, {"token": made["token"]}, json_headers(world))
    assert first.status == 204
    cookie = first.headers["set-cookie"]
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word.lower() in cookie.lower()
    assert "domain" not in cookie.lower()
    assert world.ask("POST", LOGIN, {"token": made["token"]}, json_headers(world)).status == 401
    browser = {"Cookie": cookie.partition(";")[0]}
    assert world.ask("GET", f"{API}/runs", headers=browser).status == 200
    assert world.ask("POST", f"{API}/logout", {}, json_headers(world, **browser)).status == 204
    assert world.ask("GET", f"{API}/runs", headers=browser).status == 401


def test_a_body_that_is_too_large_is_refused_before_it_is_read(world: GatewayWorld) -> None:
    host, port = world.host.split(":")
    head = f"POST {API}/runs HTTP/1.1\r\nHost: {world.host}\r\nAuthorization: Bearer {world.gateway.bearer}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), DEADLINE_S) as link:
        link.sendall(f"{head}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        assert b" 413 " in link.recv(4096)
    with socket.create_connection((host, int(port)), DEADLINE_S) as link:  # without saying how long it is
        link.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(MAX_BODY_BYTES // 0x10000 + 2):
                link.sendall(piece)
        assert b" 413 " in link.recv(4096)
    nested = b'{"config":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = world.ask("POST", f"{API}/runs", nested, {**world.bearer, "Content-Type": "application/json"})
    assert answer.status == 400
    with socket.create_connection((host, int(port)), DEADLINE_S) as link:
        with contextlib.suppress(OSError):
            link.sendall(f"GET {API}/runs HTTP/1.1\r\nHost: {world.host}\r\nX: ".encode() + b"x" * 200_000)
        with contextlib.suppress(ConnectionError):
            assert b" 400 " in link.recv(4096)
    assert world.get("/runs").status == 200


def test_a_thousand_idle_connections_and_too_many_streams_stop_nobody(world: GatewayWorld) -> None:
    host, port = world.host.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(1200):
            stack.enter_context(contextlib.closing(socket.create_connection((host, int(port)), DEADLINE_S)))
        assert world.get("/runs").status == 200
        readers = [stack.enter_context(EventReader(world, "watch=runs")) for _ in range(64)]
        assert {reader.answer.status for reader in readers} == {200}
        with EventReader(world, "watch=runs") as refused:
            assert refused.answer.status == 429
            assert "64" in json.loads(refused.answer.read())["error"]["message"]
        assert world.get("/runs").status == 200
        readers[0].next("health")
    deadline = time.monotonic() + DEADLINE_S
    while True:  # its place is free again
        with EventReader(world, "watch=runs") as reader:
            if reader.answer.status == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_secret_is_in_a_log_a_command_line_or_an_address(world: GatewayWorld) -> None:
    made = world.send("POST", "/login-tokens").data
    session = world.log_in()["Cookie"].partition("=")[2]
    secrets = [world.gateway.bearer, made["token"], session]
    written = b"".join(path.read_bytes() for path in world.home.root.glob("*.log*"))
    written += b"".join(path.read_bytes() for path in world.home.root.glob("*.out"))
    seen = b""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            seen += Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for secret in secrets:
        assert secret.encode() not in written
        assert secret.encode() not in seen
    assert repr(world.gateway).find(world.gateway.bearer) < 0
    for name in ("gateway.json", "gateway.lock", "gateway.log"):
        assert (world.home.root / name).stat().st_mode & 0o077 == 0
    assert world.home.root.stat().st_mode & 0o077 == 0


def test_no_errors_text_shows_a_traceback(world: GatewayWorld) -> None:
    for path in (
        "/runs?limit=%ff",
        "/runs?limit=%00",
        "/runs/one/log?offset=99999999999999999999",
        "/runs/one/events?after_seq=x",
    ):
        answer = world.get(path)
        assert answer.status == 400, path
        assert b"Traceback" not in answer.body
    link = http.client.HTTPConnection(world.host, timeout=DEADLINE_S)
    headers: dict[str, Any] = {**world.bearer, "Last-Event-ID": "c=-1;;="}
    link.request("GET", f"{API}/stream?watch=runs", headers=headers)
    assert link.getresponse().status == 400
    link.close()
