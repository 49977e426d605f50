"""Operations of recurrent layers for ``engine.cpu.forward_kernel``, from their norm to their last product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from outrider.engine.cpu.buffers import RowBuffers
from outrider.engine.cpu.mixers import CONVOLUTION_ALONE, DELTA_RULE, SPACE_RULE
from outrider.engine.cpu.state_step import States

_WIDTH = 16  # elements of a vector
Operations = Iterator[tuple[int, bool, int]]  # kind, whether to wait, and job address


class MixerOperations:
    """Operations of one model's recurrent layers, which read the buffer ``normed`` and add to ``hidden``."""

    def __init__(self, states: States, buffers: RowBuffers, factor: float) -> None:
        """Create the operations; outputs are multiplied by ``factor`` before they are added, unless it is 0."""
        from outrider.engine.cpu import forward_kernel

        self._native, self._states, self._buffers, self._factor = forward_kernel, states, buffers, factor

    def of(self, rule: str, module: Any, number: int) -> Operations:
        """Yield the operations of mixer ``number``, whose sites are ``2 * number`` and the next one."""
        kinds: dict[str, Callable[[Any, int], Operations]] = {
            CONVOLUTION_ALONE: self._short_convolution, DELTA_RULE: self._delta_rule, SPACE_RULE: self._space_rule,
        }  # fmt: skip
        return kinds[rule](module, 2 * number)

    def _short_convolution(self, module: Any, site: int) -> Operations:
        """Yield ``(B, C, x) = in(rows)``, the convolution of ``B x``, and its gating by C."""
        native, buffers = self._native, self._buffers
        size = module.in_proj.weight.shape[0] // 3
        buffers.make("wide", 3 * size)
        buffers.make("convolved", size)
        yield native.LINEAR, True, buffers.product(module.in_proj, "normed", "wide")
        yield native.PRODUCT, True, buffers.pairs("wide", "wide", size, 0, 2 * size)
        yield native.CONVOLVE, True, self._convolution(module.conv, site, 0, silu=False)
        yield native.PRODUCT, True, buffers.pairs("convolved", "wide", size, 0, size)
        yield native.LINEAR, True, buffers.product(module.out_proj, "convolved", "hidden", added="hidden", factor=self._factor)

    def _delta_rule(self, module: Any, site: int) -> Operations:
        """Yield the operations of Qwen3.5's layer."""
        native, buffers = self._native, self._buffers
        heads, keys = module.num_v_heads, module.key_dim
        # Steps and strengths are read in whole vectors.
        in_vectors = -(-heads // _WIDTH) * _WIDTH
        for name, size in (("wide", module.conv_dim), ("convolved", module.conv_dim), ("gates", module.value_dim)):
            buffers.make(name, size)
        for name in ("steps", "strengths"):
            buffers.make(name, in_vectors)
        buffers.make("scanned", module.value_dim)
        yield native.LINEAR, True, buffers.product(module.in_proj_qkv, "normed", "wide")
        for layer, target in ((module.in_proj_z, "gates"), (module.in_proj_a, "steps"), (module.in_proj_b, "strengths")):
            yield native.LINEAR, False, buffers.product(getattr(layer, "linear", layer), "normed", target)
        yield native.CONVOLVE, True, self._convolution(module.conv1d, site, 0, silu=True)
        constant = self._states.constant
        bias = constant(site + 1, "bias", module.dt_bias)
        rates = constant(site + 1, "rates", -module.A_log.detach().float().exp())
        yield native.DECAYS, False, self._decays(heads, "steps", 0, "strengths", bias, rates)
        rule = buffers.keep(self._rule(
            site + 1, query=buffers.at("convolved"), key=buffers.at("convolved", keys),
            value=buffers.at("convolved", 2 * keys), delta=1, normalise=1, scale=module.head_k_dim**-0.5,
        ))  # fmt: skip
        yield native.DELTA_RULE, True, rule
        yield native.KEEP, True, rule
        yield native.GATED_NORM, False, buffers.keep(native.GatedNorm(
            buffers.at("scanned"), buffers.at("gates"), buffers.stride("gates"), buffers.address_of(module.norm.weight),
            buffers.at("scanned"), heads, module.head_v_dim, 0, module.norm.variance_epsilon,
        ))  # fmt: skip
        yield native.LINEAR, True, buffers.product(module.out_proj, "scanned", "hidden", added="hidden", factor=self._factor)

    def _space_rule(self, module: Any, site: int) -> Operations:
        """Yield the operations of Granite 4's Mamba-2 layer."""
        native, buffers = self._native, self._buffers
        inner, heads, keys = module.intermediate_size, module.num_heads, module.n_groups * module.ssm_state_size
        width = module.in_proj.weight.shape[0]
        buffers.make("wide", -(-width // _WIDTH) * _WIDTH + _WIDTH)  # whole vectors of steps are read
        buffers.make("convolved", module.conv_dim)
        buffers.make("scanned", inner, torch.float32)
        buffers.make("gated by state", inner)
        yield native.LINEAR, True, buffers.product(module.in_proj, "normed", "wide")
        yield native.CONVOLVE, True, self._convolution(module.conv1d, site, inner, silu=True)
        yield native.DECAYS, False, self._decays(heads, "wide", inner + module.conv_dim, "", 0, 0)
        constant, (least, most) = self._states.constant, module.time_step_limit
        rule = buffers.keep(self._rule(
            site + 1, query=buffers.at("convolved", inner + keys), key=buffers.at("convolved", inner),
            value=buffers.at("convolved"), delta=0, normalise=0, scale=1.0, bias=constant(site + 1, "bias", module.dt_bias),
            rates=constant(site + 1, "rates", -torch.exp(module.A_log.detach().float())),
            skip=constant(site + 1, "skip", module.D), least=least, most=most,
        ))  # fmt: skip
        yield native.SPACE_RULE, True, rule
        yield native.KEEP, True, rule
        groups = module.n_groups
        yield native.GATED_NORM, False, buffers.keep(native.GatedNorm(
            buffers.at("scanned"), buffers.at("wide"), buffers.stride("wide"), buffers.address_of(module.norm.weight),
            buffers.at("gated by state"), groups, inner // groups, 1, module.norm.variance_epsilon,
        ))  # fmt: skip
        last = buffers.product(module.out_proj, "gated by state", "hidden", added="hidden", factor=self._factor)
        yield native.LINEAR, True, last

    def _convolution(self, convolution: Any, site: int, first: int, silu: bool) -> int:
        from outrider.engine.cpu.convolution_kernel import NativeConvolution

        states, cache, buffers = self._states, self._states.cache, self._buffers
        weight, place = convolution.weight.squeeze(1), states.places[site]
        return buffers.keep(NativeConvolution(
            buffers.at("wide", first), buffers.stride("wide"), states.constant(site, "weight", weight.t()),
            states.constant(site, "bias", convolution.bias), buffers.at("convolved"), weight.shape[0], weight.shape[1] - 1, silu,
            cache.address(place), cache.place_bytes, cache.kept_address(place), cache.kept_rows, 0, 0, 0,
        ))  # fmt: skip

    def _decays(self, heads: int, steps: str, first: int, strengths: str, bias: int, rates: int) -> int:
        buffers = self._buffers
        for name in ("decay", "rate"):
            buffers.make(name, heads, torch.float32)
        of_strengths = (buffers.at(strengths), buffers.stride(strengths)) if strengths else (0, 0)
        return buffers.keep(self._native.Decays(
            buffers.at(steps, first), buffers.stride(steps), *of_strengths, bias, rates, buffers.at("decay"),
            buffers.at("rate"), heads,
        ))  # fmt: skip

    def _rule(self, site: int, **more: Any) -> Any:
        from outrider.engine.cpu.recurrence_kernel import NativeRule

        states, cache, buffers = self._states, self._states.cache, self._buffers
        shape, place, row = states.shapes[site], states.places[site], buffers.stride("convolved")
        return NativeRule(
            query_row=row, key_row=row, value_row=row, decay=buffers.at("decay"), rate=buffers.at("rate"),
            output=buffers.at("scanned"), states=cache.address(place), place_bytes=cache.place_bytes,
            kept=cache.kept_address(place), kept_rows=cache.kept_rows, row_bytes=cache.sites[place].row_bytes, heads=shape.heads,
            group=shape.heads // shape.key_heads, key_dim=shape.key_dim, value_dim=shape.value_dim, **more,
        )  # fmt: skip
