"""The bytes of each token, for the two vocabularies that spell text in bytes.

Byte-level ones spell each byte as one printable character. Byte-fallback ones (SentencePiece's) spell words, with a
mark for the space, and have a token for each byte that no word covers. In both, decoding is joining the tokens' bytes
and reading them as UTF-8, so incremental decoding is exact: no token changes the text of another.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# For codecs: one U+FFFD for each byte that belongs to no character, as SentencePiece's own decoder gives.
_REPLACE_EACH_BYTE = "takt.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary spells bytes. `errors` names the codec error handler for bytes that are no UTF-8."""

    to_bytes: Callable[[str], bytes]
    errors: str
    # One space at the very beginning of a decoded text is no part of it.
    strips_leading_space: bool = False


def read_spelling(tokenizer_json: bytes) -> Spelling | None:
    """The spelling that the tokenizer's decoder means; None when it is another kind of decoder."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    parts = list(decoder.get("decoders") or []) if decoder.get("type") == "Sequence" else [decoder]
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        return Spelling(_byte_level_bytes, errors="replace")
    return _byte_fallback(parts)


def _byte_fallback(parts: list[dict[str, Any]]) -> Spelling | None:
    """Of the sequence Replace..., ByteFallback, Fuse, and perhaps Strip of one space on the left."""
    replaced: list[tuple[str, str]] = []
    while parts and parts[0].get("type") == "Replace":
        part = parts.pop(0)
        pattern = (part.get("pattern") or {}).get("String")
        if not pattern:
            return None
        replaced.append((pattern, part.get("content", "")))
    if [part.get("type") for part in parts[:2]] != ["ByteFallback", "Fuse"]:
        return None
    strip = parts[2:]
    one_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if strip not in ([], [one_space]):
        return None

    def to_bytes(token: str) -> bytes:
        for pattern, content in replaced:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token)
        return token.encode() if match is None else bytes([int(match[1], 16)])

    return Spelling(to_bytes, errors=_REPLACE_EACH_BYTE, strips_leading_space=bool(strip))


def _bytes_by_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_BYTES = _bytes_by_character()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        # An added token that is not spelled in bytes stands for itself.
        return token.encode()


class TokenBytes:
    """Bytes by token id, worked out when a token is first seen. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling, special_token_ids: Iterable[int]) -> None:
        self.spelling = spelling
        self._backend = backend
        # Special tokens have no bytes, so that they leave no text.
        self._known: dict[int, bytes] = dict.fromkeys(special_token_ids, b"")

    def join(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of tokens; special tokens and ids outside the vocabulary have none."""
        known = self._known
        try:
            return b"".join([known[index] for index in token_ids])
        except KeyError:
            return b"".join([self._bytes_of(index) for index in token_ids])

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            # The library takes unsigned 32-bit numbers. Ids it does not know are not kept: there is no end of them.
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                return b""
            found = self._known[token_id] = self.spelling.to_bytes(token)
        return found
