"""What each step shows, on disk: samples and videos; and which of it retention removes.

    samples/step-%08d/…                              of the `sample` hook
    videos/attempt-<n>/step-%08d-<name>.mp4|.png     of an EpisodeRecorder
    samples/.metrics.json                            by which the best steps are chosen

Files that the author put elsewhere are never removed.
"""

import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import META_SUFFIX, STEM, read_info
from gen_worker.contract.checkpoints.retention import Candidate, select_removals
from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.spec import ArtifactsSpec
from gen_worker.errors import CheckpointError

STEP = re.compile(r"step-(?P<step>\d{8,})")
METRICS = ".metrics.json"
Metric = tuple[str, float, str]  # name, value, mode


class ShownSteps:
    """Of one attempt."""

    def __init__(
        self, *, checkpoints_dir: Path, samples_dir: Path, videos_dir: Path, retention: ArtifactsSpec
    ) -> None:
        self._checkpoints_dir = checkpoints_dir
        self._samples_dir = samples_dir
        self._videos_dir = videos_dir
        self._retention = retention
        self._metrics: dict[int, Metric] | None = None  # read at first use

    def keep(self, step: int, *, metric: Metric | None, saved_step: int) -> Iterator[str]:
        """Remove what the rule does not keep. What a checkpoint's step shows is kept with it. Yields what failed."""
        rule = self._retention
        if not rule.keep_last:
            return
        try:
            found = self._find()
            self._note(step, metric, found)
            for old in self._select(found, saved_step):
                for path in found[old]:
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
        except OSError as fault:  # old files are no reason to stop
            yield f"old samples and videos could not be removed: {fault}"

    def _find(self) -> dict[int, list[Path]]:
        """By step."""
        found: dict[int, list[Path]] = {}
        for path in [*self._samples_dir.glob("step-*"), *self._videos_dir.glob("attempt-*/step-*")]:
            match = STEP.match(path.name)
            is_whole = match is not None and (
                match.end() == len(path.name) or path.parent != self._samples_dir
            )
            if match is not None and is_whole:
                found.setdefault(int(match["step"]), []).append(path)
        return found

    def _select(self, found: dict[int, list[Path]], saved_step: int) -> list[int]:
        candidates = []
        for step in found:
            name, value, mode = (self._metrics or {}).get(step, (None, None, "min"))
            candidates.append(
                Candidate(
                    name=str(step),
                    step=step,
                    verified=True,
                    metric_name=name,
                    metric_value=value,
                    metric_mode=mode,
                )
            )
        rule = self._retention
        removable = select_removals(candidates, keep_last=rule.keep_last, keep_best=rule.keep_best)
        kept = {saved_step, *self._checkpoint_steps()} if removable else set()
        return [step for step in map(int, removable) if step not in kept]

    def _checkpoint_steps(self) -> Iterator[int]:
        for path in self._checkpoints_dir.glob(f"*{META_SUFFIX}"):
            stem = path.name.removesuffix(META_SUFFIX)
            match = STEM.fullmatch(stem)
            if match is None:
                continue
            if match["step"] is not None:
                yield int(match["step"])
                continue
            with contextlib.suppress(CheckpointError):  # one that cannot be read shows nothing
                yield read_info(self._checkpoints_dir, stem).step

    def _note(self, step: int, metric: Metric | None, found: dict[int, list[Path]]) -> None:
        """Remember the step's metric, also for the next attempt."""
        if not self._retention.keep_best:
            return
        path = self._samples_dir / METRICS
        if self._metrics is None:
            self._metrics = _read_metrics(path)
        known = {old: value for old, value in self._metrics.items() if old in found or old == step}
        if metric is not None and math.isfinite(
            metric[1]
        ):  # JSON has no others, and none of them is the best
            known[step] = metric
        if known != self._metrics:
            self._metrics = known
            replace_file(path, msgspec.json.encode(known), sync="none")


def _read_metrics(path: Path) -> dict[int, Metric]:
    try:
        return msgspec.json.decode(read_regular(path), type=dict[int, Metric])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
