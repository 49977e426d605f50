"""What a chat template has its model write: reasoning between tags, calls of tools in a form of its own, or GPT-OSS's messages.

It is read off the template, whatever the model's name: who changes the template of a model changes this, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CallForm = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "harmony"]  # vLLM's names of its tool parsers, but the last


class Tags(NamedTuple):
    """What stands before and behind the reasoning."""

    opening: str
    closing: str


# Tags that templates use, of which the model closes the second; of the last pair Granite 3.2's template tells in words.
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
# Of the harmony format: a message of the channel that is reasoning, of which there may be several, at any place.
HARMONY = Tags("<|channel|>analysis<|message|>", "<|end|>")
_FINAL = "<|channel|>final<|message|>"
# What of a template shows a form of calls: all of some words, and none of others.
_CALL_FORMS: tuple[tuple[CallForm, tuple[str, ...], tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>"), ()),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter="), ()),
    ("hermes", ("<tool_call>",), ("<arg_key>",)),  # with it, the form is that of GLM, which is not read
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3_json", ("<|python_tag|>",), ()),
    ("llama3_json", ('{"name": function name, "parameters": dictionary of argument name and its value}',), ()),
)
CALL_MARKS: dict[CallForm, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
}  # texts of which some tokenizers have tokens
HARMONY_ENDS = CALL_MARKS["harmony"][-2:]  # that end an answer
_END_TOKENS = 24  # of a prompt, in which a tag would stand


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Of one model."""

    reasoning: Tags | None = None  # None: it does not reason, or between tags that are not known
    calls: CallForm | None = None  # None: calls are not told from text
    has_call_names: bool = False  # of mistral: newer models write the name of each call before its arguments
    hidden: frozenset[str] = frozenset()  # marks that are special tokens, and show as text only where these are not skipped

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """What the template of a tokenizer shows; nothing where it has none. The marks of harmony have to be tokens, too."""
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
        """Whether what follows a prompt begins as reasoning; None where the model decides.

        Example: the prompt of a model that always reasons ends with ``<think>``, where ``enable_thinking`` is false with
        ``<think>`` and ``</think>``.
        """
        if self.reasoning is None:
            return False
        end = str(tokenizer.decode(list(prompt_ids[-_END_TOKENS:]), skip_special_tokens=False)).rstrip()
        if end.endswith(self.reasoning.opening):
            return True
        return False if end.endswith(_FINAL if self.reasoning is HARMONY else self.reasoning.closing) else None


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """All templates of a tokenizer, of which some have one of its own for tools; empty where there is none."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates or "")


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Texts that are tokens of their own beside the vocabulary, special ones included, and their ids."""
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
