"""Compiled grammars: masks against the texts of small languages, one by one, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.engine.errors import RequestError
from outrider.engine.text import grammar as grammar_module
from outrider.engine.text.grammar import (
    MASK_S,
    MAX_DEBT_S,
    GrammarError,
    Grammars,
    MatcherGrammar,
    choice_grammar,
    context_free_grammar,
    json_grammar,
    object_grammar,
    regex_grammar,
    vocabulary_of,
)
from outrider.engine.text.grammar_check import TOO_COSTLY, GrammarChecker

MERGED = ("ab", "abc", "ba", "cab", "aa", "{}", '{"', '":', "12", "é", "éa")
SPECIAL = ("<eos>", "<end>", "<other>")
PADDED = 300  # logits of the model, some of which no token has


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few longer tokens, and special tokens, of which the first two end a text."""
    spelled = _byte_characters()
    vocab = {name: number for number, name in enumerate(SPECIAL)}
    merges: list[tuple[str, str]] = []
    for character in spelled:
        vocab[character] = len(vocab)
    for text in MERGED:
        characters = [spelled[byte] for byte in text.encode()]
        for size in range(2, len(characters) + 1):
            whole = "".join(characters[:size])
            if whole not in vocab:
                vocab[whole] = len(vocab)
                merges.append(("".join(characters[: size - 1]), characters[size - 1]))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[1], additional_special_tokens=list(SPECIAL[2:])
    )


def _byte_characters() -> list[str]:
    """The characters by which byte-level tokenizers spell the bytes 0 to 255 (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def grammars(tokenizer: PreTrainedTokenizerFast) -> Grammars:
    return Grammars(tokenizer, PADDED, (0, 1))


@pytest.fixture(scope="module")
def spellings(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """The bytes of each token; of special ones and of numbers beyond the tokenizer's, none."""
    table = {character: byte for byte, character in enumerate(_byte_characters())}
    names = [tokenizer.convert_ids_to_tokens(token) for token in range(len(tokenizer))]
    found = [b"" if name in SPECIAL else bytes(table[character] for character in name) for name in names]
    return found + [b""] * (PADDED - len(found))


def words(alphabet: str, longest: int) -> list[str]:
    return ["".join(letters) for size in range(longest + 1) for letters in itertools.product(alphabet, repeat=size)]


