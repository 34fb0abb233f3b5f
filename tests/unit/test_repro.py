import random
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from gen_worker.trainer.compute.repro import seed_everything, to_float_scalar


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


class TestSeeding:
    @pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1])
    def test_the_same_seed_gives_the_same_numbers_everywhere(self, seed: int) -> None:
        assert seed_everything(seed) == seed
        first = draw()
        seed_everything(seed)
        assert draw() == first

    def test_no_bit_of_a_wide_seed_is_lost(self) -> None:
        seed_everything(7)
        narrow = draw()
        seed_everything(7 + 2**40)
        assert all(a != b for a, b in zip(narrow, draw(), strict=True))

    def test_torch_is_seeded_as_by_itself_and_asks_nobody_where_it_has_no_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.manual_seed(7)
        expected = torch.rand(3)
        stacks: list[object] = []
        monkeypatch.setattr("traceback.format_stack", lambda *_args: stacks.append(1) or [])
        seed_everything(7)
        assert torch.equal(torch.rand(3), expected)
        if torch.accelerator.current_accelerator(check_available=False) is None:
            assert stacks == []

    def test_a_torch_with_devices_seeds_them_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seeded: list[int] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch, "manual_seed", seeded.append)
        seed_everything(7)
        assert seeded == [7]

    def test_small_seeds_are_the_ones_people_know(self) -> None:
        seed_everything(3)
        assert np.random.random() == np.random.RandomState(3).random_sample()
        assert random.random() == random.Random(3).random()
        assert torch.initial_seed() == 3

    @pytest.mark.parametrize("seed", [-1, 2**64, True])
    def test_an_impossible_seed_is_refused(self, seed: int) -> None:
        with pytest.raises(ValueError, match="expected a whole number"):
            seed_everything(seed)

    def test_a_seed_that_is_no_whole_number_is_refused(self) -> None:
        with pytest.raises(TypeError):
            seed_everything(1.5)  # type: ignore[arg-type]

    def test_torch_is_left_alone_when_asked(self) -> None:
        state = torch.get_rng_state()
        seed_everything(5, torch=False)
        assert torch.equal(torch.get_rng_state(), state)

    def test_torch_is_imported_only_where_it_is_wanted(self) -> None:
        code = "import sys; from gen_worker.trainer.compute.repro import seed_everything; seed_everything(1, torch=False); print('torch' in sys.modules)"
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            == "False\n"
        )

    def test_without_torch_installed_the_rest_is_seeded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert seed_everything(1) == 1
        with pytest.raises(ImportError):
            seed_everything(1, torch=True)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


class TestScalars:
    @pytest.mark.parametrize(
        "value",
        [
            2,
            2.0,
            Fraction(2),
            np.float16(2),
            np.int64(2),
            np.array(2),
            np.array([[2.0]]),
            torch.tensor(2),
            torch.tensor([2.0], dtype=torch.bfloat16),
            torch.tensor([[2.0]], requires_grad=True),
            Holder(2),
        ],
    )
    def test_one_number_is_read_from_whatever_holds_it(self, value: Any) -> None:
        result = to_float_scalar(value)
        assert type(result) is float
        assert result == 2.0

    @pytest.mark.parametrize("value", [np.zeros((2, 3)), torch.zeros(2, 3)])
    def test_more_than_one_number_is_refused_with_the_shape(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
            to_float_scalar(value)

    @pytest.mark.parametrize("value", [np.zeros(0), torch.zeros(0)])
    def test_no_number_is_refused_with_the_shape(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"shape \(0,\)"):
            to_float_scalar(value)

    @pytest.mark.parametrize(
        "value",
        ["2", b"2", None, [2], {"loss": 2}, 2j, torch.tensor(2j), np.array("2"), Holder("2"), object()],
    )
    def test_what_is_no_number_is_refused(self, value: Any) -> None:
        with pytest.raises(TypeError, match="expected one number"):
            to_float_scalar(value)

    def test_a_tensor_without_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="did not give one number"):
            to_float_scalar(torch.zeros((), device="meta"))
