"""`python -m gen_worker.launcher --folder F`: see `server`."""

import sys

from gen_worker.launcher.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
