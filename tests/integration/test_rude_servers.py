"""Servers that answer wrongly, slowly, endlessly or with lies. Whatever comes:

- A download ends in the whole file or in an error of ours, after a bounded number of requests.
- An upload ends as taken (2xx) or as one reported failure, after a bounded number of requests.
- The token goes to no other host, and is in no message and no log.
- Memory and disk are bounded, and whoever wants to stop is heard.
"""
# ruff: noqa: F811  (fixtures are imported by name)

import gzip
import hashlib
import itertools
import json
import logging
import os
import re
import ssl
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_servers import http_server, s3_endpoint, s3_server, wait_until  # noqa: F401
from rude_server import FaultyStore, RudeServer, http_answer

from gen_worker.contract.job.spec import UploadsSpec
from gen_worker.errors import AuthError, InputError
from gen_worker.trainer import inputs
from gen_worker.trainer.authz import authorize_start
from gen_worker.trainer.contracts import StopSignal
from gen_worker.trainer.inputs import fetch, materialize_inputs
from gen_worker.trainer.transfer import input_cache, upload_endpoints
from gen_worker.trainer.transfer.input_cache import InputCache, key_of
from gen_worker.trainer.transfer.policy import (
    ObjectStoreOptions,
    RetryPolicy,
    TransferOptions,
    parse_retry_after_s,
)
from gen_worker.trainer.uploader import ArtifactUploader, UploadFailure, UploadLimits, UploadTargets

TOKEN = "opaque-capability-0123456789abcdef"
ATTEMPTS = 3
WAIT_S = 60.0
NEVER = http_answer("500 Never", "Content-Length: 0\r\n")
ZIPPED = gzip.compress(bytes(range(256)) * 100)

# Answers after which nothing was downloaded. To an upload those with 2xx say that it was taken.
REFUSED = {
    "no HTTP": b"\x00\xff garbage\r\n\r\n",
    "nothing": b"",
    "HTTP/0.9": b"just a body",
    "length of 5,000 digits": http_answer("200 OK", f"Content-Length: {'9' * 5000}\r\n", b"x"),
    "length below 0": http_answer("200 OK", "Content-Length: -5\r\n", b"x"),
    "length in superscript": http_answer("200 OK", "Content-Length: ²\r\n", b"x"),
    "two lengths": http_answer("200 OK", "Content-Length: 5\r\nContent-Length: 6\r\n", b"xxxxx"),
    "shorter than said": http_answer("200 OK", "Content-Length: 50\r\n", b"xxxxx"),
    "longer than any disk": http_answer("200 OK", "Content-Length: 999999999999999999\r\n", b"x"),
    "no length": http_answer("200 OK", "", b"trunc"),
    "HTTP/1.0 without length": b"HTTP/1.0 200 OK\r\n\r\ntrunc",
    "chunk that is none": http_answer("200 OK", "Transfer-Encoding: chunked\r\n", b"zz\r\nabc"),
    "cut in a chunk": http_answer("200 OK", "Transfer-Encoding: chunked\r\n", b"5\r\nab"),
    "chunk of endless size": http_answer("200 OK", "Transfer-Encoding: chunked\r\n", b"f" * 100 + b"\r\nabc"),
    "gzip that is none": http_answer("200 OK", "Content-Encoding: gzip\r\nContent-Length: 7\r\n", b"garbage"),
    "gzip that is cut": http_answer(
        "200 OK", f"Content-Encoding: gzip\r\nContent-Length: {len(ZIPPED) - 30}\r\n", ZIPPED[:-30]
    ),
    "coding that nobody knows": http_answer(
        "200 OK", "Content-Encoding: nonsense\r\nContent-Length: 7\r\n", b"garbage"
    ),
    "part that nobody asked for": http_answer(
        "206 P", "Content-Range: bytes 0-4/100\r\nContent-Length: 5\r\n", b"xxxxx"
    ),
    "part of an unknown whole": http_answer(
        "206 P", "Content-Range: bytes 0-4/*\r\nContent-Length: 5\r\n", b"xxxxx"
    ),
    "part of 5,000 digits": http_answer(
        "206 P", f"Content-Range: bytes 0-4/{'9' * 5000}\r\nContent-Length: 5\r\n", b"xxxxx"
    ),
    "part without a range": http_answer("206 P", "Content-Length: 5\r\n", b"xxxxx"),
    "not modified": http_answer("304 N"),
    "no content": http_answer("204 N"),
    "status 999": http_answer("999 X"),
    "status of four digits": b"HTTP/1.1 1999 X\r\n\r\n",
    "switch of protocols": http_answer("101 S"),
    "redirect to nowhere": http_answer("302 F"),
    "redirect to no host name": http_answer("302 F", "Location: http://xn--a/\r\n"),
    "redirect with controls": http_answer("302 F", "Location: http://a\x01b/\r\n"),
    "redirect of 70,000 letters": http_answer("302 F", f"Location: http://127.0.0.1/{'a' * 70_000}\r\n"),
    "redirect to a port too high": http_answer("302 F", "Location: http://127.0.0.1:99999/\r\n"),
    "redirect to a half address": http_answer("302 F", "Location: http://[::1\r\n"),
    "redirect to a file": http_answer("302 F", "Location: file:///etc/passwd\r\n"),
    "redirect to itself": http_answer("302 F", "Location: /f.bin\r\n"),
    "headers of 200,000 bytes": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n",
    **{
        f"status {status}": http_answer(f"{status} X", "Content-Length: 40\r\n", TOKEN.encode().ljust(40))
        for status in (
            400,
            401,
            403,
            404,
            407,
            408,
            409,
            410,
            413,
            416,
            425,
            429,
            451,
            500,
            502,
            503,
            507,
            599,
        )
    },
    **{
        f"503, again after {value[:30]!r}": http_answer(
            "503 S", f"Retry-After: {value}\r\nContent-Length: 0\r\n"
        )
        for value in (
            "-1",
            "0",
            "1e9",
            "soon",
            "²",
            "NaN",
            "",
            "9" * 5000,
            "Thu, 01 Jan 1970 00:00:00 +99999999",
        )
    },
}
TAKEN = {name for name, answer in REFUSED.items() if answer.startswith((b"HTTP/1.1 20", b"HTTP/1.0 20"))} - {
    "length of 5,000 digits",
    "length below 0",
    "length in superscript",
    "two lengths",
    "headers of 200,000 bytes",
}


