"""The entry point of `trn`: quick in, quick out, for a list should not cost what it takes to train."""

import contextlib
import gc
import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Ends the process, with the code that `exit_codes` names."""
    # Collections over what is only being loaded find nothing. Whatever verb is found turns them on again.
    gc.disable()
    from trn.cli.command_table import run

    code = run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # A verb closes what it opens, and nothing waits for the end: there is no need to take everything apart.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
