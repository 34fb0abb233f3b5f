"""Which trn this is. The installed package says the same; asking it costs more than many a command."""

from pathlib import Path

VERSION = "0.1.0"
# Both packages of this distribution: a daemon that started from other files than these runs other code.
SOURCES = (Path(__file__).parents[1], Path(__file__).parents[2] / "gen_worker")
CHANGED = (
    "the daemon still runs the code from before an update of trn: restart it with `trn daemon stop` and"
    " `trn daemon start`; runs continue meanwhile"
)
