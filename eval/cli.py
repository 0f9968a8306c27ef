"""The command line of `python -m eval`: one command each for what is measured; `run` where none is named."""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "run": "eval.run.cli",
    "bench": "eval.bench.cli",
    "quality": "eval.quality.cli",
    "zoo": "eval.zoo.cli",
    "gpu": "eval.gpu.cli",
    "readme": "eval.readme.cli",
}
"""Name of a command -> module with its `app`, imported when it is asked for; none imports torch for that."""
DEFAULT = "run"


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_named = bool(args) and args[0] in (*COMMANDS, *ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else [DEFAULT, *args])


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def evaluate() -> None:
    """Compare caches: on texts (run), by speed (bench, gpu), formats (quality), on all model types (zoo).

    Without a command it is `run`. The exit code is 0, 1 (something is wrong), 2 (a request cannot be met) or
    130 (interrupted).
    """


def main(command: str | None = None) -> None:
    """Run the command line; `command` is what an old spelling stood for, and leads to a line that says so."""
    if command is not None:
        typer.echo(f"DeprecationWarning: this is `python -m eval {command}` now", err=True)
        sys.argv.insert(1, command)
    sys.exit(app(prog_name="python -m eval"))
