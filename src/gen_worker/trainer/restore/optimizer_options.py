"""Options of optimizers and schedulers: a changed setting must take effect after a checkpoint is loaded.

A saved optimizer holds its options (learning rate, weight decay, betas), and a load restores them: the changed option of
a job would have no effect. So every checkpoint has the options as `configure` set them. A resume compares them with those
of the new `configure`, and sets what differs after the load. A changed schedule is replayed: a copy of the new one, on a
stand-in for the optimizer, takes as many steps as the saved one.

Optimizers and schedulers are recognised by their attributes: torch is not imported.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gen_worker.errors import InputError
from gen_worker.trainer.author.state_parts import (
    find_parts,
    is_optimizer,
    is_optimizer_or_scheduler,
    is_scheduler,
    is_scheduler_of,
)

_NOT_PLAIN = object()
_RATE = ("lr", "initial_lr")


class OptionChange(NamedTuple):
    """An option of a parameter group that a resume has set."""

    optimizer: str
    group: int
    name: str
    was: Any
    now: Any


@dataclass(slots=True, kw_only=True)
class ConfiguredOptions:
    """The optimizers and schedulers of a state, and their options right after `configure`.

    Make it before anything is loaded. Call `keep_fresh` before each load that `apply` follows.
    """

    optimizers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    _groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # without their parameters
    _copies: dict[str, Any] = field(default_factory=dict)  # of each scheduler that can be copied
    _described: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **roots: Any) -> "ConfiguredOptions":
        """Find optimizers and schedulers in `roots`: mappings, lists and attributes, a few levels deep."""
        found = cls()
        for name, part in find_parts(is_optimizer_or_scheduler, roots):
            if is_optimizer(part):
                found.optimizers[name] = part
                found._groups[name] = _options_of(part)
            else:
                found.schedulers[name] = part
        for name, scheduler in found.schedulers.items():
            if not any(is_scheduler_of(scheduler, part) for part in found.optimizers.values()):
                found.optimizers[f"{name}.optimizer"] = scheduler.optimizer
                found._groups[f"{name}.optimizer"] = _options_of(scheduler.optimizer)
        found._described = found._describe()
        return found

    def keep_fresh(self) -> None:
        """Copy the schedulers as `configure` made them, to replay them later."""
        for name, scheduler in self.schedulers.items():
            if name not in self._copies:
                with contextlib.suppress(Exception):  # without a copy the rate is scaled instead
                    self._copies[name] = _copy_scheduler(scheduler, _options_of(scheduler.optimizer))

    def describe(self) -> dict[str, Any]:
        """What `configure` set, as plain data for a checkpoint."""
        return self._described

    def _describe(self) -> dict[str, Any]:
        return {
            "version": 1,
            "optimizers": {
                name: {
                    "kind": type(optimizer).__name__,
                    "groups": [_plain_items(group) for group in self._groups[name]],
                }
                for name, optimizer in self.optimizers.items()
            },
            "schedulers": {name: _describe_scheduler(part) for name, part in self.schedulers.items()},
        }

    def describe_before(self, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """For an older checkpoint without options: derived from the changed hyperparameters (name: old, new value).

        An option with the new value of one of them had its old value; whole numbers only under the same name.
        """

        def before(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: before(key, item) for key, item in value.items()}
            for changed_name, (was, now) in changed.items():
                is_meant = isinstance(value, float) or changed_name.rpartition(".")[2] == name
                if was is not None and is_meant and value == _plain(now):
                    return _plain(was)
            return [before(name, item) for item in value] if isinstance(value, list) else value

        described: dict[str, Any] = before("", self._described)
        return described

    def require_same_kinds(self, kept: Mapping[str, Any]) -> None:
        """InputError where the class of an optimizer or scheduler changed."""
        for what in ("optimizers", "schedulers"):
            for name, now in self._described[what].items():
                was = kept.get(what, {}).get(name)
                if was is not None and was["kind"] != now["kind"]:
                    raise InputError(
                        f"the {what[:-1]} ({name}) was {was['kind']} and is now {now['kind']}: its saved state does not fit.\n"
                        "Change it back, or start a new run from the weights of the checkpoint (`weights`)"
                    )

    def apply(self, kept: Mapping[str, Any], *, is_job_changed: bool = True) -> list[OptionChange]:
        """After a load: set what differs from `kept`, the options of the run that saved. Returns what was set.

        `is_job_changed`: then a schedule with a function of the author's counts as changed, since it cannot be compared.
        """
        changes: list[OptionChange] = []
        for name, optimizer in self.optimizers.items():
            kept_groups = kept.get("optimizers", {}).get(name, {}).get("groups")
            now_groups = self._described["optimizers"][name]["groups"]
            if kept_groups is None or not len(kept_groups) == len(now_groups) == len(optimizer.param_groups):
                kept_groups = now_groups
            differing = [
                {key for key in now if key in was and now[key] != was[key]}
                for was, now in zip(kept_groups, now_groups, strict=True)
            ]
            schedulers = {
                path: part for path, part in self.schedulers.items() if is_scheduler_of(part, optimizer)
            }
            is_scheduled_anew = any(
                self._is_schedule_changed(path, kept, is_job_changed=is_job_changed) for path in schedulers
            )
            if not any(differing) and not is_scheduled_anew:
                continue
            targets = self._replay(name, schedulers)
            if targets is None:
                targets = self._scaled(name, kept_groups, differing)
                for path, scheduler in schedulers.items():
                    self._set_scheduler_options(path, scheduler, kept)
            changes += self._set(name, targets, differing, is_scheduled=bool(schedulers))
        return changes

    def _is_schedule_changed(self, path: str, kept: Mapping[str, Any], *, is_job_changed: bool) -> bool:
        was, now = kept.get("schedulers", {}).get(path), self._described["schedulers"][path]
        if was is not None and _shared_differences(was["options"], now["options"]):
            return True
        return is_job_changed and _has_function(self.schedulers[path])

    def _replay(self, name: str, schedulers: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The options that a new run would have at this step; None where unknown."""
        if not schedulers or any(
            path not in self._copies or _needs_metric(part) for path, part in schedulers.items()
        ):
            return None
        stand_in = _StandInOptimizer([dict(group) for group in self._groups[name]])
        copies = {}
        try:
            for path in schedulers:
                copies[path] = _copy_scheduler(self._copies[path], stand_in)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that no optimizer stepped
                _step_together([(copies[path], _steps_of(part)) for path, part in schedulers.items()])
        except Exception:  # an author's schedule may refuse steps after its end
            return None
        for path, scheduler in schedulers.items():
            scheduler.load_state_dict(copies[path].state_dict())
        return stand_in.param_groups

    def _scaled(
        self, name: str, kept_groups: list[dict[str, Any]], differing: list[set[str]]
    ) -> list[dict[str, Any]]:
        """Without a schedule to replay: the new value, scaled if something has changed the old one while training."""
        targets = []
        for index, group in enumerate(self.optimizers[name].param_groups):
            fresh, kept, target = self._groups[name][index], kept_groups[index], {}
            for key in differing[index]:
                loaded, was = _plain(group.get(key)), kept[key]
                is_moved = loaded != was and _is_number(loaded) and _is_number(was) and was and key in _RATE
                target[key] = fresh[key] * (loaded / was) if is_moved else fresh[key]
            if "lr" in target and "initial_lr" in group and "initial_lr" not in target:
                target["initial_lr"] = fresh["lr"]
            targets.append(target)
        return targets

    def _set_scheduler_options(self, path: str, scheduler: Any, kept: Mapping[str, Any]) -> None:
        was, now = kept.get("schedulers", {}).get(path), self._described["schedulers"][path]
        for key in _shared_differences(was["options"], now["options"]) if was is not None else ():
            if key in vars(scheduler) and key != "_last_lr":
                fresh = now["options"][key]
                setattr(scheduler, key, list(fresh) if isinstance(fresh, list) else fresh)

    def _set(
        self, name: str, targets: list[dict[str, Any]], differing: list[set[str]], *, is_scheduled: bool
    ) -> list[OptionChange]:
        changes = []
        for index, group in enumerate(self.optimizers[name].param_groups):
            fresh = self._groups[name][index]
            for key, value in targets[index].items():
                is_moved = is_scheduled and (key in _RATE or _plain(value) != _plain(fresh.get(key)))
                was = _plain(group.get(key, _NOT_PLAIN))
                if was is _NOT_PLAIN or was == _plain(value) or not (key in differing[index] or is_moved):
                    continue
                _set_option(group, key, value)
                changes.append(OptionChange(name, index, key, was, _plain(value)))
        return changes


