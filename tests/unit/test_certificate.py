"""What a certificate is made of: digests, the plan of kills, where two traces part, and what the values there say."""

import math
import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.tools.certificate.causes import (
    differing_metrics,
    explain_resume,
    explain_unrepeatable,
    find_divergence,
    not_restored,
)
from gen_worker.tools.certificate.digest import describe_hidden, describe_tree, digest_batch
from gen_worker.tools.certificate.notes import note_losses, note_memory
from gen_worker.tools.certificate.probe_runs import ProbeRun, plan_kills
from gen_worker.tools.certificate.trace import Moment


def digests(value: Any) -> dict[str, str]:
    return {path: leaf.digest for path, leaf in describe_tree(value, "x").items()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (1, True),
        ("1", 1),
        (b"a", "a"),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"b": 1}),
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        ({"deep": [[[[[[[[[1]]]]]]]]]}, {"deep": [[[[[[[[[2]]]]]]]]]}),
    ],
)
def test_values_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert digests(one) != digests(other)


def test_equal_values_have_equal_digests_whoever_holds_them() -> None:
    held = [1, 2]
    assert digests({"a": held, "b": held}) == digests({"a": [1, 2], "b": [1, 2]})
    assert digests({"one", "two", "three"}) == digests({"three", "two", "one"})
    assert digests(random.Random(1)) == digests(random.Random(1))
    assert digests(float("nan")) == digests(float("nan"))


def test_a_tensor_is_told_apart_by_its_bits() -> None:
    torch = pytest.importorskip("torch")
    one = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert digests(one) == digests(one.clone())
    assert digests(one) != digests(one.float())
    assert digests(torch.tensor(0.0)) != digests(torch.tensor(-0.0))
    generator = torch.Generator().manual_seed(1)
    (leaf,) = describe_tree(generator, "x").values()
    assert leaf.kind == "rng"


def test_a_batch_of_arrow_is_told_apart_by_its_rows_not_by_where_they_lie() -> None:
    batch = pa.record_batch({"id": list(range(10))})
    assert digest_batch(batch.slice(2, 3)) == digest_batch(pa.record_batch({"id": [2, 3, 4]}))
    assert digest_batch(batch.slice(2, 3)) != digest_batch(batch.slice(3, 3))


COUNTER = 7


class Holder:
    def __init__(self) -> None:
        self.rng = random.Random(0)
        self._count = 3
        self.myself = self


def test_what_an_author_holds_is_found_in_objects_state_and_module() -> None:
    hidden = describe_hidden(Holder(), {"average": np.ones(3)})
    assert hidden["self.rng"].kind == "rng"
    assert hidden["self._count"].words == "3"
    assert hidden["state['average']"].kind == "array"
    assert hidden[f"{__name__}.COUNTER"].words == "7"


