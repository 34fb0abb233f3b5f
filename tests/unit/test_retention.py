"""Retention never removes what a run could need to go on."""

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gen_worker.contract.checkpoints.retention import Candidate, select_removals

# A busy machine is slow; that is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def candidate(step, *, verified=True, final=False, value=None, mode="min", metric="loss"):
    return Candidate(
        name="final" if final else f"step-{step:08d}",
        step=step,
        verified=verified,
        is_final=final,
        metric_name=metric if value is not None else None,
        metric_value=value,
        metric_mode=mode,
    )


@st.composite
def folders(draw):
    steps = draw(st.lists(st.integers(0, 40), unique=True, max_size=12))
    mode = draw(st.sampled_from(["min", "max"]))
    found = [
        candidate(
            step,
            verified=draw(st.booleans()),
            value=draw(st.none() | st.floats(width=16)),
            mode=mode,
        )
        for step in steps
    ]
    if draw(st.booleans()):
        found.append(candidate(draw(st.integers(0, 40)), final=True, verified=draw(st.booleans())))
    return draw(st.permutations(found))


@unhurried
@given(folders(), st.integers(0, 5), st.integers(0, 3))
def test_the_newest_verified_the_final_and_the_last_unverified_always_stay(found, keep_last, keep_best):
    removed = set(select_removals(found, keep_last=keep_last, keep_best=keep_best))
    kept = [item for item in found if item.name not in removed]
    verified = [item for item in found if item.verified]
    assert removed <= {item.name for item in found if not item.is_final}
    doubtful = sorted(
        (item for item in found if not item.verified and not item.is_final), key=lambda item: item.step
    )
    assert {item.name for item in doubtful} & removed == {
        item.name for item in (doubtful[:-keep_last] if keep_last else [])
    }
    if verified:
        assert max(item.step for item in verified) in {item.step for item in kept if item.verified}
    if keep_last == 0:
        assert not removed


@unhurried
@given(folders(), st.integers(1, 5), st.integers(0, 3))
def test_exactly_the_last_and_the_best_stay(found, keep_last, keep_best):
    removed = set(select_removals(found, keep_last=keep_last, keep_best=keep_best))
    steps = sorted(
        (item for item in found if item.verified and not item.is_final), key=lambda item: item.step
    )
    assert not removed & {item.name for item in steps[-keep_last:]}
    measured = [
        item
        for item in found
        if item.verified and item.metric_value is not None and math.isfinite(item.metric_value)
    ]
    sign = -1 if measured and measured[0].metric_mode == "max" else 1
    ranked = sorted(sign * item.metric_value for item in measured)
    kept_values = sorted(sign * item.metric_value for item in measured if item.name not in removed)
    assert kept_values[:keep_best] == ranked[:keep_best]
    survivors = [item for item in steps if item.name not in removed]
    assert len(survivors) <= keep_last + keep_best + 1


@unhurried
@given(folders(), st.integers(1, 5), st.integers(0, 3))
def test_applying_it_twice_removes_nothing_more(found, keep_last, keep_best):
    removed = set(select_removals(found, keep_last=keep_last, keep_best=keep_best))
    kept = [item for item in found if item.name not in removed]
    assert select_removals(kept, keep_last=keep_last, keep_best=keep_best) == []


def test_removals_come_oldest_first():
    found = [candidate(step) for step in (30, 10, 20, 40)]
    assert select_removals(found, keep_last=2, keep_best=0) == ["step-00000010", "step-00000020"]


def test_a_value_of_another_metric_does_not_compete():
    found = [
        candidate(1, value=0.1, metric="old"),
        candidate(2, value=5.0),
        candidate(3, value=6.0),
        candidate(4),
    ]
    assert select_removals(found, keep_last=1, keep_best=1) == ["step-00000001", "step-00000003"]


def test_of_equal_values_the_newer_one_is_best():
    found = [candidate(1, value=1.0), candidate(2, value=1.0), candidate(3, value=2.0)]
    assert select_removals(found, keep_last=1, keep_best=1) == ["step-00000001"]
