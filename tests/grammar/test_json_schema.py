"""What of a JSON schema is accepted: every keyword that is held to, and no other, named with its place."""

import json

import pytest

from engine_svc.grammar.json_schema import SUPPORTED_KEYWORDS, check_schema, nesting, parse_json
from shared.errors import InvalidRequestError
from tests.support.json_schemas import SCHEMAS


def test_there_are_a_hundred_schemas():
    assert len(SCHEMAS) == 100


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_like_those_that_people_send_are_accepted(name):
    check_schema(parse_json(json.dumps(SCHEMAS[name]), "json_schema"))


def keywords(value):
    if isinstance(value, dict):
        yield from value
        for child in value.values():
            yield from keywords(child)
    elif isinstance(value, list):
        for child in value:
            yield from keywords(child)


def test_the_schemas_use_every_keyword_that_constrains():
    said_nothing = {"$schema", "$comment", "deprecated", "readOnly", "writeOnly"}
    used = {keyword for schema in SCHEMAS.values() for keyword in keywords(schema)}
    assert used >= SUPPORTED_KEYWORDS - said_nothing


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "then", "else", "contains", "minContains", "uniqueItems", "propertyNames", "dependentRequired"),
        *("unevaluatedProperties", "dependentSchemas", "contentEncoding", "nullable", "x-guidance", "$dynamicRef"),
        *("additionalItems", "$anchor", "discriminator", "dependencies", "minimun"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_keywords_are_named_with_their_place(keyword, nested):
    schema = {"type": "string", keyword: True}
    path = f"#/{keyword}"
    if nested:
        schema = {"anyOf": [{"type": "null"}, {"type": "array", "items": schema}]}
        path = f"#/anyOf/1/items/{keyword}"
    with pytest.raises(InvalidRequestError, match="supported keywords") as caught:
        check_schema(schema)
    assert f"got {keyword!r} at {path}" in caught.value.message
    assert caught.value.field == "structured_output.json_schema"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"minimum": "3"}, "#/minimum must be a number"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum must be a number"),
        ({"multipleOf": 0}, "#/multipleOf must be a number, above 0"),
        ({"maxLength": -1}, "#/maxLength must be a whole number of at least 0"),
        ({"minItems": 1.5}, "#/minItems must be a whole number"),
        ({"items": [{"type": "string"}]}, "#/items must be a schema, got a list"),
        ({"anyOf": []}, "#/anyOf must be a list of schemas, not empty"),
        ({"properties": {"a": 3}}, "#/properties must be schemas by name"),
        ({"required": "a"}, "#/required must be a list of strings"),
        ({"enum": []}, "#/enum must be a list that is not empty"),
        ({"format": "regex"}, "#/format must be one of date"),
        ({"$ref": "https://example.com/schema"}, "#/$ref must be a place in the same schema"),
        ({"properties": {"a": {"$id": "x"}}}, "got '$id' at #/properties/a/$id"),
        ([], "must be an object or a boolean, got a list"),
        (3, "must be an object or a boolean, got a number"),
    ],
)
def test_arguments_of_the_wrong_form_are_refused(schema, said):
    with pytest.raises(InvalidRequestError) as caught:
        check_schema(schema)
    assert said in caught.value.message


def test_names_of_properties_are_no_keywords():
    check_schema({"properties": {"not": {"type": "string"}, "if": True}, "required": ["not"]})
    check_schema({"enum": [{"uniqueItems": 1}], "const": {"uniqueItems": 1}, "default": {"not": 1}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("{'a': 1}", "must be JSON"),
        ('{"minimum": NaN}', "NaN, which JSON does not know"),
        ('{"a": 1, "a": 2}', "a name twice"),
        ('{"items":' * 65 + "{}" + "}" * 65, "nested at most 64 deep, got 66"),
        ("[" * 100_000, "nested at most 64 deep"),
    ],
)
def test_texts_that_are_no_json_are_refused(text, said):
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(text, "json_schema")
    assert said in caught.value.message


def test_nesting_counts_lists_and_objects():
    assert [nesting(value) for value in (1, [], [1], {"a": []}, {"a": [[1]], "b": 2})] == [0, 1, 1, 2, 3]
    assert parse_json('{"items":' * 63 + "{}" + "}" * 63, "json_schema")