@pytest.mark.parametrize("num_steps", [6, 7, 12, 40])
@pytest.mark.parametrize("steps_per_epoch", [None, 2, 5, 6, 9, 12, 1000])
def test_three_kills_are_planned_and_one_is_in_mid_save(num_steps: int, steps_per_epoch: int | None) -> None:
    every = max(2, num_steps // 4)
    kills, save_step = plan_kills(num_steps, steps_per_epoch, every, seed=3)
    assert [kill.kind for kill in kills].count("mid-save") == 1
    assert len(kills) == 3
    assert all(kill.step <= num_steps for kill in kills)
    has_boundary = steps_per_epoch is not None and steps_per_epoch <= num_steps
    assert any(kill.is_at_epoch_end for kill in kills) == has_boundary
    assert save_step in (0, steps_per_epoch)
    assert plan_kills(num_steps, steps_per_epoch, every, seed=3) == (kills, save_step)


def moment(
    kind: Literal["begin", "step"], step: int, *, w: float = 0.0, hidden: Any = None, **fields: Any
) -> Moment:
    return Moment(
        kind=kind,
        step=step,
        state=describe_tree({"w": w}, "state_dict"),
        hidden=describe_tree(hidden or {}, "self"),
        rng={},
        batch=fields.pop("batch", f"batch {step}"),
        metrics=fields.pop("metrics", {}),
        **fields,
    )


def trace(*values: float, counts: bool = False) -> list[Moment]:
    begin = moment("begin", 0, hidden={"count": 0})
    steps = [
        moment(
            "step", number, w=value, hidden={"count": number if counts else 0}, metrics={"loss": value.hex()}
        )
        for number, value in enumerate(values, start=1)
    ]
    return [begin, *steps]


def test_repeated_steps_that_are_equal_do_not_part() -> None:
    straight = trace(1.0, 2.0, 3.0)
    assert find_divergence(straight, [*straight[:3], moment("begin", 1, w=1.0), *straight[2:]]) is None


def test_the_first_step_that_parts_is_told_with_its_attempt_and_values() -> None:
    straight = trace(1.0, 2.0, 3.0)
    killed = [*straight[:3], moment("begin", 1, w=1.0), *trace(1.0, 2.5, 9.0)[2:]]
    divergence = find_divergence(straight, killed)
    assert divergence is not None
    assert (divergence.kind, divergence.name, divergence.step, divergence.attempt) == ("metric", "loss", 2, 2)
    assert (divergence.expected, divergence.found) == ("2.0", "2.5")


def test_a_batch_that_differs_is_told_before_what_follows_from_it() -> None:
    straight = trace(1.0)
    divergence = find_divergence(straight, [straight[0], moment("step", 1, w=5.0, batch="other")])
    assert divergence is not None
    assert divergence.kind == "batch"


def test_a_time_among_the_metrics_does_not_make_a_class_unsound() -> None:
    one = [moment("step", 1, metrics={"loss": (1.0).hex(), "step_time": (0.1).hex()})]
    other = [moment("step", 1, metrics={"loss": (1.0).hex(), "step_time": (0.2).hex()})]
    assert find_divergence(one, other) is None
    assert differing_metrics(one, other) == ["step_time"]


def resumed(straight: list[Moment], begin: Moment) -> Any:
    killed = [*straight[:3], begin, moment("step", begin.step + 1, w=99.0)]
    divergence = find_divergence(straight, killed)
    assert divergence is not None
    return explain_resume(straight, killed, divergence)


def test_a_state_that_does_not_load_back_is_the_cause() -> None:
    cause = resumed(trace(1.0, 2.0, 3.0), moment("begin", 1, w=4.0, hidden={"count": 0}))
    assert cause.cause == "load-state-dict"
    assert "state_dict['w']" in cause.message


def test_a_value_that_changed_in_training_and_is_not_restored_is_the_cause() -> None:
    straight = trace(1.0, 2.0, 3.0, counts=True)
    begin = moment("begin", 1, w=1.0, hidden={"count": 0})
    cause = resumed(straight, begin)
    assert cause.cause == "outside-state-dict"
    assert "self['count'] was 1, is 0" in cause.evidence
    assert not_restored(straight, [begin]) == ["self['count']"]


def test_of_an_optimizer_all_of_its_state_is_to_be_saved_not_the_part_that_was_seen_to_differ() -> None:
    class Optimizer:
        steps = 0

        def state_dict(self) -> dict[str, Any]:
            return {"state": {0: {"step": self.steps}}}

    before = {"optimizer": Optimizer()}
    begin, step = moment("begin", 0, hidden=before), moment("step", 1, w=1.0)
    before["optimizer"].steps = 1
    step = msgspec.structs.replace(step, hidden=describe_tree(before, "self"))
    straight = [begin, step, moment("step", 2, w=2.0), moment("step", 3, w=3.0)]
    cause = resumed(straight, msgspec.structs.replace(begin, step=1, state=step.state))
    assert cause.cause == "outside-state-dict"
    assert cause.remedy.startswith("put self['optimizer'].state_dict() into state_dict and")


def test_losses_that_are_no_numbers_and_memory_that_grows_are_noted() -> None:
    def steps(loss: float, grown_bytes: int) -> list[Moment]:
        return [
            moment("step", n, rss_bytes=n * grown_bytes, metrics={"loss": loss.hex()}) for n in range(1, 13)
        ]

    assert note_losses(steps(1.0, 0)) == []
    assert note_losses(steps(math.nan, 0)) == [
        "loss is not finite at every step: training resumes exactly but does not learn"
    ]
    late = [*steps(1.0, 0)[:7], *steps(math.inf, 0)[7:]]
    assert "at 5 steps, first at step 8" in note_losses(late)[0]
    assert note_memory(steps(1.0, 100_000)) == []
    assert "memory grew by 15 MB in the last 6 steps" in note_memory(steps(1.0, 3_000_000))[0]
    jump = [msgspec.structs.replace(one, rss_bytes=30_000_000 if one.step == 12 else 0) for one in late]
    assert note_memory(jump) == [], "an allocator takes once"


@pytest.mark.parametrize(
    ("category", "error", "with_mock_batches", "with_their_data"),
    [
        ("train-step", "train_step returned dict, expected StepResult", True, True),
        ("train-step", "SystemExit: 3 (at /x.py:3, in train_step)", True, True),
        ("train-step", "TypeError: 'int' (at /x.py:3, in prepare_batch)", False, True),
        ("model-load", "KeyError: 'lr' (at /x.py:3, in configure)", False, True),
        ("input", "data.parquet: no such file", False, False),
    ],
)
def test_whose_fault_a_first_step_is(
    tmp_path: Path, category: str, error: str, with_mock_batches: bool, with_their_data: bool
) -> None:
    (tmp_path / "metrics").mkdir()
    event = {"event": "failed", "category": category, "error": error}
    (tmp_path / "metrics" / "events.jsonl").write_bytes(msgspec.json.encode(event) + b"\n")
    run = ProbeRun(folder=tmp_path, job=TrainingJobSpec(run_id="any"), base_dir=tmp_path)
    assert run.is_own_fault(is_data_theirs=False) == with_mock_batches
    assert run.is_own_fault(is_data_theirs=True) == with_their_data


def test_where_nothing_is_to_be_seen_no_cause_is_made_up() -> None:
    cause = resumed(trace(1.0, 2.0, 3.0), moment("begin", 1, w=1.0, hidden={"count": 0}))
    assert cause.cause == "unknown"


def test_a_generator_without_a_seed_is_named() -> None:
    one, other = (
        [moment("begin", 0, hidden={"rng": random.Random(seed)}), moment("step", 1, w=float(seed))]
        for seed in (1, 2)
    )
    cause = explain_unrepeatable(one, other, agrees_when_stopped=False)
    assert cause.cause == "unseeded-rng"
    assert "self['rng']" in cause.message
    assert explain_unrepeatable(one, other, agrees_when_stopped=True).cause == "wall-clock"
    assert explain_unrepeatable(trace(1.0), trace(2.0), agrees_when_stopped=False).cause == "not-repeatable"
