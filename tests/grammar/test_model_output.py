"""Constrained answers of the embedded model at temperature 1: whatever ends by itself is what was asked for."""

import datetime as dt
import json
import re

import jsonschema
import pytest

from engine_svc.model.load import LoadOptions, load_model
from shared.types import FinishReason
from tests.support.constrained_runs import Wanted, run_wanted
from tests.support.embedded_models import embedded_model
from tests.support.grammars import spec
from tests.support.json_schemas import SCHEMAS

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


@pytest.fixture(scope="module")
def folder():
    return embedded_model("smollm2")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(LoadOptions(model=str(folder)))


FORMATS = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "uuid"])


@FORMATS.checks("time", raises=ValueError)
def is_time(value):
    # Python knows no leap seconds.
    return not isinstance(value, str) or bool(dt.time.fromisoformat(value.upper().replace(":60", ":59")))


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(value):
    return not isinstance(value, str) or bool(dt.datetime.fromisoformat(value.upper().replace(":60", ":59")))


@FORMATS.checks("hostname")
def is_hostname(value):
    label = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return not isinstance(value, str) or bool(re.fullmatch(rf"{label}(\.{label})*", value))


def test_a_hundred_schemas(model, folder):
    """Answers that end in stop validate, all of them; at least 90 of the 100 end so."""
    wanted = [
        Wanted(f"Give an example of {name} as JSON.", spec("json_schema", json.dumps(schema)))
        for name, schema in SCHEMAS.items()
    ]
    answers = run_wanted(model, folder, wanted, max_tokens=128)
    stopped = 0
    for (name, schema), answer in zip(SCHEMAS.items(), answers, strict=True):
        assert answer.reason in (STOP, LENGTH), f"{name}: {answer}"
        if answer.reason is STOP:
            stopped += 1
            value = json.loads(answer.text)
            errors = list(jsonschema.Draft202012Validator(schema, format_checker=FORMATS).iter_errors(value))
            assert not errors, f"{name}: {answer.text!r}: {errors[0].message}"
    print(f"{stopped} of {len(SCHEMAS)} answers ended in stop")
    assert stopped >= 90


REGEXES = [
    "yes|no|maybe",
    "[0-9]{4}",
    r"\d{3}-\d{4}",
    "[A-Z][a-z]{2,10}",
    r"[a-z]{1,8}@[a-z]{1,8}\.(com|org|net)",
    "#[0-9a-fA-F]{6}",
    r"(\d{1,3}\.){3}\d{1,3}",
    "[01]{8}",
    "(north|south)-(east|west)",
    r"\$[1-9][0-9]{0,3}\.[0-9]{2}",
    "[A-Z]{3}-[0-9]{3}",
    "(ha){1,5}",
    "a?b?c?d",
    r"v[0-9]+\.[0-9]{1,2}(-(alpha|beta))?",
    r"[^\n\"]{3,20}\.",
    r"[a-zA-Z]{2,8} [a-zA-Z]{2,8}",
    "(Mon|Tue|Wed|Thu|Fri)(, (Mon|Tue|Wed|Thu|Fri)){0,2}",
    "[+-]?[0-9]{1,6}",
    r"\([0-9]{1,2}, [0-9]{1,2}\)",
    "(0|[1-9][0-9]{0,2})%",
    r"<b>[a-z ]{1,12}</b>",
    "[aeiou]{3,6}",
    "^[A-Z]{2}[0-9]{2}$",
    r"\[[0-9](,[0-9]){1,4}\]",
    "(?i:hello|bye)",
    r"/[a-z]{1,6}(/[a-z]{1,6}){0,2}",
    "[一-龥]{2,4}",
    "(é|ü|ß){2,4}",
    r"Q[1-4] 20[0-9]{2}",
    r"The answer is [0-9]{1,3}\.",
]

# Lark or GBNF, and the regular language that it is.
GRAMMARS = [
    ('start: "left" | "right"', "left|right"),
    ('start: word (" " word)~2\nword: /[a-z]{2,5}/', "[a-z]{2,5}( [a-z]{2,5}){2}"),
    ('start: sum\nsum: NUMBER OP NUMBER\nNUMBER: /[0-9]{1,3}/\nOP: "+" | "-"', r"[0-9]{1,3}[+-][0-9]{1,3}"),
    ('start: "[" item ("," item)~0..3 "]"\nitem: "x" | "y"', r"\[[xy](,[xy]){0,3}\]"),
    ('start: "SELECT " COL " FROM " COL ";"\nCOL: /[a-z]{1,8}/', "SELECT [a-z]{1,8} FROM [a-z]{1,8};"),
    (
        'start: key "=" value\nkey: /[a-z]{1,6}/\nvalue: "true" | "false" | /[0-9]{1,2}/',
        "[a-z]{1,6}=(true|false|[0-9]{1,2})",
    ),
    ('root ::= "yes" | "no"', "yes|no"),
    ('root ::= digit digit ":" digit digit\ndigit ::= [0-9]', "[0-9]{2}:[0-9]{2}"),
    (
        'root ::= greeting ", " name "!"\ngreeting ::= "Hello" | "Good day"\nname ::= "Ann" | "Bob"',
        "(Hello|Good day), (Ann|Bob)!",
    ),
    ('root ::= ("a" | "b") ("a" | "b") ("a" | "b")?', "[ab]{2,3}"),
]
CHOICES = [
    ["positive", "negative", "neutral"],
    ["Paris", "Paris, France", "London"],
    ['with "quotes"', "with\nline", "with \\ backslash"],
    ["a", "aa", "aaa"],
]


def test_thirty_regexes_ten_grammars_and_choices(model, folder):
    wanted = [Wanted("Answer in the right form.", spec("regex", regex)) for regex in REGEXES]
    wanted += [Wanted("Answer in the right form.", spec("grammar", text)) for text, _ in GRAMMARS]
    wanted += [Wanted("Choose one.", spec("choice", json.dumps(choices))) for choices in CHOICES]
    languages = [*REGEXES, *(language for _, language in GRAMMARS), *("|".join(map(re.escape, c)) for c in CHOICES)]
    answers = run_wanted(model, folder, wanted, max_tokens=64)
    stopped = 0
    for language, answer in zip(languages, answers, strict=True):
        assert answer.reason in (STOP, LENGTH), f"{language}: {answer}"
        if answer.reason is STOP:
            stopped += 1
            assert re.fullmatch(language, answer.text), f"{language}: {answer.text!r}"
    assert stopped >= len(languages) - 2


@pytest.mark.parametrize("batches", [1, 2])
def test_64_constrained_and_free_requests_in_one_batch(model, folder, batches):
    """Every fourth is free, every sixteenth has a grammar that fails; each gets what it asked for."""
    wanted = []
    for index in range(64):
        if index % 16 == 5:
            constraint = spec("regex", "(" * index)
        elif index % 4 == 0:
            constraint = None
        else:
            constraint = spec("regex", f"item {index}: [a-z]{{1,6}}")
        wanted.append(Wanted("Name something.", constraint))
    answers = run_wanted(model, folder, wanted, max_tokens=24, batches=batches)
    for index, (one, answer) in enumerate(zip(wanted, answers, strict=True)):
        if index % 16 == 5:
            assert answer.reason is ERROR
            assert "structured_output.regex" in answer.error
        elif one.spec is None:
            assert answer.reason in (STOP, LENGTH)
            assert answer.text
        elif answer.reason is STOP:
            assert re.fullmatch(one.spec.spec, answer.text), answer
        else:
            assert answer.reason is LENGTH
    constrained = [a for a, one in zip(answers, wanted, strict=True) if one.spec is not None and a.reason is not ERROR]
    assert sum(answer.reason is STOP for answer in constrained) > len(constrained) * 3 // 4
