"""Structured output: grammars for JSON schemas, regular expressions and choices, compiled for the tokenizer of a model.

llguidance computes what may come next: an Earley parser over a lexer of lazily built regular-expression derivatives, walked along
a trie of the vocabulary (https://guidance-ai.github.io/llguidance/llg-go-brrr). Little is precomputed for a grammar, so that a
new schema mostly costs milliseconds, and states move back as well as forward, which the branches of a draft tree need. What costs
more is refused by ``engine.text.grammar_check``, and compiled beside the engine (``Grammars.start``).

Where a grammar leaves one text only, the library would also dictate how it is cut into tokens. Here the model decides, so that
what may come next is exactly what the language allows; the library's cut is drafted (``MatcherGrammar.forced``).

A grammar travels as text in the library's own notation (``SamplingParams.grammar``), so that every rank of a group, and a replica
that takes a request over, compiles the same one.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from decoding.tree import BoolArray, Int32Array
from engine.errors import RequestError
from engine.text.chat_format import Tags
from engine.text.grammar_check import INSTALLED, NO_VOCABULARY, GrammarChecker, Vocabulary, deeply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

if INSTALLED:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

logger = logging.getLogger(__name__)

FIELD = "response_format"  # what an engine that has no use for a grammar names as the field at fault
MAX_GRAMMAR_CHARS = 100_000  # of a schema or pattern
KEPT_BYTES = 256 << 20  # of compiled grammars, as ``_Compiled.size`` has it
# The library does not tell how much memory a grammar takes. Measured with GPT-2's vocabulary: 85 bytes for a character of 2,500
# rules; 30 to 150 MB for a second in which patterns are compiled, or masks are computed whose states are new.
_BYTES_PER_CHAR, _BYTES_PER_S = 100, 150_000_000
_KNOWN_S = 0.001  # a mask takes less where its states are known
MASK_S = 0.005  # processor time for the masks of one request in a step. Beyond it the request is slowed (``StepPlanner``)
MAX_DEBT_S = 1.0  # beyond ``MASK_S`` a step, before a request is ended
_TOO_SLOW = (
    f"what may come next takes more than {1e3 * MASK_S:g} ms of processor time a step, by more than {MAX_DEBT_S:g} s in all: "
    "make the grammar less ambiguous (one rule for each text), or its patterns shorter"
)
_CHECKER = GrammarChecker()
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
        raise GrammarError(reason_of(str(error))) from None


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
        raise GrammarError(reason_of(str(error))) from None


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
    if fault := _CHECKER.fault(grammar):
        raise GrammarError(reason_of(fault))
    rules = grammar
    if grammar.startswith("{"):  # JSON, around a schema or Lark's notation
        (one,) = json.loads(grammar)["grammars"]
        rules = one["lark_grammar"] or f"start: %json {json.dumps(one['json_schema'])}"
    return f"{_UNFORCED}\n{rules}"


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int, end_tokens: Collection[int]) -> Vocabulary:
    """Return the vocabulary of a model with so many logits. Raises ``ValueError``: the library does not read such a tokenizer."""
    if not tokenizer.is_fast:
        raise ValueError("it is not one of the library tokenizers")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    ends = tuple(sorted(token for token in end_tokens if token < vocab_size))
    return Vocabulary(backend.to_str(), max(vocab_size, len(tokenizer)), ends)


def reason_of(message: str) -> str:
    """The library's message in one line, without the dump of its state that may follow."""
    return " ".join(message.split("<state>")[0].split())[:400]


