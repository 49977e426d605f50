"""The part of the configuration that each class gets. Plain dataclasses: the engine runs where pydantic is not installed.

Defaults live here and nowhere else. ``configs/schema.py`` reads yaml into them and checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

_STRICT = {"extra": "forbid"}  # an unknown key is an error (read by pydantic)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it is held."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str = "demo_model"  # folder, or name on the hub
    served_name: str | None = None  # name in the API; the last part of the path when absent
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"  # auto: as the checkpoint says
    device: str = "auto"  # auto: cuda if there is one, else cpu
    max_model_len: int | None = None  # tokens of prompt and output together; the model's own context when absent
    threads: int | None = None  # torch threads on a CPU; all cores when absent


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the step loop shares the device among requests."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    max_running: int = 8  # requests in one step, each with a KV slot
    max_step_tokens: int = 512  # rows of one forward: prefill is cut into chunks that fit
    max_waiting: int = 256  # requests that may wait for a slot; more are refused


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Which drafter, and how much it may draft."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    strategy: str = "llma"
    max_draft_tokens: int = 16  # drafted rows of one request in one step
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the strategy, such as match_length
