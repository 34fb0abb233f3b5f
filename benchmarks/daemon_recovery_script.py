"""What torchrun starts: `Recovering` by hand, resumed from its newest checkpoint."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from daemon_torch_trainer import STEP_S, Steps, make_state, step


def main(clock: str, saved: Path, checkpoint_every: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state, number = make_state(), 0
    if saved.exists():
        payload = torch.load(saved, weights_only=True)
        number = payload.pop("step")
        for name, part in state.items():
            part.load_state_dict(payload[name])
    steps = Steps(clock)
    batch = torch.full((8, 16), 1.0)
    while True:
        time.sleep(STEP_S)
        step(batch, state)
        number += 1
        steps.note(number)
        if number % checkpoint_every == 0:
            payload = {name: part.state_dict() for name, part in state.items()}
            temporary = saved.with_suffix(".new")
            torch.save({**payload, "step": number}, temporary)
            temporary.replace(saved)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
