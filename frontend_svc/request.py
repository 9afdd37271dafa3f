"""What a client asks and what it gets, in the frontend's own values.

A GenerationRequest is what arrived, before any default is resolved: None means that the client set nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from frontend_svc.text.chat_template import ChatMessage, ToolCall
from shared.types import FinishReason, RepetitionDetection, StructuredOutputSpec


class OutputKind(IntEnum):
    """How much of an output each message repeats. Values are those of takt.v1.OutputKind, whose 0 means DELTA."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What a client asks of the sampling: takt.v1.SamplingParams, whose comments tell ranges and defaults.

    `output_kind` is an OutputKind or 0. `structured_output` is a constraint on the text. `logit_bias` pairs token ids
    with numbers. `skip_reading_prefix_cache` None means: only where prompt_logprobs need it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    structured_output: StructuredOutputSpec | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: int = OutputKind.DELTA
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call of Generate or Chat. Exactly one of `text`, `token_ids` and `messages` is set.

    What only a conversation has: `tools` are functions, each as JSON text, an object with `name` or OpenAI's wrapping
    of one; `tool_choice` is none, auto, required or a function's name; `chat_template_kwargs` is a JSON object as text;
    `add_generation_prompt` None means: unless the final message is continued.
    """

    request_id: str
    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    priority: int = 0
    cache_salt: str = ""
    data_parallel_rank: int | None = None
    return_prompt_token_ids: bool = False
    # Not built yet: refused when it is set.
    lora_name: str | None = None
    tools: tuple[str, ...] = ()
    tool_choice: str | None = None
    chat_template_kwargs: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """One call of Embed. Each input is a text or token ids; `pooling` is last or mean, empty meaning last."""

    request_id: str
    model: str = ""
    inputs: tuple[str | tuple[int, ...], ...] = ()
    pooling: str = ""
    normalize: bool = False
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a call beside its request. Times are monotonic seconds; no deadline is None."""

    arrival: float
    deadline: float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an output."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Where the time of a request went, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    e2e_seconds: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """A token that could stand at a position. `logprob` is natural; `rank` 1 is the most likely, 0 is not told.

    `text` has U+FFFD for bytes that are no character by themselves; `bytes` are exact.
    """

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position. `token` stands there; None at the first one of a prompt.

    `candidates` are the most likely tokens in descending order, or those that were asked for by id.
    """

    token: TokenCandidate | None
    candidates: tuple[TokenCandidate, ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """What is new of one output; with another OutputKind than DELTA, all of it so far.

    `logprobs` are as many as `token_ids` when asked for. In a stream, `tool_calls` of one index carry id and name
    first, then more of the arguments. `usage`, `timings` and the reasons are set in the output's last one only.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    # The stop token id or the stop string that ended the output.
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    # The prompt and its log-probabilities, in the first one of output 0, when asked for.
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    # Which of the request's outputs.
    index: int = 0
    logprobs: Sequence[PositionLogprobs] = ()
    # Not part of `text`.
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    # Set in the last one: the output called functions; its finish reason is STOP all the same.
    has_tool_calls: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector an input, in their order, and the token counts of all together."""

    embeddings: tuple[tuple[float, ...], ...]
    usage: Usage
