"""What the client takes and returns: small immutable values, free of protobuf.

Options are keywords with the names of the protos; an option that is not given is left to the service's default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


class SamplingOptions(TypedDict, total=False):
    """Fields of takt.v1.SamplingParams. Their meaning and limits are told in protos/takt/v1/types.proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str] | str
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: Sequence[int]
    repetition_detection: Mapping[str, int]
    structured_output: Mapping[str, Any]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    output_kind: int
    stream_interval: int
    truncate_prompt_tokens: int
    skip_reading_prefix_cache: bool


class GenerateOptions(SamplingOptions, total=False):
    """Options of one request. `timeout` is its deadline in seconds; without it there is none."""

    request_id: str
    model: str
    priority: int
    cache_salt: str
    data_parallel_rank: int
    lora_name: str
    return_prompt_token_ids: bool
    timeout: float


class ChatOptions(GenerateOptions, total=False):
    """Options of one conversation's answer."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[str]
    tool_choice: str


# A conversation: messages with "role" and "content", or the text of one user's message.
Messages = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one output."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went, as the service measured it."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    e2e_seconds: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of one output. The last chunk of an output has a finish_reason, usage and timings.

    `finish_reason` is stop, length, abort, error or repetition; `stop_reason` the matched token id or string.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A whole output of a request, put together from its chunks."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    usage: Usage | None
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized text. `tokens` is filled when asked for; `max_model_len` is 0 while no engine is ready."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_model_len` is 0 while no engine is ready."""

    name: str
    root: str
    max_model_len: int
    num_ready_engines: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine is doing. `state` is connecting, ready, suspect, draining or refused."""

    address: str
    state: str
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    step_counter: int
    num_in_flight: int
    last_seen_seconds: float
    epoch: str
    max_model_len: int
    data_parallel_rank: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a frontend and its engines are doing."""

    engines: tuple[EngineLoad, ...]
    num_requests: int
    draining: bool


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Outcome of an operator's call on one engine. `value` is what the call returns; `error` empty when it worked."""

    address: str
    value: bool | float | str | None
    error: str
