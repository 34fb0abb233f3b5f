"""How long a client tries counts from when it last had a daemon, not from when it last heard of a run."""

import asyncio
import time
from pathlib import Path

import pytest
from service_host import Host, until

import trn


class LateClock:
    """The monotonic clock, and what the test adds to it."""

    added_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.added_s


def test_a_watcher_of_a_run_that_says_nothing_outlives_restarts_that_are_far_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LateClock()
    monkeypatch.setattr("trn.client.connection.time", clock)
    seen: list[int] = []

    async def follow(client: trn.AsyncClient) -> None:
        async for event in client.events("a"):
            seen.append(event["seq"])

    async def main() -> None:
        async with trn.AsyncClient(tmp_path, patience_s=60) as client:
            watcher = None
            for _ in range(3):
                async with Host(tmp_path) as host:
                    if watcher is None:
                        await host.add_run("a")
                        watcher = asyncio.create_task(follow(client))
                    await until(lambda host=host: host.service.streams.num_open == 1)
                    clock.added_s += 3600
            async with Host(tmp_path) as host:
                await host.start("a")
                host.write_events("a", 1, 5)
                await host.end("a")
                await watcher
        assert seen == [1, 2, 3, 4, 5]

    asyncio.run(main())
