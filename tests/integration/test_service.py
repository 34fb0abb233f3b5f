"""The service over the real registry, ingest and broadcaster: what it promises to whoever calls it."""

import asyncio
import contextlib
import errno
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from service_host import INVENTORY, Host, job, until

import trn
from gen_worker.errors import Fault
from trn.client.caller_environment import tell_environment
from trn.core.errors import NotFoundError
from trn.core.home import socket_address
from trn.core.runs import RunState
from trn.daemon.api.secret_values import reveal
from trn.daemon.api.server import MAX_MESSAGE_BYTES
from trn.daemon.intake.submission import Submission
from trn.executors.base import ImportCheck, LaunchPlan
from trn.proto import trainer_pb2 as pb
from trn.proto.methods import METHODS
from trn.registry.base import NewRun
from trn.registry.metrics import MetricStore

PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def channel_to(host: Host, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    settings = [("grpc.use_local_subchannel_pool", 1), *options.items()]
    async with grpc.aio.insecure_channel(
        f"unix:{socket_address(host.home.socket)}", options=settings
    ) as channel:
        yield channel


def method(channel: grpc.aio.Channel, name: str) -> Any:
    found = METHODS[name]
    make = channel.unary_stream if found.is_stream else channel.unary_unary
    return make(
        found.path,
        request_serializer=found.request.SerializeToString,
        response_deserializer=found.response.FromString,
    )


def submit_request(**changes: Any) -> pb.Submission:
    return pb.Submission(config_json=json.dumps(job(**changes)).encode())


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """How it was refused, also where answers came first."""
    async with asyncio.timeout(PATIENCE_S):
        return await call.code(), await call.details()


def test_a_call_needs_no_transport_and_answers_with_records(tmp_path: Path) -> None:
    """What another transport than gRPC programs against."""

    async def main() -> None:
        async with Host(tmp_path) as host:
            service = host.service
            made = await service.submit_run(Submission(config_json=json.dumps(job(name="one")).encode()))
            assert (await service.get_run(made.run.run_id)).run == host.registry.get(made.run.run_id)
            assert (await service.cancel_run(made.run.run_id, reason="enough")).was_live
            with pytest.raises(NotFoundError):
                await service.get_run("missing")
            with host.service.streams.place():
                watching = service.watch_runs(after_change=0, watcher="a test")
                news = await anext(watching)
                assert isinstance(news, list)
                assert [item.item.run_id for item in news] == [made.run.run_id]
                await watching.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_runs_are_listed_by_tag_and_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit, list_ = method(channel, "SubmitRun"), method(channel, "ListRuns")
            await submit(submit_request(run_id="a", group="sweep", tags={"lr": "0.1", "team": "x"}))
            await submit(submit_request(run_id="b", group="sweep", tags={"lr": "0.2", "it's": '"odd"'}))
            await submit(submit_request(run_id="c", tags={"lr": "0.1"}))

            async def found(**filters: Any) -> list[str]:
                return [run.run_id for run in (await list_(pb.ListRunsRequest(**filters))).runs]

            assert await found(group="sweep") == ["b", "a"]
            assert await found(tags={"lr": "0.1"}) == ["c", "a"]
            assert await found(tags={"lr": "0.1"}, group="sweep", with_config=True) == ["a"]
            assert await found(tags={"it's": '"odd"'}) == ["b"]
            assert await found(tags={"lr": "0.1", "team": "y"}) == []

    asyncio.run(main())


def test_a_submit_is_in_the_registry_when_it_returns_and_a_repeat_says_that_it_existed(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            first = await submit(submit_request(name="one"))
            assert host.registry.get(first.run.run_id).digest == first.run.digest
            assert host.dispatcher.num_wakes == 1
            again = await submit(submit_request(name="one"))
            assert (first.existed, again.existed) == (False, True)
            assert again.run.run_id == first.run.run_id
            assert host.dispatcher.num_wakes == 1
            request = submit_request(name="one")
            request.force_new = True
            another = await submit(request)
            assert not another.existed
            assert another.run.run_id != first.run.run_id
        async with Host(tmp_path) as host:
            assert host.registry.counts() == {"PENDING": 2}

    asyncio.run(main())


def test_other_rows_below_the_same_path_are_trained_on_and_the_same_rows_are_not(tmp_path: Path) -> None:
    data = tmp_path / "data" / "a.parquet"
    data.parent.mkdir()
    data.write_bytes(b"some rows")
    config = {
        "run_id": "shapes",
        "trainer": "nowhere:T",
        "max_steps": 1,
        "dataset": {"parquet_paths": ["data"]},
    }
    request = pb.Submission(config_json=json.dumps(config).encode(), base_dir=str(tmp_path))

    async def main() -> None:
        async with Host(tmp_path / "home") as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            first = await submit(request)
            await host.start("shapes")
            await host.end("shapes")
            again = await submit(request)
            assert (again.run.run_id, again.existed) == ("shapes", True)
            assert again.notes[0].startswith("not trained again: shapes has the same config, code, data and")
            data.write_bytes(b"more rows")
            other = await submit(request)
            assert (other.run.run_id, other.existed, other.notes) == ("shapes.2", False, [])
            assert other.run.digest != first.run.digest
            named = pb.Submission(base_dir=str(tmp_path))
            named.config_json = json.dumps({**config, "run_id": "circles"}).encode()
            assert (await submit(named)).run.run_id == "circles", "another name is another run"
            named.config_json = json.dumps({**config, "run_id": "shapes.2"}).encode()
            assert (await submit(named)).run.run_id == "shapes.2", "the id of a run means its family"
            python = tmp_path / "python"
            python.symlink_to(sys.executable)
            elsewhere = pb.Submission(
                config_json=request.config_json, base_dir=str(tmp_path), interpreter=str(python)
            )
            assert (await submit(elsewhere)).run.run_id == "shapes.3"

    asyncio.run(main())


def test_a_failure_whose_cause_was_removed_is_trained_again_and_a_lost_reply_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit, resume = method(channel, "SubmitRun"), method(channel, "ResumeRun")
            request = submit_request(run_id="mine")
            request.submission_id = "first"
            await submit(request)
            await host.start("mine")
            await host.end("mine", RunState.FAILED)
            again = await submit(request)
            assert (again.run.run_id, again.existed) == ("mine", False), "the same submission"
            request.submission_id = "second"
            assert (await submit(request)).run.run_id == "mine.2"
            await host.start("mine.2")
            await host.end("mine.2", RunState.FAILED)
            going_on = pb.ResumeRunRequest(run_id="mine", submission_id="third")
            resumed = await resume(going_on)
            assert (resumed.run.run_id, resumed.run.parent_run_id) == ("mine.3", "mine.2")
            assert (await resume(going_on)).run.run_id == "mine.3"
            await host.start("mine.3")
            await host.end("mine.3", RunState.FAILED)
            assert (await resume(going_on)).run.run_id == "mine.3", "the same submission"
            going_on.submission_id = "fourth"
            once_more = await resume(going_on)
            assert (once_more.run.run_id, once_more.existed) == ("mine.4", False)

    asyncio.run(main())


def test_a_drawn_name_that_is_taken_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["taken", "taken", "free"])

    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("taken")
            for module in ("submission", "intake"):
                monkeypatch.setattr(f"trn.daemon.intake.{module}.make_run_id", lambda _config: next(names))
            answer = await method(channel, "SubmitRun")(submit_request(max_steps=3))
            assert answer.run.run_id == "free"

    asyncio.run(main())


def test_a_dry_run_plans_and_queues_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            request = submit_request()
            request.is_dry_run = True
            answer = await method(channel, "SubmitRun")(request)
            assert json.loads(answer.plan_json)["plan"]["run_id"] == answer.run.run_id
            assert host.registry.counts() == {}
            assert host.dispatcher.num_wakes == 0

    asyncio.run(main())


def test_a_check_gives_every_fault_as_data_and_queues_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path / "home") as host, channel_to(host) as channel:
            check = method(channel, "CheckRun")
            sound = await check(submit_request(name="mine"))
            assert (list(sound.faults), sound.code, sound.run.name) == ([], "", "mine")
            assert json.loads(sound.plan_json)["plan"]["run_id"] == sound.run.run_id

            odd = Fault("found -1", path="hyperparams.lr", kind="code")
            host.executor.try_ = lambda _plan, _config: ImportCheck(faults=(odd,))
            request = submit_request(max_step=3, weights="/nowhere/w.pt")
            request.is_import_tried = True
            request.log_dir, request.event_log = "/proc/nowhere", str(tmp_path)
            found = await check(request)
            names = [fault.partition(":")[0] for fault in found.faults]
            further = ["log_dir", "event_log", "weights", "hyperparams.lr"]
            assert (found.code, names[1:]) == ("invalid", further)
            assert "`max_step`" in found.faults[0]
            details = found.refusal.faults
            assert [fault.path for fault in details] == ["max_step", *further]
            assert [fault.kind for fault in details] == ["unknown-field", "log", "log", "file", "code"]
            assert (details[0].found, details[0].hint) == ('"max_step"', "did you mean `max_steps`?")
            code, text = await refusal(method(channel, "SubmitRun")(request))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert all(fault in text for fault in found.faults), "one judge"
            request.takes_refusal = True
            answer = await method(channel, "SubmitRun")(request)
            assert (answer.refusal, answer.HasField("run")) == (found.refusal, False)

            huge = await check(submit_request(resources={"cpus": 9999}))
            assert (huge.code, len(huge.faults)) == ("infeasible", 1)
            assert host.registry.counts() == {}

    asyncio.run(main())


