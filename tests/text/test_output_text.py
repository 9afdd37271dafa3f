"""Output text against a brute force over the whole output: what is given out, where it stops, what is held back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from frontend_svc.text.output_text import OutputText
from frontend_svc.text.tokenizer import Tokenizer, TokenizerFiles
from tests.support.byte_tokenizer import EOS_TOKEN_ID, NUM_SPECIAL, VOCAB_SIZE, encode_bytes, write_byte_model
from tests.support.embedded_models import embedded_model

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_byte_model(tmp_path_factory.mktemp("bytes")))


def make_byte_fallback() -> Tokenizer:
    """Words with a leading mark for space, and a token for each byte, as SentencePiece models have them."""
    words = ["▁the", "▁cat", "s", "▁", "é", "▁sat", ".", "lo", "hel"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    files = TokenizerFiles(backend.to_str().encode(), {}, {"eos_token_id": 2}, {}, None)
    return Tokenizer(files, None)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return make_byte_fallback()


def start(tokenizer: Tokenizer, stop=(), *, include=False, min_tokens=0, prompt=()) -> OutputText:
    return OutputText(
        tokenizer, stop=list(stop), include_stop_str=include, min_tokens=min_tokens, prompt_token_ids=list(prompt)
    )


def split(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    chunks, index = [], 0
    while index < len(token_ids):
        size = rng.choice([1, 1, 2, 5, 50])
        chunks.append(token_ids[index : index + size])
        index += size
    return chunks


def run(output: OutputText, chunks: list[list[int]]) -> tuple[str, str | None, int]:
    """(text, stop string, tokens of the output), checking that nothing is given out twice or after the end."""
    text, count = "", 0
    for chunk in chunks:
        delta = output.append(chunk)
        text += delta.text
        count += delta.num_tokens
        if delta.stop_string is not None:
            return text, delta.stop_string, count
        assert delta.num_tokens == len(chunk)
    return text + output.finish(stop_token=False), None, count


def brute_force(texts: list[str], stop: list[str], *, include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """The same from the text of each token: looks at every end of every prefix, one character after another."""
    whole = ""
    for count, text in enumerate(texts, 1):
        for character in text:
            whole += character
            for stop_string in stop:
                if count > min_tokens and whole.endswith(stop_string):
                    return whole if include else whole[: -len(stop_string)], stop_string, count
    return whole, None, len(texts)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_stop_strings_equal_brute_force(byte_level, text, stop, include, min_tokens, seed):
    output = start(byte_level, stop, include=include, min_tokens=min_tokens)
    got = run(output, split(random.Random(seed), encode_bytes(text)))
    assert got == brute_force(list(text), stop, include=include, min_tokens=min_tokens)


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), seed=st.integers(0, 1000))
def test_byte_level_deltas_join_to_the_whole_text_for_any_tokens(byte_level, token_ids, seed):
    text, _, count = run(start(byte_level), split(random.Random(seed), token_ids))
    assert text == byte_level.decode(token_ids)
    assert count == len(token_ids)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(["▁the", "▁cat", "s", "▁", "é", "lo", "中", "😀", "\n"]), max_size=30))
def test_byte_fallback_deltas_join_to_the_whole_text(byte_fallback, words):
    token_ids: list[int] = []
    for word in words:
        index = byte_fallback.backend.token_to_id(word)
        token_ids += [index] if index is not None else [3 + byte for byte in word.encode()]
    text, _, _ = run(start(byte_fallback), [[token_id] for token_id in token_ids])
    assert text == byte_fallback.decode(token_ids)
    assert REPLACEMENT not in text


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 267), max_size=60), prompt=st.lists(st.integers(0, 267), max_size=10))
def test_byte_fallback_survives_any_tokens(byte_fallback, token_ids, prompt):
    text, _, count = run(start(byte_fallback, prompt=prompt), [[token_id] for token_id in token_ids])
    assert count == len(token_ids)
    assert len(text) <= 8 * len(token_ids)


@pytest.mark.parametrize("character", ["é", "中", "😀", "👩‍👩‍👧"])
def test_no_half_character_is_given_out(byte_level, byte_fallback, character):
    for tokenizer, offset in ((byte_level, NUM_SPECIAL), (byte_fallback, 3)):
        output, seen = start(tokenizer), ""
        for byte in f"a{character}b".encode():
            delta = output.append([offset + byte]).text
            assert REPLACEMENT not in delta
            seen += delta
        assert seen + output.finish(stop_token=False) == f"a{character}b"


def test_unfinished_character_is_flushed_at_the_end(byte_level, byte_fallback):
    for tokenizer, offset in ((byte_level, NUM_SPECIAL), (byte_fallback, 3)):
        output = start(tokenizer)
        assert output.append([offset + ord("a"), offset + 0xE4]).text == "a"
        assert output.finish(stop_token=False) == REPLACEMENT


def test_bytes_that_can_be_no_character_do_not_wait_for_ever(byte_level, byte_fallback):
    for tokenizer, offset in ((byte_level, NUM_SPECIAL), (byte_fallback, 3)):
        output = start(tokenizer)
        text = "".join(output.append([offset + 0xFF]).text for _ in range(50))
        assert len(text) >= 40
        assert set(text) == {REPLACEMENT}


def test_prompt_that_ends_inside_a_character_does_not_leak(byte_level, byte_fallback):
    first, *rest = "中".encode()
    end = byte_fallback.backend.token_to_id(".")
    for tokenizer, offset, dot in ((byte_level, NUM_SPECIAL, NUM_SPECIAL + ord(".")), (byte_fallback, 3, end)):
        output = start(tokenizer, prompt=[offset + ord("x"), offset + first])
        text = output.append([offset + byte for byte in rest]).text + output.append([dot]).text
        text += output.finish(stop_token=False)
        assert "中" not in text
        assert "x" not in text
        assert text.endswith(".")


def test_leading_space_of_a_continuation_is_kept(byte_fallback):
    the = byte_fallback.backend.token_to_id("▁the")
    cat = byte_fallback.backend.token_to_id("▁cat")
    output = start(byte_fallback, prompt=[the])
    assert output.append([cat]).text == " cat"


def test_special_tokens_leave_no_text(byte_level):
    output = start(byte_level)
    assert output.append([*encode_bytes("a"), 3, EOS_TOKEN_ID, 4, *encode_bytes("b")]).text == "ab"


def test_stop_string_across_tokens_and_deltas(byte_level):
    output = start(byte_level, ["lo w"])
    assert output.append(encode_bytes("hel")).text == "he"
    delta = output.append(encode_bytes("lo world"))
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("l", "lo w", 4)


def test_only_what_may_begin_a_stop_string_is_held_back(byte_level):
    output = start(byte_level, ["END"])
    assert output.append(encode_bytes("an E")).text == "an "
    assert output.append(encode_bytes("NTER")).text == "ENTER"
    assert output.append(encode_bytes("EN")).text == ""
    assert output.finish(stop_token=True) == "EN"


def test_included_stop_string_ends_the_text_and_nothing_is_held_back(byte_level):
    output = start(byte_level, ["END"], include=True)
    assert output.append(encode_bytes("an EN")).text == "an EN"
    delta = output.append(encode_bytes("D of"))
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("D", "END", 1)


def test_match_that_completes_first_wins_then_the_order_of_the_list(byte_level):
    assert run(start(byte_level, ["bcd", "c"]), [encode_bytes("abcd")]) == ("ab", "c", 3)
    assert run(start(byte_level, ["c", "bc"]), [encode_bytes("abcd")]) == ("ab", "c", 3)
    assert run(start(byte_level, ["bc", "c"]), [encode_bytes("abcd")]) == ("a", "bc", 3)


def test_stop_string_of_characters_that_take_several_tokens(byte_level):
    output = start(byte_level, ["é中"])
    tokens = encode_bytes("xé中y")
    got = run(output, [[token] for token in tokens])
    assert got == ("x", "é中", 6)


def test_empty_deltas_are_no_trouble(byte_level):
    output = start(byte_level, ["stop"])
    assert output.append([]).text == ""
    assert output.append([3]).text == ""
    assert output.finish(stop_token=False) == ""


@pytest.mark.model
def test_smollm2_text_equals_one_shot_decoding():
    tokenizer = Tokenizer.load(embedded_model("smollm2"))
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(100)]
        text, _, _ = run(start(tokenizer), split(rng, token_ids))
        assert text == tokenizer.decode(token_ids)
