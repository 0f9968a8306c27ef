"""The files of a run folder: `write` makes them, `read` is its inverse."""

import dataclasses
import json
from pathlib import Path

import yaml

from eval import plots
from eval.core import results
from eval.core.errors import UsageError
from eval.report.render import html, markdown
from eval.run.rows import Run

RESULTS_FILE = "results.json"
PREDICTIONS_FILE = "predictions.jsonl"


def write(run: Run, folder: Path) -> None:
    """Write all that a run leaves behind into `folder`, making it.

    `config.yaml` (what `--config` takes), `results.json` (see `read`), `predictions.jsonl` (an answer in
    each line), the pictures, `report.md`, which needs them beside it, and `report.html`, which holds them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(run, folder)
    report = markdown(run, pictures)
    answers = (results.to_json(dataclasses.asdict(prediction)) for prediction in run.predictions)
    files = {
        "config.yaml": yaml.safe_dump(run.settings, sort_keys=False, allow_unicode=True),
        RESULTS_FILE: results_json(run),
        PREDICTIONS_FILE: "".join(f"{answer}\n" for answer in answers),
        "report.md": report,
        "report.html": html(report, folder),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def results_json(run: Run) -> str:
    """Return the text of `results.json`: the fields of `Run`, but for the answers."""
    fields = dataclasses.asdict(dataclasses.replace(run, predictions=[]))
    del fields["predictions"]
    environment, settings, rows = (fields.pop(name) for name in ("environment", "settings", "rows"))
    content = results.document(environment, settings, [{"bench": "caches", "rows": rows}], **fields)
    return results.to_json(content, indent=1) + "\n"


def read(path: Path) -> Run:
    """Return the run that `write` wrote into a folder, or that a file like its `results.json` holds.

    The answers come from `predictions.jsonl` beside it; where there is no such file, the run has none. What
    cannot be read, or is no result of this version, is a `UsageError`.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    answers = file.with_name(PREDICTIONS_FILE)
    try:
        fields = dict(json.loads(file.read_text(encoding="utf-8")))
        (table,) = fields.pop("results", [{}])
        # Not splitlines(): an answer may hold other ends of a line than this one, and JSON leaves them be.
        lines = answers.read_text(encoding="utf-8").split("\n") if answers.is_file() else []
        predictions = [json.loads(line) for line in lines if line]
        rows = {"rows": table["rows"]} if "rows" in table else {}
        run: Run = results.build(Run, {**fields, **rows, "predictions": predictions})
    except OSError as error:
        raise UsageError(f"cannot read the results {file}: {error.strerror}") from error
    # Text that is no JSON is a ValueError; a field too few, too many or of another type one of these.
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} holds no results of this version of `python -m eval`: {reason}") from error
    return run
