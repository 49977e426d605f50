"""JSON bodies of the routes that generate and of those that tokenize, drawn at random."""

from __future__ import annotations

import json
import random
from typing import Any

from experiments.service.attacks.shots import CHAT, COMPLETIONS, RESPONSES
from experiments.service.fuzzing.values import count, grammar, number, pattern, schema, text, value

_FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "timeout",
    "include_stop_str_in_output", "ignore_eos", "response_format", "structured_outputs", "logprobs", "top_logprobs", "echo",
    "prompt_logprobs", "return_token_ids", "skip_special_tokens", "stream_options", "reference_documents", "prediction",
    "reference_embedding", "cache", "priority", "speculation", "prompt_cache_key", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "reasoning_effort", "input", "instructions", "max_output_tokens", "text", "reasoning", "metadata",
    "include_reasoning", "store", "user", "suffix", "best_of", "audio", "nothing",
)  # fmt: skip
_VALID: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 8), "min_tokens": (0, 4), "temperature": (0, 0.7, 2), "top_p": (1e-9, 0.5, 1), "top_k": (-1, 0, 1, 10**6),
    "min_p": (0, 1), "repetition_penalty": (0.01, 100), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "logit_bias": ({"0": -100}, {"5": 100}, {"4095": 1}), "seed": (0, 2**63 - 1), "n": (2, 5), "stop": ("a", ["é", "\n", "🦙"]),
    "stop_token_ids": ([0, 5], [4095]), "timeout": (0.001, 5), "include_stop_str_in_output": (True,), "ignore_eos": (True,),
    "return_token_ids": (True,), "skip_special_tokens": (False,), "stream_options": ({"include_usage": True},), "echo": (True,),
    "prompt_logprobs": (0, 20), "reference_documents": ([], [""], ["a" * 99]), "cache": ("off", "private", "tenant"),
    "speculation": ({"max_draft_tokens": 0}, {"report": True}, {"strategy": "autoregressive"}), "prompt_cache_key": ("a",),
    "reference_embedding": ([0.5], [1e6] * 4096), "reasoning_effort": ("none",), "include_reasoning": (False,), "stream": (True,),
    "structured_outputs": ({"choice": ["a", "b"]}, {"regex": "[ab]{3}"}, {"json_object": True}), "logprobs": (True, 0, 20),
    "response_format": ({"type": "json_object"}, {"type": "text"}), "parallel_tool_calls": (False,), "store": (False,),
    "tools": ([], [{"type": "function", "function": {"name": "f"}}]), "tool_choice": ("none", "auto"), "top_logprobs": (0, 20),
    "instructions": ("", "be short"), "metadata": ({"a": "b"},), "text": ({"format": {"type": "json_object"}},),
    "prediction": ({"type": "content", "content": "a"},), "max_output_tokens": (1, 8), "user": ("a",), "best_of": (1,),
}  # fmt: skip
_WITHIN = {
    "speculation": ("strategy", "max_draft_tokens", "report"),
    "stream_options": ("include_usage", "include_obfuscation"),
    "structured_outputs": ("json", "regex", "choice", "grammar", "json_object"),
    "text": ("format", "verbosity"),
    "reasoning": ("effort",),
    "response_format": ("type", "json_schema"),
    "tool_choice": ("type", "function"),
    "prediction": ("type", "content"),
}


def _chat(rng: random.Random, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": rng.choice((1, 2, 8)), "stream": rng.random() < 0.3} | fields


def _schemas(rng: random.Random) -> tuple[str, Any]:
    made, place = schema(rng), rng.randrange(7)
    if place == 0:
        return CHAT, _chat(rng, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": made}})
    if place == 1:
        return CHAT, _chat(rng, guided_json=made)
    if place in (2, 3):
        return CHAT, _chat(rng, structured_outputs={"json": made if place == 2 else json.dumps(made)})
    if place == 4:
        form = {"type": "json_schema", "name": "x", "schema": made, "strict": rng.random() < 0.5}
        return RESPONSES, {"input": "hi", "max_output_tokens": 2, "text": {"format": form}, "stream": rng.random() < 0.5}
    function = {"name": "f", "parameters": made, "strict": rng.random() < 0.7}
    choice = rng.choice(("required", "auto", {"type": "function", "function": {"name": "f"}}))
    return CHAT, _chat(rng, tools=[{"type": "function", "function": function}], tool_choice=choice)


def _grammars(rng: random.Random) -> tuple[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return CHAT, _chat(rng, structured_outputs={"choice": [text(rng, 8) for _ in range(count(rng))]})
    name, made = ("grammar", grammar(rng)) if kind == 1 else ("regex", pattern(rng))
    biased = {"logit_bias": {str(rng.randrange(5)): rng.choice((-100, 100))}} if rng.random() < 0.3 else {}
    fields = {f"guided_{name}": made} if rng.random() < 0.3 else {"structured_outputs": {name: made}}
    return CHAT, _chat(rng, **fields, **biased)


def _log_probabilities(rng: random.Random) -> tuple[str, Any]:
    n, told = (128 if rng.random() < 0.02 else rng.choice((1, 1, 2, 5))), rng.choice((None, 0, 1, 20, 21, -1))
    common: dict[str, Any] = {
        "n": n, "stream": rng.random() < 0.4, "temperature": rng.choice((0, 1)), "return_token_ids": rng.random() < 0.3,
        "prompt_logprobs": rng.choice((None, None, 0, 20)), "max_tokens": rng.choice((0, 1, 3, 32)),
    }  # fmt: skip
    common["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5} if common["stream"] else None
    if rng.random() < 0.4:
        return CHAT, _chat(rng, **common, logprobs=rng.random() < 0.8, top_logprobs=told)
    prompts = [[rng.randrange(300) for _ in range(rng.randrange(1, 30))] for _ in range(rng.choice((1, 2, 5)))]
    prompt = rng.choice((prompts, prompts[0], "é日🦙", text(rng), [text(rng), "a"]))
    return COMPLETIONS, {**common, "prompt": prompt, "logprobs": told, "echo": rng.random() < 0.5}


def _many(rng: random.Random) -> tuple[str, Any]:
    size, kind = count(rng), rng.randrange(6)
    if kind == 0:
        parts = [{"type": "text", "text": text(rng, 3)}] * size
        return CHAT, _chat(rng, messages=[{"role": "user", "content": parts}] * rng.choice((1, 9)))
    if kind == 1:
        calls = [{"id": f"c{at % 9}", "function": {"name": "f", "arguments": json.dumps(value(rng, 1))}} for at in range(size)]
        answers = [{"role": "tool", "tool_call_id": f"c{at}", "content": text(rng)} for at in range(rng.randrange(3))]
        return CHAT, _chat(rng, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *answers])
    if kind == 2:
        items = (
            {"type": "function_call", "call_id": text(rng, 4), "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": text(rng)},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text(rng)}]},
            {"role": "user", "content": [{"type": "input_text", "text": text(rng)}]},
            value(rng),
        )
        return RESPONSES, {"input": [*[rng.choice(items)] * size, {"role": "user", "content": "a"}], "max_output_tokens": 2}
    if kind == 3:
        ids = [rng.choice((0, 1, 300, 4095, 4096, -1, 2**31, 10**20)) if rng.random() < 0.3 else 17 for _ in range(size)]
        return COMPLETIONS, {"prompt": rng.choice((ids, [ids, ids])), "max_tokens": 2, "stop_token_ids": ids[:9]}
    documents = [text(rng) for _ in range(size)]
    if kind == 4:
        return CHAT, _chat(rng, reference_documents=documents, reference_embedding=[number(rng) for _ in range(size)] or None)
    return COMPLETIONS, {"prompt": documents, "max_tokens": 1, "n": rng.choice((1, 2))}


