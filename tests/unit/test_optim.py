import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.errors import CheckpointError, SpecError, StartupError
from gen_worker.trainer.optim import (
    build_default_adamw_bundle,
    load_trainable_module_checkpoint,
    save_trainable_module_checkpoint,
    warmup_cosine_factor,
)


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


def train(module: torch.nn.Module, bundle: Any, steps: int) -> None:
    for step in range(steps):
        bundle.optimizer.zero_grad()
        module(torch.full((2, 4), float(step + 1))).square().mean().backward()
        bundle.optimizer.step()
        bundle.scheduler.step()


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


class TestCheckpoints:
    def test_a_resumed_module_ends_with_the_same_bits(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        module = Lora()
        frozen = {name: tensor.clone() for name, tensor in module.base.state_dict().items()}
        bundle = build_default_adamw_bundle(module, {"lr": 0.01})
        train(module, bundle, 3)
        extra = {"scheduler": bundle.scheduler.state_dict(), "note": ("a", b"b", None), "t": torch.ones(2)}
        path = save_trainable_module_checkpoint(
            module, tmp_path / "deep" / "lora.pt", bundle.optimizer, extra
        )
        train(module, bundle, 3)

        torch.manual_seed(99)
        other = Lora()
        other.base.load_state_dict(frozen)
        again = build_default_adamw_bundle(other, {"lr": 0.01})
        loaded = load_trainable_module_checkpoint(other, path, again.optimizer)
        assert loaded["note"] == ("a", b"b", None)
        again.scheduler.load_state_dict(loaded["scheduler"])
        train(other, again, 3)
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name

    def test_the_frozen_rest_is_not_in_the_file(self, tmp_path: Path) -> None:
        path = save_trainable_module_checkpoint(Lora(), tmp_path / "a.pt")
        assert set(torch.load(path, weights_only=True)["parameters"]) == {"down.weight", "up.weight"}

    def test_asked_buffers_are_kept(self, tmp_path: Path) -> None:
        module = Lora()
        module.get_buffer("count").fill_(5)
        path = save_trainable_module_checkpoint(module, tmp_path / "a.pt", buffers=["count"])
        other = Lora()
        load_trainable_module_checkpoint(other, path)
        assert other.get_buffer("count").item() == 5
        with pytest.raises(CheckpointError, match="no buffer cuont; it has count"):
            save_trainable_module_checkpoint(module, tmp_path / "a.pt", buffers=["cuont"])

    def test_names_that_do_not_fit_are_all_named_and_nothing_is_changed(self, tmp_path: Path) -> None:
        module = Lora()
        module.up.requires_grad_(False)
        module.base.bias.requires_grad_(True)
        path = save_trainable_module_checkpoint(module, tmp_path / "a.pt")
        other = Lora()
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(
            CheckpointError, match=r"it lacks up.weight; it holds base.bias, which the module does not train"
        ):
            load_trainable_module_checkpoint(other, path)
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in before.items())
        load_trainable_module_checkpoint(other, path, strict=False)
        assert torch.equal(other.down.weight, module.down.weight)
        assert torch.equal(other.up.weight, before["up.weight"])

    def test_shapes_and_dtypes_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        path = save_trainable_module_checkpoint(Lora(rank=3), tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=r"down.weight has shape \(3, 4\), the module's \(2, 4\)"):
            load_trainable_module_checkpoint(Lora(), path, strict=False)
        half = Lora(rank=3).to(torch.bfloat16)
        with pytest.raises(
            CheckpointError, match=r"down.weight is torch.float32, the module's torch.bfloat16"
        ):
            load_trainable_module_checkpoint(half, path)
        load_trainable_module_checkpoint(half, path, strict=False)

    def test_an_optimizer_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        module = Lora()
        bare = save_trainable_module_checkpoint(module, tmp_path / "a.pt")
        optimizer = build_default_adamw_bundle(module).optimizer
        with pytest.raises(CheckpointError, match="holds no optimizer state"):
            load_trainable_module_checkpoint(module, bare, optimizer)
        full = save_trainable_module_checkpoint(module, tmp_path / "b.pt", optimizer)
        with pytest.raises(CheckpointError, match="does not fit this optimizer"):
            load_trainable_module_checkpoint(
                module, full, build_default_adamw_bundle([module.up.weight]).optimizer
            )
        assert load_trainable_module_checkpoint(module, full) == {}

    @pytest.mark.parametrize(
        ("extra", "where"),
        [({"a": [1, {2}]}, r"extra\['a'\]\[1\] is a set"), ({"f": print}, r"extra\['f'\]")],
    )
    def test_what_could_not_be_loaded_is_not_saved(
        self, tmp_path: Path, extra: dict[str, Any], where: str
    ) -> None:
        with pytest.raises(CheckpointError, match=where):
            save_trainable_module_checkpoint(Lora(), tmp_path / "a.pt", extra=extra)
        assert list(tmp_path.iterdir()) == []

    def test_a_failed_write_leaves_the_old_file_and_no_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = Lora()
        path = save_trainable_module_checkpoint(module, tmp_path / "a.pt", extra={"n": 1})

        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            save_trainable_module_checkpoint(module, path, extra={"n": 2})
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == [path]
        assert load_trainable_module_checkpoint(module, path) == {"n": 1}

    @pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
    def test_a_file_that_is_no_checkpoint_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.pt cannot be read"):
            load_trainable_module_checkpoint(Lora(), tmp_path / "a.pt")

    def test_a_truncated_checkpoint_is_refused(self, tmp_path: Path) -> None:
        path = save_trainable_module_checkpoint(Lora(), tmp_path / "a.pt")
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_trainable_module_checkpoint(Lora(), path)

    def test_a_missing_file_and_another_format_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not exist"):
            load_trainable_module_checkpoint(Lora(), tmp_path / "a.pt")
        torch.save({"weights": torch.ones(1)}, tmp_path / "b.pt")
        with pytest.raises(CheckpointError, match="written by another function"):
            load_trainable_module_checkpoint(Lora(), tmp_path / "b.pt")

    def test_a_file_with_code_in_it_is_never_run(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return (Path(tmp_path / "ran").touch, ())

        torch.save({"format": Evil()}, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_trainable_module_checkpoint(Lora(), tmp_path / "a.pt")
        assert not (tmp_path / "ran").exists()

    def test_a_module_without_trainable_parameters_is_not_saved(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no trainable parameters"):
            save_trainable_module_checkpoint(Lora().base, tmp_path / "a.pt")
