"""What every test process starts with."""

import os
import signal
from pathlib import Path

from hypothesis import settings

# The same examples in every run: a landing must not hang on a draw. To search for new ones, run with
# `--hypothesis-profile=search`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

# torch makes this folder, by default in the temporary folder of the machine, and leaves it there.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(__file__).parent.parent / ".pytest_cache" / "torch")

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
