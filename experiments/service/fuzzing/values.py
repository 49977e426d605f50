"""Odd values, schemas, grammars and patterns, drawn at random."""

from __future__ import annotations

import random
import string
from typing import Any

# Characters at which readers cut lines, that write from right to left, join, or have no glyph.
_CHARS = "aé日🦙\u0000\u0007\u001b\u2028\u2029\u0085\u202e\u200d\ufeff\u0301<|>{}[]\"'\\/%\n\t "
_TOKENS = (
    "<|im_end|>", "</s>", "<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "{{", "}}", "{%", "%}", "{# #}", "%s", "\r\n\r\n",
)  # fmt: skip
_NUMBERS = (0, -1, 1, 2, 127, 128, 129, 4096, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e308, 1.5)
_KEYWORDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties",
)  # fmt: skip
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array", "nothing", ["string", "null"], 5)
_FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "regex", "duration", "nothing")
_REFERENCES = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://there/x", "#/nothing", "#/$defs/~1")
_ENDLESS = ({"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, {"items": {"$ref": "#"}})
_ATOMS = (
    "a", "[a-z]", "[^a]", ".", "\\d", "\\w", "\\S", "\\b", "\\p{L}", "[\\x00-\\u2e7f]", "^", "$", "(?i)b", "(?=a)", "(?!a)",
    "(?<n>a)", "\\1", "[[:alpha:]]", "é", "🦙", "\\", "[", "]", "(", ")", "|", "{", "}", "\\u{1F600}", "\\xff", "[z-a]", "",
)  # fmt: skip
_TERMS = (
    '"a"', "/[a-z]+/", "/.*/", '"é"', '""', "/(/", "NAME", "%json {}", '%json {"type": "integer"}', "<|im_end|>", "'b'", "/a/i",
)  # fmt: skip


def text(rng: random.Random, most: int = 60) -> str:
    """Return a text of odd characters and template marks, seldom a long one."""
    if rng.random() < 0.03:
        return rng.choice(("a", "🦙", " ", "\n", "<|im_end|>", "\u0301")) * rng.choice((1000, 20_000))
    if rng.random() < 0.01:
        return "half of \ud83d"  # half a surrogate pair: valid in JSON, not in UTF-8
    parts = (rng.choice(_TOKENS) if rng.random() < 0.2 else rng.choice(_CHARS) for _ in range(rng.randrange(most)))
    return "".join(parts)


def number(rng: random.Random) -> Any:
    """Return a number at or beyond a bound."""
    return rng.choice(_NUMBERS)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Return a JSON value of any type, or a number that JSON does not have."""
    if rng.random() < 0.01:
        return rng.choice((float("nan"), float("inf")))
    kind = rng.randrange(8 if depth else 5)
    if kind >= 7:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind >= 5:
        return {text(rng, 5): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return (None, rng.random() < 0.5, number(rng), text(rng), str(number(rng)))[kind]


def count(rng: random.Random) -> int:
    """Return a number of items: few, or at a bound."""
    return rng.choice((0, 1, 2, 3, 5, 17)) if rng.random() < 0.95 else rng.choice((127, 128, 129, 1024, 1025, 4097, 8193))


def schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a JSON schema, valid or not, seldom a costly one."""
    if rng.random() < 0.04:
        return value(rng, 1)
    if rng.random() < 0.05:
        return {"$ref": rng.choice(_REFERENCES)}
    if depth == 3 and rng.random() < 0.05:
        return {"$ref": "#/$defs/a", "$defs": {"a": rng.choice(_ENDLESS), "b": {"$ref": "#/$defs/a"}}}
    made: dict[str, Any] = {}
    if rng.random() < 0.85:
        made["type"] = rng.choice(_TYPES)
    for _ in range(rng.randrange(3)):
        made[rng.choice(_KEYWORDS)] = rng.choice((number(rng), rng.randrange(20), rng.randrange(10**5)))
    if rng.random() < 0.2:
        made["pattern"] = pattern(rng)
    if rng.random() < 0.1:
        made["format"] = rng.choice(_FORMATS)
    if rng.random() < 0.1:
        made[rng.choice(("enum", "const", "default", "examples"))] = [value(rng, 1) for _ in range(rng.randrange(4))]
    if depth:
        _nest(rng, made, depth - 1)
    if depth == 3 and rng.random() < 0.3:
        made["$defs"] = {name: schema(rng, 1) for name in "ab"}
    return made


def _nest(rng: random.Random, made: dict[str, Any], depth: int) -> None:
    """Add schemas within a schema."""
    if made.get("type") == "object" or rng.random() < 0.1:
        made["properties"] = {rng.choice(("a", "b", text(rng, 4))): schema(rng, depth) for _ in range(rng.randrange(4))}
        made["required"] = rng.sample([*made["properties"], "c"], rng.randrange(len(made["properties"]) + 1))
        made["additionalProperties"] = rng.choice((False, True, schema(rng, 0)))
    if made.get("type") == "array" or rng.random() < 0.1:
        made[rng.choice(("items", "prefixItems", "contains"))] = rng.choice((schema(rng, depth), [schema(rng, 0)], False))
    if rng.random() < 0.15:
        made[rng.choice(("anyOf", "oneOf", "allOf"))] = [schema(rng, depth) for _ in range(rng.randrange(4))]
    if rng.random() < 0.05:
        made[rng.choice(("not", "if", "patternProperties", "propertyNames", "dependentRequired"))] = schema(rng, 0)


def pattern(rng: random.Random) -> str:
    """Return a regular expression, valid or not."""
    made = ""
    for _ in range(rng.randrange(1, 6)):
        atom = rng.choice(_ATOMS)
        made += f"({atom}|{rng.choice(_ATOMS)})" if rng.random() < 0.2 else atom
        made += rng.choice(("", "", "*", "+", "?", "{2}", "{0,9}", "{3,1}", "{200}", "*?", "**", "{,}"))
    return made


def grammar(rng: random.Random) -> str:
    """Return a Lark grammar, valid or not, seldom one with very many rules."""
    if rng.random() < 0.06:
        many = range(rng.choice((300, 2500)))
        return "start: " + " | ".join(f"r{at}" for at in many) + "".join(f'\nr{at}: "{at}" /[a-z]{{3}}/' for at in many)
    names = ["start", *rng.sample(string.ascii_lowercase, rng.randrange(4))]
    lines = [f"{name}: {' | '.join(_alternative(rng, names) for _ in range(rng.randrange(1, 4)))}" for name in names]
    lines += ["NAME: /[a-z]+/"] if rng.random() < 0.3 else []
    lines += ["%ignore /\\s+/"] if rng.random() < 0.1 else []
    made = "\n".join(lines)
    return _changed(rng, made) if rng.random() < 0.3 else made


def _alternative(rng: random.Random, names: list[str]) -> str:
    items = (rng.choice(names) if rng.random() < 0.4 else rng.choice(_TERMS) for _ in range(rng.randrange(4)))
    return " ".join(item + rng.choice(("", "", "", "*", "+", "?", "~2", "{3}", "~0..500")) for item in items)


def _changed(rng: random.Random, made: str) -> str:
    at = rng.randrange(len(made))
    return made[:at] + rng.choice((rng.choice(_CHARS), "", rng.choice(_TERMS), ":", "|")) + made[at + rng.randrange(3) :]
