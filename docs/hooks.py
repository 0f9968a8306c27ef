"""Pages that mkdocs makes of other things: the notebooks, and what commands say of themselves with `--help`.

`<!-- command: MODULE as NAME -->` in a page becomes what the `--help` of that module says,
and `<!-- readme: NAME -->` the table of that name in the README, which is made from results.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"<!-- command: (?P<module>\S+) as (?P<name>.+) -->")
TABLE = re.compile(r"<!-- readme: (?P<name>\w+) -->")


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files it found: the notebooks, which lie elsewhere, join them."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        at = f"notebooks/{path.name}"
        files.append(File(at, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs for each page before it is rendered."""
    markdown = TABLE.sub(lambda found: readme_table(found["name"]), markdown)
    return COMMAND.sub(lambda found: command_help(found["module"], found["name"]), markdown)


def readme_table(name: str) -> str:
    """A table of the README with the line below it that says where it was measured.

    Raises:
        ValueError: There is none of that name.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, found, rest = readme.partition(f"<!-- table:{name} -->")
    if not found:
        raise ValueError(f"README.md has no table {name!r}")
    table = rest.partition("<!-- /table -->")[0].strip()
    return re.sub(r"(?<=\d)e-(?=\d)", "e\N{NON-BREAKING HYPHEN}", table)  # or columns part within a number


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
