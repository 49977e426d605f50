"""The step loop: ends, limits, faults, preemption, abort, and requests that were begun elsewhere."""

from __future__ import annotations

import collections
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import (
    BertConfig,
    DiffLlamaConfig,
    DogeConfig,
    Gemma3TextConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from outrider.configs.schema import REPOSITORY
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.arrays import Int32Array, Int64Array
from outrider.decoding.drafters.llma import LlmaDrafter
from outrider.decoding.request import PLAIN, FinishReason, Request, SamplingParams, StepOutput, TokenLogprob
from outrider.decoding.sources.ranked.contexts import WORDS
from outrider.decoding.sources.ranked.successors import SuccessorTable
from outrider.decoding.tree import DraftTree
from outrider.engine.child_process import PIP_VARIABLES, child_environment, python_module
from outrider.engine.engine import Engine
from outrider.engine.errors import ContextLengthError, ModelLoadError, QueueFullError, RequestError
from outrider.engine.executor import Verifier
from outrider.engine.loading.model import load_model
from outrider.engine.text.outputs import Detokenizer
from tests.helpers.models import END, VOCAB, llama_config, outputs_of, save_model


def load(folder: str, strategy: str = "llma", **options: Any) -> Engine:
    return Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(**options), SpeculationOptions(strategy))


@cache
def shared(folder: str, strategy: str = "llma") -> Engine:
    """For tests that leave no request in it."""
    return load(folder, strategy)


def text(outputs: list[StepOutput]) -> str:
    return "".join(output.text for output in outputs)


PROMPT = [10, 20, 30, 10, 20, 40]


def greedy(engine: Engine, **changes: object) -> Request:
    request = Request("a", PROMPT, SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **changes}))  # type: ignore[arg-type]
    outputs_of(engine, request)
    return request


def test_what_the_executor_knows_of_a_request_ends_with_it(folder: str) -> None:
    engine = load(folder)
    for name in ("ended", "aborted"):
        engine.add(Request(name, PROMPT, SamplingParams(max_tokens=5 if name == "ended" else 40, frequency_penalty=0.5)))
    engine.step()
    rules = engine._executor._verifier._rules  # type: ignore[attr-defined]
    assert rules.keys() == {"ended", "aborted"}
    engine.abort("aborted")
    assert rules.keys() == {"ended"}
    while engine.has_work:
        engine.step()
    assert not rules


def test_last_output_carries_reason_and_counters(folder: str) -> None:
    request = Request("a", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = outputs_of(shared(folder), request)["a"]
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.LENGTH and outputs[-1].stats is request.stats
    emitted = [token for output in outputs for token in output.token_ids]
    assert emitted == request.output_ids.tolist() and len(emitted) == 5
    stats = request.stats
    assert len(emitted) == stats.steps + stats.accepted  # every step emits one token of the target's own
    assert stats.accepted == sum(stats.accepted_by_source.values()) <= stats.drafted
    assert stats.prefill_s > 0 and stats.forward_s > 0


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "llma"])
def test_end_tokens_and_stop_strings_end_the_output(folder: str, strategy: str) -> None:
    engine = shared(folder, strategy)
    assert engine.tokenizer is not None
    outputs = outputs_of(engine, Request("a", PROMPT, SamplingParams(max_tokens=40, ignore_eos=True)))["a"]
    whole, full = [token for output in outputs for token in output.token_ids], text(outputs)
    for at in (0, 3, 17):
        ended = greedy(engine, stop_token_ids=(VOCAB + 5, whole[at]))
        assert ended.output_ids.tolist() == whole[: whole.index(whole[at]) + 1]  # the end token belongs to it
        assert ended.finish_reason is FinishReason.STOP
    stop = next(full[i : i + 2] for i in range(8, len(full)) if full[i : i + 2].isascii())
    request = Request("b", PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop, "never there")))
    outputs = outputs_of(engine, request)["b"]
    assert text(outputs) == full[: full.index(stop)] and outputs[-1].finish_reason is FinishReason.STOP
    kept = request.output_ids.tolist()
    assert kept == whole[: len(kept)]
    assert stop in engine.tokenizer.decode(kept) and stop not in engine.tokenizer.decode(kept[:-1])


