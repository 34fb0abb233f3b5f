"""Placement: nobody gets what is not free, the order holds, and small runs cannot starve a large one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trn.core.causes import QUEUED, Cause
from trn.core.runs import Needs, QueuedRun
from trn.daemon.dispatch.placement import FreeResources, choose_starts

GPUS = tuple(f"cuda:{index}" for index in range(4))
PATIENCE_S = 300.0


def queued(run_id: str, *, submitted_ms: int = 0, priority: int = 0, **needs: Any) -> QueuedRun:
    return QueuedRun(
        run_id=run_id,
        priority=priority,
        submitted_ms=submitted_ms,
        needs=Needs(**needs),
        cause=QUEUED,
        attempt=0,
    )


def free(*device_ids: str, cpus: int = 8, memory_mb: int = 1000) -> FreeResources:
    return FreeResources(device_ids=device_ids, cpus=cpus, memory_mb=memory_mb)


any_needs = st.builds(
    Needs,
    devices=st.lists(st.sampled_from(GPUS), unique=True, max_size=2).map(tuple),
    gpus=st.integers(0, 4),
    cpus=st.integers(1, 6),
    memory_mb=st.integers(0, 800),
).map(lambda needs: needs if not needs.devices else Needs(devices=needs.devices, cpus=needs.cpus))
any_queue = st.lists(st.tuples(any_needs, st.integers(0, 600_000), st.integers(-1, 1)), max_size=12).map(
    lambda items: [
        QueuedRun(
            run_id=f"run-{index}", priority=priority, submitted_ms=at, needs=needs, cause=QUEUED, attempt=0
        )
        for index, (needs, at, priority) in enumerate(items)
    ]
)
any_free = st.builds(
    FreeResources,
    device_ids=st.lists(st.sampled_from((*GPUS, "rocm:0", "rocm:1")), unique=True).map(tuple),
    cpus=st.integers(0, 12),
    memory_mb=st.integers(0, 2000),
)


@given(queue=any_queue, there=any_free)
def test_nothing_is_given_twice_or_that_is_not_free(queue: list[QueuedRun], there: FreeResources) -> None:
    decision = choose_starts(queue, there, now_ms=600_000, patience_s=PATIENCE_S)
    needs = {run.run_id: run.needs for run in queue}
    given_out = [device_id for _, device_ids in decision.starts for device_id in device_ids]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(there.device_ids)
    assert sum(needs[run_id].cpus for run_id, _ in decision.starts) <= there.cpus
    assert sum(needs[run_id].memory_mb for run_id, _ in decision.starts) <= there.memory_mb
    for run_id, device_ids in decision.starts:
        wanted = needs[run_id]
        assert device_ids == wanted.devices if wanted.devices else len(device_ids) == wanted.gpus
        assert len({device_id.partition(":")[0] for device_id in device_ids}) <= 1
    assert {run_id for run_id, _ in decision.starts} | set(decision.waits) == set(needs)
    assert all(cause.id.startswith("waits-for-") and cause.waits_for for cause in decision.waits.values())


@given(queue=any_queue, there=any_free, order=st.randoms())
def test_the_same_question_has_the_same_answer(
    queue: list[QueuedRun], there: FreeResources, order: Any
) -> None:
    first = choose_starts(queue, there, now_ms=600_000, patience_s=PATIENCE_S)
    shuffled = list(queue)
    order.shuffle(shuffled)
    assert choose_starts(shuffled, there, now_ms=600_000, patience_s=PATIENCE_S) == first


@given(queue=any_queue)
def test_the_order_is_urgency_then_age_where_everything_fits(queue: list[QueuedRun]) -> None:
    small = [QueuedRun(**{**_fields(run), "needs": Needs(cpus=1)}) for run in queue]
    decision = choose_starts(small, free(cpus=len(queue)), now_ms=0, patience_s=PATIENCE_S)
    expected = sorted(small, key=lambda run: (-run.priority, run.submitted_ms, run.run_id))
    assert [run_id for run_id, _ in decision.starts] == [run.run_id for run in expected]


def _fields(run: QueuedRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__struct_fields__}


def test_a_small_run_overtakes_a_large_one_only_while_that_is_patient() -> None:
    large = queued("large", submitted_ms=0, gpus=4, cpus=4)
    small = queued("small", submitted_ms=1, gpus=1)
    early = choose_starts([large, small], free("cuda:0", "cuda:1"), now_ms=1000, patience_s=PATIENCE_S)
    assert early.starts == (("small", ("cuda:0",)),)
    assert early.waits == {"large": Cause(id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 4})}
    late = choose_starts([large, small], free("cuda:0", "cuda:1"), now_ms=301_000, patience_s=PATIENCE_S)
    assert late.starts == ()
    assert late.waits["small"] == Cause(
        id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 1, "kept_for": "large"}
    )


def test_what_an_impatient_run_does_not_need_is_still_given_to_others() -> None:
    large = queued("large", gpus=4, cpus=4)
    others = [queued(f"small-{index}", submitted_ms=1 + index, cpus=2) for index in range(3)]
    decision = choose_starts([large, *others], free("cuda:0", cpus=8), now_ms=10**9, patience_s=PATIENCE_S)
    assert [run_id for run_id, _ in decision.starts] == ["small-0", "small-1"]  # 4 of the 8 CPUs are kept


def test_a_named_device_gathers_too() -> None:
    named = queued("named", devices=("cuda:0", "cuda:1"))
    other = queued("other", submitted_ms=1, gpus=1)
    late = choose_starts([named, other], free("cuda:1", "cuda:2"), now_ms=10**9, patience_s=PATIENCE_S)
    assert late.starts == (("other", ("cuda:2",)),)
    assert late.waits == {"named": Cause(id="waits-for-device", waits_for=("cuda:0",))}


def test_any_gpu_leaves_those_that_others_name() -> None:
    anything = queued("any", gpus=1)
    named = queued("named", submitted_ms=1, devices=("cuda:0",))
    decision = choose_starts([anything, named], free("cuda:0", "cuda:1"), now_ms=0, patience_s=PATIENCE_S)
    assert dict(decision.starts) == {"any": ("cuda:1",), "named": ("cuda:0",)}


def test_gpus_of_one_run_are_of_one_kind() -> None:
    wants_two = queued("two", gpus=2)
    decision = choose_starts([wants_two], free("cuda:0", "rocm:0", "rocm:1"), now_ms=0, patience_s=1)
    assert decision.starts == (("two", ("rocm:0", "rocm:1")),)
    decision = choose_starts([wants_two], free("cuda:0", "rocm:0"), now_ms=0, patience_s=1)
    assert decision.starts == ()


@given(data=st.data())
def test_an_endless_stream_of_small_runs_cannot_starve_a_large_one(data: st.DataObject) -> None:
    """Small runs last at most 5 ticks of 10 s and never stop coming; the large one wants all of the machine."""
    running: dict[str, tuple[int, tuple[str, ...], Needs]] = {}
    waiting = [queued("large", gpus=4, cpus=8, memory_mb=1000)]
    bound = int(PATIENCE_S / 10) + 7
    for tick in range(bound):
        now_ms = tick * 10_000
        running = {name: job for name, job in running.items() if job[0] > tick}
        waiting += [
            QueuedRun(
                run_id=f"small-{tick}-{index}",
                priority=0,
                submitted_ms=now_ms,
                needs=Needs(gpus=data.draw(st.integers(0, 2)), cpus=data.draw(st.integers(1, 3))),
                cause=QUEUED,
                attempt=0,
            )
            for index in range(3)
        ]
        held = {device_id for _, device_ids, _ in running.values() for device_id in device_ids}
        there = free(
            *(device_id for device_id in GPUS if device_id not in held),
            cpus=8 - sum(needs.cpus for _, _, needs in running.values()),
        )
        needs_of = {run.run_id: run.needs for run in waiting}
        for run_id, device_ids in choose_starts(waiting, there, now_ms=now_ms, patience_s=PATIENCE_S).starts:
            if run_id == "large":
                return
            running[run_id] = (tick + data.draw(st.integers(1, 5)), device_ids, needs_of[run_id])
        waiting = [run for run in waiting if run.run_id not in running]
        waiting = [waiting[0], *waiting[-20:]] if len(waiting) > 21 else waiting
    raise AssertionError(f"the large run waited longer than {bound} ticks")
