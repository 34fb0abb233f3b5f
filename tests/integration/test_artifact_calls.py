"""ListArtifacts and ReadArtifact through the clients: every byte, only those bytes, and only for who may."""

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from service_host import LOOPBACK, Host, job

import trn
from artifact_samples import make_mp4
from trn.core import errors
from trn.proto.records import Artifact


async def report(host: Host, run_id: str, contents: dict[str, bytes], *, kind: str = "sample") -> None:
    """A worker wrote these files and named each in an event; all of them are recorded when this returns."""
    folder = host.home.run(run_id)
    folder.samples.mkdir(parents=True, exist_ok=True)
    run = host.registry.get(run_id)
    lines = []
    for seq, (name, content) in enumerate(contents.items(), run.last_seq + 1):
        path = folder.samples / name
        path.write_bytes(content)
        event: dict[str, Any] = {
            "event": kind,
            "seq": seq,
            "run_id": run_id,
            "attempt": 1,
            "timestamp_ms": 1000 + seq,
            "nonce": run.nonce,
            "path": str(path),
            "step": seq,
        }
        lines.append(msgspec.json.encode(event) + b"\n")
    with folder.events.open("ab") as file:
        file.write(b"".join(lines))
    await host.ingest.unfollow(run_id)
    host.ingest.follow(run_id, 1)


async def started(host: Host, run_id: str) -> None:
    await host.add_run(run_id)
    await host.start(run_id)


async def read(client: trn.AsyncClient, artifact: Artifact | str, *where: int) -> bytes:
    artifact_id = artifact if isinstance(artifact, str) else artifact.artifact_id
    return b"".join([piece async for piece in client.read_artifact(artifact_id, *where)])


def test_artifacts_are_listed_by_kind_and_page_by_page_newest_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await started(host, "a")
            await report(host, "a", {f"{number}.txt": b"x" for number in range(25)})
            await report(host, "a", {"a.mp4": make_mp4(), "empty.mp4": b""}, kind="video")
            found = [artifact async for artifact in client.artifacts("a", page_size=10)]
            assert [artifact.step for artifact in found] == list(range(27, 0, -1))
            samples = [artifact async for artifact in client.artifacts("a", kind="sample", page_size=7)]
            assert samples == found[2:]
            refused, video = found[:2]
            assert (video.kind, video.name, video.media_type) == ("video", "a.mp4", "video/mp4")
            assert (video.state, video.is_present, video.reason) == ("present", True, "")
            assert video.sha256 == hashlib.sha256(make_mp4()).hexdigest()
            assert (refused.state, refused.is_present, refused.reason) == (
                "refused",
                False,
                "the file is empty",
            )
            assert refused.cause.id == "artifact-empty"
            run = await client.get("a")
            assert (run.newest_video, run.num_refused_artifacts) == (video.artifact_id, 1)
            with pytest.raises(errors.NotFoundError, match="refused: the file is empty"):
                await read(client, refused)
            with pytest.raises(
                errors.InvalidRequestError, match="kind is 'movie', expected one of checkpoint"
            ):
                await anext(client.artifacts("a", kind="movie"))
            with pytest.raises(errors.NotFoundError):
                await anext(client.artifacts("b"))

    asyncio.run(main())


def test_any_range_of_a_large_artifact_is_read_exactly(tmp_path: Path) -> None:
    content = random.Random(7).randbytes(3_500_000)

    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await started(host, "a")
            await report(host, "a", {"large": content})
            artifact = await anext(client.artifacts("a"))
            assert await read(client, artifact) == content
            size = len(content)
            for offset, length in (
                (0, 1),
                (size - 1, 1),
                (1 << 20, 1 << 20),
                (5, 2_000_000),
                (size - 9, 100),
            ):
                assert await read(client, artifact, offset, length) == content[offset : offset + length]
            assert await read(client, artifact, 3_000_000) == content[3_000_000:]
            assert await read(client, artifact, size) == b""
            with pytest.raises(errors.InvalidRequestError, match="has 3500000 bytes"):
                await read(client, artifact, size + 1)
            assert host.service.streams.num_open == 0

    asyncio.run(main())


def test_a_file_that_changes_before_or_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await started(host, "a")
            await report(host, "a", {"large": bytes(40_000_000), "small": b"1234"})
            small, large = [artifact async for artifact in client.artifacts("a")]
            path = host.home.run("a").samples
            (path / "small").write_bytes(b"4321")
            with pytest.raises(errors.ConflictError, match="changed after it was recorded"):
                await read(client, small)
            pieces = client.read_artifact(large.artifact_id)
            await anext(pieces)
            with (path / "large").open("r+b") as file:
                file.write(b"other bytes")
            with pytest.raises(errors.ConflictError, match="changed after it was recorded"):
                async for _ in pieces:
                    pass
            (path / "large").unlink()
            with pytest.raises(errors.NotFoundError, match="was deleted"):
                await read(client, large)
            with pytest.raises(errors.NotFoundError, match="there is no artifact"):
                await read(client, "../../token")

    asyncio.run(main())


def test_a_runs_token_reads_the_artifacts_of_its_run_and_no_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host, trn.AsyncClient(tmp_path) as owner:
            mine = await owner.submit(job(run_id="mine", max_steps=1))
            await owner.submit(job(run_id="yours", max_steps=2))
            for run_id in ("mine", "yours"):
                await host.start(run_id)
                await report(host, run_id, {"a.txt": run_id.encode()})
            yours = await anext(owner.artifacts("yours"))
            async with trn.AsyncClient(address=host.tcp, token=mine.run_token, is_insecure=True) as client:
                artifact = await anext(client.artifacts("mine"))
                assert await read(client, artifact) == b"mine"
                with pytest.raises(errors.ForbiddenError):
                    await anext(client.artifacts("yours"))
                with pytest.raises(errors.ForbiddenError):
                    await read(client, yours)
                with pytest.raises(errors.ForbiddenError):  # and it is not said whether there is such a one
                    await read(client, "nothing")

    asyncio.run(main())


def test_the_blocking_client_lists_and_reads(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await started(host, "a")
            await report(host, "a", {"a.txt": b"content"})
            await asyncio.to_thread(use)

    def use() -> None:
        with trn.Client(tmp_path) as client:
            (artifact,) = client.artifacts("a", kind="sample")
            assert b"".join(client.read_artifact(artifact.artifact_id, 3, 2)) == b"te"

    asyncio.run(main())
