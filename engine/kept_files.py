"""Files that several processes keep and read, each of them whole at any moment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def keep_file(path: Path, content: bytes | memoryview) -> None:
    """Puts a file in place whole: other processes see the old one or the new one.

    Args:
        path: of the file; its folder is made when it does not exist.
        content: of the file.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
