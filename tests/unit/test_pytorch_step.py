"""A step learns from the mean over its whole window, however it is split, and does what a loop by hand would do."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.pytorch.config import EmaSpec, LossSpec, OptimizerSpec, SchedulerSpec
from gen_worker.pytorch.model.losses import Loss, build_loss
from gen_worker.pytorch.model.optimizers import WeightAverage, build_optimizer, build_schedule
from gen_worker.pytorch.step import Prepared, StepParts, build_step, stand_in
from gen_worker.trainer.contracts import StepContext

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def context() -> StepContext:
    return StepContext(job=TrainingJobSpec(run_id="r", max_steps=10))


def classifier(out_features: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, out_features))


def rows_of(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num, 4), torch.randint(0, 3, (num,))


def prepared(inputs: Any, target: Any, all_rows: int | None = None) -> Prepared:
    return inputs, target, len(target), len(target) if all_rows is None else all_rows


def take_step(
    module: torch.nn.Module, loss: Loss, batch: Prepared, **options: Any
) -> tuple[float, list[Any]]:
    """(reported loss, gradients) of one step that changes nothing."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    parts = StepParts(module=module, forward=module, loss=loss, optimizer=optimizer, **options)
    result = build_step(parts)(batch, context())
    return float(result.metrics["loss"]), [value.grad.clone() for value in module.parameters()]


def token_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 7, (7, 6))
    for row, length in enumerate((6, 2, 3, 6, 1, 4, 5)):
        tokens[row, length:] = 0
    return tokens[:, :-1], tokens[:, 1:]


def token_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7))


SMALL = LossSpec(name="cross_entropy", args={"weight": [0.01, 0.02, 0.05]})
WEIGHTED = LossSpec(name="cross_entropy", args={"weight": [1.0, 5.0, 0.2], "ignore_index": 2})


@pytest.mark.parametrize("num_parts", [2, 3, 4, 7, 20])
def test_accumulated_parts_learn_what_the_whole_batch_would(num_parts: int) -> None:
    cases = [
        (classifier(), build_loss(LossSpec(name="cross_entropy"), device=CPU), rows_of(7)),
        (classifier(), build_loss(WEIGHTED, device=CPU), rows_of(7)),
        # The weights of the classes may add up to less than one.
        (classifier(), build_loss(SMALL, device=CPU), rows_of(7)),
        (classifier(), build_loss(LossSpec(name="mse"), device=CPU), (torch.randn(7, 4), torch.randn(7, 3))),
        (token_model(), build_loss(LossSpec(name="next_token"), device=CPU, pad_id=0), token_batch()),
        (token_model(), build_loss(LossSpec(name="next_token"), device=CPU), token_batch()),
    ]
    for module, loss, (inputs, target) in cases:
        whole, expected = take_step(module, loss, prepared(inputs, target))
        summed, found = take_step(module, loss, prepared(inputs, target), num_parts=num_parts)
        assert summed == pytest.approx(whole, rel=1e-5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 3), (7, 0), (0, 7), (1, 6)])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_mean_over_processes_is_the_mean_over_their_rows(sizes: tuple[int, int], num_parts: int) -> None:
    """DDP averages the gradients of the processes; here that mean is taken by hand."""
    module, (inputs, target) = classifier(), rows_of(7)
    loss = build_loss(LossSpec(name="cross_entropy"), device=CPU)
    whole, expected = take_step(module, loss, prepared(inputs, target))
    parts = list(zip(inputs.split(list(sizes)), target.split(list(sizes)), strict=True))
    results = [
        take_step(module, loss, prepared(*part, all_rows=7), num_parts=num_parts, world_size=2)
        for part in parts
    ]
    for index, value in enumerate(expected):
        mean = (results[0][1][index] + results[1][1][index]) / 2
        torch.testing.assert_close(mean, value, rtol=1e-4, atol=1e-6)
    reported = sum(value * size for (value, _), size in zip(results, sizes, strict=True)) / 7
    assert reported == pytest.approx(whole, rel=1e-5)


def test_a_process_without_rows_meets_the_others_and_learns_nothing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    before = copy.deepcopy(module.state_dict())
    exchanged: list[bool] = []

    def exchange(is_last: bool) -> Any:
        exchanged.append(is_last)
        return nullcontext()

    loss = build_loss(LossSpec(name="cross_entropy"), device=CPU)
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    value, gradients = take_step(
        module, loss, prepared(*empty, all_rows=5), num_parts=2, world_size=2, exchange=exchange
    )
    assert value == 0.0
    assert exchanged == [False, True]
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_gradients_are_exchanged_once_a_step() -> None:
    exchanged: list[bool] = []

    def exchange(is_last: bool) -> Any:
        exchanged.append(is_last)
        return nullcontext()

    loss = build_loss(LossSpec(name="cross_entropy"), device=CPU)
    take_step(classifier(), loss, prepared(*rows_of(8)), num_parts=4, exchange=exchange)
    assert exchanged == [False, False, False, True]


