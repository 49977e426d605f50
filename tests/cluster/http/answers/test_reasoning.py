"""Reasoning told apart from the answer: by the tags of the template, whole and streamed, with drafts and without."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from tokenizers import AddedToken

from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.reasoning import ReasoningReader, ReasoningTokens, Thought
from outrider.engine.text.chat_format import REASONING_TAGS, ChatFormat, Tags, added_tokens
from outrider.engine.text.grammar import Grammars, after_reasoning, json_grammar, regex_grammar
from tests.cluster.circle import CHATS, MESSAGES, Speaker, build_tokenizer, check_error, save_saying, speaking

THINK = Tags("<think>", "</think>")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}write <tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>' }}{% elif always %}{{ '<think>' }}{% else %}>{% endif %}{% endif %}"
)
SAID = ["<think>", "\n", "Two and two ", "make four.\n", "</think>", "\n\n", "It is ", "four."]
THOUGHT, ANSWER = "Two and two make four.", "It is four."
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "additionalProperties": False}}}
ANY_SPECULATION: list[dict[str, Any]] = [{}, {"max_draft_tokens": 0}]


def read(pieces: list[str], begins_within: bool | None = None, tags: Tags = THINK) -> tuple[str, str]:
    """The reasoning and the answer of a text."""
    reader = ReasoningReader(tags, begins_within)
    found = list(itertools.chain(*map(reader.push, pieces), reader.finish()))
    assert all(part.text if isinstance(part, Thought) else part for part in found), "an empty piece"
    thoughts = [part.text for part in found if isinstance(part, Thought)]
    assert [type(part) for part in found] == sorted((type(part) for part in found), key=lambda kind: kind is str)
    return "".join(thoughts), "".join(part for part in found if isinstance(part, str))


@pytest.mark.parametrize(
    ("begins_within", "text", "expected"),
    [
        (None, "<think>\na b\n</think>\n\nc d\n", ("a b", "c d\n")),
        (None, "\n<think>a</think>b", ("a", "b")),
        (None, " a <think>b</think>", ("", " a <think>b</think>")),
        (None, "<think></think>a", ("", "a")),
        (None, "<think>a </thi", ("a </thi", "")),
        (None, "<thi", ("", "<thi")),
        (None, "", ("", "")),
        (None, "<think>a</think>\n", ("a", "")),
        (None, "<think>a</think>b</think>", ("a", "b</think>")),
        (True, "a</think>b", ("a", "b")),
        (True, "<think>a</think>b", ("a", "b")),
        (True, "</think>b", ("", "b")),
        (True, "<", ("<", "")),
        (True, "a", ("a", "")),
        (False, "<think>a</think>b", ("", "<think>a</think>b")),
        (False, " a", ("", " a")),
    ],
)
def test_reasoning_is_told_apart(begins_within: bool | None, text: str, expected: tuple[str, str]) -> None:
    assert read([text], begins_within) == expected
    assert read(list(text), begins_within) == expected


@given(
    st.lists(st.sampled_from([*THINK, " ", "\n", "<", "</", "think>", "x"]), max_size=10), st.sampled_from([None, True, False]),
    st.data(),
)  # fmt: skip
def test_where_a_text_is_cut_does_not_matter(parts: list[str], begins_within: bool | None, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(pieces, begins_within) == read([text], begins_within)


@pytest.mark.parametrize("tags", REASONING_TAGS)
def test_tags_are_found_in_the_template(tags: Tags) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages }}" + tags.opening + tags.closing
    assert ChatFormat.of(tokenizer).reasoning == tags
    assert read([f"{tags.opening}a{tags.closing}b"], tags=tags) == ("a", "b")
    tokenizer.chat_template = "{{ messages }}"
    assert ChatFormat.of(tokenizer) == ChatFormat()


@pytest.mark.parametrize(
    ("begins_within", "text", "count"),
    [
        (None, "<think>ab</think>cd", 4), (None, "ab", 0), (None, "\n<think>a", 3), (True, "ab</think>c", 3), (True, "ab", 2),
        (False, "<think>", 0), (None, "<thin", 0),
    ],
)  # fmt: skip
def test_tokens_of_the_reasoning_are_counted(begins_within: bool | None, text: str, count: int) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(THINK))
    ids = tokenizer.encode(text)
    for size in (1, 3, len(ids)):
        counter = ReasoningTokens(ReasoningReader(THINK, begins_within), TokenBytes(tokenizer))
        for start in range(0, len(ids), size):
            counter.push(ids[start : start + size])
        assert counter.count == count


NUMBER = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize("kind", ["tokens", "special", "text"])
def test_a_grammar_begins_behind_the_reasoning(kind: str) -> None:
    tokenizer = build_tokenizer()
    if kind != "text":
        tokenizer.add_tokens([AddedToken(tag, special=kind == "special", normalized=False) for tag in (*THINK, "<other>")])
    end = int(tokenizer.eos_token_id)
    grammars = Grammars(tokenizer, len(tokenizer), [end])

    def accepts(answer: str, begins_within: bool | None, text: str) -> bool:
        matcher = grammars.start(after_reasoning(answer, THINK, added_tokens(tokenizer), begins_within))
        ids = [*tokenizer.encode(text), end]
        for token in ids[:-1]:
            allowed = matcher.allowed()
            if not matcher.push(token):
                assert allowed is not None and not allowed[token]
                return False
        whole = matcher.push(end)
        matcher.truncate(1)
        return whole and all(matcher.push(token) for token in ids[1:])

    for answer, good in ((NUMBER, '{"a": 3}'), (regex_grammar("[0-9]+"), "42")):
        thoughts = ["", "I think {", "<thin é 🦙", *(["<other>{<other>"] if kind != "text" else [])]
        for thought in thoughts:
            assert accepts(answer, None, f"<think>{thought}</think>{good}")
            assert accepts(answer, True, f"{thought}</think>{good}")
            assert not accepts(answer, None, f"<think>{thought}</think>x{good}")
            assert not accepts(answer, None, f"<think>{thought}")
            assert not accepts(answer, True, thought)
            assert not accepts(answer, False, f"<think>{thought}</think>{good}")
        assert accepts(answer, None, good) and accepts(answer, False, good) and not accepts(answer, True, good)
        assert accepts(answer, None, f"\n<think>a</think>{good}")


@pytest.fixture(scope="module")
def thinker(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """Says some reasoning, and an answer; its tags are tokens of their own."""
    with speaking(save_saying(circle_model, tmp_path_factory.mktemp("models") / "thinking", SAID, TEMPLATE)) as speaker:
        yield speaker


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
def test_reasoning_comes_beside_the_answer(thinker: Speaker, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": ["".join(SAID)]}
    answer = thinker.ask(n=2, extra_body=extra)
    for choice in answer.choices:
        assert (choice.message.content, choice.message.reasoning, choice.finish_reason) == (ANSWER, THOUGHT, "stop")
        assert choice.message.reasoning_content == THOUGHT
    assert answer.usage.completion_tokens == 2 * (len(SAID) + 1)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * 5
    told, usage = thinker.streamed(extra_body=extra)
    assert told == (THOUGHT, ANSWER, [], "stop")
    assert usage.completion_tokens_details.reasoning_tokens == 5
    entries = thinker.ask(logprobs=True, extra_body=extra).choices[0].logprobs.content
    assert [entry.token for entry in entries] == [*SAID, "</s>"]
    body = {"model": Path(thinker.tokenizer.name_or_path).name, "messages": MESSAGES, "max_tokens": 30, "temperature": 0, **extra}
    compared = httpx.post(f"{thinker.url}/v1/compare", json=body, timeout=60).raise_for_status().json()
    for side in ("accelerated", "baseline"):
        assert compared[side]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
@pytest.mark.parametrize("cut", range(1, 9))
def test_a_cut_anywhere(thinker: Speaker, speculation: dict[str, Any], cut: int) -> None:
    extra = {"speculation": speculation, "reference_documents": ["".join(SAID)]}
    choice = thinker.ask(max_tokens=cut, extra_body=extra).choices[0]
    thought, text = "".join(SAID[1:4][: cut - 1]).strip(), "".join(SAID[6:cut])
    assert choice.message.content == (text or (None if thought else "")) and choice.finish_reason == "length"
    assert getattr(choice.message, "reasoning", "") == thought
    assert thinker.streamed(max_tokens=cut, extra_body=extra)[0] == (thought, text, [], "length")


def test_the_template_is_told_whether_to_reason(thinker: Speaker) -> None:
    for extra in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = thinker.ask(extra_body=extra)
        assert answer.choices[0].message.content == "\n\nIt is four."  # as the model wrote it: nothing is to be told apart
        assert not answer.choices[0].message.model_extra
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    always = {"chat_template_kwargs": {"always": True}}
    answer = thinker.ask(extra_body=always)
    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == (THOUGHT, ANSWER)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert thinker.streamed(extra_body=always)[0] == (THOUGHT, ANSWER, [], "stop")
    assert thinker.ask(max_tokens=2, extra_body=always).choices[0].message.content is None


def test_reasoning_can_be_left_out(thinker: Speaker) -> None:
    extra = {"include_reasoning": False}
    answer = thinker.ask(extra_body=extra)
    assert answer.choices[0].message.content == ANSWER and not answer.choices[0].message.model_extra
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
    assert thinker.streamed(extra_body=extra)[0] == ("", ANSWER, [], "stop")


BINDING: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "maxProperties": 0}}}},
    {"structured_outputs": {"regex": "[0-9]{3}"}},
    {"guided_choice": ["four", "five"]},
    {"structured_outputs": {"grammar": 'start: "x" "y"'}},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
@pytest.mark.parametrize("switch", [{}, {"always": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("binding", BINDING)
def test_the_form_of_the_answer_begins_behind_the_reasoning(
    thinker: Speaker, options: dict[str, Any], switch: dict[str, Any], binding: dict[str, Any]
) -> None:
    told = set()
    for speculation in ANY_SPECULATION:
        extra = {"speculation": speculation, "reference_documents": ["".join(SAID) + "{}four"], **binding}
        extra["chat_template_kwargs"] = switch
        choice = thinker.ask(max_tokens=400, **options, extra_body=extra).choices[0]
        (thought, text, _, reason), _ = thinker.streamed(max_tokens=400, **options, extra_body=extra)
        assert (thought, text or None) == (getattr(choice.message, "reasoning", ""), choice.message.content or None)
        assert reason == choice.finish_reason
        told.add((thought, text, reason))
    ((thought, text, reason),) = told
    if options["temperature"] == 0:
        assert thought == ("" if switch == {"enable_thinking": False} else THOUGHT) and reason == "stop"
    if reason == "stop":
        assert text.strip() in ("{}", "four", "five", "xy") or text.isdigit() or json.loads(text) == {}


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
def test_calls_come_behind_the_reasoning(thinker: Speaker, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation}
    message = thinker.ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=300, extra_body=extra)
    choice = message.choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == (THOUGHT, None, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [("add", "{}")]
    assert thinker.ask(tools=[TOOL], extra_body=extra).choices[0].message.content == ANSWER


def test_the_template_gets_the_reasoning_of_earlier_turns(thinker: Speaker) -> None:
    first = thinker.ask().choices[0].message.model_dump()
    assert first["reasoning"] == first["reasoning_content"] == THOUGHT
    without = {name: value for name, value in first.items() if name != "reasoning_content"}
    alone = {"role": "assistant", "reasoning_content": THOUGHT, "content": ANSWER}
    for message in (first, without, alone):
        prompt, _ = thinker.prompt(messages=[*MESSAGES, message], chat_template_kwargs={"enable_thinking": True})
        assert prompt == f"[user]hi[assistant]({THOUGHT}){ANSWER}>"


def test_the_model_says_what_was_found(thinker: Speaker) -> None:
    (card,) = httpx.get(f"{thinker.url}/v1/models", timeout=60).json()["data"]
    assert (card["reasoning"], card["tool_calls"]) == (["<think>", "</think>"], "hermes")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"chat_template_kwargs": {"thinking_budget": 3}}, "chat_template_kwargs.thinking_budget"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"messages": [{"role": "user", "content": "hi", "reasoning": "so"}]}, "messages[0].reasoning"),
    ],
)
def test_wrong_fields(thinker: Speaker, change: dict[str, Any], param: str) -> None:
    body = {"model": "thinking", "messages": MESSAGES, "max_tokens": 4} | change
    check_error(httpx.post(f"{thinker.url}{CHATS}", json=body, timeout=60), 400, param=param)


def test_a_model_without_tags_is_told_nothing_new(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="circle", messages=MESSAGES, max_tokens=3, temperature=0)
    assert not answer.choices[0].message.model_extra and answer.usage is not None
    assert answer.usage.completion_tokens_details is None
