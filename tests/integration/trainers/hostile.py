"""Raises what is hard to report, where `hyperparams` say so; see test_last_report.py."""

import resource
from typing import Any

from counting import Counting

from gen_worker.trainer import StepContext, StepResult


class NoWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class OtherWords(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # noqa: PLE0307


class Base(BaseException):
    """No Exception: what catches only those lets it pass."""

    def __str__(self) -> str:
        raise SystemExit(0)

    __repr__ = __str__


class Liar(Exception):
    """Every attribute that a report may look at raises."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @property
    def reason(self) -> Any:
        raise Base

    @property
    def __notes__(self) -> Any:
        raise Base

    def add_note(self, note: str) -> None:
        raise Base


class Long(Exception):
    def __str__(self) -> str:
        return "x" * 1_100_000


KINDS = {kind.__name__: kind for kind in (NoWords, OtherWords, Base, Liar, Long, SystemExit, GeneratorExit)}


class Hostile(Counting):
    def configure(self, ctx: StepContext) -> dict[str, Any]:
        self._maybe("configure")
        return super().configure(ctx)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        result = super().train_step(batch, state, ctx)
        limit = self.options.get("limit_bytes")
        if limit is not None and ctx.step == 0:  # before a line that may exceed it is written
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if ctx.step == 2:
            self._maybe("train_step")
        if self.options.get("names"):
            values = {f"m/{ctx.step}/{number}": 1.0 for number in range(self.options["names"])}
            return StepResult(metrics=values)
        return result

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        self._maybe("state_dict")
        return super().state_dict(state)

    def _maybe(self, place: str) -> None:
        if self.options.get("place") == place:
            raise KINDS[self.options["kind"]]