def test_a_place_for_lines_that_cannot_be_written_is_refused_and_none_is_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path / "home") as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            request = submit_request()
            request.log_dir, request.event_log = str(tmp_path / "logs" / "mine"), str(tmp_path / "a.jsonl")
            await submit(request)
            request = submit_request(seed=2)
            request.log_dir = str(tmp_path / "home" / "runs")
            code, text = await refusal(submit(request))
            assert (code, "log_dir: " in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            request.log_dir, request.event_log = "", f"{tmp_path}/{'x' * 300}"
            code, text = await refusal(submit(request))
            assert (code, "longer than 255 bytes" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["home"], "made when there is something to write"


def test_secrets_are_kept_in_memory_and_only_their_names_are_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit, resume = method(channel, "SubmitRun"), method(channel, "ResumeRun")
            request = submit_request(run_id="one", env={"HF_TOKEN": "hunter2-job", "A": "1"})
            request.secret_env["HF_TOKEN"] = "hunter2"
            request.secret_env["MINE"] = "hunter2-mine"
            answer = await submit(request)
            record = host.registry.get("one")
            assert list(answer.run.secret_env) == ["HF_TOKEN", "MINE"]
            assert (record.secret_env, record.config["env"]) == (("HF_TOKEN", "MINE"), {"A": "1"})
            request.secret_env["MINE"] = "hunter2-other"
            assert (await submit(request)).run.digest == record.digest, "the values are in no digest"
            request.secret_env["MINE"] = "hunter2-mine"
            assert (await submit(request)).run.run_id == "one"
            plan = await method(channel, "CheckRun")(request)
            assert b"hunter2" not in plan.SerializeToString()

            await method(channel, "CancelRun")(pb.CancelRunRequest(run_id="one"))
            await resume(pb.ResumeRunRequest(run_id="one", overrides_json=b'{"run_id": "again"}'))
            child = host.registry.get("again")
            found, missing = host.secrets.find(child.submission_id, child.secret_env)
            assert (reveal(found), missing) == ({"HF_TOKEN": "hunter2", "MINE": "hunter2-mine"}, [])

        async with Host(tmp_path) as host, channel_to(host) as channel:  # a restart forgets them
            resume = method(channel, "ResumeRun")
            request = pb.ResumeRunRequest(run_id="one", overrides_json=b'{"run_id": "third"}')
            request.secret_env["MINE"] = "hunter2-mine"
            code, text = await refusal(resume(request))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "HF_TOKEN. Pass them again: `trn resume one --env HF_TOKEN`" in text
            request.secret_env["HF_TOKEN"] = "hunter2"
            assert list((await resume(request)).run.secret_env) == ["HF_TOKEN", "MINE"]

    asyncio.run(main())
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert kept == []


def test_a_secret_in_the_job_itself_is_recorded_and_that_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            answer = await method(channel, "SubmitRun")(submit_request(env={"HF_TOKEN": "hunter2", "A": "1"}))
            [note] = answer.notes
            assert "env.HF_TOKEN of the job looks like a secret and is recorded" in note
            assert "hunter2" not in note
            bad = submit_request(env={"A=B": "1"})
            bad.secret_env["a b"] = "hunter2"
            bad.secret_env["TRAINER_ATTEMPT"] = "hunter2"
            code, text = await refusal(method(channel, "SubmitRun")(bad))
            assert (code, text.count("\n"), "hunter2" in text) == (grpc.StatusCode.INVALID_ARGUMENT, 3, False)

    asyncio.run(main())


def test_what_the_worker_will_not_have_as_the_caller_has_it_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            host.dispatcher.environ = {"MKL_A": "1", "HF_HOME": "/x"}
            request = submit_request(env={"NCCL_B": "2"})
            caller, salt = tell_environment({"MKL_A": "2", "HF_HOME": "/x", "NCCL_B": "1", "EDITOR": "vi"})
            request.caller_env.update(caller)
            request.caller_salt = salt
            answer = await method(channel, "SubmitRun")(request)
            [found] = answer.env_differences
            assert (found.name, found.is_in_caller, found.worker_value) == ("MKL_A", True, "1")
            assert not (await method(channel, "SubmitRun")(request)).env_differences, (
                "it runs as it was submitted"
            )
            assert not (await method(channel, "SubmitRun")(submit_request(seed=3))).env_differences

    asyncio.run(main())


def test_a_choice_of_gpus_by_the_callers_environment_has_no_effect_and_that_is_answered(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        bare = {"inventory": msgspec.structs.replace(INVENTORY, devices=[])}
        for place, settings, resources, expected in (
            ("one", {}, {}, ["CUDA_VISIBLE_DEVICES"]),
            ("two", {}, {"devices": ["cuda:1"]}, []),
            ("three", bare, {}, []),
        ):
            async with Host(tmp_path / place, settings=settings) as host, channel_to(host) as channel:
                request = submit_request(resources=resources)
                caller, request.caller_salt = tell_environment({"CUDA_VISIBLE_DEVICES": "1"})
                request.caller_env.update(caller)
                answer = await method(channel, "CheckRun")(request)
                assert [item.name for item in answer.env_differences] == expected, place

    asyncio.run(main())


def test_code_is_tried_before_a_run_is_queued_where_that_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit, tried = method(channel, "SubmitRun"), []

            def refuse(plan: LaunchPlan, _config: dict[str, Any]) -> ImportCheck:
                tried.append(plan.run_id)
                return ImportCheck(faults=(Fault("importing it raises", path="trainer"),))

            host.executor.try_ = refuse
            request = submit_request(run_id="mine")
            request.is_import_tried = True
            code, text = await refusal(submit(request))
            assert (code, tried) == (grpc.StatusCode.INVALID_ARGUMENT, ["mine"])
            assert "trainer: importing it raises" in text
            assert host.registry.counts() == {}

            await submit(submit_request(run_id="mine"))
            answer = await submit(request)
            assert (answer.existed, tried) == (True, ["mine"]), "of a run that there is nothing is tried"

            host.executor.try_ = lambda _plan, _config: ImportCheck(problem="no launcher")
            request = submit_request(run_id="other", seed=2)
            request.is_import_tried = True
            (note,) = (await submit(request)).notes
            assert "no launcher" in note
            assert host.registry.counts() == {"PENDING": 2}

    asyncio.run(main())


def test_what_cannot_be_run_is_refused_with_its_faults_and_the_right_status(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            Host(tmp_path, settings={"max_config_bytes": 10_000}) as host,
            channel_to(host) as channel,
        ):
            submit = method(channel, "SubmitRun")
            code, text = await refusal(submit(submit_request(max_stepps=1)))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "did you mean `max_steps`" in text
            code, text = await refusal(submit(submit_request(resources={"gpus": 3})))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "this machine has 2" in text
            code, text = await refusal(submit(submit_request(tags={"big": "x" * 10_000})))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "at most 10000 are taken" in text
            code, text = await refusal(submit(submit_request(**{f"field{n}": n for n in range(500)})))
            assert code == grpc.StatusCode.INVALID_ARGUMENT  # a list of faults that no header could carry
            assert len(text.encode()) <= 4096
            code, text = await refusal(submit(pb.Submission(config_json=b"{", snapshot="x")))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            request = submit_request()
            request.snapshot = "0" * 64
            code, text = await refusal(submit(request))
            assert (code, "no snapshot" in text) == (grpc.StatusCode.NOT_FOUND, True)
            assert host.registry.counts() == {}

    asyncio.run(main())


def test_pages_give_every_run_once_the_newest_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            for number in range(25):
                await host.add_run(f"run-{number:02}")
            stored = [record.run_id for record in host.registry.page()]
            list_runs = method(channel, "ListRuns")
            for size in (1, 7, 25, 1000):
                found: list[str] = []
                token = ""
                while True:
                    page = await list_runs(pb.ListRunsRequest(page_size=size, page_token=token))
                    assert len(page.runs) <= size
                    found += [run.run_id for run in page.runs]
                    token = page.next_page_token
                    if not token:
                        break
                assert found == stored
            page = await list_runs(pb.ListRunsRequest(name_contains="-07"))
            assert [run.run_id for run in page.runs] == ["run-07"]

    asyncio.run(main())


def test_a_page_with_configs_ends_before_it_outgrows_a_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            for number in range(12):
                await host.add_run(f"run-{number:02}", tags={"big": "x" * 900_000})
            found: list[str] = []
            token, num_pages = "", 0
            while True:
                page = await method(channel, "ListRuns")(
                    pb.ListRunsRequest(page_token=token, with_config=True)
                )
                assert page.ByteSize() < MAX_MESSAGE_BYTES
                num_pages += 1
                found += [run.run_id for run in page.runs]
                token = page.next_page_token
                if not token:
                    break
            assert found == [f"run-{number:02}" for number in reversed(range(12))]
            assert num_pages > 1

    asyncio.run(main())


@pytest.mark.parametrize("token", ["nonsense", "////", "MTIz", "a" * 5000, "LTUvYQ", "ä"])
def test_a_page_token_that_nobody_gave_is_refused(tmp_path: Path, token: str) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            call = method(channel, "ListRuns")(pb.ListRunsRequest(page_token=token))
            assert (await refusal(call))[0] == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_state_that_only_a_newer_client_knows_matches_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            list_runs = method(channel, "ListRuns")
            assert len((await list_runs(pb.ListRunsRequest(states=[17]))).runs) == 0  # type: ignore[list-item]
            both = pb.ListRunsRequest(states=[17, 1])  # type: ignore[list-item]
            assert [run.run_id for run in (await list_runs(both)).runs] == ["a"]

    asyncio.run(main())


def test_a_cancel_ends_a_waiting_run_at_once_and_tells_who_ends_a_running_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("waits")
            await host.add_run("runs")
            await host.start("runs")
            cancel = method(channel, "CancelRun")
            ended = await cancel(pb.CancelRunRequest(run_id="waits", reason="enough"))
            assert (ended.run.state, ended.was_live) == (pb.RUN_STATE_CANCELLED, True)
            assert ended.run.reason.startswith("enough")
            ending = await cancel(pb.CancelRunRequest(run_id="runs"))
            assert (ending.run.state, ending.run.is_cancel_wanted) == (pb.RUN_STATE_RUNNING, True)
            assert "runs" in host.dispatcher.cancels
            again = await cancel(pb.CancelRunRequest(run_id="waits", reason="again"))
            assert (again.was_live, again.run.reason) == (False, ended.run.reason)

    asyncio.run(main())


def test_a_watch_tells_of_new_notes_and_tags_and_what_is_too_large_is_refused_with_the_limit(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            run = await host.add_run("one")
            watch = method(channel, "WatchRuns")(pb.WatchRunsRequest(after_change=run.change))
            update = method(channel, "UpdateRun")
            tags = {"team": "vision", "group": "g"}
            answer = await update(pb.UpdateRunRequest(run_id="one", notes="first", tags=tags))
            assert (answer.run.notes, answer.run.tags, answer.run.config_json) == ("first", tags, b"")
            async with asyncio.timeout(PATIENCE_S):
                async for news in watch:
                    if news.runs:
                        break
            assert [(item.notes, item.tags, item.change) for item in news.runs] == [
                ("first", tags, answer.run.change)
            ]
            watch.cancel()
            listed = await method(channel, "ListRuns")(pb.ListRunsRequest(group="g"))
            assert [item.run_id for item in listed.runs] == ["one"]
            answer = await update(pb.UpdateRunRequest(run_id="one", notes="", removed_tags=["group", "team"]))
            assert (answer.run.notes, answer.run.tags) == ("", {})
            for request, words in (
                (pb.UpdateRunRequest(run_id="one"), "nothing to change"),
                (
                    pb.UpdateRunRequest(run_id="one", notes="ü" * 5000),
                    "has 10000 bytes, at most 8192 are kept",
                ),
                (
                    pb.UpdateRunRequest(run_id="one", tags={"a=b": "1"}),
                    "found the name 'a=b', expected 1 to 128",
                ),
            ):
                code, text = await refusal(update(request))
                assert (code, words in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
            code, _ = await refusal(update(pb.UpdateRunRequest(run_id="none", notes="x")))
            assert code == grpc.StatusCode.NOT_FOUND
            assert host.registry.get("one").tags == {}

    asyncio.run(main())


def test_an_ended_run_is_resumed_as_a_run_of_its_own_and_a_live_one_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("old")
            await host.start("old")
            resume = method(channel, "ResumeRun")
            code, text = await refusal(resume(pb.ResumeRunRequest(run_id="old")))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "has not ended" in text
            await host.end("old", RunState.FAILED)
            answer = await resume(pb.ResumeRunRequest(run_id="old"))
            assert answer.run.parent_run_id == "old"
            assert answer.run.run_id != "old"
            assert answer.run.run_id == "old.2"
            again = await resume(pb.ResumeRunRequest(run_id="old"))
            assert (again.run.run_id, again.existed) == ("old.2", True)
            assert again.notes[0].startswith("not trained again: old.2 has the same config")
            longer = pb.ResumeRunRequest(run_id="old", overrides_json=b'{"max_steps": 20}')
            assert (await refusal(resume(longer)))[0] == grpc.StatusCode.FAILED_PRECONDITION
            longer.is_exact = True
            more = await resume(longer)
            assert (more.run.run_id, more.run.parent_run_id) == ("old.3", "old")
            assert host.registry.get(more.run.run_id).config["max_steps"] == 20
            for request in (
                pb.ResumeRunRequest(),
                pb.ResumeRunRequest(checkpoint_path="relative.meta.json", config_json=b"{}"),
                pb.ResumeRunRequest(checkpoint_path="/etc/passwd", config_json=b"{}"),
                pb.ResumeRunRequest(run_id="old", overrides_json=b"[1]"),
                pb.ResumeRunRequest(run_id="old", config_json=b"{}"),
            ):
                assert (await refusal(resume(request)))[0] == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_events_come_from_the_file_then_live_without_gap_or_repeat_and_say_when_they_end(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            await host.start("a")
            host.write_events("a", 1, 500)
            await host.ingest.drain("a")
            call = method(channel, "StreamEvents")(
                pb.StreamEventsRequest(run_id="a", after_seq=3, follow=True)
            )
            seq, is_end, last = 3, False, 500
            async with asyncio.timeout(PATIENCE_S):
                async for answer in call:
                    assert not is_end
                    is_end = answer.is_end
                    numbers = [json.loads(line)["seq"] for line in answer.lines.splitlines()]
                    assert numbers == list(range(seq + 1, seq + 1 + len(numbers)))
                    if numbers:
                        assert (answer.first_seq, answer.last_seq) == (numbers[0], numbers[-1])
                        seq = numbers[-1]
                    if seq == last < 1500:  # caught up with the live stream: write on
                        host.write_events("a", last + 1, last + 100)
                        last += 100
                    elif seq == 1500 and not is_end:
                        await host.end("a")
            assert is_end
            assert seq == 1500

    asyncio.run(main())


def test_events_without_follow_are_those_that_there_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            await host.start("a")
            host.write_events("a", 1, 3000)
            await host.ingest.drain("a")
            request = pb.StreamEventsRequest(run_id="a")
            answers = [answer async for answer in method(channel, "StreamEvents")(request)]
            assert answers[-1].last_seq == 3000
            assert not answers[-1].is_end  # the run goes on
            assert len(answers) < 10  # several events in a message
            await host.end("a")
            answers = [answer async for answer in method(channel, "StreamEvents")(request)]
            assert answers[-1].is_end

    asyncio.run(main())


def test_300_watchers_of_one_run_get_every_event_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            await host.start("a")
            host.write_events("a", 1, 10)
            stream = method(channel, "StreamEvents")

            async def watch(after_seq: int) -> list[int]:
                call = stream(pb.StreamEventsRequest(run_id="a", after_seq=after_seq, follow=True))
                return [
                    json.loads(line)["seq"] async for answer in call for line in answer.lines.splitlines()
                ]

            async with asyncio.timeout(4 * PATIENCE_S), asyncio.TaskGroup() as group:
                tasks = [group.create_task(watch(number % 10)) for number in range(300)]
                await until(lambda: host.service.streams.num_open == 300)
                for first in range(11, 511, 50):
                    host.write_events("a", first, first + 49)
                    await host.ingest.drain("a")
                await host.end("a")
            for number, task in enumerate(tasks):
                assert task.result() == list(range(number % 10 + 1, 511))
            assert host.broadcaster.num_watchers == 0

    asyncio.run(main())


def test_a_watcher_that_does_not_read_is_told_what_it_missed_gets_it_all_and_slows_nobody(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        # A small ring, and a connection that takes little ahead of its reader.
        async with (
            Host(tmp_path, ring={"max_items": 4, "max_bytes": 64 << 10}) as host,
            channel_to(host, **{"grpc.http2.lookahead_bytes": 1024, "grpc.http2.bdp_probe": 0}) as slow,
            channel_to(host) as quick,
        ):
            await host.add_run("a")
            await host.start("a")
            request = pb.StreamEventsRequest(run_id="a", follow=True)
            sleeper = method(slow, "StreamEvents")(request)
            await until(lambda: host.service.streams.num_open == 1)

            async def keep_up() -> int:
                return [answer.last_seq async for answer in method(quick, "StreamEvents")(request)][-2]

            reader = asyncio.create_task(keep_up())
            await until(lambda: host.service.streams.num_open == 2)
            last = 0
            while last < 6000:  # 6 MB, far more than the ring and the connection hold
                host.write_events("a", last + 1, last + 100, pad=1000)
                await host.ingest.drain("a")
                last += 100
            await host.end("a")
            async with asyncio.timeout(PATIENCE_S):
                assert await reader == 6000  # while the other one has not read a byte
                seq, missed = 0, []
                async for answer in sleeper:
                    if answer.HasField("fell_behind"):
                        missed.append((answer.fell_behind.missed_from, answer.fell_behind.missed_to))
                        assert answer.fell_behind.missed_from == seq + 1
                    for line in answer.lines.splitlines():
                        assert json.loads(line)["seq"] == seq + 1
                        seq += 1
            assert seq == 6000
            assert missed

    asyncio.run(main())


def test_a_watch_tells_what_changed_since_then_and_what_changes_now(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            change = (await host.add_run("b")).change
            await host.add_run("c")
            watch = method(channel, "WatchRuns")(pb.WatchRunsRequest(after_change=change))
            answer = await watch.read()
            assert [run.run_id for run in answer.runs] == ["c"]
            assert (await watch.read()).change == host.registry.last_change()
            await host.commit(host.registry.want_cancel("a", "enough"))
            answer = await watch.read()
            assert [(run.run_id, run.state) for run in answer.runs] == [("a", pb.RUN_STATE_CANCELLED)]
            assert answer.change == host.registry.last_change()
            watch.cancel()
            await until(lambda: host.broadcaster.num_watchers == 0)

    asyncio.run(main())


def test_a_watch_of_some_runs_tells_of_those_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            for run_id in ("a", "b", "c"):
                await host.add_run(run_id)
            watch = method(channel, "WatchRuns")(pb.WatchRunsRequest(run_ids=["b"]))
            assert [run.run_id for run in (await watch.read()).runs] == ["b"]
            assert not (await watch.read()).runs
            await host.commit(host.registry.want_cancel("a", "enough"))
            await host.commit(host.registry.want_cancel("b", "enough"))
            answer = await watch.read()
            assert [run.run_id for run in answer.runs] == ["b"]
            watch.cancel()
            call = method(channel, "WatchRuns")(pb.WatchRunsRequest(run_ids=["unknown"]))
            assert (await refusal(call))[0] == grpc.StatusCode.NOT_FOUND
            many = pb.WatchRunsRequest(run_ids=[f"r{number}" for number in range(1001)])
            assert (await refusal(method(channel, "WatchRuns")(many)))[0] == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_live_watch_begins_with_now(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            watch = method(channel, "WatchRuns")(pb.WatchRunsRequest(live_only=True))
            first = await watch.read()
            assert (len(first.runs), first.change) == (0, host.registry.last_change())
            await host.add_run("b")
            assert [run.run_id for run in (await watch.read()).runs] == ["b"]

    asyncio.run(main())


def test_a_watch_that_does_not_read_ends_up_with_the_newest_of_every_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            Host(tmp_path, ring={"max_items": 4, "max_bytes": 64 << 10}) as host,
            channel_to(host, **{"grpc.http2.lookahead_bytes": 1024, "grpc.http2.bdp_probe": 0}) as channel,
        ):
            watch = method(channel, "WatchRuns")(pb.WatchRunsRequest())
            await until(lambda: host.broadcaster.num_watchers == 1)
            for number in range(300):
                await host.add_run(f"run-{number}", tags={"big": "x" * 2000})
                await host.commit(host.registry.want_cancel(f"run-{number}", "enough " * 100))
            states: dict[str, int] = {}
            async with asyncio.timeout(PATIENCE_S):
                while len(states) < 300 or set(states.values()) != {pb.RUN_STATE_CANCELLED}:
                    states |= {run.run_id: run.state for run in (await watch.read()).runs}

    asyncio.run(main())


def test_a_log_is_read_by_offset_by_its_tail_and_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            logs = method(channel, "StreamLogs")
            none = [answer async for answer in logs(pb.StreamLogsRequest(run_id="a"))]
            assert [(answer.offset, answer.data, answer.is_end) for answer in none] == [(0, b"", True)]
            await host.start("a")
            text = b"".join(b"line %d\n" % number for number in range(100_000))
            host.home.run("a").log.write_bytes(text)
            answers = [answer async for answer in logs(pb.StreamLogsRequest(run_id="a", offset=5))]
            assert b"".join(answer.data for answer in answers) == text[5:]
            assert max(len(answer.data) for answer in answers) <= 256 << 10
            assert (answers[-1].is_end, answers[-1].offset) == (True, len(text))
            tail = [answer async for answer in logs(pb.StreamLogsRequest(run_id="a", tail_bytes=10))]
            assert b"".join(answer.data for answer in tail) == text[-10:]
            beyond = [answer async for answer in logs(pb.StreamLogsRequest(run_id="a", offset=(1 << 64) - 1))]
            assert [answer.is_end for answer in beyond] == [True]

            call = logs(pb.StreamLogsRequest(run_id="a", offset=len(text), follow=True))
            await until(lambda: host.service.streams.num_open == 1)
            with host.home.run("a").log.open("ab") as file:
                file.write(b"more\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await call.read()).data == b"more\n"
                with host.home.run("a").log.open("ab") as file:
                    file.write(b"last\n")
                await host.end("a")
                assert (await call.read()).data == b"last\n"
                assert (await call.read()).is_end
                assert await call.read() is grpc.aio.EOF

    asyncio.run(main())


def test_metrics_are_answered_by_name_and_range(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            await host.add_run("a")
            await host.start("a")
            host.write_events("a", 1, 100)
            await host.ingest.drain("a")
            get = method(channel, "GetMetrics")
            answer = await get(pb.GetMetricsRequest(run_id="a", from_step=0, to_step=10))
            assert list(answer.series[0].steps) == list(range(1, 11))
            thin = await get(pb.GetMetricsRequest(run_id="a", max_points=5))
            assert len(thin.series[0].steps) <= 5
            assert thin.series[0].num_points == 100
            assert (thin.series[0].width, sum(thin.series[0].counts)) == (64, 100)
            assert (answer.series[0].width, len(answer.series[0].counts), len(answer.discarded)) == (1, 0, 0)
            none = await get(pb.GetMetricsRequest(run_id="a", names=["nothing"]))
            assert len(none.series) == 0

    asyncio.run(main())


def test_points_of_an_older_release_get_their_buckets_while_the_daemon_works(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "metrics.db")
    points = [(step, 1, "loss", step, float(step), step) for step in range(1, 5001)]
    store.add("old", offset=1, last_seq=5000, points=points).result()
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "metrics.db")) as connection:
        connection.executescript(
            "DELETE FROM buckets; UPDATE series SET finest_level = NULL, built_to = 0; INSERT INTO unbuilt VALUES (1);"
        )

    async def main() -> None:
        async with Host(tmp_path) as host:
            with contextlib.closing(sqlite3.connect(host.home.metrics)) as connection:
                await until(lambda: connection.execute("SELECT count(*) FROM unbuilt").fetchone() == (0,))
                assert connection.execute("SELECT count(*) FROM buckets").fetchone()[0] > 5000 / 16

    asyncio.run(main())


def test_what_a_later_attempt_took_back_is_answered_on_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await host.add_run("a")
            await host.start("a")
            reports = [*((1, step) for step in range(1, 9)), *((2, step) for step in range(6, 8))]
            with host.home.run("a").events.open("ab") as file:
                for seq, (attempt, step) in enumerate(reports, start=1):
                    line = {"event": "metric", "seq": seq, "attempt": attempt, "name": "loss", "step": step}
                    more = {"value": attempt, "run_id": "a", "timestamp_ms": seq}
                    file.write(json.dumps({**line, **more}).encode() + b"\n")
            await host.ingest.drain("a")
            assert (await client.metrics("a"))["loss"].values == (1.0,) * 5 + (2.0,) * 2
            [taken] = await client.discarded("a")
            assert (taken.run_id, taken.name, taken.attempt) == ("a", "loss", 1)
            assert (taken.steps, taken.values, taken.timestamps_ms) == ((6, 7, 8), (1.0,) * 3, (6, 7, 8))
            assert (taken.num_points, taken.num_dropped) == (3, 0)
            [part] = await client.discarded("a", ["loss"], from_step=7, to_step=7)
            assert part.steps == (7,)
            assert await client.discarded("a", ["other"]) == ()

    asyncio.run(main())


def test_a_line_of_descent_is_one_curve_with_its_seams(tmp_path: Path) -> None:
    """A run of 10 steps, one that began at its step 6, and one of that at step 8; what was tried after a seam is left out."""

    async def add(host: Host, run_id: str, last: int, **more: Any) -> None:
        new = NewRun(run_id="a", digest=run_id, config=job(), **more)
        record, _ = await host.commit(host.registry.submit(new))
        assert record.run_id == run_id
        await host.start(run_id)
        with host.home.run(run_id).events.open("ab") as file:
            for seq, step in enumerate(range(more.get("start_step", 0) + 1, last + 1), start=1):
                line = {
                    "event": "metric",
                    "seq": seq,
                    "attempt": 1,
                    "name": "loss",
                    "value": last,
                    "step": step,
                }
                file.write(json.dumps({**line, "run_id": run_id, "timestamp_ms": 1}).encode() + b"\n")
        await host.ingest.drain(run_id)
        await host.end(run_id)

    async def main() -> None:
        async with Host(tmp_path) as host, trn.AsyncClient(tmp_path) as client:
            await add(host, "a", 10)
            await add(host, "a.2", 12, parent_run_id="a", start_step=6)
            await add(host, "a.3", 11, parent_run_id="a.2", start_step=8)
            line = await client.lineage("a")
            assert line.metrics["loss"].steps == tuple(range(1, 12))
            assert line.metrics["loss"].values == (10.0,) * 6 + (12.0,) * 2 + (11.0,) * 3
            assert line.seams == ((6, "a.2"), (8, "a.3"))
            assert [(part.run_id, part.from_step, part.to_step) for part in line.parts] == [
                ("a", 0, 6),
                ("a.2", 6, 8),
                ("a.3", 8, None),
            ]
            assert (await client.metrics("a"))["loss"].steps == (9, 10, 11), "the run alone, unless asked"
            thin = (await client.lineage("a", max_points=3)).metrics["loss"]
            assert (thin.num_points, thin.steps[0], thin.steps[-1]) == (11, 1, 11)
            assert len(thin.lows) == len(thin.highs) == len(thin.steps) < 11
            assert (await client.lineage("a.1")).seams == ()

    asyncio.run(main())


def test_a_caller_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await host.add_run("a")
            async with channel_to(host) as channel:
                for name, request in (
                    ("WatchRuns", pb.WatchRunsRequest()),
                    ("StreamEvents", pb.StreamEventsRequest(run_id="a", follow=True)),
                    ("StreamLogs", pb.StreamLogsRequest(run_id="a", follow=True)),
                ):
                    calls = [method(channel, name)(request) for _ in range(20)]
                    await until(lambda: host.service.streams.num_open == 20)
                    assert host.service.is_in_use()
                    for call in calls:
                        call.cancel()
                    await until(lambda: host.service.streams.num_open == 0)
                    timed = method(channel, name)(request, timeout=0.2)
                    assert (await refusal(timed))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
                    await until(lambda: host.service.streams.num_open == 0)
            assert host.broadcaster.num_watchers == 0
            host.service.is_in_use()
            assert not host.service.is_in_use()

    asyncio.run(main())


def test_a_submit_that_its_caller_gave_up_is_whole_or_not_there_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            for number in range(50):
                call = submit(submit_request(run_id=f"r{number}", max_steps=number + 1))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                call.cancel()
            answer = await submit(submit_request(run_id="kept", max_steps=99))
            assert host.registry.get("kept").digest == answer.run.digest
            for record in host.registry.page():
                assert record.state == RunState.PENDING

    asyncio.run(main())


def test_an_error_that_is_not_ours_is_a_number_for_the_caller_and_a_trace_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            host.registry.counts = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
            code, text = await refusal(method(channel, "GetHealth")(pb.GetHealthRequest()))
            assert code == grpc.StatusCode.INTERNAL
            assert "division" not in text
            number = text.partition("error ")[2].partition(";")[0]
            assert number
            assert f"error {number} in trn.v1.Trainer/GetHealth" in caplog.text
            assert "ZeroDivisionError" in caplog.text

    asyncio.run(main())


def test_a_daemon_without_descriptors_asks_its_callers_to_come_again(tmp_path: Path) -> None:
    """As a client takes it, which then waits: an internal error would end it."""

    def fail() -> dict[str, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            host.registry.counts = fail  # type: ignore[method-assign]
            code, text = await refusal(method(channel, "GetHealth")(pb.GetHealthRequest()))
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "Too many open files" in text

    asyncio.run(main())


def test_health_and_reflection_answer_as_grpc_expects(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "trn.v1.Trainer"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            services = {service.name for service in (await reflection.read()).list_services_response.service}
            assert "trn.v1.Trainer" in services
            await reflection.write(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="trn.v1.Trainer")
            )
            files = (await reflection.read()).file_descriptor_response.file_descriptor_proto
            assert b"Submission" in files[0]
            await reflection.done_writing()

    asyncio.run(main())
