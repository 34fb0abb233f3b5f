"""The runner's models and training written by hand: `runner_hand.py MODEL BATCH_SIZE STEPS`.

No events, no checkpoints, no metrics: only the training, as one writes it for oneself.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import training_data
from stretches import Stretches

SIZE, CLASSES = training_data.IMAGE_SIZE, training_data.NUM_CLASSES


def build_mlp(hidden: int) -> nn.Module:
    width = training_data.VECTOR_WIDTH
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def build_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def pixels(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).mul_(1 / 255).view(-1, 1, SIZE, SIZE)


def build(name: str) -> nn.Module:
    return build_cnn() if name == "cnn" else build_mlp(256 if name == "small mlp" else 1024)


def main(name: str, batch_size: int, num_steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_image = name == "cnn"
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    files = training_data.images() if is_image else training_data.vectors()
    batches = training_data.read_by_hand(files, batch_size)
    stretches = Stretches()
    for _, (x, label) in zip(range(num_steps), batches, strict=False):
        stretches.tick()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pixels(x) if is_image else x), label)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
