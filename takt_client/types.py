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
    # One of json_schema, json_object, regex, choice, grammar, structural_tag. Schemas may be objects or JSON text.
    structured_output: Mapping[str, Any]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    # delta, cumulative or final_only, or the number of takt.v1.OutputKind.
    output_kind: str | int
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
    """Options of one conversation's answer. `tools` and `chat_template_kwargs` may be objects or JSON text."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[str | Mapping[str, Any]]
    tool_choice: str
    chat_template_kwargs: str | Mapping[str, Any]


# A conversation: messages with "role", "content" (a text or a list of texts) and perhaps "name", "tool_calls" (as
# ToolCall or as mappings of its fields), "tool_call_id" and "reasoning"; or the text of one user's message.
Messages = str | Sequence[Mapping[str, Any]]


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
class TokenCandidate:
    """A token that could stand at a position. `rank` 1 is the most likely; 0: not told."""

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position; `token` stands there, None for the first one of a prompt."""

    token: TokenCandidate | None
    candidates: tuple[TokenCandidate, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; in a Chunk a piece of one, of which the first has id and name."""

    index: int
    id: str
    name: str
    arguments: str


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A whole output of a request, put together from its chunks. `tool_calls` are whole too."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    usage: Usage | None
    timings: Timings | None
    index: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector a text, and the token counts of all texts together."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


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
