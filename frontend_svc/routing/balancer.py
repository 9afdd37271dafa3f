"""Picks an engine; pure functions over what is known of each.

The score is our own requests there, which are exact, plus what others have there and what waits for memory, which the
engine told a moment ago. Ties go to the next engine after the one picked last, so that an idle fleet is used evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What a waiting request weighs on an engine whose KV cache fills up; the field's own figures.
WAITING_WEIGHT = 6.0
FREE_KV_CACHE_USAGE = 0.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests. `num_in_flight_at_load` counts ours when the rest was told."""

    index: int
    num_in_flight: int
    num_in_flight_at_load: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float


def score(candidate: Candidate) -> float:
    """How busy an engine is; lower is better."""
    of_others = max(0, candidate.num_running + candidate.num_waiting - candidate.num_in_flight_at_load)
    pressure = max(0.0, candidate.kv_cache_usage - FREE_KV_CACHE_USAGE)
    return candidate.num_in_flight + of_others + candidate.num_waiting * WAITING_WEIGHT * pressure


def pick(candidates: Sequence[Candidate], start: int) -> int:
    """The index of the least busy engine; the first at or after `start` among equals. At least one candidate."""
    ordered = [c for c in candidates if c.index >= start] + [c for c in candidates if c.index < start]
    best = ordered[0]
    best_score = score(best)
    for candidate in ordered[1:]:
        candidate_score = score(candidate)
        if candidate_score < best_score:
            best, best_score = candidate, candidate_score
    return best.index
