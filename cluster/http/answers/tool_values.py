"""Arguments of tool calls: JSON as the model wrote it, and unquoted values by their schemas."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_CONSTANTS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_DEPTH = 8  # levels of references and alternatives that are followed for a value's type


def dumped(value: Any) -> str:
    """Return the JSON of a value. Lone surrogates are escaped, as no encoding has them.

    Raises:
        ValueError: a number in it is not finite.
    """
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False, allow_nan=False))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)  # models write line breaks within strings


def loaded(source: str) -> Any:
    """Return the value of JSON; None if it is not JSON."""
    try:
        return _DECODER.decode(source)
    except (ValueError, RecursionError):
        return None


def as_written(source: str, value: Any) -> str:
    """Return the JSON of a value, as the model wrote it if that is JSON."""
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return dumped(value)
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", source)


def members_of(source: str) -> dict[str, str] | None:
    """Return the JSON of an object's members by name, as it stands in the object; None if this is not an object."""
    return _parts_of(source, "{}") if isinstance(loaded(source), dict) else None


def items_of(source: str) -> list[str] | None:
    """Return the JSON of a list's items; None if this is not a list."""
    return list(_parts_of(source, "[]").values()) if isinstance(loaded(source), list) else None


def _parts_of(source: str, brackets: str) -> dict[str, str]:
    """Return the JSON of the parts of an object, or of a list by their index."""
    found: dict[str, str] = {}
    at = _past_space(source, source.index(brackets[0]) + 1)
    while source[at] != brackets[1]:
        name = str(len(found))
        if brackets == "{}":
            name, at = _DECODER.raw_decode(source, at)
            at = _past_space(source, source.index(":", at) + 1)
        end = _DECODER.raw_decode(source, at)[1]
        found[name] = source[at:end]
        at = _past_space(source, end)
        if source[at] == ",":
            at = _past_space(source, at + 1)
    return found


def _past_space(source: str, at: int) -> int:
    while source[at] in " \t\r\n":
        at += 1
    return at


def value_json(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return the JSON of an unquoted value.

    A value of the type that the schema asks for gets this type; Python's ``True``, ``False`` and ``None``, which models write,
    are known. A schema without types takes any JSON. Everything else is a string. Numbers keep their digits.

    Args:
        text: as the model wrote it.
        schema: of the value; ``root`` has the definitions that it refers to.

    Example: ``42`` is ``"42"`` for ``anyOf: [string, null]``, and ``42`` for ``integer``.
    """
    kinds, choices = _types(schema, root, _DEPTH)
    bare = text.strip()
    for choice in choices:
        if choice == text or (not isinstance(choice, str) and dumped(choice) == bare):
            return dumped(choice)
    constant = _CONSTANTS.get(bare)
    if constant is not None and ("null" if constant == "null" else "boolean") in kinds:
        return constant
    number = _NUMBER.fullmatch(bare)
    if number is not None and kinds & {"integer", "number"}:
        if "number" in kinds or not (number[2] or number[3]):
            return bare
        whole = float(bare)
        if whole.is_integer():
            return str(int(whole))
    value = None if number is not None and math.isinf(float(bare)) else loaded(bare)
    if not kinds and value is not None and _is_finite(value):
        return as_written(bare, value)
    if bare[:1] in ("{", "[") and kinds & {"object", "array"}:
        if value is None:
            value = _python_literal(bare)
        if isinstance(value, dict | list) and ("object" if isinstance(value, dict) else "array") in kinds and _is_finite(value):
            return as_written(bare, value)
    return "null" if bare == "null" and not kinds else dumped(text)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> tuple[set[str], list[Any]]:
    """Return the types that a schema names, and its constants, those of its alternatives and references included."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set(), []
    named = schema.get("type")
    kinds = (
        {named}
        if isinstance(named, str)
        else {kind for kind in named if isinstance(kind, str)}
        if isinstance(named, list)
        else set()
    )
    if not kinds and "properties" in schema:
        kinds = {"object"}
    if not kinds and "items" in schema:
        kinds = {"array"}
    if schema.get("nullable") is True:
        kinds.add("null")
    listed = schema.get("enum")
    choices = [*(listed if isinstance(listed, list) else ()), *([schema["const"]] if "const" in schema else ())]
    others = [one for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list) for one in schema[key]]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        others.append(target)
    for other in others:
        more, constants = _types(other, root, depth - 1)
        kinds |= more
        choices += constants
    if choices and not kinds:
        kinds = {"string"} if all(isinstance(choice, str) for choice in choices) else set()
    return kinds, choices


def _python_literal(text: str) -> Any:
    """Return the value of a list or dict in Python's notation, as some models write it; None if it is not one."""
    try:
        value = ast.literal_eval(text)
        dumped(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value


def _is_finite(value: Any) -> bool:
    try:
        dumped(value)
    except (ValueError, RecursionError):
        return False
    return True
