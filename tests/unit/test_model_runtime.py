import copy
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gen_worker.errors import CheckpointError, StartupError
from gen_worker.trainer.compute.repro import seed_everything
from gen_worker.trainer.model_runtime import (
    capture_rng,
    prepare_model_runtime,
    resolve_dtype,
    restore_rng,
    select_device,
)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    before = (torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    yield
    assert (torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")) == before


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def in_a_fresh_process(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


class TestDevice:
    def test_cuda_comes_before_mps_before_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
            monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
            assert select_device(None) == expected

    def test_without_torch_it_is_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_torch(monkeypatch)
        assert select_device(None) == "cpu"
        assert select_device("cpu") == "cpu"
        with pytest.raises(StartupError, match="'cuda' needs torch"):
            select_device("cuda")

    def test_a_device_that_is_not_there_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        with pytest.raises(StartupError, match="no CUDA device"):
            select_device("cuda:0")
        with pytest.raises(StartupError, match="no Apple GPU"):
            select_device("mps")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert select_device("cuda:1") == "cuda:1"
        with pytest.raises(StartupError, match="has 2 CUDA devices"):
            select_device("cuda:2")

    @pytest.mark.parametrize("name", ["gpu", "", "cuda:x"])
    def test_a_name_that_torch_does_not_know_is_refused(self, name: str) -> None:
        with pytest.raises(StartupError, match="unknown to torch"):
            select_device(name)


class TestPrecision:
    def test_each_precision_has_its_dtype(self) -> None:
        assert [resolve_dtype(p) for p in ("fp32", "bf16", "fp16")] == [
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ]

    def test_without_torch_fp32_is_numpys_and_the_others_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_torch(monkeypatch)
        assert resolve_dtype("fp32") == np.dtype("float32")
        with pytest.raises(StartupError, match="'bf16' needs torch"):
            resolve_dtype("bf16")

    def test_an_unknown_precision_is_refused(self) -> None:
        with pytest.raises(StartupError, match="expected one of fp32, bf16, fp16"):
            resolve_dtype("fp8")  # type: ignore[arg-type]

    def test_bf16_on_a_gpu_without_it_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
        with pytest.raises(StartupError, match="use 'fp16' or 'fp32'"):
            resolve_dtype("bf16", device="cuda:0")


class TestPreparing:
    def test_everything_is_seeded(self) -> None:
        prepare_model_runtime(device="cpu", seed=5)
        first = (random.random(), np.random.random(), torch.rand(1).item())
        runtime = prepare_model_runtime(device="cpu", seed=5)
        assert (random.random(), np.random.random(), torch.rand(1).item()) == first
        assert runtime.device == "cpu"

    def test_deterministic_mode_is_switched_on_and_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        runtime = prepare_model_runtime(device="cpu", deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        runtime.close()
        runtime.close()
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert torch.backends.cudnn.benchmark

    def test_a_cublas_setting_of_the_operator_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        runtime = prepare_model_runtime(device="cpu", deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        runtime.close()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        monkeypatch.undo()

    def test_a_refusal_leaves_nothing_switched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        with pytest.raises(StartupError):
            prepare_model_runtime(device="nonsense", deterministic=True)
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ

    def test_a_numpy_trainer_never_waits_for_torch(self) -> None:
        code = (
            "import sys, json, numpy\n"
            "from gen_worker.trainer import model_runtime as m\n"
            "m._ACCELERATOR_NODES = ()\n"
            "r = m.prepare_model_runtime(seed=3); c = m.capture_rng()\n"
            "print(json.dumps([r.device, str(r.dtype), c['torch'], 'torch' in sys.modules]))"
        )
        expected = ["cpu", "float32", None, False]
        assert in_a_fresh_process(code) == expected if sys.platform == "linux" else True

    def test_without_torch_installed_a_numpy_trainer_is_prepared(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_torch(monkeypatch)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        runtime = prepare_model_runtime(deterministic=True)
        assert (runtime.device, runtime.dtype) == ("cpu", np.dtype("float32"))
        runtime.close()


def draws() -> list[Any]:
    return [
        [random.random(), random.gauss(0, 1), random.getrandbits(99)],
        [np.random.random(), np.random.standard_normal(), np.random.randint(1000)],
        [torch.rand(3).tolist(), torch.randn(5).tolist(), torch.randperm(9).tolist()],
    ]


class TestRng:
    @pytest.mark.parametrize("num_before", range(4))
    def test_a_restored_state_gives_the_same_numbers(self, num_before: int) -> None:
        seed_everything(11)
        for _ in range(num_before):
            # Each of these keeps half of a pair for the next call: the half must be restored too.
            random.gauss(0, 1)
            np.random.standard_normal()
            torch.randn(1)
        captured = capture_rng()
        first = [draws() for _ in range(3)]
        assert [draws() for _ in range(3)] != first
        restore_rng(captured)
        assert [draws() for _ in range(3)] == first

    def test_capturing_changes_nothing(self) -> None:
        seed_everything(1)
        expected = draws()
        seed_everything(1)
        capture_rng()
        assert draws() == expected

    def test_a_capture_after_a_restore_is_equal(self) -> None:
        captured = capture_rng()
        draws()
        restore_rng(captured)
        assert capture_rng() == captured

    def test_the_state_is_a_compact_tree_of_plain_values(self) -> None:
        def size(value: Any) -> int:
            if isinstance(value, dict):
                return sum(size(inner) for inner in value.values())
            if isinstance(value, (list, tuple)):
                return sum(size(inner) for inner in value)
            assert value is None or type(value) in (bytes, int, float)
            return len(value) if isinstance(value, bytes) else 8

        assert size(capture_rng()) < 12_000

    def test_another_process_continues_with_the_same_numbers(self) -> None:
        seed_everything(21)
        random.gauss(0, 1)
        captured = capture_rng()
        expected = draws()
        code = (
            "import json, sys\n"
            "from gen_worker.trainer.model_runtime import restore_rng\n"
            "assert 'torch' not in sys.modules\n"
            f"restore_rng({captured!r})\n"
            "import random, numpy as np, torch\n"
            "print(json.dumps([[random.random(), random.gauss(0, 1), random.getrandbits(99)],"
            "[np.random.random(), np.random.standard_normal(), int(np.random.randint(1000))],"
            "[torch.rand(3).tolist(), torch.randn(5).tolist(), torch.randperm(9).tolist()]]))"
        )
        assert in_a_fresh_process(code) == expected

    def test_only_loaded_libraries_are_captured(self) -> None:
        code = (
            "import json, sys\n"
            "from gen_worker.trainer.model_runtime import capture_rng\n"
            "c = capture_rng()\n"
            "print(json.dumps([c['numpy'], c['torch'], 'torch' in sys.modules, 'numpy' in sys.modules]))"
        )
        assert in_a_fresh_process(code) == [None, None, False, False]

    def test_devices_that_are_gone_are_warned_about_and_the_rest_is_restored(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        captured = capture_rng() | {"cuda": [b"\x00" * 16, b"\x00" * 16]}
        first = draws()
        with caplog.at_level(logging.WARNING):
            restore_rng(captured)
        assert "2 CUDA devices and this machine has 0" in caplog.text
        assert draws() == first

    def test_each_device_gets_its_state_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        states = [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
        restored: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: restored.update({index: state}))
        restore_rng(capture_rng())
        assert torch.equal(restored[0], states[0])
        assert torch.equal(restored[1], states[1])

    def test_a_state_of_a_library_that_is_not_installed_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        captured = capture_rng()
        without_torch(monkeypatch)
        with pytest.raises(CheckpointError, match="torch, which is not installed"):
            restore_rng(captured)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("version",), 2),
            (("python", "words"), b"123"),
            (("python", "words"), b"1234"),
            (("python", "words"), None),
            (("python",), None),
            (("numpy", "words"), b"1234"),
            (("numpy", "position"), "x"),
            (("torch",), b"1234"),
        ],
    )
    def test_a_damaged_state_is_refused(self, path: tuple[str, ...], value: Any) -> None:
        captured = copy.deepcopy(capture_rng())
        holder = captured
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = value
        with pytest.raises(CheckpointError, match="RNG state"):
            restore_rng(captured)

    def test_another_numpy_generator_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(np.random, "get_state", np.random.RandomState(np.random.PCG64(1)).get_state)
        with pytest.raises(CheckpointError, match="PCG64"):
            capture_rng()