def bearer() -> Any:
    return authorize_start(orchestrated=True, token=TOKEN, public_key_pem=None, run_id="run-1", owner=None)


def quick(**changes: Any) -> TransferOptions:
    wanted = {
        "retry": RetryPolicy(max_attempts=ATTEMPTS, base_s=0.0, cap_s=0.0),
        "sleep": lambda _seconds: None,
    }
    return TransferOptions(**(wanted | changes))


@pytest.fixture
def cache(tmp_path: Path) -> InputCache:
    return InputCache(tmp_path / "cache", sync_every_bytes=1 << 20)


@pytest.fixture
def failures() -> list[UploadFailure]:
    return []


@pytest.fixture
def make(failures: list[UploadFailure]) -> Iterator[Any]:
    made: list[ArtifactUploader] = []

    def build(url: str, **changes: Any) -> ArtifactUploader:
        wanted: dict[str, Any] = {
            "run_id": "run-1",
            "auth": bearer(),
            "limits": UploadLimits(linger_s=0.0),
            "options": quick(),
            "on_failure": failures.append,
        }
        targets = UploadTargets(checkpoint_url=url, metrics_url=url)
        made.append(ArtifactUploader(targets=targets, **(wanted | changes)))
        return made[-1]

    yield build
    for uploader in made:
        uploader.close()


def send(uploader: ArtifactUploader, folder: Path, data: bytes = b"w" * 100_000) -> list[UploadFailure]:
    path = folder / "step-00000001.pt"
    path.write_bytes(data)
    uploader.upload_checkpoint_files(local_path=path, meta_path=None, step=1)
    return uploader.drain(WAIT_S)


def blobs_and_parts(cache: InputCache) -> list[Path]:
    return [
        path for room in ("sha256", "partial") for path in (cache.root / room).rglob("*") if path.is_file()
    ]


