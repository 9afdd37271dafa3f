"""The library behind a tokenizer: compiles grammars within limits, and follows them token by token.

The limits count work, not time, so that they mean the same on every machine: a grammar that exceeds one makes the
library report an error, never wait.
"""

from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_svc.core.scheduler_output import IntArray
from shared.errors import InvalidRequestError

_TOKENS_PER_WORD = 32


class GrammarError(Exception):
    """A grammar that cannot be compiled or goes over its limits; one sentence."""


class LibraryMatcher:
    """Implements GrammarMatcher. `fork` gives an independent one at the same place; both share what they can."""

    def __init__(self, matcher: LLMatcher, end_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids

    def fork(self) -> "LibraryMatcher":
        """A matcher at the same place."""
        return LibraryMatcher(self._matcher.deep_copy(), self._end_token_ids)

    def fill_bitmask(self, words: IntArray) -> bool:
        """Sets the bits of the tokens that may come next; returns whether the output may end here.

        Raises InvalidRequestError when that takes more than the limits allow.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error())
            raise InvalidRequestError(
                f"structured_output must stay within the limits of a step, got {reason}",
                field="structured_output",
                reason="GRAMMAR_LIMIT",
            )
        bits = words.view(np.uint32)
        for token_id in self._end_token_ids:
            bits[token_id // _TOKENS_PER_WORD] &= ~np.uint32(1 << token_id % _TOKENS_PER_WORD)
        return bool(self._matcher.is_accepting())

    def accept_token(self, token_id: int) -> bool:
        """Goes on behind a token, or returns False where it may not come."""
        return token_id not in self._end_token_ids and bool(self._matcher.consume_token(token_id))

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may come next."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def _limits() -> LLParserLimits:
    return LLParserLimits(
        # Work of compiling; the library does about 50,000 a ms.
        initial_lexer_fuel=1_000_000,
        # Work of one mask, about 14,000 and 20,000 a ms.
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        # A state takes 1 to 2 kB in each request that reaches it.
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        # Errors without texts of the client.
        verbose_errors=False,
    )


class Compiler:
    """Compiles for one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._limits = _limits()
        self._end_token_ids = tuple(tokenizer.eos_tokens)
        self._num_words = -(-tokenizer.vocab_size // _TOKENS_PER_WORD)

    def compile(self, source: str) -> LibraryMatcher:
        """A matcher at the beginning of a grammar, which allows something there. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        compiled = LibraryMatcher(matcher, self._end_token_ids)
        words: IntArray = np.zeros(self._num_words, np.int32)
        try:
            may_end = compiled.fork().fill_bitmask(words)
        except InvalidRequestError as error:
            raise GrammarError(error.message) from None
        if not may_end and not words.any():
            raise GrammarError("a grammar that allows no output")
        return compiled


def load_compiler(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Compiler:
    """A compiler for the tokenizer of a model's folder. Raises GrammarError when there is none that fits."""
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise GrammarError("a model without tokenizer.json") from None
    try:
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # noqa: BLE001 - the library raises what its readers raise
        raise GrammarError(f"a tokenizer that cannot be used: {one_line(str(error))}") from None
    return Compiler(tokenizer)


def one_line(text: str) -> str:
    """The beginning of what the library says, on one line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:240]
