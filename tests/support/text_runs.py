"""Tokenizers of several kinds, small enough to reason about, and runs of tokens through an output's text."""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder

from frontend_svc.text.detokenizer import SpecialTokens
from frontend_svc.text.output_text import OutputText
from frontend_svc.text.tokenizer import Tokenizer, TokenizerFiles
from tests.support.byte_tokenizer import byte_characters

SPECIAL = ["<unk>", "<s>", "</s>"]
# Of the tokenizers here, token of byte b.
BYTE_OFFSET = len(SPECIAL)
WORDS = ["▁the", "▁cat", "s", "▁", "é", "▁sat", ".", "lo", "hel", "▁▁", "中", "e\u0301"]
PIECES = ["ab", "ba", "aab", "bbb", "中", "😀", "é", "e\u0301", "aé"]
GAP = 1000


def _made(vocab: list[str], decoder: Decoder, *, byte_fallback: bool) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocab)}
    backend = Backend(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=byte_fallback))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(TokenizerFiles(backend.to_str().encode(), {}, {"eos_token_id": 2}, {}, None), None)


def with_words(decoder: Decoder) -> Tokenizer:
    """Special tokens, a token for each byte, and WORDS with a mark for the space, read by `decoder`."""
    return _made([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS], decoder, byte_fallback=True)


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """As Llama 2 has it, and with `strip` false as Gemma has it."""
    stripping = [decoders.Strip(" ", 1, 0)] if strip else []
    return with_words(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripping])
    )


def byte_level_pieces() -> Tokenizer:
    """Special tokens, a token for each byte, and PIECES of several characters, byte-level."""
    characters = byte_characters()
    pieces = ["".join(characters[byte] for byte in piece.encode()) for piece in PIECES]
    tokens = [*SPECIAL, *(characters[byte] for byte in range(256)), *pieces]
    return _made(tokens, decoders.ByteLevel(), byte_fallback=False)


def write_with_gap(folder: Path) -> Path:
    """A folder whose added token has an id far above the number of tokens."""
    folder.mkdir()
    vocab = {token: index for index, token in enumerate([*SPECIAL, *byte_characters().values()])} | {"<far>": GAP}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<far>", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def byte_tokens(data: bytes) -> list[int]:
    """The tokens of bytes."""
    return [BYTE_OFFSET + byte for byte in data]


def word(index: int) -> int:
    """The token of WORDS[index] or PIECES[index]."""
    return BYTE_OFFSET + 256 + index


def start(
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    *,
    include: bool = False,
    min_tokens: int = 0,
    prompt: Sequence[int] = (),
    special: SpecialTokens = SpecialTokens.SKIPPED,
) -> OutputText:
    """An output's text."""
    return OutputText(
        tokenizer,
        stop=list(stop),
        include_stop_str=include,
        min_tokens=min_tokens,
        prompt_token_ids=list(prompt),
        special=special,
    )


def split(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    """Chunks as steps give them, empty ones included."""
    chunks, index = [], 0
    while index < len(token_ids):
        size = rng.choice([0, 1, 1, 1, 2, 5, 50])
        chunks.append(token_ids[index : index + size])
        index += size
    return chunks


def run(output: OutputText, chunks: list[list[int]]) -> tuple[str, str | None, int]:
    """(text, stop string, tokens of the output)."""
    text, count = "", 0
    for chunk in chunks:
        delta = output.append(chunk)
        text += delta.text
        count += delta.num_tokens
        if delta.stop_string is not None:
            return text, delta.stop_string, count
        assert delta.num_tokens == len(chunk)
    return text + output.finish(stop_token=False), None, count
