"""Sampling parameters of a request: how tokens are chosen, and when generation ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_LOGPROBS = 20  # as OpenAI and vLLM
MAX_LOGIT_BIAS = 100.0  # as OpenAI
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1000  # each string is searched for in every token's text and held back while incomplete
_GREEDY_BELOW = 1e-5  # as vLLM: logits divided by less could overflow

# Inclusive bounds. OpenAI's for its parameters. vLLM only requires repetition_penalty > 0; these bounds keep every product with a
# logit finite.
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters. Values outside their range raise ``ValueError`` naming the field.

    ``grammar``, ``logit_bias``, ``min_tokens`` and the penalties change the logits of greedy and sampled requests
    (``decoding.sampling.penalties``); ``temperature``, ``min_p``, ``top_k`` and ``top_p`` shape the sampled distribution
    (``decoding.sampling.sampler``).
    """

    max_tokens: int = 256
    temperature: float = 0.0  # below 1e-5: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it unless include_stop
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the text
    include_stop: bool = False  # the matched stop string or stop token is part of the text
    skip_special_tokens: bool = True  # leave the tokenizer's special tokens out of the text
    min_p: float = 0.0  # tokens less likely than this share of the most likely one are excluded; 0: none
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones; 1: off
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output
    frequency_penalty: float = 0.0  # subtracted once for every occurrence of the token in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of (token id, value added to its logit)
    logprobs: int | None = None  # alternatives reported with each token's log-probability; None: no log-probabilities
    min_tokens: int = 0  # end tokens are banned before this many tokens; stop strings still end the text
    grammar: str | None = None  # grammar of the output, see engine.text.grammar; None: any text
    grammar_field: str = "response_format"  # field of the client's request that grammar errors name

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {getattr(self, name)}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for size in map(len, self.stop):
            if not 0 < size <= MAX_STOP_CHARS:
                raise ValueError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, got one of {size}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_LOGPROBS}, or None for none, got {self.logprobs}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos must be false with a grammar: the grammar determines where the text may end")
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        for token, bias in self.logit_bias:
            if token < 0 or not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                raise ValueError(
                    f"logit_bias must pair token ids with values between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, "
                    f"got {bias} for {token}"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias must name each token once")

    @property
    def greedy(self) -> bool:
        """Return whether every token is the argmax of the logits after bias and penalties."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Return whether a token's logit depends on how often the sequence holds the token."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def alters_logits(self) -> bool:
        """Return whether a greedy token may differ from the argmax of the model's own logits."""
        return self.penalized or bool(self.logit_bias) or self.min_tokens > 0 or self.grammar is not None

    @property
    def truncates(self) -> bool:
        """Return whether sampling excludes some of the tokens."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0
