"""Structured output: grammars for JSON schemas, regular expressions and choices, compiled for the tokenizer of a model.

llguidance computes the allowed next tokens: an Earley parser over a lexer of lazily built regular-expression derivatives, walked
along a trie of the vocabulary (https://guidance-ai.github.io/llguidance/llg-go-brrr).
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

from outrider.decoding.arrays import BoolArray, Int32Array
from outrider.engine.errors import RequestError
from outrider.engine.text.chat_format import Tags
from outrider.engine.text.grammar_check import INSTALLED, NO_VOCABULARY, TOO_COSTLY, GrammarChecker, Vocabulary, deeply
from outrider.engine.text.json_schema import enforceable, lenient, without_patterns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

if INSTALLED:
    from llguidance import LLMatcher, LLTokenizer, grammar_from

logger = logging.getLogger(__name__)

FIELD = "response_format"  # default field of errors about grammars
MAX_GRAMMAR_CHARS = 100_000
KEPT_BYTES = 256 << 20  # limit of compiled grammars, by the estimate ``_Compiled.size``
# The library does not report the memory of a grammar. Measured with GPT-2's vocabulary: 85 bytes per character with 2,500 rules;
# 30 to 150 MB per second of compiling patterns or computing masks of new states.
_BYTES_PER_CHAR, _BYTES_PER_S = 100, 150_000_000
_KNOWN_S = 0.001  # a mask of known states takes less
MASK_S = 0.005  # processor time for a request's masks in a step; a slower request is throttled (``StepPlanner``)
MAX_DEBT_S = 1.0  # accumulated excess over ``MASK_S`` per step that ends a request
_TOO_SLOW = (
    f"computing the allowed tokens takes more than {1e3 * MASK_S:g} ms of processor time per step, and exceeds it by more than "
    f"{MAX_DEBT_S:g} s in total: make the grammar less ambiguous (one rule for each text), or its patterns shorter"
)
_CHECKER = GrammarChecker()
# By default the library fixes the split into tokens if only one text is possible. Here the model chooses the split, so that all
# texts of the language, and no others, are allowed. The library's split is drafted instead (``MatcherGrammar.forced``).
_UNFORCED = '%llguidance {"no_forcing": true}'
HARMONY_TEXT = r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\|[a-z]+\|>(?s:.*)/"  # text of a message, without marks
# Whitespace between the tokens of JSON, bounded because a model might otherwise emit it without end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"


_PATTERN_PARTS = re.compile(r"\\.|[\[\]]|[^\\\[\]]+|\\", re.DOTALL)  # escapes, brackets and the rest
_ASCII_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\r\n\f\v"}


class GrammarError(ValueError):
    """Invalid schema, pattern or choice, or one that the library cannot enforce; the message gives the reason."""


def json_grammar(schema: Mapping[str, Any] | str) -> str:
    """Return the grammar of JSON that is valid under a schema. Raises ``GrammarError``."""
    try:
        text = json.dumps(enforceable(json.loads(schema) if isinstance(schema, str) else schema))
        return _checked(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}), len(text))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(reason_of(str(error))) from None


def lenient_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a schema without the keywords that cannot be enforced, and their paths.

    Raises:
        GrammarError: nothing is valid under the schema, it is not a schema, or it takes too long to compile.
    """
    if not _fault_of(schema):
        return dict(schema), []
    changed, left_out = lenient(schema)
    if not _fault_of(changed):
        return changed, left_out
    changed, patterns = without_patterns(changed, lambda pattern: not _fault_of({"type": "string", "pattern": pattern}))
    if fault := _fault_of(changed):
        raise GrammarError(fault)
    return changed, left_out + patterns


def _fault_of(schema: Mapping[str, Any]) -> str:
    """Return why a schema cannot be enforced; empty if it can. Raises ``GrammarError`` if it takes too long to compile."""
    try:
        json_grammar(schema)
    except GrammarError as error:
        if str(error) in (TOO_COSTLY, reason_of(TOO_COSTLY)):
            raise
        return str(error)
    return ""


def object_grammar() -> str:
    """Return the grammar of any JSON object."""
    return json_grammar({"type": "object"})


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return JSON that is valid under a schema, as the right side of a rule in Lark's notation. Raises ``GrammarError``."""
    try:
        return f"%json {json.dumps({**enforceable(schema), 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(reason_of(str(error))) from None


