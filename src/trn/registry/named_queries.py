"""SQL lives by name: the registry's in `queries.sql`, that of the metric points in `metrics_queries.sql`."""

import re
from functools import cache
from importlib.resources import files


@cache
def queries(file: str = "queries.sql") -> dict[str, str]:
    """Name -> statement."""
    text = files("trn.registry").joinpath(file).read_text(encoding="utf-8")
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def sql(name: str) -> str:
    return queries()[name]


def metrics_sql(name: str) -> str:
    return queries("metrics_queries.sql")[name]
