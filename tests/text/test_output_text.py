"""Output text against a brute force over the whole output: what is given out, where it stops, what is held back."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.text.stop import StopMatcher
from tests.support.text_runs import BYTE_OFFSET, PIECES, byte_level_pieces, byte_tokens, run, split, start, word

TOKENIZER = byte_level_pieces()
ALPHABET = "abé中\u0301e"

pieces = st.one_of(
    st.sampled_from([[word(index)] for index in range(len(PIECES))]),
    # Characters that take several tokens, so that a token completes none.
    st.sampled_from(list(ALPHABET)).map(lambda character: byte_tokens(character.encode())),
    st.just([1]),
)
outputs = st.lists(pieces, max_size=30).map(lambda parts: [token_id for part in parts for token_id in part])
stop_strings = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=5)


def text_of(text: str) -> list[int]:
    return byte_tokens(text.encode())


def brute_force(
    token_ids: list[int], stop: list[str], *, include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Decodes every prefix of the tokens anew and looks at every end of it, one character after another."""
    length = 0
    for count in range(1, len(token_ids) + 1):
        whole = TOKENIZER.decode(token_ids[:count]).rstrip("\ufffd")
        for end in range(length + 1, len(whole) + 1):
            for stop_string in stop:
                if count > min_tokens and whole[:end].endswith(stop_string):
                    return whole[: end if include else end - len(stop_string)], stop_string, count
        length = len(whole)
    return TOKENIZER.decode(token_ids), None, len(token_ids)


@settings(max_examples=500, deadline=None)
@given(
    token_ids=outputs,
    stop=stop_strings,
    include=st.booleans(),
    min_tokens=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_stop_strings_equal_brute_force(token_ids, stop, include, min_tokens, seed):
    output = start(TOKENIZER, stop, include=include, min_tokens=min_tokens)
    got = run(output, split(random.Random(seed), token_ids))
    assert got == brute_force(token_ids, stop, include=include, min_tokens=min_tokens)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(alphabet="ab", max_size=6), max_size=10), stop=stop_strings.filter(bool))
def test_no_more_is_held_back_than_may_begin_a_stop_string(texts, stop):
    matcher, whole, seen = StopMatcher(stop, include_stop_str=False), "", ""
    for text in texts:
        whole += text
        given_out = matcher.append(text, may_stop=False)
        assert isinstance(given_out, str)
        seen += given_out
        held = max((n for s in stop for n in range(len(s)) if whole.endswith(s[:n])), default=0)
        assert seen == whole[: len(whole) - held]
    assert seen + matcher.finish() == whole


def test_stop_string_across_tokens_and_deltas():
    output = start(TOKENIZER, ["lo w"])
    assert output.append(text_of("hel")).text == "he"
    delta = output.append(text_of("lo world"))
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("l", "lo w", 4)


def test_only_what_may_begin_a_stop_string_is_held_back():
    output = start(TOKENIZER, ["END"])
    assert output.append(text_of("an E")).text == "an "
    assert output.append(text_of("NTER")).text == "ENTER"
    assert output.append(text_of("EN")).text == ""
    assert output.finish(stop_token=True) == "EN"


def test_included_stop_string_ends_the_text_and_nothing_is_held_back():
    output = start(TOKENIZER, ["END"], include=True)
    assert output.append(text_of("an EN")).text == "an EN"
    delta = output.append(text_of("D of"))
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("D", "END", 1)


def test_text_behind_the_match_within_a_token_is_cut():
    for include, expected in ((False, ""), (True, "a")):
        delta = start(TOKENIZER, ["a"], include=include).append([word(2), word(0)])
        assert (delta.text, delta.stop_string, delta.num_tokens) == (expected, "a", 1)


def test_match_that_completes_first_wins_then_the_order_of_the_list():
    assert run(start(TOKENIZER, ["bcd", "c"]), [text_of("abcd")]) == ("ab", "c", 3)
    assert run(start(TOKENIZER, ["c", "bc"]), [text_of("abcd")]) == ("ab", "c", 3)
    assert run(start(TOKENIZER, ["bc", "c"]), [text_of("abcd")]) == ("a", "bc", 3)
    # The one that begins first completes last.
    assert run(start(TOKENIZER, ["aab", "a"]), [[word(2)]]) == ("", "a", 1)


def test_stop_string_of_characters_that_take_several_tokens():
    assert run(start(TOKENIZER, ["é中"]), [[token_id] for token_id in text_of("xé中y")]) == ("x", "é中", 6)


def test_stop_string_may_end_before_a_combining_character():
    decomposed = "cafe\u0301s"
    # A stop string is characters, not what a reader sees as one.
    assert run(start(TOKENIZER, ["e"]), [text_of(decomposed)]) == ("caf", "e", 4)
    assert run(start(TOKENIZER, ["e\u0301"]), [[t] for t in text_of(decomposed)]) == ("caf", "e\u0301", 6)
    assert run(start(TOKENIZER, ["\u00e9"]), [text_of(decomposed)]) == (decomposed, None, 7)


def test_stop_string_longer_than_the_output():
    output = start(TOKENIZER, ["abcdefghij" * 20])
    assert output.append(text_of("xabcdefghij")).text == "x"
    assert output.append(text_of("abc")).text == ""
    assert output.finish(stop_token=False) == "abcdefghijabc"


def test_stop_string_counts_from_the_token_behind_min_tokens():
    for min_tokens, expected in ((2, ("ab", "c", 3)), (3, ("abcab", "c", 6)), (6, ("abcabc", None, 6))):
        for chunks in ([text_of("abcabc")], [[token_id] for token_id in text_of("abcabc")]):
            assert run(start(TOKENIZER, ["c"], min_tokens=min_tokens), chunks) == expected
    # It may begin before that token.
    assert run(start(TOKENIZER, ["abc"], min_tokens=2), [text_of("abc")]) == ("", "abc", 3)
    # Special tokens count as tokens.
    assert run(start(TOKENIZER, ["c"], min_tokens=2), [[1, 1, *text_of("c")]]) == ("", "c", 3)


def test_a_stop_string_given_out_before_min_tokens_is_not_found_later():
    output = start(TOKENIZER, ["ab", "abab"], min_tokens=2)
    assert output.append(text_of("ab")).text == ""
    assert output.append(text_of("x")).text == "abx"
    assert output.finish(stop_token=False) == ""


def test_thousands_of_tokens_at_once():
    delta = start(TOKENIZER, ["END", "E" * 256]).append(text_of("EN" * 5000 + "END and more"))
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("EN" * 5000, "END", 10003)


def test_repetition_of_a_stop_strings_beginning():
    text = "a" * 300
    assert run(start(TOKENIZER, ["a" * 256]), [text_of(text)]) == ("", "a" * 256, 256)
    assert run(start(TOKENIZER, ["a" * 256 + "b"]), [text_of(text)]) == (text, None, 300)


def test_empty_deltas_are_no_trouble():
    output = start(TOKENIZER, ["stop"])
    assert output.append([]).text == ""
    assert output.append([1]).text == ""
    assert output.append(text_of("st")).text == ""
    assert output.append([]).text == ""
    assert output.finish(stop_token=False) == "st"
    assert start(TOKENIZER).finish(stop_token=True) == ""


def test_unfinished_character_comes_behind_what_was_held_back():
    output = start(TOKENIZER, ["stop"])
    assert output.append([*text_of("st"), BYTE_OFFSET + 0xE4]).text == ""
    assert output.finish(stop_token=False) == "st\ufffd"
