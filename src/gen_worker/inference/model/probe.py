"""Probe rows: what a version has to answer before it serves."""

import time
from dataclasses import dataclass

import pyarrow as pa

from gen_worker.errors import ModelLoadError
from gen_worker.inference.messages import ColumnType
from gen_worker.inference.model.columns import RowsError, answer_types, pad_batch
from gen_worker.inference.model.predictor import OutputError, Predictor
from gen_worker.inference.shapes import batch_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`rows` have the input columns alone."""

    rows: pa.RecordBatch
    are_made_up: bool  # from the types of the columns: a model may rightly refuse them

    def run(
        self, predictor: Predictor, max_batch_rows: int
    ) -> tuple[tuple[ColumnType, ...], dict[int, float]]:
        """(output columns, milliseconds of the second call by shape). ModelLoadError where the model does not answer."""
        outputs: tuple[ColumnType, ...] = ()
        took_ms: dict[int, float] = {}
        for shape in batch_shapes(max_batch_rows):
            rows = pad_batch(self.rows.slice(0, shape), shape)
            try:
                outputs = answer_types(predictor.predict(rows))
                started_s = time.perf_counter()
                predictor.predict(rows)
                took_ms[shape] = (time.perf_counter() - started_s) * 1000
            except (OutputError, RowsError) as fault:
                raise ModelLoadError(f"{shape} probe rows: {fault}") from fault
        return outputs, took_ms
