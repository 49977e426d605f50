"""Models some of whose layers keep a state: which are served, where, and why others are not."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from decoding.jit import NATIVE
from engine.errors import ModelLoadError

# By the name of their class, what their layers with a state compute: see ``engine.forward.cpu.states``.
SERVED = {
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), "short convolutions"),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "OlmoHybridForCausalLM"), "the gated delta rule"
    ),
    **dict.fromkeys(
        (
            "GraniteMoeHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM", "Zamba2ForCausalLM",
        ),
        "Mamba-2",
    ),
}  # fmt: skip

_MAMBA_1 = "the selective scan of Mamba-1"
_KIMI = "Kimi's delta rule, with a decay for each channel"
_REFUSED = {  # by the type of their configuration
    "mamba": _MAMBA_1, "falcon_mamba": _MAMBA_1, "jamba": _MAMBA_1, "zamba": _MAMBA_1,
    "mamba2": "Mamba-2 alone, without a layer that attends",
    "minimax": "lightning attention, which transformers computes inside the layer",
    "recurrent_gemma": "a gated linear recurrence, which transformers computes inside the layer",
    "zaya": "convolutions inside its attention",
    "kimi_linear": _KIMI, "glm5_next": _KIMI,
    "bailing_hybrid": "linear attention with its own rule",
    "rwkv": "RWKV's recurrence", "xlstm": "xLSTM's recurrence",
}  # fmt: skip


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether a model is one of those that are served and whose layers keep states."""
    return _name(config) in SERVED


def refuse_state(config: PreTrainedConfig) -> None:
    """Raises ``ModelLoadError`` for a model whose layers keep a state by a rule that is not computed here."""
    rule = _REFUSED.get(config.model_type)
    if rule is not None:
        raise ModelLoadError(
            f"{_name(config)} cannot be served: its layers keep a state by {rule}. "
            f"Layers with a state are served with {', '.join(sorted(set(SERVED.values())))}"
        )


def refuse_place(config: PreTrainedConfig, device: str, dtype: str) -> None:
    """Raises ``ModelLoadError`` for a model with states where these cannot be computed.

    Args:
        config: of any model.
        device: where it would be, such as ``cuda``.
        dtype: as in ``ModelOptions``.
    """
    if not is_hybrid(config):
        return
    name = f"{_name(config)} cannot be served"
    if device != "cpu":
        raise ModelLoadError(f"{name} on {device}: its layers keep states, which are computed on CPUs only: set model.device=cpu")
    if dtype == "float64":
        raise ModelLoadError(f"{name} in float64: its layers keep states of float32: set model.dtype to bfloat16 or float32")
    if not NATIVE:
        raise ModelLoadError(f"{name} without numba, which compiles the rules of its layers: pip install numba")


def refuse_role(config: PreTrainedConfig, field: str, advice: str) -> None:
    """Raises ``ModelLoadError`` for a model with states where only others can be used.

    Args:
        config: of any model.
        field: of the configuration, and what it says.
        advice: what to set instead.
    """
    if is_hybrid(config):
        raise ModelLoadError(f"{field} is not for {_name(config)}, whose layers keep states: {advice}")


def _name(config: PreTrainedConfig) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__) if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else ""
