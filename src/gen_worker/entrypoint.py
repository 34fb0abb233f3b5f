"""`python -m gen_worker.entrypoint`: WORKER_MODE says what this process is; it is never guessed."""

import os
import sys

from gen_worker.errors import ExitCode

MODES = ("trainer", "inference")


def main() -> int:
    mode = os.environ.get("WORKER_MODE", "")
    if mode == "trainer":
        from gen_worker.trainer.runtime import run_worker

        return int(run_worker())
    if mode == "inference":
        print("gen_worker: this release has no inference runtime; set WORKER_MODE=trainer", file=sys.stderr)  # noqa: T201
        return int(ExitCode.STARTUP)
    found = f"is {mode!r}" if mode else "is not set"
    print(f"gen_worker: WORKER_MODE {found}; set it to one of: {', '.join(MODES)}", file=sys.stderr)  # noqa: T201
    return int(ExitCode.STARTUP)


if __name__ == "__main__":
    sys.exit(main())
