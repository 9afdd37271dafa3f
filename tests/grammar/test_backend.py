"""Compiling beside the core: what can be compiled, what is refused, and that nothing that is refused does harm."""

import json
import time

import numpy as np
import pytest

from engine_svc.grammar import trial_process
from shared.errors import InvalidRequestError
from tests.support.byte_tokenizer import EOS_TOKEN_ID, NUM_SPECIAL, VOCAB_SIZE, encode_bytes, write_byte_model
from tests.support.grammars import Compilations, make_backend, spec

WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def compilations(folder):
    backend = make_backend(folder, VOCAB_SIZE)
    yield Compilations(backend)
    backend.shutdown()


def allowed(matcher):
    """The characters that may come next, and whether the output may end."""
    words = np.zeros(WORDS, np.int32)
    may_end = matcher.fill_bitmask(words)
    tokens = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    assert all(token >= NUM_SPECIAL for token in tokens), "special tokens are no text"
    return "".join(sorted(chr(token - NUM_SPECIAL) for token in tokens)), may_end


def accepts(matcher, text):
    return all(matcher.accept_token(token) for token in encode_bytes(text)) and allowed(matcher)[1]


# --- what grammars mean -----------------------------------------------------------------------------------------------


def test_a_matcher_follows_its_grammar(compilations):
    matcher = compilations.compile(spec("regex", "ab?c*")).matcher
    assert allowed(matcher) == ("a", False)
    assert not matcher.is_complete
    assert matcher.accept_token(encode_bytes("a")[0])
    assert allowed(matcher) == ("bc", True)
    assert not matcher.accept_token(encode_bytes("x")[0])


def test_end_tokens_are_never_part_of_the_text(compilations):
    matcher = compilations.compile(spec("choice", '["a"]')).matcher
    assert accepts(matcher, "a")
    assert matcher.is_complete
    assert allowed(matcher) == ("", True)
    assert not matcher.accept_token(EOS_TOKEN_ID)


TAGS = {
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"const": "x"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[a-c]{2}", ["ab", "cc"], ["a", "abc", "ad"]),
        ("regex", "^ab|cd$", ["ab", "cd"], ["abcd"]),
        ("choice", '["yes", "no", "yes, but"]', ["yes", "no", "yes, but"], ["ye", "maybe"]),
        ("choice", json.dumps(['a "b"', "c\\d", "e\nf", "\u00e9"]), ['a "b"', "c\\d", "e\nf", "\u00e9"], ["\\u00e9"]),
        ("json_object", "", ["{}", '{"a": [1, null]}'], ["[]", "1", "{"]),
        ("json_schema", "true", ["1", '"a"', "{}"], ["x"]),
        ("grammar", 'start: "a" b*\nb: "b" | "c"', ["a", "abc"], ["b"]),
        ("grammar", 'root ::= "a" b\nb ::= "b" | "c" b', ["ab", "accb"], ["a", "b"]),
        ("structural_tag", json.dumps(TAGS), ["", "free", "see <f=one>12</f> and", '<f=two>"x"</f>'], ["<f=one>x</f>"]),
        ("structural_tag", json.dumps(TAGS), ["a < b"], ["<f=three>1</f>", "<f=two>1</f>"]),
    ],
)
def test_kinds_mean_what_they_say(compilations, kind, text, good, bad):
    for one in good:
        assert accepts(compilations.compile(spec(kind, text)).matcher, one), one
    for one in bad:
        assert not accepts(compilations.compile(spec(kind, text)).matcher, one), one


