"""The command ``outrider``. Heavy imports stay inside the commands, so that help and mistakes are answered at once."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.audit import audit
from cluster.cli.bench import PASS_ON, bench, simulate
from cluster.cli.cache import cache
from cluster.cli.chat import chat
from cluster.cli.doctor import doctor
from cluster.cli.generate.command import generate
from cluster.cli.launch.serve_config import serve_config
from cluster.cli.replay import replay
from cluster.cli.terminal import fail, fail_input

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
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top of the file, such as server.port=8001.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A yaml file; the demo model on a CPU when absent.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the model, .gguf file, or name; short for model.path=.")] = None,
) -> None:
    """Serve a model behind OpenAI's HTTP API until Ctrl-C."""
    from configs.schema import REPOSITORY, ConfigError, load_config

    settings = [*(overrides or []), *([f"model.path={model}"] if model else [])]
    try:
        loaded = load_config(config or REPOSITORY / "configs" / "local.yaml", settings)
    except ConfigError as error:
        fail_input(str(error))
    from cluster.cli.launch.preflight import LaunchError, check

    try:
        check(loaded)
        typer.echo("outrider: starting", err=True)
        from cluster.cli.launch.serve import serve_until_stopped  # imports Ray, which takes a moment

        serve_until_stopped(loaded)
    except LaunchError as error:
        fail(str(error))


@app.command()
def new_key() -> None:
    """Make a random API key. The configuration holds its hash only, so this is the one time that it is shown."""
    from cache_service.namespace import hash_key

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
        fail("outrider runs from a folder in which it was not installed; make install")


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
