"""A checkpoint for other programs: its state in memory, or as one plain file.

python -m gen_worker.trainer.checkpoints.export runs/curve model.pt
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_worker.contract.files.durable import temporary_path
from gen_worker.contract.screen_repr import name_some
from gen_worker.contract.sizes import show_bytes
from gen_worker.errors import CheckpointError, ExitCode, WorkerError
from gen_worker.trainer.checkpoints.store import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = logging.getLogger("gen_worker.checkpoints")

WEIGHTS = "model"  # the default `part` of a state


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The nested state that `state_dict` returned, as it was saved. Hashes are verified; no code is run.

    `path`: a run's folder (its newest checkpoint that verifies), a `.meta.json`, or the data file beside one.
    """
    return dict(_find(Path(path)).state)


def export_checkpoint(path: str | Path, out: str | Path, *, part: str | None = None) -> Path:
    """Write the state of a checkpoint to one plain file; `path` as in `load_checkpoint`. Returns `out`.

    `out` ends with `.pt`: the nested state, for `torch.load(out, weights_only=True)["model"]`. Numpy arrays become
    tensors. With `.safetensors`: the tensors of the state's `model`, or of all of it where it has none, by their
    names. `part` writes only what the state has under that name.
    """
    out = Path(out)
    if out.suffix not in (".pt", ".safetensors"):
        raise CheckpointError(f"{out}: the file name ends with {out.suffix!r}, expected .pt or .safetensors")
    checkpoint = _find(Path(path))
    state: Any = checkpoint.state
    if part is None and out.suffix == ".safetensors" and isinstance(state.get(WEIGHTS), Mapping):
        part = WEIGHTS
    if part is not None:
        if part not in state:
            raise CheckpointError(
                f"{checkpoint.path} has no part {part!r}; it has {', '.join(map(str, state))}"
            )
        state = state[part]
    try:
        _write(out, _to_torch(state, part or "state"))
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    return out


def _find(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run's folder, a .meta.json, or its data file")
    if not path.is_dir():
        return CheckpointStore(path.parent).load(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, passed_over = CheckpointStore(folder).newest_verified()
    for item in passed_over:
        logger.warning("passed over %s: %s", item.path.name, item.reason)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no checkpoint that can be loaded")
    return checkpoint


def _to_torch(value: Any, where: str) -> Any:
    """Arrays as tensors and numpy scalars as Python's: `weights_only` refuses others."""
    import numpy as np

    if isinstance(value, dict):
        return {key: _to_torch(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_torch(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, np.ndarray):
        return _tensor(value, where)
    if isinstance(value, np.generic):
        return value.item() if value.dtype.kind in "biufc" else _tensor(np.asarray(value), where)
    return value


def _tensor(array: "np.ndarray[Any, Any]", where: str) -> "torch.Tensor":
    import torch

    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise CheckpointError(
            f"{where} is a numpy array of dtype {array.dtype}, which torch does not support: export another `part`, or"
            " read it with load_checkpoint"
        ) from error


def _write(out: Path, state: Any) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(out)
    try:
        if out.suffix == ".safetensors":
            _save_safetensors(_flat_tensors(state), temporary)
        else:
            import torch

            torch.save(state, temporary)
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)  # it must be readable so
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _flat_tensors(state: Any) -> "dict[str, torch.Tensor]":
    import torch

    found: dict[str, torch.Tensor] = {}
    others: list[str] = []

    def look(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            # The format cannot share memory between names.
            found[name] = value.detach().clone(memory_format=torch.contiguous_format)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                look(item, f"{name}.{key}" if name else str(key))
        else:
            others.append(name)

    look(state, "")
    if others or not found:
        what = f"{name_some(others)} are not tensors" if others else "there are no tensors"
        raise CheckpointError(
            f"a .safetensors file can hold only tensors, but {what}: give a `part` of the state that has only tensors,"
            " or export to a .pt file"
        )
    return found


def _save_safetensors(tensors: "dict[str, torch.Tensor]", path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError("safetensors is not installed: pip install 'trn[torch]'") from error
    save_file(tensors, path, metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gen_worker.trainer.checkpoints.export",
        description="Write the state of a checkpoint to one plain file.",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run's folder, or a checkpoint's .meta.json"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write: .pt or .safetensors")
    parser.add_argument("--part", metavar="NAME", help="only what the state has under this name")
    asked = parser.parse_args(arguments)
    try:
        out = export_checkpoint(asked.path, asked.out, part=asked.part)
    except WorkerError as error:
        print(f"gen_worker: {error.category}: {error}", file=sys.stderr)  # noqa: T201
        return int(error.exit_code)
    print(f"wrote {out}: {show_bytes(out.stat().st_size)}")  # noqa: T201
    return int(ExitCode.COMPLETED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
