"""Support for hybrid models, some of whose layers keep a state: which are served, on which devices, and why others are not."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from outrider.decoding.jit import NATIVE
from outrider.engine.errors import ModelLoadError

# Rule of the layers with a state, by the model's class: see ``engine.cpu``.
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
_REFUSED = {  # by ``model_type`` of the configuration
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
    """Return whether a model is a supported hybrid."""
    return _name(config) in SERVED


def refuse_state(config: PreTrainedConfig) -> None:
    """Raise ``ModelLoadError`` for a model whose layers keep a state by an unsupported rule."""
    rule = _REFUSED.get(config.model_type)
    if rule is not None:
        raise ModelLoadError(
            f"{_name(config)} cannot be served: its layers keep a state by {rule}. "
            f"Layers with a state are served with {', '.join(sorted(set(SERVED.values())))}"
        )


def refuse_place(config: PreTrainedConfig, device: str, dtype: str) -> None:
    """Raise ``ModelLoadError`` for a hybrid that cannot run on a device type (such as ``cuda``) or with a ``model.dtype``."""
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
    """Raise ``ModelLoadError`` for a hybrid that an option (``field``) does not support; ``advice`` says what to do."""
    if is_hybrid(config):
        raise ModelLoadError(f"{field} does not support {_name(config)}, whose layers keep states: {advice}")


def _name(config: PreTrainedConfig) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__) if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else ""