class MatcherGrammar:
    """A ``decoding.verify.grammar.Grammar`` over a matcher of the library."""

    __slots__ = (
        "_beyond", "_clock", "_compiled", "_debt_s", "_end_tokens", "_mask", "_matcher", "_size", "_step_s", "_vocab_size",
        "_vocabulary", "_words", "fault", "slow_s",
    )  # fmt: skip

    def __init__(
        self,
        compiled: _Compiled,
        vocabulary: LLTokenizer,
        vocab_size: int,
        end_tokens: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            compiled: the grammar, which other requests may share.
            vocabulary: as the library has it.
            vocab_size: logits of the model.
            end_tokens: of the model.
            clock: seconds of processor time of the calling thread.
        """
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._vocab_size, self._end_tokens, self._clock = vocab_size, list(end_tokens), clock
        self._step_s = self._debt_s = self.slow_s = 0.0
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
        if self._beyond == 0 and token not in self._end_tokens:
            began_s = self._clock()
            consumed = self._matcher.try_consume_tokens([token])
            self._step_s += self._clock() - began_s
            if consumed:
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
        began_s = self._clock()
        valid = self._matcher.validate_tokens([token]) == 1
        self._step_s += self._clock() - began_s
        return valid

    def allowed(self) -> BoolArray | None:
        """See ``Grammar``."""
        if self._beyond or self.fault is not None:
            return None
        if self._mask is None:
            began_s = self._clock()
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            took_s = self._clock() - began_s
            self._step_s += took_s
            self._compiled.spent_s += max(0.0, took_s - _KNOWN_S)
            mask = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)
            mask[self._end_tokens] = self._matcher.is_accepting()
            if self._matcher.is_error():
                self._fail(reason_of(self._matcher.get_error()))
            elif not mask.any():
                self._fail("no token of the model can go on with the output")
            else:
                self._mask = mask
        return self._mask

    def forced(self) -> list[int]:
        """See ``Grammar``."""
        text = b"" if self._beyond or self.fault is not None else self._matcher.compute_ff_bytes()
        return self._vocabulary.tokenize_partial(text)[0] if text else []

    def end_step(self) -> None:
        """See ``Grammar``."""
        self.slow_s = self._step_s if self._step_s > MASK_S else 0.0
        self._debt_s = max(0.0, self._debt_s + self._step_s - MASK_S)
        self._step_s = 0.0
        if self._debt_s > MAX_DEBT_S:
            self._fail(_TOO_SLOW)

    def _fail(self, reason: str) -> None:
        self.fault = self.fault or f"the grammar cannot be followed: {reason}"
        self._compiled.failed = True


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar. Its copies share the states of its patterns, which grow with new texts."""

    matcher: LLMatcher  # at its beginning
    chars: int
    spent_s: float  # processor time to compile it, and for masks with new states
    failed: bool = False  # a request ended by it, maybe since it may have no more states: the next one compiles it anew

    @property
    def size(self) -> int:
        """Estimated bytes."""
        return self.chars * _BYTES_PER_CHAR + int(self.spent_s * _BYTES_PER_S)


class Grammars:
    """Compiles the grammars of requests for one model, from any thread. The latest ones are kept compiled, each for one account:
    what one account sends never pushes out what is another's while something of its own is left, nor uses up its states."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int,
        end_tokens: Collection[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``clock`` tells the processor time of the calling thread."""
        self._tokenizer, self._vocab_size, self._clock = tokenizer, vocab_size, clock
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()  # by account and grammar
        self._compiling: dict[tuple[str, str], Future[_Compiled]] = {}

    def prepare(self) -> None:
        """Reads the tokenizer, which takes a second for a large one, so that no request waits for it."""
        try:
            self._known()
        except RequestError as error:  # those that ask for structured output are told
            logger.warning("%s", error.message)

    def chore(self) -> Iterator[None]:
        """``prepare`` as one piece of work, for a start that does not wait for it."""
        self.prepare()
        yield

    def start(self, grammar: str, account: str = "", field: str = FIELD) -> MatcherGrammar:
        """The state of a grammar, as the functions of this module return it, before the first token.

        It is compiled unless it was for the same account, by one thread where several ask for it: not to be called where
        other requests wait for the thread.

        Raises:
            RequestError: naming the field; it cannot be used with this model.
        """
        if not self._end_tokens:
            raise RequestError(field, "this model has no end token, by which structured output would end")
        vocabulary, key = self._known(), (account, grammar)
        with self._lock:
            compiled = self._kept.get(key)
            if compiled is not None and compiled.failed:
                del self._kept[key]
                compiled = None
            waited = self._compiling.get(key)
            if compiled is None and waited is None:
                future = self._compiling[key] = Future()
        if compiled is None and waited is not None:
            compiled = waited.result()
        if compiled is None:
            try:
                compiled = self._compile(grammar, vocabulary)
                future.set_result(compiled)
            except BaseException as error:
                future.set_exception(error)
                raise
            finally:
                with self._lock:
                    del self._compiling[key]
        if compiled.matcher.is_error():
            raise RequestError(field, reason_of(compiled.matcher.get_error()))
        self._keep(key, compiled)
        return MatcherGrammar(compiled, vocabulary, self._vocab_size, self._end_tokens, self._clock)

    def _compile(self, grammar: str, vocabulary: LLTokenizer) -> _Compiled:
        """Compile a grammar and compute its first mask, which others wait for, in a thread that lets go of the interpreter."""

        def compile_it() -> _Compiled:
            began_s = self._clock()
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
            if not matcher.is_error():
                words = np.zeros((vocabulary.vocab_size + 31) // 32, np.int32)
                matcher.deep_copy().unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return _Compiled(matcher, len(grammar), self._clock() - began_s)

        try:
            compiled: _Compiled = deeply(compile_it)
        except ValueError as error:
            raise RequestError(FIELD, reason_of(str(error))) from error
        return compiled

    def _keep(self, key: tuple[str, str], compiled: _Compiled) -> None:
        """Keep a grammar as the latest one, and let go of others for it: of its account's first, then of who has the most."""
        with self._lock:
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            while (sizes := self._sizes()) and sum(sizes.values()) > KEPT_BYTES:
                mine = sum(account == key[0] for account, _ in self._kept)
                owner = key[0] if mine > 1 else max(sizes, key=lambda account: sizes[account])
                del self._kept[next(one for one in self._kept if one[0] == owner)]

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (account, _), compiled in self._kept.items():
            sizes[account] = sizes.get(account, 0) + compiled.size
        return sizes

    def _known(self) -> LLTokenizer:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> LLTokenizer:
        if not INSTALLED:
            raise RequestError(FIELD, "structured output needs llguidance, which is not installed: pip install llguidance")
        try:
            known = vocabulary_of(self._tokenizer, self._vocab_size, self._end_tokens)
            return LLTokenizer(known.tokenizer, n_vocab=known.size, eos_token=list(known.end_tokens))
        except ValueError as error:
            raise RequestError(FIELD, f"{NO_VOCABULARY}: {reason_of(str(error))}") from error
