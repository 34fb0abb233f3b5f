"""How the processes of one attempt speak to each other. `OneProcess` is the usual case and costs nothing.

The loop asks through this interface and never knows torch.distributed; `distributed.TorchProcesses` is the other
implementation. Every method but `watch` is collective: all processes call it, in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from gen_worker.trainer.contracts import Progress, StopSignal

T = TypeVar("T")


class Processes(Protocol):
    rank: int
    world_size: int
    has_loaded: bool  # the trainer class has loaded a state in these processes, so it can do that

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """The weighted mean over all processes; those of weight 0 do not count. All give the same names."""

    def any_of(self, flag: bool) -> bool:
        """True everywhere if it is True anywhere."""

    def gather(self, item: T) -> Sequence[T]:
        """Everyone's item, by rank, in every process."""

    def from_main(self, item: T) -> T:
        """What the main process gave, in every process."""

    def whole(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same state with sharded tensors put together, on the CPU of the main process; None in the others."""

    def stop_step(self, stop: StopSignal, progress: Progress) -> int:
        """The step at which all stop, once one of them was asked to. Waits until all have said how far they are."""

    def watch(self, stop: StopSignal, progress: Progress) -> None:
        """Called now and then by another thread: pass stop requests on, and say how far this process is."""

    def close(self) -> None: ...


class OneProcess:
    """A run in one process: every question is answered on the spot."""

    rank = 0
    world_size = 1
    has_loaded = False

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:  # noqa: ARG002
        return dict(values)

    def any_of(self, flag: bool) -> bool:
        return flag

    def gather(self, item: T) -> Sequence[T]:
        return (item,)

    def from_main(self, item: T) -> T:
        return item

    def whole(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        return payload

    def stop_step(self, stop: StopSignal, progress: Progress) -> int:  # noqa: ARG002
        return progress.step

    def watch(self, stop: StopSignal, progress: Progress) -> None: ...

    def close(self) -> None: ...
