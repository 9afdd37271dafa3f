"""Incremental text against decoding the whole output at once, for every kind of vocabulary."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from frontend_svc.text.detokenizer import SpecialTokens
from frontend_svc.text.tokenizer import Tokenizer
from tests.support.embedded_models import embedded_model
from tests.support.text_runs import (
    BYTE_OFFSET,
    WORDS,
    byte_fallback,
    byte_level_pieces,
    byte_tokens,
    run,
    split,
    start,
    with_words,
    word,
)

REPLACEMENT = "\ufffd"
BYTE_LEVEL = byte_level_pieces()
LLAMA, GEMMA = byte_fallback(), byte_fallback(strip=False)
# Decoders that the library's stream serves.
METASPACE = with_words(decoders.Metaspace())
FALLBACK_METASPACE = with_words(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
WORD_PIECE = with_words(decoders.WordPiece())
KINDS = {
    "byte_level": BYTE_LEVEL,
    "llama": LLAMA,
    "gemma": GEMMA,
    "metaspace": METASPACE,
    "fallback_metaspace": FALLBACK_METASPACE,
    "word_piece": WORD_PIECE,
}
WITH_BYTES = ("byte_level", "llama", "gemma", "fallback_metaspace")

any_tokens = st.lists(st.one_of(st.integers(0, BYTE_LEVEL.vocab_size - 1), st.sampled_from([0, 1, 2])), max_size=60)
words = st.lists(st.sampled_from([*range(3), *(word(index) for index in range(len(WORDS)))]), max_size=40)
seeds = st.integers(0, 1000)


def one_shot(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> str:
    """The output's part of the text of prompt and output."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *token_ids])
    assert whole.startswith(before)
    return whole[len(before) :]


def sentence_piece(token_ids: list[int]) -> str:
    """The text of byte-fallback tokens: whole characters where there are any, else U+FFFD for a byte."""
    pieces = {BYTE_OFFSET + byte: bytes([byte]) for byte in range(256)}
    pieces |= {word(index): text.replace("▁", " ").encode() for index, text in enumerate(WORDS)}
    data, text = b"".join(pieces.get(token_id, b"") for token_id in token_ids), ""
    while data:
        for size in range(1, 5):
            try:
                character = data[:size].decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            size, character = 1, REPLACEMENT
        text, data = text + character, data[size:]
    return text


@pytest.mark.parametrize(("kind", "is_exact"), [(name, name in ("byte_level", "llama", "gemma")) for name in KINDS])
def test_kinds_are_told_apart(kind, is_exact):
    assert (KINDS[kind].token_bytes is not None) == is_exact


@settings(max_examples=300, deadline=None)
@given(token_ids=any_tokens, seed=seeds)
def test_byte_level_deltas_join_to_the_whole_text_for_any_tokens(token_ids, seed):
    text, _, count = run(start(BYTE_LEVEL), split(random.Random(seed), token_ids))
    assert text == BYTE_LEVEL.decode(token_ids)
    assert count == len(token_ids)


@settings(max_examples=300, deadline=None)
@given(token_ids=any_tokens, prompt=any_tokens, seed=seeds)
def test_byte_fallback_deltas_join_to_the_whole_text_for_any_tokens(token_ids, prompt, seed):
    text, _, _ = run(start(GEMMA, prompt=prompt), split(random.Random(seed), token_ids))
    assert text == sentence_piece(token_ids)
    text, _, _ = run(start(LLAMA, prompt=prompt), split(random.Random(seed), token_ids))
    expected = sentence_piece(token_ids)
    assert text == (expected if sentence_piece(prompt) else expected.removeprefix(" "))


@settings(max_examples=100, deadline=None)
@given(token_ids=words, prompt=words, seed=seeds)
@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "fallback_metaspace"])
def test_deltas_join_to_the_whole_text_behind_a_prompt(kind, token_ids, prompt, seed):
    tokenizer = KINDS[kind]
    text, _, _ = run(start(tokenizer, prompt=prompt), split(random.Random(seed), token_ids))
    assert text == one_shot(tokenizer, prompt, token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="a é中😀\n", max_size=20), prompt=words)
