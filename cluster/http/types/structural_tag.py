"""Grammars of structural tags: text is free until a trigger, and then follows the format of a tag until the end of the tag.

The formats are xgrammar's, which vLLM accepts: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.http.types.strict import checked_json
from outrider.engine.text.chat_format import CallForm
from outrider.engine.text.grammar import GrammarError, json_rule, lark_grammar, regex_rule

_TYPES = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Format of a model's tool calls, and its added tokens."""

    # llguidance distinguishes an added token from the same characters in other tokens, and does not match it as text.

    form: CallForm = "hermes"
    has_names: bool = False  # see ChatFormat.has_call_names
    tokens: Mapping[str, int] = field(default_factory=dict)  # ids of all added tokens
    shown: Collection[str] = ()  # added tokens in angle brackets that are not special, and may therefore occur in text

    def rule(self, mark: str) -> str:
        """Return the grammar rule of a mark, as a token or as its characters."""
        spelled = json.dumps(mark, ensure_ascii=False)
        return f"{spelled} | <[{self.tokens[mark]}]>" if mark in self.tokens else spelled


def structural_grammar(tag: Mapping[str, Any] | str, marks: CallMarks) -> str:
    """Return the grammar of a structural tag, for ``SamplingParams.grammar``. Raises ``GrammarError`` naming the faulty part.

    Example: with the trigger ``<f=`` and a tag with begin ``<f=a>``, schema ``{"type": "integer"}`` and end ``</f>`` the text
    ``x <f=a>5</f> y`` is one of the language, and ``x <f=b>`` is not.
    """
    try:
        spec = checked_json({"tag": json.loads(tag)})["tag"] if isinstance(tag, str) else tag
        if not isinstance(spec, Mapping):
            raise GrammarError("must be an object")
        form, path = spec.get("format"), "format"
        if form is None:  # the older shape
            path, tags = "", list[dict[str, Any]]()
            for at, each in enumerate(_get(spec, "", "structures", list)):
                place = f"structures[{at}]"
                content = {"type": "json_schema", "json_schema": _schema(each, place)}
                tags.append({"content": content} | {name: _get(each, place, name, str) for name in ("begin", "end")})
            form = {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}
        rules = _Rules(marks)
        start = rules.expression(form, path, "")
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"is not valid JSON: {error}") from None
    return lark_grammar("\n".join([f"start: {start}", *rules.rules]))


def _get(node: Any, path: str, name: str, kind: type, default: Any = None) -> Any:
    value = node.get(name, default) if isinstance(node, Mapping) else None
    if not isinstance(value, kind):
        raise GrammarError(f"{path}.{name} must be {_TYPES[kind]}".removeprefix("."))
    return value


def _schema(structure: Any, path: str) -> Any:
    schema = structure.get("schema") if isinstance(structure, Mapping) else None
    return json.loads(schema) if isinstance(schema, str) else _get(structure, path, "schema", dict)