def test_the_models_own_end_tokens_are_all_of_its_list(tmp_path: Path, folder: str) -> None:
    whole = greedy(shared(folder)).output_ids.tolist()
    model_folder = save_model(tmp_path / "model", llama_config())
    config = model_folder / "generation_config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 0', f'"eos_token_id": [0, {whole[6]}]'))
    engine = load(str(model_folder))
    assert engine.info.eos_token_ids == (0, whole[6])
    assert greedy(engine, ignore_eos=False).output_ids.tolist() == whole[: whole.index(whole[6]) + 1]
    assert greedy(engine).output_ids.tolist() == whole


def test_max_tokens_is_exact_and_the_whole_context_can_be_used(folder: str) -> None:
    engine = shared(folder)
    whole = greedy(engine).output_ids.tolist()
    for length in range(1, 12):
        request = greedy(engine, max_tokens=length)
        assert request.output_ids.tolist() == whole[:length] and request.finish_reason is FinishReason.LENGTH
    request = Request("a", [7] * 250, SamplingParams(max_tokens=6, ignore_eos=True))
    outputs_of(engine, request)
    assert request.num_tokens == engine.info.max_model_len == 256


def test_auto_learns_each_row_with_the_hidden_states_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(str(REPOSITORY / "demo_model"), "auto")
    steps: list[tuple[Int64Array, Int64Array]] = []  # signs of the row before the root, and of the last accepted row
    learn = SuccessorTable.learn_tree

    def recording(self: SuccessorTable, tree: DraftTree, before: Int32Array, above: Int64Array, accepted: Sequence[int],
                  signs: Int64Array, successors: Int32Array) -> None:  # fmt: skip
        assert signs.shape == (len(tree), WORDS) and signs.any(axis=1).all()
        steps.append((above, signs[accepted[-1] if accepted else 0]))
        learn(self, tree, before, above, accepted, signs, successors)

    monkeypatch.setattr(SuccessorTable, "learn_tree", recording)
    assert greedy(engine).num_output == 40
    assert len(steps) > 3 and not steps[0][0].any()  # what the prompt's last but one was computed with is not known
    assert all((above == last).all() for (_, last), (above, _) in pairwise(steps))


def test_refused_and_aborted_requests_leave_no_trace(folder: str) -> None:
    engine = load(folder, max_running=2, max_waiting=2)
    for field, prompt, limit in [("max_tokens", [1] * 250, 7), ("prompt", [1] * 256, 1), ("prompt", [1] * 300, 1)]:
        with pytest.raises(ContextLengthError) as raised:
            engine.add(Request("a", prompt, SamplingParams(max_tokens=limit)))
        assert raised.value.field == field and "256" in str(raised.value)
    for token in (-1, VOCAB):
        with pytest.raises(RequestError, match="prompt"):
            engine.add(Request("a", [1, token], SamplingParams()))
    assert not engine.has_work
    for name in "abc":
        engine.add(Request(name, PROMPT, SamplingParams(max_tokens=40)))
        if name == "a":
            with pytest.raises(RequestError, match="request_id"):
                engine.add(Request("a", [1], SamplingParams(max_tokens=3)))
            assert engine.counts().waiting == 1
        if name == "b":
            engine.step()
    engine.add(Request("d", PROMPT, SamplingParams(max_tokens=40)))
    with pytest.raises(QueueFullError):
        engine.add(Request("e", PROMPT, SamplingParams(max_tokens=3)))
    assert not engine.abort("e")
    assert (engine.counts().running, engine.counts().waiting, engine.counts().free_slots) == (2, 2, 0)
    assert engine.abort("a") and engine.abort("c") and engine.abort("d") and not engine.abort("a")
    assert (engine.counts().running, engine.counts().waiting, engine.counts().free_slots) == (1, 0, 1)
    assert {output.request_id for output in engine.step()} <= {"b"}
    assert engine.abort("b") and not engine.has_work and engine.step() == []