def _texts(rng: random.Random) -> tuple[str, Any]:
    call = {
        "id": text(rng, 5), "type": "function",
        "function": {"name": text(rng, 5), "arguments": json.dumps({text(rng, 5): text(rng)})},
    }  # fmt: skip
    messages = [
        {"role": rng.choice(("system", "user", "developer", text(rng, 5))), "content": text(rng)},
        {"role": "assistant", "content": text(rng), "reasoning": text(rng), "tool_calls": [call] if rng.random() < 0.5 else None},
        {"role": "tool", "tool_call_id": text(rng, 5), "content": text(rng)},
        {"role": "user", "content": text(rng)},
    ]
    name, description = rng.choice(("f", text(rng, 5))), text(rng)
    function = {"name": name, "description": description, "parameters": {"type": "object", "title": text(rng)}}
    optional = {
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {text(rng, 5): value(rng, 1), "enable_thinking": value(rng, 0)},
        "prediction": {"type": "content", "content": text(rng)},
        "stop": [text(rng, 9)],
        "prompt_cache_key": text(rng, 9),
        "user": text(rng, 9),
        "reasoning_effort": rng.choice(("none", "low", text(rng, 3))),
        "include_reasoning": False,
    }
    fields = {name: optional[name] for name in rng.sample(sorted(optional), rng.randrange(4))}
    return CHAT, _chat(rng, messages=rng.sample(messages, rng.randrange(1, 5)), **fields)


def _fields(rng: random.Random) -> tuple[str, Any]:
    path = rng.choice((CHAT, COMPLETIONS, RESPONSES, "/v1/compare"))
    body = _chat(rng) if path in (CHAT, "/v1/compare") else {"prompt": "a", "max_tokens": 2}
    body = {"input": "a", "max_output_tokens": 2} if path == RESPONSES else body
    for name in rng.sample(sorted(_VALID), rng.randrange(6)):
        body[name] = rng.choice(_VALID[name])
    for name in rng.sample(_FIELDS, rng.choice((0, 1, 1, 2))):
        within = _WITHIN.get(name)
        if within is None or rng.random() < 0.3:
            body[name] = value(rng)
        else:
            body[name] = {each: value(rng, 1) for each in within if rng.random() < 0.5}
    return path, body


def _tokenizer(rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.4:
        ids = [rng.choice((0, 5, 300, 4095, 4096, -1)) for _ in range(count(rng))]
        return "/detokenize", {"tokens": rng.choice((ids, value(rng)))}
    _, body = _texts(rng)
    fields: dict[str, Any] = {name: body[name] for name in ("messages", "tools", "chat_template_kwargs") if name in body}
    fields = {"prompt": text(rng)} if rng.random() < 0.5 else fields
    for name in ("add_generation_prompt", "add_special_tokens", "return_token_strs", "model"):
        if rng.random() < 0.2:
            fields[name] = rng.choice((True, False, value(rng, 0)))
    return "/tokenize", fields


# Weight, name, and the maker of a route and a body without a model. Grammars cost the server a process each.
BODIES = (
    (2, "schemas", _schemas),
    (2, "grammars", _grammars),
    (3, "log-probabilities", _log_probabilities),
    (3, "many", _many),
    (3, "texts", _texts),
    (5, "fields", _fields),
    (3, "tokenizer", _tokenizer),
)
