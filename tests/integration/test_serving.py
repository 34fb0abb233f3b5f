"""Serving, without a model: which checkpoint a job means, who has a served name, what a server's events make of it, and
promotions that no death of a daemon loses or does twice."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from saved_models import save_checkpoint
from service_host import Host, job, until

import trn
from gen_worker.contract.checkpoints.choice import CheckpointInfo, read_named, verify_files
from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.serving import (
    LIVE,
    WANTED,
    LiveModel,
    WantedModel,
    read_settled,
    read_wanted,
    write_document,
)
from gen_worker.errors import StartupError
from trn.core.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
)
from trn.core.runs import RunRecord, RunState
from trn.core.serving.records import Promotion
from trn.daemon.api.tokens import PromoteGrant
from trn.daemon.intake.submission import Submission
from trn.daemon.serving import promotions
from trn.daemon.serving.model_store import ModelStore
from trn.executors.base import AttemptKey, Worker
from trn.executors.fake import FakeProcess, Script
from trn.registry.base import NewRun

SERVE = {"mode": "inference"}


async def train(
    host: Host, run_id: str = "mnist", steps: dict[int, float | None] | None = None, **config: Any
) -> RunRecord:
    """A run that lives and has saved these checkpoints, with these losses."""
    run = await host.add_run(run_id, **config)
    await host.start(run_id)
    for step, loss in ({100: 0.5, 200: 0.3, 300: 0.4} if steps is None else steps).items():
        metric = None if loss is None else ("val/loss", loss)
        save_checkpoint(host.home.run(run_id).checkpoints, run, step, metric=metric)
    return run


async def submit(host: Host, config: dict[str, Any], **fields: Any) -> Any:
    return await host.service.submit_run(Submission(config_json=json.dumps(config).encode(), **fields))


async def serve(host: Host, checkpoint: str = "mnist", name: str | None = None, **serving: Any) -> Any:
    named = {} if name is None else {"name": name}
    return await submit(host, {**SERVE, **named, "serving": {"checkpoint": checkpoint, **serving}})


def version_of(run: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = run.config["serving"]["version"]
    return found


def facts_of(version: dict[str, Any]) -> dict[str, Any]:
    return {name: version[name] for name in ("run_id", "step", "weights_hash", "code_hash")}


class Server:
    """What a server writes into its events file."""

    process: FakeProcess

    def __init__(self, host: Host, run_id: str) -> None:
        self.host, self.run_id = host, run_id

    async def start(self) -> None:
        await self.host.start(self.run_id)
        attempt = self.host.registry.attempts(self.run_id)[-1]
        run = self.host.registry.get(self.run_id)
        files = self.host.dispatcher.plan(
            NewRun(run_id=self.run_id, digest="", config=run.config, kind=run.kind)
        )
        key = AttemptKey(self.run_id, attempt.number, run.nonce)
        self.process = FakeProcess(
            files.plan, Script(lasts=True), Worker(ref=attempt.worker, pid=attempt.pid)
        )
        self.host.executor.processes[key] = self.process

    async def say(self, event: str, **fields: Any) -> None:
        run = self.host.registry.get(self.run_id)
        path = self.host.home.run(self.run_id).events
        seq = len(path.read_bytes().splitlines()) + 1 if path.exists() else 1
        line = {
            "schema_version": "trainer_event.v1",
            "event": event,
            "seq": seq,
            "run_id": self.run_id,
            "attempt": run.attempt,
            "timestamp_ms": 1000 + seq,
            "nonce": run.nonce,
            **fields,
        }
        with path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        await self.host.ingest.drain(self.run_id)

    async def be_ready(self, version: dict[str, Any] | None = None, **fields: Any) -> None:
        version = version or version_of(self.host.registry.get(self.run_id))
        await self.say("ready", url="http://127.0.0.1:8000", version=facts_of(version), **fields)


async def serving(host: Host, **options: Any) -> Server:
    """A server of `mnist@200` that is ready."""
    await train(host)
    made = await serve(host, "mnist@200", **options)
    server = Server(host, made.run.run_id)
    await server.start()
    await server.be_ready()
    return server


def test_the_best_checkpoint_is_served_and_latest_and_a_step_can_be_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await train(host)
            assert (await submit(host, job(run_id="unscored"))).run is not None
            best = await serve(host)
            assert (best.run.run_id, best.run.name, best.run.kind) == ("serve-mnist", "mnist", "server")
            assert best.notes == ["model: mnist@200, the best by val/loss (0.3)"]
            for text, step in (("mnist@latest", 300), ("mnist@100", 100), ("mn@best", 200)):
                made = await serve(host, text, name=f"n{step}{text[-1]}")
                found = version_of(host.registry.get(made.run.run_id))
                assert (found["run_id"], found["step"]) == ("mnist", step)
            with pytest.raises(NotFoundError, match=r"no checkpoint of step 150: it has 100, 200, 300"):
                await serve(host, "mnist@150", name="other")
            with pytest.raises(NotFoundError, match="nowhere"):
                await serve(host, "nowhere", name="other")
            with pytest.raises(InvalidRequestError, match="has saved no checkpoint yet"):
                await serve(host, "unscored", name="other")
            with pytest.raises(InvalidRequestError, match="expected RUN, RUN@best"):
                await serve(host, "mnist@newest", name="other")
            with pytest.raises(InvalidRequestError, match="does not train"):
                await serve(host, "serve-mnist", name="other")

    asyncio.run(main())


def test_a_damaged_checkpoint_is_passed_over_and_the_next_best_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await train(host)
            (host.home.run("mnist").checkpoints / "step-00000200.pt").write_bytes(b"x" * 28)
            made = await serve(host)
            assert version_of(host.registry.get(made.run.run_id))["step"] == 300
            assert "passed over step-00000200.meta.json" in made.notes[0]

    asyncio.run(main())


def test_what_is_served_stays_when_its_run_removes_it_or_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            run = await train(host)
            made = await serve(host, "mnist@200")
            version = version_of(host.registry.get(made.run.run_id))
            for path in host.home.run("mnist").checkpoints.glob("step-00000200.*"):
                path.unlink()
            meta = read_named(Path(version["checkpoint"]))
            assert isinstance(meta, CheckpointInfo)
            assert (meta.meta.run_id, meta.step, meta.meta.nonce) == ("mnist", 200, run.nonce)
            assert verify_files(meta) is meta
            await host.end("mnist")
            await host.service.remove_runs(["mnist"])
            assert verify_files(meta) is meta

    asyncio.run(main())


def test_every_fault_of_a_serving_job_is_told_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            config = {
                **SERVE,
                "name": "a/b",
                "max_steps": 3,
                "serving": {"checkpoint": "mnist@x", "address": "0.0.0.0:80", "replicas": 0},
                "resources": {"pool": "lab"},
            }
            checked = await host.service.check_run(Submission(config_json=json.dumps(config).encode()))
            paths = {fault.path for fault in checked.refusal.faults}
            assert paths == {
                "serving.checkpoint",
                "serving.address",
                "serving.replicas",
                "name",
                "max_steps",
                "resources.pool",
            }

    asyncio.run(main())


def test_one_server_has_a_name_and_an_equal_serve_gets_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            again = await serve(host, "mnist@200")
            assert (again.existed, again.run.run_id) == (True, "serve-mnist")
            assert again.notes == ["already served: serve-mnist serves mnist@200 at http://127.0.0.1:8000"]
            with pytest.raises(ConflictError, match=r"`trn promote mnist mnist@300` changes the model"):
                await serve(host, "mnist@300")
            with pytest.raises(ConflictError, match=r"`trn cancel serve-mnist` first"):
                await serve(host, "mnist@200", max_batch_rows=8)
            other = await serve(host, "mnist@200", name="other")
            assert (other.existed, other.run.run_id) == (False, "serve-other")

            await host.service.cancel_run("serve-mnist")
            with pytest.raises(ConflictError, match="is being stopped"):
                await serve(host, "mnist@200")
            await host.end(server.run_id, RunState.CANCELLED)
            anew = await serve(host, "mnist@200")
            assert (anew.existed, anew.run.run_id) == (False, "serve-mnist.2")
            assert host.registry.served("mnist").run_id == "serve-mnist.2"

    asyncio.run(main())


def test_a_repeated_submit_of_a_server_returns_the_run_that_it_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await train(host)
            config = {**SERVE, "serving": {"checkpoint": "mnist"}}
            first = await submit(host, config, submission_id="mine")
            again = await submit(host, config, submission_id="mine")
            assert first.run.run_id == again.run.run_id == "serve-mnist"

    asyncio.run(main())


def test_a_completed_prediction_answers_an_equal_one_while_its_output_stands(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            await train(host)
            data, out = tmp_path / "rows.parquet", tmp_path / "out"
            data.write_bytes(b"PAR1 rows")
            config = {
                **SERVE,
                "prediction": {"checkpoint": "mnist", "parquet_paths": [str(data)], "out": str(out)},
            }
            made = await submit(host, config)
            assert (made.run.run_id, made.run.kind) == ("predict-mnist", "prediction")
            await host.start("predict-mnist")
            out.mkdir()
            (out / "part.parquet").write_bytes(b"predictions")
            part = {"name": "part.parquet", "size_bytes": 11, "hash": hash_file(out / "part.parquet")}
            parts = {"run_id": "predict-mnist", "parts": [part]}
            (out / "predictions.json").write_text(json.dumps(parts))
            await host.end("predict-mnist")
            again = await submit(host, config)
            assert again.existed
            assert again.notes[0].startswith("not predicted again: predict-mnist has the same input")
            data.write_bytes(b"PAR1 other rows")
            assert not (await submit(host, config)).existed
            data.write_bytes(b"PAR1 rows")
            for content in (b"cut", b"PREDICTIONS"):  # of another size, and of the same
                (out / "part.parquet").write_bytes(content)
                checked = await host.service.check_run(Submission(config_json=json.dumps(config).encode()))
                assert not isinstance(checked.run, RunRecord)  # it would be predicted again
            (out / "part.parquet").write_bytes(b"cut")
            checked = await host.service.check_run(Submission(config_json=json.dumps(config).encode()))
            assert not isinstance(checked.run, RunRecord)  # it would be predicted again
            shutil.rmtree(out)
            anew = await submit(host, config)
            assert not anew.existed
            assert f"its output is gone from {out}" in anew.notes[0]

    asyncio.run(main())


def test_ready_tells_where_and_what_is_served_and_a_later_attempt_is_not_ready_yet(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            found = host.registry.served("mnist")
            assert (found.is_ready, found.url, found.state) == (True, "http://127.0.0.1:8000", "RUNNING")
            assert found.live is not None
            assert found.live.label == "mnist@200"
            assert (await host.service.list_served()).served == [found]
            # An author's own event of that name says nothing about what is served.
            trainer = Server(host, "mnist")
            await trainer.say("ready", url="http://elsewhere", version={"run_id": "x"})
            await trainer.say(
                "promoted", number=1, version=facts_of(version_of(host.registry.get(server.run_id)))
            )
            assert host.registry.served("mnist") == found

    asyncio.run(main())


async def wanted_number(host: Host, run_id: str, number: int) -> None:
    folder = host.home.run(run_id).serving

    def is_there() -> bool:
        try:
            document = read_wanted(folder)
        except StartupError:  # a test has damaged it
            return False
        return document is not None and document.number == number

    await until(is_there)


async def done(host: Host, server: Server, promotion: Promotion, **fields: Any) -> None:
    version = promotion.version and msgspec.to_builtins(promotion.version)
    await server.say("promoted", number=promotion.number, version=version, action=promotion.action, **fields)


def test_a_promotion_is_recorded_written_and_done_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host, gate={"metric": "val/loss"})
            made = await host.service.promote(
                "mnist", model="@300", by="ann", gate={"tolerance": 0.2}, promotion_id="p1"
            )
            again = await host.service.promote("mnist", model="@300", by="ann", promotion_id="p1")
            assert again == made
            await wanted_number(host, server.run_id, 1)
            document = read_wanted(host.home.run(server.run_id).serving)
            assert document is not None
            assert document.version is not None
            assert (document.action, document.version.label, document.by) == ("promote", "mnist@300", "ann")
            assert (document.gate.metric, document.gate.tolerance) == ("val/loss", 0.2)

            await until(lambda: server.process.num_notices > 0)
            before = host.registry.get(server.run_id).change
            await done(host, server, made.promotion, gate={"latency_ms": 2.0})
            await done(host, server, made.promotion, gate={"latency_ms": 3.0})  # written again after a crash
            found = host.registry.served("mnist")
            assert found.live is not None
            assert found.previous is not None
            assert (found.live.label, found.previous.label) == ("mnist@300", "mnist@200")
            (record,) = host.registry.promotions("mnist")
            assert (record.state, record.gate, record.previous) == (
                "done",
                {"latency_ms": 2.0},
                found.previous,
            )
            assert host.registry.get(server.run_id).change > before
            with pytest.raises(ConflictError, match="answers with mnist@300 already"):
                await host.service.promote("mnist", model="@300")
            await host.end(server.run_id, RunState.CANCELLED)
            with pytest.raises(ConflictError, match="is not served"):
                await host.service.promote("mnist", model="@300")

    asyncio.run(main())


@pytest.mark.parametrize("content", [b"", b'{"number": 1, "ac', b"\xff"])
def test_what_is_wanted_is_written_again_where_it_was_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(promotions, "TELL_AGAIN_S", 0.05)

    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            await host.service.promote("mnist", model="@300")
            await wanted_number(host, server.run_id, 1)
            (host.home.run(server.run_id).serving / WANTED).write_bytes(content)
            await wanted_number(host, server.run_id, 1)

    asyncio.run(main())


def test_a_promotion_that_is_done_is_the_answer_to_its_repeat(tmp_path: Path) -> None:
    """The reply to the first was lost with the daemon, and the server was faster than the repeat."""

    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            with pytest.raises(
                ConflictError, match="mnist has no version to go back to: mnist@200 is the first"
            ):
                await host.service.rollback("mnist", promotion_id="early")
            made = (await host.service.promote("mnist", model="@300", promotion_id="once")).promotion
            await done(host, server, made)
            again = (await host.service.promote("mnist", model="@300", promotion_id="once")).promotion
            assert (again.number, again.state) == (made.number, "done")
            assert len(host.registry.promotions("mnist")) == 1

    asyncio.run(main())


def test_a_refusal_keeps_what_is_served_and_the_gates_figures(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            made = await host.service.promote("serve-mnist", model="mnist@100")
            await server.say(
                "promotion_refused",
                number=1,
                cause="metric",
                words="val/loss is 0.5, and 0.3 is served",
                gate={"metric": "val/loss"},
            )
            record = host.registry.promotion("mnist", made.promotion.number)
            assert (record.state, record.cause, record.words) == (
                "refused",
                "metric",
                "val/loss is 0.5, and 0.3 is served",
            )
            live = host.registry.served("mnist").live
            assert live is not None
            assert live.label == "mnist@200"

    asyncio.run(main())


def test_a_rollback_ends_a_split_first_and_then_goes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            with pytest.raises(ConflictError, match="mnist@200 is the first that it answers with"):
                await host.service.rollback("mnist")
            first = (await host.service.promote("mnist", model="@300")).promotion
            await done(host, server, first)
            split = (await host.service.promote("mnist", model="@100", action="split", percent=10)).promotion
            live = msgspec.to_builtins(host.registry.served("mnist").live)
            await server.say("promoted", number=2, version=live, action="split", percent=10.0)
            found = host.registry.served("mnist")
            assert found.second is not None
            assert (found.second.label, found.second_is, found.percent) == ("mnist@100", "split", 10.0)
            assert split.percent == 10.0

            single = (await host.service.rollback("mnist")).promotion
            assert single.action == "single"
            await server.say("promoted", number=3, version=live, action="single")
            assert host.registry.served("mnist").second is None

            back = (await host.service.rollback("mnist")).promotion
            assert back.version is not None
            assert (back.action, back.version.label) == ("rollback", "mnist@200")
            await done(host, server, back)
            found = host.registry.served("mnist")
            assert found.live is not None
            assert found.previous is not None
            assert (found.live.label, found.previous.label) == ("mnist@200", "mnist@300")

    asyncio.run(main())


def test_a_later_promotion_replaces_one_that_was_not_done_and_the_servers_end_refuses_the_rest(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            await host.service.promote("mnist", model="@300")
            second = (await host.service.promote("mnist", model="@100")).promotion
            await done(host, server, second)
            third = (await host.service.promote("mnist", model="@300")).promotion
            await host.end(server.run_id, RunState.CANCELLED)
            assert [item.state for item in host.registry.promotions("mnist")] == [
                "refused",
                "done",
                "replaced",
            ]
            assert host.registry.promotion("mnist", third.number).cause == "server-ended"
            with pytest.raises(ConflictError, match="is not served"):
                await host.service.promote("mnist", model="@300")

    asyncio.run(main())


def test_the_next_daemon_tells_a_server_what_was_wanted_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            await host.service.promote("mnist", model="@300")
            await wanted_number(host, server.run_id, 1)
            (host.home.run(server.run_id).serving / "wanted.json").unlink()  # as if it had died before
        async with Host(tmp_path) as host:
            await wanted_number(host, "serve-mnist", 1)
            host.ingest.follow("serve-mnist", 1)
            again = Server(host, "serve-mnist")
            await done(host, again, host.registry.promotion("mnist", 1))
            assert host.registry.promotion("mnist", 1).state == "done"

    asyncio.run(main())


def test_a_token_for_promotions_is_good_for_one_name_and_nothing_else(tmp_path: Path) -> None:
    from service_host import LOOPBACK

    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host:
            await serving(host)
            await serve(host, "mnist@200", name="other")
            async with trn.AsyncClient(host.home.root) as operator:
                token = await operator.make_promote_token("mnist")
            async with trn.AsyncClient(address=host.tcp, token=token, is_insecure=True) as client:
                made = await client.promote("mnist", "@300", by="ci")
                assert (made.number, made.by) == (1, "token (ci)")
                assert (await client.get_served("mnist")).promotions[0].number == 1
                for call in (
                    client.promote("other", "mnist@300"),
                    client.get("mnist"),
                    client.submit(job()),
                    client.served(),
                    client.make_promote_token("mnist"),
                ):
                    with pytest.raises(ForbiddenError):
                        await call
            async with trn.AsyncClient(address=host.tcp, token=token[:-1], is_insecure=True) as client:
                with pytest.raises(ForbiddenError, match="not valid here"):
                    await client.get_served("mnist")

    asyncio.run(main())


async def follow_until_quiet(host: Host) -> None:
    """What the daemon does every half second."""
    await host.successors.look()
    await host.successors.look()


def test_a_followed_runs_better_checkpoints_are_promoted_and_nothing_is_tried_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host, follow="mnist")  # mnist@200 is the best
            run = host.registry.get("mnist")
            folder = host.home.run("mnist").checkpoints
            await follow_until_quiet(host)
            assert host.registry.promotions("mnist") == []

            save_checkpoint(folder, run, 400, metric=("val/loss", 0.35))
            await follow_until_quiet(host)
            assert host.registry.promotions("mnist") == []
            save_checkpoint(folder, run, 500, metric=("val/loss", 0.2))
            await follow_until_quiet(host)
            (wanted,) = host.registry.promotions("mnist")
            assert wanted.version is not None
            assert (wanted.version.label, wanted.by, wanted.state) == ("mnist@500", "follow mnist", "wanted")
            await server.say("promotion_refused", number=1, cause="latency", words="too slow")
            save_checkpoint(folder, run, 600, metric=("val/loss", 0.3))  # another listing, the same best
            await follow_until_quiet(host)
            assert len(host.registry.promotions("mnist")) == 1

            save_checkpoint(folder, run, 700, metric=("val/loss", 0.1))
            await follow_until_quiet(host)
            await done(host, server, host.registry.promotion("mnist", 2))
            back = (await host.service.rollback("mnist")).promotion
            await done(host, server, back)
            save_checkpoint(folder, run, 800, metric=("val/loss", 0.15))
            await follow_until_quiet(host)
            assert [item.number for item in host.registry.promotions("mnist")] == [3, 2, 1]

    asyncio.run(main())


async def say_due(host: Host, server: Server, number: int, files: list[str]) -> None:
    version = facts_of(version_of(host.registry.get(server.run_id)))
    await server.say(
        "feedback_due", number=number, rows=8, files=files, folder="/rows", reason="rows", version=version
    )


FEEDBACK = {"rows": 8, "train": {"max_steps": 20, "hyperparams": {"lr": 0.1}}}


def test_feedback_submits_one_run_from_the_live_model_and_promotes_its_best_checkpoint(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host, feedback=FEEDBACK)
            await say_due(host, server, 1, ["/rows/1.parquet"])
            await say_due(host, server, 1, ["/rows/1.parquet"])  # written again after a crash
            await follow_until_quiet(host)
            (due,) = host.registry.due_feedback()
            child = host.registry.get(due.child)
            version = version_of(host.registry.get(server.run_id))
            assert (child.run_id, child.parent_run_id, child.kind) == ("mnist.2", "mnist", "training")
            assert child.config["weights"] == version["checkpoint"]
            assert child.config["dataset"]["parquet_paths"] == ["/rows/1.parquet"]
            assert (child.config["max_steps"], child.config["hyperparams"]) == (20, {"lr": 0.1})
            assert "mock_batches" not in child.config

            await host.start(child.run_id)
            save_checkpoint(host.home.run(child.run_id).checkpoints, child, 20, metric=("val/loss", 0.1))
            await follow_until_quiet(host)
            assert host.registry.promotions("mnist") == []
            await host.end(child.run_id)
            await follow_until_quiet(host)
            (wanted,) = host.registry.promotions("mnist")
            assert wanted.version is not None
            assert (wanted.version.label, wanted.by) == ("mnist.2@20", "feedback 1")
            folder = host.home.run(server.run_id).serving
            assert read_settled(folder) == 0, "the server asks for no other run while the gate looks"
            await done(host, server, wanted)
            await follow_until_quiet(host)
            assert host.registry.due_feedback() == []
            assert read_settled(folder) == 1
        async with Host(tmp_path) as host:  # the next daemon does none of it again
            await follow_until_quiet(host)
            assert len(host.registry.promotions("mnist")) == 1
            assert host.registry.counts() == {"RUNNING": 2, "COMPLETED": 1}

    asyncio.run(main())


def test_a_run_of_feedback_that_fails_promotes_nothing_and_the_next_feedback_makes_another(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host, feedback=FEEDBACK)
            await say_due(host, server, 1, ["/rows/1.parquet"])
            await follow_until_quiet(host)
            await host.start("mnist.2")
            await host.end("mnist.2", RunState.FAILED)
            await follow_until_quiet(host)
            assert host.registry.due_feedback() == []
            assert read_settled(host.home.run(server.run_id).serving) == 1
            await say_due(host, server, 2, ["/rows/2.parquet"])
            await follow_until_quiet(host)
            (due,) = host.registry.due_feedback()
            assert (due.number, due.child) == (2, "mnist.3")
            assert host.registry.get("mnist.3").config["dataset"]["parquet_paths"] == [
                "/rows/1.parquet",
                "/rows/2.parquet",
            ]
            assert host.registry.promotions("mnist") == []

    asyncio.run(main())


def test_a_run_trains_on_the_newest_rows_of_feedback_alone_where_that_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host, feedback={**FEEDBACK, "newest_rows": 9})
            for number in (1, 2, 3):  # 8 rows each
                await say_due(host, server, number, [f"/rows/{number}.parquet"])
                await follow_until_quiet(host)
            configs = [host.registry.get(f"mnist.{number}").config for number in (2, 3, 4)]
            assert [config["dataset"]["parquet_paths"] for config in configs] == [
                ["/rows/1.parquet"],
                ["/rows/1.parquet", "/rows/2.parquet"],
                ["/rows/2.parquet", "/rows/3.parquet"],
            ]

    asyncio.run(main())


def test_prune_removes_models_that_no_run_needs_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            kept = Path(version_of(host.registry.get(server.run_id))["checkpoint"]).parent
            store = host.home.models
            assert (
                ModelStore(store, host.home.snapshots).unused(host.registry.models_in_use(), grace_s=0) == []
            )
            await host.end(server.run_id, RunState.CANCELLED)
            await host.service.remove_runs([server.run_id])
            unused = ModelStore(store, host.home.snapshots).unused(host.registry.models_in_use(), grace_s=0)
            assert unused == [kept]

    asyncio.run(main())


def test_a_name_that_is_the_id_of_another_server_means_that_name_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            first = await serving(host)  # mnist, by the run serve-mnist
            token = (await host.service.make_promote_token(first.run_id)).token
            made = await serve(host, "mnist@300", name=first.run_id)
            second = Server(host, made.run.run_id)
            await second.start()
            await second.be_ready()

            mine, its = host.registry.served("mnist"), host.registry.served(first.run_id)
            assert (mine.run_id, its.run_id) == ("serve-mnist", "serve-serve-mnist")
            assert (mine.is_ready, its.is_ready) == (True, True)
            grant = host.service.tokens.authenticate([f"Bearer {token}"])
            assert grant == PromoteGrant("mnist")
            promotion = (await host.service.promote("mnist", model="@100")).promotion
            assert (promotion.name, promotion.run_id) == ("mnist", first.run_id)
            await wanted_number(host, first.run_id, 1)
            await until(lambda: first.process.num_notices > 0)
            assert read_wanted(host.home.run(second.run_id).serving) is None
            await done(host, first, promotion)
            mine, its = host.registry.served("mnist"), host.registry.served(first.run_id)
            assert mine.live is not None
            assert its.live is not None
            assert (mine.live.label, its.live.label) == ("mnist@100", "mnist@300")

            # The end of one frees its own name, and takes nothing of the other.
            await host.end(second.run_id, RunState.CANCELLED)
            again = await serve(host, "mnist@300", name=first.run_id)
            assert again.run.run_id == "serve-serve-mnist.2"
            assert host.registry.served("mnist") == mine

    asyncio.run(main())


def test_a_token_of_a_name_that_is_gone_is_not_good_for_a_server_whose_id_it_is(tmp_path: Path) -> None:
    from service_host import LOOPBACK

    async def main() -> None:
        async with Host(tmp_path, listen=LOOPBACK) as host:
            server = await serving(host, name="canary")
            async with trn.AsyncClient(host.home.root) as operator:
                token = await operator.make_promote_token("canary")
            await host.end(server.run_id, RunState.CANCELLED)
            await host.service.remove_runs([server.run_id])
            config = {**SERVE, "run_id": "canary", "name": "other", "serving": {"checkpoint": "mnist@200"}}
            made = await submit(host, config)
            assert made.run.run_id == "canary"
            async with trn.AsyncClient(address=host.tcp, token=token, is_insecure=True) as client:
                for name in ("canary", "other"):
                    with pytest.raises((ForbiddenError, NotFoundError)):
                        await client.promote(name, "mnist@300")
                    with pytest.raises((ForbiddenError, NotFoundError)):
                        await client.get_served(name)
            assert host.registry.promotions("other") == []

    asyncio.run(main())


@pytest.mark.parametrize("number", [2**63, 2**70, -1, 0])
def test_no_number_of_a_server_stops_its_events(tmp_path: Path, number: int) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            version = version_of(host.registry.get(server.run_id))
            facts = facts_of(version)
            due = {"rows": 1, "files": [], "folder": "", "reason": "rows", "version": facts}
            await server.be_ready(version, number=number)
            await server.say("promoted", number=number, version=facts)
            await server.say("promotion_refused", number=number, cause="x", words="y")
            await server.say("feedback_due", number=number, **due)
            await server.say("feedback_due", **{**due, "number": 1, "rows": number})
            await server.say("promoted", number=1, version={**facts, "step": number})
            await server.say("heartbeat", step=77)
            assert host.registry.get(server.run_id).step == 77
            made = (await host.service.promote("mnist", model="@300")).promotion
            await wanted_number(host, server.run_id, made.number)

    asyncio.run(main())


def test_a_promotion_after_an_older_backup_has_a_number_that_its_server_has_not_seen(tmp_path: Path) -> None:
    """A restored registry has forgotten promotions that the server knows; it does each number once."""

    async def main() -> None:
        async with Host(tmp_path) as host:
            server = await serving(host)
            folder = host.home.run(server.run_id).serving
            write_document(folder / WANTED, WantedModel(number=7, action="single"))
            made = (await host.service.promote("mnist", model="@100")).promotion
            assert made.number == 8
            await wanted_number(host, server.run_id, 8)
            version = msgspec.convert(version_of(host.registry.get(server.run_id)), ModelVersion)
            write_document(folder / LIVE, LiveModel(number=20, version=version))
            made = (await host.service.promote("mnist", model="@300")).promotion
            assert made.number == 21
            await wanted_number(host, server.run_id, 21)
            (folder / WANTED).write_bytes(b'{"number":9e99}')  # what cannot be read says nothing
            made = (await host.service.promote("mnist", model="@100")).promotion
            assert made.number == 22

    asyncio.run(main())
