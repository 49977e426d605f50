"""Recurrent layers (mixers) of stock models, and replacements for the functions that they call.

A mixer calls two functions of its module where rows interact: a short convolution and a recurrent rule.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.patches import whole_parts

CONVOLUTION, DELTA_RULE, SPACE_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
CONVOLUTION_ALONE = ""  # stands for a rule if a mixer has none
_NAMES = (CONVOLUTION, DELTA_RULE, SPACE_RULE)
_METHODS = {CONVOLUTION: "convolve", DELTA_RULE: "delta_rule", SPACE_RULE: "space_rule"}  # methods of a running step's ``states``


def mixers(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Yield the modules of a model that call a short convolution, in order."""
    for module in model.modules():
        if CONVOLUTION in _own_forward(module).__code__.co_names:
            yield module


def _own_forward(module: torch.nn.Module) -> Any:
    own = inspect.unwrap(type(module).forward)
    return own if isinstance(own, types.FunctionType) else _nothing


def _nothing() -> None:
    pass


def bind_mixers(model: PreTrainedModel) -> int:
    """Route the functions of a model's mixers to the running step, in place; return their number. Raises ``ModelLoadError``."""
    count = 0
    for count, module in enumerate(mixers(model), start=1):
        own = _own_forward(module)
        names = [name for name in _NAMES if name in own.__code__.co_names]
        if not all(callable(own.__globals__.get(name)) for name in names) or len(names) > 2 or module.training:
            raise ModelLoadError(
                f"{type(module).__name__} of this version of transformers calls its functions in an unsupported way"
            )
        replaced = {name: _instead_of(own.__globals__[name], _METHODS[name], 2 * count - 2 + at) for at, name in enumerate(names)}
        # The class's own code with these names looked up elsewhere; without a running step they are transformers' own.
        run = types.FunctionType(own.__code__, {**own.__globals__, **replaced}, own.__name__, own.__defaults__, own.__closure__)
        run.__kwdefaults__ = own.__kwdefaults__
        module.forward = types.MethodType(run, module)
    return count


class FilledRows(torch.nn.Module):
    """Linear layer with few outputs, padded with extra rows that only the rule sees."""

    def __init__(self, linear: torch.nn.Linear, heads: int) -> None:
        super().__init__()
        self.linear, self._heads = linear, heads  # elements of a row that are processed together

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [1, at least rows, outputs] of [1, rows, size]."""
        output: torch.Tensor = self.linear(hidden_states)
        # torch computes the last elements, fewer than two registers, by another function: they must not be a real row's.
        rows = whole_parts(output.shape[1], self._heads)
        return output if rows == output.shape[1] else torch.nn.functional.pad(output, (0, 0, 0, rows - output.shape[1]))


class ApartRows(torch.nn.Module):
    """Linear layer with one output whose rows are not adjacent: torch then processes each one alone (see ``FilledRows``)."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [..., 1] of [..., size]."""
        output: torch.Tensor = self.linear(hidden_states)
        return torch.nn.functional.pad(output, (0, 1))[..., :1]


def round_expert_rows_apart(model: PreTrainedModel, heads: Mapping[int, int]) -> None:
    """Make gates of mixers and shared experts round alike for any number of rows; ``heads``: of a delta rule, by site."""
    found = [(module, heads[2 * number + 1]) for number, module in enumerate(mixers(model)) if 2 * number + 1 in heads]
    for module, count in found:
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.shape[0] in (count, 2 * count):
                setattr(module, name, FilledRows(child, count))
    for module in list(model.modules()):
        gate = getattr(module, "shared_expert_gate", None)
        if type(gate) is torch.nn.Linear:
            module.shared_expert_gate = ApartRows(gate)


def _instead_of(stock: Callable[..., Any], method: str, site: int) -> Callable[..., Any]:
    def ask(*given: Any, **more: Any) -> Any:
        step = more.pop("tree_step", None)
        if step is None:
            return stock(*given, **more)
        return getattr(step.states, method)(site, *given, **more)

    return ask
