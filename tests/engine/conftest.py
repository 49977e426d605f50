"""What the tests of this room share: a model on disk, an engine over it, and torch's number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.engine.engine import Engine
from tests.helpers.models import llama_config, save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama in float32 with its tokenizer, which nobody changes."""
    return str(save_model(tmp_path_factory.mktemp("models") / "target", llama_config()))


@pytest.fixture
def threads() -> Iterator[None]:
    """Tests may change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine(folder: str) -> Engine:
    """With every strategy, ``auto`` where a request asks for none; tests leave no request in it."""
    others = tuple(name for name in STRATEGIES if name != "auto")
    model = ModelOptions(folder, dtype="float32", threads=1)
    return Engine.load(model, EngineOptions(max_running=40), SpeculationOptions("auto", max_draft_tokens=16, strategies=others))
