"""GPT-OSS's harmony format: its channels told apart, whole and streamed, bound by grammars, and rendered again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from outrider.cluster.http.answers.harmony import HarmonyReader
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.reasoning import ReasoningTokens
from outrider.cluster.http.types.structural_tag import CallMarks
from outrider.cluster.http.types.tool_grammar import Offered, call_grammar
from outrider.engine.text.chat_format import CALL_MARKS, HARMONY, ChatFormat, added_tokens
from outrider.engine.text.grammar import Grammars, behind_analysis, json_grammar
from tests.cluster.circle import MESSAGES, Said, Speaker, build_tokenizer, save_saying, speaking, whole

START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, _ = CALL_MARKS["harmony"]
# Earlier turns as GPT-OSS's template has them: a call has its reasoning before it, which it may take from the content instead.
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% set ns = namespace(called='') %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>"
    "{% elif message.role == 'assistant' %}{% if message.tool_calls and message.content and message.thinking %}"
    "{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set ns.called = call.function.name %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if message.content %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "<|start|>assistant{% if messages[-1].role == 'tool' %}<|channel|>final<|message|>u"
    "{% elif begun %}<|channel|>analysis<|message|>{% endif %}"
)
PLACE: dict[str, Any] = {"type": "object", "properties": {"at": {"enum": ["é é"]}}, "required": ["at"]}
PLACE |= {"additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PLACE}}
ANY_SPECULATION: list[dict[str, Any]] = [{}, {"max_draft_tokens": 0}]


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def ask(speaker: Speaker, **changes: Any) -> Any:
    return speaker.ask(**({"max_tokens": 60} | changes))


def streamed(speaker: Speaker, **changes: Any) -> Said:
    return speaker.streamed(**({"max_tokens": 60} | changes))[0]


# Each token can be said once.
ANSWERS = [special(CHANNEL), "analysis", special(MESSAGE), "Two and ", "two.", special(END), special(START)]
CALLS = [" to=functions.look", special(CHANNEL), "commentary ", special(CONSTRAIN), "json", special(MESSAGE)]
CALLS += ['{"at": ', '"é é"}', special(CALL)]


Speaking = Callable[[list[Any]], contextlib.AbstractContextManager[Speaker]]


@pytest.fixture(scope="module")
def served_saying(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Speaking:
    """Serves a model that says something."""

    def serve(said: list[Any]) -> contextlib.AbstractContextManager[Speaker]:
        marks = [special(mark) for mark in CALL_MARKS["harmony"] if mark not in map(str, said)]
        path = tmp_path_factory.mktemp("models") / "speaking"
        return speaking(save_saying(circle_model, path, said, TEMPLATE, after="t", more=marks))

    return serve


@pytest.mark.slow
def test_a_call(served_saying: Speaking) -> None:
    with served_saying(CALLS) as speaker:
        client, engine, tokenizer = speaker.client, speaker.engine, speaker.tokenizer
        (card,) = client.models.list().data
        assert (card.reasoning, card.tool_calls) == (list(HARMONY), "harmony")  # type: ignore[attr-defined]
        for speculation in ANY_SPECULATION:
            extra = {"speculation": speculation, "reference_documents": ["".join(map(str, CALLS))]}
            answer = ask(speaker, tools=[TOOL], extra_body=extra)
            assert whole(answer) == ("", "", [("look", '{"at": "é é"}')], "tool_calls")
            assert streamed(speaker, tools=[TOOL], extra_body=extra) == whole(answer)
            assert (answer.usage.completion_tokens, answer.usage.completion_tokens_details.reasoning_tokens) == (len(CALLS), 0)
            for cut in range(1, len(CALLS)):
                told = "".join(map(str, CALLS[6:cut]))
                expected = ("", "", [("look", told)] if cut > 5 else [], "length")
                options = {"tools": [TOOL], "max_tokens": cut, "extra_body": extra}
                assert whole(ask(speaker, **options)) == streamed(speaker, **options) == expected
            options = {"tools": [TOOL], "stop": ["é é"], "extra_body": extra}
            cut_call = ("", "", [("look", '{"at": "')], "stop")
            assert whole(ask(speaker, **options)) == streamed(speaker, **options) == cut_call
            without = whole(ask(speaker, extra_body=extra))
            assert without == ("", '{"at": "é é"}', [], "stop")

        tool: Any = {"type": "function", **TOOL["function"]}
        fields: dict[str, Any] = {"model": "speaking", "input": "hi", "tools": [tool], "temperature": 0}
        with client.responses.stream(**fields) as stream:
            events = list(stream)
            (item,) = stream.get_final_response().output
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert deltas == ['{"at": ', '"é é"}'] and (item.type, item.status) == ("function_call", "completed")
        assert item.type == "function_call" and (item.name, item.arguments) == ("look", "".join(deltas))
        cut = client.responses.create(**fields, max_output_tokens=7).output[0]
        assert cut.type == "function_call" and (cut.status, cut.arguments) == ("incomplete", '{"at": ')

        # What was told goes back: reasoning and text of a turn with calls come as one, which the template has once. (This
        # tokenizer has no line breaks.)
        told = ask(speaker, tools=[TOOL]).choices[0].message.model_dump() | {"reasoning": "Hm.", "content": "Let me see."}
        tool_turn = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "blue"}
        again = ask(speaker, messages=[*MESSAGES, told, tool_turn], tools=[TOOL], reasoning_effort="low")
        assert whole(again) == ("", "vw.", [], "stop")
        assert tokenizer.decode(engine.jobs[-1].prompt_ids).endswith(
            f"{START}user{MESSAGE}hi{END}{START}assistant{CHANNEL}analysis{MESSAGE}Hm.Let me see.{END}"
            f'{START}assistant to=functions.look{CHANNEL}commentary json{MESSAGE}{{"at": "é é"}}{CALL}'
            f'{START}functions.look to=assistant{CHANNEL}commentary{MESSAGE}"blue"{END}'
            f"low{START}assistant{CHANNEL}final{MESSAGE}u"
        )
        plain = {"role": "assistant", "reasoning": "Hm.", "content": "So."}
        ask(speaker, messages=[*MESSAGES, plain, *MESSAGES])
        assert f"{MESSAGE}Hm.{END}{START}assistant{CHANNEL}final{MESSAGE}So.{END}" in tokenizer.decode(engine.jobs[-1].prompt_ids)


@pytest.mark.slow
def test_reasoning_and_the_form_of_what_follows(served_saying: Speaking) -> None:
    with served_saying(ANSWERS) as speaker:
        tokenizer = speaker.tokenizer
        for speculation in ANY_SPECULATION:
            extra: dict[str, Any] = {"speculation": speculation, "reference_documents": ["".join(map(str, ANSWERS))]}
            answer = ask(speaker, extra_body=extra)
            assert whole(answer) == ("Two and two.", "", [], "stop") == streamed(speaker, extra_body=extra)
            assert answer.choices[0].message.reasoning_content == "Two and two."
            assert answer.usage.completion_tokens_details.reasoning_tokens == len(ANSWERS) - 1
            assert whole(ask(speaker, extra_body=extra | {"include_reasoning": False}))[0] == ""
            for cut in range(1, len(ANSWERS)):
                expected = ("".join(map(str, ANSWERS[3 : min(cut, 5)])), "", [], "length")
                assert whole(ask(speaker, max_tokens=cut, extra_body=extra)) == expected
                assert streamed(speaker, max_tokens=cut, extra_body=extra) == expected
            # The form that is asked for begins behind the reasoning, where the model would end; it would rather reason again.
            again = tokenizer.convert_tokens_to_ids(["analysis", "a"])
            forms: list[dict[str, Any]] = [{"extra_body": {"structured_outputs": {"choice": ["3", "four"]}}}]
            forms.append({"tools": [TOOL], "tool_choice": "required"})
            for form in forms:
                body = extra | {"chat_template_kwargs": {"begun": True}} | form.get("extra_body", {})
                options: dict[str, Any] = {**form, "logit_bias": {str(token): -50 for token in again}, "extra_body": body}
                bound = ask(speaker, max_tokens=200, **options)
                thought, text, calls, reason = whole(bound)
                assert streamed(speaker, max_tokens=200, **options) == (thought, text, calls, reason)
                assert bound.usage.completion_tokens_details.reasoning_tokens == 3
                if "tools" in form:
                    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("look", {"at": "é é"})]
                    assert (thought, text, reason) == ("Two and two.", "", "tool_calls")
                else:
                    assert (thought, text, calls, reason) == ("Two and two.", "3", [], "stop")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = build_tokenizer()
    made.add_tokens([special(mark) for mark in CALL_MARKS["harmony"]])
    made.chat_template = TEMPLATE
    return made


def test_the_format_is_found_where_template_and_tokens_have_it(tokenizer: PreTrainedTokenizerFast) -> None:
    found = ChatFormat.of(tokenizer)
    assert (found.calls, found.reasoning, found.hidden) == ("harmony", HARMONY, {*CALL_MARKS["harmony"]})
    for prompt, begins in ((f"{START}assistant", None), (f"a{END}", None), (f"a{HARMONY.opening}", True)):
        assert found.begins_within(tokenizer, tokenizer.encode(prompt)) is begins
    assert found.begins_within(tokenizer, tokenizer.encode(f"{CHANNEL}final{MESSAGE}")) is False
    without = build_tokenizer()
    without.chat_template = TEMPLATE
    assert ChatFormat.of(without).calls is None


THOUGHT = f"{CHANNEL}analysis{MESSAGE}a <b{END}{START}assistant"
COMMENT = f"{CHANNEL}commentary{MESSAGE}a{END}{START}assistant"
FINAL, LOOK = f"{CHANNEL}final{MESSAGE}", f' to=functions.look{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{{"at": "é é"}}'
LATE = f'{CHANNEL}commentary to=functions.look json{MESSAGE}{{"at":"é é"}}'


@pytest.mark.parametrize(
    ("begins_within", "text", "count"),
    [
        (None, f"{THOUGHT}{FINAL}a", 15),  # to the end of the first message
        (None, f"{THOUGHT}{THOUGHT}{FINAL}a", 15 + 25),
        (None, f"{THOUGHT}{COMMENT}{THOUGHT}{FINAL}", 15 + 25),
        (None, f"{FINAL}abc", 0),
        (None, f"{CHANNEL}analysis{MESSAGE}ab", 12),
        (True, f"ab{END}{START}assistant{FINAL}a", 3),
        (False, "abc", 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted(
    tokenizer: PreTrainedTokenizerFast, begins_within: bool | None, text: str, count: int
) -> None:
    ids = tokenizer.encode(text)
    for size in (1, 3, len(ids)):
        counter = ReasoningTokens(HarmonyReader(begins_within), TokenBytes(tokenizer))
        for start in range(0, len(ids), size):
            counter.push(ids[start : start + size])
        assert counter.count == count


def test_grammars_begin_in_their_channel(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens, end = added_tokens(tokenizer), int(tokenizer.eos_token_id)
    grammars = Grammars(tokenizer, len(tokenizer), [end])

    def accepts(grammar: str, begins_within: bool | None, has_header: bool, text: str) -> bool:
        matcher = grammars.start(behind_analysis(grammar, tokens, begins_within, has_header))
        return all(matcher.push(token) for token in [*tokenizer.encode(text), end]) and matcher.fault is None

    number = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text in ('{"a": 3}', "x", '{"a": 3}x'):
        good = text == '{"a": 3}'
        for before in ("", THOUGHT, THOUGHT * 2):
            for header in (FINAL, f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}"):
                assert accepts(number, None, False, f"{before}{header}{text}") is good
            assert accepts(number, True, False, f"a{END}{START}assistant{before}{FINAL}{text}") is good
        assert accepts(number, False, False, text) is good
        assert not accepts(number, None, False, text) and not accepts(number, None, False, f"{COMMENT}{FINAL}{text}")
        assert not accepts(number, None, False, f"{CHANNEL}analysis{MESSAGE}{text}")

    marks = CallMarks("harmony", tokens=tokens)
    offered = [Offered("look", PLACE), Offered("g", None)]
    required, free = (call_grammar(offered, needed, True, marks) for needed in (True, False))
    for call in (LOOK, LATE, LATE.replace(" json", ""), LATE.replace("look", "g").replace('{"at":"é é"}', '{"b": []}')):
        for before in ("", THOUGHT):
            assert accepts(required, None, True, before + call) and accepts(free, None, True, before + call)
        assert accepts(free, None, True, COMMENT + call) and not accepts(required, None, True, COMMENT + call)
        assert accepts(required, True, True, f"a{END}{START}assistant{call}")
    for text in (LOOK.replace("é é", "e"), LOOK.replace("look", "other"), f"{LOOK}{CALL}x", "x", f"{LOOK} x"):
        assert not accepts(required, None, True, text) and not accepts(free, None, True, text)
    assert accepts(free, None, True, f"{THOUGHT}{COMMENT}{FINAL}a <b") and not accepts(required, None, True, f"{FINAL}a")
