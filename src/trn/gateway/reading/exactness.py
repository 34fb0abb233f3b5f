"""Whether a run is exact: its trainer class has a certificate, or its steps that were trained twice are equal."""

import os
import threading
import time
from typing import Literal, NamedTuple

import msgspec

from trn.core.home import Home
from trn.core.runs import TRAINING, RunFacts
from trn.gateway.reading.run_files import Certificate, hash_snapshot, read_certificates
from trn.registry.metrics import MetricReader

FRESH_S = 5.0  # of a run that still changes
MAX_KNOWN = 20_000

ExactnessState = Literal["certified", "exact", "drifted", "unknown"]


class Exactness(msgspec.Struct, frozen=True, kw_only=True):
    """`drifted`: at `step`, which was trained twice, a metric has two values. `exact`: every such step has equal ones."""

    state: ExactnessState
    step: int | None = None
    text: str = ""


UNKNOWN = Exactness(
    state="unknown", text="no step was trained twice, and `trn check` has not tested this code"
)
NO_TRAINING = Exactness(state="unknown", text="it does not train")


class _Known(NamedTuple):
    change: int
    at_s: float
    found: Exactness | None  # of its own steps


class ExactnessReader:
    """Remembers what it found. Any thread."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._runs: dict[str, _Known] = {}
        self._changed = -1  # when the folder of the certificates changed last
        self._certificates: list[Certificate] = []
        self._certified: dict[tuple[str, str], Exactness | None] = {}  # by trainer class and snapshot

    def read(self, run: RunFacts, trainer: str, metrics: MetricReader | None) -> Exactness:
        if run.kind != TRAINING:
            return NO_TRAINING
        own = self._read_own(run, metrics) if run.attempt > 1 and metrics is not None else None
        return own or self._read_certified(trainer, run.snapshot) or UNKNOWN

    def version(self) -> int:
        """Another one where certificates may have been added, changed or removed."""
        try:
            return os.stat(self._home.checks).st_mtime_ns  # noqa: PTH116  (hot)
        except OSError:
            return -1

    def _read_own(self, run: RunFacts, metrics: MetricReader) -> Exactness | None:
        now = time.monotonic()
        with self._lock:
            known = self._runs.get(run.run_id)
        is_fresh = known is not None and (
            known.change == run.change or (run.ended_ms is None and now - known.at_s < FRESH_S)
        )
        if known is not None and is_fresh:
            return known.found
        repeated = metrics.repeated_steps(run.run_id)
        found = None
        if repeated.drift is not None:
            found = Exactness(state="drifted", step=repeated.drift.step, text=repeated.text)
        elif repeated.num_steps:
            found = Exactness(state="exact", text=repeated.text)
        with self._lock:
            if len(self._runs) >= MAX_KNOWN:
                self._runs.clear()
            self._runs[run.run_id] = _Known(run.change, now, found)
        return found

    def _read_certified(self, trainer: str, snapshot: str) -> Exactness | None:
        changed = self.version()
        if not trainer or changed < 0:
            return None
        with self._lock:
            if changed != self._changed or len(self._certified) >= MAX_KNOWN:
                self._certificates = [certificate for certificate, _ in read_certificates(self._home)]
                self._certified.clear()
                self._changed = changed
            if (trainer, snapshot) not in self._certified:
                self._certified[trainer, snapshot] = self._certify(trainer, snapshot)
            return self._certified[trainer, snapshot]

    def _certify(self, trainer: str, snapshot: str) -> Exactness | None:
        """By the newest certificate about this very code."""
        named = [certificate for certificate in self._certificates if certificate.trainer == trainer]
        code = hash_snapshot(self._home, snapshot) if named else {}
        newest = next((certificate for certificate in named if certificate.is_about(trainer, code)), None)
        if newest is None or not newest.is_sound:
            return None
        return Exactness(state="certified", text=f"`trn check` resumed {trainer} exactly, with this code")