def test_a_sequence_that_the_stream_decoder_refuses_has_a_text(tmp_path: Path) -> None:
    """As with Llama 2 and Gemma: a byte that is no character behind one that is, and then a token that is no byte."""
    folder = save_model(tmp_path, llama_config())
    tokens = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *(chr(ord("a") + at) for at in range(26))]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
    engine = load(str(folder))
    alone = greedy(engine, max_tokens=20).output_ids.tolist()
    beside = Request("beside", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    emitted = [tokens.index("<0x41>"), tokens.index("<0xFF>")]
    params = SamplingParams(max_tokens=5, logit_bias=((tokens.index("b"), 100.0),))
    outputs = outputs_of(engine, beside, Request("steered", PROMPT, params, emitted=emitted))
    assert text(outputs["steered"]) == "\ufffdbbb"  # "A" was shown where the first tokens were emitted
    assert outputs["steered"][-1].finish_reason is FinishReason.LENGTH and beside.output_ids.tolist() == alone


BUG = RuntimeError("nothing goes on\nhere")
OWN_FAULT = RequestError("logit_bias", "nothing goes on here")


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ((Verifier, "_walk"), BUG), ((Detokenizer, "push"), BUG), ((LlmaDrafter, "observe"), BUG), ((LlmaDrafter, "finish"), BUG),
        ((Verifier, "_walk"), OWN_FAULT), ((Detokenizer, "push"), OWN_FAULT),
    ],
)  # fmt: skip
def test_an_error_of_one_request_ends_that_one_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: tuple[type, str], error: Exception
) -> None:
    """A bug is an error of the engine. A request's own fault is none: the output names its field, and it counts as an abort."""
    caplog.set_level("INFO")
    engine = shared(folder)
    sampled = {"max_tokens": 20, "temperature": 0.7, "ignore_eos": True}
    alone = greedy(engine, **sampled).output_ids.tolist()
    before = engine.metrics().finished
    others = [Request(f"other {number}", PROMPT, SamplingParams(**sampled)) for number in range(2)]  # type: ignore[arg-type]
    bad = Request("bad", PROMPT, SamplingParams(**sampled, stop=("never there",)), http_id="mine")  # type: ignore[arg-type]
    owner, name = part
    works = getattr(owner, name)

    def fails(self: Any, *arguments: Any) -> Any:
        result, subject = works(self, *arguments), arguments[0]
        of_bad = self._stop if isinstance(self, Detokenizer) else getattr(subject, "request", subject) is bad
        if of_bad and bad.num_output >= 3:
            raise error
        return result

    monkeypatch.setattr(owner, name, fails)
    outputs: list[StepOutput] = []
    for request in (others[0], bad, others[1]):
        engine.add(request)
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    (last,) = [output for output in outputs if output.request_id == "bad" and output.finish_reason is not None]
    told = (
        ("nothing goes on here", "logit_bias") if error is OWN_FAULT
        else ("the engine failed: RuntimeError: nothing goes on here", None)
    )  # fmt: skip
    assert last.finish_reason is FinishReason.ERROR and (last.error, last.fault_field) == told
    counted = {reason: count - before[reason] for reason, count in engine.metrics().finished.items()}
    ended = "length" if name == "finish" else "error" if error is BUG else "abort"
    assert {reason: count for reason, count in counted.items() if count} == collections.Counter(["length", "length", ended])
    assert engine.counts().free_slots == EngineOptions().max_running
    assert [request.output_ids.tolist() for request in others] == [alone, alone]
    assert {request.finish_reason for request in others} == {FinishReason.LENGTH}
    lines = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert lines and all(line.startswith("[mine] request bad: ") for line in lines)


