"""Communication between the processes of one attempt. The loop knows this interface alone, not torch.distributed.

`OneProcess` is the usual case and costs nothing; `distributed.TorchProcesses` is the other implementation. Every method
except `watch` is collective: all processes call it, in the same order.
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
        """The state with sharded tensors gathered on the CPU of the main process; None in the others."""

    def stop_step(self, stop: StopSignal, progress: Progress) -> int:
        """The step at which all stop, after a stop request. Waits until all have shared their step."""

    def watch(self, stop: StopSignal, progress: Progress) -> None:
        """Called regularly by another thread: share stop requests and this process's step."""

    def close(self) -> None: ...


class OneProcess:
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
