"""The journey of one request: validate, tokenize, resolve, pick an engine, stream, detokenize, account.

How a request ends. Before its first message: by a status alone. After it, every output ends in exactly one message
with a finish reason:

    stop, length, repetition      that message, then OK
    aborted by its id             that message with ABORT, then OK; also when it is the first one
    a shutdown                    that message with ABORT, then OK: what there is was delivered
    engine lost, or its error     that message with ERROR, then the status (UNAVAILABLE with tokens_emitted, ...)
    slow client                   that message with ERROR, then RESOURCE_EXHAUSTED, as far as the client reads them
    deadline                      DEADLINE_EXCEEDED alone: the client listens no more

Outputs of one request (n > 1) are computed apart and told in one stream, as they come. If some fail, the call ends with
the first failure's status once the others have ended; a failure before any message is a status alone.

An output without tokens whose engine is lost, or drains, goes to another engine unseen. Invariant: whatever ends the
call, the request is released, and with that aborted in its engine.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from frontend_svc.active_request import ActiveRequest, ActiveRequests, Call
from frontend_svc.chat import ChatParsers, ChatPlan, make_reader, plan_chat
from frontend_svc.defaults import Defaults, ResolvedRequest
from frontend_svc.dispatch import Dispatch, Fleet
from frontend_svc.output import OutputBuilder, RequestClock
from frontend_svc.output_flow import OutputFlow
from frontend_svc.output_shape import make_shaper
from frontend_svc.prompts import Prompt, Prompts
from frontend_svc.request import GenerationRequest, RequestOutput
from frontend_svc.text.tokenizer import Tokenizer
from frontend_svc.validation import Caps, validate_against_engines, validate_prompt, validate_request
from frontend_svc.validation_sampling import (
    validate_prompt_logprobs,
    validate_sampling,
    validate_sampling_against_engines,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneyOptions:
    """What an operator sets. `stream_interval` is the least tokens a message."""

    model_names: tuple[str, ...]
    caps: Caps
    parsers: ChatParsers
    stream_interval: int = 1


class Journey:
    """Takes requests from arrival to end. All methods belong to the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Prompts,
        defaults: Defaults,
        requests: ActiveRequests,
        fleet: Fleet,
        options: JourneyOptions,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._defaults = defaults
        self._requests = requests
        self._fleet = fleet
        self._options = options

    async def generate(self, request: GenerationRequest, call: Call) -> AsyncGenerator[RequestOutput]:
        """Answers a request. Raises TaktError for the status of the call."""
        plan = self._validate(request)
        with self._requests.open(request.request_id, call, request.sampling.n or 1) as active:
            resolved, prompt = await self._resolve(request, plan)
            flows = self._flows(active, resolved, plan, opens_reasoning=prompt.opens_reasoning)
            if not any(run.collector.has_ended for run in active.runs):
                for flow in flows:
                    flow.send(None if flow is flows[0] else flows[0])
                await call.admitted()
            try:
                async for output in _merged(flows, active):
                    active.offered()
                    yield output
                    active.taken()
            finally:
                for flow in flows:
                    flow.account_end()
                flows[0].dispatch.metrics.all_ended(len(flows), max(flow.num_tokens for flow in flows))

    def _validate(self, request: GenerationRequest) -> ChatPlan | None:
        """Checks all that needs no engine; the plan of a conversation. Raises TaktError."""
        options = self._options
        validate_request(request, options.caps, options.model_names)
        validate_sampling(request.sampling, options.caps)
        return None if request.messages is None else plan_chat(request, options.caps)

    async def _resolve(self, request: GenerationRequest, plan: ChatPlan | None) -> tuple[ResolvedRequest, Prompt]:
        """Tokenizes, and resolves what was left open. Raises TaktError."""
        limits = self._fleet.engines.limits()
        validate_against_engines(request, limits)
        validate_sampling_against_engines(request.sampling, limits)
        prompt = await self._prompts.tokenize(request, None if plan is None else plan.render)
        validate_prompt(prompt.token_ids, limits.max_model_len)
        validate_prompt_logprobs(request.sampling, len(prompt.token_ids), limits.vocab_size, self._options.caps)
        constraint = None if plan is None else plan.constraint
        return self._defaults.resolve(request, prompt.token_ids, limits, constraint), prompt

    def _flows(
        self, active: ActiveRequest, resolved: ResolvedRequest, plan: ChatPlan | None, *, opens_reasoning: bool
    ) -> list[OutputFlow]:
        """A flow an output."""
        sampling, clock = resolved.request.sampling, RequestClock(active.call.caller.arrival)
        interval = max(sampling.stream_interval or 1, self._options.stream_interval)
        is_constrained = resolved.sampling.structured_output is not None
        flows = []
        for index, run in enumerate(active.runs):
            child = resolved.child(index)
            flows.append(
                OutputFlow(
                    run,
                    Dispatch(self._fleet, active, run, child),
                    OutputBuilder(self._tokenizer, child, clock),
                    make_reader(plan, self._options.parsers, is_constrained=is_constrained, is_open=opens_reasoning),
                    make_shaper(sampling.output_kind, interval),
                )
            )
        return flows


async def _merged(flows: Sequence[OutputFlow], active: ActiveRequest) -> AsyncGenerator[RequestOutput]:
    """Messages of all outputs as they come. Raises the first failure, once all outputs have ended."""
    going = list(flows)
    failures = []
    has_told = False
    while going:
        if not any(flow.has_news for flow in going):
            await active.news.wait()
        for flow in going:
            output = flow.advance()
            if output is not None:
                has_told = True
                yield output
            if flow.error is not None:
                failures.append(flow.error)
        going = [flow for flow in going if not flow.is_over]
    if failures:
        for flow in flows:
            last = flow.end_failed() if has_told else None
            if last is not None:
                yield last
        raise failures[0]
