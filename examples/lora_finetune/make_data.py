"""Writes base.pt, a network trained on a pendulum on Earth, and moon.parquet, measurements on the Moon."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from trainer import build_base

EARTH, MOON = 9.81, 1.62  # gravity in m/s²
NUM_BASE_STEPS = 500

Columns = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def measure(num_rows: int, *, gravity: float, friction: float, seed: int) -> Columns:
    """(angle, speed) of a pendulum of one metre, and the acceleration that follows from them."""
    angle, speed = np.random.default_rng(seed).uniform(-3, 3, size=(2, num_rows))
    acceleration = -gravity * np.sin(angle) - friction * speed
    return np.stack([angle, speed], axis=1).astype("float32"), acceleration.astype("float32")


def train_base() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = build_base()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    motion, acceleration = map(torch.from_numpy, measure(4_000, gravity=EARTH, friction=0.1, seed=0))
    for _ in range(NUM_BASE_STEPS):
        rows = torch.randint(len(motion), (256,))
        loss = torch.nn.functional.mse_loss(model(motion[rows]).squeeze(1), acceleration[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


torch.save(train_base(), "base.pt")
motion, acceleration = measure(2_000, gravity=MOON, friction=0.5, seed=1)
columns = {
    "motion": pa.FixedSizeListArray.from_arrays(pa.array(motion.reshape(-1)), 2),
    "acceleration": pa.array(acceleration),
}
pq.write_table(pa.table(columns), "moon.parquet")
