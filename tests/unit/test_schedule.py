"""What is due when, against a schedule that is walked step by step."""

from hypothesis import given
from hypothesis import strategies as st

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.steps.batch_source import IterableSource, ListSource
from gen_worker.trainer.steps.schedule import Schedule, Start

CADENCE = st.integers(min_value=0, max_value=7)


@given(
    metric=CADENCE,
    checkpoint=CADENCE,
    sample=CADENCE,
    validate=st.one_of(CADENCE, st.just("epoch")),
    per_epoch=st.integers(min_value=1, max_value=9),
    origin_step=st.integers(min_value=0, max_value=20),
    origin_batch=st.integers(min_value=0, max_value=8),
)
def test_the_next_due_step_is_the_first_at_which_anything_is_due(
    metric: int,
    checkpoint: int,
    sample: int,
    validate: int | str,
    per_epoch: int,
    origin_step: int,
    origin_batch: int,
) -> None:
    job = TrainingJobSpec(
        run_id="r",
        max_steps=1000,
        metric_every=metric,
        checkpoint_every=checkpoint,
        sample_every=sample,
        validate_every=validate,  # type: ignore[arg-type]
    )
    start = Start(step=origin_step, batch=origin_batch % per_epoch)
    schedule = Schedule(job=job, source=ListSource(range(per_epoch)), origin=start)
    due = schedule.next_due(origin_step, 1000)

    def is_anything_due(step: int) -> bool:
        return (
            any(every and step % every == 0 for every in (metric, checkpoint, sample))
            or schedule.is_validation_due(step)
            or schedule.is_epoch_end(step)
        )

    assert is_anything_due(due)
    assert not any(is_anything_due(step) for step in range(origin_step + 1, due))


def test_a_rollback_keeps_the_place_in_the_data_and_moves_the_end() -> None:
    job = TrainingJobSpec(run_id="r", epochs=2)
    schedule = Schedule(job=job, source=ListSource(range(5)), origin=Start(), num_epochs=2)
    assert (schedule.end_step(), schedule.position(7)) == (10, (1, 2))
    schedule.origin = Start(step=4, epoch=1, batch=2)  # from step 7 back to step 4, at the same place
    assert (schedule.position(4), schedule.end_step()) == ((1, 2), 7)


def test_without_a_known_length_there_is_no_epoch_and_no_end() -> None:
    job = TrainingJobSpec(run_id="r", metric_every=0, checkpoint_every=0)
    schedule = Schedule(job=job, source=IterableSource([]), origin=Start())
    assert schedule.end_step() is None
    assert not schedule.is_epoch_end(3)
    assert schedule.next_due(5, None) > 5