def test_a_request_that_cannot_be_begun_leaves_no_trace(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared(folder)

    def fails(self: Detokenizer, token: int) -> tuple[str, bool]:
        raise RuntimeError("nothing begins")

    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push", fails)
        with pytest.raises(RuntimeError, match="nothing begins"):
            engine.add(Request("a", PROMPT, SamplingParams(max_tokens=4), emitted=[5]))
    engine.check_integrity()
    assert not engine.has_work and engine.counts().waiting == 0
    assert greedy(engine, max_tokens=4).num_output == 4


def test_models_that_cannot_be_served_are_refused(tmp_path: Path, folder: str) -> None:
    configs = {
        "broken": "{not json", "empty": "", "mamba": '{"model_type": "mamba"}', "vit": '{"model_type": "vit"}',
        "bloom": '{"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}',
    }  # fmt: skip
    for name, content in configs.items():
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "config.json").write_text(content)
    (save_model(tmp_path / "weightless", llama_config()) / "model.safetensors").write_bytes(b"no weights")
    parts = {name: name for name in ("broken", "empty", "weightless", "vit")}
    parts |= {"bloom": "BloomForCausalLM.*AttentionInterface", "mamba": "MambaForCausalLM"}
    cases = [(ModelOptions(str(tmp_path / name)), part) for name, part in parts.items()]
    cases += [
        (ModelOptions("/no/such/folder"), "does not exist"),
        (ModelOptions(folder, max_model_len=257), "max_model_len"),
        (ModelOptions(folder, max_model_len=1), "max_model_len"),
        (ModelOptions(folder, device="gpu"), "device"),
    ]
    for options, part in cases:
        with pytest.raises(ModelLoadError, match=part) as raised:
            load_model(options)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="max_draft_tokens"):
        Engine.load(ModelOptions(folder), EngineOptions(), SpeculationOptions(max_draft_tokens=-1))
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    at_the_start: list[tuple[PreTrainedConfig, str]] = [
        (DogeConfig(**sizes), "applies its own attention mask"),
        (DiffLlamaConfig(**sizes), "attend more than once"),
        (BertConfig(**sizes), "attends to later tokens"),
        (llama_config(max_position_embeddings=2**40), r"max_model_len or engine\.max_running"),
    ]
    for config, part in at_the_start:
        path = save_model(tmp_path / f"{config.model_type} that starts", config)
        with pytest.raises(ModelLoadError, match=part):
            Engine.load(ModelOptions(str(path)), EngineOptions(), SpeculationOptions())


def test_the_context_of_a_model_whose_frequencies_depend_on_the_length(tmp_path: Path) -> None:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    kinds = {
        "full_attention": long | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.5}
    cases: list[tuple[PreTrainedConfig, int]] = [
        (
            Phi3Config(
                **small, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0, original_max_position_embeddings=64,
                rope_parameters=long,
            ),
            256,
        ),
        (llama_config(max_position_embeddings=64, rope_parameters=dynamic), 160),
        (
            Gemma3TextConfig(
                **small, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                layer_types=["sliding_attention", "full_attention"], rope_parameters=kinds,
            ),
            64,
        ),  # longrope of some layers: as far as the frequencies stay
    ]  # fmt: skip
    for config, length in cases:
        path = str(save_model(tmp_path / config.model_type, config))
        assert load_model(ModelOptions(path)).max_model_len == length
        assert load_model(ModelOptions(path, max_model_len=32)).max_model_len == 32
        with pytest.raises(ModelLoadError, match=str(length)):
            load_model(ModelOptions(path, max_model_len=length + 1))


TOKENS = 40
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11, "top_p": 0.95},
    "penalized": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 3},
    "min_tokens": {
        "temperature": 1.5, "seed": 6, "min_tokens": 30, "stop_token_ids": tuple(range(1, 300, 2)), "ignore_eos": False,
    },
}  # fmt: skip


@dataclass
class Output:
    """All that a request gave."""

    token_ids: list[int]
    texts: list[str]  # shown with each token
    logprobs: list[TokenLogprob]
    reason: FinishReason | None


def resume(engine: Engine, asked: SamplingParams, before: Sequence[list[int]], **fields: Any) -> list[Output]:
    """What comes of requests, at once, that have emitted some tokens before."""
    outputs = {}
    for number, emitted in enumerate(before):
        request = Request(f"cmpl-1/{number}", PROMPT, asked, emitted=emitted, **fields)
        assert (request.num_output, request.output_ids.tolist()) == (len(emitted), emitted)
        engine.add(request)
        outputs[request.request_id] = Output([], [], [], None)
    while engine.has_work:
        for step in engine.step():
            output = outputs[step.request_id]
            output.token_ids.extend(step.token_ids)
            output.texts.append(step.text)
            output.logprobs.extend(step.logprobs or ())
            output.reason = step.finish_reason
    return list(outputs.values())


def free_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **changes})


def whole_of(engine: Engine, asked: SamplingParams) -> Output:
    """The output without a cut, with one text for each token."""
    (whole,) = resume(engine, asked, [[]], strategy=PLAIN)
    assert len(whole.texts) == len(whole.token_ids)
    return whole


