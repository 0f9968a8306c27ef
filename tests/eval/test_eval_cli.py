from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eval import caches, cli, plots, tasks
from eval.caches import CacheEntry, CacheUnavailable, tensor_bytes
from eval.cli import app, main
from eval.core import models, progress, statistics
from eval.data import source, text
from eval.run.rows import DEFAULT_CACHE
from eval.tasks.texts import TextTask

ALL_CHEAP = "--tasks summarization,perplexity --caches dynamic,paged"
TIMES = ("prefill_ms", "decode_ms", "tokens_per_s", "peak_bytes", "rise_bytes", "kv_details")


@pytest.fixture(autouse=True)
def _small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = text.shipped()[:4000]  # a byte is a token to the tiny tokenizer
    monkeypatch.setattr(text, "shipped", lambda: shipped)
    monkeypatch.setattr(statistics, "RESAMPLES", 30)


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda run, folder: None)


def _invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [part for given in arguments for part in str(given).split()])


def _small(model: Path, folder: Path, more: str = ALL_CHEAP) -> str:
    short = "--limit 3 --batch-size 2 --max-new-tokens 3 --contexts 64 --device cpu"
    return f"--model {model} --output {folder} {short} {more}"


def _rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {(row["task"], row["cache"]): row for row in results["results"][0]["rows"]}


def _untimed(folder: Path) -> list[dict[str, Any]]:
    return [{key: v for key, v in row.items() if key not in TIMES} for row in _rows(folder).values()]


def _refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--caches dynamic,fast", "unknown cache 'fast'; choose from: all, dynamic, hqq-int4"),
        ("--tasks poetry", "unknown task 'poetry'; choose from: all, fidelity, latency, perplexity"),
        ("--dtype int3", "unknown dtype 'int3'; choose from: bfloat16, float16, float32"),
        ("--limit 0", "limit must be an integer of at least 1, got 0"),
        ("--contexts 64,many", "contexts must be an integer of at least 1, got 'many'"),
        ("--device abacus", "device 'abacus' cannot be used here"),
        ("--config /does/not/exist.yaml", "cannot read the config file"),
        ("--model /does/not/exist --limit 1", "cannot load the model '/does/not/exist'"),
        ("--split train", "split says how to read a dataset, and no dataset is given"),
        ("--dataset xsum", "a dataset is for one task, and the chosen tasks that take one are: "),
        ("--output /dev/null/run", "cannot make the output folder /dev/null/run"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(
    arguments: str, message: str, tmp_path: Path
) -> None:
    _refused(_invoke(f"--output {tmp_path} {arguments}"), message)


def test_the_entry_point_leaves_with_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval", "--caches", "fast"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown cache 'fast'; choose from: ")


def test_an_unknown_option_is_exit_code_2() -> None:
    assert _invoke("--colour red").exit_code == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--tasks retrieval --contexts 8192",
            "the catalogues of the task 'retrieval' need 8192 tokens; the ",
        ),
        ("--tasks retrieval --contexts 64", "a catalogue of 64 tokens holds 0 entries"),
        (
            "--tasks summarization --dataset {data} --input-column text --reference-column short",
            "unknown column 'short' in mine.jsonl; choose from: name, text",
        ),
        (
            "--tasks summarization --dataset {data}",
            "the dataset '{data}' needs --input-column; choose from: ",
        ),
        ("--tasks summarization --dataset no.csv --input-column a", "the data file no.csv is missing"),
        ("--tasks summarization --max-new-tokens 4096", "the longest prompt and its answer need "),
    ],
)
def test_data_that_do_not_fit_are_one_line_and_leave_no_run_behind(
    more: str, message: str, saved_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"name": "a", "text": "b"}\n', encoding="utf-8")
    folder = tmp_path / "run"
    _refused(_invoke(_small(saved_model, folder, more.format(data=data))), message.format(data=data))
    assert list(folder.iterdir()) == []


def test_every_command_has_a_help_and_none_imports_torch_for_it() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from eval.cli import app\n"
        f"for command in {[*cli.COMMANDS]}:\n"
        "    done = CliRunner().invoke(app, [command, '--help'])\n"
        "    assert done.exit_code == 0, done.output\n"
        "    assert 'torch' not in sys.modules, command"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


