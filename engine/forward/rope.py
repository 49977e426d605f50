"""Length-dependent RoPE (longrope and dynamic NTK), computed row by row.

transformers derives the frequencies of a forward pass from its greatest position, which another request or a rejected draft may
have. Here a row has those of length ``max(reach, position + 1)``, as in ``generate`` of transformers 5.23, where the *reach* of a
request is the length of its prompt.
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

from outrider.decoding.request import Request
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import SequenceRows

_ORIGINAL = "original_max_position_embeddings"
_NEVER = 2**31  # unlimited depth, in rows


@dataclass(frozen=True, slots=True)
class LengthRope:
    """Dependence of a model's RoPE frequencies on the sequence length."""

    border: int  # longest sequence, in tokens, whose rows have the first set of frequencies
    longest: int  # longest sequence, in tokens, that the frequencies support
    dynamic: bool  # every length beyond the border has its own frequencies; otherwise they share one set
    recomputes: bool  # a sequence that crosses the border is recomputed

    def rope_length(self, request: Request) -> int:
        """Return the least sequence length by which a request's rows are rotated; 0 if each row's own position decides."""
        length = request.num_tokens if self.recomputes else request.num_prompt
        if length <= self.border:
            return 0
        return length if self.dynamic else self.border + 1

    def depth(self, request: Request) -> int:
        """Return the greatest depth of a draft tree."""
        # No draft row may lie beyond the border before the text itself crosses it.
        return self.border - request.num_tokens if self.recomputes and request.num_tokens <= self.border else _NEVER

    def lengths(self, segments: Sequence[SequenceRows], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the length that selects each row's frequencies, [rows], 0 for the first set; None if all have the first set."""
        found = positions + 1
        for segment in segments:
            if segment.rope_length:
                own = found[segment.offset : segment.offset + segment.rows]
                np.maximum(own, segment.rope_length, out=own)
        beyond = found > self.border
        if not beyond.any():
            return None
        return np.where(beyond, found if self.dynamic else self.border + 1, 0)


def length_rope(config: PreTrainedConfig) -> LengthRope | None:
    """Return the length dependence of a model's RoPE; None if it has none, or if kinds of layers have rotations of their own."""
    text = config.get_text_config()
    rope, own = getattr(text, "rope_parameters", None) or {}, getattr(text, "max_position_embeddings", None)
    kind = rope.get("rope_type")
    if own is None or kind not in ("longrope", "dynamic") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if kind == "dynamic":
        longest = int(own * (rope.get("factor") or 1.0))
        return LengthRope(int(own), longest, True, False) if longest > own else None
    border = rope.get(_ORIGINAL)  # equals the configuration's own value, if it has one
    if border is None or border >= own:
        return None
    # Phi-3 and Phi-MoE recompute a text that outgrows the first set of frequencies: all its rows have the second set.
    prepare = inspect.unwrap(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].prepare_inputs_for_generation)
    recomputes = getattr(config, _ORIGINAL, None) == border and _ORIGINAL in prepare.__code__.co_names
    return LengthRope(int(border), int(own), False, recomputes)


class RowRope(torch.nn.Module):
    """Replacement of a model's rotary embedding that calls the original once per distinct length."""

    def __init__(self, own: torch.nn.Module, rope: LengthRope) -> None:
        super().__init__()
        self.own, self.rope = own, rope
        self.lengths: npt.NDArray[np.int64] | None = None  # of the rows of the next forward pass, see ``LengthRope.lengths``

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return the rotary embedding of [1, rows] positions: one tensor or several, [1, rows, ...]."""
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
        """Return the embedding with the frequencies of ``length``; with the first set if it is 0."""
        if self.rope.dynamic:  # reset, as if nothing had been computed before
            self.own.inv_freq = self.own.original_inv_freq
            self.own.max_seq_len_cached = self.own.original_max_seq_len
        # The original selects frequencies by the greatest position: append that of the length's last token, and drop its row.
        if not length:
            return self.own(x, position_ids=positions)
        last = torch.full((1, 1), length - 1, dtype=positions.dtype, device=positions.device)
        found = self.own(x, position_ids=torch.cat((positions, last), dim=1))
        return tuple(part[:, :-1] for part in found) if isinstance(found, tuple) else found[:, :-1]


def ropes_by_row(model: PreTrainedModel) -> list[RowRope]:
    """Replace length-dependent rotary embeddings in place; return the replacements. Raises ``ModelLoadError``."""
    rope = length_rope(model.config)
    if rope is None:
        return []
    kept = [module for module in model.modules() if isinstance(module, RowRope)]
    if kept:  # a copy of a model that was already changed
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
