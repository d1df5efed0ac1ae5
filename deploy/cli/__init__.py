"""The command line. Each command is a file; heavy libraries load only in the command that needs them.

Exit codes: 0 done, 1 failed with a named cause, 2 wrong usage or configuration, 130 interrupted.
"""

import sys

import typer

from headrace import __version__
from headrace.deploy.cli.approvals import approvals
from headrace.deploy.cli.audit import audit
from headrace.deploy.cli.compare import compare
from headrace.deploy.cli.doctor import doctor
from headrace.deploy.cli.env import env
from headrace.deploy.cli.evaluate import evaluate
from headrace.deploy.cli.export import export
from headrace.deploy.cli.inspect_run import inspect
from headrace.deploy.cli.pool import pool
from headrace.deploy.cli.redteam import redteam
from headrace.deploy.cli.replay import replay
from headrace.deploy.cli.replay_step import replay_step
from headrace.deploy.cli.sensitivity import sensitivity
from headrace.deploy.cli.serving import serve_run
from headrace.deploy.cli.sft import sft
from headrace.deploy.cli.status import status
from headrace.deploy.cli.study import study
from headrace.deploy.cli.suite import suite
from headrace.deploy.cli.train import train
from headrace.platform.errors import ConfigError, HeadraceError, NotFound

_INTERRUPTED = 130

app = typer.Typer(
    name="headrace",
    help="Train language-model agents by reinforcement learning while their episodes are still running.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, status, sft, export, inspect, replay, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.command("serve")(serve_run)
app.command("replay-step")(replay_step)
app.command()(sensitivity)
app.command()(compare)
app.command()(approvals)
app.add_typer(audit, name="audit")
app.add_typer(redteam, name="redteam")
app.add_typer(env, name="env")
app.add_typer(suite, name="suite")
app.add_typer(study, name="study")
app.add_typer(pool, name="pool")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; a named cause on standard error and an exit code instead of a traceback."""
    try:
        app()
    except SystemExit as ending:
        if ending.code == _INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except (ConfigError, NotFound) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except HeadraceError as error:
        typer.echo(f"failed: {error}", err=True)
        sys.exit(1)
