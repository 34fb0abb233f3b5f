"""The default learning-rate schedule: linear warm-up, then a cosine."""

import math
from collections.abc import Callable


def warmup_cosine_factor(
    warmup_steps: int, total_steps: int | None, min_lr_ratio: float
) -> Callable[[int], float]:
    """The factor of the learning rate by step (from 0)."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if total_steps is None:
            return 1.0
        decay_steps = max(1, total_steps - warmup_steps)
        progress = min(1.0, (step - warmup_steps) / decay_steps)
        return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
