"""Output format that a chat template asks of its model: tags around reasoning, the form of tool calls, or GPT-OSS's harmony."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# vLLM's names of tool parsers, except harmony
CallForm = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "glm45", "gemma4", "harmony"]


class Tags(NamedTuple):
    """Texts before and after the reasoning."""

    opening: str
    closing: str


# Tags of known templates; the model writes the closing one. Granite 3.2's template describes the last pair in words.
REASONING_TAGS = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<thought>", "</thought>"),
    Tags("<reasoning>", "</reasoning>"),
    Tags("Here is my thought process:", "Here is my response:"),
)
# A reasoning message in the harmony format. An answer may have several, at any place.
HARMONY = Tags("<|channel|>analysis<|message|>", "<|end|>")
_FINAL = "<|channel|>final<|message|>"
# Form of calls, the texts that a template with it contains, and texts that it does not contain.
_CALL_FORMS: tuple[tuple[CallForm, tuple[str, ...], tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>"), ()),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    ("hermes", ("<tool_call>",), ("<arg_key>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ()),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("gemma4", ("<|tool_call>", "call:"), ()),
    ("gemma4", ("<start_function_call>", "call:"), ()),  # FunctionGemma's
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3_json", ("<|python_tag|>",), ()),
    ("llama3_json", ('{"name": function name, "parameters": dictionary of argument name and its value}',), ()),
)
CALL_MARKS: dict[CallForm, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "glm45": ("<tool_call>", "</tool_call>"),
    "gemma4": (
        "<|tool_call>",
        "<start_function_call>",
        "<tool_call|>",
        "<end_function_call>",
        '<|"|>',
        "<escape>",
    ),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
}  # texts that are tokens in some tokenizers
HARMONY_ENDS = CALL_MARKS["harmony"][-2:]  # tokens that end an answer
_END_TOKENS = 24  # tokens at the end of a prompt that are searched for a tag


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Output format of one model."""

    reasoning: Tags | None = None  # None: no reasoning, or unknown tags
    calls: CallForm | None = None  # None: calls are not parsed from the text
    has_call_names: bool = False  # mistral: newer models write each call's name before its arguments
    hidden: frozenset[str] = frozenset()  # marks that are special tokens, skipped by default when decoding

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """Derive the format from a tokenizer's template. For harmony, its marks must also be tokens."""
        template, added = template_text(tokenizer), added_tokens(tokenizer)
        forms = (
            form for form, words, others in _CALL_FORMS
            if all(word in template and (form != "harmony" or word in added) for word in words)
            and not any(word in template for word in others)
        )  # fmt: skip
        calls: CallForm | None = next(forms, None)
        known = (HARMONY,) if calls == "harmony" else REASONING_TAGS
        reasoning = next((tags for tags in known if tags is HARMONY or tags.closing in template), None)
        marks = {*(reasoning or ()), *(() if calls is None else CALL_MARKS[calls])}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        return cls(reasoning, calls, "[ARGS]" in template, frozenset(marks & special))

    def begins_within(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool | None:
        """Return whether the output after a prompt begins inside reasoning; None if the model decides.

        Example: the prompt of a model that always reasons ends with ``<think>``.
        """
        if self.reasoning is None:
            return False
        end = str(tokenizer.decode(list(prompt_ids[-_END_TOKENS:]), skip_special_tokens=False)).rstrip()
        if end.endswith(self.reasoning.opening):
            return True
        return False if end.endswith(_FINAL if self.reasoning is HARMONY else self.reasoning.closing) else None


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all templates of a tokenizer as one text (some have a separate one for tools); empty if it has none."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates or "")


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the tokens added to the vocabulary by their texts, special tokens included."""
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
