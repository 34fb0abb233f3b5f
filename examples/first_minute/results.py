"""The results of a run, read with plain torch: the checkpoint is an ordinary file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from digits import SIDE
from trainer import build_model, to_input

NUM_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    accuracy: float
    images: npt.NDArray[np.uint8]  # a few of the test digits
    guesses: list[int]
    labels: list[int]


def test_accuracy(checkpoint: Path, data: Path) -> Score:
    weights = torch.load(checkpoint, weights_only=True)
    model = build_model()
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    )
    model.eval()
    table = pq.read_table(data)
    pixels = table["pixels"].combine_chunks().flatten().to_numpy().reshape(-1, SIDE * SIDE)
    labels = table["label"].to_numpy()
    with torch.inference_mode():
        guesses = model(to_input(torch.tensor(pixels))).argmax(dim=1).numpy()
    return Score(
        accuracy=float((guesses == labels).mean()),
        images=pixels[:NUM_SHOWN].reshape(-1, SIDE, SIDE),
        guesses=guesses[:NUM_SHOWN].tolist(),
        labels=labels[:NUM_SHOWN].tolist(),
    )


def count_differences(one: Path, other: Path) -> tuple[int, int]:
    """(values that differ in any bit, values in all). A tensor that only one file has differs entirely."""
    tensors_a, tensors_b = (torch.load(path, weights_only=True) for path in (one, other))
    num_different = num_values = 0
    for name in tensors_a.keys() | tensors_b.keys():
        a, b = tensors_a.get(name), tensors_b.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            size = max(0 if tensor is None else tensor.numel() for tensor in (a, b))
            num_different += size
            num_values += size
            continue
        bits_a, bits_b = (tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (a, b))
        num_different += int((bits_a != bits_b).any(dim=1).sum())
        num_values += a.numel()
    return num_different, num_values
