"""The processes of one run over torch.distributed: nccl between GPUs, gloo between CPUs.

The training's collectives (DDP, FSDP2) use the default group. Ours use a gloo group of their own, so that neither waits
for the other, and never run on every step.

The watcher threads agree on a stop through the key-value store:

1. a process that is asked to stop posts the request; the others read it and set their own stop signal
2. each process posts the last step it can reach: with the signal set, its loop begins no step after the current one
3. all train to the largest of these steps and stop there

No process can be past that step, so none waits in a collective for one that has stopped.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gen_worker.errors import Cause, StartupError, TrainStepError
from gen_worker.trainer.contracts import Progress, StepContext, StopSignal
from gen_worker.trainer.job_lifecycle import raise_stop

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

START_TIMEOUT_S = 300.0
# One process may sample or download for long while the others wait. A dead process is noticed by its connection.
COLLECTIVE_TIMEOUT = timedelta(hours=6)
AGREE_TIMEOUT_S = 300.0
POLL_S = 0.01


@dataclass(slots=True, kw_only=True)
class TorchProcesses:
    rank: int
    world_size: int
    has_loaded: bool = False
    _store: Any
    _group: Any
    _names: list[str] | None = None
    _is_posted: bool = False
    _is_closed: bool = False
    _post_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, *, device: str, rank: int, world_size: int, stop: StopSignal) -> "TorchProcesses":
        """Connect to the others, at the address that torchrun put into the environment."""
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        try:
            _wait_for_all(rank, world_size, stop)
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
            group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            # A second connection: a call that waits on the default one must not block the watcher.
            default: Any = dist.distributed_c10d._get_default_store()
            store = dist.distributed_c10d.PrefixStore("gen_worker", default.clone())
        except (RuntimeError, ValueError) as fault:
            raise StartupError(
                f"process {rank} of {world_size} could not connect to the others: {fault}"
            ) from fault
        return cls(rank=rank, world_size=world_size, _store=store, _group=group)

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """One all-reduce where all have the same names; else all values are gathered."""
        import torch
        import torch.distributed as dist

        if self._names is None:
            self._names = sorted(set().union(*self.gather(sorted(values))))
        fits = sorted(values) == self._names
        counts = weight if fits else 0.0
        shares = [values[name] * counts if counts else 0.0 for name in self._names]
        total = torch.tensor([float(fits), float(counts), *shares], dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        num_fitting, weights, *sums = total.tolist()
        if num_fitting == self.world_size:
            return {name: value / (weights or 1.0) for name, value in zip(self._names, sums, strict=True)}
        found = self.gather((dict(values), weight))
        self._names = sorted(set().union(*(own for own, _ in found)))
        return {name: _weighted_mean(name, found) for name in self._names}

    def any_of(self, flag: bool) -> bool:
        import torch
        import torch.distributed as dist

        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def gather(self, item: T) -> Sequence[T]:
        import torch.distributed as dist

        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def from_main(self, item: T) -> T:
        import torch.distributed as dist

        items: list[Any] = [item]
        dist.broadcast_object_list(items, src=0, group=self._group)
        return items[0]  # type: ignore[no-any-return]

    def whole(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """One tensor at a time: the other processes hold at most one whole tensor."""
        import torch
        from torch.distributed.tensor import DTensor

        is_main = self.rank == 0

        def join(value: Any) -> Any:
            if isinstance(value, DTensor):
                full = _full_tensor(value)
                return full.cpu() if is_main else None
            if isinstance(value, Mapping):
                return {key: join(item) for key, item in value.items()}
            if type(value) in (list, tuple):
                return type(value)(join(item) for item in value)
            return value

        with torch.no_grad():
            return {key: join(item) for key, item in payload.items()}

    def watch(self, stop: StopSignal, progress: Progress) -> None:
        if self._is_posted or self._is_closed:
            return
        try:
            self._watch(stop, progress)
        except RuntimeError as fault:  # the process that kept the store has exited
            self._is_closed = True
            stop.request(f"cancelled: lost the connection to the other processes: {fault}")

    def _watch(self, stop: StopSignal, progress: Progress) -> None:
        if stop.reason is None and self._store.check(["stop"]):
            asked = json.loads(self._store.get("stop"))
            stop.request(asked["reason"], asked["category"])
        if stop.reason is not None:
            # Only now may the progress be read: with the signal set, the loop ends after the current step.
            self._post(stop, progress)

    def _post(self, stop: StopSignal, progress: Progress) -> None:
        with self._post_lock:  # once: a second answer could differ
            if not self._is_posted:
                asked = {"reason": stop.reason, "category": stop.category}
                self._store.compare_set("stop", "", json.dumps(asked))
                self._store.set(f"stop/{self.rank}", str(progress.step + 1))
                self._is_posted = True

    def stop_step(self, stop: StopSignal, progress: Progress) -> int:
        try:
            return self._stop_step(stop, progress)
        except RuntimeError as fault:
            raise _lost(
                f"{stop.reason}; no checkpoint was saved: lost the connection to the other processes: {fault}"
            ) from fault

    def _stop_step(self, stop: StopSignal, progress: Progress) -> int:
        deadline = time.monotonic() + AGREE_TIMEOUT_S
        keys = [f"stop/{rank}" for rank in range(self.world_size)]
        self._watch(stop, progress)
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise _lost(
                    f"{stop.reason}; no checkpoint was saved: not every process answered within"
                    f" {AGREE_TIMEOUT_S:.0f} s. The newest checkpoint is unchanged"
                )
            time.sleep(POLL_S)
        return max(int(self._store.get(key)) for key in keys)

    def close(self) -> None:
        """Does not wait for processes that have exited."""
        import torch.distributed as dist

        self._is_closed = True
        if dist.is_initialized():
            dist.destroy_process_group()


def _full_tensor(value: Any) -> "torch.Tensor":
    """Of a sharded tensor; collective. A shard on the CPU is moved to the mesh's device first."""
    device = value.device_mesh.device_type
    full: torch.Tensor = (value if value.device.type == device else value.to(device)).full_tensor()
    return full


