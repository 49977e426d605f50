"""What a running engine says of itself. Plain data: it travels to processes without a model."""

from __future__ import annotations

from dataclasses import dataclass

from configs.slices import SpeculationOptions
from decoding.drafters import LOSSLESS, WITH_DRAFT_MODEL
from decoding.request import PLAIN
from decoding.strategy_choice import parse_strategy
from engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that requests may name as their model."""

    name: str
    path: str
    revision: str  # hexadecimal digits that stand for its weights


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a running engine says of itself."""

    served_name: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    strategy: str
    lossless: bool
    model_revision: str  # hexadecimal digits that stand for the weights, and for what the tokenizer makes of a text
    tokenizer_revision: str
    strategies: tuple[str, ...] = ()  # what requests may ask for besides ``strategy`` and plain decoding
    weights: str = ""  # what they are held as: formats, or the type
    adapters: tuple[AdapterInfo, ...] = ()
    adapter_of: tuple[str, str] | None = None  # of an adapter that is the model itself, its folder and its model
    strategies_apart: frozenset[str] = frozenset()  # see there
    uncaptured_rows: tuple[int, ...] = ()  # steps on a GPU of so many rows could not be captured as CUDA graphs, and are slower
    exact: bool = False  # every row has the same bits in any company, as was seen at the start: ``engine.forward.exactness``

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name as their model: it, and its adapters."""
        return self.served_name, *(adapter.name for adapter in self.adapters)

    @property
    def choices(self) -> tuple[str, ...]:
        """Every strategy that a request may ask for, first the one that it gets when it asks for none."""
        return tuple(dict.fromkeys((self.strategy, *self.strategies, PLAIN)))

    @property
    def lossless_choices(self) -> tuple[str, ...]:
        """Those of ``choices`` whose outputs have the distribution of plain decoding."""
        return tuple(name for name in self.choices if name in LOSSLESS)

    def is_lossless(self, strategy: str | None, max_draft_tokens: int | None = None) -> bool:
        """Whether what a request that asks for a strategy, or for none, is given has the distribution of plain decoding: without
        drafts it has."""
        return max_draft_tokens == 0 or (strategy or self.strategy) in LOSSLESS

    def check_adapter(self, name: str | None) -> None:
        """Raises ``RequestError`` for an adapter that is not there."""
        names = [each.name for each in self.adapters]
        if name is not None and name not in names:
            raise RequestError("adapter", f"{name!r} does not exist; there are: {', '.join(names) or 'none'}")

    def check_strategy(self, strategy: str | None) -> None:
        """Raises ``RequestError`` for a strategy that requests may not ask for."""
        if strategy is not None and strategy not in self.choices:
            message = f"{strategy!r} cannot be asked for here; allowed: {', '.join(self.choices)}"
            if strategy in WITH_DRAFT_MODEL and strategy not in LOSSLESS:
                message += "; it changes the output: a server offers it with speculation.exact=false and speculation.strategies"
            raise RequestError("speculation.strategy", message)


def strategies_apart(options: SpeculationOptions) -> frozenset[str]:
    """The strategies whose sampled text has the target's distribution, but is another one than plain decoding's of the same seed.

    Example: ``spectr``, and ``speculative:sampling=rejection``; not ``speculative``, which is coupled.
    """
    choices = [(options.strategy, options.options), *((one.name, one.options) for one in map(parse_strategy, options.strategies))]
    return frozenset(
        name for name, given in choices if name == "spectr" or (name == "speculative" and given.get("sampling") == "rejection")
    )
