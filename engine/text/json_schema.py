"""JSON schemas in the form that the grammar library enforces exactly.

llguidance computes with numbers as 64-bit floats, follows references without end, and refuses keywords that it does not know to
enforce. Here schemas are changed before it sees them, so that every text of the grammar is valid under the schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_EXACT = 2**53  # larger integers may have no 64-bit float
_TINY = 1e-15  # distance of the number that replaces an exclusive bound of zero
# Longest texts of formats whose digits have no bound: nine digits of a second's fraction.
_LONGEST = {"date-time": 35, "time": 24, "duration": 64}
_PASSES = 30  # over all references; each pass follows chains in one direction
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_ONES = ("items", "additionalProperties", "additionalItems")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
UNSUPPORTED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor",
    "$recursiveRef", "$recursiveAnchor",
)  # fmt: skip

Change = Callable[[dict[str, Any], str], Any]  # of an object schema at a path


class SchemaError(ValueError):
    """Schema that cannot be enforced; the message names the keyword."""


def enforceable(schema: Any) -> Any:
    """Return a schema whose texts are valid under the given one, and which the library handles exactly.

    Raises:
        SchemaError: a number cannot be enforced exactly, or the schema has no finite instance.
        RecursionError: the schema is nested too deeply.
    """
    return _finite(_changed(schema, "", _exact))


def lenient(schema: Any) -> tuple[Any, list[str]]:
    """Return a schema without the keywords that cannot be enforced, and the paths of those that were left out.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    left_out: list[str] = []

    def change(node: dict[str, Any], path: str) -> Any:
        reference = node.get("$ref", "#")
        properties, required = node.get("properties"), node.get("required")
        named = properties.keys() if isinstance(properties, Mapping) else ()
        is_counted = set(named) <= {name for name in (required if isinstance(required, list) else ()) if isinstance(name, str)}
        others = {
            "format": node.get("format") not in _FORMATS,
            "minProperties": not is_counted,  # the library counts only where all named properties are required
            "maxProperties": not is_counted,
            "$ref": isinstance(reference, str) and not reference.startswith("#"),
        }
        for name in [name for name in node if name in UNSUPPORTED or others.get(name)]:
            left_out.append(_join(path, name))
            del node[name]
        if "oneOf" in node and "anyOf" not in node:
            node["anyOf"] = node.pop("oneOf")
            left_out.append(_join(path, "oneOf"))
        for name in (*_BOUNDS, "enum", "const"):
            try:
                _exact({name: node[name]} if name in node else {}, path)
            except SchemaError:
                left_out.append(_join(path, name))
                del node[name]
        return node

    return _changed(schema, "", change), left_out


def without_patterns(schema: Any, is_valid: Callable[[str], bool]) -> tuple[Any, list[str]]:
    """Return a schema without the patterns that are not valid, and their paths."""
    left_out: list[str] = []

    def change(node: dict[str, Any], path: str) -> Any:
        patterns = node.get("patternProperties")
        for name, texts in (
            ("pattern", [node.get("pattern")]),
            ("patternProperties", patterns if isinstance(patterns, dict) else []),
        ):
            if name in node and not all(isinstance(text, str) and is_valid(text) for text in texts):
                left_out.append(_join(path, name))
                del node[name]
        return node

    return _changed(schema, "", change), left_out


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _changed(schema: Any, path: str, change: Change) -> Any:
    """Return a copy of a schema with a change made to every object schema in it, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for name, inner in _inner(node):
        at = _join(path, name)
        if isinstance(inner, Mapping) and name in _MAPS:
            node[name] = {key: _changed(value, f"{at}.{key}", change) for key, value in inner.items()}
        elif isinstance(inner, list):
            node[name] = [_changed(value, f"{at}[{place}]", change) for place, value in enumerate(inner)]
        else:
            node[name] = _changed(inner, at, change)
    return change(node, path)


def _inner(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keywords of an object schema that hold schemas."""
    for name in (*_MAPS, *_LISTS, *_ONES):
        if name in node:
            yield name, node[name]


def _exact(node: dict[str, Any], path: str) -> Any:
    for name in _BOUNDS:
        _check_number(node.get(name), _join(path, name), is_bound=True)
    for value in (*(node["enum"] if isinstance(node.get("enum"), list) else ()), node.get("const")):
        for number in _numbers(value):
            _check_number(number, _join(path, "enum" if "enum" in node else "const"), is_bound=False)
    _exclude_whole(node, "minimum", "maximum", 1, path)
    _exclude_whole(node, "maximum", "minimum", -1, path)
    longest = _LONGEST.get(node.get("format", "")) if isinstance(node.get("format"), str) else None
    if longest is not None and not _is_number(node.get("maxLength")):
        node["maxLength"] = longest
    return node


