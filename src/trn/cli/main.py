"""The entry point of `trn`; kept small so that quick commands stay quick."""

import contextlib
import gc
import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Ends the process with one of `exit_codes`."""
    # What fails in gRPC is an error of a call. Its own log would go to the terminal, between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # The garbage collector finds nothing during imports. The command switches it on again.
    gc.disable()
    from trn.cli.command_table import run

    code = run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Commands close what they open, so the interpreter's slow shutdown is not needed.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
