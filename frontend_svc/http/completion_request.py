"""The body of /v1/completions as GenerationRequests, one a prompt, and how their answer is to look."""

from dataclasses import dataclass, replace
from typing import Any

from frontend_svc.http.fields import Fields, array, boolean, integer, integers, refuse, string, type_name
from frontend_svc.http.request_fields import (
    Ids,
    Streaming,
    finish,
    make_ids,
    require_no_prompt_logprobs,
    take_scheduling,
    take_streaming,
)
from frontend_svc.http.sampling_fields import names_of, take_constraint, take_sampling
from frontend_svc.request import GenerationRequest, OutputKind, SamplingRequest

ID_PREFIX = "cmpl-"
# OpenAI's default.
DEFAULT_MAX_TOKENS = 16
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}

# A text or token ids.
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """How the answer looks. `logprobs` None: without log-probabilities. `echo`: behind its prompt.

    `prompt_only`: the prompt is all that is wanted; the one token that an engine computes at least is left out.
    `names`: ours to those of the body.
    """

    ids: Ids
    streaming: Streaming | None
    n: int = 1
    logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False
    returns_token_ids: bool = False
    returns_prompt_logprobs: bool = False
    names: dict[str, str]


def parse_completion(
    values: dict[str, Any], request_id: str, max_prompts: int
) -> tuple[list[GenerationRequest], CompletionOptions]:
    """Reads a body of at most so many prompts. Raises InvalidRequestError."""
    fields = Fields(values)
    ids = make_ids(ID_PREFIX, fields, request_id)
    prompts = read_prompts("prompt", fields.require("prompt", _anything), max_prompts)
    constraint = take_constraint(fields)
    echo = fields.take_or("echo", boolean, default=False)
    logprobs = fields.take("logprobs", integer)
    max_tokens = _take_max_tokens(fields, echo=echo)
    streaming = take_streaming(fields)
    sampling = take_sampling(
        fields,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        logprobs=logprobs,
        structured_output=None if constraint is None else constraint[1],
        output_kind=OutputKind.FINAL_ONLY if streaming is None else OutputKind.DELTA,
    )
    require_no_prompt_logprobs(sampling.prompt_logprobs, streaming)
    options = CompletionOptions(
        ids=ids,
        streaming=streaming,
        n=1 if sampling.n is None else sampling.n,
        logprobs=logprobs,
        echo=echo,
        prompt_only=max_tokens == 0,
        returns_token_ids=fields.take_or("return_token_ids", boolean, default=False),
        returns_prompt_logprobs=sampling.prompt_logprobs is not None,
        names=names_of(constraint) | {"text": "prompt", "token_ids": "prompt"},
    )
    _check(fields, options, sampling)
    common: dict[str, Any] = {
        "model": fields.take_or("model", string, default=""),
        "sampling": _with_prompt(sampling, options),
        "return_prompt_token_ids": _needs_prompt(options),
        **take_scheduling(fields),
    }
    finish(fields, _UNSUPPORTED)
    return [_request(ids, index, prompts, common) for index in range(len(prompts))], options


def _request(ids: Ids, index: int, prompts: list[Prompt], common: dict[str, Any]) -> GenerationRequest:
    prompt = prompts[index]
    return GenerationRequest(
        request_id=ids.request if len(prompts) == 1 else f"{ids.request}-{index}",
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        **common,
    )


def _needs_prompt(options: CompletionOptions) -> bool:
    """Whether the answer takes something from the prompt's tokens."""
    streaming = options.streaming
    counts = streaming is not None and streaming.continuous_usage
    return options.returns_token_ids or counts or (options.echo and options.logprobs is not None)


def _take_max_tokens(fields: Fields, *, echo: bool) -> int | None:
    """None for all the room there is, which null asks for; 0 only where the prompt itself is the answer."""
    if "max_tokens" not in fields.given:
        return DEFAULT_MAX_TOKENS
    max_tokens = fields.take("max_tokens", integer)
    if max_tokens == 0 and not echo:
        raise refuse("max_tokens", "at least 1 unless echo is true", 0)
    return max_tokens


def _check(fields: Fields, options: CompletionOptions, sampling: SamplingRequest) -> None:
    """What excludes each other."""
    best_of = fields.take("best_of", integer)
    if best_of is not None and best_of != options.n:
        raise refuse("best_of", f"n {options.n}: no output is left out", best_of)
    if options.echo and sampling.truncate_prompt_tokens is not None:
        raise refuse("echo", "false with truncate_prompt_tokens", "true")
    if options.echo and options.logprobs is not None and options.streaming is not None and options.n > 1:
        raise refuse("n", "1 in a stream with echo and logprobs", options.n)


def _with_prompt(sampling: SamplingRequest, options: CompletionOptions) -> SamplingRequest:
    """The log-probabilities of a prompt that is repeated belong to the answer's."""
    if not options.echo or options.logprobs is None:
        return sampling
    return replace(sampling, prompt_logprobs=max(options.logprobs, sampling.prompt_logprobs or 0))


# --- prompts ----------------------------------------------------------------------------------------------------------


def _anything(_name: str, value: Any) -> Any:
    return value


def read_prompts(name: str, value: Any, limit: int) -> list[Prompt]:
    """One or more texts or lists of token ids. Raises InvalidRequestError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refuse(name, "a string, token ids, or a list of these", type_name(value))
    if value and type(value[0]) is int:
        return [integers(name, value)]
    if not 1 <= len(value) <= limit:
        raise refuse(name, f"1 to {limit} prompts", f"{len(value)} prompts")
    if isinstance(value[0], str):
        return [string(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [integers(f"{name}[{index}]", array(f"{name}[{index}]", item)) for index, item in enumerate(value)]
