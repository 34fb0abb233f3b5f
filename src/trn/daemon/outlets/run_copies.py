"""Which files have copies of a run, and how far each of them got."""

from collections.abc import Callable, Iterator
from pathlib import Path

from trn.core.home import Home, LogFolder
from trn.core.runs import RunRecord
from trn.core.settings import Settings
from trn.daemon.outlets.log_file import DayLog, EventLog, JobsIndex, LogFile, LogLimits
from trn.registry.log_places import LogPlace, LogPlaces


class Copy:
    """One file's copy of one run. `place` is what is committed, or found in the file and will be."""

    def __init__(
        self,
        run_id: str,
        file: LogFile,
        places: dict[str, LogPlace],
        *,
        has_events: bool = False,
        has_output: bool = False,
        has_job_lines: bool = False,
    ) -> None:
        self.run_id = run_id
        self.file = file
        self.place = self.committed = places.get(file.kind, LogPlace())
        self.has_events = has_events
        self.has_output = has_output
        self.has_job_lines = has_job_lines

    def may_lack(self, run: RunRecord) -> bool:
        """Whether it is worth a look: a run that was never launched has neither events nor output."""
        is_told = not self.has_job_lines or self.place.num_job_lines == 1 + run.state.is_terminal
        return not is_told or (run.attempt > 0 and (self.has_events or self.has_output))


class RunCopies:
    """The copies of runs that have something to say, and their files. A file that several runs share is one."""

    def __init__(self, home: Home, settings: Settings, places: LogPlaces) -> None:
        self._home = home
        self._places = places
        self._limits = LogLimits(settings.max_log_bytes, settings.min_free_bytes)
        self._copies: dict[str, list[Copy]] = {}
        self._files: dict[tuple[str, Path, str], LogFile] = {}
        self._own: dict[LogFile, tuple[str, Path, str]] = {}  # those of one run only

    @property
    def files(self) -> list[LogFile]:
        return list(self._files.values())

    def of(self, run: RunRecord) -> list[Copy]:
        copies = self._copies.get(run.run_id)
        if copies is None:
            places = self._places.of(run.run_id)
            copies = self._copies[run.run_id] = list(self._make(run, places))
        return copies

    def place(self, run_id: str, kind: str) -> LogPlace:
        """As it is committed."""
        return self._places.of(run_id).get(kind, LogPlace())

    def forget(self, run_id: str) -> None:
        """Its files have all of it: what is known is committed, and files of its own are forgotten, too."""
        for copy in self._copies.pop(run_id, ()):
            key = self._own.pop(copy.file, None)
            if key is not None:
                del self._files[key]

    def forget_places(self) -> None:
        """What is in memory may be ahead of what is committed: read it again, and look at every file again."""
        self._copies.clear()
        for file in self._files.values():
            file.forget()

    def _make(self, run: RunRecord, places: dict[str, LogPlace]) -> Iterator[Copy]:
        folders = {"home": self._home.logs}
        if run.log_dir and Path(run.log_dir) != self._home.logs.root:
            folders["dir"] = LogFolder(Path(run.log_dir))
        for name, folder in folders.items():
            log = self._file(f"{name}_log", folder.root, run.run_id, DayLog, folder, run)
            yield Copy(run.run_id, log, places, has_events=True, has_output=True)
            index = self._file(f"{name}_jobs", folder.root, "", JobsIndex, folder)
            yield Copy(run.run_id, index, places, has_job_lines=True)
        if run.event_log:
            path = Path(run.event_log)
            file = self._file("event_log", path, "", EventLog, path)
            yield Copy(run.run_id, file, places, has_events=True, has_job_lines=True)

    def _file(
        self, kind: str, path: Path, run_id: str, make: Callable[..., LogFile], *parameters: object
    ) -> LogFile:
        key = kind, path, run_id
        if key not in self._files:
            file = self._files[key] = make(kind, self._limits, *parameters)
            if run_id:
                self._own[file] = key
        return self._files[key]
