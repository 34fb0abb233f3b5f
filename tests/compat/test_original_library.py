"""What an author or a test of the original `gen_worker.trainer` does works here unchanged.

Written as an outsider would: only names that are importable from `gen_worker.trainer`, plain fakes, modules that are
made in memory.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gen_worker.trainer import (
    ArtifactUploader,
    ArtifactWriter,
    StepContext,
    StepControlHints,
    StepResult,
    TrainerSubprocessContractV1,
    TrainingCanceled,
    TrainingJobSpec,
    TrainingReporter,
    load_trainer_plugin,
    read_subprocess_contract,
    run_training_loop,
    write_subprocess_contract,
)


class SoundTrainer:
    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"steps": 0}

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        state["steps"] += 1
        return StepResult(metrics={"loss": float(batch)})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class Memory:
    """Modules without a file, gone with the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def module(self, **names: Any) -> str:
        module = types.ModuleType("made_in_memory")
        vars(module).update(names)
        self._monkeypatch.setitem(sys.modules, "made_in_memory", module)
        return "made_in_memory"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


class TestLoading:
    def test_a_class_in_a_module_without_a_file_is_built_and_an_instance_taken(self, memory: Memory) -> None:
        ready = SoundTrainer()
        name = memory.module(Mine=SoundTrainer, ready=ready)
        assert isinstance(load_trainer_plugin(f"{name}:Mine"), SoundTrainer)
        assert load_trainer_plugin(f"{name}:ready") is ready

    @pytest.mark.parametrize("as_instance", [False, True])
    def test_the_only_candidate_of_a_module_without_a_file_is_found(
        self, memory: Memory, as_instance: bool
    ) -> None:
        item = SoundTrainer() if as_instance else SoundTrainer
        name = memory.module(Mine=item, StepResult=StepResult, number=3, other=object())
        assert isinstance(load_trainer_plugin(name), SoundTrainer)

    @pytest.mark.parametrize("alias", ["TRAINER", "Trainer", "trainer"])
    def test_the_usual_names_win_in_a_module_without_a_file(self, memory: Memory, alias: str) -> None:
        class Chosen(SoundTrainer): ...

        assert isinstance(load_trainer_plugin(memory.module(Other=SoundTrainer, **{alias: Chosen})), Chosen)

    def test_several_candidates_are_a_value_error(self, memory: Memory) -> None:
        class Second(SoundTrainer): ...

        with pytest.raises(ValueError, match="multiple trainer candidates") as caught:
            load_trainer_plugin(memory.module(First=SoundTrainer, Second=Second))
        assert "made_in_memory:First, made_in_memory:Second" in str(caught.value)

    def test_no_candidate_and_no_such_symbol_are_value_errors(self, memory: Memory) -> None:
        name = memory.module(number=3)
        for ref in (name, f"{name}:Missing", "", ":A"):
            with pytest.raises(ValueError):  # noqa: PT011  (which words is said in tests/unit/test_api.py)
                load_trainer_plugin(ref)

    def test_missing_hooks_are_a_type_error_that_names_them(self, memory: Memory) -> None:
        class Half:
            def setup(self, ctx: StepContext) -> None: ...

        with pytest.raises(TypeError, match="missing configure, prepare_batch"):
            load_trainer_plugin(f"{memory.module(Half=Half)}:Half")

    def test_a_plain_function_is_a_type_error(self, memory: Memory) -> None:
        def step(ctx: StepContext, batch: Any) -> StepResult:
            return StepResult()

        with pytest.raises(TypeError, match="plain callables are unsupported"):
            load_trainer_plugin(f"{memory.module(step=step)}:step")

    def test_what_is_no_class_and_a_class_that_needs_arguments_are_type_errors(self, memory: Memory) -> None:
        class Needy(SoundTrainer):
            def __init__(self, rate: float) -> None: ...

        name = memory.module(Needy=Needy, number=3)
        for ref in (f"{name}:Needy", f"{name}:number"):
            with pytest.raises(TypeError):
                load_trainer_plugin(ref)


