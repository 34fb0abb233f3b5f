"""Settings that a trainer class never read: they are reported after step 1, since they had no effect.

Until then `ctx` and `ctx.job` are of classes that record what is read; afterwards they are the plain ones again. The
runtime reads its own copy of the job, which does not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

from gen_worker.contract.document_schema import nearest_name
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.author.hyperparams import (
    RunLength,
    TrackedHyperparams,
    asked_names,
    track,
    unread_names,
    untrack,
)
from gen_worker.trainer.contracts import StepContext, TrainerPlugin

DEFAULT_PRECISION = "fp32"
_RUN_BY_STEP_ONE = ("setup", "configure", "prepare_batch", "train_step")
_TRACKED_FIELDS = frozenset({"hyperparams", "precision", "weights", "sample_prompts", "sample_seed"})


_DTYPE = StepContext.__dict__["dtype"]


class _TrackedJob(TrainingJobSpec, frozen=True, kw_only=True, dict=True):
    def __getattribute__(self, name: str) -> Any:
        if name in _TRACKED_FIELDS:
            super().__getattribute__("__dict__").setdefault("asked", set()).add(name)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return repr(_plain(self))  # a repr does not count as a read


class _TrackedContext(StepContext):
    __slots__ = ()

    def __repr__(self) -> str:
        shown = StepContext(job=_plain(self.job), dtype=_DTYPE.__get__(self), progress=self.progress)
        for name in ("device", "rank", "world_size", "optimizer", "scheduler"):
            object.__setattr__(shown, name, getattr(self, name))
        return repr(shown)

    @property
    def dtype(self) -> Any:
        _ = self.job.precision  # records the read
        return _DTYPE.__get__(self)


@dataclass(slots=True, kw_only=True)
class ReadTracker:
    """Of one attempt. `later`: messages about changed hyperparameters, to be logged once these are read."""

    ctx: StepContext
    is_library: bool = False  # the caller may call `validate` at any time
    is_open: bool = field(default=True, init=False)
    run_length: RunLength = field(init=False)
    later: dict[str, str] = field(default_factory=dict, init=False)
    _hyperparams: TrackedHyperparams = field(init=False)
    _handles: TrackedHyperparams = field(init=False)
    _job: _TrackedJob = field(init=False)

    def __post_init__(self) -> None:
        ctx = self.ctx
        self.run_length = RunLength(ctx.total_steps)
        self._hyperparams = track(ctx.job.hyperparams, self.run_length)
        self._handles = track(dict(ctx.model_handles))
        fields = {name: getattr(ctx.job, name) for name in ctx.job.__struct_fields__}
        self._job = _TrackedJob(**{**fields, "hyperparams": self._hyperparams})
        object.__setattr__(ctx, "job", self._job)
        object.__setattr__(ctx, "model_handles", self._handles)
        object.__setattr__(ctx, "__class__", _TrackedContext)

    def has_read(self, name: str) -> bool:
        """Whether the hyperparameter of that dotted name was read so far."""
        places = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
        return self._unread_hyperparams().isdisjoint(places)

    @property
    def unread_weights(self) -> Path | None:
        """The job's `weights`, if the class has not read them."""
        is_read = "weights" in self._handles.asked or "weights" in self._fields
        return None if is_read else dict.get(self._handles, "weights")

    @property
    def _fields(self) -> set[str]:
        asked: set[str] = self._job.__dict__.get("asked", set())
        return asked

    def _unread_hyperparams(self) -> set[str]:
        values = self._hyperparams
        if not values.asked and "hyperparams" in self._fields:
            return set()  # passed to C code, which reads without recording names
        return set(unread_names(values))

    def close(self, trainer: TrainerPlugin) -> list[str]:
        """After step 1: messages about what was never read. From here on nothing is recorded."""
        self.is_open = False
        texts = list(self._messages(trainer))
        untrack(self._hyperparams)
        untrack(self._handles)
        object.__setattr__(self.ctx, "__class__", StepContext)
        object.__setattr__(self.ctx, "job", _plain(self._job, self._hyperparams))
        return texts

    def _messages(self, trainer: TrainerPlugin) -> Iterator[str]:
        kind = type(trainer).__qualname__
        unread = self._unread_hyperparams()
        if unread:
            mentioned = _names_in_other_hooks(trainer)
            known = set(asked_names(self._hyperparams)) - unread
            for name in sorted(unread):
                if name.rpartition(".")[2] in mentioned:
                    continue  # a hook that has not run yet may read it
                nearest = _nearest(name, known)
                hint = f"; did you mean {nearest}?" if nearest else ""
                yield f"hyperparams.{name} was given, but nothing read it{hint}"
        precision = msgspec.structs.asdict(self._job)["precision"]
        if precision != DEFAULT_PRECISION and "precision" not in self._fields:
            yield (
                f"precision is {precision}, but {kind} read neither ctx.dtype nor ctx.job.precision: it has no effect"
            )
        if "base_model" not in self._handles.asked and dict.__contains__(self._handles, "base_model"):
            yield f'inputs.base_model_ref was given, but {kind} did not read ctx.model_handles["base_model"]'
        yield from self._unused_settings(trainer)

    def _unused_settings(self, trainer: TrainerPlugin) -> Iterator[str]:
        """Fields that have no effect without another field."""
        job = msgspec.structs.asdict(self._job)
        if job["fast_dev_run"]:
            return
        if not job["sample_every"]:
            read = self._fields | _attributes_in_other_hooks(trainer)
            for name, unset in (("sample_prompts", []), ("sample_seed", None)):
                if job[name] != unset and name not in read:
                    yield f"{name} was given, but sample_every is 0: nothing is sampled"
        if job["validation"] is not None and not job["validate_every"] and not self.is_library:
            yield "validation was given, but validate_every is 0: nothing is validated"


def _plain(job: TrainingJobSpec, hyperparams: dict[str, Any] | None = None) -> TrainingJobSpec:
    """A plain copy, with these hyperparameters if given. Records nothing."""
    fields = msgspec.structs.asdict(job)
    given = msgspec.to_builtins(fields["hyperparams"]) if hyperparams is None else hyperparams
    return TrainingJobSpec(**{**fields, "hyperparams": given})


def _nearest(name: str, known: set[str]) -> str | None:
    """The most similar of the names at the same level that were read."""
    place, _, last = name.rpartition(".")
    beside = sorted(other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == place)
    found = nearest_name(last, beside)
    return None if found is None else f"{place}.{found}" if place else found


def _names_in_other_hooks(trainer: TrainerPlugin) -> set[str]:
    """String constants in methods that step 1 does not run: sampling and validation read their settings later."""
    return {text for code in _other_hooks(trainer) for text in _texts(code)}


def _attributes_in_other_hooks(trainer: TrainerPlugin) -> set[str]:
    return {name for code in _other_hooks(trainer) for name in code.co_names}


def _other_hooks(trainer: TrainerPlugin) -> Iterator[CodeType]:
    for kind in type(trainer).__mro__[:-1]:
        for name, member in vars(kind).items():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None and name not in _RUN_BY_STEP_ONE:
                yield code


def _texts(code: CodeType) -> set[str]:
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            found |= {item for item in constant if isinstance(item, str)}
        elif isinstance(constant, CodeType):
            found |= _texts(constant)
    return found
