"""Description of a running engine. Plain data, because it is sent to processes without a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outrider.configs.slices import SpeculationOptions
from outrider.decoding.drafters.options import check_given
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL, parse_strategy, setting_of
from outrider.decoding.request import PLAIN
from outrider.engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Adapter that requests may name as their model."""

    name: str
    path: str
    revision: str  # hexadecimal digits that identify its weights


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a running engine."""

    served_name: str
    max_model_len: int  # tokens of prompt plus output
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int
    eos_token_ids: tuple[int, ...]  # each of them ends an output
    strategy: str
    lossless: bool
    model_revision: str  # hexadecimal digits that identify weights and configuration
    tokenizer_revision: str  # hexadecimal digits that identify the tokenizer
    strategies: tuple[str, ...] = ()  # allowed for requests besides ``strategy`` and plain decoding
    weights: str = ""  # storage formats of the weights, or their type
    adapters: tuple[AdapterInfo, ...] = ()
    adapter_of: tuple[str, str] | None = None  # folder and base model, if the model is an adapter
    methods: tuple[tuple[str, str], ...] = ()  # names of settings in ``strategies``, with their strategies
    takes_options: bool = False  # whether requests may set options
    request_options: tuple[str, ...] = ()  # costly options that requests may set
    strategies_apart: frozenset[str] = frozenset()  # see ``strategies_apart`` below
    uncaptured_rows: tuple[int, ...] = ()  # row counts of steps that CUDA graphs could not capture; slower
    aliases: tuple[str, ...] = ()  # further names of the model
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # of the model's generation_config.json, by parameter
    exact: bool = False  # rows are bit-equal in any batch, checked at start: ``engine.forward.exactness``

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model and its adapters, which requests may use."""
        return self.served_name, *self.aliases, *(adapter.name for adapter in self.adapters)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return all strategies that requests may use, the default first."""
        return tuple(dict.fromkeys((self.strategy, *self.strategies, PLAIN)))

    @property
    def lossless_choices(self) -> tuple[str, ...]:
        """Return the ``choices`` whose outputs have the distribution of plain decoding."""
        return tuple(name for name in self.choices if self.method_of(name) in LOSSLESS)

    def method_of(self, strategy: str | None) -> str:
        """Return the strategy of a request's choice: ``jacobi`` for ``jacobi:window=5``, or for a setting of it."""
        setting = setting_of(strategy or "") or self.strategy
        return dict(self.methods).get(setting, setting)

    def is_lossless(self, strategy: str | None, max_draft_tokens: int | None = None) -> bool:
        """Return whether a request's output has the distribution of plain decoding; without drafts it does."""
        return max_draft_tokens == 0 or self.method_of(strategy) in LOSSLESS

    def check_adapter(self, name: str | None) -> None:
        """Raise ``RequestError`` if an adapter does not exist."""
        names = [each.name for each in self.adapters]
        if name is not None and name not in names:
            raise RequestError("adapter", f"{name!r} does not exist; available: {', '.join(names) or 'none'}")

    def check_strategy(self, strategy: str | None) -> None:
        """Raise ``RequestError`` if requests may not use a strategy, or not with these options."""
        if strategy is None or strategy in self.choices:
            return
        setting = setting_of(strategy)
        if setting not in self.choices:
            strategy = setting
            message = f"{strategy!r} is not available on this server; allowed: {', '.join(self.choices)}"
            if strategy in WITH_DRAFT_MODEL and strategy not in LOSSLESS:
                message += "; it changes the output: a server offers it with speculation.exact=false and speculation.strategies"
            raise RequestError("speculation.strategy", message)
        if not self.takes_options:
            raise RequestError("speculation.options", "this server takes no options of requests (speculation.max_settings is 0)")
        try:
            given = parse_strategy(strategy).options
        except ValueError as error:
            raise RequestError("speculation.strategy", str(error)) from None
        fault = check_given(self.method_of(setting), given, self.request_options)
        if fault is not None:
            raise RequestError("speculation.options", fault)


def strategies_apart(options: SpeculationOptions) -> frozenset[str]:
    """Return the strategies whose sampled text follows the target's distribution, but differs from plain decoding's per seed.

    Example: ``spectr``, and ``speculative:sampling=rejection``; not ``speculative``, which is coupled.
    """
    others = [(one.setting, one.name, one.options) for one in map(parse_strategy, options.strategies)]
    choices = [(options.strategy, options.strategy, options.options), *others]
    return frozenset(
        setting
        for setting, name, given in choices
        if name == "spectr" or (name == "speculative" and given.get("sampling") == "rejection")
    )


def samples_apart(strategy: str, apart: Collection[str]) -> bool:
    """Return whether a request's strategy, perhaps with options, is one of those that ``strategies_apart`` describes."""
    choice = parse_strategy(strategy)
    sampling = choice.options.get("sampling")
    return choice.name in apart if sampling is None else sampling == "rejection"
