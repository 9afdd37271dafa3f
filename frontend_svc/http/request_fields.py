"""What the bodies of chat and text completions have in common: ids, streaming, scheduling, and fields that do nothing.

Unknown fields are ignored, as vLLM does; known ones that are not built are refused by name.
"""

import logging
import secrets
from dataclasses import dataclass
from typing import Any

from frontend_svc.http.fields import Fields, Kind, boolean, integer, refuse, small_integer, string
from shared.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Fields of OpenAI's that ask for nothing from a model.
NEUTRAL = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
# Known fields that are not built, each with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (-1,),
    "lora_name": (),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
}
_SCHEDULING: dict[str, Kind[Any]] = {
    "priority": small_integer,
    "cache_salt": string,
    "data_parallel_rank": integer,
}


@dataclass(frozen=True, slots=True)
class Ids:
    """What a request is called: in the answer, and within the service, where it must be unique."""

    answer: str
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How an answer streams. `continuous_usage`: every event has the usage so far."""

    include_usage: bool = False
    continuous_usage: bool = False


def make_ids(prefix: str, fields: Fields, header: str) -> Ids:
    """Ids from the body's request_id, which must be unique among the requests in flight, or the X-Request-Id header.

    Callers reuse a header for all that belongs together, so that it is made unique within the service.
    """
    own = fields.take("request_id", string)
    if own:
        return Ids(prefix + own, prefix + own)
    if header:
        return Ids(prefix + header, f"{prefix}{header}-{secrets.token_hex(4)}")
    made = prefix + secrets.token_hex(16)
    return Ids(made, made)


def take_streaming(fields: Fields) -> Streaming | None:
    """How the answer streams, None when it does not. Raises InvalidRequestError."""
    streams = fields.take_or("stream", boolean, default=False)
    options = fields.take_object("stream_options")
    if not streams:
        if options is not None:
            raise refuse("stream_options", "left out unless stream is true", "an object")
        return None
    if options is None:
        return Streaming()
    continuous = options.take_or("continuous_usage_stats", boolean, default=False)
    includes = options.take_or("include_usage", boolean, default=False)
    return Streaming(include_usage=includes, continuous_usage=continuous and includes)


def take_scheduling(fields: Fields) -> dict[str, Any]:
    """Fields of a GenerationRequest that concern its way through the engines. Raises InvalidRequestError."""
    values = fields.take_all(_SCHEDULING)
    rank = values.get("data_parallel_rank", 0)
    if not 0 <= rank < 2**32:
        raise refuse("data_parallel_rank", "in [0, 2^32)", rank)
    return values


def require_no_prompt_logprobs(prompt_logprobs: int | None, streaming: Streaming | None) -> None:
    """A stream has no place for them."""
    if prompt_logprobs is not None and streaming is not None:
        raise InvalidRequestError("prompt_logprobs must be left out when stream is true", field="prompt_logprobs")


def finish(fields: Fields, unsupported: dict[str, tuple[Any, ...]]) -> None:
    """Looks at what nobody took. Raises InvalidRequestError for what is known and not built."""
    fields.drop(NEUTRAL)
    fields.refuse_unsupported(UNSUPPORTED | unsupported)
    if fields.unknown:
        logger.debug("ignored unknown fields: %s", ", ".join(name[:80] for name in fields.unknown[:20]))