# Wrong answers


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_answer_ends_a_download_in_an_error_of_ours(name, cache, caplog):
    caplog.set_level(logging.DEBUG)
    with RudeServer(lambda _number, _head: REFUSED[name]) as server:
        with pytest.raises((InputError, AuthError)) as caught:
            fetch(f"{server.url}/f.bin", cache=cache, auth=bearer(), options=quick())
        assert 1 <= len(server.heads) <= max(ATTEMPTS, 10 if name.startswith("redirect") else 0)
    said = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert TOKEN not in said
    assert len(str(caught.value)) < 1_000
    assert not list((cache.root / "sha256").rglob("*"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_answer_to_an_upload_is_reported_once_or_says_that_it_was_taken(
    name, tmp_path, make, failures, caplog
):
    caplog.set_level(logging.INFO)
    with RudeServer(lambda _number, _head: REFUSED[name]) as server:
        uploader = make(f"{server.url}/checkpoints")
        send(uploader, tmp_path)
        assert 1 <= len(server.heads) <= ATTEMPTS
    assert len(failures) == (0 if name in TAKEN else 1), failures
    said = caplog.text + "".join(failure.reason for failure in failures)
    assert TOKEN not in said
    assert "unexpected" not in said
    assert all(len(failure.reason) < 1_000 for failure in failures)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_upload_and_no_token_follows_a_redirect_to_another_host(status, tmp_path, make, failures, cache):
    with RudeServer(lambda _number, _head: NEVER) as other:

        def redirect(_number: int, _head: bytes) -> bytes:
            return http_answer(
                f"{status} M", f"Location: {other.url}/f.bin?secret=1\r\nContent-Length: 0\r\n"
            )

        with RudeServer(redirect) as server:
            send(make(f"{server.url}/checkpoints"), tmp_path)
            assert (len(server.heads), other.num_connections) == (1, 0)
            with pytest.raises(InputError):
                fetch(f"{server.url}/f.bin", cache=cache, auth=bearer(), options=quick())
        assert TOKEN.encode() in server.heads[-1]
        assert len(other.heads) == ATTEMPTS
        assert TOKEN.encode() not in b"".join(other.heads)
    [failure] = failures
    assert "set the target to that URL" in failure.reason
    assert "secret" not in failure.reason


def test_a_proxy_of_the_environment_never_sees_what_is_for_this_machine(
    tmp_path, make, failures, cache, monkeypatch
):
    with RudeServer(lambda _number, _head: http_answer("200 OK", "Content-Length: 3\r\n", b"abc")) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with RudeServer(
            lambda _number, _head: http_answer("200 OK", "Content-Length: 3\r\n", b"abc")
        ) as server:
            assert send(make(f"http://localhost:{server.port}/c"), tmp_path) == []
            fetch(f"{server.url}/f.bin", cache=cache, auth=bearer(), options=quick())
            assert len(server.heads) == 2
        assert proxy.heads == []


def make_certificate(folder: Path) -> ssl.SSLContext:
    """Signed by itself: nobody trusts it."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elsewhere.example")])
    begin = datetime.now(UTC) - timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + timedelta(days=9))
    path = folder / "certificate.pem"
    path.write_bytes(
        builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.mark.parametrize("is_tls", [True, False], ids=["a certificate of nobody", "no TLS at all"])
def test_a_host_that_does_not_prove_who_it_is_gets_no_request(is_tls, tmp_path, make, failures, cache):
    tls = make_certificate(tmp_path) if is_tls else None
    with RudeServer(lambda _number, _head: http_answer("200 OK"), tls=tls) as server:
        url = f"https://127.0.0.1:{server.port}/f.bin"
        options = quick(connect_timeout_s=0.5)
        with pytest.raises(InputError, match="could not be fetched"):
            fetch(url, cache=cache, auth=bearer(), options=options)
        send(make(url, options=options), tmp_path)
        assert server.heads == []
    assert len(failures) == 1


# Length, ranges and codings


def test_a_file_whose_end_nobody_tells_is_taken_by_its_digest_alone(cache):
    with RudeServer(lambda _number, _head: b"HTTP/1.0 200 OK\r\n\r\nabc") as server:
        with pytest.raises(InputError, match="does not send the length of the file"):
            fetch(f"{server.url}/f.bin", cache=cache, options=quick())
        digest = hashlib.sha256(b"abc").hexdigest()
        found = fetch(f"{server.url}/f.bin#sha256={digest}", cache=cache, options=quick())
        assert found.path.read_bytes() == b"abc"
        with pytest.raises(InputError, match="has the digest"):
            fetch(f"{server.url}/f.bin#sha256={'0' * 64}", cache=cache, options=quick())


OLD, NEW = b"a" * 3_000_000, b"b" * 3_000_000


@pytest.mark.parametrize(
    ("etag", "content_range"),
    [
        ("", "bytes {start}-2999999/3000000"),
        ("new", "bytes {start}-2999999/3000000"),
        ("old", "bytes {start}-2999999/3000001"),
        ("old", "bytes {start}-2999999/*"),
        ("old", "bytes 1-2999999/3000000"),
        ("old", "none"),
    ],
    ids=["no ETag", "another ETag", "another length", "no length", "another beginning", "no range"],
)
def test_parts_of_two_files_are_never_one(etag, content_range, cache):
    def answer(number: int, head: bytes) -> bytes:
        if number == 1:
            return http_answer("200 OK", f'ETag: "old"\r\nContent-Length: {len(OLD)}\r\n', OLD[:2_000_000])
        if asked := re.search(rb"range: bytes=(\d+)-", head, re.IGNORECASE):
            rest = NEW[int(asked[1]) :]
            headers = f"Content-Range: {content_range.format(start=int(asked[1]))}\r\nContent-Length: {len(rest)}\r\n"
            return http_answer("206 P", f'ETag: "{etag}"\r\n{headers}' if etag else headers, rest)
        return http_answer("200 OK", f'ETag: "new"\r\nContent-Length: {len(NEW)}\r\n', NEW)

    with RudeServer(answer) as server:
        assert fetch(f"{server.url}/f.bin", cache=cache, options=quick()).path.read_bytes() == NEW


def test_a_compressed_answer_may_have_several_members(cache):
    body = gzip.compress(b"one") + gzip.compress(b"two" * 1_000_000)
    headers = f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
    with RudeServer(lambda _number, _head: http_answer("200 OK", headers, body)) as server:
        found = fetch(f"{server.url}/f.bin", cache=cache, options=quick())
    assert found.path.read_bytes() == b"one" + b"two" * 1_000_000


# Slow and endless answers


class StopNowError(Exception):
    pass


def test_a_download_of_a_few_bytes_a_minute_hears_that_it_shall_stop(cache):
    def trickle(_number: int, _head: bytes) -> Iterator[bytes]:
        yield http_answer("200 OK", "Content-Length: 1000000\r\n", b"0123456789")
        server.is_over.wait(WAIT_S)

    def stop(_name: str, done_bytes: int, _total: int | None) -> None:
        if done_bytes:
            raise StopNowError

    with RudeServer(trickle) as server, pytest.raises(StopNowError):
        fetch(f"{server.url}/f.bin", cache=cache, on_progress=stop, options=quick(stall_timeout_s=WAIT_S))


def drip(server_of: list[RudeServer], head: bytes, drop: bytes, pause_s: float) -> Iterator[bytes]:
    yield head
    while not server_of[0].is_over.wait(pause_s):
        yield drop


ENDLESS = {
    "body byte by byte": (http_answer("200 OK", "Content-Length: 1000000\r\n"), b"x", 0.02),
    "head byte by byte": (b"HTTP/1.1 200 OK\r\nX-A: ", b"x", 0.02),
    "head line by line": (b"HTTP/1.1 200 OK\r\n", b"X-A: x\r\n", 0.02),
    "early hints without end": (b"", b"HTTP/1.1 103 E\r\n\r\n", 0.0),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_is_given_up(name, tmp_path, make, failures, cache):
    servers: list[RudeServer] = []
    with RudeServer(lambda _number, _head: drip(servers, *ENDLESS[name])) as server:
        servers.append(server)
        options = quick(stall_timeout_s=0.5)
        with pytest.raises(InputError, match="could not be fetched after 3 attempts"):
            fetch(f"{server.url}/f.bin", cache=cache, options=options)
        send(make(f"{server.url}/c", options=options), tmp_path)
        assert len(server.heads) <= 2 * ATTEMPTS
    # Of an answer that begins with 200 an upload reads no more.
    assert len(failures) == (0 if name == "body byte by byte" else 1)


def test_a_server_that_reads_nothing_is_given_up(tmp_path, make, failures):
    hold = threading.Event()

    def never(_number: int, _head: bytes) -> bytes:
        hold.wait(WAIT_S)
        return b""

    with RudeServer(never, reads_body=False) as server:
        send(make(f"{server.url}/c", options=quick(stall_timeout_s=0.3)), tmp_path, b"w" * 30_000_000)
        hold.set()
    [failure] = failures
    assert "WriteTimeout" in failure.reason


@pytest.mark.parametrize("status", ["200 OK", "500 E"])
def test_the_endless_body_of_an_answer_is_not_read(status, tmp_path, make, failures):
    sent = itertools.count()

    def flood(_number: int, _head: bytes) -> Iterator[bytes]:
        yield http_answer(status, "Transfer-Encoding: chunked\r\n")
        while next(sent) < 1_000:
            yield b"10000\r\n" + b"x" * 65536 + b"\r\n"

    with RudeServer(flood) as server:
        send(make(f"{server.url}/c"), tmp_path)
        assert len(server.heads) == (1 if status == "200 OK" else ATTEMPTS)
    assert len(failures) == (0 if status == "200 OK" else 1)
    assert next(sent) < 1_000


def test_no_cookie_is_kept(make, failures):
    def answer(number: int, _head: bytes) -> bytes:
        return http_answer("200 OK", f"Set-Cookie: c{number}={'x' * 1000}\r\nContent-Length: 0\r\n")

    with RudeServer(answer) as server:
        uploader = make(f"{server.url}/c", limits=UploadLimits(linger_s=0.0, max_batch_points=1))
        for step in range(20):
            uploader.upload_metrics(step=step, metrics={"loss": 1.0})
        assert uploader.drain(WAIT_S) == []
        assert len(server.heads) == 20
        assert [head for head in server.heads if b"cookie" in head.lower()] == []


def test_a_body_without_end_leaves_room_for_others_on_the_disk(cache, monkeypatch):
    free_bytes = input_cache.shutil.disk_usage(cache.root.parent).free
    monkeypatch.setattr(input_cache, "MIN_FREE_BYTES", max(0, free_bytes - (24 << 20)))
    monkeypatch.setattr(inputs, "ROOM_BYTES", 1 << 20)

    def flood(_number: int, _head: bytes) -> Iterator[bytes]:
        yield http_answer("200 OK", "Transfer-Encoding: chunked\r\n")
        while True:
            yield b"10000\r\n" + b"x" * 65536 + b"\r\n"

    with RudeServer(flood) as server:
        with pytest.raises(InputError, match="are reserved"):
            fetch(f"{server.url}/f.bin", cache=cache, options=quick())
        assert len(server.heads) == 1
    assert blobs_and_parts(cache) == []


def test_what_could_never_fit_is_refused_before_a_byte_of_it(cache):
    with RudeServer(lambda _number, _head: REFUSED["longer than any disk"]) as server:
        with pytest.raises(InputError, match="are free"):
            fetch(f"{server.url}/f.bin", cache=cache, options=quick())
        assert len(server.heads) == 1
    assert blobs_and_parts(cache) == []


def meta_with(entry: dict[str, Any]) -> dict[str, Any]:
    fields = {"run_id": "r", "attempt": 1, "step": 1, "epoch": 0, "final": False}
    return {"schema_version": "trainer_checkpoint.v1", **fields, "files": [entry]}


@pytest.mark.parametrize("what", ["the meta file", "a file that it lists"])
def test_a_checkpoint_brings_no_more_than_its_meta_says(what, http_server, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_META_BYTES", 1_000)
    meta = meta_with({"name": "step-00000001.pt", "size_bytes": 10, "hash": f"sha256:{'0' * 64}"})
    if what == "the meta file":
        meta["padding"] = "x" * 2_000
    http_server.files["/step-00000001.meta.json"] = json.dumps(meta).encode()
    http_server.files["/step-00000001.pt"] = b"x" * 1_000_000
    with pytest.raises(InputError, match="expected at most"):
        materialize_inputs(
            base_model_ref=None,
            dataset_parquet_refs=(),
            resume_checkpoint_ref=f"{http_server.url}/step-00000001.meta.json",
            cache=cache,
            base_dir=tmp_path,
            options=quick(),
        )
    assert sum(path.stat().st_size for path in blobs_and_parts(cache)) < 1_000


@pytest.mark.parametrize("name", ["\ud800.pt", "a\nb", "../x", "/etc/x", "x" * 5_000])
def test_a_name_that_no_file_can_have_is_an_input_error(name, http_server, tmp_path, cache):
    meta = meta_with({"name": name, "size_bytes": 3, "hash": f"sha256:{'0' * 64}"})
    http_server.files["/s.meta.json"] = json.dumps(meta).encode()
    http_server.always.clear()
    with pytest.raises(InputError):
        materialize_inputs(
            base_model_ref=None,
            dataset_parquet_refs=(),
            resume_checkpoint_ref=f"{http_server.url}/s.meta.json",
            cache=cache,
            base_dir=tmp_path,
            options=quick(),
        )


@pytest.mark.parametrize("path", ["/\ud800", "/a b", "/ä", "/%", "/%ff", "/a\u202eb", "/" + "a" * 250])
def test_odd_letters_in_a_ref_are_a_file_or_an_input_error(path, cache):
    answer = http_answer("200 OK", "Content-Length: 3\r\n", b"abc")
    with RudeServer(lambda _number, _head: answer) as server:
        ref = f"{server.url}{path}"
        if "\ud800" in path:
            with pytest.raises(InputError):
                fetch(ref, cache=cache, options=quick())
        else:
            assert fetch(ref, cache=cache, options=quick()).path.read_bytes() == b"abc"


# Somebody else's files in the cache


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_of_ours_in_the_cache_is_neither_read_nor_written_through(
    kind, http_server, tmp_path, cache
):
    url = f"{http_server.url}/f.bin"
    http_server.files["/f.bin"] = b"content"
    digest = hashlib.sha256(b"content").hexdigest()
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    key = key_of(f"http:{url}")
    for place in (
        f"partial/{key}",
        f"partial/{key}.json",
        f"index/{key}.json",
        f"sha256/{digest[:2]}/{digest}",
    ):
        path = cache.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    for ref in (url, f"{url}#sha256={digest}"):
        found = fetch(ref, cache=cache, options=quick())
        assert found.path.read_bytes() == b"content"
        assert not cache.blob_path(f"sha256:{digest}").is_symlink()
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("digest", ["sha256:../../../victim", "sha256:", "md5:0", "x" * 10_000])
def test_an_index_that_was_tampered_with_leads_nowhere(digest, http_server, tmp_path, cache):
    url = f"{http_server.url}/f.bin"
    http_server.files["/f.bin"] = b"content"
    fetch(url, cache=cache, options=quick())
    index = cache.root / "index" / f"{key_of(f'http:{url}')}.json"
    record = json.loads(index.read_text()) | {"digest": digest}
    index.write_text(json.dumps(record))
    assert fetch(url, cache=cache, options=quick()).path.read_bytes() == b"content"


# Object stores

S3_FAULTS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "500": (500, {}, b"<Error><Code>InternalError</Code><Message>x</Message></Error>"),
    "503": (503, {}, b"<Error><Code>SlowDown</Code><Message>x</Message></Error>"),
    "403": (403, {}, b"<Error><Code>AccessDenied</Code><Message>x</Message></Error>"),
    "409": (409, {}, b"<Error><Code>OperationAborted</Code><Message>x</Message></Error>"),
    "404": (404, {}, b"<Error><Code>NoSuchBucket</Code><Message>x</Message></Error>"),
    "301": (301, {"Location": "http://127.0.0.1:9/elsewhere"}, b"<Error><Code>PermanentRedirect</Code></Error>"),
    "garbage": (400, {}, b"\x00\xff garbage"),
}  # fmt: skip


@pytest.mark.parametrize("name", S3_FAULTS)
@pytest.mark.parametrize("where", ["PUT", "POST"])
def test_an_object_that_the_store_refused_is_never_said_to_be_there(
    name, where, s3_server, tmp_path, make, failures
):
    def fault(method: str, _path: str) -> tuple[int, dict[str, str], bytes] | None:
        return S3_FAULTS[name] if method == where else None

    with FaultyStore(s3_server.endpoint, fault) as store:
        options = quick(object_store=ObjectStoreOptions(s3_endpoint=store.endpoint, s3_region="us-east-1"))
        send(make(f"s3://{s3_server.bucket}/run", options=options), tmp_path)
        assert len([one for one in store.requests if one[0] in ("PUT", "POST")]) <= 2 * ATTEMPTS
    assert len(failures) == 1
    assert "Contents" not in s3_server.client.list_objects_v2(Bucket=s3_server.bucket)


def test_a_store_that_kept_less_than_it_took_is_found_out(s3_server, tmp_path, make, failures):
    def fault(method: str, path: str) -> tuple[int, dict[str, str], bytes] | None:
        is_look = method == "HEAD" and path.endswith(
            (".pt", ".part")
        )  # a part: it seems to replace an object
        return (200, {"Content-Length": "7", "ETag": '"x"'}, b"") if is_look else None

    with FaultyStore(s3_server.endpoint, fault) as store:
        options = quick(object_store=ObjectStoreOptions(s3_endpoint=store.endpoint, s3_region="us-east-1"))
        send(make(f"s3://{s3_server.bucket}/run", options=options), tmp_path)
    [failure] = failures
    assert "7 of 100000 bytes were stored" in failure.reason


def test_a_store_that_takes_its_time_holds_a_bounded_part_of_a_file_in_memory(
    s3_server, tmp_path, make, failures, monkeypatch
):
    monkeypatch.setattr(upload_endpoints, "MAX_WAITING_BYTES", 16 << 20)
    hold = threading.Event()
    num_read = 0
    checked = upload_endpoints._checked

    def counted(chunks: Iterator[bytes], check: Any) -> Iterator[bytes]:
        nonlocal num_read
        for chunk in checked(chunks, check):
            num_read += len(chunk)
            yield chunk

    monkeypatch.setattr(upload_endpoints, "_checked", counted)

    def fault(method: str, path: str) -> None:
        if method == "PUT" and "partNumber" in path:
            hold.wait(WAIT_S)

    with FaultyStore(s3_server.endpoint, fault) as store:
        options = quick(object_store=ObjectStoreOptions(s3_endpoint=store.endpoint, s3_region="us-east-1"))
        path = tmp_path / "big.pt"
        with path.open("wb") as file:
            file.truncate(64 << 20)
        uploader = make(f"s3://{s3_server.bucket}/run", options=options)
        uploader.upload_checkpoint_files(local_path=path, meta_path=None, step=1)
        wait_until(lambda: any("partNumber" in path for _, path in store.requests))
        wait_until(lambda: num_read >= 16 << 20)
        assert uploader.drain(1.0)  # nothing more is read meanwhile, for as long as one cares to wait
        assert num_read == 16 << 20
        hold.set()
        uploader.close(WAIT_S)


# What is told of failures


class SayingReporter:
    """As much of a reporter as an upload session needs."""

    attempt = 1

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, message: str, **_more: object) -> None:
        self.said.append(message)

    def flush(self) -> None: ...


def test_a_target_that_is_wrong_for_weeks_is_told_a_bounded_number_of_times(monkeypatch):
    from gen_worker.contract.job.spec import TrainingJobSpec
    from gen_worker.errors import UploadError
    from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
    from gen_worker.trainer.attempt.upload_session import UploadSession

    reporter = SayingReporter()
    job = TrainingJobSpec(
        run_id="run-1", max_steps=1, uploads=UploadsSpec(metrics_url="http://127.0.0.1:9/metrics")
    )
    nowhere = Path("/nowhere")
    environment = WorkerEnvironment(
        job_spec_path=nowhere,
        checkpoints_dir=nowhere,
        samples_dir=nowhere,
        events_path=nowhere,
        cache_dir=nowhere,
    )
    session = UploadSession(environment, job, None, reporter, StopSignal())  # type: ignore[arg-type]
    for step in range(10_000):
        session._on_failure(
            UploadFailure(kind="metrics", path=None, step=step, reason="the server answered 404")
        )
    assert len(reporter.said) < 40
    assert "(8192 so far)" in reporter.said[-1]
    with pytest.raises(UploadError, match=r"10000 uploads failed .* and 9997 more"):
        session.settle()
    session.close()


@pytest.mark.parametrize(
    "value",
    [
        "Fri, 31 Dec 9999 23:59:59 -0000",
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Mon, 01 Jan 0100 00:00:00 +2359",
        "Mon, 99 Jan 2026 99:99:99 GMT",
        "²",
        "-5",
        "1" * 400,
        "\x00",
    ],
)  # fmt: skip
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Etc/GMT+12"])
def test_no_date_of_a_server_is_an_error_of_ours(value, zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        wait_s = parse_retry_after_s(value, now=1_700_000_000.0)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert wait_s is None or wait_s >= 0
