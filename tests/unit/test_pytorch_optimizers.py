"""Every optimizer and schedule of torch can be named, and what they remember survives a checkpoint to the bit."""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from gen_worker.errors import CheckpointError, SpecError
from gen_worker.pytorch.config import OptimizerSpec, SchedulerSpec
from gen_worker.pytorch.full_state import (
    load_module_state,
    load_optimizer_state,
    optimizer_state,
)
from gen_worker.pytorch.model.optimizers import (
    OPTIMIZERS,
    SCHEDULERS,
    build_optimizer,
    build_schedule,
    optimizer_faults,
    scheduler_faults,
)
from gen_worker.trainer.checkpoints.files.state_tree import decode, encode


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Sink:
    """Takes tensors as a checkpoint does: by copying them."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def add_torch(self, tensor: Any, name: str) -> int:
        self.tensors.append(tensor.detach().clone())
        return len(self.tensors) - 1

    add_numpy = add_torch


def through_a_checkpoint(state: Any) -> Any:
    sink = Sink()
    text = msgspec.json.encode(encode(state, sink))
    return decode(msgspec.json.decode(text), sink.tensors)


def model() -> torch.nn.Module:
    # Two dimensions everywhere: one of torch's optimizers takes nothing else.
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=False)
    )


def advance(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(5, 4, generator=generator)).square().mean().backward()
    optimizer.step()


USABLE = sorted(OPTIMIZERS.keys() - {"LBFGS", "SparseAdam"})  # the second wants sparse gradients


@pytest.mark.parametrize("name", USABLE)
def test_every_optimizer_goes_on_from_a_checkpoint_to_the_bit(name: str) -> None:
    spec = OptimizerSpec(name=name)
    assert optimizer_faults(spec) == []
    straight = model()
    optimizer = build_optimizer(spec, straight, 0.01)
    for seed in range(3):
        advance(straight, optimizer, seed)
    saved = through_a_checkpoint(
        {"model": dict(straight.state_dict()), "optimizer": optimizer_state(straight, optimizer)}
    )
    resumed = model()
    other = build_optimizer(spec, resumed, 0.5)
    load_module_state(resumed, saved["model"], what="model")
    load_optimizer_state(resumed, other, saved["optimizer"])
    for seed in range(3, 6):
        advance(straight, optimizer, seed)
        advance(resumed, other, seed)
    for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_loading_leaves_what_was_loaded_alone() -> None:
    """A rollback may load the same payload twice."""
    module = model()
    optimizer = build_optimizer(OptimizerSpec(), module, 0.01)
    advance(module, optimizer, 0)
    saved = through_a_checkpoint(
        {"model": dict(module.state_dict()), "optimizer": optimizer_state(module, optimizer)}
    )
    kept = copy.deepcopy(saved)
    load_module_state(module, saved["model"], what="model")
    load_optimizer_state(module, optimizer, saved["optimizer"])
    advance(module, optimizer, 1)
    for name, entry in kept["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(saved["optimizer"]["state"][name][key], value), (name, key)
    for name, value in kept["model"].items():
        assert torch.equal(saved["model"][name], value), name


ARGS: dict[str, dict[str, Any]] = {
    "ConstantLR": {"total_iters": 3},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    "ExponentialLR": {"gamma": 0.9},
    "LambdaLR": {"lr_lambda": "math:cos"},
    "LinearLR": {"total_iters": 4},
    "MultiStepLR": {"milestones": [2, 5]},
    "MultiplicativeLR": {"lr_lambda": "math:cos"},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "PolynomialLR": {"total_iters": 8},
    "StepLR": {"step_size": 2},
    "SequentialLR": {"milestones": [3]},
    "ChainedScheduler": {},
    "warmup_cosine": {"warmup_steps": 3, "min_lr_ratio": 0.1},
}


def test_every_schedule_of_torch_is_here() -> None:
    assert ARGS.keys() - {"warmup_cosine"} == SCHEDULERS.keys() - {"ReduceLROnPlateau"}


@pytest.mark.parametrize("name", ARGS)
def test_every_schedule_goes_on_from_a_checkpoint_to_the_bit(name: str) -> None:
    parts = []
    if name in ("SequentialLR", "ChainedScheduler"):
        parts = [
            SchedulerSpec(name="LinearLR", args=ARGS["LinearLR"]),
            SchedulerSpec(name="MultiStepLR", args=ARGS["MultiStepLR"]),
        ]
    spec = SchedulerSpec(name=name, args=ARGS[name], schedulers=parts)
    assert scheduler_faults(spec) == []

    def build() -> tuple[torch.optim.Optimizer, Any, torch.nn.Module]:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return optimizer, build_schedule(spec, optimizer, total_steps=10), module

    optimizer, schedule, module = build()
    rates, saved = [], None
    for step in range(9):
        if step == 4:
            saved = through_a_checkpoint((optimizer_state(module, optimizer), schedule.state_dict()))
        optimizer.step()
        schedule.scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    other, resumed, other_module = build()
    assert saved is not None
    load_optimizer_state(other_module, other, saved[0])
    resumed.load_state_dict(saved[1])
    for rate in rates[4:]:
        other.step()
        resumed.scheduler.step()
        assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == rate
    assert len({lr for lr, _ in rates}) > 1


def test_warmup_cosine_ends_where_the_job_does() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    spec = SchedulerSpec(name="warmup_cosine", args={"warmup_steps": 2})
    schedule = build_schedule(spec, optimizer, total_steps=6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.scheduler.step()
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] > 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(SpecError, match="the length of the job is unknown"):
        build_schedule(spec, optimizer, total_steps=None)


def test_weight_decay_can_leave_out_vectors_or_patterns() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
    optimizer = build_optimizer(OptimizerSpec(no_weight_decay="auto"), module, 0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    by_name = build_optimizer(OptimizerSpec(no_weight_decay=["*.bias"]), module, 0.1)
    assert [len(group["params"]) for group in by_name.param_groups] == [3, 3]
    everything = build_optimizer(OptimizerSpec(no_weight_decay=["*"]), module, 0.1)
    assert [group["weight_decay"] for group in everything.param_groups] == [0.0]
    with pytest.raises(SpecError, match=r'no_weight_decay\[0\]: "\*norm" matches no parameter'):
        build_optimizer(OptimizerSpec(no_weight_decay=["*norm"]), module, 0.1)


def test_a_checkpoint_of_other_parameters_is_refused_by_name() -> None:
    module = model()
    optimizer = build_optimizer(OptimizerSpec(), module, 0.1)
    advance(module, optimizer, 0)
    saved = optimizer_state(module, optimizer)
    module[2].weight.requires_grad_(False)
    frozen = build_optimizer(OptimizerSpec(), module, 0.1)
    with pytest.raises(CheckpointError, match=r"other parameters or groups than this run: 2\.weight"):
        load_optimizer_state(module, frozen, saved)
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5, bias=False))
    with pytest.raises(CheckpointError, match=r"missing: 0\.bias; other shapes: 2\.weight"):
        load_module_state(other, module.state_dict(), what="model")
