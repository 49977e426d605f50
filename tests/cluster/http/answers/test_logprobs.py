"""Tokens as text and bytes, for the two ways in which tokenizers spell what is not a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.http.answers.logprobs import LogprobWriter, TokenBytes
from decoding.request import TokenLogprob

TEXT = "a b é日 🦙b"


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
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(token_bytes(token) for token in ids).decode() == before + TEXT
    assert token_bytes(tokenizer.eos_token_id) == b"</s>"
    assert token_bytes(len(tokenizer) + 5) == b""  # a padded embedding has more rows than the tokenizer has tokens


def test_every_byte_has_its_token() -> None:
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer)
    assert sorted(token_bytes(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "fallback"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_offsets_point_into_the_text(tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id]
    entries = [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in ids]
    writer = LogprobWriter("text", TokenBytes(tokenizer))
    parts = [writer.write(entries[at : at + size]) for at in range(0, len(ids), size)]
    names = [name for part in parts for name in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == TEXT and (names[-1], offsets[-1]) == ("</s>", len(TEXT))
    for name, offset in zip(names[1:-1], offsets[1:-1], strict=True):
        if not name.startswith("bytes:"):
            assert text.startswith(name, offset)
    in_parts = [text[offset] for name, offset in zip(names, offsets, strict=True) if name.startswith("bytes:")]
    assert in_parts == list("éé日日日🦙🦙🦙🦙")


def test_an_impossible_token_has_a_number() -> None:
    """JSON has no minus infinity."""
    entry = TokenLogprob(3, -float("inf"), ((4, 0.0), (5, -float("inf"))))
    token_bytes = TokenBytes(byte_level())
    (written,) = LogprobWriter("chat", token_bytes).write([entry])["content"]
    assert (written["logprob"], [top["logprob"] for top in written["top_logprobs"]]) == (-9999.0, [0.0, -9999.0])
    assert LogprobWriter("text", token_bytes).write([entry])["token_logprobs"] == [-9999.0]
