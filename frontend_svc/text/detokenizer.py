"""Incremental detokenizing: the text of each further token, never half a character.

Bytes that may be the beginning of a character wait for the tokens that complete it; bytes that cannot be, and what is
left at the end, become U+FFFD. The prompt serves as context for decoders in which a token's text depends on its
predecessor, and never shows in the output.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from frontend_svc.text.byte_level import ByteTable
from frontend_svc.text.tokenizer import Tokenizer

# Prompt tokens that can influence the text of the first output token.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes; tokens beyond that cannot be waiting for its end.
MAX_PENDING_TOKENS = 8
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One output's text."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """The text of what still waited; nothing may be appended afterwards."""


def make_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> Detokenizer:
    """A detokenizer that leaves special tokens out."""
    if tokenizer.byte_table is not None:
        return _ByteLevelDetokenizer(tokenizer.byte_table)
    return _StreamDetokenizer(tokenizer, prompt_token_ids)


class _ByteLevelDetokenizer:
    """Exact for any tokens: joins bytes and decodes UTF-8 incrementally."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = _UTF8_DECODER("replace")

    def append(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(self._table.join(token_ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _StreamDetokenizer:
    """Any other tokenizer: the library's stream, which gives None until a character is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._backend = tokenizer.backend
        # The tokens that came before the pending ones, as context for decoding them.
        self._context = self._clean_context(list(prompt_token_ids[-CONTEXT_TOKENS:]))
        self._pending: list[int] = []
        self._stream = self._new_stream()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def _clean_context(self, token_ids: list[int]) -> list[int]:
        """Without a character that the prompt leaves open: its rest belongs to the output alone."""
        while token_ids and self._decode(token_ids).endswith(REPLACEMENT):
            token_ids = token_ids[:-1]
        return token_ids

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=True)

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append(index) for index in token_ids])

    def _append(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare exceptions when a prefix changed under it
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) > MAX_PENDING_TOKENS else ""
        self._context, self._pending = self._pending, []
        return str(text)

    def _restart(self) -> str:
        """Gives out what waits, as it is, and begins a new stream behind it."""
        text = self._pending_text()
        self._context, self._pending = self._clean_context(self._pending[-CONTEXT_TOKENS:]), []
        self._stream = self._new_stream()
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def finish(self) -> str:
        return self._pending_text() if self._pending else ""
