"""Numbers that JSON does not have, as the words `nan`, `inf` and `-inf`; python's `float` reads all of them."""

import math
from typing import Any


def as_word(value: float) -> float | str:
    """The number, or its word where it is none that JSON has."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def with_words(value: Any) -> Any:
    """Plain data, its numbers as JSON can say them."""
    if isinstance(value, float):
        return as_word(value)
    if isinstance(value, dict):
        return {name: with_words(item) for name, item in value.items()}
    return [with_words(item) for item in value] if isinstance(value, list | tuple) else value
