"""A hundred JSON schemas like those that people send, by name: forms, events, settings, calls of tools.

Each is bounded, so that an answer fits into a few hundred tokens. Together they use every supported keyword.
"""

from typing import Any

Schema = dict[str, Any]


def obj(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> Schema:
    """An object of named properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def text(longest: int = 24, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def whole(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def number(least: float, most: float, **more: Any) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, **more}


def several(items: Any, least: int = 1, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def pattern(expression: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": expression, **more}


def formatted(name: str) -> Schema:
    return {"type": "string", "format": name}


FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ADDRESS = obj({"street": text(20), "city": text(16), "zip": pattern("^[0-9]{5}$")})
PRICE = obj({"amount": number(0, 9999), "currency": {"enum": ["EUR", "USD", "GBP"]}})

SCALARS: dict[str, Any] = {
    "short string": text(12, minLength=1),
    "exact length": {"type": "string", "minLength": 6, "maxLength": 6},
    "small integer": whole(1, 10),
    "negative integer": whole(-50, -1),
    "open integer above": {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1000},
    "probability": number(0, 1),
    "open number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    "temperature": number(-40.5, 60.5),
    "even": whole(0, 100, multipleOf=2),
    "price in quarters": number(0, 100, multipleOf=0.25),
    "boolean": FLAG,
    "null": NULL,
    "string or null": {"type": ["string", "null"], "maxLength": 10},
    "integer or boolean": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 99},
    "enum of strings": {"enum": ["low", "medium", "high"]},
    "enum of mixed values": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "const string": {"const": "fixed"},
    "const object": {"const": {"kind": "ping", "values": [1, 2.5, None]}},
    "enum with escapes": {"enum": ['a "quoted" word', "back\\slash", "line\nbreak", "caf\u00e9", "\u4e2d\u6587"]},
    "annotated": {"title": "T", "description": "D", "default": "x", "examples": ["y"], **text(8)},
}

STRINGS: dict[str, Any] = {
    "pattern of a plate": pattern("^[A-Z]{2}-[0-9]{3}$"),
    "pattern with choice": pattern("^(cat|dog|bird)s?$"),
    "pattern of a version": pattern(r"^v[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,3}$"),
    "pattern of hex": pattern("^#[0-9a-f]{6}$"),
    "pattern with length": pattern("^[a-z]+$", minLength=3, maxLength=9),
    "pattern that is not anchored": pattern("[0-9]{2}", maxLength=12),
    "pattern with quotes": pattern('^"[a-z]{1,5}"$'),
    "pattern with a class of words": pattern(r"^\w{2,8}$"),
    "date": formatted("date"),
    "time": formatted("time"),
    "date-time": formatted("date-time"),
    "uuid": formatted("uuid"),
    "ipv4": formatted("ipv4"),
    "email of bounded length": {"type": "string", "format": "email", "maxLength": 30},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 20},
}

ARRAYS: dict[str, Any] = {
    "integers": several(whole(0, 99), 2, 5),
    "strings": several(text(10), 1, 4),
    "exactly three": several(number(-1, 1), 3, 3),
    "possibly empty": several(FLAG, 0, 3),
    "matrix": several(several(whole(0, 9), 2, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [text(8), whole(0, 9)], "items": False, "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [text(8)], "items": whole(0, 9), "minItems": 2, "maxItems": 4},
    "enums": several({"enum": ["read", "write", "delete"]}, 1, 3),
    "of either": several({"anyOf": [whole(0, 99), text(6)]}, 2, 4),
    "of objects": several(obj({"id": whole(1, 999), "name": text(12)}), 1, 3),
    "of nullable": several({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, 2, 4),
    "of dates": several(formatted("date"), 1, 2),
}

OBJECTS: dict[str, Any] = {
    "person": obj({"name": text(20), "age": whole(0, 120)}),
    "person with optional parts": obj({"name": text(20)}, {"age": whole(0, 120), "email": text(20)}),
    "address": ADDRESS,
    "nested twice": obj({"person": obj({"name": text(16), "address": ADDRESS})}),
    "nested four deep": obj({"a": obj({"b": obj({"c": obj({"d": whole(0, 9)})})})}),
    "order": obj({"id": pattern("^[A-Z]{3}[0-9]{4}$"), "items": several(obj({"sku": text(8), "count": whole(1, 9)}))}),
    "price": PRICE,
    "product": obj({"title": text(20), "price": PRICE, "tags": several(text(8), 0, 3)}),
    "event": obj({"name": text(20), "date": formatted("date"), "online": FLAG}),
    "log record": obj({"level": {"enum": ["debug", "info", "error"]}, "message": text(30), "code": whole(0, 999)}),
    "point": obj({"x": number(-10, 10), "y": number(-10, 10)}),
    "colour": obj({"r": whole(0, 255), "g": whole(0, 255), "b": whole(0, 255)}),
    "sentiment": obj({"label": {"enum": ["positive", "negative", "neutral"]}, "score": number(0, 1)}),
    "settings": obj({"theme": {"enum": ["dark", "light"]}, "size": whole(8, 32), "beta": FLAG}),
    "movie": obj({"title": text(24), "year": whole(1900, 2030), "genres": several(text(10), 1, 2)}),
    "question": obj({"question": text(30), "options": several(text(12), 2, 3), "answer": whole(0, 2)}),
    "keys with blanks": obj({"first name": text(10), "last name": text(10)}),
    "keys with escapes": obj({'a "b"': whole(0, 9), "c\\d": FLAG}),
    "counts by name": {"type": "object", "additionalProperties": whole(0, 9), "minProperties": 1, "maxProperties": 3},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": whole(0, 9)},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "one of a kind, open": {"type": "object", "properties": {"id": whole(1, 9)}, "additionalProperties": text(6)},
    "all optional": obj({}, {"a": whole(0, 9), "b": text(6), "c": FLAG}),
    "address in lines": obj({"lines": several(text(16), 1, 3), "country": pattern("^[A-Z]{2}$")}),
    "meeting": obj({"topic": text(20), "start": formatted("time"), "guests": several(text(10), 1, 3)}),
    "measurement": obj({"value": number(0, 100), "unit": {"enum": ["kg", "m", "s"]}, "error": number(0, 1)}),
}

LISTED: Schema = {
    "type": "object",
    "properties": {"value": whole(0, 9), "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
LEAF = obj({"leaf": whole(0, 9)})
TREE = {"anyOf": [LEAF, obj({"children": several({"$ref": "#/$defs/tree"}, 1, 2)})]}

COMBINED: dict[str, Any] = {
    "either type": {"anyOf": [whole(0, 99), text(8)]},
    "either object": {"anyOf": [obj({"cat": text(8)}), obj({"dog": text(8)})]},
    "one of types": {"oneOf": [whole(0, 99), text(8), NULL]},
    "one of kinds": {"oneOf": [obj({"kind": {"const": "circle"}, "r": number(0, 9)}), obj({"kind": {"const": "dot"}})]},
    "one of ranges": {"oneOf": [{"const": "none"}, several(whole(0, 9), 1, 2)]},
    "both ranges": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 50}]},
    "both objects": {
        "allOf": [
            {"type": "object", "properties": {"a": whole(0, 9)}, "required": ["a"]},
            {"type": "object", "properties": {"b": text(6)}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "either with a common part": {
        "type": "object",
        "properties": {"id": whole(1, 99), "extra": {"anyOf": [text(6), FLAG]}},
        "required": ["id", "extra"],
        "additionalProperties": False,
    },
    "defined twice": {
        "$defs": {"name": text(10)},
        **obj({"a": {"$ref": "#/$defs/name"}, "b": {"$ref": "#/$defs/name"}}),
    },
    "old definitions": {"definitions": {"age": whole(0, 99)}, **obj({"age": {"$ref": "#/definitions/age"}})},
    "defined object": {
        "$defs": {"price": PRICE},
        **obj({"net": {"$ref": "#/$defs/price"}, "gross": {"$ref": "#/$defs/price"}}),
    },
    "linked list": {"$defs": {"node": LISTED}, "$ref": "#/$defs/node"},
    "tree": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    "comment with replies": {
        "$defs": {"comment": obj({"text": text(10)}, {"replies": several({"$ref": "#/$defs/comment"}, 0, 1)})},
        "$ref": "#/$defs/comment",
    },
    "reference with a narrower range": {"$defs": {"n": whole(0, 99)}, "$ref": "#/$defs/n", "maximum": 9},
}

CALLS: dict[str, Any] = {
    f"call of {name}": obj({"name": {"const": name}, "arguments": arguments})
    for name, arguments in {
        "get_weather": obj({"city": text(14), "unit": {"enum": ["C", "F"]}}),
        "search": obj({"query": text(24)}, {"limit": whole(1, 50)}),
        "send_mail": obj({"to": {"type": "string", "format": "email", "maxLength": 24}, "subject": text(20)}),
        "book_table": obj({"date": formatted("date"), "time": formatted("time"), "people": whole(1, 8)}),
        "set_alarm": obj(
            {"hour": whole(0, 23), "minute": whole(0, 59), "days": several({"enum": ["mon", "tue"]}, 0, 2)}
        ),
        "translate": obj({"text": text(24), "from": pattern("^[a-z]{2}$"), "to": pattern("^[a-z]{2}$")}),
        "convert": obj({"value": number(0, 1000), "from": text(4), "to": text(4)}),
        "play": obj({"track": text(18)}, {"shuffle": FLAG, "volume": whole(0, 10)}),
        "route": obj({"stops": several(obj({"lat": number(-90, 90), "lon": number(-180, 180)}), 2, 2)}),
        "create_user": obj(
            {"login": pattern("^[a-z][a-z0-9_]{2,11}$"), "roles": several({"enum": ["admin", "user"]}, 1, 2)}
        ),
        "move": obj({"direction": {"enum": ["n", "e", "s", "w"]}, "steps": whole(1, 9)}),
        "plot": obj({"kind": {"enum": ["bar", "line"]}, "points": several(several(whole(0, 9), 2, 2), 1, 3)}),
        "transfer": obj({"iban": pattern("^DE[0-9]{20}$"), "amount": number(0.01, 1000)}),
    }.items()
}

SCHEMAS: dict[str, Any] = {**SCALARS, **STRINGS, **ARRAYS, **OBJECTS, **COMBINED, **CALLS}