def test_an_old_spelling_says_the_new_one_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.quality", "--only", "int5"])
    with pytest.raises(SystemExit) as left:
        main("quality")
    assert left.value.code == 2
    said, error, *more = capsys.readouterr().err.splitlines()
    assert said == "DeprecationWarning: this is `python -m eval quality` now"
    assert error.startswith("error: unknown scheme 'int5'")
    assert more == []


def test_where_there_is_no_terminal_a_line_says_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    with progress.Progress(console, "loading") as shown:
        shown.update("first", 2, total=7)
        time.sleep(0.2)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].split() == ["0", "s", "loading"]
    assert lines[-1].split() == ["0", "s", "2/7", "first"]


@pytest.mark.usefixtures("_no_pictures")
def test_a_chat_template_is_needed_by_tasks_that_chat_and_by_no_others(
    saved_model: Path, tmp_path: Path
) -> None:
    for file in saved_model.glob("chat_template*"):
        file.unlink()
    _refused(
        _invoke(_small(saved_model, tmp_path / "run")),
        f"the model '{saved_model}' has no chat template, which summarization needs; choose a model tuned to "
        "follow instructions, or --tasks from: retrieval, perplexity, fidelity, latency",
    )
    result = _invoke(_small(saved_model, tmp_path / "run", "--tasks perplexity --caches dynamic"))
    assert result.exit_code == 0, result.output


def test_weights_that_are_cut_off_are_one_line(saved_model: Path, tmp_path: Path) -> None:
    weights = saved_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    _refused(_invoke(_small(saved_model, tmp_path / "run")), f"cannot load the model '{saved_model}'")


