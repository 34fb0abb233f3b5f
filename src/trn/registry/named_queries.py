"""SQL lives in `queries.sql`, by name."""

import re
from functools import cache
from importlib.resources import files


@cache
def queries() -> dict[str, str]:
    """Name -> statement."""
    text = files("trn.registry").joinpath("queries.sql").read_text(encoding="utf-8")
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def sql(name: str) -> str:
    return queries()[name]
