"""The model's own defaults of the sampling, as its generation_config.json has them.

A value that is none is left out with a warning: a bad file must not make every request fail.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What holds where a request leaves it open. `max_tokens` None is what the context leaves."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> "GenerationDefaults":
        """Reads the file's object; what it does not tell keeps its neutral value."""
        found: dict[str, Any] = {}
        for key, name, low, high, kind in _KEYS:
            value = generation_config.get(key)
            if value is None:
                continue
            if _is_number(value, kind) and low <= value <= high:
                found[name] = max(0, value) if name == "top_k" else value
            else:
                logger.warning("generation_config.json: %s must be in [%g, %g], is ignored", key, low, high)
        return cls(**found)


# key of the file, name here, least and largest value, type. Above 0 is written as the least float above it.
_TINY = 5e-324
_KEYS: tuple[tuple[str, str, float, float, type], ...] = (
    ("temperature", "temperature", 0.0, 2.0, float),
    ("top_p", "top_p", _TINY, 1.0, float),
    ("top_k", "top_k", -1, 2**31 - 1, int),
    ("min_p", "min_p", 0.0, 1.0, float),
    ("repetition_penalty", "repetition_penalty", _TINY, math.inf, float),
    ("max_new_tokens", "max_tokens", 1, 2**31 - 1, int),
)


def _is_number(value: object, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and (kind is float or isinstance(value, int))
