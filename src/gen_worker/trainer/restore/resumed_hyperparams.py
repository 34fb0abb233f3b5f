"""Hyperparameters that a resume changes: each takes effect, or the resume is refused before the first step.

In this order: options of optimizers and schedulers are set after the load (`optimizer_options`); the hook
`apply_hyperparams`, if there is one, gets the changes; else, where the load has overwritten a new value in the author's
payload with the old one, the resume is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.author.author_state import fill_from_checkpoint
from gen_worker.trainer.author.code_identity import code_changes
from gen_worker.trainer.author.identity import changed_fields, is_job_changed, show_value
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.restore.optimizer_options import ConfiguredOptions, OptionChange

KEPT_OPTIONS = "configured_options"  # in the loop state of a checkpoint

_PREFIX = "hyperparams."
_SAME_NAMES = {"learningrate": "lr"}
# A torch optimizer or scheduler writes these into its state.
_OPTIMIZER_KEY, _SCHEDULER_KEYS = "param_groups", ("base_lrs", "_last_lr")
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a resume changes. `fields`: dotted name in the job -> (old, new value)."""

    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    is_changed: bool = False  # the job or the code; `fields` may not show it

    @classmethod
    def between(cls, saved: Mapping[str, Any], now: Mapping[str, Any]) -> "Resumption":
        """From the identities of a checkpoint and of this run."""
        if is_job_changed(saved, now):
            return cls(fields=changed_fields(saved, now), is_changed=True)
        return cls(is_changed=bool(code_changes(saved, now)))

    @property
    def hyperparams(self) -> dict[str, tuple[Any, Any]]:
        """By their names in `hyperparams`."""
        return {
            name.removeprefix(_PREFIX): values
            for name, values in self.fields.items()
            if name.startswith(_PREFIX)
        }

    def require_possible(self) -> None:
        """InputError for a changed field that a resume would ignore."""
        if "weights" in self.fields:
            was, now = self.fields["weights"]
            if now is not None:
                raise InputError(
                    f"weights was {show_value(was)} and is now {show_value(now)}, but a resume takes its weights from the checkpoint.\n"
                    "Start a new run for other weights, or change `weights` back to resume"
                )


def fill_and_apply(
    trainer: TrainerPlugin,
    state: Any,
    ctx: StepContext,
    checkpoint: Checkpoint,
    *,
    options: ConfiguredOptions,
    resumption: Resumption,
) -> list[OptionChange]:
    """Load `checkpoint` into a new `state`, and apply what changed since it was saved.

    Returns the optimizer options that were set.
    """
    if not resumption.is_changed:
        fill_from_checkpoint(trainer, state, ctx, checkpoint)
        return []
    resumption.require_possible()
    changed = resumption.hyperparams
    kept: Mapping[str, Any] | None = checkpoint.loop.get(KEPT_OPTIONS)  # type: ignore[assignment]
    if kept is None:
        kept = options.describe_before(changed)
    options.require_same_kinds(kept)
    options.keep_fresh()
    hook = getattr(trainer, "apply_hyperparams", None)
    is_compared = bool(changed) and hook is None
    fresh = _own_values(trainer, state, options) if is_compared else {}
    fill_from_checkpoint(trainer, state, ctx, checkpoint)
    applied = options.apply(kept)
    if changed and hook is not None:
        hook(state, changed, ctx)
    if is_compared:
        _require_effect(trainer, fresh, _own_values(trainer, state, options), changed)
    return applied


def _own_values(trainer: TrainerPlugin, state: Any, options: ConfiguredOptions) -> dict[str, Any]:
    """The plain values in what `state_dict` returns, by path; without those of known optimizers."""
    payload = trainer.state_dict(state)
    return dict(_leaves(payload, options)) if isinstance(payload, Mapping) else {}


def _leaves(value: Any, options: ConfiguredOptions, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if options.optimizers and _OPTIMIZER_KEY in value:
            return
        if options.schedulers and any(key in value for key in _SCHEDULER_KEYS):
            return
        for key, item in value.items():
            yield from _leaves(item, options, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, options, f"{path}[{index}]")
    elif isinstance(value, str | bool | int | float):
        yield path, value


def _require_effect(
    trainer: TrainerPlugin,
    fresh: Mapping[str, Any],
    loaded: Mapping[str, Any],
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    faults = []
    for name, (was, now) in changed.items():
        for path, value in fresh.items():
            if path in loaded and _is_value_of(path, value, name, now) and not _is_same(loaded[path], now):
                faults.append((name, was, now, path, loaded[path]))
                break
    if not faults:
        return
    kind = type(trainer).__qualname__
    lines = [
        f"{_PREFIX}{name} was {show_value(was)} and is now {show_value(now)}, but the checkpoint restores {value!r:.40}:"
        f" state_dict(){path}"
        for name, was, now, path, value in faults[:_MAX_SHOWN]
    ]
    name, was = f"{_PREFIX}{faults[0][0]}", faults[0][1]
    how = f"remove {name}" if was is None else f"set {name} back to {was!r:.40}"
    raise InputError(
        "\n".join(
            [
                "a changed hyperparameter would have no effect:",
                *(f"  - {line}" for line in lines),
                "To make it take effect, do one of these:",
                f"  - write {kind}.apply_hyperparams(self, state, changes, ctx): it is called after the load",
                f"  - change {kind}.load_state_dict so that it keeps the value of configure",
                f"To resume without the change, {how}",
            ]
        )
    )


def _is_value_of(path: str, value: Any, name: str, now: Any) -> bool:
    """Whether `value` is that hyperparameter: a fraction by value alone, anything else also by name."""
    if not _is_same(value, now):
        return False
    is_fraction = isinstance(value, float) and not value.is_integer()
    return is_fraction or _plain_name(path.rpartition("[")[2].strip("]'\"")) == _plain_name(name)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _plain_name(name: str) -> str:
    last = name.rpartition(".")[2].replace("_", "").lower()
    return _SAME_NAMES.get(last, last)
