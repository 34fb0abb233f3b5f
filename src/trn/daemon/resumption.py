"""Going on from where an ended run stood: the config of the run that does, and the checkpoint it begins at."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trn.core.errors import ConflictError, InvalidRequestError
from trn.core.runs import RunRecord, RunState

META_SUFFIX = ".meta.json"
_NOT_INHERITED = ("run_id", "profiles")  # a run of its own; the profile was laid over before


class ResumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to submit, and where it begins, in words."""

    config: dict[str, Any]
    note: str


class _File(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int


class _Meta(msgspec.Struct, frozen=True):
    """As much of a checkpoint's commit marker as it takes to choose one."""

    step: int
    run_id: str = ""
    final: bool = False
    files: tuple[_File, ...] = ()


def newest_checkpoint(checkpoints_dir: Path) -> tuple[Path, int] | None:
    """(meta, step) of the newest whose files are all there. The worker verifies their content. Blocks: reads files."""
    found = []
    for path in checkpoints_dir.glob(f"*{META_SUFFIX}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            meta = msgspec.json.decode(path.read_bytes(), type=_Meta)
            if all((path.parent / item.name).stat().st_size == item.size_bytes for item in meta.files):
                found.append((meta.step, meta.final, path))
    if not found:
        return None
    step, _, path = max(found)
    return path, step


def read_saved_by(meta: Path) -> str:
    """The run that saved that checkpoint, as its meta says; empty where it says nothing. Blocks."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(meta.read_bytes(), type=_Meta).run_id
    return ""


def plan_resume(
    parent: RunRecord, *, overrides: Mapping[str, Any], checkpoint: tuple[Path, int | None] | None
) -> ResumePlan:
    """The config that goes on from `checkpoint` (meta, step) of an ended run; None: it never saved one."""
    if not parent.state.is_terminal:
        raise ConflictError(
            f"run {parent.run_id} is {parent.state}: it goes on by itself; cancel it first, or wait for its end"
        )
    config = merge(
        {name: value for name, value in parent.config.items() if name not in _NOT_INHERITED}, overrides
    )
    _require_more(parent, config, overrides)
    if checkpoint is None:
        begins = config.get("resume_checkpoint_path")
        where = f"begins at {begins}, as it did" if begins else "starts from the beginning"
        return ResumePlan(config=config, note=f"run {parent.run_id} saved no checkpoint: this one {where}")
    path, step = checkpoint
    at = "" if step is None else f" at step {step}"
    return ResumePlan(
        config=with_checkpoint(config, path), note=f"goes on from {path.name} of run {parent.run_id}{at}"
    )


def with_checkpoint(config: Mapping[str, Any], meta_path: Path) -> dict[str, Any]:
    """The config, to begin at that checkpoint; instead of where it began before."""
    resumed = {**config, "resume_checkpoint_path": str(meta_path)}
    inputs = resumed.get("inputs")
    if isinstance(inputs, dict):
        resumed["inputs"] = {name: ref for name, ref in inputs.items() if name != "resume_checkpoint_ref"}
    return resumed


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `base`, objects key by key; null takes a field away."""
    merged = dict(base)
    for key, value in overlay.items():
        below = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def _require_more(parent: RunRecord, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """A complete run has nothing left to do: its worker would load the checkpoint and end at once."""
    if parent.state is not RunState.COMPLETED:
        return
    wanted = config.get("max_steps")
    is_enough = isinstance(wanted, int) and wanted <= parent.step
    is_early = parent.end_step is not None and parent.step < parent.end_step
    is_same = not is_early and all(
        config.get(name) == parent.config.get(name) for name in ("max_steps", "epochs")
    )
    if is_enough or is_same:
        given = f" (max_steps is {wanted})" if "max_steps" in overrides else ""
        raise InvalidRequestError(
            f"run {parent.run_id} is complete at step {parent.step}: there is nothing left to do{given}; raise max_steps"
            " or epochs to go on"
        )
