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
from dataclasses import dataclass, field
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

    def note_pair(self, side: str, other: str, *, ratio_of: str, difference_of: str) -> None:
        """Of each round that both took part in, kept with `side`'s samples: its value over the other's as `ratio`, and
        its value less the other's as `difference`.

        For sides that take part in every round, so that the samples of a round are of the same moment.
        """
        for sample, beside in zip(self.samples.get(side, ()), self.samples.get(other, ()), strict=False):
            sample["ratio"] = sample[ratio_of] / beside[ratio_of]
            sample["difference"] = sample[difference_of] - beside[difference_of]

    def append(self, other: "Measurements") -> None:
        """More samples of the same sides."""
        for side, samples in other.samples.items():
            self.samples.setdefault(side, []).extend(samples)
        self.failures.update(other.failures)

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
    """The same for every side: no look at the network, no bars of loaders, a usual terminal, torch on one thread.

    And bytecode, which an installed package has: else a side with its sources here would compile them at every start.
    """
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **given,
        "DISABLE_TELEMETRY": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TERM": "xterm-256color",
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
