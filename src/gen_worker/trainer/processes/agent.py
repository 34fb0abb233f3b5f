"""`python -m gen_worker.trainer.processes.agent`: torchrun, which also records how its processes ended.

Takes the arguments of `torch.distributed.run`. GEN_WORKER_OUTCOME_DIR is the folder for the record.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gen_worker.trainer.processes.outcome import AgentFailure, leave_agent_failures


def main(arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(arguments)))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        failures = [
            AgentFailure(rank=rank, exit_code=failure.exitcode, at_s=float(failure.timestamp))
            for rank, failure in failed.failures.items()
        ]
        leave_agent_failures(Path(os.environ["GEN_WORKER_OUTCOME_DIR"]), failures)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