class _StandInOptimizer:
    """Parameter groups without parameters: all that a scheduler needs."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self.step = _nothing
        self._opt_called = True


def _nothing() -> None: ...


_nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch looks for it, and warns


def learning_rates(optimizers: Mapping[str, Any]) -> Iterator[float]:
    """Of all parameter groups. To read one may wait for a device: take only as many as are needed."""
    for part in optimizers.values():
        for group in part.param_groups:
            rate = group.get("lr")
            if type(rate) is not float:
                rate = _plain(rate)
            if _is_number(rate) and math.isfinite(rate):
                yield rate


def _options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: _own(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _own(value: Any) -> Any:
    """A copy of a tensor: torch changes them in place."""
    return value.clone() if hasattr(value, "clone") else value


def _copy_scheduler(scheduler: Any, groups_or_stand_in: Any) -> Any:
    stand_in = groups_or_stand_in
    if not isinstance(stand_in, _StandInOptimizer):
        stand_in = _StandInOptimizer(stand_in)
    shared = {id(value): value for value in _shared_values(scheduler)}
    return copy.deepcopy(scheduler, {**shared, id(scheduler.optimizer): stand_in})


def _shared_values(scheduler: Any) -> Iterator[Any]:
    """What a copy shares with the scheduler: functions, and objects that are no settings, such as a model."""
    for name, value in vars(scheduler).items():
        for item in value if isinstance(value, list) else [value]:
            if is_scheduler(item):
                yield from _shared_values(item)
            elif (
                name != "optimizer"
                and _plain(item) is _NOT_PLAIN
                and not isinstance(item, Mapping | list | tuple)
            ):
                yield item


def _step_together(parts: list[tuple[Any, int]]) -> None:
    """Step the schedulers in turn, as training does, each to its number of steps."""
    if len(parts) == 1 and type(parts[0][0]).__name__ == "LambdaLR":  # a function of the step alone
        scheduler, steps = parts[0]
        if steps > 0:
            scheduler.last_epoch += steps - 1
            scheduler._step_count += steps - 1
            scheduler.step()
        return
    for step in range(max(steps for _, steps in parts)):
        for scheduler, steps in parts:
            if step < steps:
                scheduler.step()


def _steps_of(scheduler: Any) -> int:
    """The steps that a loaded scheduler has taken."""
    inner = getattr(scheduler, "_schedulers", None)
    if not hasattr(scheduler, "last_epoch") and inner:  # in a chain each part steps every time
        return max(_steps_of(part) for part in inner)
    return max(0, int(scheduler.last_epoch))


def _needs_metric(scheduler: Any) -> bool:
    """ReduceLROnPlateau: its state depends on metrics."""
    return hasattr(scheduler, "num_bad_epochs")


def _describe_scheduler(scheduler: Any) -> dict[str, Any]:
    return {"kind": type(scheduler).__name__, "options": _scheduler_options(scheduler)}


def _scheduler_options(scheduler: Any) -> dict[str, Any]:
    options = _plain_items({key: value for key, value in vars(scheduler).items() if key != "optimizer"})
    for index, part in enumerate(getattr(scheduler, "_schedulers", ())):
        options |= {f"{index}.{key}": value for key, value in _scheduler_options(part).items()}
    return options


def _has_function(scheduler: Any) -> bool:
    values: list[Any] = []
    for value in vars(scheduler).values():
        values += value if isinstance(value, list) else [value]
    return any(
        _has_function(value) if is_scheduler(value) else callable(value) and not is_optimizer(value)
        for value in values
    )


def _shared_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Options that both have; torch releases differ."""
    return [key for key in now if key in was and was[key] != now[key]]


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    fill: Callable[[Any], Any] | None = getattr(group.get(key), "fill_", None)
    if fill is None:
        group[key] = value
    else:
        fill(_plain(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item for key, value in values.items() if (item := _plain(value)) is not _NOT_PLAIN}


def _plain(value: Any) -> Any:
    """As JSON would return it; `_NOT_PLAIN` where it is no JSON value."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    if isinstance(value, Mapping):
        named = {str(key): _plain(item) for key, item in value.items()}
        return _NOT_PLAIN if _NOT_PLAIN in named.values() else named
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item())
    return _NOT_PLAIN