# A grammar, and the texts of its language.
LANGUAGES: dict[str, tuple[str, list[str]]] = {
    "choice": (choice_grammar(["abc", "ab", "cab", 'é"', "éab", "a\nb"]), ["abc", "ab", "cab", 'é"', "éab", "a\nb"]),
    "regex": (regex_grammar("(ab|c){1,3}a?"), [text for text in words("abc", 7) if re.fullmatch("(ab|c){1,3}a?", text)]),
    "lark": (
        context_free_grammar('start: "a" start? "b" | "c"'),
        ["c", *("a" * n + c + "b" * n for n in range(1, 12) for c in ("", "c"))],
    ),
    "gbnf": (context_free_grammar('root ::= "ab" ("c" | "ba")?'), ["ab", "abc", "abba"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_those_of_the_language(grammars: Grammars, spellings: list[bytes], name: str) -> None:
    """Random walks forwards and backwards, among what is allowed and what is not."""
    grammar, language = LANGUAGES[name]
    texts = [text.encode() for text in language]
    rng = np.random.default_rng(3)
    state, output = grammars.start(grammar), list[int]()
    lengths = set()
    for _ in range(400):
        text = b"".join(spellings[token] for token in output)
        if len(text) > 8:
            expected = None  # the languages are listed so far only
        else:
            expected = [bool(part) and any(one.startswith(text + part) for one in texts) for part in spellings]
            expected[0] = expected[1] = text in texts
            allowed = state.allowed()
            assert allowed is not None and allowed.tolist() == expected, text
        lengths.add(len(text))
        token = int(rng.integers(PADDED))
        if expected is not None and rng.random() < 0.9:
            token = int(rng.choice(np.flatnonzero(expected)))
        if expected is None or rng.random() < 0.3:
            back = int(rng.integers(0, len(output) + 1))
            state.truncate(back)
            del output[back:]
            continue
        assert state.accepts(token) == expected[token]
        assert state.push(token) == expected[token]
        assert state.length == len(output) + 1
        if expected[token] and token > 1:
            output.append(token)
            continue
        assert state.allowed() is None and state.accepts(5) and state.forced() == []
        assert not state.push(5)
        state.truncate(len(output))
    assert len(lengths) > 3 and state.fault is None


def test_json_of_a_schema_comes_through_and_nothing_else(grammars: Grammars, tokenizer: PreTrainedTokenizerFast) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 12}, "b": {"enum": ["é", None]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = json_grammar(schema)
    assert json_grammar(json.dumps(schema)) == grammar

    def through(text: str, compiled: str = grammar) -> bool:
        state = grammars.start(compiled)
        return all(state.push(token) for token in tokenizer.encode(text)) and state.push(0)

    for good in ('{"a":12}', '{ "a" : 0,\n  "b": null}', '{"a":' + " " * 40 + '3,"b":"é"}'):
        assert through(good), good
    for bad in ("{}", '{"a":13}', '{"a":1,"c":2}', '{"a":1', '{"a":1}}', '{"b":null}', '{"a":' + " " * 41 + "3}", " {}", "[1]"):
        assert not through(bad), bad
    assert through('{"x": [1, {"y": "z\\n"}]}', object_grammar()) and not through("[]", object_grammar())


def test_forced_tokens_are_the_only_text(grammars: Grammars, tokenizer: PreTrainedTokenizerFast) -> None:
    state = grammars.start(choice_grammar(["abcab12x", "abcab12y"]))
    forced = state.forced()
    assert forced and "abcab12".startswith(str(tokenizer.decode(forced)))
    assert all(state.push(token) for token in forced)
    state.truncate(0)
    assert all(state.push(token) for token in tokenizer.encode("abcab12")) and state.forced() == []


def test_states_are_each_request_s_own_and_catch_up_with_outputs(grammars: Grammars, tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = (grammars.start(regex_grammar("a{3}")) for _ in range(2))
    before = second.allowed()
    assert first.push(int(np.flatnonzero(first.allowed())[0])) and before is not None
    assert (second.allowed() == before).all() and second.length == 0
    state = grammars.start(choice_grammar(["abc"]))
    state.catch_up(np.array(tokenizer.encode("ab"), np.int32))
    assert state.fault is None and state.length == len(tokenizer.encode("ab"))
    state.catch_up(np.array(tokenizer.encode("ab") + tokenizer.encode("x"), np.int32))
    assert state.fault is not None and "grammar" in state.fault and state.allowed() is None


@pytest.mark.parametrize(
    ("build", "value", "words"),
    [
        (json_grammar, {"type": "objekt"}, ["objekt"]),
        (json_grammar, {"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        (json_grammar, {"$ref": "http://example.com/schema"}, ["http://example.com/schema"]),
        (json_grammar, {"type": "object", "properties": {"a": False}, "required": ["a"]}, ["unsatisfiable", "a"]),
        (
            json_grammar,
            {"allOf": [{"type": "string", "pattern": f".*{one}.*"} for one in "abcdefghijklmnopqrst"]},
            ["processor time"],
        ),
        (json_grammar, "{", []),
        (json_grammar, "[1]", []),
        (json_grammar, '{"type": "string", "x": "' + "y" * 100_000 + '"}', ["100000"]),
        (regex_grammar, "(a", ["unclosed group"]),
        (regex_grammar, "(?=a)b", ["look"]),
        (choice_grammar, [], ["at least one"]),
        (choice_grammar, ["a", ""], ["empty"]),
        (context_free_grammar, "start: b", ["b"]),
    ],
)
def test_what_cannot_be_enforced_is_refused(build: Callable[[object], str], value: object, words: list[str]) -> None:
    with pytest.raises(GrammarError) as refusal:
        build(value)
    message = str(refusal.value).lower()
    assert message and "\n" not in message and all(word.lower() in message for word in words)


def test_grammars_that_cannot_be_started_are_refused(grammars: Grammars, tokenizer: PreTrainedTokenizerFast) -> None:
    for started, grammar, said in (
        (Grammars(tokenizer, PADDED, ()), object_grammar(), "end token"),
        (grammars, "start: nothing", "response_format"),
    ):
        with pytest.raises(RequestError, match=said) as refusal:
            started.start(grammar)
        assert refusal.value.field == "response_format"
    assert isinstance(grammars.start(object_grammar()), MatcherGrammar)


def test_rules_that_refer_to_one_another_in_a_long_row_end_nothing(grammars: Grammars) -> None:
    """The library compiles recursively; with the stack of an ordinary thread this ends the process."""
    rows = ["start: r0", *(f"r{row}: r{row + 1}" for row in range(5000)), 'r5000: "c"']
    assert isinstance(grammars.start(context_free_grammar("\n".join(rows))), MatcherGrammar)
    references = {f"d{row}": {"items": {"$ref": f"#/$defs/d{row + 1}"}} for row in range(2000)}
    schema = {"$ref": "#/$defs/d0", "$defs": references | {"d2000": {"type": "string"}}}
    assert isinstance(grammars.start(json_grammar(schema)), MatcherGrammar)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: %json {"type": "integer", "multipleOf": 9999991}', TOO_COSTLY),  # 200 s and 4.7 GB
        ("start: T\nT: " + " & ".join(f"/(?s:.*)a{number}(?s:.*)/" for number in range(40)), TOO_COSTLY),
        ('start: %json {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}', "no text"),
        ('start: %json {"type": "integer", "multipleOf": 86400}', ""),
        ('start: %json {"type": "string", "maxLength": 1000000000}', ""),
        ("start: /(a|b)*a(a|b){500}/", ""),
    ],
    ids=["multipleOf", "and", "cycle", "day", "maxLength", "repeats"],
)
def test_grammars_are_checked_within_bounds(checker: GrammarChecker, grammar: str, words: str) -> None:
    fault = checker.fault(grammar)
    assert words in fault and bool(words) == bool(fault)


@pytest.fixture(scope="module")
def checker(tokenizer: PreTrainedTokenizerFast) -> Iterator[GrammarChecker]:
    made = GrammarChecker(vocabulary_of(tokenizer, PADDED, (0, 1)))
    yield made
    made.close()


def test_a_checker_that_was_ended_is_replaced(checker: GrammarChecker) -> None:
    assert checker.fault('start: "a"') == ""
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert checker.fault('start: "b"') == "" and "expected" in checker.fault("start: (").lower()


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled from now on."""
    compiled: list[str] = []
    compile_it = Grammars._compile

    def counted(self: Grammars, grammar: str, vocabulary: object) -> Any:
        compiled.append(grammar)
        return compile_it(self, grammar, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", counted)
    return compiled


def test_kept_grammars_are_bounded_by_bytes_and_an_account_pushes_out_its_own(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compiles(monkeypatch)
    grammars = Grammars(tokenizer, PADDED, (0, 1), clock=lambda: 0.0)
    small, large = regex_grammar("a"), [choice_grammar([f"{number}" * 4000, "b"]) for number in range(1, 6)]
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", 250 * len(large[0]))  # two of them
    grammars.start(small, "calm")
    for grammar in large:
        grammars.start(grammar, "busy")
    assert compiled == [small, *large]
    grammars.start(small, "calm")
    grammars.start(large[4], "busy")
    assert compiled == [small, *large]  # both were kept
    grammars.start(large[0], "busy")
    grammars.start(large[4], "calm")  # of another account
    assert compiled == [small, *large, large[0], large[4]]
    assert sum(grammars._sizes().values()) <= grammar_module.KEPT_BYTES


def test_a_grammar_is_compiled_once_for_all_that_ask_at_once(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, entered, proceed = count_compiles(monkeypatch), threading.Event(), threading.Event()
    counted = Grammars._compile

    def blocked(self: Grammars, grammar: str, vocabulary: object) -> Any:
        entered.set()
        assert proceed.wait(60)
        return counted(self, grammar, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(Grammars, "_compile", blocked)
    grammars, grammar = Grammars(tokenizer, PADDED, (0, 1)), regex_grammar("a{4}")
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(grammars.start, grammar) for _ in range(8)]
        assert entered.wait(60)
        proceed.set()
        assert all(one.result().allowed() is not None for one in found)
    assert compiled == [grammar]


def test_masks_that_take_too_long_slow_a_request_and_then_end_it(tokenizer: PreTrainedTokenizerFast) -> None:
    now_s = itertools.count(step=0.0625)
    state = Grammars(tokenizer, PADDED, (0, 1), clock=lambda: next(now_s)).start(regex_grammar("a*"))
    steps = 0
    while state.fault is None:
        assert state.push(tokenizer.encode("a")[0])
        state.end_step()
        steps += 1
        assert state.slow_s == 0.0625
    assert steps == math.floor(MAX_DEBT_S / (0.0625 - MASK_S)) + 1 and "less ambiguous" in state.fault
    quick = Grammars(tokenizer, PADDED, (0, 1), clock=lambda: 0.0).start(regex_grammar("a*"))
    for _ in range(steps):
        assert quick.push(tokenizer.encode("a")[0])
        quick.end_step()
    assert quick.fault is None and quick.slow_s == 0.0
