"""Requests whose output must follow a grammar: who waits for one, what a step may sample, what was sampled.

The grammars themselves come from a GrammarBackend. Knows neither its library nor when it is done: a compiled grammar is
told to the core like an abort, between steps. Invariants: a request is in the table of waiting ones exactly as long as
its status is WAITING_FOR_GRAMMAR, and the matcher of a request has accepted exactly its known output tokens, end
tokens left out. Whatever goes wrong with a grammar ends its own request and no other.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine_svc.core.interfaces import CompiledGrammar, GrammarBackend
from engine_svc.core.request import Finish, Request, RequestStatus
from engine_svc.core.rows import RowTable
from engine_svc.core.scheduler_output import GrammarBitmask, IntArray, SchedulerOutput
from shared.errors import InternalError, InvalidRequestError, TaktError
from shared.types import EngineRequest, WireError

_BITS = 32


def bitmask_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for each token."""
    return -(-vocab_size // _BITS)


class StructuredOutputManager:
    """The requests that wait for a grammar, and the bitmask of a step."""

    def __init__(self, backend: GrammarBackend | None, vocab_size: int) -> None:
        """Without a backend every constrained request is refused."""
        self._backend = backend
        self._vocab_size = vocab_size
        # By sequence, which is also the order of arrival.
        self._waiting: dict[int, Request] = {}
        self.num_waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def check_request(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError for a constrained request that nobody can compile a grammar for."""
        constrained = request.sampling.structured_output is not None and request.pooling is None
        if constrained and self._backend is None:
            message = "structured_output needs a tokenizer beside the model, got a model without one"
            raise InvalidRequestError(message, field="structured_output")

    # --- waiting --------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Has the grammar of a new request compiled; `take_ready` hears of it."""
        assert self._backend is not None
        assert request.sampling.structured_output is not None
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._waiting[request.sequence] = request
        self.num_waiting_tokens += request.num_tokens
        self._backend.compile(request.sequence, request.sampling.structured_output)

    def remove(self, request: Request) -> None:
        """Forgets a waiting request, whose grammar nobody needs any more."""
        assert self._backend is not None
        self._leave(request)
        self._backend.cancel(request.sequence)

    def _leave(self, request: Request) -> None:
        del self._waiting[request.sequence]
        self.num_waiting_tokens -= request.num_tokens

    def take_ready(
        self,
        grammars: Sequence[CompiledGrammar],
        admit: Callable[[Request], None],
        finish: Callable[[Request, Finish], None],
    ) -> None:
        """Admits the requests of compiled grammars and finishes those whose grammar failed or refuses their output.

        A grammar that nobody waits for any more is dropped.
        """
        for grammar in grammars:
            request = self._waiting.get(grammar.ticket)
            if request is None:
                continue
            end = _begin(request, grammar)
            if end is not None:
                finish(request, end)
                continue
            self._leave(request)
            request.status = RequestStatus.WAITING
            admit(request)

    # --- steps ----------------------------------------------------------------------------------------------------

    def bitmask_for(
        self, output: SchedulerOutput, table: RowTable, finish: Callable[[Request, Finish], None]
    ) -> GrammarBitmask | None:
        """What the step's constrained rows may sample, None when there are none.

        `finish` is called for a request whose grammar runs over its limits, or allows nothing to one that has no end
        tokens. Its row may sample anything, since what it gives is thrown away.
        """
        if not table.grammars:
            return None
        rows = [row for row in output.rows[output.samples].tolist() if row in table.grammars]
        if not rows:
            return None
        words: IntArray = np.zeros((len(rows), bitmask_words(self._vocab_size)), np.int32)
        for index, row in enumerate(rows):
            request = table.request(row)
            end = _fill(words[index], request, int(table.num_tokens[row] - table.num_prompt_tokens[row]))
            if end is not None:
                words[index] = -1
                finish(request, end)
        return GrammarBitmask(rows=np.array(rows, np.int32), words=words)

    def check_invariants(self) -> None:
        """Raises AssertionError unless statuses and counts agree."""
        waiting = self._waiting.values()
        assert all(request.status is RequestStatus.WAITING_FOR_GRAMMAR for request in waiting), "wrong status"
        assert self.num_waiting_tokens == sum(request.num_tokens for request in waiting), "waiting tokens miscounted"


def _begin(request: Request, grammar: CompiledGrammar) -> Finish | None:
    """Gives the request its matcher, brought up to the output it came with. Returns its end where it ends here."""
    if grammar.matcher is None:
        return _failed(grammar.error or InternalError("the grammar was not compiled"))
    for index, token_id in enumerate(request.output_token_ids.tolist()):
        if not grammar.matcher.accept_token(token_id):
            message = f"resume_token_ids must follow structured_output, got another token at index {index}"
            return _failed(InvalidRequestError(message, field="resume_token_ids"))
    request.grammar = grammar.matcher
    if request.grammar.is_complete and not request.end_token_ids:
        return Finish(RequestStatus.FINISHED_STOPPED)
    return None


def _fill(words: IntArray, request: Request, num_output_tokens: int) -> Finish | None:
    """Sets the bits of the tokens that a request may sample, or returns its end.

    End tokens are allowed where the grammar may end: from min_tokens on, or when it allows nothing else.
    """
    assert request.grammar is not None
    try:
        may_end = request.grammar.fill_bitmask(words)
    except TaktError as error:
        return _failed(error)
    if may_end and (num_output_tokens >= request.sampling.min_tokens or not words.any()):
        if not request.end_token_ids and not words.any():
            return Finish(RequestStatus.FINISHED_STOPPED)
        bits = words.view(np.uint32)
        for token_id in request.end_token_ids:
            bits[token_id // _BITS] |= np.uint32(1 << token_id % _BITS)
    return None


def advance_grammars(table: RowTable, rows: IntArray, token_ids: IntArray) -> npt.NDArray[np.bool_]:
    """Tells the matchers what their rows sampled; returns which rows [len(rows)] may go on.

    Tokens that end their row are no part of the text and told to no matcher.
    """
    good = np.ones(len(rows), np.bool_)
    for index, row in enumerate(rows.tolist()):
        matcher = table.grammars.get(row)
        if matcher is not None:
            token_id = int(token_ids[index])
            good[index] = token_id in table.request(row).end_token_ids or matcher.accept_token(token_id)
    return good


def is_complete(table: RowTable, row: int) -> bool:
    """Whether a row's grammar allows nothing more and the row has no end token to say so."""
    matcher = table.grammars.get(row)
    return matcher is not None and matcher.is_complete and not table.request(row).end_token_ids


def token_refused() -> Finish:
    """The end of a request whose grammar refused a sampled token."""
    return _failed(InternalError("the grammar refused a token that was sampled from it", reason="GRAMMAR_REFUSED"))


def _failed(error: TaktError) -> Finish:
    wire = WireError(error.code, error.reason, error.message, error.field)
    return Finish(RequestStatus.FINISHED_ERROR, error=wire)
