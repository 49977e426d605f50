"""The command ``outrider``. Heavy imports stay inside the commands, so that help and usage errors are fast."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cluster.cli.audit import audit
from outrider.cluster.cli.bench import PASS_ON, bench, simulate
from outrider.cluster.cli.cache import cache
from outrider.cluster.cli.chat import chat
from outrider.cluster.cli.doctor import doctor
from outrider.cluster.cli.generate.command import generate
from outrider.cluster.cli.launch.serve_config import serve_config
from outrider.cluster.cli.replay import replay
from outrider.cluster.cli.terminal import fail, fail_input

app = typer.Typer(
    help="Serve Hugging Face causal LMs with draft-free speculative decoding: faster, and not one output token changed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve_config)
app.command()(generate)
app.command()(chat)
app.command()(replay)
app.command()(audit)
app.command(context_settings=PASS_ON, add_help_option=False)(simulate)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")
app.command()(doctor)


@app.command()
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [KEY=VALUE]...",
            help="Model folder, .gguf file or hub name, and settings that override the file, such as server.port=8001.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file. Default: configs/local.yaml.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, same as the MODEL argument.")] = None,
    emulate: Annotated[str | None, typer.Option(help="GPU to emulate by waiting: A100-80, H100, L40S or L4. Needs --as.")] = None,
    as_model: Annotated[str | None, typer.Option("--as", help="Model whose steps are timed, such as llama-3.1-8b.")] = None,
    time_dilation: Annotated[
        float | None, typer.Option(help="Factor of the emulated times, 1 to 16, for more GPUs than processor cores.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines on stderr.")] = False,
) -> None:
    """Serve a model behind OpenAI's HTTP API until Ctrl-C.

    Without a model and --config, the model of configs/local.yaml is served, or the tiny demo model if that cannot be fetched.
    """
    from difflib import get_close_matches

    from outrider.configs.schema import REPOSITORY, ConfigError, keys, load_config

    given = arguments or []
    named = [*(each for each in given if "=" not in each), *([model] if model else [])]
    if len(named) > 1:
        fail_input(f"only one model can be served, got {' and '.join(named)}; settings are KEY=VALUE")
    for word in named:
        if close := get_close_matches(word, keys(), n=1, cutoff=0.8):
            fail_input(f"{word} is not a model; did you mean the setting {close[0]}=VALUE?")
    settings = [*(each for each in given if "=" in each), *(f"model.path={each}" for each in named)]
    emulated = {"device": emulate, "model": as_model, "time_dilation": time_dilation}
    settings += [f"emulation.{key}={value}" for key, value in emulated.items() if value is not None]
    if emulate is not None and not any(setting.startswith("model.device=") for setting in settings):
        settings.append("model.device=cpu")
    try:
        loaded = load_config(config or REPOSITORY / "configs" / "local.yaml", settings)
    except ConfigError as error:
        fail_input(str(error))
    if not as_json:
        typer.echo("outrider: starting", err=True)
    from outrider.cluster.cli.launch.preflight import LaunchError, check, with_threads

    try:
        check(loaded)
        from outrider.cluster.cli.launch.serve import serve_until_stopped  # imports Ray, which is slow

        # A model that the user chose is never replaced by another one.
        own_choice = config is not None or any(setting.startswith("model.path=") for setting in settings)
        serve_until_stopped(with_threads(loaded), None if own_choice else "demo_model", as_json)
    except LaunchError as error:
        fail(str(error))


@app.command()
def new_key() -> None:
    """Make a random API key and print it with its hash. Only the hash goes into the configuration; the key is not shown again."""
    from outrider.cache_service.namespace import hash_key

    key = f"outrider-{secrets.token_urlsafe(32)}"
    typer.echo(f"{key}\n\nits hash, for the configuration:\n")
    typer.echo(f'  tenancy.tenants.NAME.keys: ["{hash_key(key)}"]  # a tenant, or')
    typer.echo(f'  tenancy.admin_keys: ["{hash_key(key)}"]  # the operator')


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        typer.echo(f"outrider {installed('outrider')}")
    except PackageNotFoundError:
        fail("outrider is not installed; run make install")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(130)


if __name__ == "__main__":
    main()
