"""Structured output: grammars for JSON schemas, regular expressions and choices, compiled for the tokenizer of a model.

llguidance computes what may come next: an Earley parser over a lexer of lazily built regular-expression derivatives, walked along
a trie of the vocabulary (https://guidance-ai.github.io/llguidance/llg-go-brrr). Nothing is precomputed for a grammar, so that a
new schema costs a fraction of a millisecond, and states move back as well as forward, which the branches of a draft tree need.

Where a grammar leaves one text only, the library would also dictate how it is cut into tokens. Here the model decides, so that
what may come next is exactly what the language allows; the library's cut is drafted (``MatcherGrammar.forced``).

A grammar travels as text in the library's own notation (``SamplingParams.grammar``), so that every rank of a group, and a replica
that takes a request over, compiles the same one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from decoding.tree import BoolArray, Int32Array
from engine.errors import RequestError
from engine.text.chat_format import Tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INSTALLED = importlib.util.find_spec("llguidance") is not None  # engines are measured on machines that have not
if INSTALLED:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

logger = logging.getLogger(__name__)

FIELD = "response_format"  # what an engine that has no use for a grammar names as the field at fault
MAX_GRAMMAR_CHARS = 100_000  # of a schema or pattern: more would hold up the requests of others while it is compiled
KEPT = 64  # compiled grammars
# The library compiles recursively: rules that refer to one another in a long row would overflow the stack of an ordinary thread,
# which ends the process. This much is enough for a row as long as ``MAX_GRAMMAR_CHARS`` allows; what is not used takes no memory.
_STACK_BYTES = 256 << 20
_STACK_LOCK = threading.Lock()  # the size is that of all threads which start meanwhile
_UNFORCED = '%llguidance {"no_forcing": true}'
HARMONY_TEXT = r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\|[a-z]+\|>(?s:.*)/"  # of a message: marks are no text
# Runs of it between the tokens of JSON. Bounded: a model may lose itself in it otherwise, and never come to the next value.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"


class GrammarError(ValueError):
    """A schema, pattern or choice that is not one, or that asks for more than the library can enforce; the message says what."""


def json_grammar(schema: Mapping[str, Any] | str) -> str:
    """JSON that is valid under a schema, with any whitespace, at most 40 characters in a row. Raises ``GrammarError``."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return _checked(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}), len(text))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from None


