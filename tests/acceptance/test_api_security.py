"""Who may call the daemon, and what no caller can do to it."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from service_host import LOOPBACK, Host, job, until

import trn
from trn.core import errors
from trn.core.home import Home, socket_address
from trn.core.settings import ListenSettings, Settings
from trn.daemon.api.server import MAX_MESSAGE_BYTES, add_ports
from trn.proto import trainer_pb2 as pb
from trn.proto.methods import METHODS
from trn.registry.writer import committed

PATIENCE_S = 60.0
STREAMS = {path.path for path in METHODS.values() if path.is_stream} | {"/grpc.health.v1.Health/Watch"}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PATHS = [
    *(method.path for method in METHODS.values()),
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.health.v1.Health/List",
    REFLECTION,
]
TRAVERSALS = [
    "../a",
    "..",
    "/etc/passwd",
    "a/../../b",
    "a/b",
    "a\0b",
    "a..b",
    ".hidden",
    "a" * 129,
    "-a",
    "ä",
]


@asynccontextmanager
async def tcp(host: Host) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(host.tcp) as channel:
        yield channel


@asynccontextmanager
async def unix(host: Host) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"unix:{socket_address(host.home.socket)}") as channel:
        yield channel


def raw_call(
    channel: grpc.aio.Channel, path: str, request: bytes, metadata: Sequence[tuple[str, str]] = ()
) -> Any:
    """The call with these bytes, whatever they mean."""
    if path == REFLECTION:
        return channel.stream_stream(path)(iter([request]), metadata=metadata, timeout=PATIENCE_S)
    make = channel.unary_stream if path in STREAMS else channel.unary_unary
    return make(path)(request, metadata=metadata, timeout=PATIENCE_S)


async def status(
    channel: grpc.aio.Channel, path: str, request: bytes, metadata: Sequence[tuple[str, str]] = ()
) -> grpc.StatusCode:
    """Its status; OK too where a stream has begun to answer."""
    call = raw_call(channel, path, request, metadata)
    if path in STREAMS or path == REFLECTION:
        reader = call.__aiter__()
        try:
            await anext(reader)
        except (StopAsyncIteration, grpc.aio.AioRpcError):
            return await call.code()  # type: ignore[no-any-return]
        call.cancel()
        return grpc.StatusCode.OK
    return await call.code()  # type: ignore[no-any-return]


def names_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix != ".db-shm")


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


@pytest.mark.parametrize("path", PATHS)
def test_over_tcp_no_call_is_answered_without_a_token(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host, tcp(host) as channel:
            await host.add_run("a")
            for metadata in ([], bearer("x" * 43), bearer(""), [("authorization", "Basic eDp5")]):
                assert await status(channel, path, b"", metadata) == grpc.StatusCode.UNAUTHENTICATED
            assert host.service.streams.num_open == 0

    asyncio.run(main())


def test_over_tcp_the_operators_token_opens_everything_and_the_socket_asks_for_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host, tcp(host) as channel, unix(host) as socket:
            await host.add_run("a")
            host.service.tokens.make_run_token("a")  # the token is made at first need
            operator = bearer(host.home.token.read_text().strip())
            health = METHODS["GetHealth"].path
            assert await status(channel, health, b"", operator) == grpc.StatusCode.OK
            assert await status(socket, health, b"") == grpc.StatusCode.OK
            assert await status(channel, "/grpc.health.v1.Health/Check", b"", operator) == grpc.StatusCode.OK
            watch = METHODS["WatchRuns"].path
            assert await status(channel, watch, b"", operator) == grpc.StatusCode.OK
            assert await status(channel, REFLECTION, b"\x3a\x00", operator) == grpc.StatusCode.OK
            # Whatever a caller says of itself, the transport knows where it came from.
            for name in ("x-forwarded-for", "peer", ":authority-", "forwarded"):
                said = [(name.strip(":-"), "unix:")]
                assert await status(channel, health, b"", said) == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


def test_a_runs_token_does_nothing_for_another_run_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host:
            async with trn.AsyncClient(tmp_path) as owner:
                mine = await owner.submit(job(run_id="mine", max_steps=1))
                await owner.submit(job(run_id="yours", max_steps=2))
                await owner.submit(job(run_id="mine-too", max_steps=3))
            token = mine.run_token
            async with trn.AsyncClient(address=host.tcp, token=token, is_insecure=True) as client:
                assert (await client.get("mine")).run_id == "mine"
                assert await client.metrics("mine") == {}
                assert (await anext(client.watch(run_ids=["mine"]))).run_id == "mine"
                assert [chunk.is_end async for chunk in client.logs("mine")] == [True]
                for refused in (
                    client.get("yours"),
                    client.get("min"),  # a prefix could come to mean another run
                    client.metrics("yours"),
                    client.cancel("yours"),
                    client.submit(job()),
                    client.resume("mine"),
                    client.devices(),
                    client.health(),
                    anext(client.list()),
                    anext(client.watch()),
                    anext(client.watch(run_ids=["yours"])),
                    anext(client.watch(run_ids=["mine", "yours"])),
                    anext(client.events("yours")),
                    anext(client.logs("yours")),
                    anext(client.artifacts("yours")),
                    anext(client.read_artifact("a" * 24)),
                ):
                    with pytest.raises(errors.ForbiddenError):
                        await refused
                assert host.registry.get("yours").state == "PENDING"
                assert (await client.cancel("mine"))[0].state == "CANCELLED"
                assert [event async for event in client.events("mine")] == []
            async with tcp(host) as channel:
                for path in ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", REFLECTION):
                    code = await status(channel, path, b"", bearer(token))
                    assert code == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(main())


def test_a_runs_token_is_good_for_no_run_whose_id_begins_with_its_own_once_that_is_gone(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host:
            async with trn.AsyncClient(tmp_path) as owner:
                mine = await owner.submit(job(run_id="mine", max_steps=1))
                await owner.submit(job(run_id="mine-too", max_steps=3))
                await owner.cancel("mine")
            await committed(host.registry.remove(["mine"]))
            async with trn.AsyncClient(address=host.tcp, token=mine.run_token, is_insecure=True) as client:
                for call in (
                    client.get("mine"),
                    client.metrics("mine"),
                    client.cancel("mine"),
                    anext(client.watch(run_ids=["mine"], is_exact=True)),
                    anext(client.events("mine", is_exact=True)),
                    anext(client.logs("mine", is_exact=True)),
                ):
                    with pytest.raises(errors.NotFoundError):
                        await call
            assert host.registry.get("mine-too").state == "PENDING"

    asyncio.run(main())


@pytest.mark.parametrize("run_id", TRAVERSALS)
def test_an_id_that_could_name_another_place_is_refused_everywhere(tmp_path: Path, run_id: str) -> None:
    secret = tmp_path / "a" / "worker.log"
    secret.parent.mkdir()
    secret.write_text("secret")
    home = tmp_path / "home"

    async def main() -> None:
        async with Host(home) as host, unix(host) as channel:
            await host.add_run("real")
            before = names_below(tmp_path)
            requests: dict[str, Any] = {
                "GetRun": pb.GetRunRequest(run_id=run_id),
                "CancelRun": pb.CancelRunRequest(run_id=run_id),
                "UpdateRun": pb.UpdateRunRequest(run_id=run_id, notes="x"),
                "ResumeRun": pb.ResumeRunRequest(run_id=run_id),
                "WatchRuns": pb.WatchRunsRequest(run_ids=[run_id]),
                "StreamEvents": pb.StreamEventsRequest(run_id=run_id),
                "StreamLogs": pb.StreamLogsRequest(run_id=run_id),
                "GetMetrics": pb.GetMetricsRequest(run_id=run_id),
                "ListArtifacts": pb.ListArtifactsRequest(run_id=run_id),
                "SubmitRun": pb.Submission(config_json=json.dumps(job(run_id=run_id)).encode()),
            }
            for name, request in requests.items():
                code = await status(channel, METHODS[name].path, request.SerializeToString())
                assert (name, code) == (name, grpc.StatusCode.INVALID_ARGUMENT)
            read = pb.ReadArtifactRequest(artifact_id=run_id)
            code = await status(channel, METHODS["ReadArtifact"].path, read.SerializeToString())
            assert code == grpc.StatusCode.NOT_FOUND
            for snapshot in ("../../a", "/etc", "sha256:../x"):
                submit = pb.Submission(config_json=json.dumps(job()).encode(), snapshot=snapshot)
                code = await status(channel, METHODS["SubmitRun"].path, submit.SerializeToString())
                assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert names_below(tmp_path) == before
            assert host.registry.counts() == {"PENDING": 1}

    asyncio.run(main())


def test_random_bytes_are_refused_by_every_call_and_the_daemon_lives(tmp_path: Path) -> None:
    draw = random.Random(7)
    fine = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }

    async def main() -> None:
        async with Host(tmp_path) as host, unix(host) as channel:
            await host.add_run("a")
            for method in METHODS.values():
                # Cut short: the field says that more follows.
                assert await status(channel, method.path, b"\x0a\xff\xff") == grpc.StatusCode.INVALID_ARGUMENT
                for size in (1, 3, 10, 100, 1000):
                    for _ in range(8):
                        code = await status(channel, method.path, draw.randbytes(size))
                        assert (method.name, code in fine) == (method.name, True), code
            assert await status(channel, "/trn.v1.Trainer/Nothing", b"") == grpc.StatusCode.UNIMPLEMENTED
            assert await status(channel, METHODS["GetHealth"].path, b"") == grpc.StatusCode.OK
            await until(lambda: host.service.streams.num_open == 0)

    asyncio.run(main())


def test_a_message_over_the_limit_is_refused_and_the_daemon_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, unix(host) as channel:
            big = pb.Submission(config_json=b"x" * (MAX_MESSAGE_BYTES + 1)).SerializeToString()
            for method in METHODS.values():
                code = await status(channel, method.path, big)
                assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            under = pb.Submission(config_json=b"x" * (2 << 20)).SerializeToString()
            assert await status(channel, METHODS["SubmitRun"].path, under) == grpc.StatusCode.INVALID_ARGUMENT
            assert await status(channel, METHODS["GetHealth"].path, b"") == grpc.StatusCode.OK

    asyncio.run(main())


def test_a_config_without_bottom_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, unix(host) as channel:
            for text in (
                b"[" * 100_000,
                b'{"a":' * 100_000,
                b'{"tags":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
            ):
                request = pb.Submission(config_json=text).SerializeToString()
                code = await status(channel, METHODS["SubmitRun"].path, request)
                assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert host.registry.counts() == {}

    asyncio.run(main())


def test_home_socket_token_and_registry_are_the_owners_alone(tmp_path: Path) -> None:
    async def main() -> None:
        root = tmp_path / "home"
        async with Host(root) as host:
            host.service.tokens.make_run_token("a")
            assert root.stat().st_mode & 0o777 == 0o700
            for path in (host.home.socket, host.home.token, host.home.registry, host.home.metrics):
                assert path.stat().st_mode & 0o077 == 0, path

    asyncio.run(main())


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        (ListenSettings(address="127.0.0.1:0"), "without TLS"),
        (ListenSettings(address="0.0.0.0:0", is_insecure=True), "for loopback alone"),
        (ListenSettings(address="example.com:0", is_insecure=True), "for loopback alone"),
        (ListenSettings(address="[::]:0", is_insecure=True), "for loopback alone"),
        (ListenSettings(address="127.0.0.1:0", certificate="c.pem"), "needs both"),
        (ListenSettings(address="127.0.0.1:0", certificate="/no/c", private_key="/no/k"), "cannot be read"),
        (
            ListenSettings(address="127.0.0.1:0", certificate="c", private_key="k", is_insecure=True),
            "leave one of them out",
        ),
        (ListenSettings(address="nonsense", is_insecure=True), "expected host:port"),
    ],
)
def test_tcp_without_tls_is_refused_with_words_before_anything_is_bound(
    tmp_path: Path, listen: ListenSettings, words: str
) -> None:
    async def main() -> None:
        home = Home(tmp_path)
        server = grpc.aio.server()
        with pytest.raises(errors.InvalidRequestError, match=words):
            add_ports(server, Settings(listen=listen), home)
        assert not home.socket.exists()

    asyncio.run(main())


def test_a_port_that_is_taken_is_an_error_not_a_lottery(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path / "one", listen=LOOPBACK) as first:
            taken = ListenSettings(address=first.tcp, is_insecure=True)
            with pytest.raises(errors.UnavailableError, match="taken"):
                async with Host(tmp_path / "two", listen=taken):
                    pass

    asyncio.run(main())


def test_a_token_is_never_sent_in_the_clear_to_another_machine(tmp_path: Path) -> None:
    async def main() -> None:
        for address in ("192.0.2.1:9", "127.0.0.1.example.com:9", "example.com:9"):
            async with trn.AsyncClient(address=address, token="t" * 40, is_insecure=True) as client:
                with pytest.raises(errors.InvalidRequestError, match="unencrypted"):
                    await client.health()

    asyncio.run(main())


def test_over_tls_the_daemon_is_known_by_its_certificate(tmp_path: Path) -> None:
    for name in ("good", "other"):
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
            f" -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {certificate}"
        )
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    listen = ListenSettings(
        address="127.0.0.1:0",
        certificate=str(tmp_path / "good.pem"),
        private_key=str(tmp_path / "good.key"),
    )

    async def main() -> None:
        async with Host(tmp_path / "home", listen=listen) as host:
            host.service.tokens.make_run_token("a")
            token = host.home.token.read_text().strip()

            def client(**how: Any) -> trn.AsyncClient:
                return trn.AsyncClient(address=host.tcp, patience_s=0, **how)

            async with client(token=token, ca_certificate=tmp_path / "good.pem") as good:
                assert (await good.health()).home == str(host.home.root)
            async with client(ca_certificate=tmp_path / "good.pem") as nobody:
                with pytest.raises(errors.ForbiddenError):
                    await nobody.health()
            async with client(token=token, ca_certificate=tmp_path / "other.pem") as deceived:
                with pytest.raises(errors.UnavailableError):
                    await deceived.health()
            async with client(token=token, is_insecure=True) as careless:
                with pytest.raises(errors.UnavailableError):
                    await careless.health()

    asyncio.run(main())
