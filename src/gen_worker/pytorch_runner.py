"""`python -m gen_worker.pytorch_runner --config C`: train from a JSON, YAML or TOML file, without code.

The file is a job whose `hyperparams` name model, data columns, loss and optimizer. Events, checkpoints, signals, exit codes
and resume are those of a worker. Stdout is JSON lines only.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gen_worker.errors import ExitCode, SpecError, WorkerError

if TYPE_CHECKING:
    from gen_worker.pytorch.job_file import JobFile
    from gen_worker.pytorch.trainer import PyTorchTrainer

__all__ = ["PyTorchTrainer", "main"]

EXAMPLE = """example:
  # config.yaml
  max_steps: 500
  dataset: {parquet_paths: [digits], batch_size: 64, shuffle: true}
  hyperparams:
    model: {type: mlp, args: {out_features: 10}}
    columns:
      inputs: {pixels: {scale: 0.0039}}
      target: label
    loss: cross_entropy
    learning_rate: 0.003

  python -m gen_worker.pytorch_runner --config config.yaml --set max_steps=1000

Every field is in docs/job-reference.md and docs/runner-reference.md. Run it again to resume after a stop."""


def __getattr__(name: str) -> Any:
    """The trainer class, on first use: it imports torch."""
    if name == "PyTorchTrainer":
        from gen_worker.pytorch.trainer import PyTorchTrainer

        return PyTorchTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gen_worker.pytorch_runner",
        description="Train from a config file. Events are JSON lines on stdout, logs go to stderr.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--config", type=Path, required=True, metavar="FILE", help="the job: JSON, YAML or TOML by its suffix"
    )
    add(
        "--weights", type=Path, metavar="FILE", help="start from these weights: .meta.json, .pt, .safetensors"
    )
    add("--output", type=Path, metavar="DIR", help="the run's folder (default: runs/<run_id>)")
    add("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="change a field")
    add("--profile", metavar="NAME", help="apply one of the file's profiles")
    add("--check", action="store_true", help="only check fields, data columns and model; do not train")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The exit code is the worker's."""
    # A signal that arrives during the imports is kept: the attempt answers it with its terminal event.
    early: list[int] = []
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as end:
        return 0 if end.code in (0, None) else int(ExitCode.STARTUP)
    with _stdout_for_events() as fd:
        try:
            from gen_worker.pytorch.job_file import read_job_file

            job_file = read_job_file(
                options.config, profile=options.profile, settings=options.settings, weights=options.weights
            )
            if options.check:
                _say(fd, "job_checked", run_id=job_file.job.run_id, **_check(job_file))
                return int(ExitCode.COMPLETED)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _frame: early.append(number))
            return _run(job_file, options.output or Path("runs") / job_file.job.run_id, fd, early)
        except WorkerError as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            faults = list(map(str, error.faults)) if isinstance(error, SpecError) else [str(error)]
            _say(fd, "job_rejected", config_path=str(options.config), category=error.category, faults=faults)
            print(f"gen_worker: {error.category}: {text}", file=sys.stderr)  # noqa: T201
            return int(error.exit_code)


def _run(job_file: "JobFile", folder: Path, fd: int, early_signals: Sequence[int]) -> int:
    from gen_worker.pytorch.event_mirror import EventMirror
    from gen_worker.pytorch.job_file import write_job_file
    from gen_worker.trainer.runtime import run_worker

    job_path = write_job_file(job_file, folder)
    folder = folder.absolute()
    events_path = folder / "metrics" / "events.jsonl"
    run_id = job_file.job.run_id
    # `--output` wins over variables for other workers.
    for name in ("TRAINER_PLUGIN", "TRAINER_CONTRACT_PATH"):
        os.environ.pop(name, None)
    os.environ.update(
        WORKER_MODE="trainer",
        TRAINER_JOB_SPEC_PATH=str(job_path),
        TRAINER_ARTIFACTS_DIR=str(folder),
        TRAINER_CHECKPOINTS_DIR=str(folder / "checkpoints"),
        TRAINER_SAMPLES_DIR=str(folder / "samples"),
        TRAINER_EVENTS_PATH=str(events_path),
    )
    mirror = EventMirror(events_path, fd)  # from here on: earlier events are of earlier attempts
    _say(
        fd,
        "job_started",
        run_id=run_id,
        config_path=str(job_file.config_path.absolute()),
        output_dir=str(folder),
        events_path=str(events_path),
        devices=job_file.job.resources.device_names,
    )
    with mirror:
        code = int(run_worker(early_signals))
    _say(fd, "job_completed" if code == 0 else "job_failed", run_id=run_id, exit_code=code)
    return code


def _check(job_file: "JobFile") -> dict[str, Any]:
    """The checks of a worker before its first step, without writing anything."""
    from gen_worker.contract.job.rules import RUNNER
    from gen_worker.trainer.api import load_trainer_plugin
    from gen_worker.trainer.attempt.data_sources import open_held_out_data, open_training_data
    from gen_worker.trainer.attempt.runtime_env import read_environment
    from gen_worker.trainer.contracts import StepContext
    from gen_worker.trainer.inputs import MaterializedInputs
    from gen_worker.trainer.model_runtime import prepare_model_runtime

    job = job_file.job
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    environment = read_environment(
        {**os.environ, "TRAINER_JOB_SPEC_PATH": str(job_file.config_path.absolute())}
    )
    trainer = load_trainer_plugin(job.trainer or RUNNER)
    runtime = prepare_model_runtime(
        device=job.resources.device_names[0] if job.resources.device_names else None,
        precision=job.precision,
        seed=job.seed,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(runtime.close)
        source: Any = None
        if not job.inputs.dataset_parquet_refs:
            nothing = MaterializedInputs(base_model_path=None, parquet_paths=(), resume_checkpoint_path=None)
            source = open_training_data(environment, job, nothing, rank=0, world_size=1)
            stack.callback(source.close)
        ctx = StepContext(
            job=job,
            dataset=source,
            device=runtime.device,
            dtype=runtime.dtype,
            model_handles={} if job.weights is None else {"weights": Path(job.weights)},
        )
        trainer.setup(ctx)
        state = trainer.configure(ctx)
        prepare = getattr(state, "prepare", None)
        for held_out in (job.validation, job.test):
            if held_out is not None and prepare is not None:
                data = open_held_out_data(environment, job, held_out.dataset, rank=0, world_size=1)
                stack.callback(data.close)
                prepare.require(getattr(data, "schema", None))
        parameters = list(getattr(getattr(state, "module", None), "parameters", list)())
    return {
        "device": runtime.device,
        "num_parameters": sum(value.numel() for value in parameters),
        "num_trained": sum(value.numel() for value in parameters if value.requires_grad),
        "rows": getattr(source, "num_rows", None),
        "steps_per_epoch": getattr(source, "batches_per_epoch", None),
    }


@contextlib.contextmanager
def _stdout_for_events() -> Iterator[int]:
    """A descriptor of the real stdout; other prints go to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield kept
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _say(fd: int, event: str, **fields: Any) -> None:
    from gen_worker.pytorch.event_mirror import write_all

    line = {"event": event, "timestamp_ms": time.time_ns() // 1_000_000, **fields}
    with contextlib.suppress(OSError):  # the reader is gone; the exit code remains
        write_all(fd, msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
