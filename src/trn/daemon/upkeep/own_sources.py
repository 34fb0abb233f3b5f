"""Whether trn was upgraded under this daemon: it goes on with the code that it has imported, and says so."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gen_worker.contract.installed_packages import source_stamp
from trn.core.version import CHANGED, SOURCES

LOOK_EVERY_S = 1.0


class OwnSources:
    """The files of trn as they were when this was made. Looks at them again when it is asked, at most once a second."""

    def __init__(
        self, folders: Sequence[Path] = SOURCES, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders = folders
        self._clock = clock
        self._looked_at = clock()
        self._has_changed = False
        self.stamp = source_stamp(*folders)

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of it."""
        if not self._has_changed and self._clock() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._clock()
            try:
                self._has_changed = source_stamp(*self._folders) != self.stamp
            except OSError:  # it is being replaced just now, or is gone
                self._has_changed = True
        return [CHANGED] if self._has_changed else []
