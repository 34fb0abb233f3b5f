"""How everything here is measured: interleaved rounds, a new random order in each, medians.

A *side* is one way of doing a piece of work (ours, a peer's, a hand-written limit). It runs in an interpreter of its
own, so that no side sees another's imports, threads or memory. `serve` is that interpreter's end of the talk,
`measure` ours: one request line, one round, one JSON line back. A side that cannot be measured is kept in the
result with its reason.
"""

import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / ".data"
SCRATCH_VARIABLE = "BENCH_SCRATCH"
EXIT_GRACE_S = 20.0
Sample = dict[str, float]
Round = Callable[[], Sample]
Prepare = Callable[[Mapping[str, Any]], Round]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way of doing the work: the name a reader sees, and the child's function with its options."""

    name: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    max_rounds: int | None = None  # a slow side may sit some rounds out


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    median: float
    low: float
    high: float
    num_samples: int


@dataclass(slots=True)
class Measurements:
    """Samples by side, in the order of the rounds, and why a side has none."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def spread(self, side: str, key: str) -> Spread | None:
        values = [sample[key] for sample in self.samples.get(side, ()) if key in sample]
        return summarize(values) if values else None

    def merge(self, other: "Measurements") -> None:
        self.samples.update(other.samples)
        self.failures.update(other.failures)


def summarize(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        median=statistics.median(ordered), low=ordered[0], high=ordered[-1], num_samples=len(ordered)
    )


def interleave(names: Sequence[str], num_rounds: int, *, seed: int) -> Iterator[tuple[int, str]]:
    """(round, name): every name once a round, in a new random order each time."""
    rng = random.Random(seed)
    for number in range(num_rounds):
        order = list(names)
        rng.shuffle(order)
        for name in order:
            yield number, name


def takes_part(number: int, num_rounds: int, max_rounds: int | None) -> bool:
    """Whether a side with at most `max_rounds` is in this round: the first, and evenly spread from there."""
    return max_rounds is None or max_rounds >= num_rounds or number * max_rounds % num_rounds < max_rounds


# --- bars and rows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`ours <= limit`, or `ours / the strongest of against <= limit`; `at_least` turns it round."""

    limit: float
    at_least: bool = False
    against: tuple[str, ...] = ()
    text: str = ""  # where the limit alone does not say it

    def describe(self, unit: str) -> str:
        sign = "≥" if self.at_least else "≤"
        shown = f"{self.limit:.3g}"
        if self.against:
            return f"{sign} {shown} × {self.text or self.against[0]}"
        return f"{sign} {shown} {unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What another side did in the same rounds, or why it is not known."""

    name: str
    spread: Spread | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    unit: str
    ours: Spread | None
    reason: str = ""  # why ours is None
    bar: Bar | None = None
    beside: tuple[Beside, ...] = ()
    note: str = ""

    @property
    def reference(self) -> Beside | None:
        """The side that the bar is laid against: of several, the one that is hardest to meet."""
        if self.bar is None:
            return None
        known = [side for side in self.beside if side.name in self.bar.against and side.spread is not None]
        if len(known) == 0:
            return None
        pick = max if self.bar.at_least else min
        return pick(known, key=lambda side: side.spread.median if side.spread else 0.0)

    @property
    def judged(self) -> float | None:
        """The number that the bar's limit is held against."""
        if self.bar is None or self.ours is None:
            return None
        if not self.bar.against:
            return self.ours.median
        reference = self.reference
        if reference is None or reference.spread is None or reference.spread.median == 0:
            return None
        return self.ours.median / reference.spread.median

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        judged = self.judged
        if judged is None:
            return "not judged"
        is_met = judged >= self.bar.limit if self.bar.at_least else judged <= self.bar.limit
        return "pass" if is_met else "FAIL"


def build_row(
    measured: Measurements,
    *,
    what: str,
    unit: str,
    key: str,
    ours: str,
    beside: Sequence[str] = (),
    bar: Bar | None = None,
    note: str = "",
) -> Row:
    """A row from the samples' `key`; sides without samples are kept, with their reason."""

    def side(name: str) -> Beside:
        return Beside(
            name=name, spread=measured.spread(name, key), reason=measured.failures.get(name, "no samples")
        )

    own = side(ours)
    return Row(
        what=what,
        unit=unit,
        ours=own.spread,
        reason="" if own.spread else own.reason,
        bar=bar,
        beside=tuple(side(name) for name in beside),
        note=note,
    )


