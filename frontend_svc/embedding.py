"""The journey of a call of Embed: validate, tokenize, one pooling request an input, collect the vectors.

Inputs are computed apart, and all or none of them are answered: the first failure ends the call and aborts the others.
Invariant: whatever ends the call, nothing of it stays in an engine.
"""

import asyncio
from collections.abc import Sequence

from frontend_svc.active_request import ActiveRequest, ActiveRequests, Call
from frontend_svc.collector import EngineLostError
from frontend_svc.defaults import ResolvedRequest
from frontend_svc.dispatch import Dispatch, Fleet
from frontend_svc.engine_run import EngineRun
from frontend_svc.output_flow import error_of, is_turned_away
from frontend_svc.prompts import Prompts
from frontend_svc.request import EmbeddingOutput, EmbeddingRequest, GenerationRequest, Usage
from frontend_svc.validation import (
    MAX_CACHE_SALT_BYTES,
    Caps,
    require,
    require_bytes,
    require_room,
    validate_model,
    validate_prompt,
    validate_request_id,
    validate_text,
    validate_token_ids,
)
from shared.engine_client import EngineLoss
from shared.errors import InternalError, RequestAbortedError
from shared.types import FinishedRequest, FinishReason, PoolingParams, SamplingParams

POOLINGS = ("last", "mean")


class EmbeddingJourney:
    """Answers calls of Embed. All methods belong to the event loop."""

    def __init__(
        self, prompts: Prompts, requests: ActiveRequests, fleet: Fleet, model_names: tuple[str, ...], caps: Caps
    ) -> None:
        self._prompts = prompts
        self._requests = requests
        self._fleet = fleet
        self._model_names = model_names
        self._caps = caps

    async def embed(self, request: EmbeddingRequest, call: Call) -> EmbeddingOutput:
        """A vector an input. Raises TaktError for the status of the call."""
        self._validate(request)
        with self._requests.open(request.request_id, call, len(request.inputs)) as active:
            prompts = await self._tokenize(request)
            pooling = PoolingParams(pooling=request.pooling or "last", normalize=request.normalize)
            dispatches = []
            for run, prompt in zip(active.runs, prompts, strict=True):
                dispatches.append(Dispatch(self._fleet, active, run, _resolved(request, prompt, pooling)))
                if not run.collector.has_ended:
                    dispatches[-1].send()
            await call.admitted()
            ends = await self._ends(active, dispatches)
        usage = Usage(sum(map(len, prompts)), sum(end.num_cached_tokens for end in ends), 0)
        return EmbeddingOutput(tuple(end.embedding for end in ends), usage)

    def _validate(self, request: EmbeddingRequest) -> None:
        validate_model(request.model, self._model_names)
        validate_request_id(request.request_id)
        require_bytes("cache_salt", request.cache_salt, MAX_CACHE_SALT_BYTES)
        pooling = request.pooling
        require(pooling in ("", *POOLINGS), "pooling", " or ".join(POOLINGS), pooling)
        limit, count = self._caps.max_embedding_inputs, len(request.inputs)
        require(1 <= count <= limit, "texts", f"1 to {limit} texts", f"{count} texts")
        for index, text in enumerate(request.inputs):
            if isinstance(text, str):
                validate_text(f"texts[{index}]", text, self._caps.max_prompt_bytes)
        size = sum(len(text.encode()) for text in request.inputs if isinstance(text, str))
        limit = self._caps.max_prompt_bytes
        require(size <= limit, "texts", f"at most {limit} bytes together", f"{size} bytes")

    async def _tokenize(self, request: EmbeddingRequest) -> list[Sequence[int]]:
        limits = self._fleet.engines.limits()
        prompts = []
        for index, given in enumerate(request.inputs):
            field = f"texts[{index}]"
            token_ids: Sequence[int]
            if isinstance(given, str):
                require_room(field, given, limits.max_model_len)
                token_ids = await self._prompts.tokenize_text(given, add_special_tokens=True)
            else:
                token_ids = given
                validate_token_ids(field, token_ids, limits.vocab_size)
            validate_prompt(token_ids, limits.max_model_len, field)
            prompts.append(token_ids)
            # Many short texts must not hold everybody else's tokens.
            await asyncio.sleep(0)
        return prompts

    async def _ends(self, active: ActiveRequest, dispatches: list[Dispatch]) -> list[FinishedRequest]:
        """The end of every run, each with its vector. Raises TaktError."""
        ends: dict[int, FinishedRequest] = {}
        while len(ends) < len(active.runs):
            for index, (run, dispatch) in enumerate(zip(active.runs, dispatches, strict=True)):
                end = _take(run, dispatch) if index not in ends and run.collector.has_news else None
                if end is not None:
                    ends[index] = end
            going = [run for index, run in enumerate(active.runs) if index not in ends]
            if going and not any(run.collector.has_news for run in going):
                await active.news.wait()
        return [ends[index] for index in range(len(active.runs))]


def _take(run: EngineRun, dispatch: Dispatch) -> FinishedRequest | None:
    """The end of a run, None while it goes on, in another engine perhaps. Raises TaktError."""
    try:
        finished = run.collector.take_now().finished
    except EngineLostError as error:
        dispatch.send_on(error.loss)
        return None
    if finished is None:
        return None
    run.ended_in_engine(finished)
    if is_turned_away(finished):
        dispatch.send_on(EngineLoss(dispatch.address, "it drains", crashed=False, drained=True))
        return None
    failure = error_of(finished)
    if failure is not None:
        raise failure
    if finished.reason is FinishReason.ABORT:
        raise RequestAbortedError("the request was aborted")
    if not finished.embedding:
        raise InternalError("the engine ended the request and told no vector")
    return finished


def _resolved(request: EmbeddingRequest, token_ids: Sequence[int], pooling: PoolingParams) -> ResolvedRequest:
    generation = GenerationRequest(
        request_id=request.request_id, priority=request.priority, cache_salt=request.cache_salt
    )
    return ResolvedRequest(
        request=generation,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1),
        eos_token_ids=(),
        pooling=pooling,
    )
