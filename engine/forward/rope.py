"""Rotations whose frequencies change with the length of the text: long rope and dynamic rope, row by row.

transformers takes the frequencies of a forward from its greatest position, so that the other requests of a step, and refused
drafts, would change an output. Here each row has the frequencies that it has in ``generate`` (5.23), which computes the prompt in
one forward and then token by token: those of the length ``max(reach, position + 1)``, where the *reach* of a request is the
length of its prompt. Some models, Phi-3 and Phi-MoE, give up their cache when a text becomes longer than the first frequencies
are for, and compute it anew: all rows of such a text have the second ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from decoding.request import Request
from engine.errors import ModelLoadError
from engine.forward.batch import Segment

_ORIGINAL = "original_max_position_embeddings"
_NEVER = 2**31  # rows deep


@dataclass(frozen=True, slots=True)
class LengthRope:
    """How a model's frequencies follow the length of a text."""

    border: int  # tokens of a text up to which its rows have the first frequencies
    longest: int  # tokens of a text that the frequencies are for
    dynamic: bool  # each length beyond the border has its own; otherwise all of these have the same
    recomputes: bool  # a text that crosses the border is computed anew

    def reach(self, request: Request) -> int:
        """The length of text by which all rows of a request go at least; 0 where each goes by its position alone.

        Rows of two requests with the same reach, and the same tokens before them, have the same keys and values.
        """
        length = request.num_tokens if self.recomputes else request.num_prompt
        if length <= self.border:
            return 0
        return length if self.dynamic else self.border + 1

    def depth(self, request: Request) -> int:
        """How deep a tree may be: no row lies behind the border before the text has crossed it."""
        return self.border - request.num_tokens if self.recomputes and request.num_tokens <= self.border else _NEVER

    def lengths(self, segments: Sequence[Segment], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """[rows] lengths whose frequencies the rows of a forward have, 0 for the first ones; None where all have these."""
        found = positions + 1
        for segment in segments:
            if segment.reach:
                own = found[segment.offset : segment.offset + segment.rows]
                np.maximum(own, segment.reach, out=own)
        beyond = found > self.border
        if not beyond.any():
            return None
        return np.where(beyond, found if self.dynamic else self.border + 1, 0)


def length_rope(config: PreTrainedConfig) -> LengthRope | None:
    """By a model's configuration; None where frequencies stay the same as far as the model goes, or cannot be followed by row.

    They cannot be where kinds of layers have rotations of their own.
    """
    text = config.get_text_config()
    rope, own = getattr(text, "rope_parameters", None) or {}, getattr(text, "max_position_embeddings", None)
    kind = rope.get("rope_type")
    if own is None or kind not in ("longrope", "dynamic") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if kind == "dynamic":
        longest = int(own * (rope.get("factor") or 1.0))
        return LengthRope(int(own), longest, True, False) if longest > own else None
    border = rope.get(_ORIGINAL)  # which is the configuration's own, where it has one
    if border is None or border >= own:
        return None
    prepare = inspect.unwrap(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].prepare_inputs_for_generation)
    recomputes = getattr(config, _ORIGINAL, None) == border and _ORIGINAL in prepare.__code__.co_names
    return LengthRope(int(border), int(own), False, recomputes)


class RowRope(torch.nn.Module):
    """In the place of a model's rotation, which it asks once for each length that its rows have."""

    def __init__(self, own: torch.nn.Module, rope: LengthRope) -> None:
        """Takes over a rotation of transformers, whose class has ``dynamic_rope_update``."""
        super().__init__()
        self.own, self.rope = own, rope
        self.lengths: npt.NDArray[np.int64] | None = None  # of the rows of the next forward; see ``LengthRope.lengths``

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """What the rotation itself gives for [1, rows] positions: one tensor or several, [1, rows, ...]."""
        if self.lengths is None:
            return self._at(x, position_ids, 0)
        distinct = np.unique(self.lengths).tolist()
        if len(distinct) == 1:
            return self._at(x, position_ids, distinct[0])
        made: list[torch.Tensor] = []
        for length in distinct:
            rows = torch.from_numpy(np.flatnonzero(self.lengths == length)).to(position_ids.device)
            found = self._at(x, position_ids[:, rows], length)
            parts = found if isinstance(found, tuple) else (found,)
            made = made or [part.new_empty(1, len(self.lengths), *part.shape[2:]) for part in parts]
            for whole, part in zip(made, parts, strict=True):
                whole[:, rows] = part
        return tuple(made) if isinstance(found, tuple) else made[0]

    def _at(self, x: torch.Tensor, positions: torch.Tensor, length: int) -> Any:
        """By the frequencies of a length: what the rotation says where its greatest position is the last of the length."""
        if self.rope.dynamic:  # as if nothing had been computed before
            self.own.inv_freq = self.own.original_inv_freq
            self.own.max_seq_len_cached = self.own.original_max_seq_len
        if not length:
            return self.own(x, position_ids=positions)
        last = torch.full((1, 1), length - 1, dtype=positions.dtype, device=positions.device)
        found = self.own(x, position_ids=torch.cat((positions, last), dim=1))
        return tuple(part[:, :-1] for part in found) if isinstance(found, tuple) else found[:, :-1]


def ropes_by_row(model: PreTrainedModel) -> list[RowRope]:
    """Replaces the rotations of a model whose frequencies change with the length of a text, in place; none of others.

    Raises:
        ModelLoadError: they were not found.
    """
    rope = length_rope(model.config)
    if rope is None:
        return []
    kept = [module for module in model.modules() if isinstance(module, RowRope)]
    if kept:  # in a copy of a model that has them
        return kept
    kinds = ("longrope", "dynamic")
    found = [name for name, module in model.named_modules() if getattr(module, "rope_type", None) in kinds]
    if not found:
        raise ModelLoadError(f"{type(model).__name__} cannot be served: its rotations, which change with length, were not found")
    for name in found:
        parent, _, child = name.rpartition(".")
        kept.append(RowRope(model.get_submodule(name), rope))
        setattr(model.get_submodule(parent), child, kept[-1])
    return kept
