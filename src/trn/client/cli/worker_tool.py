"""A program of the worker's side, run beside the command line: it knows torch and parquet, which `trn` never loads."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trn.core.errors import TrnError


def read_records(module: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON lines of `python -m gen_worker.<module>`, as they come. Waits for its end; its stderr is ours.

    How it judged is in the records; its exit code counts only where it printed none.
    """
    # -P: a folder here that is named like a module of ours must not stand in for it.
    command = [sys.executable, "-P", "-m", f"gen_worker.{module}", *arguments]
    is_told = False
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            is_told = True
            yield json.loads(line)
    if process.returncode < 0 or not is_told:
        raise TrnError(f"{' '.join(command)} ended with {process.returncode} before it was done")