@pytest.mark.parametrize("kind", WITH_BYTES)
def test_whole_characters_spelled_in_bytes_come_whole(kind, text, prompt):
    tokenizer = KINDS[kind]
    # A word before, so that no beginning is stripped.
    output = start(tokenizer, prompt=[*prompt, word(2)])
    deltas = [output.append([token_id]).text for token_id in byte_tokens(text.encode())]
    assert "".join(deltas) + output.finish(stop_token=False) == text
    assert all(REPLACEMENT not in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(token_ids=any_tokens, prompt=any_tokens, seed=seeds)
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_fails_or_grows_for_any_tokens(kind, token_ids, prompt, seed):
    text, _, count = run(start(KINDS[kind], prompt=prompt), split(random.Random(seed), token_ids))
    assert count == len(token_ids)
    assert len(text) <= 10 * len(token_ids)


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("character", ["é", "中", "😀", "👩‍👩‍👧"])
def test_no_half_character_is_given_out(kind, character):
    output, seen = start(KINDS[kind]), ""
    for token_id in byte_tokens(f"a{character}b".encode()):
        delta = output.append([token_id]).text
        assert REPLACEMENT not in delta
        seen += delta
    assert seen + output.finish(stop_token=False) == f"a{character}b"


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_unfinished_character_is_flushed_at_the_end(kind):
    output = start(KINDS[kind])
    assert output.append(byte_tokens(b"a\xe4")).text == "a"
    assert output.finish(stop_token=False) == REPLACEMENT


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_genuine_replacement_characters_are_kept(kind):
    text = f"a{REPLACEMENT}b{REPLACEMENT}"
    assert run(start(KINDS[kind]), [[token_id] for token_id in byte_tokens(text.encode())])[0] == text


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_bytes_that_can_be_no_character_do_not_wait_for_ever(kind):
    output = start(KINDS[kind])
    text = "".join(output.append(byte_tokens(b"\xff")).text for _ in range(50))
    assert len(text) >= 40
    assert set(text) == {REPLACEMENT}


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_prompt_that_ends_inside_a_character_does_not_leak(kind):
    first, *rest = "中".encode()
    output = start(KINDS[kind], prompt=byte_tokens(b"x" + bytes([first])))
    text = output.append(byte_tokens(bytes(rest))).text + output.append([word(6)]).text
    text += output.finish(stop_token=False)
    assert text == REPLACEMENT * 2 + KINDS[kind].decode([word(6)])


@pytest.mark.parametrize("kind", ["llama", "metaspace", "fallback_metaspace"])
def test_only_the_first_space_of_all_is_stripped(kind):
    tokenizer, the, cat = KINDS[kind], word(0), word(1)
    assert run(start(tokenizer), [[cat], [cat]])[0] == "cat cat"
    assert run(start(tokenizer, prompt=[1, 1]), [[1], [cat]])[0] == "cat"
    assert run(start(tokenizer, prompt=[the]), [[cat]])[0] == " cat"
    # Special tokens between are no new beginning, however many there are.
    assert run(start(tokenizer, prompt=[the, *[1] * 20]), [[cat], [1] * 20, [cat]])[0] == " cat cat"


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unknown_tokens_leave_no_text(kind):
    tokenizer = KINDS[kind]
    unknown = [tokenizer.vocab_size, 2**31 - 1, 2**32, -1]
    for prompt in ([], unknown):
        output = start(tokenizer, prompt=prompt)
        text = "".join(output.append([token_id]).text for token_id in [1, *unknown, 0, *unknown, 2, word(4)])
        assert text == tokenizer.decode([word(4)])
        assert output.append(unknown * 10).text + output.finish(stop_token=False) == ""


@pytest.mark.parametrize("kind", KINDS)
@given(words, st.lists(st.sampled_from([word(2), word(3)]), min_size=1, max_size=3), seeds)
def test_special_tokens_are_shown_where_decoding_shows_them(kind, token_ids, prompt, seed):
    tokenizer = KINDS[kind]
    token_ids = [token_id for token_id in token_ids if token_id < tokenizer.vocab_size]
    shown = tokenizer.decode([*prompt, *token_ids], skip_special_tokens=False)
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    assert shown.startswith(before)
    output = start(tokenizer, prompt=prompt, special=SpecialTokens.SHOWN)
    text, _, _ = run(output, split(random.Random(seed), token_ids))
    assert text == shown[len(before) :]


def test_special_tokens_are_joined_where_a_decoder_puts_spaces():
    token_ids = [word(2), 1, 2, 1, word(3)]
    shown, _, _ = run(start(WORD_PIECE, special=SpecialTokens.SHOWN, prompt=[word(2)]), [token_ids])
    joined, _, _ = run(start(WORD_PIECE, special=SpecialTokens.JOINED, prompt=[word(2)]), [token_ids])
    names = [WORD_PIECE.token_text(token_id) for token_id in (1, 2, 1)]
    assert " ".join(names) in shown
    assert "".join(names) in joined
    assert joined.replace("".join(names), " ".join(names)) == shown


@pytest.mark.parametrize("kind", KINDS)
def test_single_tokens_have_bytes_that_join_to_the_text(kind):
    tokenizer = KINDS[kind]
    text, data = tokenizer.token_piece(word(2))
    assert text == data.decode()
    assert text.strip()
    assert tokenizer.token_piece(1)[0] == tokenizer.token_text(1)
    for unknown in (tokenizer.vocab_size, 2**31 - 1, 2**32, -1):
        assert tokenizer.token_piece(unknown) == ("", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_a_very_long_delta_is_the_same_text(kind):
    tokenizer = KINDS[kind]
    token_ids = [word(index % 9) for index in range(5000)]
    assert run(start(tokenizer), [token_ids])[0] == run(start(tokenizer), [[token_id] for token_id in token_ids])[0]


def test_prefix_that_changes_under_the_stream_is_no_error():
    # In this decoder one bad byte spoils the character before it, which was given out already.
    the, cat = word(0), word(1)
    token_ids = [*byte_tokens("é".encode() + b"\xff"), the, *byte_tokens(b"\xff" * 12), cat, cat]
    output = start(FALLBACK_METASPACE)
    deltas = [output.append([token_id]).text for token_id in token_ids]
    assert "".join(deltas) == f"é{REPLACEMENT} the{REPLACEMENT * 12} cat cat"


def test_threads_share_a_tokenizer():
    tokenizer = byte_level_pieces()
    token_ids = [word(index % 9) for index in range(2000)] + byte_tokens(bytes(range(256)))
    expected, texts = byte_level_pieces().decode(token_ids), []

    def work() -> None:
        texts.append(run(start(tokenizer), [[token_id] for token_id in token_ids])[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_embedded_models_text_equals_one_shot_decoding(name):
    tokenizer = Tokenizer.load(embedded_model(name))
    assert tokenizer.token_bytes is not None
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(100)]
        prompt = tokenizer.encode("Once upon a time")
        text, _, _ = run(start(tokenizer, prompt=prompt), split(rng, token_ids))
        assert text == one_shot(tokenizer, prompt, token_ids)
    written = "Naïve café, 中文字符, 😀👩‍👩‍👧 and\n\n   indented\tcode();"
    token_ids = tokenizer.encode(written, add_special_tokens=False)
    output = start(tokenizer, prompt=prompt)
    deltas = [output.append([token_id]).text for token_id in token_ids]
    assert "".join(deltas) + output.finish(stop_token=False) == written
    assert all(REPLACEMENT not in delta for delta in deltas)