def test_blanks_between_parts_are_bounded(compilations):
    wanted = spec("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 2}')
    assert accepts(compilations.compile(wanted).matcher, "[1,\n" + " " * 19 + "2]")
    assert not accepts(compilations.compile(wanted).matcher, "[1,\n" + " " * 20 + "2]")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(((", "structured_output.regex must be one that can be compiled"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "[^\\s\\S]", "structured_output.regex"),
        ("grammar", "start: undefined_rule", "structured_output.grammar must be one that can be compiled"),
        ("grammar", 'start: "a', "structured_output.grammar"),
        ("grammar", "start: start", "structured_output.grammar"),
        ("choice", "[]", "structured_output.choice must be a list of strings"),
        ("choice", '["a", 1]', "structured_output.choice must be a list of strings"),
        ("choice", "red, green", "structured_output.choice must be JSON"),
        ("json_schema", "{", "structured_output.json_schema must be JSON"),
        ("json_schema", '{"type": "text"}', "structured_output.json_schema must be one that can be compiled"),
        ("json_schema", '{"not": {}}', "got 'not' at #/not"),
        ("json_schema", "false", "structured_output.json_schema"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength (3) is greater"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}', "oneOf"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "structured_output.json_schema"),
        ("structural_tag", "{}", "structured_output.structural_tag must have 1 to 128 structures"),
        ("structural_tag", '{"format": {}}', "structured_output.structural_tag with a format is not built"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": ""}], "triggers": ["<a"]}',
            "structures[0].schema must use supported keywords only, got 'not' at #/not",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why(compilations, kind, text, said):
    answer = compilations.compile(spec(kind, text))
    assert answer.matcher is None
    assert said in answer.error.message
    assert answer.error.code in (3, 12)
    assert answer.error.field.startswith("structured_output")
    assert "\n" not in answer.error.message


def test_a_model_without_a_tokenizer_says_so(tmp_path):
    backend = make_backend(tmp_path, VOCAB_SIZE)
    try:
        answer = Compilations(backend).compile(spec("regex", "a"))
        assert isinstance(answer.error, InvalidRequestError)
        assert answer.error.message.endswith("got a model without tokenizer.json")
    finally:
        backend.shutdown()


# --- bombs ------------------------------------------------------------------------------------------------------------


def array_of(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "minItems": 1000, "maxItems": 1000, "items": schema}
    return json.dumps(schema)


def chain(length):
    rules = "".join(f'r{index}: r{index + 1} r{index + 1} | "a"\n' for index in range(length))
    return f'start: r0\n{rules}r{length}: "b"\n'


BOMBS = {
    "exponential regex": ("regex", "(a|a)*(a|aa)+b" * 20),
    "regex whose automaton explodes": ("regex", "(.*a.{300})|(.*b.{400})"),
    "repeats of repeats": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "repeats of anything": ("regex", "(.{0,1000}x){0,1000}"),
    "a million of a class": ("regex", r"[\w\d]{1000000}"),
    "brackets": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "thousands of alternatives": ("regex", "|".join(f"w{index}.*" for index in range(5000))),
    "intersections": ("grammar", "start: A\nA: /(.*a.{12})/ & /(.*b.{17})/ & ~/(.*c.{9})/\n"),
    "rules in brackets": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "a chain of rules": ("grammar", chain(1500)),
    "repeated rules": ("grammar", 'start: a{1000000}\na: "x" b{1000000}\nb: "y"{1000000}'),
    "ambiguous rules": ("grammar", 'start: s\ns: s s | s s s | "a" | '),
    "a rewriting bomb": ("grammar", "root ::= " + '"a" (' * 60 + '"b"' + ")*" * 60),
    "deep nesting": ("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
    "arrays of arrays": ("json_schema", array_of(4)),
    "a huge enum": ("json_schema", json.dumps({"enum": [f"v{index}" for index in range(6000)]})),
    "a huge object": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}})),
    "references to itself": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}',
    ),
    "all of any": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": True}} for j in range(4)]} for i in range(12)]}),
    ),
    "counts beyond sense": ("json_schema", '{"type": "string", "minLength": 100000000, "maxLength": 1000000000}'),
    "patterns": ("json_schema", r'{"type": "string", "pattern": "^(a+)+$|^(.*?,){50}P", "maxLength": 500}'),
}


@pytest.fixture(scope="module")
def bombed(folder):
    backend = make_backend(folder, VOCAB_SIZE, compile_timeout=20.0)
    yield Compilations(backend)
    backend.shutdown()


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_harms_the_engine(bombed, name):
    answer = bombed.compile(spec(*BOMBS[name]))
    if answer.matcher is None:
        assert isinstance(answer.error, InvalidRequestError), answer.error
        return
    # What was compiled goes on within its limits, or says that it does not.
    longest = 0.0
    for index in range(40):
        words = np.zeros(WORDS, np.int32)
        started = time.perf_counter()
        try:
            answer.matcher.fill_bitmask(words)
        except InvalidRequestError:
            break
        longest = max(longest, time.perf_counter() - started)
        tokens = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
        if not len(tokens):
            break
        if not answer.matcher.accept_token(int(tokens[index * 7919 % len(tokens)])):
            break
    assert longest < 5.0


