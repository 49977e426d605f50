"""Options of the strategies: type, range, symbol in the paper and meaning, for checks, ``--help`` and documents."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 4096  # largest number of rows or tokens


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a strategy: a number with a range, a name with ``choices``, or a switch. Its default is the constructor's."""

    meaning: str
    low: float | None = None  # for an option that takes fractions, a float
    high: float | None = None
    choices: tuple[str, ...] = ()
    symbol: str = ""  # in the paper
    # Takes memory of the server, or time to prepare: requests may set it only if ``speculation.request_options`` names it.
    costly: bool = False

    @property
    def kind(self) -> type:
        """Return the type of its values."""
        if self.choices:
            return str
        return bool if self.low is None else type(self.low)

    @property
    def range(self) -> str:
        """Return the allowed values as text."""
        if self.choices:
            return ", ".join(self.choices)
        return "true, false" if self.low is None else f"{self.low:g} to {self.high:g}"

    def fault(self, value: Any) -> str:
        """Return why a value is not allowed, such as ``must be 1 to 64, got 0``; empty if it is."""
        kind = self.kind
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            return f"must be of type {kind.__name__} ({self.range}), got {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {self.range}, got {value!r}"
        if self.low is not None and self.high is not None and not self.low <= value <= self.high:
            return f"must be {self.range}, got {value}"
        return ""


def _rows(meaning: str, symbol: str = "", high: int = _MOST, low: int = 1) -> Option:
    return Option(meaning, low, high, symbol=symbol)


