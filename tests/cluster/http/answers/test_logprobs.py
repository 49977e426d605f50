"""Log-probabilities of an answer, where every logit is known; and tokens as text and bytes, however tokenizers spell them."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.cluster.http.answers.logprobs import LogprobWriter, TokenBytes
from outrider.decoding.request import TokenLogprob
from tests.cluster.circle import CIRCLE, MESSAGES, byte_ids, read_stream

# The successor of the last token has the logit PEAK, all others 0.
SIZE = 258
PEAK = 0.5 / math.sqrt(1 / SIZE + 1e-6)  # the norm of a one-hot vector, and its epsilon
LIKELY = PEAK - math.log(math.exp(PEAK) + SIZE - 1)
UNLIKELY = -math.log(math.exp(PEAK) + SIZE - 1)


def bias(**values: float) -> dict[str, float]:
    return {str(byte_ids(character)[0]): value for character, value in values.items()}


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0] for chunk in read_stream(http, path, body)]


@pytest.mark.parametrize("references", [[], [CIRCLE * 3]])
def test_logprobs_of_a_completion(http: httpx.Client, client: OpenAI, references: list[str]) -> None:
    answer = client.completions.create(
        model="circle", prompt="g", max_tokens=9, temperature=0, logprobs=2, extra_body={"reference_documents": references}
    )
    (choice,) = answer.choices
    assert choice.text == "h-é_日:"
    logprobs = choice.logprobs
    assert logprobs is not None
    names = ["h", "-", "bytes:\\xc3", "bytes:\\xa9", "_", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", ":"]
    assert logprobs.tokens == names
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 4, 4, 4, 5]
    assert logprobs.token_logprobs == pytest.approx([LIKELY] * 9, abs=1e-4)
    assert logprobs.top_logprobs is not None
    for name, top in zip(names, logprobs.top_logprobs, strict=True):
        assert len(top) == 2 and top[name] == pytest.approx(LIKELY, abs=1e-4)
        assert min(top.values()) == pytest.approx(UNLIKELY, abs=1e-4)

    body = {"model": "circle", "prompt": "g", "max_tokens": 9, "temperature": 0, "logprobs": 2}
    streamed = chunks(http, "/v1/completions", body | {"reference_documents": references})
    parts = [chunk["logprobs"] for chunk in streamed if chunk["logprobs"] is not None]
    assert "".join(chunk["text"] for chunk in streamed) == choice.text
    for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        joined = [value for part in parts for value in part[field]]
        if field in ("tokens", "text_offset"):
            assert joined == getattr(logprobs, field)
        else:
            assert len(joined) == 9


def test_logprobs_hold_the_token_that_is_not_likely(client: OpenAI) -> None:
    """They are the model's own, whatever bias made of them; the emitted token comes along with the alternatives."""
    answer = client.completions.create(model="circle", prompt="<", max_tokens=2, temperature=0, logprobs=1, logit_bias=bias(x=50))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs) == (["x", "x"], pytest.approx([UNLIKELY] * 2, abs=1e-4))
    assert logprobs.top_logprobs[0] == pytest.approx({"a": LIKELY, "x": UNLIKELY}, abs=1e-4)
    none = client.completions.create(model="circle", prompt="<", max_tokens=2, temperature=0, logprobs=0).choices[0].logprobs
    assert none is not None and none.top_logprobs is not None
    assert [list(top) for top in none.top_logprobs] == [["a"], ["b"]]


@pytest.mark.parametrize("references", [[], [CIRCLE * 3]])
def test_logprobs_of_a_chat(http: httpx.Client, client: OpenAI, references: list[str]) -> None:
    arguments: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model="circle", **arguments, extra_body={"reference_documents": references})
    (choice,) = answer.choices
    assert choice.message.content == "<abcdefgh-é"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    assert [entry.token for entry in entries[-3:]] == ["-", "\\xc3", "\\xa9"]
    for entry in entries:
        assert entry.logprob == pytest.approx(LIKELY, abs=1e-4)
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.top_logprobs[2].logprob == pytest.approx(UNLIKELY, abs=1e-4)

    streamed = chunks(http, "/v1/chat/completions", {"model": "circle", "reference_documents": references, **arguments})
    content = [entry for chunk in streamed if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == [entry.token for entry in entries]
    assert content[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert "".join(chunk["delta"].get("content", "") for chunk in streamed) == choice.message.content
    assert streamed[0]["logprobs"] is None and streamed[-1]["logprobs"] is None


def test_logprobs_are_absent_when_not_asked_for(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="circle", messages=MESSAGES, max_tokens=2, logprobs=False)
    assert chat.choices[0].logprobs is None
    bare = client.chat.completions.create(model="circle", messages=MESSAGES, max_tokens=2, temperature=0, logprobs=True)
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content is not None
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[], []]


def test_the_end_token_and_a_stop_string_have_logprobs_too(client: OpenAI) -> None:
    """One entry for every token that the usage counts."""
    for arguments in ({"prompt": "s", "max_tokens": 20}, {"prompt": "<", "max_tokens": 20, "stop": "de"}):
        answer = client.completions.create(model="circle", temperature=0, logprobs=0, **arguments)  # type: ignore[call-overload]
        assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
        assert "".join(answer.choices[0].logprobs.tokens) in ("tuvw.</s>", "abcde")


SPELLED = "a b é日 🦙b"


def byte_level() -> PreTrainedTokenizerFast:
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"Ġb": 256}, merges=[("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2: a space is a mark, which the decoder strips from the beginning of a text."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize(("tokenizer", "before"), [(byte_level(), ""), (byte_fallback(), " ")], ids=["byte level", "fallback"])
def test_bytes_of_tokens_make_the_text(tokenizer: PreTrainedTokenizerFast, before: str) -> None:
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode(SPELLED, add_special_tokens=False)
    assert b"".join(token_bytes(token) for token in ids).decode() == before + SPELLED
    assert token_bytes(tokenizer.eos_token_id) == b"</s>"
    assert token_bytes(len(tokenizer) + 5) == b""  # a padded embedding has more rows than the tokenizer has tokens


def test_every_byte_has_its_token() -> None:
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer)
    assert sorted(token_bytes(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "fallback"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_offsets_point_into_the_text(tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    ids = [*tokenizer.encode(SPELLED, add_special_tokens=False), tokenizer.eos_token_id]
    entries = [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in ids]
    writer = LogprobWriter("text", TokenBytes(tokenizer))
    parts = [writer.write(entries[at : at + size]) for at in range(0, len(ids), size)]
    names = [name for part in parts for name in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == SPELLED and (names[-1], offsets[-1]) == ("</s>", len(SPELLED))
    for name, offset in zip(names[1:-1], offsets[1:-1], strict=True):
        if not name.startswith("bytes:"):
            assert text.startswith(name, offset)
    in_parts = [text[offset] for name, offset in zip(names, offsets, strict=True) if name.startswith("bytes:")]
    assert in_parts == list("éé日日日🦙🦙🦙🦙")


def test_an_impossible_token_has_a_number() -> None:
    """JSON has no minus infinity."""
    entry = TokenLogprob(3, -float("inf"), ((4, 0.0), (5, -float("inf"))))
    token_bytes = TokenBytes(byte_level())
    written = json.loads(LogprobWriter("chat", token_bytes).write([entry])["content"][0])
    assert (written["logprob"], [top["logprob"] for top in written["top_logprobs"]]) == (-9999.0, [0.0, -9999.0])
    assert LogprobWriter("text", token_bytes).write([entry])["token_logprobs"] == [-9999.0]