def test_a_step_is_bit_for_bit_the_loop_written_by_hand() -> None:
    ours = classifier()
    by_hand = copy.deepcopy(ours)
    batches = [rows_of(8) for _ in range(5)]
    schedule_spec = SchedulerSpec(name="warmup_cosine", args={"warmup_steps": 2})
    optimizer = build_optimizer(OptimizerSpec(args={"weight_decay": 0.1}), ours, 0.01)
    step = build_step(
        StepParts(
            module=ours,
            forward=ours,
            loss=build_loss(LossSpec(name="cross_entropy"), device=CPU),
            optimizer=optimizer,
            scheduler=build_schedule(schedule_spec, optimizer, total_steps=5),
            clip_norm=0.5,
            clip_value=0.1,
            autocast=torch.autocast("cpu", dtype=torch.bfloat16),
        )
    )
    losses = [step(prepared(*batch), context()).metrics["loss"] for batch in batches]

    other = torch.optim.AdamW(by_hand.parameters(), lr=0.01, weight_decay=0.1)
    rate = build_schedule(schedule_spec, other, total_steps=5).scheduler
    for (inputs, target), found in zip(batches, losses, strict=True):
        other.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(by_hand(inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(by_hand.parameters(), 0.1)
        other.step()
        rate.step()
        assert torch.equal(loss.detach(), found)
    for one, two in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_gradient_scaler_skips_what_overflows_and_recovers() -> None:
    module = classifier()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    schedule = build_schedule(
        SchedulerSpec(name="StepLR", args={"step_size": 1}), optimizer, total_steps=None
    )
    step = build_step(
        StepParts(
            module=module,
            forward=module,
            loss=build_loss(LossSpec(name="cross_entropy"), device=CPU),
            optimizer=optimizer,
            scheduler=schedule,
            scaler=scaler,
            clip_norm=1.0,
            autocast=torch.autocast("cpu", dtype=torch.float16),
        )
    )
    before = copy.deepcopy(module.state_dict())
    step(prepared(*rows_of(8)), context())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert scaler.get_scale() == 2.0**119
    scaler.update(1.0)
    step(prepared(*rows_of(8)), context())
    assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_average_follows_the_weights_and_copies_the_buffers() -> None:
    live = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    live[0].bias.requires_grad_(False)
    spec = EmaSpec(decay=0.75)
    average = WeightAverage(copy.deepcopy(live), live=live, decay=spec.decay)
    first = average.module[0].weight.clone()
    with torch.no_grad():
        live[0].weight.add_(1.0)
        live[1].running_mean.add_(2.0)
    average.update()
    torch.testing.assert_close(average.module[0].weight, first + 0.25)
    assert torch.equal(average.module[1].running_mean, live[1].running_mean)
    assert not any(value.requires_grad for value in average.module.parameters())


def test_the_average_is_taken_every_so_many_steps_of_the_run() -> None:
    live = classifier()
    average = WeightAverage(copy.deepcopy(live), live=live, decay=0.5, every=3)
    step = build_step(
        StepParts(
            module=live,
            forward=live,
            loss=build_loss(LossSpec(name="cross_entropy"), device=CPU),
            optimizer=torch.optim.SGD(live.parameters(), lr=1.0),
            average=average,
        )
    )
    ctx = context()
    changed = []
    for _ in range(6):
        before = copy.deepcopy(average.module.state_dict())
        step(prepared(*rows_of(4)), ctx)
        ctx.progress.step += 1
        changed.append(
            any(not torch.equal(value, before[name]) for name, value in average.module.state_dict().items())
        )
    assert changed == [False, False, True, False, False, True]


def test_a_schedule_by_epochs_waits_for_them_and_catches_up() -> None:
    module = classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    spec = SchedulerSpec(name="ExponentialLR", args={"gamma": 0.5}, every="epoch")
    schedule = build_schedule(spec, optimizer, total_steps=None)
    loss = build_loss(LossSpec(name="cross_entropy"), device=CPU)
    step = build_step(
        StepParts(module=module, forward=module, loss=loss, optimizer=optimizer, scheduler=schedule)
    )
    ctx = context()
    rates = []
    for epoch in (0, 0, 1, 1, 3):
        ctx.progress.epoch = epoch
        step(prepared(*rows_of(4)), ctx)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.125]


def test_rows_that_stand_in_have_the_shapes_of_the_data() -> None:
    found = stand_in({"x": torch.ones(0, 3, 4, dtype=torch.float64), "y": torch.ones(5, dtype=torch.int64)})
    assert found["x"].shape == (2, 3, 4)
    assert found["x"].dtype == torch.float64
    assert found["y"].tolist() == [0, 0]
