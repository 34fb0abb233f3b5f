"""Weights & Biases as a logger's back end, through its own client: online, or offline into the run's folder."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gen_worker.errors import StartupError
from gen_worker.trainer.callbacks.background_logger import (
    Ending,
    Entry,
    RefusedError,
    import_extra,
    job_parameters,
)
from gen_worker.trainer.callbacks.base import RunHandle

if TYPE_CHECKING:
    from gen_worker.trainer.callbacks.loggers import WandbLogger

Mode = Literal["online", "offline", "disabled"]

STEP = "trainer/step"  # the x axis of all charts: W&B's own counter cannot go back when a run resumes


class WandbSink:
    """One W&B run. Its id is stored in the run's folder, so that every attempt continues the same one."""

    def __init__(self, logger: "WandbLogger", run: RunHandle) -> None:
        self._wandb = import_extra("wandb", "wandb")
        self._mode = logger.mode or import_extra("wandb.sdk.wandb_setup", "wandb").singleton().settings.mode
        self._is_online = self._mode == "online"
        if self._is_online and not self._wandb.api.api_key:
            raise StartupError(
                "W&B has no API key: run `wandb login`, set WANDB_API_KEY, or log into the run's folder with"
                ' WandbLogger(mode="offline") or WANDB_MODE=offline'
            )
        self.name = f"W&B project {logger.project}" + ("" if self._is_online else f" ({self._mode})")
        job, self._folder = run.job, run.folder
        self._options: dict[str, Any] = {
            "project": logger.project,
            "entity": logger.entity,
            "name": logger.run_name or job.name or job.run_id,
            "group": job.group,
            "tags": [f"{name}={value}" for name, value in job.tags.items()] or None,
            "config": nested(job_parameters(job)),
        }
        self._finish_timeout_s = max(logger.close_s - 1.0, 1.0)
        self._run: Any = None

    def open(self) -> None:
        self._opened()

    def _opened(self) -> Any:
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            settings = self._wandb.Settings(  # its console capture would change the author's process
                console="off",
                silent=True,
                finish_timeout=self._finish_timeout_s,
                finish_timeout_raises=True,
            )
            run = self._wandb.init(
                **self._options,
                id=read_run_id(self._folder),
                resume="allow" if self._is_online else None,
                dir=str(self._folder),
                mode=self._mode,
                reinit="create_new",  # keeps the author's own W&B run
                settings=settings,
            )
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP, step_sync=True)
            self._run = run
        return self._run

    def send(self, entries: Sequence[Entry]) -> int:
        try:
            run = self._opened()
            for entry in entries:
                if entry.kind == "metrics":
                    run.log({**entry.values, STEP: entry.step})
                elif entry.kind == "checkpoint":
                    run.summary.update(
                        {"trn/checkpoint": entry.values["path"], "trn/checkpoint_step": entry.step}
                    )
        except Exception:
            self._run = None  # its process may have exited: the retry opens a new one with the same id
            raise
        return len(entries)

    def close(self, ending: Ending) -> None:
        run = self._opened()
        summary = {"trn/status": ending.status, "trn/step": ending.step}
        run.summary.update(summary if ending.reason is None else {**summary, "trn/reason": ending.reason})
        try:
            run.finish(exit_code=0 if ending.status == "completed" else 1)
        except TimeoutError as fault:
            raise RefusedError(
                f"upload timed out after {self._finish_timeout_s:g} s. Run `wandb sync {run.dir}/..` to upload the rest"
            ) from fault
        finally:
            if self._wandb.run is None:  # its process has no other user
                self._wandb.teardown()


def read_run_id(folder: Path) -> str:
    """The id of the W&B run of a run's folder, created on first use."""
    path = folder / "wandb" / "trn-run-id"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            file.write(secrets.token_hex(4))
    except FileExistsError:
        pass
    return path.read_text().strip()


def nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`{"hyperparams.lr": 1}` as `{"hyperparams": {"lr": 1}}`: how W&B groups and filters a config."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        place, names = found, name.split(".")
        for part in names[:-1]:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):  # a name with a dot of its own
                place, names = found, [name]
                break
            place = below
        place[names[-1]] = value
    return found