def regex_grammar(pattern: str) -> str:
    """Return the grammar of a regular expression, matched as a whole. Raises ``GrammarError``.

    The syntax is Rust's, without look-around. The classes ``\\d``, ``\\w`` and ``\\s`` are ASCII, as in JSON schemas.
    """
    return _checked(LLMatcher.grammar_from_regex(_with_ascii_classes(pattern)), len(pattern))


def regex_rule(pattern: str) -> str:
    """Return a regular expression as the right side of a rule in Lark's notation."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    spelled = re.sub(r"(?s:\\.)|[/\n]", lambda found: escapes.get(found[0], found[0]), _with_ascii_classes(pattern))
    return f"/(?:{spelled})/"


def _with_ascii_classes(pattern: str) -> str:
    """Return a pattern with its escapes for classes of characters spelled out."""
    parts, inside = [], False
    for found in _PATTERN_PARTS.finditer(pattern):
        part = found[0]
        known = _ASCII_CLASSES.get(part[1:].lower()) if part.startswith("\\") else None
        if known is not None and part[1].islower():
            part = known if inside else f"[{known}]"
        elif known is not None:
            part = f"[^{known}]"
        elif part in ("[", "]"):
            inside = part == "["
        parts.append(part)
    return "".join(parts)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of several texts. Raises ``GrammarError``."""
    if not choices or not all(choices):
        raise GrammarError("must hold at least one text, and no empty one")
    rule = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    return _checked(LLMatcher.grammar_from_lark(rule), len(rule))


def context_free_grammar(text: str) -> str:
    """Return the grammar of a text in Lark's notation or GBNF. Raises ``GrammarError``."""
    if text.lstrip().startswith("{"):
        raise GrammarError("must be in Lark's notation or GBNF, not JSON")
    try:
        return _checked(grammar_from("grammar", text), len(text))
    except ValueError as error:
        raise GrammarError(reason_of(str(error))) from None


def lark_grammar(text: str) -> str:
    """Return the grammar of a text in the library's dialect of Lark's notation. Raises ``GrammarError``."""
    return _checked(LLMatcher.grammar_from_lark(text), len(text))


def after_reasoning(answer: str, tags: Tags, tokens: Mapping[str, int], begins_within: bool | None) -> str:
    """Return a grammar that constrains the answer after reasoning, which is free text between tags.

    Args:
        answer: a grammar from a function of this module.
        tokens: ids of added tokens by text; a tag among them must be this token.
        begins_within: whether the prompt has opened the reasoning (true) or closed it (false: ``answer`` is returned); None: the
            model may begin with reasoning or with the answer.
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
    """Return a grammar that constrains the last message of a harmony answer, after any number of reasoning messages.

    Args:
        answer: a grammar from a function of this module.
        tokens: ids of added tokens by text, with the marks of the format.
        begins_within: whether the prompt has begun a message of the channel ``analysis`` (true) or ``final`` (false); None: it
            ends before the header of a message.
        has_header: whether ``answer`` includes the header of its message; if not, it is the text of one in the channel ``final``.
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
    """Return the rule ``type``, by which a message's header may declare its text as JSON."""
    mark = tokens.get("<|constrain|>")
    return 'type: (" json")?' if mark is None else f'type: (" json" | " "? <[{mark}]> "json")?'


def _checked(grammar: str, size: int) -> str:
    """Return a valid grammar, changed so that the model chooses the split into tokens."""
    if size > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"must have at most {MAX_GRAMMAR_CHARS} characters, got {size}")
    if fault := _CHECKER.fault(grammar):
        raise GrammarError(reason_of(fault))
    rules = grammar
    if grammar.startswith("{"):  # JSON, around a schema or Lark's notation
        (one,) = json.loads(grammar)["grammars"]
        rules = one["lark_grammar"] or f"start: %json {json.dumps(one['json_schema'])}"
    # Grammars are sent as text in the library's notation (``SamplingParams.grammar``), so that every rank, and a replica that
    # takes over a request, compiles the same one.
    return f"{_UNFORCED}\n{rules}"


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int, end_tokens: Collection[int]) -> Vocabulary:
    """Return the vocabulary of a model. Raises ``ValueError`` if the library cannot read the tokenizer."""
    if not tokenizer.is_fast:
        raise ValueError("it is not one of the library tokenizers")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    ends = tuple(sorted(token for token in end_tokens if token < vocab_size))
    return Vocabulary(backend.to_str(), max(vocab_size, len(tokenizer)), ends)