def assert_same_rest(engine: Engine, whole: Output, asked: SamplingParams, strategy: str = PLAIN, step: int = 1) -> None:
    cuts = range(0, len(whole.token_ids), step)
    rests = resume(engine, asked, [whole.token_ids[:cut] for cut in cuts], strategy=strategy)
    for cut, rest in zip(cuts, rests, strict=True):
        assert rest.token_ids == whole.token_ids[cut:]
        assert "".join(rest.texts) == "".join(whole.texts[cut:])
        assert rest.reason is whole.reason
        assert [entry.token_id for entry in rest.logprobs] == [entry.token_id for entry in whole.logprobs[cut:]]
        for ours, theirs in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("rules", RULES)
def test_the_rest_of_an_output_is_the_same_after_every_cut(engine: Engine, rules: str) -> None:
    asked = free_params(**RULES[rules])
    whole = whole_of(engine, asked)
    assert len(whole.token_ids) >= 30 and bool(whole.logprobs) is (rules == "logprobs")
    assert_same_rest(engine, whole, asked)


@pytest.mark.parametrize(
    "strategy", ["auto", "jacobi", "llma", "trie", "suffix", "suffix_decoding", "sam", "recycling", "racer", "adapld"]
)
def test_every_strategy_goes_on_from_what_others_emitted(engine: Engine, strategy: str) -> None:
    for rules in ("greedy", "sampled"):
        asked = free_params(**RULES[rules])
        assert_same_rest(engine, whole_of(engine, asked), asked, strategy, step=6)


def test_a_stop_string_that_spans_the_cut_ends_the_text_where_it_did(engine: Engine) -> None:
    full = "".join(whole_of(engine, free_params()).texts)
    for length in (2, 5):
        stop = next(part for at in range(12, len(full)) if (part := full[at : at + length]).isascii() and full.index(part) == at)
        asked = free_params(stop=(stop, stop[:1] + "never"))
        whole = whole_of(engine, asked)
        assert whole.reason is FinishReason.STOP and "".join(whole.texts) == full[: full.index(stop)]
        assert_same_rest(engine, whole, asked)


def test_a_character_in_several_tokens_is_shown_by_whoever_finishes_it(engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = "a🦙b東c"
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 5
    for cut in range(1, len(ids)):
        asked = SamplingParams(max_tokens=len(ids), ignore_eos=True, logit_bias=((ids[cut], 100.0),))  # says which comes next
        request = Request("a", PROMPT, asked, emitted=ids[:cut], strategy=PLAIN)
        engine.add(request)
        (output,) = engine.step()
        engine.abort("a")
        assert output.token_ids == (ids[cut],)
        shown, shown_then = (engine.tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in (cut, cut + 1))
        assert shown + output.text == shown_then and text.startswith(shown_then)


def test_a_tenants_history_holds_the_resumed_text_once_and_whole(engine: Engine) -> None:
    whole = whole_of(engine, free_params()).token_ids
    resume(engine, free_params(), [whole[:17]], tenant="acme")
    assert engine.histories is not None
    history = engine.histories.of("acme")
    assert history is not None
    assert (len(history._texts), history.num_tokens) == (1, TOKENS)


def test_what_was_emitted_leaves_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="emitted must hold fewer tokens"):
        Request("a", PROMPT, SamplingParams(max_tokens=3), emitted=[1, 2, 3])
    assert Request("a", PROMPT, SamplingParams(max_tokens=3), emitted=[1, 2]).remaining == 1


def test_a_child_process_imports_no_other_code_and_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("engine", "outrider"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('theirs')")
    command = python_module("outrider.engine.child_process")
    run = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    secrets = ("RAY_AUTH_TOKEN", "OUTRIDER_REDIS_URL", "OUTRIDER_REDIS_PASSWORD", "OUTRIDER_CACHE_SECRET", "HF_TOKEN", "AWS_KEY")
    for name in (*secrets, "PIP_INDEX_URL", "https_proxy", "XDG_CACHE_HOME", "NUMBA_CPU_NAME"):
        monkeypatch.setenv(name, "set here")
    for extra, passed in ((), set()), (PIP_VARIABLES, {"PIP_INDEX_URL", "https_proxy"}):
        given = {name for name, value in child_environment(*extra).items() if value == "set here"}
        assert given == {"XDG_CACHE_HOME", "NUMBA_CPU_NAME"} | passed
