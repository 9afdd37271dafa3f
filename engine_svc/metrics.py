"""The engine's share of the metrics, and the summary line in the log.

Written by the io thread from the statistics of each step; what is per request belongs to the frontend. The names are
those of shared.metrics.
"""

import logging
import time
from collections import deque

from engine_svc.core.outputs import SchedulerStats
from shared.metrics import Metrics
from shared.types import AbortCause

logger = logging.getLogger(__name__)

# The hit rate of the summary covers this many admissions.
HIT_RATE_WINDOW = 1000


class EngineMetrics:
    """Gauges and counters of one engine, by its model and `engine_index`."""

    def __init__(self, model_name: str, engine_index: int) -> None:
        self._metrics = Metrics("engine")
        self.registry = self._metrics.registry
        self._engine_index = engine_index
        self._labels = (model_name, str(engine_index))
        self._running = self._metrics.gauge("vllm:num_requests_running").labels(*self._labels)
        self._waiting = self._metrics.gauge("vllm:num_requests_waiting").labels(*self._labels)
        by_reason = self._metrics.gauge("vllm:num_requests_waiting_by_reason")
        self._waiting_for_capacity = by_reason.labels(*self._labels, "capacity")
        by_reason.labels(*self._labels, "deferred").set(0)
        self._kv_cache_usage = self._metrics.gauge("vllm:kv_cache_usage_perc").labels(*self._labels)
        self._preemptions = self._metrics.counter("vllm:num_preemptions").labels(*self._labels)
        self._cache_queries = self._metrics.counter("vllm:prefix_cache_queries").labels(*self._labels)
        self._cache_hits = self._metrics.counter("vllm:prefix_cache_hits").labels(*self._labels)
        self._iteration_tokens = self._metrics.histogram("vllm:iteration_tokens_total").labels(*self._labels)
        self._step_seconds = self._metrics.histogram("takt_engine_step_seconds").labels(*self._labels)
        self._streams = self._metrics.gauge("takt_engine_streams").labels(*self._labels)
        self._outbox_tokens = self._metrics.gauge("takt_engine_outbox_tokens").labels(*self._labels)
        self._streams_cut = self._metrics.counter("takt_engine_streams_cut").labels(*self._labels)
        self._refused = self._metrics.counter("takt_engine_invalid_messages").labels(*self._labels)
        aborts = self._metrics.counter("takt_engine_aborts")
        self._aborts = {cause: aborts.labels(*self._labels, cause.name.lower()) for cause in AbortCause}
        self._num_refused = 0
        self._summary = _Summary()

    def set_cache_config(self, values: dict[str, str]) -> None:
        """Publishes the KV cache's configuration; `values` lacks only the engine label."""
        self._metrics.gauge("vllm:cache_config_info").labels(**values, engine=str(self._engine_index)).set(1)

    def observe_step(self, stats: SchedulerStats, seconds: float) -> None:
        """Counts one step of `seconds`."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_for_capacity.set(stats.num_waiting)
        self._kv_cache_usage.set(stats.kv_cache_usage)
        num_tokens = stats.num_prompt_tokens + stats.num_generation_tokens
        if num_tokens:
            self._iteration_tokens.observe(num_tokens)
        if stats.num_scheduled_tokens:
            self._step_seconds.observe(seconds)
        if stats.num_preempted:
            self._preemptions.inc(stats.num_preempted)
        if stats.prefix_cache_queries:
            self._cache_queries.inc(stats.prefix_cache_queries)
            self._cache_hits.inc(stats.prefix_cache_hits)
        for cause, count in stats.aborts_by_cause.items():
            self._aborts[cause].inc(count)
        self._summary.add(stats)

    def observe_streams(self, *, num_streams: int, num_waiting_tokens: int, num_refused: int) -> None:
        """Sets what is known of the frontends; `num_refused` counts from the start."""
        self._streams.set(num_streams)
        self._outbox_tokens.set(num_waiting_tokens)
        self._refused.inc(num_refused - self._num_refused)
        self._num_refused = num_refused

    def count_cut_stream(self) -> None:
        """A frontend was cut off."""
        self._streams_cut.inc()

    def log_summary(self) -> None:
        """Logs what happened since the last summary; at debug level when nothing did."""
        text, idle = self._summary.take()
        logger.log(logging.DEBUG if idle else logging.INFO, "Engine %03d: %s", self._engine_index, text)


class _Summary:
    """Sums of the time since the last summary."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self._last = SchedulerStats()
        self._was_idle = True
        self._lookups: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_WINDOW)

    def add(self, stats: SchedulerStats) -> None:
        self._prompt_tokens += stats.num_prompt_tokens
        self._generation_tokens += stats.num_generation_tokens
        self._preemptions += stats.num_preempted
        self._last = stats
        if stats.prefix_cache_queries:
            self._lookups.append((stats.prefix_cache_queries, stats.prefix_cache_hits))

    def take(self) -> tuple[str, bool]:
        """The line, and whether neither this time nor the one before had anything to tell."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        quiet = not (self._prompt_tokens or self._generation_tokens or self._last.num_running or self._last.num_waiting)
        queries = sum(queries for queries, _ in self._lookups)
        hits = sum(hits for _, hits in self._lookups)
        parts = [
            f"Avg prompt throughput: {self._prompt_tokens / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._generation_tokens / seconds:.1f} tokens/s",
            f"Running: {self._last.num_running} reqs",
            f"Waiting: {self._last.num_waiting} reqs",
        ]
        if self._preemptions:
            parts.append(f"Preemptions: {self._preemptions}")
        parts.append(f"GPU KV cache usage: {self._last.kv_cache_usage * 100:.1f}%")
        parts.append(f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%")
        idle = quiet and self._was_idle
        self._since, self._was_idle = now, quiet
        self._prompt_tokens = self._generation_tokens = self._preemptions = 0
        return ", ".join(parts), idle
