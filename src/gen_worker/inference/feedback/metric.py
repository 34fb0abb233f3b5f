"""The error of answers, compared with what was right. Imports numpy and pyarrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gen_worker.contract.job.inference_rules import FEEDBACK_METRIC

Errors = npt.NDArray[np.float64]


class MetricError(ValueError):
    """The metric cannot be computed from these columns. The words are for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackMetric:
    """`mse`, `rmse`, `mae` or `error_rate` of one column of the answers against one of the labels."""

    name: str
    kind: str
    answer: str
    label: str

    @classmethod
    def find(cls, name: str, answers: Sequence[str], labels: Sequence[str]) -> "FeedbackMetric":
        """MetricError where it is not clear which columns are meant."""
        match = FEEDBACK_METRIC.fullmatch(name)
        if match is None:
            raise MetricError(f"found {name!r}, expected mse, rmse, mae or error_rate")
        if match["answer"]:
            answer, label = match["answer"], match["label"]
            for there, wanted, what in ((answers, answer, "answers"), (labels, label, "feedback")):
                if wanted not in there:
                    raise MetricError(f"{name}: the {what} have no column {wanted!r}, but {_list(there)}")
            return cls(name=name, kind=match["kind"], answer=answer, label=label)
        both = [column for column in labels if column in answers]
        if len(both) == 1:
            return cls(name=name, kind=name, answer=both[0], label=both[0])
        if len(answers) == len(labels) == 1:
            return cls(name=name, kind=name, answer=answers[0], label=labels[0])
        raise MetricError(
            f"{name}: it is not clear what is compared: answers have {_list(answers)}, feedback has {_list(labels)}."
            f" Write {name}:ANSWER=LABEL"
        )

    def row_errors(self, answers: pa.RecordBatch, labels: pa.RecordBatch) -> Errors:
        """One for each row; infinite where an answer is not a number."""
        found, right = _values(answers.column(self.answer)), _values(labels.column(self.label))
        if self.kind == "error_rate":
            if found.ndim == right.ndim + 1 and found.dtype != object:
                found = found.argmax(axis=-1)  # scores of classes
            return np.array(
                [float(bool(np.any(one != other))) for one, other in zip(found, right, strict=True)]
            )
        try:
            one, other = (each.astype(np.float64).reshape(len(each), -1) for each in (found, right))
        except (TypeError, ValueError) as fault:
            raise MetricError(f"{self.name}: a column has values that are not numbers") from fault
        if one.shape != other.shape:
            raise MetricError(
                f"{self.name}: an answer has {one.shape[1]} values, a label has {other.shape[1]}"
            )
        difference = np.abs(one - other) if self.kind == "mae" else (one - other) ** 2
        errors = difference.mean(axis=1) if one.shape[1] else np.zeros(len(one))
        return np.where(np.isnan(errors), np.inf, errors)

    def over(self, errors: Sequence[float]) -> float:
        """The metric over these rows."""
        mean = float(np.mean(errors))
        return mean**0.5 if self.kind == "rmse" else mean


def _values(array: pa.Array) -> npt.NDArray[Any]:
    values = array.storage.to_pylist() if isinstance(array, pa.ExtensionArray) else array.to_pylist()
    try:
        return np.asarray(values)
    except ValueError:  # of different lengths
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