class _Rules:
    """Rules in the notation of Lark for the parts of a structural tag."""

    def __init__(self, marks: CallMarks) -> None:
        self.rules: list[str] = []
        self._marks, self._texts = marks, dict[str, str]()
        added = "|".join(map(re.escape, sorted(marks.tokens, key=len, reverse=True)))
        self._added = re.compile(f"({added})") if added else None

    def expression(self, node: Any, path: str, end: str | None) -> str:
        """Return the right side of a rule for a format and the text ``end``: "" at the end of the output, None if unknown."""
        kind, body = _get(node, path, "type", str, "tag"), ""
        if kind == "sequence":
            *first, last = self._list(node, path, "elements")
            parts = [self.expression(each, f"{path}.elements[{at}]", None) for at, each in enumerate(first)]
            return " ".join([*parts, self.expression(last, f"{path}.elements[{len(first)}]", end)])
        if kind == "or":
            either = enumerate(self._list(node, path, "elements"))
            return f"({' | '.join(self.expression(each, f'{path}.elements[{at}]', end) for at, each in either)})"
        if kind == "any_text" and end is not None:
            return self._text(end)
        if kind == "triggered_tags" and end == "":
            return self._triggered(node, path)
        if kind in ("any_text", "triggered_tags"):
            raise GrammarError(f"{path}: {kind} must be the last format{', or that of a tag' if kind == 'any_text' else ''}")
        if kind == "const_string":
            body = self._literal(_get(node, path, "value", str))
        elif kind == "json_schema":
            try:
                body = self._rule(json_rule(_get(node, path, "json_schema", dict)))
            except GrammarError as error:
                raise GrammarError(f"{path}: {error}") from error
        elif kind == "regex":
            body = regex_rule(_get(node, path, "pattern", str))
        elif kind == "tag":
            begin, rest = self._tag(node, path)
            body = f"{self._literal(begin)} {rest}"
        elif kind == "tags_with_separator":
            body = self._separated(node, path)
        else:
            raise GrammarError(f"{path}.type: {kind!r} is not supported")
        return f"{body} {self._literal(end)}" if end else body

    def _list(self, node: Any, path: str, name: str) -> list[Any]:
        if found := _get(node, path, name, list):
            return list(found)
        raise GrammarError(f"{path}.{name} must not be empty")

    def _tag(self, node: Any, path: str) -> tuple[str, str]:
        """Return the beginning of a tag, and the rule of the rest."""
        end = _get(node, path, "end", str)
        return _get(node, path, "begin", str), self._rule(self.expression(node.get("content"), f"{path}.content", end or None))

    def _tags(self, node: Any, path: str) -> list[tuple[str, str]]:
        return [self._tag(each, f"{path}.tags[{at}]") for at, each in enumerate(self._list(node, path, "tags"))]

    def _separated(self, node: Any, path: str) -> str:
        one = self._rule(" | ".join(f"{self._literal(begin)} {rest}" for begin, rest in self._tags(node, path)))
        separator = self._literal(_get(node, path, "separator", str, ""))
        more = "" if _get(node, path, "stop_after_first", bool, False) else f"({separator} {one})*"
        return f"({one} {more}){'' if _get(node, path, 'at_least_one', bool, False) else '?'}"

    def _triggered(self, node: Any, path: str) -> str:
        triggers, tags = self._list(node, path, "triggers"), self._tags(node, path)
        for at, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger or sum(trigger in str(other) for other in triggers) > 1:
                raise GrammarError(f"triggers[{at}] must be a string that is not empty and not part of another one")
            if not any(begin.startswith(trigger) for begin, _ in tags):
                raise GrammarError(f"triggers[{at}] is not the beginning of a tag")
        stops = [(trigger, begin, rest) for begin, rest in tags for trigger in triggers if begin.startswith(trigger)]
        if lost := {begin for begin, _ in tags} - {begin for _, begin, _ in stops}:
            raise GrammarError(f"the tag {min(lost)!r} begins with none of the triggers")
        passing, heads, text = self._until(stops)
        first = " | ".join(f"{self._literal(begin)} {rest}" for begin, rest in tags)
        is_single, is_required = (_get(node, path, name, bool, False) for name in ("stop_after_first", "at_least_one"))
        if is_single:
            return f"({first})" if is_required else f"{passing} ({heads} | {text})"
        return f"{f'({first})' if is_required else ''} ({passing} ({heads}))* {passing} {text}"

    def _text(self, end: str) -> str:
        """Return free text up to ``end``, which is included."""
        if end not in self._texts:
            passing, heads, text = self._until([(end, end, "")] if end else [])
            self._texts[end] = self._rule(f"{passing} ({heads or text})")
        return self._texts[end]

    def _until(self, stops: Sequence[tuple[str, str, str]]) -> tuple[str, str, str]:
        """Return the rules of free text with tokens, of free text with one of some tags behind it, and of free text without.

        ``stops``: by tag its trigger, its beginning, which begins with the trigger, and the rule of its rest.
        """
        number, heads, opening = len(self.rules), list[str](), set[str]()
        text, triggers = f"TEXT_{number}", list(dict.fromkeys(trigger for trigger, _, _ in stops))
        self.rules.append(f"{text}: {_without(triggers)}")
        for place, trigger in enumerate(triggers):
            before = _without([other for other in triggers if other != trigger])
            self.rules.append(f"BEFORE_{number}_{place}: {before}")
            self.rules.append(f"head_{number}_{place}[suffix={json.dumps(trigger, ensure_ascii=False)}]: BEFORE_{number}_{place}")
            rest = " | ".join(f"{self._literal(begin[len(trigger) :])} {rule}" for one, begin, rule in stops if one == trigger)
            heads.append(f"head_{number}_{place} ({rest})")
        for _, begin, rule in stops:  # an added token is not matched as text
            found = self._added and self._added.match(begin)
            if found:
                opening.add(found[0])
                heads.append(f"{text} <[{self._marks.tokens[found[0]]}]> {self._literal(begin[found.end() :])} {rule}")
        others = [f"<[{self._marks.tokens[token]}]>" for token in self._marks.shown if token not in opening]
        return f"({text} ({' | '.join(others)}))*" if others else "", " | ".join(heads), text

    def _literal(self, text: str) -> str:
        """Return a rule of a text in which added tokens may be written as such."""
        parts = self._added.split(text) if self._added else [text]
        return " ".join(f"({self._marks.rule(part)})" for part in parts if part) or '""'

    def _rule(self, expression: str) -> str:
        """Return the name of a new rule."""
        self.rules.append(f"rule_{(number := len(self.rules))}: {expression}")
        return f"rule_{number}"


def _without(strings: Sequence[str]) -> str:
    """Return the terminal of texts that contain none of some strings."""
    escaped = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in string) for string in strings)
    return "/(?s:.*)/" + (f" & ~/(?s:.*)({escaped})(?s:.*)/" if strings else "")
