"""What a client asks and what it gets, in the frontend's own values.

A GenerationRequest is what arrived, before any default is resolved: None means that the client set nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from frontend_svc.text.chat_template import ChatMessage
from shared.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """What a client asks of the sampling. `unbuilt` names fields that are set to something that is not built yet."""

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
    output_kind: int = 0
    unbuilt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call of Generate or Chat. Exactly one of `text`, `token_ids` and `messages` is set."""

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
    # Fields outside the sampling that are set to something that is not built yet.
    unbuilt: tuple[str, ...] = ()


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


@dataclass(slots=True)
class RequestOutput:
    """What is new of an output. The fields from `finish_reason` on are set in the last one only."""

    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    # The stop token id or the stop string that ended the output.
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    # The prompt, in the first one, when asked for.
    prompt_token_ids: Sequence[int] = ()
