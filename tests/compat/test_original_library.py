"""What an author or a test of the original `gen_worker.trainer` does works here unchanged.

Written as an outsider would: only names that are importable from `gen_worker.trainer`, plain fakes, modules that are
made in memory.
"""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gen_worker.trainer import (
    StepContext,
    StepResult,
    TrainerSubprocessContractV1,
    TrainingJobSpec,
    load_trainer_plugin,
    read_subprocess_contract,
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
            {"job_spec_path": ""},
            {"events_path": None},
            {"checkpoints_dir": ""},
        ],
    )
    def test_a_wrong_version_and_an_empty_field_are_value_errors(self, wrong: dict[str, Any]) -> None:
        fields = {"trainer_plugin": "m:T", "job_spec_path": "/job.json", **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TrainerSubprocessContractV1(**fields)
