import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.errors import SpecError, StartupError
from gen_worker.trainer.compute.optim import build_default_adamw_bundle
from gen_worker.trainer.compute.schedule import warmup_cosine_factor


class Lora(torch.nn.Module):
    """A frozen base, a trained adapter, and a buffer."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(4, rank, bias=False)
        self.up = torch.nn.Linear(rank, 4, bias=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def rates(hyperparams: dict[str, Any], steps: int) -> list[float]:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scheduler = build_default_adamw_bundle([weight], hyperparams)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    return seen


class TestBundle:
    def test_only_trainable_parameters_are_optimized(self) -> None:
        module = Lora()
        (group,) = build_default_adamw_bundle(module).optimizer.param_groups
        assert [id(p) for p in group["params"]] == [id(module.down.weight), id(module.up.weight)]

    def test_the_defaults_are_the_documented_ones(self) -> None:
        (group,) = build_default_adamw_bundle(Lora(), {"something_else": object()}).optimizer.param_groups
        assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (
            1e-4,
            0.01,
            (0.9, 0.999),
            1e-8,
        )

    def test_parameters_pairs_and_groups_are_taken(self) -> None:
        module = Lora()
        frozen_and_trained = list(module.parameters())
        for given_ in (
            frozen_and_trained,
            iter(frozen_and_trained),
            module.named_parameters(),
            [{"params": frozen_and_trained}],
        ):
            (group,) = build_default_adamw_bundle(given_).optimizer.param_groups
            assert len(group["params"]) == 2
        groups = [
            {"params": [module.down.weight], "lr": 1.0},
            {"params": module.up.weight},
            {"params": [module.base.weight]},
        ]
        assert [group["lr"] for group in build_default_adamw_bundle(groups).optimizer.param_groups] == [
            1.0,
            1e-4,
        ]

    def test_nothing_to_train_is_refused(self) -> None:
        with pytest.raises(StartupError, match="nothing to train"):
            build_default_adamw_bundle(Lora().base)

    @pytest.mark.parametrize("nothing", [None, [], torch.nn.Identity(), [{"params": []}]])
    def test_no_parameters_give_a_bundle_of_two_none(self, nothing: Any) -> None:
        bundle = build_default_adamw_bundle(nothing, hyperparams={"lr": 0.1})
        assert (bundle.optimizer, bundle.scheduler) == (None, None)
        optimizer, scheduler = bundle
        assert optimizer is None
        assert scheduler is None

    def test_what_is_no_parameter_is_refused(self) -> None:
        with pytest.raises(TypeError, match="found a str"):
            build_default_adamw_bundle(["x"])

    def test_the_rate_warms_up_linearly_and_then_follows_a_cosine(self) -> None:
        seen = rates({"learning_rate": 1.0, "warmup_steps": 4, "total_steps": 12, "min_lr_ratio": 0.1}, 14)
        assert seen[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
        assert seen[8] == pytest.approx(0.1 + 0.9 * 0.5)
        assert seen[12:] == pytest.approx([0.1, 0.1])

    def test_the_rate_stays_constant_without_a_total(self) -> None:
        assert rates({"lr": 2.0, "warmup_steps": 2}, 5) == [1.0, 2.0, 2.0, 2.0, 2.0]

    def test_max_steps_stands_in_for_total_steps(self) -> None:
        assert rates({"max_steps": 4}, 5) == rates({"total_steps": 4}, 5)
        assert rates({"max_steps": 9, "total_steps": 4}, 5) == rates({"total_steps": 4}, 5)

    @settings(max_examples=200, deadline=None)
    @given(warmup=st.integers(0, 50), rest=st.integers(0, 50), ratio=st.floats(0, 1))
    def test_the_rate_is_positive_at_first_bounded_and_never_rises_after_the_warm_up(
        self, warmup: int, rest: int, ratio: float
    ) -> None:
        total = max(1, warmup + rest)
        factor = warmup_cosine_factor(warmup, total, ratio)
        seen = [factor(step) for step in range(total + 5)]
        assert seen[0] > 0
        assert all(0 <= value <= 1 + 1e-12 for value in seen)
        tail = seen[warmup:]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(tail))
        assert math.isclose(seen[-1], ratio, abs_tol=1e-9)

    def test_all_faults_of_the_hyperparams_come_at_once(self) -> None:
        with pytest.raises(SpecError) as caught:
            build_default_adamw_bundle(
                Lora(),
                {
                    "learning_rate": "1e-4", "weight_decay": -1, "betas": [0.9], "eps": True, "warmup_steps": 2.0,
                    "total_steps": 0, "min_lr_ratio": 2,
                },
            )  # fmt: skip
        assert [fault.partition(":")[0] for fault in caught.value.faults] == [
            "betas", "learning_rate", "weight_decay", "eps", "warmup_steps", "total_steps", "min_lr_ratio",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "hyperparams",
        [{"lr": 1.0, "learning_rate": 1.0}, {"warmup_steps": 5, "max_steps": 4}, {"lr": math.nan}],
    )
    def test_contradictions_are_refused(self, hyperparams: dict[str, Any]) -> None:
        with pytest.raises(SpecError):
            build_default_adamw_bundle(Lora(), hyperparams)

    def test_the_schedulers_state_is_a_plain_tree(self) -> None:
        def check(value: Any) -> None:
            assert value is None or type(value) in (bool, int, float, str, list, dict)
            for inner in (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            ):
                check(inner)

        check(build_default_adamw_bundle(Lora(), {"total_steps": 9}).scheduler.state_dict())

    def test_a_restored_bundle_goes_on_with_the_same_rates(self) -> None:
        hyperparams = {"warmup_steps": 2, "total_steps": 9}
        whole = rates(hyperparams, 9)
        weight = torch.nn.Parameter(torch.ones(1))
        first = build_default_adamw_bundle([weight], hyperparams)
        for _ in range(4):
            weight.grad = torch.ones(1)
            first.optimizer.step()
            first.scheduler.step()
        second = build_default_adamw_bundle([weight], hyperparams)
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.scheduler.load_state_dict(first.scheduler.state_dict())
        assert second.optimizer.param_groups[0]["lr"] == whole[4]
        second.optimizer.step()
        second.scheduler.step()
        assert second.optimizer.param_groups[0]["lr"] == whole[5]