def _exclude_whole(node: dict[str, Any], bound: str, other: str, sign: int, path: str) -> None:
    """Replace an exclusive bound that is whole by the next number, where the library admits it: if the other bound is near.

    The library keeps 15 digits of a number.
    """
    exclusive = f"exclusive{bound.capitalize()}"
    value: Any = node.get(exclusive)
    if not _is_number(value) or value != math.floor(value) or sign * value < 0 or "multipleOf" in node:
        return
    others = [node[name] for name in (other, f"exclusive{other.capitalize()}") if _is_number(node.get(name))]
    room = min((abs(limit - value) for limit in others), default=1.0)
    if room >= 1:
        return
    step = 10.0 ** (len(str(abs(int(value)))) - 15) if value else _TINY
    if step >= room:
        raise SchemaError(f"{_join(path, exclusive)}: no number is between it and the other bound")
    del node[exclusive]
    following = value + sign * step
    given = node[bound] if _is_number(node.get(bound)) else following
    node[bound] = max(given, following) if sign > 0 else min(given, following)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif _is_number(value):
        yield value


def _check_number(value: Any, path: str, is_bound: bool) -> None:
    if not _is_number(value) or abs(value) <= _EXACT:
        return
    try:
        is_exact = int(float(value)) == value and (abs(value) < 2**63 or not is_bound)
    except OverflowError:
        is_exact = False
    if not is_exact:
        advice = "use a string with a pattern, or leave it out"
        raise SchemaError(f"{path}: {value} cannot be enforced exactly, as integers beyond 2^53 are rounded: {advice}")


def _finite(schema: Any) -> Any:
    """Return a schema in which references to schemas without a finite instance are ``false``.

    Raises:
        SchemaError: the whole schema has no finite instance.
    """
    targets = {pointer: _target(schema, pointer) for pointer in _references(schema)}
    if not targets:  # the library names what has no instance otherwise
        return schema
    finite: set[str] = set()
    order, before = list(targets), -1
    for _ in range(_PASSES):
        if len(finite) == before:
            break
        before = len(finite)
        finite.update(pointer for pointer in order if pointer not in finite and _has_instance(targets[pointer], finite, targets))
        order.reverse()
    else:
        raise SchemaError("its references form too long a chain: write it with fewer of them")
    if not _has_instance(schema, finite, targets):
        raise SchemaError("no finite JSON is valid under it: a reference leads back to itself without an alternative")
    endless = targets.keys() - finite
    if not endless:
        return schema
    return _changed(schema, "", lambda node, _: False if node.get("$ref") in endless else node)


def _references(schema: Any) -> set[str]:
    found: set[str] = set()

    def look(node: dict[str, Any], _: str) -> Any:
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
            found.add(node["$ref"])
        return node

    _changed(schema, "", look)
    return found


def _target(schema: Any, pointer: str) -> Any:
    """Return the schema of a reference; an empty one if it is not there, which the library refuses."""
    node = schema
    for name in filter(None, pointer.removeprefix("#").removeprefix("/").split("/")):
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return {}
    return node


def _has_instance(node: Any, finite: set[str], targets: Mapping[str, Any]) -> bool:
    """Return whether a schema has an instance, if of the references exactly those in ``finite`` have one."""

    def has(inner: Any) -> bool:
        return _has_instance(inner, finite, targets)

    if not isinstance(node, Mapping):
        return node is not False
    reference = node.get("$ref")
    if isinstance(reference, str) and reference in targets and reference not in finite:
        return False
    if any(isinstance(node.get(name), list) and not any(map(has, node[name])) for name in ("anyOf", "oneOf")):
        return False
    if isinstance(node.get("allOf"), list) and not all(map(has, node["allOf"])):
        return False
    if "enum" in node or "const" in node:
        return True
    named = node.get("type", "null")  # without a type there is always one
    kinds = named if isinstance(named, list) else [named]
    checks = {"object": _required_have, "array": _items_have}
    return any(kind not in checks or checks[kind](node, has) for kind in kinds)


def _required_have(node: Mapping[str, Any], has: Callable[[Any], bool]) -> bool:
    properties = node.get("properties")
    others = node.get("additionalProperties", True)
    required = node.get("required")
    for name in required if isinstance(required, list) else ():
        inner = properties.get(name, others) if isinstance(properties, Mapping) else others
        if not has(inner):
            return False
    return True


def _items_have(node: Mapping[str, Any], has: Callable[[Any], bool]) -> bool:
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    first = first if isinstance(first, list) else []
    if not _is_number(least):
        return True
    return all(map(has, first[: int(least)])) and (least <= len(first) or has(node.get("items", True)))