def object_grammar() -> str:
    """Any JSON object."""
    return json_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole (Rust's syntax; no look-around). Raises ``GrammarError``."""
    return _checked(LLMatcher.grammar_from_regex(pattern), len(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises ``GrammarError``."""
    if not choices or not all(choices):
        raise GrammarError("must hold at least one text, and no empty one")
    rule = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    return _checked(LLMatcher.grammar_from_lark(rule), len(rule))


def context_free_grammar(text: str) -> str:
    """Text of a context-free grammar in Lark's notation or GBNF. Raises ``GrammarError``."""
    if text.lstrip().startswith("{"):
        raise GrammarError("must be in Lark's notation or GBNF, not JSON")
    try:
        return _checked(grammar_from("grammar", text), len(text))
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from None


def lark_grammar(text: str) -> str:
    """Text of a grammar in the library's own dialect of Lark's notation. Raises ``GrammarError``."""
    return _checked(LLMatcher.grammar_from_lark(text), len(text))


def after_reasoning(answer: str, tags: Tags, tokens: Mapping[str, int], begins_within: bool | None) -> str:
    """A grammar that binds an answer behind reasoning, within which the model is free but for the tags.

    Args:
        answer: as the functions of this module return it.
        tags: around the reasoning.
        tokens: texts that are tokens of their own beside the vocabulary; tags that are among them are these tokens alone.
        begins_within: the prompt has opened the reasoning (true) or closed it (false, nothing changes); None: the model may
            begin with reasoning, or with the answer at once.
    """
    if begins_within is False:
        return answer
    opening, closing = tags
    pattern = re.escape(closing).replace("/", r"\/")
    open_rule = f"<[{tokens[opening]}]>" if opening in tokens else json.dumps(opening)
    if closing in tokens:
        others = sorted({token for token in tokens.values() if token != tokens[closing]})
        rules = [
            f"thought: (TEXT other)* TEXT <[{tokens[closing]}]>" if others else f"thought: TEXT <[{tokens[closing]}]>",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/",
            *([f"other: <[{','.join(map(str, others))}]>"] if others else []),
        ]
    else:
        rules = [f"thought[suffix={json.dumps(closing)}]: /(?s:.*)/"]
    start = "start: thought @answer" if begins_within else f"start: (SPACE {open_rule} thought)? @answer"
    rules = [start, *rules, *([] if begins_within else [r"SPACE: /[ \n]{0,2}/"])]
    outer = {"lark_grammar": "\n".join((_UNFORCED, *rules))}
    return json.dumps({"grammars": [outer, {"name": "answer", "lark_grammar": answer}]})


def behind_analysis(answer: str, tokens: Mapping[str, int], begins_within: bool | None, has_header: bool) -> str:
    """A grammar that binds the last message of an answer in the harmony format, behind any number of messages of reasoning.

    Args:
        answer: as the functions of this module return it.
        tokens: of the model, its marks of the format among them.
        begins_within: the prompt has begun a message of the channel ``analysis`` (true) or ``final`` (false); None: it ends
            before the header of a message.
        has_header: the answer begins with the header of its message; otherwise it is the text of one in the channel ``final``.
    """
    if begins_within is False and not has_header:
        return answer
    mark = {name: f"<[{tokens[f'<|{name}|>']}]>" for name in ("start", "channel", "message", "end")}
    first = "" if begins_within is None else "TEXT next" if begins_within else "next"
    rules = [
        f"start: {first} thought* {'' if has_header else 'final'} @answer",
        f'thought: {mark["channel"]} "analysis" {mark["message"]} TEXT next',
        f'next: {mark["end"]} {mark["start"]} "assistant"',
        f'final: {mark["channel"]} "final" type {mark["message"]}',
        harmony_type(tokens),
        HARMONY_TEXT,
    ]
    outer = {"lark_grammar": "\n".join((_UNFORCED, *rules))}
    return json.dumps({"grammars": [outer, {"name": "answer", "lark_grammar": answer}]})


def harmony_type(tokens: Mapping[str, int]) -> str:
    """The rule ``type`` of how a message's header may say that its text is JSON."""
    mark = tokens.get("<|constrain|>")
    return 'type: (" json")?' if mark is None else f'type: (" json" | " "? <[{mark}]> "json")?'


def _checked(grammar: str, size: int) -> str:
    """The grammar, with the tokens left to the model."""
    if size > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"must have at most {MAX_GRAMMAR_CHARS} characters, got {size}")
    failed, messages = _deeply(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    if failed:
        raise GrammarError(_reason(messages[0]))
    rules = grammar
    if grammar.startswith("{"):  # JSON, around a schema or Lark's notation
        (one,) = json.loads(grammar)["grammars"]
        rules = one["lark_grammar"] or f"start: %json {json.dumps(one['json_schema'])}"
    return f"{_UNFORCED}\n{rules}"


def _deeply(compile: Callable[[], Any]) -> Any:
    """What a call to the library gives, made in a thread with a stack that is deep enough."""
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            done = pool.submit(compile)  # which starts the thread
        finally:
            threading.stack_size(before)
    with pool:
        return done.result()


def _reason(message: str) -> str:
    """The library's message in one line, without the dump of its state that may follow."""
    return " ".join(message.split("<state>")[0].split())[:400]


class MatcherGrammar:
    """A ``decoding.verify.grammar.Grammar`` over a matcher of the library."""

    __slots__ = ("_beyond", "_end_tokens", "_mask", "_matcher", "_size", "_vocab_size", "_vocabulary", "_words", "fault")

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """The matcher is at its beginning and this object's own."""
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, list(end_tokens)
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary.vocab_size + 31) // 32, np.int32)
        self._mask: BoolArray | None = None  # of the state as it is; None: not computed
        self._size = self._beyond = 0  # tokens that the matcher holds, and those pushed behind its end
        self.fault: str | None = None

    @property
    def length(self) -> int:
        """See ``Grammar``."""
        return self._size + self._beyond

    def push(self, token: int) -> bool:
        """See ``Grammar``."""
        self._mask = None
        if self._beyond == 0 and token not in self._end_tokens and self._matcher.try_consume_tokens([token]):
            self._size += 1
            return True
        self._beyond += 1
        return self._beyond == 1 and token in self._end_tokens and self._matcher.is_accepting()

    def truncate(self, length: int) -> None:
        """See ``Grammar``."""
        surplus = self.length - length
        if surplus <= 0:
            return
        self._mask = None
        behind = min(surplus, self._beyond)
        self._beyond -= behind
        if surplus > behind:
            self._matcher.rollback(surplus - behind)
            self._size -= surplus - behind

    def catch_up(self, output_ids: Int32Array) -> None:
        """See ``Grammar``."""
        self.truncate(len(output_ids))
        for token in output_ids[self.length :].tolist():
            if not self.push(token):
                self._fail(f"the output's token {token} is not one that the grammar allows there")

    def accepts(self, token: int) -> bool:
        """See ``Grammar``."""
        if self._beyond or self.fault is not None:
            return True
        if token in self._end_tokens:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1

    def allowed(self) -> BoolArray | None:
        """See ``Grammar``."""
        if self._beyond or self.fault is not None:
            return None
        if self._mask is None:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            mask = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)
            mask[self._end_tokens] = self._matcher.is_accepting()
            if self._matcher.is_error():
                self._fail(_reason(self._matcher.get_error()))
            elif not mask.any():
                self._fail("no token of the model can go on with the output")
            else:
                self._mask = mask
        return self._mask

    def forced(self) -> list[int]:
        """See ``Grammar``."""
        text = b"" if self._beyond or self.fault is not None else self._matcher.compute_ff_bytes()
        return self._vocabulary.tokenize_partial(text)[0] if text else []

    def _fail(self, reason: str) -> None:
        self.fault = self.fault or f"the grammar cannot be followed: {reason}"


class Grammars:
    """Compiles the grammars of requests for one model, from any thread. The latest ones are kept compiled."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Reads the tokenizer, which takes a second for a large one, so that no request waits for it."""
        try:
            with self._lock:
                self._vocabulary = self._vocabulary or self._read_vocabulary()
        except RequestError as error:  # those that ask for structured output are told
            logger.warning("%s", error.message)

    def chore(self) -> Iterator[None]:
        """``prepare`` as one piece of work, for a start that does not wait for it."""
        self.prepare()
        yield

    def start(self, grammar: str) -> MatcherGrammar:
        """The state of a grammar, as the functions of this module return it, before the first token.

        Raises:
            RequestError: it cannot be used with this model.
        """
        if not self._end_tokens:
            raise RequestError(FIELD, "this model has no end token, by which structured output would end")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            vocabulary = self._vocabulary
            matcher = self._compiled.pop(grammar, None) or _deeply(lambda: LLMatcher(vocabulary, grammar, log_level=0))
            if matcher.is_error():
                raise RequestError(FIELD, _reason(matcher.get_error()))
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return MatcherGrammar(matcher.deep_copy(), self._vocabulary, self._vocab_size, self._end_tokens)

    def _read_vocabulary(self) -> LLTokenizer:
        if not INSTALLED:
            raise RequestError(FIELD, "structured output needs llguidance, which is not installed: pip install llguidance")
        size = max(self._vocab_size, len(self._tokenizer))
        try:
            from llguidance.hf import from_tokenizer  # which imports transformers

            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._end_tokens)
        except ValueError as error:
            reason = _reason(str(error))
            raise RequestError(FIELD, f"structured output is not possible with this model's tokenizer: {reason}") from error