def test_weights_of_another_shape_are_one_line(saved_model: Path, tmp_path: Path) -> None:
    tensors = load_file(saved_model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    save_file(tensors, saved_model / "model.safetensors", {"format": "pt"})
    _refused(_invoke(_small(saved_model, tmp_path / "run")), f"cannot load the model '{saved_model}'")


def test_a_model_too_large_for_the_device_is_one_line(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import PreTrainedModel

    def full(self: Any, *to: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    _refused(_invoke(_small(saved_model, tmp_path / "run")), f"the model '{saved_model}' has no room on cpu")


def test_a_whole_run_prints_the_table_and_writes_its_folder(saved_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = _invoke(_small(saved_model, folder))
    assert result.exit_code == 0, result.output
    rows = _rows(folder)
    assert list(rows) == [
        (task, cache) for task in ("summarization", "perplexity") for cache in ("dynamic", "paged")
    ]
    for row in rows.values():
        assert row["problem"] is None
        assert row["kv_bytes"] > 0
    assert rows["summarization", "paged"]["identical_percent"] == 100.0
    assert result.stdout.count("Caches compared") == 1
    assert {path.name for path in folder.iterdir()} >= {
        *("config.yaml", "results.json", "predictions.jsonl", "report.md", "report.html", "journal.0.jsonl")
    }


def _with_cache(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    def create(model: Any, demand: Any) -> Any:
        raise error

    monkeypatch.setitem(caches.CACHES, name, CacheEntry(name, name, create, tensor_bytes))


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize(
    ("error", "code"), [(CacheUnavailable("needs a GPU"), 0), (RuntimeError("it [broke]"), 1)]
)
def test_a_cache_that_is_missing_is_no_failure_and_one_that_breaks_is(
    error: Exception, code: int, saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_cache(monkeypatch, "odd", error)
    result = _invoke(_small(saved_model, tmp_path / "run", "--tasks perplexity --caches dynamic,odd"))
    assert result.exit_code == code, result.output
    assert str(error) in result.stdout
    assert _rows(tmp_path / "run")["perplexity", "dynamic"]["problem"] is None


@pytest.mark.usefixtures("_no_pictures")
def test_an_interrupted_run_is_exit_code_130_and_goes_on_by_resume(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    ran: list[str] = []
    run = TextTask.run

    def stopped(self: Any, loaded: Any, unit: Any, entry: Any, reference: Any) -> Any:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(entry.name)
        return run(self, loaded, unit, entry, reference)

    monkeypatch.setattr(TextTask, "run", stopped)
    result = _invoke(_small(saved_model, folder))
    assert result.exit_code == 130
    assert f"go on with --resume {folder}" in result.stdout
    assert not (folder / "results.json").exists()

    ran[:] = ["a", "b", "c", "d"]
    _refused(
        _invoke(_small(saved_model, folder).replace("--limit 3", "--limit 4")),
        f"{folder} holds a run with other settings (limit was 3 and is 4): go on with it by --resume",
    )
    resumed = _invoke(f"--resume {folder}")
    assert resumed.exit_code == 0, resumed.output
    assert len(ran) == 4 + 1  # of two batches with two caches three were finished
    whole = tmp_path / "whole"
    assert _invoke(_small(saved_model, whole)).exit_code == 0
    assert _untimed(folder) == _untimed(whole)
    predictions = [(path / "predictions.jsonl").read_text(encoding="utf-8") for path in (folder, whole)]
    assert predictions[0] == predictions[1]


def test_resume_needs_the_folder_of_a_run_and_nothing_else(tmp_path: Path) -> None:
    _refused(_invoke(f"--resume {tmp_path}"), f"there is no run in {tmp_path}: it has no config.yaml; give")
    _refused(_invoke(f"--resume {tmp_path / 'no'}"), "there is no run in ")
    _refused(
        _invoke(f"--resume {tmp_path} --limit 3 --config x.yaml"),
        "--resume goes on with the settings of its folder; leave away: limit, config",
    )


def test_names_in_registries_are_those_of_their_entries() -> None:
    assert all(name == entry.name for name, entry in caches.CACHES.items())
    assert all(name == task.name for name, task in tasks.TASKS.items())
    assert DEFAULT_CACHE in caches.CACHES
    assert set(models.MODELS) == {"smollm2"}
    assert set(source.PRESETS) == {"cnn_dailymail", "xsum", "wmt16"}


def _launch(arguments: str) -> subprocess.CompletedProcess[str]:
    # With --cpu this launcher starts one process, unless there is MPI; what it calls multi-GPU are processes.
    launcher = (
        "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    )
    command = [sys.executable, "-m", *f"{launcher} --dynamo_backend no -m eval {arguments}".split()]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=root, timeout=300, check=False
    )


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(saved_model: Path, tmp_path: Path) -> None:
    more = (
        "--tasks summarization,retrieval,perplexity,latency --caches dynamic,paged,paged-int8 --contexts 2600"
    )
    two = _launch(_small(saved_model, tmp_path / "two", more))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Caches compared") == 1
    assert two.stdout.count("on cpu, float32") == 1
    assert (tmp_path / "two" / "journal.1.jsonl").is_file()
    assert _invoke(_small(saved_model, tmp_path / "one", more)).exit_code == 0
    timed = ("contexts",)
    one, both = (
        [{k: v for k, v in row.items() if k not in timed} for row in _untimed(tmp_path / name)]
        for name in ("one", "two")
    )
    assert both == one
    assert json.loads((tmp_path / "two" / "results.json").read_text(encoding="utf-8"))["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--caches fast", "error: unknown cache 'fast'; choose from: "),
        ("--tasks retrieval --contexts 64", "error: a catalogue of 64 tokens holds 0 entries"),
    ],
)
def test_two_processes_say_an_error_once(more: str, message: str, saved_model: Path, tmp_path: Path) -> None:
    result = _launch(_small(saved_model, tmp_path / "run", more))
    assert result.returncode != 0
    assert result.stderr.count(message) == 1
    assert "Caches compared" not in result.stdout


@pytest.mark.slow
def test_the_bundled_model_runs_with_the_default_cache(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = tmp_path / "run"
    result = _invoke(
        "--limit 2 --batch-size 2 --max-new-tokens 8 --tasks translation --caches dynamic,paged",
        f"--output {folder}",
    )
    assert result.exit_code == 0, result.output
    rows = _rows(folder)
    # 30 layers, 3 kv heads, head_dim 64, float32.
    assert rows["translation", "dynamic"]["kv_bytes"] % (2 * 30 * 3 * 64 * 4 * 2) == 0
    assert rows["translation", "paged"]["identical_percent"] == 100.0
