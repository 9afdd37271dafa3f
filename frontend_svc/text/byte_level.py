"""The bytes of byte-level vocabularies' tokens.

Such a vocabulary spells each byte as one printable character. Decoding is joining the tokens' bytes and reading them
as UTF-8, which makes incremental decoding exact: no token changes the text of another.
"""

import json
from collections.abc import Sequence

import tokenizers


def is_byte_level(tokenizer_json: bytes) -> bool:
    """Whether the tokenizer decodes by ByteLevel alone."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or []
        decoder = parts[0] if len(parts) == 1 else {}
    return bool(decoder.get("type") == "ByteLevel")


def _bytes_by_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_BYTES = _bytes_by_character()


class ByteTable:
    """Bytes by token id, worked out when a token is first seen."""

    def __init__(self, backend: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        self._backend = backend
        # Special tokens have no bytes, so that they leave no text.
        self._known: dict[int, bytes] = dict.fromkeys(special_token_ids, b"")

    def join(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of tokens, special ones left out; unknown ids have none."""
        known = self._known
        try:
            return b"".join([known[index] for index in token_ids])
        except KeyError:
            for index in token_ids:
                if index not in known:
                    known[index] = self._bytes_of(index)
            return b"".join([known[index] for index in token_ids])

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        # An added token that is not spelled in bytes stands for itself.
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        encoded: bytes = token.encode()
        return encoded
