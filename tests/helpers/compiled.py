"""Cache folders of tests' own that have the code which is compiled already."""

from __future__ import annotations

import contextlib
from pathlib import Path

from decoding.jit import cache_folder


def cache_with_compiled(base: Path) -> str:
    """Links this process's compiled code into the cache folder below another ``XDG_CACHE_HOME``, which is returned."""
    folder = base / "outrider"
    folder.mkdir(parents=True, exist_ok=True)
    for compiled in cache_folder().glob("native-*"):
        with contextlib.suppress(FileExistsError):
            (folder / compiled.name).symlink_to(compiled.resolve())
    return str(base)
