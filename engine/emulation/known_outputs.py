"""Known outputs of prompts, which requests follow instead of a model's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request
from outrider.engine.errors import ModelLoadError, one_line

_FIELDS = ("prompt", "output")
UNKNOWN_PROMPT = (
    "this server follows known outputs (emulation.outputs) and has none for this prompt: send the prompt of one of its records, "
    "as it is or as the only message of a chat"
)
CHANGED = "this server follows known outputs (emulation.outputs): {} cannot change them; leave it out"


class KnownOutputs:
    """Outputs by the token ids of their prompt."""

    def __init__(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        self._outputs = {_key(prompt): list(output) for prompt, output in texts}

    @classmethod
    def read(cls, path: str, tokenizer: PreTrainedTokenizerFast | None, end: Sequence[int]) -> KnownOutputs:
        """Read a file of JSON lines with ``prompt`` and ``output``, whose prompts are also known as the only message of a chat.

        Raises:
            ModelLoadError: the file cannot be read, a line has no such texts, or the model has no tokenizer.
        """
        if tokenizer is None:
            raise ModelLoadError("emulation.outputs needs a model with a tokenizer: set model.path to one, or leave it out")
        texts: list[tuple[list[int], list[int]]] = []
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                prompt, output = (record[name] for name in _FIELDS)
                if not isinstance(prompt, str) or not isinstance(output, str):
                    raise TypeError(f"line {number}: prompt and output must be strings")
                known = [*tokenizer(output, add_special_tokens=False).input_ids, *end[:1]]
                texts.append((tokenizer(prompt).input_ids, known))
                if tokenizer.chat_template is not None:
                    messages = [{"role": "user", "content": prompt}]
                    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                    texts.append((tokenizer(text, add_special_tokens=False).input_ids, known))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(
                f"emulation.outputs {path} cannot be used: {one_line(error)}; give JSON lines with prompt and output"
            ) from error
        return cls(texts)

    def of(self, request: Request) -> list[int] | None:
        """Return the output of a request's prompt; None if it is not known."""
        return self._outputs.get(_key(request.prompt_ids))


def _key(prompt: Sequence[int] | Int32Array) -> bytes:
    return np.asarray(prompt, np.int32).tobytes()