def row_as_json(row: Row) -> dict[str, Any]:
    reference = row.reference
    return {
        **asdict(row),
        "bar": None if row.bar is None else {**asdict(row.bar), "reads": row.bar.describe(row.unit)},
        "judged": row.judged,
        "judged_against": None if reference is None else reference.name,
        "verdict": row.verdict,
    }


def row_from_json(data: Mapping[str, Any]) -> Row:
    """The row that `row_as_json` wrote; what is derived is derived again."""

    def spread(found: Mapping[str, Any] | None) -> Spread | None:
        return None if found is None else Spread(**found)

    bar = data["bar"]
    return Row(
        what=data["what"],
        unit=data["unit"],
        ours=spread(data["ours"]),
        reason=data["reason"],
        bar=None
        if bar is None
        else Bar(
            limit=bar["limit"], at_least=bar["at_least"], against=tuple(bar["against"]), text=bar["text"]
        ),
        beside=tuple(
            Beside(name=side["name"], spread=spread(side["spread"]), reason=side["reason"])
            for side in data["beside"]
        ),
        note=data["note"],
    )


# --- the interpreter of a side -------------------------------------------------------------------------------------


def serve(sides: Mapping[str, Prepare]) -> None:
    """Child: `script FUNCTION OPTIONS`. One round for every line on stdin, its sample as JSON on the old stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    run_round = sides[sys.argv[1]](json.loads(sys.argv[2]))
    answers.write('"ready"\n')
    answers.flush()
    for _ in sys.stdin:
        answers.write(json.dumps(run_round()) + "\n")
        answers.flush()


def scratch_dir() -> Path:
    """Child: a folder on the disk under test, removed after the topic however its sides end."""
    return Path(os.environ[SCRATCH_VARIABLE])


class SideError(Exception):
    """The side did not answer; the text is what a reader is shown."""


class SideProcess:
    """Parent's end of one side's interpreter."""

    def __init__(self, script: Path, side: Side, *, scratch: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, str(script), side.function, json.dumps(dict(side.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**child_environment(), SCRATCH_VARIABLE: scratch},
            start_new_session=True,
        )
        self._unread = b""

    def wait_ready(self) -> None:
        self._read_line()

    def run_round(self) -> Sample:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"round\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideError(self._last_words()) from None
        sample: Sample = json.loads(self._read_line())
        return sample

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise SideError(f"no answer within {self._timeout_s:g} s")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise SideError(self._last_words())
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        self._await_exit(EXIT_GRACE_S)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "it ended without a word")
        return without_paths(last)[:200]

    def close(self) -> None:
        """End the interpreter, and whatever it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._await_exit(EXIT_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _await_exit(self, timeout_s: float) -> None:
        """Wait without reaping: as long as the zombie is there, its process group's id is nobody else's."""
        deadline = time.monotonic() + timeout_s
        seen = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, seen) is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def child_environment() -> dict[str, str]:
    """The same for every side: no look at the network, no progress bars, torch on one thread."""
    return {
        **os.environ,
        "DISABLE_TELEMETRY": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }


def without_paths(text: str) -> str:
    """Results are committed: they say what went wrong, not where on whose machine."""
    for place, name in ((str(HERE.parent), "."), (sys.prefix, "<env>"), (str(Path.home()), "~")):
        text = text.replace(place, name)
    return text


def measure(
    script: str,
    sides: Sequence[Side],
    *,
    num_rounds: int,
    fresh: bool,
    seed: int = 1,
    timeout_s: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> Measurements:
    """Run every side `num_rounds` times, interleaved.

    `fresh`: a new interpreter for every sample. Otherwise one per side, kept for all rounds; while one works, the
    others wait on an empty pipe. A side that fails once is not asked again; what it gave before is kept.
    """
    by_name = {side.name: side for side in sides}
    measured = Measurements(samples={name: [] for name in by_name})
    kept: dict[str, SideProcess] = {}

    def start(name: str) -> SideProcess:
        return SideProcess(HERE / script, by_name[name], scratch=scratch, timeout_s=timeout_s)

    DATA.mkdir(exist_ok=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=DATA, ignore_cleanup_errors=True))
        for number, name in interleave(list(by_name), num_rounds, seed=seed):
            if name in measured.failures or not takes_part(number, num_rounds, by_name[name].max_rounds):
                continue
            say(f"round {number + 1}/{num_rounds}: {name}")
            try:
                if fresh:
                    with start(name) as process:
                        process.wait_ready()
                        measured.samples[name].append(process.run_round())
                else:
                    if name not in kept:
                        kept[name] = stack.enter_context(start(name))
                        kept[name].wait_ready()
                    measured.samples[name].append(kept[name].run_round())
            except SideError as fault:
                measured.failures[name] = str(fault)
    return measured
