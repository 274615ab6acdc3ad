"""Numbers out of a checkpoint's configuration, checked: whole or real, present or defaulted, in range. Torch-free."""

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import LoadError


def whole(values: Mapping[str, Any], name: str, default: int | None = None, minimum: int = 1) -> int:
    """A whole number of at least `minimum`; `default` when it is absent or null.

    Raises:
        LoadError: absent without a default, or not such a number.
    """
    value = _given(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise LoadError(f"the model's configuration: {name} must be a whole number from {minimum} on, got {value!r}")
    return value


def real(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive, finite number; `default` when it is absent or null.

    Raises:
        LoadError: absent without a default, or not such a number.
    """
    value = _given(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise LoadError(f"the model's configuration: {name} must be a positive number, got {value!r}")
    return float(value)


def _given(values: Mapping[str, Any], name: str, default: float | None) -> Any:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise LoadError(f"the model's configuration: {name} is missing")
    return value
