"""The runner's trainer class: everything is set in the job's `hyperparams`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import CheckpointError, SpecError, TrainStepError
from gen_worker.pytorch.config import RunnerConfig, with_column
from gen_worker.pytorch.full_state import load_module_state, load_optimizer_state, optimizer_state
from gen_worker.pytorch.model.build import shapes_in_words
from gen_worker.pytorch.model.metrics import Evaluation
from gen_worker.pytorch.runner_state import RunnerState, build_state
from gen_worker.pytorch.sampling import find_tokenizer, write_samples
from gen_worker.pytorch.sections import read_runner_config
from gen_worker.pytorch.serving import ServedState, answer_rows
from gen_worker.pytorch.step import Prepared, stand_in
from gen_worker.trainer.attempt.failure import author_place
from gen_worker.trainer.contracts import SampleRequest, StepContext, StepResult

STATE_VERSION = 1


class PyTorchTrainer:
    """Trains from a job file. See `docs/pytorch-runner.md`."""

    config: RunnerConfig
    input_columns: list[str]  # what `predict` reads
    shards_when_loading = True  # `cut_like`
    handles_empty_shares = True  # a sum over the global batch, and a forward pass over rows of zeros

    def check_job(self, job: TrainingJobSpec) -> list[str]:
        """All faults of the config, before the run starts."""
        num_processes = job.resources.processes * job.resources.nodes
        try:
            return _sampling_faults(_read_config(job), job, num_processes)
        except SpecError as error:
            return error.faults

    def find_start_faults(self, job: TrainingJobSpec, base_dir: Path) -> list[str]:
        """What `configure` would reject for this data. Called before the run is queued, for a valid config."""
        from gen_worker.pytorch.start_check import find_start_faults

        return find_start_faults(_read_config(job), job, base_dir)

    def setup(self, ctx: StepContext) -> None:
        self.config = _read_config(ctx.job)
        faults = _sampling_faults(self.config, ctx.job, ctx.world_size)
        if faults:
            raise SpecError(f"the job of run {ctx.job.run_id}", faults)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        items = self.config.columns.inputs.items()
        self.input_columns = [with_column(item, name).column or name for name, item in items]

    def configure(self, ctx: StepContext) -> RunnerState:
        return build_state(self.config, ctx)

    def prepare_batch(self, raw_batch: Any, state: RunnerState, ctx: StepContext) -> Prepared:
        return state.prepare(raw_batch, step=ctx.step if state.evaluation is None else None)

    def train_step(self, prepared_batch: Prepared, state: RunnerState, ctx: StepContext) -> StepResult:
        try:
            return state.step(prepared_batch, ctx)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if author_place(error) is not None:
                raise  # in the author's code: keep the traceback
            raise _step_fault(error, prepared_batch, self.config) from error

    def state_dict(self, state: RunnerState) -> dict[str, Any]:
        """Complete and by names, for any number of processes. A collective call."""
        payload = {
            "version": STATE_VERSION,
            "model": dict(state.module.state_dict()),
            "optimizer": optimizer_state(state.module, state.optimizer),
        }
        if state.scheduler is not None:
            payload["schedule"] = state.scheduler.state_dict()
        if state.scaler is not None:
            payload["scaler"] = state.scaler.state_dict()
        if state.average is not None:
            payload["ema"] = dict(state.average.module.state_dict())
        if state.classes is not None:
            payload["classes"] = list(state.classes)
        return payload

    def load_state_dict(self, state: RunnerState, payload: dict[str, Any], ctx: StepContext) -> None:  # noqa: ARG002
        if payload.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint's state has version {payload.get('version')!r}, this release reads {STATE_VERSION}:"
                " resume with the release that wrote it, or start a new run from its weights (`weights`)"
            )
        _require_same_parts(state, payload)
        _require_same_classes(state, payload)
        load_module_state(state.module, payload["model"], what="model")
        load_optimizer_state(state.module, state.optimizer, payload["optimizer"])
        if state.scheduler is not None:
            state.scheduler.load_state_dict(payload["schedule"])
        if state.scaler is not None:
            state.scaler.load_state_dict(payload["scaler"])
        if state.average is not None:
            load_module_state(state.average.module, payload["ema"], what="ema")
        if state.classes is None:
            state.classes = payload.get("classes")  # the data is not there: the model is served

    def begin_evaluation(self, kind: str, state: RunnerState, ctx: StepContext) -> None:  # noqa: ARG002
        state.evaluation = Evaluation(state.metrics, select=state.select)

    def validate_step(self, batch: Prepared, state: RunnerState, ctx: StepContext) -> dict[str, Any]:  # noqa: ARG002
        """The mean loss of the batch. `end_evaluation` reports metrics, and a loss that is not a mean over rows."""
        inputs, target, rows, _ = batch
        with torch.no_grad(), state.autocast:
            if rows == 0:
                state.evaluate(stand_in(inputs))  # a sharded model needs all processes in the forward pass
                return {}
            output = state.evaluate(inputs)
            loss, evaluation = state.loss, state.evaluation
            if evaluation is None:
                return {"loss": loss.mean(output, target)}
            evaluation.update(output, target)
            if loss.total is None or loss.count is None:
                return {"loss": loss.mean(output, target)}
            evaluation.add_loss(loss.total(output, target), loss.count(target))
            return {}

    test_step = validate_step

    def end_evaluation(self, kind: str, state: RunnerState, ctx: StepContext) -> dict[str, Any]:  # noqa: ARG002
        evaluation, state.evaluation = state.evaluation, None
        if evaluation is None:
            return {}
        has_total = state.loss.total is not None
        return evaluation.result(world_size=ctx.world_size if has_total else 1, device=str(ctx.device))

    def serving_state(self, state: RunnerState, ctx: StepContext) -> ServedState:  # noqa: ARG002
        return ServedState.of(state)

    def predict(self, rows: Any, state: RunnerState | ServedState, ctx: StepContext) -> dict[str, Any]:  # noqa: ARG002
        """Of a classifier `class` and `probability`, of a language model `next_token` and `probability`, else `output`."""
        return answer_rows(rows, state, self.config.loss_spec.name)

    def sample(
        self,
        *,
        state: RunnerState,
        step: int,  # noqa: ARG002
        request: SampleRequest,
        output_dir: str,
        ctx: StepContext,
    ) -> None:
        spec, shape = self.config.sample, state.prepare.row_shape
        if spec is None or shape is None:
            return
        write_samples(
            state.evaluated_module,
            request,
            output_dir,
            spec=spec,
            tokenizer=find_tokenizer(spec),
            context_length=getattr(state.module, "context_length", shape[0]),
            device=str(ctx.device),
        )


def _require_same_parts(state: RunnerState, payload: Mapping[str, Any]) -> None:
    live = {
        "schedule": ("scheduler", state.scheduler),
        "scaler": ("precision fp16", state.scaler),
        "ema": ("ema", state.average),
    }
    for name, (setting, part) in live.items():
        if (part is not None) != (name in payload):
            had, has = ("without", "with") if part is not None else ("with", "without")
            raise CheckpointError(
                f"the checkpoint was made {had} `{setting}`, but the job is {has} it: restore the setting, or start a"
                " new run from its weights (`weights`)"
            )


def _require_same_classes(state: RunnerState, payload: Mapping[str, Any]) -> None:
    """Class numbers follow the sorted names: one more folder changes the meaning of a number."""
    saved, now = payload.get("classes"), state.classes
    if saved is not None and now is not None and saved != now:
        raise CheckpointError(
            f"the checkpoint was trained on the classes {', '.join(saved)}, the data now has {', '.join(now)}: restore"
            " the folders, or start a new run from its weights (`weights`)"
        )


def _step_fault(error: Exception, prepared: Prepared, config: RunnerConfig) -> TrainStepError:
    text = str(error).strip().partition("\n")[0]
    hint, remedy = "", ""
    inputs, target = prepared[0], prepared[1]
    if isinstance(error, IndexError):
        hint = ": a class or token id in the data is out of the model's range"
        if isinstance(target, torch.Tensor) and target.numel() and not target.is_floating_point():
            hint += f" (target: min {int(target.min())}, max {int(target.max())} in this batch)"
        remedy = ". Increase the model's number of outputs (`out_features`, `vocab_size`), or fix the data"
    return TrainStepError(
        f"the step failed{hint}: {type(error).__name__}: {text} (model {config.model.type}, loss"
        f" {config.loss_spec.name}, inputs {shapes_in_words(inputs)}, target {shapes_in_words(target)}){remedy}"
    )


def _read_config(job: TrainingJobSpec) -> RunnerConfig:
    return read_runner_config(
        job.hyperparams, source=f"the job of run {job.run_id}", sample_every=job.sample_every
    )


def _sampling_faults(config: RunnerConfig, job: TrainingJobSpec, num_processes: int) -> list[str]:
    faults: list[str] = []
    if not job.sample_every:
        return faults
    if num_processes > 1 and config.strategy == "fsdp":
        faults.append(
            f"sample_every: found {job.sample_every}, but sampling runs in one process and an fsdp model needs all:"
            " set it to 0, or use `hyperparams.strategy: ddp`"
        )
    objects = [entry for entry in job.sample_prompts if not isinstance(entry, str)]
    if objects:
        faults.append(f"sample_prompts: found {objects[0]!r:.60}, expected text")
    return faults