def reason_of(message: str) -> str:
    """Return the library's message in one line, without the dump of its state."""
    return " ".join(message.split("<state>")[0].split())[:400]


class MatcherGrammar:
    """``decoding.verify.grammar.Grammar`` over a matcher of the library."""

    def __init__(
        self,
        compiled: _Compiled,
        vocabulary: LLTokenizer,
        vocab_size: int,
        end_tokens: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """Create the state before the first token; ``clock`` returns the processor seconds of the calling thread."""
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._vocab_size, self._end_tokens, self._clock = vocab_size, list(end_tokens), clock
        self._step_s = self._debt_s = self.slow_s = 0.0
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary.vocab_size + 31) // 32, np.int32)
        self._mask: BoolArray | None = None  # of the current state; None if not computed
        self._size = self._beyond = 0  # tokens in the matcher, and tokens pushed after its end
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
            # States move back as well as forward, as the branches of a draft tree require.
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
                self._fail("no token of the model can continue the output")
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
    """Compiled grammar. Its copies share the states of its patterns, which grow with new texts."""

    matcher: LLMatcher  # in its initial state
    chars: int
    spent_s: float  # processor time of compiling, and of masks with new states
    failed: bool = False  # a request failed, maybe at the limit of states: the next one compiles it again

    @property
    def size(self) -> int:
        return self.chars * _BYTES_PER_CHAR + int(self.spent_s * _BYTES_PER_S)  # estimated bytes


class Grammars:
    """Thread-safe compiler and cache of grammars for one model, by account: an account evicts its own grammars first."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int,
        end_tokens: Collection[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._tokenizer, self._vocab_size, self._clock = tokenizer, vocab_size, clock
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()  # by account and grammar
        self._compiling: dict[tuple[str, str], Future[_Compiled]] = {}

    def prepare(self) -> None:
        """Read the tokenizer, which takes a second for a large one, so that no request waits for it."""
        try:
            self._known()
        except GrammarError as error:  # requests with structured output get the error
            logger.warning("%s", error)

    def warmup(self) -> Iterator[None]:
        """Run ``prepare`` as a deferred warm-up task."""
        self.prepare()
        yield

    def start(self, grammar: str, account: str = "", field: str = FIELD) -> MatcherGrammar:
        """Return the initial state of a grammar, compiled unless cached for the account. Raises ``RequestError``."""
        try:
            return self._start(grammar, account)
        except GrammarError as error:
            raise RequestError(field, str(error)) from error

    def _start(self, grammar: str, account: str) -> MatcherGrammar:
        if not self._end_tokens:
            raise GrammarError("this model has no end token, which structured output requires")
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
            # Another thread compiles the same grammar: wait for it outside of the lock.
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
            raise GrammarError(reason_of(compiled.matcher.get_error()))
        self._keep(key, compiled)
        return MatcherGrammar(compiled, vocabulary, self._vocab_size, self._end_tokens, self._clock)

    def _compile(self, grammar: str, vocabulary: LLTokenizer) -> _Compiled:
        """Compile a grammar and its first mask in a thread that releases the GIL."""

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
            raise GrammarError(reason_of(str(error))) from error
        return compiled

    def _keep(self, key: tuple[str, str], compiled: _Compiled) -> None:
        """Cache a grammar; evict the oldest of its account, or of the account with the most bytes if it has no other."""
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
            raise GrammarError("structured output needs llguidance, which is not installed: pip install llguidance")
        try:
            known = vocabulary_of(self._tokenizer, self._vocab_size, self._end_tokens)
            return LLTokenizer(known.tokenizer, n_vocab=known.size, eos_token=list(known.end_tokens))
        except ValueError as error:
            raise GrammarError(f"{NO_VOCABULARY}: {reason_of(str(error))}") from error
