"""``outrider serve-config``: a configuration in the format of Ray Serve's tools and KubeRay."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cluster.cli.terminal import fail_input

IMPORT_PATH = "outrider.cluster.app:build_app"


def serve_config(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file, such as server.replicas=2."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file. Default: built-in defaults.")] = None,
) -> None:
    """Print the configuration for a running cluster: input of `serve deploy` and of serveConfigV2 in a RayService."""
    from outrider.configs.schema import ConfigError

    try:
        text = serve_config_text(config, overrides or ())
    except ConfigError as error:
        fail_input(str(error))
    typer.echo(text, nl=False)


def serve_config_text(config: Path | None, overrides: Sequence[str]) -> str:
    """Return the YAML document. Raises ``ConfigError`` for a value that is not allowed or has no meaning in a cluster."""
    # The arguments are the file's values and the overrides without defaults, so that paths refer to the cluster's machines.
    import yaml

    from outrider.cluster.cli.launch.preflight import check_address
    from outrider.configs.schema import ConfigError, load_config, read_settings
    from outrider.configs.server_checks import http_options

    loaded = load_config(config, overrides)
    check_address(loaded)
    if loaded.server.ray_address is not None:
        raise ConfigError("server.ray_address is only for outrider serve: leave it out")
    arguments = read_settings(config, overrides)
    http = http_options(loaded.server)
    # The application also reads them, to decide if keys are required and where the operator's routes are.
    arguments["server"] = http | arguments.get("server", {})
    document: dict[str, Any] = {
        "proxy_location": "EveryNode",
        "http_options": http,
        "applications": [{"name": "outrider", "import_path": IMPORT_PATH, "route_prefix": "/", "args": arguments}],
    }
    words = ["outrider", "serve-config", *(["--config", os.fspath(config)] if config else []), *overrides]
    return f"# {shlex.join(words)}\n{yaml.safe_dump(document, sort_keys=False, width=120)}"