def _lost(message: str) -> TrainStepError:
    error = TrainStepError(message)
    error.cause = Cause.CONNECTION
    return error


def _weighted_mean(name: str, found: Sequence[tuple[Mapping[str, float], float]]) -> float:
    having = [(own[name], weight) for own, weight in found if name in own and weight]
    return sum(value * weight for value, weight in having) / (sum(weight for _, weight in having) or 1.0)


def _wait_for_all(rank: int, world_size: int, stop: StopSignal) -> None:
    """Wait for every process in Python, where a stop request is noticed; torch's own wait cannot be interrupted."""
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # the main process keeps the store, and creates it with the group
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kinds: Any = dist  # its stubs do not name this one
    agent = kinds.TCPStore(address, port, is_master=False, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d.PrefixStore(f"gen_worker/{attempt}", agent)
    deadline = time.monotonic() + START_TIMEOUT_S
    # Two rounds: a process that stops after the first is missed in the second.
    for word in ("here", "ready"):
        store.set(f"{word}/{rank}", "1")
        while not store.check([f"{word}/{other}" for other in range(world_size)]):
            if stop.reason is not None:
                raise_stop(stop)
            if time.monotonic() > deadline:
                raise StartupError(
                    f"process {rank} of {world_size}: not all other processes started within {START_TIMEOUT_S:.0f} s"
                )
            time.sleep(POLL_S)


def distribute_module(
    module: "torch.nn.Module", ctx: StepContext, *, strategy: Literal["ddp", "fsdp"] = "ddp", **options: Any
) -> "torch.nn.Module":
    """The module to compute with: itself in a single process, else wrapped in DDP or sharded in place by FSDP2.

    Keep the module you passed in for `state_dict`: under DDP its names are those of a single process. `options` go
    to `DistributedDataParallel` or `fully_shard`.
    """
    if strategy not in ("ddp", "fsdp"):
        raise StartupError(f"strategy {strategy!r} is not known, expected ddp or fsdp")
    if ctx.world_size == 1:
        return module
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in _layers(module):
            fully_shard(child, **options)
        fully_shard(module, **options)
        return module
    from torch.nn.parallel import DistributedDataParallel

    if str(ctx.device).startswith("cuda"):
        options.setdefault("device_ids", [ctx.device])
    # Without it each step copies the gradients into buckets.
    options.setdefault("gradient_as_bucket_view", True)
    return DistributedDataParallel(module, **options)


def _layers(module: "torch.nn.Module") -> "Iterator[torch.nn.Module]":
    """What FSDP gathers and frees as one: the module's children, and those of its containers."""
    import torch

    shared = _shared_parameters(module)
    for child in module.children():
        own = {id(parameter) for parameter in child.parameters()}
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
            yield from (layer for layer in _layers(child) if not _ids(layer) & shared)
        elif own and not own & shared:  # tied weights stay with the root
            yield child


def _ids(module: "torch.nn.Module") -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _shared_parameters(module: "torch.nn.Module") -> set[int]:
    """Parameters of several children, such as tied embeddings."""
    counts = Counter(number for child in module.children() for number in _ids(child))
    return {number for number, count in counts.items() if count > 1}


def global_rows(raw_batch: Any, ctx: StepContext) -> int:
    """The rows of this step over all processes."""
    from gen_worker.trainer.feed.order import GLOBAL_ROWS
    from gen_worker.trainer.sources.base import rows_over_all
    from gen_worker.trainer.steps.evaluation import count_rows

    metadata = getattr(getattr(raw_batch, "schema", None), "metadata", None)
    if metadata is not None and GLOBAL_ROWS in metadata:
        return int(metadata[GLOBAL_ROWS])
    rows = rows_over_all(raw_batch)
    return count_rows(raw_batch) * ctx.world_size if rows is None else rows


def device_of_process(devices: Sequence[str] | None, local_rank: int) -> str:
    """The device of a process: its own of those that the job names, else its own GPU, else the CPU."""
    if devices:
        if local_rank >= len(devices) and len(set(devices)) > 1:
            raise StartupError(
                f"resources.devices names {len(devices)} devices, but there is a process {local_rank}:"
                " name one device per process"
            )
        return devices[local_rank % len(devices)]
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "cpu"
    if local_rank >= count:
        raise StartupError(
            f"process {local_rank} has no GPU of its own: this machine has {count}; lower resources.processes"
        )
    return f"cuda:{local_rank}"


def _tensors_in(value: Any, place: str = "") -> "Iterator[tuple[str, torch.Tensor]]":
    """(where, tensor) of every tensor in a state."""
    import torch

    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{place}[{index}]")


def digest_tensors(payload: Mapping[str, Any]) -> dict[str, str]:
    """A hash of each float tensor that all processes have alike: no shards, no statistics of batch norms."""
    import hashlib

    import torch
    from torch.distributed.tensor import DTensor

    found: dict[str, str] = {}
    for place, value in _tensors_in(payload):
        is_statistic = any(part.startswith("running_") for part in place.split("."))
        if value.is_floating_point() and not is_statistic and not isinstance(value, DTensor):
            octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found[place] = hashlib.blake2b(octets.numpy().data, digest_size=16).hexdigest()
    return found


def sharded_places(payload: Mapping[str, Any]) -> list[str]:
    """Where in a state the sharded tensors are."""
    from torch.distributed.tensor import DTensor

    return [place for place, value in _tensors_in(payload) if isinstance(value, DTensor)]


def own_seed(seed: int, rank: int, step: int = 0) -> int:
    """The seed of one process. The main process starts with the run's own."""
    import hashlib

    if rank == 0 and step == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
