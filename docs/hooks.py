"""Fills pages while mkdocs builds them: `<!-- command: MODULE as NAME -->` becomes what its `--help` says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"<!-- command: (?P<module>\S+) as (?P<name>.+) -->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs for each page before it is rendered."""
    return COMMAND.sub(lambda found: command_help(found["module"], found["name"]), markdown)


def command_help(module: str, name: str) -> str:
    """Options of a command line made with typer, as a section of Markdown.

    Raises:
        CalledProcessError: There is no such module, or it has no command line.
    """
    done = subprocess.run(
        [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return re.sub(r"^#", "##", done.stdout.strip(), flags=re.MULTILINE)