def test_a_grammar_that_kills_its_process_is_refused_alone(folder):
    backend = make_backend(folder, VOCAB_SIZE)
    compilations = Compilations(backend)
    try:
        dead = compilations.compile(spec("grammar", chain(3000)))
        assert isinstance(dead.error, InvalidRequestError)
        assert dead.error.reason in ("GRAMMAR_LIMIT", "GRAMMAR_NOT_COMPILED")
        assert compilations.compile(spec("regex", "a")).matcher is not None
    finally:
        backend.shutdown()


def test_a_grammar_that_takes_too_long_is_refused_in_time(folder):
    backend = make_backend(folder, VOCAB_SIZE, compile_timeout=0.001)
    compilations = Compilations(backend)
    try:
        answer = compilations.compile(spec(*BOMBS["a huge object"]))
        assert (
            answer.error.message == "structured_output.json_schema must compile within 0.001 s, got one that does not"
        )
        assert answer.error.reason == "GRAMMAR_TIMEOUT"
        # What took too long once may do well on a quieter machine.
        assert backend.cached_bytes == 0
    finally:
        backend.shutdown()


# --- cache, cancelling, end -------------------------------------------------------------------------------------------


def test_equal_grammars_are_compiled_once(folder):
    backend = make_backend(folder, VOCAB_SIZE)
    compilations = Compilations(backend)
    try:
        for ticket in range(8):
            backend.compile(ticket, spec("regex", "ab"))
        answers = []
        while len(answers) < 8:
            answers += compilations.take(wait=True)
        assert sorted(answer.ticket for answer in answers) == list(range(8))
        assert answers[0].matcher.accept_token(encode_bytes("a")[0])
        assert allowed(answers[1].matcher) == ("a", False), "each has a place of its own"
        size = backend.cached_bytes
        assert size > 0
        compilations.compile(spec("regex", "ab"))
        assert backend.cached_bytes == size
    finally:
        backend.shutdown()


def test_the_cache_stays_within_its_bytes(folder):
    backend = make_backend(folder, VOCAB_SIZE, cache_bytes=500_000)
    compilations = Compilations(backend)
    try:
        for index in range(12):
            assert compilations.compile(spec("regex", f"a{index}")).matcher is not None
            assert 0 < backend.cached_bytes <= 500_000
        # One that alone is over the bytes is compiled and not kept.
        big = json.dumps([f"choice number {index}" for index in range(3000)])
        assert compilations.compile(spec("choice", big)).matcher is not None
        assert backend.cached_bytes <= 500_000
    finally:
        backend.shutdown()


def test_what_nobody_wants_is_not_answered(folder):
    backend = make_backend(folder, VOCAB_SIZE, max_compiling=1)
    compilations = Compilations(backend)
    try:
        backend.compile(1, spec("regex", "a"))
        backend.compile(2, spec("regex", "b"))
        backend.cancel(2)
        backend.cancel(2)
        backend.cancel(99)
        backend.compile(3, spec("regex", "b"))
        answers = compilations.take(wait=True)
        while len(answers) < 2:
            answers += compilations.take(wait=True)
        assert [answer.ticket for answer in answers] == [1, 3]
    finally:
        backend.shutdown()


def test_shutdown_ends_the_processes_at_once(folder):
    backend = make_backend(folder, VOCAB_SIZE)
    compilations = Compilations(backend)
    compilations.compile(spec("regex", "a"))
    (trial,) = backend._trials
    process = trial._process
    backend.compile(7, spec(*BOMBS["a huge object"]))
    backend.shutdown()
    backend.shutdown()
    assert process.poll() is not None
    # An engine that shuts down answers nobody, and takes nothing new.
    backend.compile(8, spec("regex", "b"))


def test_the_process_ends_with_its_engine(folder):
    trial = trial_process.TrialProcess([str(folder), str(VOCAB_SIZE), str(EOS_TOKEN_ID)])
    trial.compile(spec("regex", "a"), "regex", 60.0)
    process = trial._process
    process.stdin.close()
    assert process.wait(60.0) == 0
    trial.close()