_SIMILAR = Option("past requests with the most similar prompts that are drafted from; 0 for none", 0, 64)
_HISTORY = Option("tokens of outputs to keep per tenant; 0 keeps none", 0, 2**31, costly=True)
_SCOPE = Option("whether the table is a tenant's or the request's", choices=("tenant", "request"))
_CHAIN = _rows("tokens of a draft", symbol="gamma", high=512)

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "autoregressive": {},
    "auto": {
        "max_depth": _rows("tokens of a branch"),
        "history_tokens": _HISTORY,
        "recycling": Option("draft what the target ranked after a token", costly=True),
        "all_rows": Option("draft as many rows as allowed, whatever a row costs"),
        "similar_requests": _SIMILAR,
    },
    "llma": {
        "match_length": _rows("tokens to match", "n", 1024),
        "copy_length": _rows("tokens of a copy", "k"),
        "max_context": _rows("longest agreement to measure, at least `match_length`", high=1024),
        "include_prompt": Option("use the prompt as a reference"),
        "include_output": Option("use the output so far as a reference"),
        "ties": Option("choice among equally long agreements", choices=("first", "recent", "random")),
        "history_tokens": _HISTORY,
        "similar_requests": _SIMILAR,
    },
    "trie": {
        "decoding_length": _rows("rows of the tree, with the root", "decoding length"),
        "branch_length": _rows("tokens of a branch", "branch length"),
        "max_query_length": _rows("tokens to look up", high=32),
        "layout": Option("one tree, branches side by side, or the best branch", choices=("hierarchical", "parallel", "single")),
        "frequencies": Option("frequencies that count", choices=("mix", "input", "output")),
        "min_input": Option("rows reserved for branches of the prompt", 0, _MOST),
        "min_output": Option("rows reserved for branches of outputs; -1: half of the rows", -1, _MOST),
        "max_occurrences": _rows("occurrences counted per lookup", high=1024),
        "capacity": Option("tokens of outputs to keep per tenant; 0 makes every request private", 0, 2**31, costly=True),
        "similar_requests": _SIMILAR,
    },
    "ngrammys": {
        "k": _rows("rows of the block", "k", 512),
        "w": _rows("tokens of a row", "w", 512),
        "q": _rows("tokens to match in the context", "q", 32),
        "allocation": Option("kinds of rows", choices=("mixed", "context", "bigram", "unigram")),
        "layout": Option("merge rows with a common prefix, or not as published", choices=("tree", "batched")),
        "table_width": _rows("tokens of the bigram table that begin a row", high=512),
        "short_rows": Option("allow rows of fewer tokens near the end of the text"),
        "max_occurrences": _rows("occurrences that are counted"),
    },
    "jacobi": {
        "window": _rows("columns of the window; with `ngram` 2 the guesses of a block", "W", 512),
        "ngram": _rows("tokens of an n-gram; 2 is plain Jacobi decoding", "N", 64, low=2),
        "guesses": _rows("n-grams kept and drafted per token", "G", 512),
        "prompt_as_reference": Option("n-grams of references, prompt and output are drafted too (off in the paper's results)"),
    },
    "prompt_lookup": {
        "max_ngram": _rows("longest n-gram to match", high=64),
        "num_tokens": _rows("tokens of a copy"),
    },
    "suffix": {
        "max_spec_tokens": _rows("tokens of a copy"),
        "max_spec_factor": Option("tokens of a copy per matching token", 0.0, 4096.0),
        "max_spec_offset": Option("tokens of a copy without a match", -4096.0, 4096.0),
        "min_match_length": _rows("matching tokens for a copy"),
        "occurrence": Option("occurrence to copy from", choices=("mixed", "latest", "earliest")),
    },
    "suffix_decoding": {
        "max_spec_tokens": _rows("rows of the tree"),
        "max_spec_factor": Option("rows per matching token", 0.0, 4096.0, symbol="alpha"),
        "max_spec_offset": Option("rows without a match", -4096.0, 4096.0),
        "min_token_prob": Option("least share of a drafted token", 0.0, 1.0),
        "max_tree_depth": _rows("tokens of match and draft", high=256, low=2),
        "capacity": Option("tokens of outputs to keep per tenant", 2, 2**31, costly=True),
    },
    "sam": {
        "max_spec_tokens": _rows("tokens of a copy"),
        "min_match_length": _rows("matching tokens for a copy"),
        "shape": Option("tree after shorter matches, see `recycling`", choices=("published", "ranked")),
        "scope": _SCOPE,
    },
    "recycling": {
        "shape": Option("tree by rank, or the published fixed tree", choices=("ranked", "published")),
        "learn_rows": _rows("rows of a step that teach the table"),
        "start": Option("table at the start: empty, or the target's bigrams", choices=("empty", "bigram"), costly=True),
        "scope": _SCOPE,
    },
    "racer": {
        "draft_nodes": _rows("rows of the tree, with the root", low=2),
        "window": _rows("tokens of a window in the trie", high=64, low=2),
        "capacity": Option("nodes of the trie", 64, 2**31, costly=True),
        "scope": _SCOPE,
    },
    "adapld": {
        "num_tokens": _rows("tokens of the main branch"),
        "branches": _rows("tokens of the target beside the main branch", high=32),
    },
    "speculative": {
        "num_draft_tokens": _CHAIN,
        "sampling": Option("choice of the drafted tokens", choices=("coupled", "greedy", "rejection")),
    },
    "spectr": {"num_draft_tokens": _CHAIN, "sequences": _rows("sequences drawn", "K", 512)},
    "bild": {
        "num_draft_tokens": _CHAIN,
        "fallback": Option("least confidence of the draft model to go on", 0.0, 1.0, symbol="alpha_FB"),
        "rollback": Option("a token less likely than exp(-rollback) is replaced", 0.0, 1e9, symbol="alpha_RB"),
        "variant": Option("code that it follows", choices=("original", "mjsd")),
    },
    "mjsd": {
        "num_draft_tokens": _CHAIN,
        "beams": _rows("beams kept at each level", high=512),
        "threshold": Option("least ratio of joint probabilities", -1e9, 1e9, symbol="τ"),
        "joint_law": Option("probabilities that are compared", choices=("raw", "warped")),
        "do_sample": Option("draw the beams"),
    },
}


def check_options(strategy: str, **values: Any) -> None:
    """Raise ``ValueError`` for the first value outside the range of its option."""
    for name, value in values.items():
        fault = OPTIONS[strategy][name].fault(value)
        if fault:
            raise ValueError(f"{name} {fault}")


def check_given(strategy: str, given: Mapping[str, Any], allowed: Collection[str] = ()) -> str | None:
    """Return the fault of options that a request sets for a strategy; None if it may set them.

    ``allowed``: costly options that requests may set, each as ``STRATEGY.OPTION``.
    """
    known = OPTIONS[strategy]
    for name, value in given.items():
        option = known.get(name)
        if option is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            return f"{strategy} has no option {name!r}{hint}; its options: {', '.join(known) or 'none'}"
        if option.costly and f"{strategy}.{name}" not in allowed:
            return f"{name} is set by the operator: this server does not list {strategy}.{name} in speculation.request_options"
        fault = option.fault(value)
        if fault:
            return f"{name} {fault}"
    return None
