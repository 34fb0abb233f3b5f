"""Device, dtype, precision, seed and deterministic mode of a trainer class; its RNG state.

torch is optional: it is imported only where the trainer class has imported it, or where the job needs it (a GPU, a
precision other than fp32, deterministic mode).
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.contract.job.spec import Precision
from gen_worker.errors import CheckpointError, StartupError
from gen_worker.trainer.compute.repro import seed_everything

_log = logging.getLogger(__name__)

_DTYPE_NAMES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Present where a driver for NVIDIA (also under WSL and on Jetson) or AMD is loaded.
_ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd")
_CUBLAS_ENV = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRuntime:
    """`close()` restores what deterministic mode changed."""

    device: str
    dtype: Any
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def close(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()


def prepare_model_runtime(
    *, device: str | None = None, precision: Precision = "fp32", seed: int = 0, deterministic: bool = False
) -> ModelRuntime:
    """Choose the device, check that it can do `precision`, seed everything, make torch deterministic if asked.

    Called after the trainer class was imported and before its `setup`. Raises StartupError.
    """
    undo: list[Callable[[], None]] = []
    if deterministic:
        undo = _make_deterministic()  # first: cuBLAS reads its setting at device initialisation
    try:
        chosen = select_device(device)
        dtype = resolve_dtype(precision, device=chosen)
        if chosen.startswith("cuda:"):
            import torch

            torch.cuda.set_device(chosen)
        seed_everything(seed, torch=_has_torch())
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise
    return ModelRuntime(device=chosen, dtype=dtype, _undo=undo)


def select_device(requested: str | None = None) -> str:
    """`requested` if this machine has it, else a StartupError; for None: cuda, else mps, else cpu."""
    if requested is None:
        if not _has_torch() and not (_may_have_accelerator() and _is_torch_installed()):
            return "cpu"
        import torch

        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if requested == "cpu":
        return "cpu"
    if not _is_torch_installed():
        raise StartupError(
            f"device {requested!r} needs torch, which is not installed; install it or use 'cpu'"
        )
    import torch

    try:
        parsed = torch.device(requested)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"device {requested!r} is unknown to torch: {reason}") from error
    if parsed.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (parsed.index or 0) >= count:
            has = (
                f"this machine has {count} CUDA devices"
                if count
                else "torch finds no CUDA device on this machine"
            )
            raise StartupError(f"device {requested!r} does not exist: {has}; use another one or 'cpu'")
    elif parsed.type == "mps" and not torch.backends.mps.is_available():
        raise StartupError(f"device {requested!r} does not exist: torch finds no Apple GPU; use 'cpu'")
    return requested


def resolve_dtype(precision: Precision, *, device: str = "cpu") -> Any:
    """The dtype of `precision`: torch's, or numpy's where torch is not in use. fp16 on a CPU is slow, but allowed."""
    if precision not in _DTYPE_NAMES:
        raise StartupError(f"precision {precision!r} is unknown, expected one of {', '.join(_DTYPE_NAMES)}")
    if precision == "fp32" and not _has_torch():
        import numpy as np

        return np.dtype("float32")
    if not _is_torch_installed():
        raise StartupError(
            f"precision {precision!r} needs torch, which is not installed; install it or use 'fp32'"
        )
    import torch

    if precision == "bf16" and device.startswith("cuda") and not torch.cuda.is_bf16_supported():
        raise StartupError(f"precision 'bf16' is not supported by {device!r}; use 'fp16' or 'fp32'")
    return getattr(torch, _DTYPE_NAMES[precision])


def _has_torch() -> bool:
    return sys.modules.get("torch") is not None


def _is_torch_installed() -> bool:
    from importlib.util import find_spec

    return _has_torch() or ("torch" not in sys.modules and find_spec("torch") is not None)


def _may_have_accelerator() -> bool:
    """Without importing torch, which takes seconds."""
    return sys.platform != "linux" or any(Path(node).exists() for node in _ACCELERATOR_NODES)


def _make_deterministic() -> list[Callable[[], None]]:
    """Returns what undoes each change, in order."""
    undo: list[Callable[[], None]] = []
    if _CUBLAS_ENV not in os.environ:
        os.environ[_CUBLAS_ENV] = ":4096:8"
        undo.append(lambda: _drop_env(_CUBLAS_ENV))
    if not _is_torch_installed():
        return undo
    import torch

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = (cudnn.deterministic, cudnn.benchmark)

    def restore() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags

    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    undo.append(restore)
    return undo


def _drop_env(name: str) -> None:
    os.environ.pop(name, None)


def capture_rng() -> dict[str, Any]:
    """The states of the global generators as plain values. Libraries that are not imported have none."""
    import random

    version, words, gauss_next = random.getstate()
    captured: dict[str, Any] = {
        "version": 1,
        "python": {"version": version, "words": _words_to_bytes(words), "gauss_next": gauss_next},
        "numpy": None,
        "torch": None,
        "cuda": [],
    }
    if sys.modules.get("numpy") is not None:
        captured["numpy"] = _capture_numpy()
    if _has_torch():
        import torch

        captured["torch"] = torch.get_rng_state().numpy().tobytes()
        # Without the second check this would create a context on every device.
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            captured["cuda"] = [state.cpu().numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return captured


def restore_rng(captured: Mapping[str, Any]) -> None:
    """From what `capture_rng` returned. CheckpointError where it is invalid or a library is missing."""
    import random

    if captured.get("version") != 1:
        raise CheckpointError(f"the RNG state has version {captured.get('version')!r}, expected 1")
    try:
        python = captured["python"]
        words = _bytes_to_words(python["words"])
        random.setstate((python["version"], words, python["gauss_next"]))
        if captured["numpy"] is not None:
            _restore_numpy(captured["numpy"])
        if captured["torch"] is not None:
            _restore_torch(captured["torch"], captured["cuda"])
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the RNG state cannot be restored: {type(error).__name__}: {error}") from error
    except ImportError as error:
        raise CheckpointError(
            f"the RNG state is from a run with {error.name}, which is not installed"
        ) from error


def _words_to_bytes(words: tuple[int, ...]) -> bytes:
    import struct

    return struct.pack(f"<{len(words)}I", *words)


def _bytes_to_words(packed: bytes) -> tuple[int, ...]:
    import struct

    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are not whole 32-bit words")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _capture_numpy() -> dict[str, Any]:
    import numpy as np

    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {state['bit_generator']}, and only MT19937 can be saved: "
            "do not call np.random.set_bit_generator, or keep a Generator of your own in the state"
        )
    return {
        "words": state["state"]["key"].astype("<u4").tobytes(),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _restore_numpy(saved: Mapping[str, Any]) -> None:
    import numpy as np

    key = np.frombuffer(saved["words"], dtype="<u4").astype(np.uint32)
    np.random.set_state(("MT19937", key, saved["position"], saved["has_gauss"], saved["gauss"]))


def _restore_torch(cpu: bytes, cuda: list[bytes]) -> None:
    import torch

    torch.set_rng_state(_byte_tensor(cpu))
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(cuda[:num_devices]):
        torch.cuda.set_rng_state(_byte_tensor(state), index)
    if len(cuda) > num_devices:
        _log.warning(
            "the RNG state holds %d CUDA devices and this machine has %d: random numbers on a device will differ",
            len(cuda),
            num_devices,
        )


def _byte_tensor(packed: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
