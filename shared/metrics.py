"""Every metric of Takt in one table: name, kind, help, labels, buckets, and which service owns it.

The vllm: names, labels and buckets are those that dashboards of vLLM know; nothing is exported by both services. A
service makes the metrics that it owns in a registry of its own, so that tests and processes do not share state.
"""

import errno
from dataclasses import dataclass
from typing import Literal, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.errors import StartupError

M = TypeVar("M", Counter, Gauge, Histogram)
Owner = Literal["engine", "frontend"]
Kind = Literal["counter", "gauge", "histogram"]

MODEL_LABELS = ("model_name", "engine")
DEFAULT_MAX_MODEL_LEN = 1_000_000

# The 1-2-5 series up to the longest request; resolved when the metric is made.
TOKENS: tuple[float, ...] = (-1.0,)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: off
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
GAPS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PHASES = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEPS = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)
# fmt: on


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. Counters are exported with `_total` behind their name."""

    owner: Owner
    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = MODEL_LABELS
    buckets: tuple[float, ...] = ()


CACHE_CONFIG_LABELS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "num_gpu_blocks",
    "prefix_caching_hash_algo",
    "kv_cache_memory_bytes",
    "engine",
)

# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    # What the engine does now, and per step.
    MetricSpec("engine", "gauge", "vllm:num_requests_running", "Requests in the running batch."),
    MetricSpec("engine", "gauge", "vllm:num_requests_waiting", "Requests that wait for a place in the batch."),
    MetricSpec("engine", "gauge", "vllm:num_requests_waiting_by_reason", "Waiting requests by what they wait for.",
               (*MODEL_LABELS, "reason")),
    MetricSpec("engine", "gauge", "vllm:kv_cache_usage_perc", "Part of the KV cache in use, from 0 to 1."),
    MetricSpec("engine", "gauge", "vllm:cache_config_info", "The KV cache's configuration, as labels; always 1.",
               CACHE_CONFIG_LABELS),
    MetricSpec("engine", "counter", "vllm:num_preemptions", "Requests that were preempted."),
    MetricSpec("engine", "counter", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    MetricSpec("engine", "counter", "vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    MetricSpec("engine", "histogram", "vllm:iteration_tokens_total", "Prompt and output tokens computed in a step.",
               buckets=ITERATION_TOKENS),
    MetricSpec("engine", "histogram", "takt_engine_step_seconds", "Time of a step, schedule to outputs.",
               buckets=STEPS),
    MetricSpec("engine", "gauge", "takt_engine_streams", "Connected frontends."),
    MetricSpec("engine", "gauge", "takt_engine_outbox_tokens", "Tokens that frontends have not taken yet."),
    MetricSpec("engine", "counter", "takt_engine_streams_cut", "Streams ended because their frontend read too slowly."),
    MetricSpec("engine", "counter", "takt_engine_aborts", "Requests aborted, by cause.", (*MODEL_LABELS, "cause")),
    MetricSpec("engine", "counter", "takt_engine_invalid_messages", "Messages refused as malformed."),
    # What becomes of each request.
    MetricSpec("frontend", "counter", "vllm:prompt_tokens", "Prompt tokens of requests that began to answer."),
    MetricSpec("frontend", "counter", "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.",
               (*MODEL_LABELS, "source")),
    MetricSpec("frontend", "counter", "vllm:prompt_tokens_cached", "Prompt tokens that a prefix cache served."),
    MetricSpec("frontend", "counter", "vllm:generation_tokens", "Output tokens."),
    MetricSpec("frontend", "counter", "vllm:request_success", "Requests that ended, by finish reason.",
               (*MODEL_LABELS, "finished_reason")),
    MetricSpec("frontend", "histogram", "vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets=TOKENS),
    MetricSpec("frontend", "histogram", "vllm:request_generation_tokens", "Output tokens of a request.",
               buckets=TOKENS),
    MetricSpec("frontend", "histogram", "vllm:request_max_num_generation_tokens",
               "Most output tokens among a request's outputs.", buckets=TOKENS),
    MetricSpec("frontend", "histogram", "vllm:request_params_max_tokens", "max_tokens of a request.", buckets=TOKENS),
    MetricSpec("frontend", "histogram", "vllm:request_params_n", "n of a request.", buckets=(1, 2, 5, 10, 20)),
    MetricSpec("frontend", "histogram", "vllm:request_prefill_kv_computed_tokens",
               "Prompt tokens of a request that were computed, not cached.", buckets=TOKENS),
    MetricSpec("frontend", "histogram", "vllm:request_num_preemptions", "Preemptions of a request.",
               buckets=(1, 2, 3, 4, 5, 10, 20)),
    MetricSpec("frontend", "histogram", "vllm:time_to_first_token_seconds",
               "From arrival at the frontend to the first output token.", buckets=TTFT),
    MetricSpec("frontend", "histogram", "vllm:inter_token_latency_seconds", "Between two messages with tokens.",
               buckets=GAPS),
    MetricSpec("frontend", "histogram", "vllm:request_time_per_output_token_seconds",
               "Decode time of a request by its output tokens after the first.", buckets=GAPS),
    MetricSpec("frontend", "histogram", "vllm:e2e_request_latency_seconds", "From arrival to the end.",
               buckets=PHASES),
    MetricSpec("frontend", "histogram", "vllm:request_queue_time_seconds",
               "From arrival at the engine to the first step.", buckets=PHASES),
    MetricSpec("frontend", "histogram", "vllm:request_inference_time_seconds", "From the first step to the last token.",
               buckets=PHASES),
    MetricSpec("frontend", "histogram", "vllm:request_prefill_time_seconds",
               "From the first step to the first token.", buckets=PHASES),
    MetricSpec("frontend", "histogram", "vllm:request_decode_time_seconds", "From the first token to the last.",
               buckets=PHASES),
    MetricSpec("frontend", "counter", "takt_frontend_requests", "Calls that ended, by method and status code.",
               ("method", "code")),
    MetricSpec("frontend", "gauge", "takt_frontend_requests_in_flight", "Requests in flight on this frontend.", ()),
    MetricSpec("frontend", "gauge", "takt_frontend_engine_up", "1 while the engine takes requests.", ("address",)),
    MetricSpec("frontend", "gauge", "takt_frontend_engine_heartbeat_age_seconds",
               "Since the engine's last sign of life.", ("address",)),
    MetricSpec("frontend", "counter", "takt_frontend_engine_losses", "Streams to an engine that were lost.",
               ("address",)),
    MetricSpec("frontend", "counter", "takt_frontend_zero_token_retries",
               "Requests sent to another engine because theirs was lost before their first token.", ()),
    MetricSpec("frontend", "counter", "takt_frontend_aborts", "Requests aborted in an engine, by cause.", ("cause",)),
    MetricSpec("frontend", "gauge", "takt_frontend_event_loop_lag_seconds",
               "How late the event loop last ran a timer.", ()),
)
# fmt: on


class Metrics:
    """One service's metrics in a registry of their own; each is found by its name in the table."""

    def __init__(self, owner: Owner, *, max_model_len: int = DEFAULT_MAX_MODEL_LEN) -> None:
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Counter | Gauge | Histogram] = {
            spec.name: _make(spec, max_model_len, self.registry) for spec in METRICS if spec.owner == owner
        }

    def counter(self, name: str) -> Counter:
        """The counter of this name; KeyError or TypeError when the table says otherwise."""
        return _checked(self._by_name[name], Counter)

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name, as above."""
        return _checked(self._by_name[name], Gauge)

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name, as above."""
        return _checked(self._by_name[name], Histogram)


def _checked(metric: object, kind: type[M]) -> M:
    if not isinstance(metric, kind):
        raise TypeError(f"{metric} is no {kind.__name__}")
    return metric


def _make(spec: MetricSpec, max_model_len: int, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if spec.kind == "counter":
        return Counter(spec.name, spec.help, spec.labels, registry=registry)
    if spec.kind == "gauge":
        return Gauge(spec.name, spec.help, spec.labels, registry=registry)
    buckets = token_buckets(max_model_len) if spec.buckets is TOKENS else spec.buckets
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=buckets)


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the longest request."""
    series = (mantissa * 10**exponent for exponent in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return tuple(value for value in series if value <= max_model_len)


class MetricsServer:
    """Serves a registry over HTTP from a thread of its own. `port` is the bound one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise StartupError(_bind_failure(host, port, error)) from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(host: str, port: int, registry: CollectorRegistry) -> MetricsServer:
    """Serves a registry at http://host:port/metrics; port 0 takes a free one.

    Raises StartupError when the address cannot be bound.
    """
    return MetricsServer(host, port, registry)


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
