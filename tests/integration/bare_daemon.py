"""A daemon whose launcher imports nothing in advance: seconds saved per home whose runs need no torch.

`python -P bare_daemon.py --home HOME serve` is `python -m trn.daemon --home HOME serve` in all else.
"""

import functools
import sys

from trn.daemon.__main__ import main
from trn.executors.local import executor

if __name__ == "__main__":
    executor.LocalExecutor = functools.partial(executor.LocalExecutor, is_bare=True)  # type: ignore[misc, assignment]
    sys.exit(main(sys.argv[1:]))
