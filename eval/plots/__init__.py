"""Pictures of a run, one for each question, where matplotlib is installed (extra `plots`)."""

from pathlib import Path

from eval.plots.looks import Picture, looks_of
from eval.run.rows import Run

__all__ = ["Picture", "draw"]


def draw(run: Run, folder: Path) -> list[Picture] | None:
    """Write the pictures of a run into its folder, which exists; None where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from eval.plots import bars, frontier, heat, lines

    looks = looks_of(run.rows)
    about = [Path(run.source).name, run.settings.get("dtype"), run.environment.get("device")]
    written: list[Picture] = []
    for question in (frontier, heat, lines.MEMORY, lines.TIME, bars.MEMORY, bars.TIME):
        figure = question.figure(run.rows, looks)
        if figure is not None:
            title = f"{question.PICTURE.title}\n{', '.join(str(word) for word in about if word)}"
            figure.suptitle(title, fontsize="medium", parse_math=False)
            figure.savefig(folder / question.PICTURE.file_name, format="png")
            written.append(question.PICTURE)
    return written
