"""DDP by hand, for torchrun: `ddp_hand.py STEPS`. No events, no checkpoints, no stopping: only the training.

An MLP, 256-1024-1024-10, batch 64 in each process, SGD with momentum, one thread each.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import training_data
from stretches import Stretches

BATCH_SIZE = 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main(num_steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    # As `distribute_module` sets it: without it each step copies the gradients.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model)
    batches = training_data.read_by_hand(
        training_data.vectors(), BATCH_SIZE * world_size, rank=rank, world_size=world_size
    )
    stretches = Stretches() if rank == 0 else None
    for _, (x, label) in zip(range(num_steps), batches, strict=False):
        if stretches is not None:
            stretches.tick()
        optimizer.zero_grad()
        loss = functional.cross_entropy(wrapped(x), label)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