class TestMadeByHand:
    def test_a_job_and_a_context_need_no_more_than_what_a_test_says(self) -> None:
        job = TrainingJobSpec(run_id="r", max_steps=1)
        ctx = StepContext(job=job)
        assert (ctx.job, ctx.step, ctx.epoch, ctx.rank, ctx.world_size) == (job, 0, 0, 0, 1)
        assert (ctx.dataset, ctx.optimizer, ctx.scheduler) == (None, None, None)
        assert not ctx.is_canceled()
        assert job.hyperparams == {}
        assert StepContext(job=job, device="cuda:0", dtype="bf16").device == "cuda:0"


class TestSubprocessContract:
    def test_it_needs_a_plugin_and_a_job_and_the_folders_are_the_documented_ones(
        self, tmp_path: Path
    ) -> None:
        contract = TrainerSubprocessContractV1(trainer_plugin="m:T", job_spec_path="/job.json")
        assert contract.contract_version == "v1"
        assert contract.checkpoints_dir == "/tmp/training/checkpoints"
        assert contract.samples_dir == "/tmp/training/samples"
        assert contract.events_path == "/tmp/training/metrics/events.jsonl"
        assert contract.extra_env == {}
        write_subprocess_contract(str(tmp_path / "contract.json"), contract)
        assert read_subprocess_contract(str(tmp_path / "contract.json")) == contract

    @pytest.mark.parametrize(
        "wrong",
        [
            {"contract_version": "v2"},
            {"trainer_plugin": ""},
            {"trainer_plugin": "  "},
            {"job_spec_path": ""},
            {"events_path": None},
            {"checkpoints_dir": ""},
        ],
    )
    def test_a_wrong_version_and_an_empty_field_are_value_errors(self, wrong: dict[str, Any]) -> None:
        fields = {"trainer_plugin": "m:T", "job_spec_path": "/job.json", **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TrainerSubprocessContractV1(**fields)


class FakeReporter:
    """Seven methods, no base class, and names of its own that our reporter uses for methods."""

    def __init__(self, cancel_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.metrics: list[tuple[str, float, int]] = []
        self.log: list[str] = []
        self.cancel_at = cancel_at

    def started(self, *, run_id: str) -> None:
        self.calls.append(("started", run_id))

    def metric(self, *, name: str, value: float, step: int) -> None:
        self.metrics.append((name, value, step))

    def checkpoint(self, *, path: str, step: int) -> None:
        self.calls.append(("checkpoint", path, step))

    def sample(self, *, path: str, step: int) -> None:
        self.calls.append(("sample", path, step))

    def completed(self, *, step: int, final_checkpoint: str | None) -> None:
        self.calls.append(("completed", step, final_checkpoint))

    def failed(self, *, step: int, error: str) -> None:
        self.calls.append(("failed", step, error))

    def is_canceled(self) -> bool:
        return self.cancel_at is not None and len(self.metrics) >= self.cancel_at


class FakeWriter:
    final_path: str | None = "/nowhere/final.safetensors"

    def __init__(self) -> None:
        self.payloads: list[tuple[Any, ...]] = []

    def write_checkpoint(self, *, step: int, state_payload: Any, trainer: Any, state: Any, ctx: Any) -> str:
        self.payloads.append((step, dict(state_payload), type(trainer), dict(state), ctx.step))
        return f"/nowhere/{step}.safetensors"

    def write_samples(self, *, step: int, state: Any, ctx: Any) -> list[str]:
        return [f"/nowhere/{step}.png", f"/nowhere/{step}.mp4"]

    def finalize(self, *, state_payload: Any, trainer: Any, state: Any, ctx: Any) -> str | None:
        self.payloads.append(("final", dict(state_payload), type(trainer), dict(state), ctx.step))
        return self.final_path


class FakeUploader:
    def __init__(self) -> None:
        self.checkpoint: list[tuple[Any, ...]] = []
        self.others: list[tuple[Any, ...]] = []

    def upload_metrics(self, *, metrics: dict[str, float], step: int) -> dict[str, bool]:
        self.others.append((metrics, step))
        return {"ok": True}

    def upload_checkpoint(self, *, local_path: str, step: int) -> dict[str, bool]:
        self.checkpoint.append((local_path, step))
        return {"ok": True}

    def upload_sample(self, *, local_path: str, step: int) -> dict[str, bool]:
        self.others.append((local_path, step))
        return {"ok": True}


def run(trainer: Any = None, *, batches: Any = range(1, 8), **parts: Any) -> int:
    """The loop over fakes; what is of the job by its own names, everything else as the loop's."""
    names = ("max_steps", "metric_every", "checkpoint_every", "sample_every")
    fields = {"max_steps": 5, "metric_every": 1, "checkpoint_every": 0, "sample_every": 0}
    fields |= {name: parts.pop(name) for name in names if name in parts}
    job = TrainingJobSpec(run_id="outsider", **fields)
    given = {"reporter": FakeReporter(), "artifact_writer": FakeWriter(), **parts}
    return run_training_loop(
        job=job, ctx=StepContext(job=job), trainer=trainer or SoundTrainer(), batches=batches, **given
    )


class TestLoop:
    def test_plain_parts_are_told_what_the_cadences_ask_for(self) -> None:
        reporter, writer, uploader = FakeReporter(), FakeWriter(), FakeUploader()
        step = run(
            reporter=reporter,
            artifact_writer=writer,
            uploader=uploader,
            metric_every=2,
            checkpoint_every=3,
            sample_every=4,
        )
        assert step == 5
        assert reporter.metrics == [("train/loss", 2.0, 2), ("train/loss", 4.0, 4)]
        assert reporter.calls == [
            ("started", "outsider"),
            ("checkpoint", "/nowhere/3.safetensors", 3),
            ("sample", "/nowhere/4.png", 4),
            ("sample", "/nowhere/4.mp4", 4),
            ("completed", 5, "/nowhere/final.safetensors"),
        ]
        assert writer.payloads == [
            (3, {"steps": 3}, SoundTrainer, {"steps": 3}, 3),
            ("final", {"steps": 5}, SoundTrainer, {"steps": 5}, 5),
        ]
        assert uploader.checkpoint == [("/nowhere/3.safetensors", 3)]
        assert uploader.others == [
            ({"train/loss": 2.0}, 2),
            ({"train/loss": 4.0}, 4),
            ("/nowhere/4.png", 4),
            ("/nowhere/4.mp4", 4),
        ]

    def test_a_writer_that_keeps_no_final_file_ends_with_none(self) -> None:
        reporter, writer = FakeReporter(), FakeWriter()
        writer.final_path = None
        run(reporter=reporter, artifact_writer=writer, max_steps=1)
        assert reporter.calls[-1] == ("completed", 1, None)

    def test_a_writer_that_makes_no_samples_may_return_nothing(self) -> None:
        class Silent(FakeWriter):
            def write_samples(self, *, step: int, state: Any, ctx: Any) -> Any:
                return None

        reporter = FakeReporter()
        assert run(reporter=reporter, artifact_writer=Silent(), sample_every=2) == 5
        assert "sample" not in [name for name, *_ in reporter.calls]

    @pytest.mark.parametrize(("reason", "words"), [(None, "canceled"), ("asked by Ann", "asked by Ann")])
    def test_a_cancelled_loop_raises_and_reports_failed_once(self, reason: str | None, words: str) -> None:
        reporter = FakeReporter(cancel_at=2)
        if reason is not None:
            reporter.cancel_reason = reason  # type: ignore[attr-defined]
        with pytest.raises(TrainingCanceled, match=words):
            run(reporter=reporter)
        assert [name for name, *_ in reporter.calls] == ["started", "checkpoint", "failed"]
        assert reporter.calls[-1] == ("failed", 2, words)

    def test_a_loop_that_was_cancelled_before_it_began_takes_no_step_and_writes_nothing(self) -> None:
        reporter, writer = FakeReporter(cancel_at=0), FakeWriter()
        with pytest.raises(TrainingCanceled):
            run(reporter=reporter, artifact_writer=writer)
        assert reporter.calls == [("started", "outsider"), ("failed", 0, "canceled")]
        assert writer.payloads == []

    def test_an_error_of_a_step_is_reported_with_that_step_and_raised_as_it_is(self) -> None:
        class Failing(SoundTrainer):
            def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
                if batch == 2:
                    raise RuntimeError("boom at step 2")
                return super().train_step(batch, state, ctx)

        reporter, writer = FakeReporter(), FakeWriter()
        with pytest.raises(RuntimeError, match="boom at step 2"):
            run(Failing(), reporter=reporter, artifact_writer=writer)
        assert reporter.metrics == [("train/loss", 1.0, 1)]
        assert reporter.calls == [("started", "outsider"), ("failed", 2, "boom at step 2")]
        assert writer.payloads == []  # the state may be half changed

    def test_a_reporter_that_fails_does_not_hide_the_cause(self) -> None:
        class Broken(FakeReporter):
            def failed(self, *, step: int, error: str) -> None:
                raise OSError("the bus is gone")

        class Failing(SoundTrainer):
            def setup(self, ctx: StepContext) -> None:
                raise RuntimeError("no weights")

        with pytest.raises(RuntimeError, match="no weights"):
            run(Failing(), reporter=Broken())

    def test_a_result_without_metrics_is_a_type_error(self) -> None:
        class Wrong(SoundTrainer):
            def train_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
                return {"loss": 1.0}

        reporter = FakeReporter()
        with pytest.raises(TypeError, match="StepResult-like"):
            run(Wrong(), reporter=reporter)
        assert reporter.calls[-1][:2] == ("failed", 1)

    def test_anything_with_metrics_is_a_result(self) -> None:
        class Loose(SoundTrainer):
            def train_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
                return types.SimpleNamespace(metrics={"loss": 1.0} if batch == 1 else None)

        reporter = FakeReporter()
        assert run(Loose(), reporter=reporter, max_steps=2) == 2
        assert reporter.metrics == [("train/loss", 1.0, 1)]

    def test_a_step_may_skip_its_metrics_and_give_no_backoff(self) -> None:
        class Quiet(SoundTrainer):
            def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
                control = StepControlHints(skip_cadence_emit=batch == 2, backoff_seconds=None)
                return StepResult(metrics={"loss": float(batch)}, control=control)

        reporter = FakeReporter()
        run(Quiet(), reporter=reporter, max_steps=3)
        assert [step for _, _, step in reporter.metrics] == [1, 3]

    def test_a_learning_rate_that_the_state_names_is_reported(self) -> None:
        class Rated(SoundTrainer):
            def configure(self, ctx: StepContext) -> dict[str, Any]:
                return {"steps": 0, "learning_rate": 0.001}

        reporter = FakeReporter()
        run(Rated(), reporter=reporter, max_steps=1)
        assert reporter.metrics == [("train/loss", 1.0, 1), ("train/lr", 0.001, 1)]

    def test_a_resumed_loop_goes_on_with_its_counters_and_hands_on_the_payload(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        class Keeping(SoundTrainer):
            def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: Any) -> None:
                seen.append((checkpoint_dir, dict(payload), dict(state)))

        (tmp_path / "step-3.json").write_text("{}")
        reporter = FakeReporter()
        step = run(
            Keeping(),
            reporter=reporter,
            checkpoint_every=2,
            start_step=3,
            resume_state_payload={"steps": 3},
            resume_checkpoint_path=str(tmp_path / "step-3.json"),
        )
        assert step == 5
        assert seen == [(str(tmp_path), {"steps": 3}, {"steps": 3})]
        assert reporter.metrics == [("train/loss", 1.0, 4), ("train/loss", 2.0, 5)]
        assert ("checkpoint", "/nowhere/4.safetensors", 4) in reporter.calls

    def test_batches_may_come_from_iter_batches(self) -> None:
        class Feed:
            def iter_batches(self) -> Any:
                return iter([7, 8])

        reporter = FakeReporter()
        assert run(batches=Feed(), reporter=reporter, max_steps=2) == 2
        assert [value for _, value, _ in reporter.metrics] == [7.0, 8.0]

    def test_our_own_parts_and_plain_ones_can_be_mixed(self, tmp_path: Path) -> None:
        reporter = TrainingReporter(tmp_path / "events.jsonl", run_id="outsider")
        run(reporter=reporter, checkpoint_every=2, sample_every=2, max_steps=2)
        reporter.close()
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        told = [(event["event"], event.get("path")) for event in events if event["event"] != "metric"]
        assert told == [
            ("started", None),
            ("checkpoint", "/nowhere/2.safetensors"),
            ("sample", "/nowhere/2.png"),
            ("video", "/nowhere/2.mp4"),
            ("checkpoint", "/nowhere/final.safetensors"),
            ("completed", None),
        ]
        fake = FakeReporter()
        with ArtifactWriter(tmp_path / "c", tmp_path / "s", run_id="outsider") as writer:
            run(reporter=fake, artifact_writer=writer, checkpoint_every=2, max_steps=3)
        assert fake.calls[-2:] == [
            ("checkpoint", str(tmp_path / "c" / "step-00000002.pt"), 2),
            ("completed", 3, str(tmp_path / "c" / "final.pt")),
        ]


class TestOurOwnParts:
    """They have the plain methods, so they work in a loop of somebody's own."""

    def test_the_writer_saves_samples_and_finalizes_by_the_plain_methods(self, tmp_path: Path) -> None:
        class Sampled(SoundTrainer):
            def sample(self, *, state: Any, step: int, request: Any, output_dir: str, ctx: Any) -> None:
                Path(output_dir, "a.txt").write_text(f"{step} {state['steps']}")

            def save_checkpoint(
                self, *, state: Any, step: int, output_dir: str, final: bool, ctx: Any
            ) -> None:
                Path(output_dir, "own.txt").write_text(f"{step} {final}")

        trainer, job = Sampled(), TrainingJobSpec(run_id="r", max_steps=1)
        ctx = StepContext(job=job)
        given = {"trainer": trainer, "state": {"steps": 4}, "ctx": ctx, "state_payload": {"steps": 4}}
        with ArtifactWriter(tmp_path / "c", tmp_path / "s", run_id="r", trainer=trainer) as writer:
            path = writer.write_checkpoint(step=4, **given)
            (sample,) = writer.write_samples(step=4, state={"steps": 4}, ctx=ctx)
            final = writer.finalize(**given)
        assert Path(path).with_suffix(".meta.json").exists()  # durable when the call returned
        assert (tmp_path / "c" / "step-00000004.files" / "own.txt").read_text() == "4 False"
        assert Path(sample).read_text() == "4 4"
        assert Path(final).name == "final.pt"

    def test_the_reporter_says_whether_and_why_it_was_cancelled(self, tmp_path: Path) -> None:
        job = TrainingJobSpec(run_id="r", max_steps=1)
        ctx = StepContext(job=job)
        reporter = TrainingReporter(tmp_path / "events.jsonl", run_id="r", stop=ctx.is_canceled)
        assert not reporter.is_canceled()
        reporter.started(run_id="r")
        with pytest.raises(ValueError, match="run 'other'"):
            reporter.started(run_id="other")
        ctx.is_canceled.request("by hand")
        assert reporter.is_canceled()
        assert reporter.cancel_reason == "by hand"
        reporter.failed(step=1, error="by hand")
        reporter.close()

    def test_the_uploader_has_the_plain_methods(self, tmp_path: Path) -> None:
        from gen_worker.trainer.uploader import UploadTargets

        uploader = ArtifactUploader(targets=UploadTargets(), run_id="r")
        uploader.upload_metrics(metrics={"loss": 1.0}, step=1)
        uploader.upload_checkpoint(local_path=str(tmp_path / "a.pt"), step=1)
        uploader.upload_sample(local_path=str(tmp_path / "a.png"), step=1)
        uploader.close()
