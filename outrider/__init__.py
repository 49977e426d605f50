"""Lossless speculative serving of Hugging Face causal language models.

The sub-packages are links to the folders of the repository's root. A wheel has folders in their place.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.actors.llm import LLM
    from outrider.decoding.request import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from outrider.actors.llm import LLM  # imported on use, because it loads torch

        return LLM
    if name == "SamplingParams":
        from outrider.decoding.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
