"""Runs that come and go while daemons are killed, files cannot grow, days pass and the clock is put back: at the end
every line is there, and repeats have the same key.
"""

import json
import random
from pathlib import Path

import pytest
from logged_runs import DAY_MS, LoggedRuns, drop_repeats, outputs, read_lines

from trn.core.runs import RunState
from trn.daemon.outlets import log_copier

STEPS = (
    "logs.write",
    "logs.written",
    "logs.synced",
    "logs.committed",
    "logs.renamed",
    "registry.before_commit",
    "registry.committed",
)
OUTPUT = (b"", b"hello\n", b"no end", b"\xff\xfe\n", b"a\nb\nc\n", "ü".encode() * 20_000)


class Chaos:
    """One seed's worth of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.runs = LoggedRuns(folder / "home", max_log_bytes=self.dice.choice([4096, 1 << 20]))
        self.attempts: dict[str, int] = {}  # of runs that go on
        self.ended: list[str] = []

    def happen(self) -> None:
        """One thing, by chance."""
        chance = self.dice.random()
        run_id = self.dice.choice(list(self.attempts)) if self.attempts else ""
        if not run_id or chance < 0.15:
            self.submit()
        elif chance < 0.50:
            self.say(run_id)
        elif chance < 0.56 and self.attempts[run_id]:
            self.runs.end(run_id, RunState.PENDING, attempt=self.attempts[run_id])
            self.attempts[run_id] = self.runs.start(run_id)
        elif chance < 0.62:
            self.end(run_id)
        elif chance < 0.85:
            self.runs.copy_and_die(f"{self.dice.choice(STEPS)}=kill@{self.dice.randint(1, 6)}")
        elif chance < 0.93:
            self.runs.copy_in_little_room(self.dice.randint(1, 120_000))
        elif chance < 0.96:
            self.runs.now_ms += DAY_MS * self.dice.choice([1, 3, -1])
        else:
            self.runs.copy()

    def submit(self) -> None:
        run_id = f"run-{len(self.attempts) + len(self.ended)}"
        event_log = self.folder / self.dice.choice(["one.jsonl", "folder/two.jsonl"])
        log_dir = self.dice.choice(["", str(self.folder / "logs")])
        self.runs.submit(run_id, event_log=str(event_log), log_dir=log_dir, max_attempts=9)
        self.attempts[run_id] = 0

    def say(self, run_id: str) -> None:
        self.attempts[run_id] = self.attempts[run_id] or self.runs.start(run_id)
        self.runs.print(run_id, self.dice.choice(OUTPUT))
        self.runs.say(run_id, *["metric"] * self.dice.randint(1, 8), attempt=self.attempts[run_id])

    def end(self, run_id: str) -> None:
        self.say(run_id)
        self.runs.end(run_id, attempt=self.attempts.pop(run_id))
        self.ended.append(run_id)

    def check(self) -> None:
        for run_id in self.ended:
            run = self.runs.registry.get(run_id)
            for root in filter(None, (str(self.runs.home.logs.root), run.log_dir)):
                self.check_day_logs(run_id, Path(root))
            lines = drop_repeats(read_lines(Path(run.event_log)))
            ours = [line for line in lines if line["run_id"] == run_id]
            assert ours[1:-1] == [json.loads(line) for line in self.runs.events(run_id)]
        assert {run_id for run_id, event in self.runs.index() if event == "job_completed"} == set(self.ended)

    def check_day_logs(self, run_id: str, root: Path) -> None:
        lines = drop_repeats(self.runs.day_log(run_id, root))  # a clock that is set back mixes up the days
        seqs = sorted(line["seq"] for line in lines if "seq" in line)
        assert seqs == list(range(1, len(self.runs.events(run_id)) + 1))
        end = 0
        for line in sorted(outputs(lines), key=lambda line: int(line["offset"])):
            assert line["offset"] == end
            end += line["size_bytes"]
        assert end == self.runs.home.run(run_id).log.stat().st_size


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_every_line_is_in_every_log(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = Chaos(tmp_path, seed)
    monkeypatch.setattr(log_copier, "ROUND_BYTES", chaos.dice.choice([1, 3000, 16 << 20]))
    monkeypatch.setattr(log_copier, "COPY_BYTES", chaos.dice.choice([1, 500, 2 << 20]))
    for _ in range(40):
        chaos.happen()
    for run_id in list(chaos.attempts):
        chaos.end(run_id)
    assert chaos.runs.copy() == []
    chaos.check()
    chaos.runs.close()
