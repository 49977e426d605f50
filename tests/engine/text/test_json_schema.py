"""JSON schemas: every text of their grammars is valid under them, and what cannot be enforced exactly is refused or left out."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from outrider.engine.text.grammar import GrammarError, Grammars, MatcherGrammar, json_grammar, lenient_schema, regex_grammar
from tests.cluster.circle import TOKENIZER

LOOP = {"n": {"$ref": "#/$defs/n"}}
LIST = {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}}
BIG = 1234567890123456789


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    end = TOKENIZER.eos_token_id
    assert isinstance(end, int)
    return Grammars(TOKENIZER, len(TOKENIZER), (end,))


def accepts(grammar: MatcherGrammar, text: str) -> bool:
    """Return whether a text is one of the language."""
    return all(grammar.push(token) for token in [*TOKENIZER.encode(text), TOKENIZER.eos_token_id])


ROUNDED: list[dict[str, Any]] = [
    {"enum": [BIG]}, {"const": {"ids": [BIG]}}, {"type": "integer", "minimum": 2**53 + 1}, {"exclusiveMaximum": 2**64},
    {"type": "integer", "maximum": 2**63 - 1}, {"properties": {"a": {"type": "integer", "minimum": -(2**53) - 1}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ROUNDED)
def test_an_integer_that_would_be_rounded_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"cannot be enforced exactly, as integers beyond 2\^53 are rounded"):
        json_grammar(schema)
    assert lenient_schema(schema)[1]


def number(**bounds: float) -> dict[str, Any]:
    return {"type": "number", **bounds}


TEXTS: list[tuple[dict[str, Any] | str, list[str], list[str]]] = [  # schema or pattern; texts within and without its language
    # Integers that are floats, and exclusive bounds.
    *(({"enum": [value, "a"]}, [str(value)], [str(value + 1)]) for value in (2**53, -(2**53), 2**60, 10**22)),
    (number(exclusiveMinimum=0, maximum=0.5), ["0.5", "0.01"], ["0", "0.0", "0.6"]),
    (number(exclusiveMinimum=0, exclusiveMaximum=0.5), ["0.49"], ["0", "0.5"]),
    (number(exclusiveMaximum=0, minimum=-0.5), ["-0.5", "-0.1"], ["0", "-0", "-0.0"]),
    (number(exclusiveMinimum=3, maximum=3.5), ["3.5", "3.001"], ["3", "3.0", "3.6"]),
    (number(exclusiveMinimum=2**31, exclusiveMaximum=2**31 + 0.5), ["2147483648.25"], ["2147483648", "2147483648.0"]),
    (number(exclusiveMaximum=-100, minimum=-100.5), ["-100.5", "-100.01"], ["-100", "-100.0"]),
    (number(exclusiveMaximum=1, minimum=0.5), ["0.5", "0.99"], ["1", "1.0"]),
    # Fractions of a second have an end.
    *(({"type": "string", "format": form}, [f'"{text}.123456789Z"'], [f'"{text}.{"1" * 40}Z"'])
      for form, text in (("date-time", "2024-01-01T00:00:00"), ("time", "00:00:00"))),
    # Classes of a pattern are ASCII.
    (r"^\d{2}$", ["42"], ["٣٣"]), (r"[\d.]+", ["1.2"], ["٣"]), (r"\w\W", ["a-", "_é"], ["éa"]),
    (r"[^\d\s]\S", ["ab"], ["1b", "a "]), (r"\\d\[\]\d", [r"\d[]4"], ["5[]4"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "within", "without"), TEXTS)
def test_texts_of_a_grammar(given: dict[str, Any] | str, within: list[str], without: list[str], grammars: Grammars) -> None:
    grammar = regex_grammar(given) if isinstance(given, str) else json_grammar(given)
    assert all(accepts(grammars.start(grammar), text) for text in within)
    assert not any(accepts(grammars.start(grammar), text) for text in without)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": LOOP},
        {"$ref": "#"},
        {"$ref": "#/$defs/n", "$defs": LIST},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": LIST},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"allOf": [{"type": "object"}, {"$ref": "#/$defs/n"}], "$defs": LOOP},
    ],
)
def test_a_schema_without_a_finite_instance_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="no finite JSON is valid under it"):
        json_grammar(schema)
    with pytest.raises(GrammarError):
        lenient_schema(schema)


@pytest.mark.parametrize(
    ("schema", "text", "endless"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": LIST}, "{}", '{"a"'),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": LOOP}, "[]", "[{"),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": LIST}, "null", "{"),
        ({"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}}, '{"c":[{},{"c":[]}]}', "[["),
    ],
)
def test_a_branch_without_an_end_is_not_entered(schema: dict[str, Any], text: str, endless: str, grammars: Grammars) -> None:
    grammar = json_grammar(schema)
    assert accepts(grammars.start(grammar), text)
    state = grammars.start(grammar)
    assert not all(state.push(token) for token in TOKENIZER.encode(endless))


def test_what_cannot_be_enforced_is_left_out_and_the_rest_is_held_to() -> None:
    schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"type": "integer", "maximum": 2**63 - 1}, "uniqueItems": True},
            "text": {"type": "string", "pattern": "(?=a)b", "maxLength": 3},
            "form": {"type": "string", "format": "int64"},
            "some": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "else": {"$ref": "https://example.org/schema"},
        },
        "propertyNames": {"maxLength": 4},
        "minProperties": 2,
        "required": ["list"],
    }
    found, left_out = lenient_schema(schema)
    assert sorted(left_out) == [
        "minProperties", "properties.else.$ref", "properties.form.format", "properties.list.items.maximum",
        "properties.list.uniqueItems", "properties.some.oneOf", "properties.text.pattern", "propertyNames",
    ]  # fmt: skip
    assert found["required"] == ["list"] and found["properties"]["text"] == {"type": "string", "maxLength": 3}
    whole = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert lenient_schema(whole) == (whole, [])
    with pytest.raises(GrammarError):
        lenient_schema({"type": "objekt"})


def drawn(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum"] + (["object", "array", "anyOf"] if depth < 2 else [])
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample([1, -7, 2**53, 10**22, 1.5, "a", "é", None, True, [1], {"a": 2}], rng.randint(1, 4))}
    if kind == "anyOf":
        return {"anyOf": [drawn(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    schema: dict[str, Any] = {"type": kind}
    if kind in ("integer", "number"):
        low = rng.choice([-20, -1, 0, 0.25, 3, 2**31]) if kind == "number" else rng.choice([-20, -1, 0, 3, 2**31])
        name = rng.choice(["minimum", "exclusiveMinimum"])
        high = low + rng.choice([2, 9, 0.5] if kind == "number" else [2, 9])
        schema |= {name: low, rng.choice(["maximum", "exclusiveMaximum"]): high}
        if rng.random() < 0.3:
            del schema[name]
    elif kind == "string":
        schema |= rng.choice(
            [{}, {"maxLength": 3}, {"pattern": r"^\d{2}[a-c]*$", "maxLength": 5}, {"format": "date"}, {"format": "time"}]
        )
    elif kind == "array":
        schema |= {"items": drawn(rng, depth + 1), "maxItems": rng.randint(1, 3), "minItems": rng.randint(0, 1)}
    elif kind == "object":
        names = rng.sample(["a", "b", "c", "d"], rng.randint(0, 3))
        schema |= {"properties": {name: drawn(rng, depth + 1) for name in names}, "additionalProperties": rng.random() < 0.2}
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    return schema


def walked(grammar: MatcherGrammar, rng: random.Random, most: int = 300) -> str | None:
    """Return a random text of a grammar; None if it is too long."""
    tokens: list[int] = []
    end = TOKENIZER.eos_token_id
    for _ in range(most):
        mask = grammar.allowed()
        assert mask is not None, grammar.fault
        allowed = np.flatnonzero(mask).tolist()
        token = end if end in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == end:
            return str(TOKENIZER.decode(tokens))
        assert grammar.push(token)
        tokens.append(token)
    return None


def walks(grammars: Grammars, schemas: int, seed: int) -> dict[str, int]:
    """Return the counts of random texts of random schemas, each valid under its schema."""
    rng, counts = random.Random(seed), {"schemas": schemas, "refused": 0, "finished": 0, "cut": 0}
    for _ in range(schemas):
        schema = drawn(rng)
        try:
            grammar = json_grammar(schema)
        except GrammarError:
            counts["refused"] += 1
            continue
        for _ in range(3):
            text = walked(grammars.start(grammar), rng)
            counts["cut" if text is None else "finished"] += 1
            if text is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return counts


def test_random_texts_of_random_schemas_are_valid(grammars: Grammars) -> None:
    assert walks(grammars, 40, seed=0)["finished"] > 40


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_random_texts_of_five_hundred_schemas_are_valid(grammars: Grammars, proof: dict[str, Any]) -> None:
    proof |= walks(grammars, 500, seed=1)
    assert proof["finished"] > 500
