"""What is asked of us, and whether it was met: a bar, the row it stands in, the sides beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness import Measurements, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`ours <= limit`, or `ours / the strongest of against <= limit`; `at_least` turns it round."""

    limit: float
    at_least: bool = False
    against: tuple[str, ...] = ()
    text: str = ""  # where the limit alone does not say it

    def describe(self, unit: str) -> str:
        sign = "≥" if self.at_least else "≤"
        shown = f"{self.limit:.0f}" if self.limit >= 1000 else f"{self.limit:.3g}"
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
