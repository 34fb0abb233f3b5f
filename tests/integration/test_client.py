"""The client against the real service: a restart of the daemon, a lost reply or a second loop is nobody's business."""

import asyncio
import json
import threading
from contextlib import aclosing
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest
from service_host import Host, job, until

import trn
from trn.core import errors
from trn.core.runs import RunState
from trn.daemon.api import server
from trn.proto import convert
from trn.proto.records import LogChunk, Run

PATIENCE_S = 60.0


class LossyHost(Host):
    """Does what it is asked for, and loses the first replies of some calls on the way back."""

    num_lost = 1
    lossy_calls = ("SubmitRun", "ResumeRun", "CancelRun", "UpdateRun")

    async def build_server(self) -> grpc.aio.Server:
        make = server._make_handler

        def make_lossy(service: Any, method: Any) -> Any:
            handler = make(service, method)
            if method.name not in self.lossy_calls:
                return handler
            return grpc.unary_unary_rpc_method_handler(
                self._losing(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )

        with mock.patch.object(server, "_make_handler", make_lossy):
            return await super().build_server()

    def _losing(self, call: Any) -> Any:
        num_left = self.num_lost

        async def lose(request: Any, context: Any) -> Any:
            nonlocal num_left
            answer = await call(request, context)
            if num_left:
                num_left -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            return answer

        return lose


def test_a_submit_whose_reply_was_lost_after_the_commit_makes_one_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with LossyHost(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            made = await client.submit(job())
            assert [record.run_id for record in host.registry.page()] == [made.run.run_id]

    asyncio.run(main())


def test_another_run_whose_reply_was_lost_is_one_other_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with LossyHost(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("first")
            made = await client.submit(job(name="Ein Lauf!"), force_new=True)
            assert not made.existed
            assert made.run.run_id.startswith("ein-lauf-")
            another = await client.submit(job(name="Ein Lauf!"), force_new=True)
            assert host.registry.counts() == {"PENDING": 3}
            assert another.run.digest == made.run.digest

    asyncio.run(main())


def test_a_resume_and_a_cancel_whose_reply_was_lost_happen_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with LossyHost(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("old")
            run, was_live = await client.cancel("old", "enough")
            assert (run.state, was_live) == ("CANCELLED", False)  # the try that was lost ended it
            resumed = await client.resume("old", force_new=True)
            assert not resumed.existed
            assert {record.run_id for record in host.registry.page()} == {"old", resumed.run.run_id}

    asyncio.run(main())


def test_notes_whose_reply_was_lost_are_of_the_run_that_was_meant(tmp_path: Path) -> None:
    async def main() -> None:
        async with LossyHost(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("old")
            run = await client.update("old", notes="mine", tags={"a": "1"})
            assert (run.run_id, run.notes, run.tags) == ("old", "mine", {"a": "1"})
            assert host.registry.last_change() == run.change, "the repeat changed nothing"

    asyncio.run(main())


def test_a_name_that_is_taken_refuses_nobody_and_runs_at_once_get_numbers_of_their_own(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await client.submit(job(run_id="mine"))
            made = await asyncio.gather(
                client.submit(job(run_id="mine"), force_new=True),
                *(client.submit(job(run_id="mine", max_steps=number)) for number in range(2, 8)),
            )
            assert sorted(each.run.run_id for each in made) == [f"mine.{number}" for number in range(2, 9)]
            assert {each.run.family for each in made} == {"mine"}
            assert not any(each.existed for each in made)
            record = host.registry.get("mine.3")
            assert (record.config["run_id"], record.member) == ("mine.3", 3)
            assert (await client.get("mine")).run_id == "mine.8"
            assert (await client.get("mine.1")).run_id == "mine"
            assert (await client.get("mine", is_exact=True)).run_id == "mine"

    asyncio.run(main())


def test_a_name_that_means_two_runs_removes_none_of_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path), trn.AsyncClient(tmp_path) as client:
            for number in (1, 2, 3):
                run = (await client.submit(job(run_id="mine", max_steps=number))).run
                await client.cancel(run.run_id, is_exact=True)
            with pytest.raises(errors.AmbiguousError, match=r"give mine\.1 or mine\.3"):
                await client.remove(["mine"])
            assert [freed.name for freed in await client.remove("mine.3")] == ["mine.3"]
            assert [freed.name for freed in await client.remove(["mine.1"])] == ["mine"]
            assert [freed.name for freed in await client.remove(["mine"])] == ["mine.2"]

    asyncio.run(main())


def test_one_name_is_one_name_and_not_its_letters(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("old")
            points = [(1, 1, "train/loss", 1, 0.5, 1)]
            host.metrics.add("old", offset=1, last_seq=1, points=points).result()
            assert (await client.metrics("old", "train/loss")).keys() == {"train/loss"}
            assert (await client.lineage("old", "train/loss")).metrics.keys() == {"train/loss"}

    asyncio.run(main())


def test_a_restart_in_the_middle_of_everything_costs_only_time(tmp_path: Path) -> None:
    """Watch, events, logs and wait go over two daemons, and nothing is missing or double."""

    async def main() -> None:
        seen: list[Run] = []
        events: list[int] = []
        logs: list[LogChunk] = []

        async def watch(client: trn.AsyncClient) -> None:
            async with aclosing(client.watch(run_ids=["a"])) as changes:
                async for run in changes:
                    seen.append(run)
                    if run.is_terminal:
                        return

        async def follow_events(client: trn.AsyncClient) -> None:
            async for event in client.events("a"):
                events.append(event["seq"])

        async def follow_logs(client: trn.AsyncClient) -> None:
            async for chunk in client.logs("a", is_followed=True):
                logs.append(chunk)

        async with asyncio.timeout(PATIENCE_S), trn.AsyncClient(tmp_path) as client:
            async with Host(tmp_path) as host:
                await host.add_run("a")
                await host.start("a")
                host.write_events("a", 1, 100)
                host.home.run("a").log.write_bytes(b"one\n")
                tasks = [asyncio.create_task(work(client)) for work in (watch, follow_events, follow_logs)]
                waiter = asyncio.create_task(client.wait("a"))
                await until(lambda: len(events) == 100 and bool(logs) and bool(seen))
                await until(lambda: host.service.streams.num_open == 4)
            # Nobody is there now; the worker writes on.
            with host.home.run("a").log.open("ab") as file:
                file.write(b"two\n")
            async with Host(tmp_path) as host:
                host.ingest.follow("a", 1)
                host.write_events("a", 101, 200)
                await until(lambda: len(events) == 200)
                await host.end("a")
                assert (await waiter).state == "COMPLETED"
                await asyncio.gather(*tasks)
        assert events == list(range(1, 201))
        assert b"".join(chunk.data for chunk in logs) == b"one\ntwo\n"
        assert logs[-1].is_end
        assert seen[-1].state == "COMPLETED"
        assert [run.change for run in seen] == sorted({run.change for run in seen})

    asyncio.run(main())


def test_a_call_waits_for_a_daemon_that_is_being_restarted(tmp_path: Path) -> None:
    async def main() -> None:
        async with trn.AsyncClient(tmp_path) as client:
            asked = asyncio.create_task(client.submit(job()))
            await asyncio.sleep(0)
            async with Host(tmp_path) as host:
                assert (await asked).run.run_id in [record.run_id for record in host.registry.page()]

    asyncio.run(main())


@pytest.mark.parametrize("patience_s", [0.0, 0.3])
def test_where_no_daemon_is_the_error_says_where_and_how_to_start_one(
    tmp_path: Path, patience_s: float
) -> None:
    async def main() -> None:
        async with trn.AsyncClient(tmp_path, patience_s=patience_s) as client:
            with pytest.raises(errors.UnavailableError) as caught:
                await client.get("a")
            assert str(tmp_path / "daemon.sock") in str(caught.value)
            assert f": `trn --home {tmp_path} daemon start` starts one" in str(caught.value)
            assert "failed to connect" not in str(caught.value)
            with pytest.raises(errors.UnavailableError):
                await anext(client.watch())

    asyncio.run(main())


def test_a_daemon_that_does_not_answer_is_not_waited_for_without_end(tmp_path: Path) -> None:
    class Stuck(Host):
        async def build_server(self) -> grpc.aio.Server:
            async def hang(_service: object) -> Any:
                await asyncio.Event().wait()

            self.service.get_health = MethodType(hang, self.service)  # type: ignore[method-assign]
            return await super().build_server()

    async def main() -> None:
        async with Stuck(tmp_path), trn.AsyncClient(tmp_path, timeout_s=0.2) as client:
            with pytest.raises(errors.UnavailableError, match="did not answer GetHealth in time"):
                await client.health()

    asyncio.run(main())


def test_a_refusal_is_not_tried_again_and_has_the_class_of_its_cause(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("abc-1")
            await host.add_run("abc-2")
            for run_id, kind in (
                ("missing", errors.NotFoundError),
                ("abc", errors.AmbiguousError),
                ("../../etc", errors.InvalidRequestError),
                ("", errors.InvalidRequestError),
            ):
                with pytest.raises(errors.TrnError) as caught:
                    await client.get(run_id)
                assert type(caught.value) is kind
            with pytest.raises(errors.InfeasibleError, match="has 2"):
                await client.submit(job(resources={"gpus": 64}))
            with pytest.raises(errors.ConflictError):
                await client.resume("abc-1")
            with pytest.raises(errors.NotFoundError):
                await anext(client.events("missing"))
            num_calls = host.service.num_calls

            async def refuse(*_values: object, **_names: object) -> None:
                raise errors.UnavailableError("the registry could not be written: disk full")

            host.registry.add = refuse  # type: ignore[method-assign,assignment]
            with pytest.raises(errors.UnavailableError, match="disk full"):
                await client.submit(job())
            assert host.service.num_calls == num_calls + 1

    asyncio.run(main())


def test_a_state_of_a_newer_daemon_reaches_the_caller_as_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {state: 40 + index for index, state in enumerate(RunState)}

    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("a")
            # A daemon with other states than ours.
            monkeypatch.setattr(convert, "_number_of", lambda _enum, state: numbers[state])
            assert (await client.get("a")).state == "UNKNOWN_40"
            assert [run.state async for run in client.list()] == ["UNKNOWN_40"]
            assert (await anext(client.watch())).state == "UNKNOWN_40"

    asyncio.run(main())


def test_a_job_is_taken_from_a_file_with_its_folder_as_the_base(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job(name="one")))
    (folder / "job.yaml").write_text("trainer: nowhere:Trainer\nmax_steps: 1\nmock_batches: [[1]]\n")
    (folder / "job.toml").write_text('trainer = "nowhere:Trainer"\nmax_steps = 2\nmock_batches = [[1]]\n')
    (folder / "list.json").write_text("[1]")
    (folder / "broken.toml").write_text("= 2")

    async def main() -> None:
        async with Host(tmp_path / "home") as host, trn.AsyncClient(host.home.root) as client:
            for name in ("job.json", "job.yaml", "job.toml"):
                made = await client.submit(folder / name)
                assert made.run.base_dir == str(folder)
                assert (await client.submit(folder / name)).existed
            for name in ("list.json", "broken.toml", "missing.json"):
                with pytest.raises(errors.InvalidRequestError, match=name):
                    await client.submit(folder / name)
            with pytest.raises(errors.InvalidRequestError, match="cannot be sent"):
                await client.submit(job(tags={"x": object()}))
            with pytest.raises(errors.InvalidRequestError, match="32 bits"):
                await client.submit(job(), priority=1 << 40)

    asyncio.run(main())


def test_lists_go_over_all_pages(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            for number in range(7):
                await host.add_run(f"run-{number}")
            await host.commit(host.registry.want_cancel("run-3", "enough"))
            found = [run.run_id async for run in client.list(page_size=2)]
            assert found == [record.run_id for record in host.registry.page()]
            assert [run.run_id async for run in client.list(states=["CANCELLED"])] == ["run-3"]
            assert [run.run_id async for run in client.list(states=["NEWER"])] == []
            assert None not in [run.config async for run in client.list(with_config=True)]

    asyncio.run(main())


def test_what_a_daemon_has_and_is_can_be_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("a")
            await host.commit(host.registry.claim("a", ["cuda:1"]))
            await host.commit(host.registry.quarantine("cuda:0", "a stranger holds it"))
            machine = await client.devices()
            assert [(device.device_id, device.run_id) for device in machine.devices] == [
                ("cuda:0", ""),
                ("cuda:1", "a"),
            ]
            assert machine.devices[0].quarantine_reason == "a stranger holds it"
            assert (machine.cpus, machine.cpus_held) == (8, 1)
            health = await client.health()
            assert health.runs_by_state == {"DISPATCHING": 1}
            assert health.home == str(tmp_path)
            assert health.launcher == "no launcher in this test"
            details = await client.details("a")
            assert [attempt.number for attempt in details.attempts] == [1]
            assert details.folder == str(tmp_path / "runs" / "a")

    asyncio.run(main())


class HostThread:
    """A daemon in a thread of its own, for clients that block."""

    def __init__(self, root: Path) -> None:
        self.host = Host(root)
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "HostThread":
        self._thread.start()
        assert self._is_up.wait(PATIENCE_S)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.host:
            self._is_up.set()
            await self._stop.wait()

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def call(self, function: Any, *values: Any) -> None:
        async def call() -> None:
            function(*values)

        self.do(call())


def test_the_blocking_client_does_all_that_the_other_does(tmp_path: Path) -> None:
    with HostThread(tmp_path) as daemon, trn.Client(tmp_path) as client:
        made = client.submit(job(run_id="a"))
        assert client.submit(job(run_id="a")).existed
        assert client.get("a").digest == made.run.digest
        assert [run.run_id for run in client.list()] == ["a"]
        watch = client.watch()
        assert next(watch).state == "PENDING"
        daemon.do(daemon.host.start("a"))
        while next(watch).state != "RUNNING":
            pass
        watch.close()  # type: ignore[attr-defined]
        daemon.call(daemon.host.write_events, "a", 1, 50)
        events = client.events("a")
        assert [next(events)["seq"] for _ in range(50)] == list(range(1, 51))
        (tmp_path / "runs" / "a" / "worker.log").write_bytes(b"hello\n")
        with pytest.raises(TimeoutError):
            client.wait("a", timeout_s=0.1)
        daemon.do(daemon.host.end("a", is_saved=False))
        assert client.wait("a").state == "COMPLETED"
        assert list(events) == []
        assert b"".join(chunk.data for chunk in client.logs("a", is_followed=True)) == b"hello\n"
        assert client.metrics("a", max_points=10)["train/loss"].num_points == 50
        assert client.cancel("a")[1] is False
        client.update("a", notes="the first", tags={"team": "vision", "stage": "x"})
        changed = client.update("a", tags={"stage": None})
        assert (changed.notes, changed.tags) == ("the first", {"team": "vision"})
        changed = client.update("a", name="Baseline")
        assert (changed.name, changed.notes, client.get("a").name) == ("Baseline", "the first", "Baseline")
        assert client.details("a").attempts[0].ended_ms is not None
        assert client.devices().cpus == 8
        assert b"".join(client.event_lines("a")).count(b"\n") == 50
        resumed = client.resume("a", overrides={"max_steps": 100, "mock_batches": [[1]] * 100})
        assert resumed.run.parent_run_id == "a"
        assert client.health().num_watchers == 0
    with pytest.raises(errors.ConflictError, match="closed"):
        client.get("a")


def test_the_blocking_client_works_in_the_thread_of_a_running_loop(tmp_path: Path) -> None:
    async def main(client: trn.Client) -> str:
        return client.submit(job(run_id="a")).run.run_id

    with HostThread(tmp_path), trn.Client(tmp_path) as client:
        assert asyncio.run(main(client)) == "a"
        assert asyncio.run(main(client)) == "a"


def test_a_blocking_client_is_refused_after_a_fork_and_an_async_one_in_another_loop(tmp_path: Path) -> None:
    with HostThread(tmp_path):
        with trn.Client(tmp_path) as blocking:
            blocking.health()
            pid, blocking._pid = blocking._pid, 1
            with pytest.raises(errors.ConflictError, match="fork"):
                blocking.health()
            blocking._pid = pid
        client = trn.AsyncClient(tmp_path)

        async def ask_and_leave() -> None:
            await client.health()
            await client.close()

        asyncio.run(ask_and_leave())
        with pytest.raises(errors.ConflictError, match="another event loop"):
            asyncio.run(ask_and_leave())


def test_two_loops_in_two_threads_each_have_a_client(tmp_path: Path) -> None:
    found: dict[int, list[str]] = {}
    faults: list[dict[str, Any]] = []

    async def work(number: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
        async with trn.AsyncClient(tmp_path) as client, asyncio.TaskGroup() as group:
            watcher = group.create_task(watch_all(client))
            for index in range(40):
                config = job(run_id=f"r-{number}-{index}", max_steps=1000 * number + index + 1)
                made = await client.submit(config)
                found.setdefault(number, []).append(made.run.run_id)
            assert len(await watcher) == 160

    async def watch_all(client: trn.AsyncClient) -> set[str]:
        seen: set[str] = set()
        async with aclosing(client.watch()) as changes:
            async for run in changes:
                seen.add(run.run_id)
                if len(seen) == 160:
                    break
        return seen

    with HostThread(tmp_path) as daemon:
        threads = [threading.Thread(target=lambda n=number: asyncio.run(work(n))) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert {number: len(ids) for number, ids in found.items()} == dict.fromkeys(range(4), 40)
        with trn.Client(tmp_path) as client:
            assert len(list(client.list())) == 160
        assert daemon.host.registry.counts() == {"PENDING": 160}
    # gRPC may have told a loop that was closed by then that something had ended: noise, nothing was lost by it.
    assert [fault for fault in faults if "Event loop is closed" not in str(fault.get("exception"))] == []
