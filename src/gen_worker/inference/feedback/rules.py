"""When the next training run is due: rules over the rows that came since the last time, and the document that commits it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.contract.job.spec import FeedbackSpec
from gen_worker.errors import StartupError

FILE = "due.json"
MIN_ERRORS = 32  # rows that a metric needs
MAX_ERRORS = 1024  # the newest rows that it is of

Reason = Literal["rows", "max_age_s", "metric"]


class FeedbackDue(msgspec.Struct, frozen=True, kw_only=True):
    """The last time a run was due: `feedback_due` of that number, of the files `first_part` to `last_part`."""

    number: int = 0
    first_part: int = 1
    last_part: int = 0
    rows: int = 0
    reason: Reason = "rows"
    figures: dict[str, float] = {}
    version: VersionFacts | None = None
    is_told: bool = True  # its event is durable


def read_due(folder: Path) -> FeedbackDue:
    path = folder / FILE
    try:
        return msgspec.json.decode(read_regular(path), type=FeedbackDue)
    except FileNotFoundError:
        return FeedbackDue()
    except (OSError, msgspec.MsgspecError) as fault:
        raise StartupError(f"{path} cannot be read: {fault}") from fault


def write_due(folder: Path, due: FeedbackDue) -> None:
    """Durably. Blocks."""
    replace_file(folder / FILE, msgspec.json.format(msgspec.json.encode(due), indent=2) + b"\n")


def newest_errors(errors: Iterable[tuple[float, str]], weights_hash: str) -> list[float]:
    """Of answers of that version, the newest ones."""
    return [error for error, answered in errors if answered == weights_hash][-MAX_ERRORS:]


def mean_error(metric: str, errors: Sequence[float]) -> float:
    """The job's metric over these errors of rows."""
    mean = sum(errors) / len(errors)
    return mean**0.5 if metric.startswith("rmse") else mean


def find_reason(
    spec: FeedbackSpec, *, rows: int, age_s: float, metric: float | None
) -> tuple[Reason, dict[str, float]] | None:
    """The rule that applies, with its figures. `metric` is None where there are too few rows."""
    if not rows:
        return None
    if spec.rows is not None and rows >= spec.rows:
        return "rows", {"rows": float(rows)}
    if spec.max_age_s is not None and age_s >= spec.max_age_s:
        return "max_age_s", {"age_s": age_s}
    if spec.above is not None and metric is not None and metric > spec.above:
        return "metric", {spec.metric or "": metric, "above": spec.above}
    return None
