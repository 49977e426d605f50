"""Layers with a state in stock models, and what takes the places of the functions that they call.

A mixer, as transformers calls such a layer, has its projections, gates and norms computed for all rows at once, and calls two
functions of its module where rows meet: a short convolution, and a recurrent rule. An instance that is bound anew runs its
class's own code, with these two names looked up elsewhere; without a running step they are transformers' own. Nothing of
transformers is changed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.forward.thin_modules import whole_parts

CONVOLUTION, DELTA_RULE, SPACE_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
CONVOLUTION_ALONE = ""  # in the place of a rule, where there is none
_NAMES = (CONVOLUTION, DELTA_RULE, SPACE_RULE)
_METHODS = {CONVOLUTION: "convolve", DELTA_RULE: "delta_rule", SPACE_RULE: "space_rule"}  # of a running step's ``states``


def mixers(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """The modules of a model that call such functions, in order."""
    for module in model.modules():
        if CONVOLUTION in _own_forward(module).__code__.co_names:
            yield module


def _own_forward(module: torch.nn.Module) -> Any:
    """The function that a class defines, below what decorates it."""
    own = inspect.unwrap(type(module).forward)
    return own if isinstance(own, types.FunctionType) else _nothing


def _nothing() -> None:
    pass


def bind_mixers(model: PreTrainedModel) -> int:
    """Has the mixers of a model ask the running step, in place; returns how many there are.

    Raises:
        ModelLoadError: a mixer's code is not as expected.
    """
    count = 0
    for count, module in enumerate(mixers(model), start=1):
        own = _own_forward(module)
        names = [name for name in _NAMES if name in own.__code__.co_names]
        if not all(callable(own.__globals__.get(name)) for name in names) or len(names) > 2 or module.training:
            raise ModelLoadError(f"{type(module).__name__} of this version of transformers calls its functions in another way")
        replaced = {name: _instead_of(own.__globals__[name], _METHODS[name], 2 * count - 2 + at) for at, name in enumerate(names)}
        run = types.FunctionType(own.__code__, {**own.__globals__, **replaced}, own.__name__, own.__defaults__, own.__closure__)
        run.__kwdefaults__ = own.__kwdefaults__
        module.forward = types.MethodType(run, module)
    return count


class FilledRows(torch.nn.Module):
    """A product of few outputs that only a rule reads, with rows behind those that there are.

    torch computes the last numbers of what it is given, fewer than two registers, by another function than the others. What a
    model makes of these outputs, a sigmoid say, is to have the same bits in every row: the last numbers are nobody's.
    """

    def __init__(self, linear: torch.nn.Linear, heads: int) -> None:
        """``heads`` are the numbers of a row that are computed with together."""
        super().__init__()
        self.linear, self._heads = linear, heads

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, rows, size] to [1, rows and more, outputs]."""
        output: torch.Tensor = self.linear(hidden_states)
        rows = whole_parts(output.shape[1], self._heads)
        return output if rows == output.shape[1] else torch.nn.functional.pad(output, (0, 0, 0, rows - output.shape[1]))


class ApartRows(torch.nn.Module):
    """A product of one output whose rows do not lie side by side: torch computes with each by itself, for the reason above."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Takes the place of a gate of a model."""
        super().__init__()
        self.linear = linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., 1]."""
        output: torch.Tensor = self.linear(hidden_states)
        return torch.nn.functional.pad(output, (0, 1))[..., :1]


def round_alike(model: PreTrainedModel, heads: Mapping[int, int]) -> None:
    """Has the gates of mixers, and those beside them, computed alike for any number of rows, in place.

    Args:
        model: whose mixers are bound.
        heads: of the delta rules, by the number of their site.
    """
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
    """A function that asks the running step, or is transformers' own where none runs."""

    def ask(*given: Any, **more: Any) -> Any:
        step = more.pop("tree_step", None)
        if step is None:
            return stock(*given, **more)
        return getattr(step.states, method)(site, *given, **more)

    return ask
