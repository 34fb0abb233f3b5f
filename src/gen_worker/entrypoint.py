"""`python -m gen_worker.entrypoint`: runs the worker that WORKER_MODE names."""

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from gen_worker.errors import ExitCode

# Mode -> the module whose `run_worker` runs it.
RUNTIMES = {"trainer": "gen_worker.trainer.runtime", "inference": "gen_worker.inference.runtime"}

USAGE = """usage: WORKER_MODE=trainer TRAINER_JOB_SPEC_PATH=job.json python -m gen_worker.entrypoint
       WORKER_MODE=inference INFERENCE_CHECKPOINT_PATH=final.meta.json python -m gen_worker.entrypoint

Runs one worker. It takes no arguments: its settings are environment variables and the job. docs/operating.md lists the
variables, the exit codes and the files it writes. Watch a run with `tail -f` on its events.jsonl."""


def main(arguments: Sequence[str] = ()) -> int:
    if arguments:
        print(USAGE)  # noqa: T201
        return 0 if arguments[0] in ("-h", "--help") else int(ExitCode.STARTUP)
    mode = os.environ.get("WORKER_MODE", "")
    if mode in RUNTIMES:
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # a crash in native code leaves the author's line in the log
        # A signal that arrives during the imports is kept: the attempt answers it with its terminal event.
        early: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: early.append(number))
        return int(import_module(RUNTIMES[mode]).run_worker(early))
    found = f"is {mode!r}" if mode else "is not set"
    print(f"gen_worker: WORKER_MODE {found}; set it to one of: {', '.join(RUNTIMES)}", file=sys.stderr)  # noqa: T201
    return int(ExitCode.STARTUP)


def _leave(codes: list[int]) -> None:
    """Exit without interpreter shutdown: threads of torch's collectives may abort there, and a completed run would
    count as failed.
    """
    if codes:
        _flush_output()
        os._exit(codes[0])


def _flush_output() -> bool:
    """False where it cannot be written: the log is on a full disk."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            is_written = False
        except (ValueError, AttributeError):  # closed, or none
            pass
    return is_written


if __name__ == "__mp_main__":  # in a process that multiprocessing started for the author's code
    from gen_worker.frozen_imports import import_frozen_code

    import_frozen_code()

if __name__ == "__main__":
    codes: list[int] = []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        atexit.register(_leave, codes)  # registered first, so it is called last
    codes.append(main(sys.argv[1:]))
    if not _flush_output():
        os._exit(codes[0])  # the interpreter's own shutdown would exit with another code
    sys.exit(codes[0])
