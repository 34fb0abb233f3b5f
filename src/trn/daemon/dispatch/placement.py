"""Which of the waiting runs start now, and on which devices. Pure: the same question has the same answer.

The most urgent goes first, then the oldest. What does not fit may be overtaken, but not for ever: a run that has
waited longer than the patience keeps whatever it needs of what is free, and what is freed gathers for it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from trn.core.causes import CPU, GPU, MEMORY, Cause
from trn.core.runs import Needs, QueuedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeResources:
    """What is free, in the order in which devices are handed out. Quarantined devices are not in it."""

    device_ids: tuple[str, ...] = ()
    cpus: int = 0
    memory_mb: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who starts on what, in this order; why the others do not."""

    starts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    waits: Mapping[str, Cause] = field(default_factory=dict)


@dataclass(slots=True)
class _Pool:
    """What is still free while we decide."""

    device_ids: list[str]
    cpus: int
    memory_mb: int

    def take(self, device_ids: Sequence[str], needs: Needs) -> None:
        """Take what there is of it: a run that gathers devices takes less than it needs."""
        self.device_ids = [device_id for device_id in self.device_ids if device_id not in device_ids]
        self.cpus -= min(needs.cpus, self.cpus)
        self.memory_mb -= min(needs.memory_mb, self.memory_mb)


def choose_starts(
    queue: Sequence[QueuedRun],
    free: FreeResources,
    *,
    now_ms: int,
    patience_s: float,
    barred: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> Decision:
    """Decide for all of `queue` at once. Costs O(runs x devices), whatever else waits behind them.

    `barred` are the kinds of devices that a run cannot use, where there are any. A run of another pool takes nothing here:
    its executor places it.
    """
    pool = _Pool(list(free.device_ids), free.cpus, free.memory_mb)
    named = Counter(device_id for run in queue for device_id in run.needs.devices)
    starts: list[tuple[str, tuple[str, ...]]] = []
    waits: dict[str, Cause] = {}
    gathers_for = ""
    for run in sorted(queue, key=lambda run: (-run.priority, run.submitted_ms, run.run_id)):
        if not run.needs.is_local:
            starts.append((run.run_id, ()))
            continue
        device_ids = _pick(run.needs, _without(pool.device_ids, barred.get(run.run_id)), named)
        lacks = _lacks(run.needs, pool, has_devices=device_ids is not None)
        if device_ids is not None and not lacks:
            pool.take(device_ids, run.needs)
            starts.append((run.run_id, device_ids))
            continue
        would_fit = gathers_for and _fits(run.needs, free, named)
        waits[run.run_id] = _wait_for(run.needs, lacks, gathers_for if would_fit else "")
        if now_ms - run.submitted_ms > patience_s * 1000:
            gathers_for = gathers_for or run.run_id
            kept = device_ids
            if kept is None:
                is_wanted = set(run.needs.devices).__contains__ if run.needs.devices else bool
                open_ids = _without(pool.device_ids, barred.get(run.run_id))
                kept = tuple(device_id for device_id in open_ids if is_wanted(device_id))
            pool.take(kept, run.needs)
    return Decision(starts=tuple(starts), waits=waits)


def kind_of(device_id: str) -> str:
    """`cuda` of `cuda:3`."""
    return device_id.partition(":")[0]


def _without(device_ids: Sequence[str], kinds: frozenset[str] | None) -> Sequence[str]:
    if not kinds:
        return device_ids
    return [device_id for device_id in device_ids if kind_of(device_id) not in kinds]


def _fits(needs: Needs, free: FreeResources, named: Mapping[str, int]) -> bool:
    has_devices = _pick(needs, free.device_ids, named) is not None
    return has_devices and needs.cpus <= free.cpus and needs.memory_mb <= free.memory_mb


def _pick(needs: Needs, free: Sequence[str], named: Mapping[str, int]) -> tuple[str, ...] | None:
    """The devices for it, or None. Of those that would do, the ones that no run asks for by name come first."""
    if needs.devices:
        return needs.devices if set(needs.devices) <= set(free) else None
    if needs.gpus == 0:
        return ()
    for kind in dict.fromkeys(map(kind_of, free)):  # a worker has one kind only: its torch is built for one
        of_kind = [device_id for device_id in free if kind_of(device_id) == kind]
        if len(of_kind) >= needs.gpus:
            chosen = set(sorted(of_kind, key=lambda device_id: named[device_id])[: needs.gpus])
            return tuple(device_id for device_id in of_kind if device_id in chosen)
    return None


def _lacks(needs: Needs, pool: _Pool, *, has_devices: bool) -> tuple[str, ...]:
    """What is missing, as `waits_for` has it."""
    lacks: list[str] = []
    if not has_devices:
        lacks += [device_id for device_id in needs.devices if device_id not in pool.device_ids] or [GPU]
    if needs.cpus > pool.cpus:
        lacks.append(CPU)
    if needs.memory_mb > pool.memory_mb:
        lacks.append(MEMORY)
    return tuple(lacks)


def _wait_for(needs: Needs, lacks: tuple[str, ...], kept_for: str) -> Cause:
    amounts = {GPU: ("gpus", needs.gpus), CPU: ("cpus", needs.cpus), MEMORY: ("memory_mb", needs.memory_mb)}
    first = lacks[0] if lacks[0] in amounts else "device"
    values = dict(amounts[what] for what in lacks if what in amounts)
    return Cause(
        id=f"waits-for-{first}",
        waits_for=lacks,
        values={**values, "kept_for": kept_for} if kept_for else values,
    )
