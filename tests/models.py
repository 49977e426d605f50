"""Tiny random models and a tokenizer, as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCAB = 320
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A request travels from the door to the engine and back again.",
    "Größe, naïve, 東京, café, emoji 🙂 and other characters that take several bytes.",
)


def llama_config(**changes: object) -> LlamaConfig:
    """A Llama of two layers with grouped-query attention."""
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": None,
        "eos_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def save_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A random model of a configuration, with a byte-level tokenizer of ``VOCAB`` entries."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder
