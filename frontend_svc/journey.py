"""The journey of one request: validate, tokenize, resolve, pick an engine, stream, detokenize, account.

How a request ends. Before its first message: by a status alone. After it, every output ends in exactly one message
with a finish reason:

    stop, length, repetition      that message, then OK
    aborted by its id             that message with ABORT, then OK; also when it is the first one
    a shutdown                    that message with ABORT, then OK: what there is was delivered
    engine lost, or its error     that message with ERROR, then the status (UNAVAILABLE with tokens_emitted, ...)
    slow client                   that message with ERROR, then RESOURCE_EXHAUSTED, as far as the client reads them
    deadline                      DEADLINE_EXCEEDED alone: the client listens no more

A request without output whose engine is lost, or drains, goes to another engine unseen. Invariant: whatever ends the
call, the request is released, and with that aborted in its engine.
"""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from frontend_svc.active_request import ActiveRequest, ActiveRequests, Call
from frontend_svc.collector import EngineLostError
from frontend_svc.defaults import resolve
from frontend_svc.dispatch import Dispatch
from frontend_svc.metrics import FrontendMetrics
from frontend_svc.output import OutputBuilder
from frontend_svc.prompts import Prompts
from frontend_svc.request import GenerationRequest, RequestOutput
from frontend_svc.routing.engine_table import EngineTable
from frontend_svc.text.tokenizer import Tokenizer
from frontend_svc.validation import Caps, validate_against_engines, validate_prompt, validate_request
from shared.engine_client import EngineLoss
from shared.errors import DeadlineExceededError, InternalError, TaktError, error_from_code
from shared.types import AbortCause, FinishedRequest, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneyOptions:
    """What an operator sets."""

    model_names: tuple[str, ...]
    caps: Caps
    max_retries: int


class Journey:
    """Takes requests from arrival to end. All methods belong to the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Prompts,
        engines: EngineTable,
        requests: ActiveRequests,
        metrics: FrontendMetrics,
        options: JourneyOptions,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._engines = engines
        self._requests = requests
        self._metrics = metrics
        self._options = options

    async def generate(self, request: GenerationRequest, call: Call) -> AsyncGenerator[RequestOutput]:
        """Answers a request. Raises TaktError for the status of the call."""
        validate_request(request, self._options.caps, self._options.model_names)
        with self._requests.open(request.request_id, call) as active:
            limits = self._engines.limits()
            validate_against_engines(request, limits)
            prompt = await self._prompts.tokenize(request)
            validate_prompt(prompt, limits.max_model_len)
            resolved = resolve(request, prompt, limits, self._tokenizer.eos_token_ids)
            builder = OutputBuilder(self._tokenizer, resolved, call.caller.arrival)
            dispatch = Dispatch(self._engines, active, resolved, self._metrics)
            if not active.collector.has_ended:
                dispatch.send()
                builder.count_for(self._metrics.of_engine(dispatch.rank))
                await call.admitted()
            ended_as = FinishReason.ABORT
            try:
                async for output in self._outputs(active, dispatch, builder):
                    active.offered()
                    yield output
                    active.taken()
            except DeadlineExceededError:
                raise
            except TaktError:
                ended_as = FinishReason.ERROR
                if builder.num_tokens and not builder.is_finished:
                    yield builder.end(FinishReason.ERROR, active.collector.first, time.monotonic())
                raise
            finally:
                builder.account_end(ended_as, active.collector.first, time.monotonic())

    async def _outputs(
        self, active: ActiveRequest, dispatch: Dispatch, builder: OutputBuilder
    ) -> AsyncGenerator[RequestOutput]:
        """From the first token to the end of the output. Raises TaktError."""
        while not builder.is_finished:
            token_ids, finished = await self._take(active, dispatch)
            builder.count_for(self._metrics.of_engine(dispatch.rank))
            error = None if finished is None else _error_of(finished)
            if token_ids or error is None:
                ending = finished if error is None else None
                output = builder.add(token_ids, ending, active.collector.first, time.monotonic())
                active.num_output_tokens = builder.num_tokens
                if builder.stop_string is not None:
                    active.abort_in_engine(AbortCause.STOP_STRING)
                yield output
            if error is not None and not builder.is_finished:
                raise error

    async def _take(self, active: ActiveRequest, dispatch: Dispatch) -> tuple[list[int], FinishedRequest | None]:
        """New tokens and the engine's end, if it is there. A request that lost its engine goes on in another here."""
        while True:
            try:
                token_ids, finished = await active.collector.take()
            except EngineLostError as error:
                loss = error.loss
            else:
                if finished is not None:
                    active.ended_in_engine(finished)
                if finished is None or token_ids or active.num_output_tokens or not _is_turned_away(finished):
                    return token_ids, finished
                loss = EngineLoss(dispatch.address, "it drains", crashed=False, drained=True)
            dispatch.send_on(loss, self._options.max_retries)


def _is_turned_away(finished: FinishedRequest) -> bool:
    """Whether an engine that goes ended a request that another one may take."""
    if finished.reason is FinishReason.ERROR:
        return finished.error is not None and finished.error.reason == "DRAINING"
    return finished.reason is FinishReason.ABORT and finished.abort_cause is AbortCause.SHUTDOWN


def _error_of(finished: FinishedRequest) -> TaktError | None:
    """The error that an end means; None when the output simply ends."""
    if finished.reason is FinishReason.ABORT and finished.abort_cause is AbortCause.DEADLINE:
        return DeadlineExceededError("the request's deadline passed")
    if finished.reason is not FinishReason.ERROR:
        return None
    wire = finished.error
    if wire is None:
        return InternalError("the engine failed the request and told no reason")
    return error_from_code(wire.code, wire.message, reason=wire.reason, field=wire.field)
