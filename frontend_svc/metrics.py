"""The frontend's share of the metrics: what becomes of each request, and what it sees of its engines.

Times that the engine measured come from its stamps in a request's end; clocks of two machines are never compared.
Children of labelled metrics are looked up once an engine, because they are used for every message.
"""

from collections.abc import Iterable

from frontend_svc.request import RequestTimings, Usage
from frontend_svc.routing.engine_client import AsyncEngineClient, EngineState
from shared.metrics import Metrics
from shared.types import AbortCause, FinishReason


class EngineMetrics:
    """The request metrics of one engine's label."""

    def __init__(self, metrics: Metrics, model_name: str, engine: str) -> None:
        labels = {"model_name": model_name, "engine": engine}
        # Since the summary last took them.
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._success = metrics.counter("vllm:request_success")
        self._labels = labels
        self._prompt_tokens = metrics.counter("vllm:prompt_tokens").labels(**labels)
        by_source = metrics.counter("vllm:prompt_tokens_by_source")
        self._prompt_tokens_computed = by_source.labels(**labels, source="local_compute")
        self._prompt_tokens_hit = by_source.labels(**labels, source="local_cache_hit")
        self._prompt_tokens_cached = metrics.counter("vllm:prompt_tokens_cached").labels(**labels)
        self._generation_tokens = metrics.counter("vllm:generation_tokens").labels(**labels)
        self._ttft = metrics.histogram("vllm:time_to_first_token_seconds").labels(**labels)
        self._gap = metrics.histogram("vllm:inter_token_latency_seconds").labels(**labels)
        self._request = {
            name: metrics.histogram(f"vllm:{name}").labels(**labels)
            for name in (
                "request_prompt_tokens",
                "request_generation_tokens",
                "request_max_num_generation_tokens",
                "request_params_max_tokens",
                "request_params_n",
                "request_prefill_kv_computed_tokens",
                "request_num_preemptions",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_inference_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
            )
        }
        for reason in FinishReason:
            self._success.labels(**labels, finished_reason=reason.name.lower())

    def first_token(self, seconds: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request began to answer, `seconds` after it arrived."""
        self.num_prompt_tokens += num_prompt_tokens
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_tokens_cached.inc(num_cached_tokens)
        self._prompt_tokens_hit.inc(num_cached_tokens)
        self._prompt_tokens_computed.inc(max(0, num_prompt_tokens - num_cached_tokens))

    def tokens(self, count: int, gap: float | None) -> None:
        """Output tokens arrived, `gap` seconds after the ones before."""
        self.num_generation_tokens += count
        self._generation_tokens.inc(count)
        if gap is not None:
            self._gap.observe(gap)

    def ended(self, reason: FinishReason, usage: Usage, timings: RequestTimings, max_tokens: int) -> None:
        """An output of a request ended, however."""
        self._success.labels(**self._labels, finished_reason=reason.name.lower()).inc()
        values = {
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
            "request_params_max_tokens": max_tokens,
            "request_num_preemptions": timings.num_preemptions,
            "e2e_request_latency_seconds": timings.e2e_seconds,
        }
        if usage.completion_tokens:
            values |= {
                "request_prefill_kv_computed_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
                "request_queue_time_seconds": timings.queue_seconds,
                "request_inference_time_seconds": timings.prefill_seconds + timings.decode_seconds,
                "request_prefill_time_seconds": timings.prefill_seconds,
                "request_decode_time_seconds": timings.decode_seconds,
            }
        if usage.completion_tokens > 1:
            values["request_time_per_output_token_seconds"] = timings.decode_seconds / (usage.completion_tokens - 1)
        for name, value in values.items():
            self._request[name].observe(value)

    def all_ended(self, n: int, max_generation_tokens: int) -> None:
        """A request's `n` outputs ended, the longest of them with so many tokens."""
        self._request["request_params_n"].observe(n)
        self._request["request_max_num_generation_tokens"].observe(max_generation_tokens)


class FrontendMetrics:
    """All metrics of a frontend, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        metrics = Metrics("frontend")
        self.registry = metrics.registry
        self._metrics = metrics
        self._model_name = model_name
        self._engines: dict[int, EngineMetrics] = {}
        self._calls = metrics.counter("takt_frontend_requests")
        self._in_flight = metrics.gauge("takt_frontend_requests_in_flight")
        self._retries = metrics.counter("takt_frontend_zero_token_retries")
        self._loop_lag = metrics.gauge("takt_frontend_event_loop_lag_seconds")
        self._up = metrics.gauge("takt_frontend_engine_up")
        self._heartbeat_age = metrics.gauge("takt_frontend_engine_heartbeat_age_seconds")
        self._losses = metrics.counter("takt_frontend_engine_losses")
        self._known_losses: dict[str, int] = {}
        aborts = metrics.counter("takt_frontend_aborts")
        self._aborts = {cause: aborts.labels(cause=cause.name.lower()) for cause in AbortCause}

    def of_engine(self, rank: int) -> EngineMetrics:
        """The request metrics of an engine, by its data-parallel rank."""
        found = self._engines.get(rank)
        if found is None:
            found = self._engines[rank] = EngineMetrics(self._metrics, self._model_name, str(rank))
        return found

    def take_token_counts(self) -> tuple[int, int]:
        """Returns and clears the prompt and output tokens since the last call."""
        engines = self._engines.values()
        counts = sum(e.num_prompt_tokens for e in engines), sum(e.num_generation_tokens for e in engines)
        for engine in engines:
            engine.num_prompt_tokens = engine.num_generation_tokens = 0
        return counts

    def call_ended(self, method: str, code: str) -> None:
        """A call ended with a status."""
        self._calls.labels(method=method, code=code).inc()

    def aborted(self, cause: AbortCause) -> None:
        """A request was aborted; an engine may not know why."""
        self._aborts[cause].inc()

    def retried(self) -> None:
        """A request was sent to another engine."""
        self._retries.inc()

    def set_loop_lag(self, seconds: float) -> None:
        """How late the event loop ran a timer."""
        self._loop_lag.set(seconds)

    def set_in_flight(self, count: int) -> None:
        """Requests in flight."""
        self._in_flight.set(count)

    def update_engines(self, clients: Iterable[AsyncEngineClient]) -> None:
        """What is seen of the engines now."""
        for client in clients:
            self._up.labels(address=client.address).set(client.state is EngineState.READY)
            self._heartbeat_age.labels(address=client.address).set(client.silent_seconds or 0.0)
            new = client.num_losses - self._known_losses.get(client.address, 0)
            self._known_losses[client.address] = client.num_losses
            self._losses.labels(address=client.address).inc(new)
