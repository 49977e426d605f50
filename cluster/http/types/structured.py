"""Structured output: OpenAI's ``response_format``, and vLLM's equivalent parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.cluster.http.types.strict import ENCODABLE, JsonObject, Name, Strict, Text, unsupported
from outrider.cluster.http.types.structural_tag import CallMarks, structural_grammar
from outrider.engine.errors import RequestError
from outrider.engine.text.grammar import (
    MAX_GRAMMAR_CHARS,
    GrammarError,
    choice_grammar,
    context_free_grammar,
    json_grammar,
    lenient_schema,
    object_grammar,
    regex_grammar,
)

MAX_CHOICE_TEXTS = 10_000
MAX_TAGS = 1024

Pattern = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS), ENCODABLE]
Schema = JsonObject | Pattern  # JSON schema as an object or as text
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS), ENCODABLE]],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
]


class JsonSchemaFormat(Strict):
    """Named JSON schema. It is enforced as a whole if ``strict``, otherwise as far as it can be."""

    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """Parameter ``response_format`` of OpenAI's API. A structural tag (vLLM's) has a format, or structures and triggers."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: JsonObject | None = None
    structures: Annotated[list[JsonObject], Field(max_length=MAX_TAGS, fail_fast=True)] | None = None
    triggers: Annotated[list[Name], Field(max_length=MAX_TAGS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise unsupported("json_schema", "json_schema is required where the type is json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise unsupported("json_schema", f"json_schema is only allowed where the type is json_schema, not {self.type}")
        given = tuple(name for name in ("format", "structures", "triggers") if getattr(self, name) is not None)
        if given not in ((("format",), ("structures", "triggers")) if self.is_tag else ((),)):
            raise unsupported("type", "a structural_tag has either a format, or structures and triggers; other types have none")
        return self

    @property
    def is_tag(self) -> bool:
        """Return whether it is a structural tag."""
        return self.type == "structural_tag"


class StructuredOutputs(Strict):
    """Parameter ``structured_outputs`` of vLLM's API. At most one of its fields may be set."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "disable_fallback": (True, False),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Pattern | None = None  # must match the whole text
    choice: Choices | None = None
    grammar: Pattern | None = None  # Lark or GBNF
    structural_tag: Schema | None = None  # as an object or as text


class StructuredFields(Strict):
    """Parameters that constrain the response's text. At most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    guided_json: Schema | None = None  # this and the following: names of older vLLM versions
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredFields:
        fields = [field for field, _ in self._bounds()]
        if len(fields) > 1:
            raise unsupported(fields[1], f"{fields[0]} and {fields[1]} cannot both bind the answer; send one of them")
        return self

    def left_out(self) -> list[str]:
        """Return the paths of the keywords that ``grammar`` does not enforce, as ``strict`` is not set."""
        schema = None if self.response_format is None else self.response_format.json_schema
        if schema is None or schema.strict:
            return []
        return [f"response_format.json_schema.schema.{path}" for path in lenient_schema(schema.schema_)[1]]

    @property
    def bound_by(self) -> str | None:
        """Return the field that constrains the response; None if there is no constraint."""
        return next((field for field, _ in self._bounds()), None)

    @property
    def leaves_text_free(self) -> bool:
        """Return whether the response may contain any text, and therefore tool calls."""
        return self.bound_by is None or self._tag is not None

    @property
    def _tag(self) -> dict[str, Any] | str | None:
        if self.response_format is not None and self.response_format.is_tag:
            return self.response_format.model_dump(exclude_none=True)
        return None if self.structured_outputs is None else self.structured_outputs.structural_tag

    def grammar(self, marks: CallMarks) -> str | None:
        """Return the response's grammar, None without constraint. Raises RequestError naming a field that cannot be enforced."""
        for field, build in self._bounds(marks):
            try:
                return build()
            except GrammarError as error:
                raise RequestError(field, str(error)) from error
        return None

    def _bounds(self, marks: CallMarks | None = None) -> list[tuple[str, Callable[[], str]]]:
        """Return the fields that constrain the response, each with a function that builds its grammar."""
        # Functions, because a grammar takes time to build: only the one that is used is built, and later, in a thread.
        found: list[tuple[str, Callable[[], str]]] = []
        form = self.response_format
        if form is not None and form.type == "json_object":
            found.append(("response_format", object_grammar))
        elif form is not None and form.json_schema is not None:
            schema, strict = form.json_schema.schema_, form.json_schema.strict
            found.append(
                ("response_format.json_schema.schema", lambda: json_grammar(schema if strict else lenient_schema(schema)[0]))
            )
        if (tag := self._tag) is not None:
            field = "response_format" if form is not None and form.is_tag else "structured_outputs.structural_tag"
            found.append((field, lambda: structural_grammar(tag, marks or CallMarks())))
        if self.structured_outputs is not None and self.structured_outputs.json_object:
            found.append(("structured_outputs.json_object", object_grammar))
        outputs = self.structured_outputs or StructuredOutputs()
        kinds: tuple[tuple[str, Any, Any, Callable[[Any], str]], ...] = (
            ("json", outputs.json_, self.guided_json, json_grammar),
            ("regex", outputs.regex, self.guided_regex, regex_grammar),
            ("choice", outputs.choice, self.guided_choice, choice_grammar),
            ("grammar", outputs.grammar, self.guided_grammar, context_free_grammar),
        )
        for name, value, guided, build in kinds:
            if value is not None:
                found.append((f"structured_outputs.{name}", _call(build, value)))
            if guided is not None:
                found.append((f"guided_{name}", _call(build, guided)))
        return found


def _call(build: Callable[[Any], str], value: Any) -> Callable[[], str]:
    return lambda: build(value)
