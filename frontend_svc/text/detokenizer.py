"""Incremental detokenizing: the text of each further token, never half a character.

Bytes that may be the beginning of a character wait for the tokens that complete it; bytes that cannot be, and what is
left at the end, become U+FFFD. The prompt serves as context for decoders in which a token's text depends on its
predecessor, and never shows in the output. Ids outside the vocabulary leave no text; special tokens do if asked for.
"""

import codecs
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import Protocol

from tokenizers.decoders import DecodeStream

from frontend_svc.text.token_bytes import REPLACEMENT, TokenBytes
from frontend_svc.text.tokenizer import Tokenizer

# Tokens before a token that can influence its text.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes; tokens beyond that cannot be waiting for its end.
MAX_PENDING_TOKENS = 8

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class SpecialTokens(Enum):
    """What special tokens leave in the text. JOINED ones have no space between them where decoders would put one."""

    SKIPPED = 0
    SHOWN = 1
    JOINED = 2


class Detokenizer(Protocol):
    """One output's text."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """The text of what still waited; nothing may be appended afterwards."""


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], special: SpecialTokens = SpecialTokens.SKIPPED
) -> Detokenizer:
    """The exact one where tokens stand for bytes, else the library's stream."""
    table = tokenizer.token_bytes if special is SpecialTokens.SKIPPED else tokenizer.all_token_bytes
    if table is not None:
        # Joining bytes puts no spaces anywhere.
        return _ByteDetokenizer(table, prompt_token_ids)
    return _StreamDetokenizer(tokenizer, prompt_token_ids, special)


class _ByteDetokenizer:
    """Exact for any tokens: joins bytes and decodes UTF-8 incrementally."""

    __slots__ = ("_decoder", "_is_at_start", "_table")

    def __init__(self, table: TokenBytes, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._decoder = _UTF8_DECODER(table.spelling.errors)
        # Only the very first space goes: a prompt with any text has the beginning to itself.
        self._is_at_start = table.spelling.strips_leading_space and not any(
            table.join((token_id,)) for token_id in prompt_token_ids
        )

    def append(self, token_ids: Sequence[int]) -> str:
        data = self._table.join(token_ids)
        if self._is_at_start and data:
            data = data.removeprefix(b" ")
            self._is_at_start = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _StreamDetokenizer:
    """Any other tokenizer: the library's stream, which gives None until a character is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], special: SpecialTokens) -> None:
        self._backend = tokenizer.backend
        self._special = tokenizer.special_token_ids
        self._skips = special is SpecialTokens.SKIPPED
        self._joins = special is SpecialTokens.JOINED
        self._is_behind_special = False
        # The tokens that came before the pending ones, as context for decoding them.
        visible = filter(self._is_visible, reversed(prompt_token_ids))
        self._context = self._clean_context(list(islice(visible, CONTEXT_TOKENS))[::-1])
        self._pending: list[int] = []
        self._stream = self._new_stream()

    def _is_visible(self, token_id: int) -> bool:
        # The library takes unsigned 32-bit numbers.
        is_known = 0 <= token_id < 1 << 32 and self._backend.id_to_token(token_id) is not None
        return is_known and not (self._skips and token_id in self._special)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skips)
        return text

    def _clean_context(self, token_ids: list[int]) -> list[int]:
        """Without a character that the prompt leaves open: its rest belongs to the output alone."""
        while token_ids and self._decode(token_ids).endswith(REPLACEMENT):
            token_ids = token_ids[:-1]
        return token_ids

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skips)

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append(index) for index in token_ids if self._is_visible(index)])

    def _append(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare exceptions when a prefix changed under it
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) > MAX_PENDING_TOKENS else ""
        self._context, self._pending = self._pending, []
        return self._joined(token_id, str(text)) if self._joins else str(text)

    def _joined(self, token_id: int, text: str) -> str:
        """The text of a token, of a special one behind another its bare name."""
        was_special, self._is_behind_special = self._is_behind_special, token_id in self._special
        return self._backend.id_to_token(token_id) or "" if was_special and self._is_behind_special else text

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
