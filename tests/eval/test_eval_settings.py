from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import find_executable_batch_size

from eval.caches import CACHES
from eval.core.errors import UsageError
from eval.run.settings import Settings, resolve
from eval.tasks import TASKS
from hf_paged_cache import PagedCache
from tests.support.chats import fill, prompt
from tests.support.models import shared_model


def _config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_and_options_the_defaults_hold() -> None:
    assert resolve(None, {"limit": None, "tasks": None}) == Settings()


def test_the_file_overrides_defaults_and_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    config = _config(tmp_path, "limit: 3\nbatch_size: 5\ntasks: [translation]\n")
    settings = resolve(config, {"batch_size": 2, "caches": "dynamic", "seed": None})
    assert settings == Settings(limit=3, batch_size=2, tasks=("translation",), caches=("dynamic",))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("summarization,translation", ("summarization", "translation")),
        (" translation , summarization ,", ("translation", "summarization")),
        (["translation", "translation"], ("translation",)),
    ],
)
def test_names_come_as_a_list_or_with_commas_and_keep_their_order(given: Any, names: tuple[str, ...]) -> None:
    assert resolve(None, {"tasks": given}).tasks == names


@pytest.mark.parametrize("given", ["all", ["all"], "dynamic,all"])
def test_all_is_every_one_in_the_order_of_the_table(given: Any) -> None:
    assert resolve(None, {"caches": given}).caches == tuple(CACHES)
    assert resolve(None, {"tasks": "all"}).tasks == tuple(TASKS)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float16", "float16")],
)
def test_dtypes_have_short_names(given: str, dtype: str) -> None:
    assert resolve(None, {"dtype": given}).dtype == dtype


def test_a_cache_may_be_named_by_the_name_of_vllm_for_its_format() -> None:
    assert resolve(None, {"caches": "paged-fp8_e4m3,paged,paged-fp8"}).caches == ("paged-fp8", "paged")


def test_accelerate_tries_a_smaller_batch_when_the_pool_is_exhausted() -> None:
    model, sizes = shared_model("llama"), []

    @find_executable_batch_size(starting_batch_size=8)
    def run(batch_size: int) -> int:
        sizes.append(batch_size)
        fill(model, PagedCache(model, block_size=16, max_tokens=64), prompt(batch_size, 20))
        return batch_size

    assert (run(), sizes[0]) == (sizes[-1], 8)
    assert sizes[-1] in (2, 3)  # of two blocks each, in a pool of 64 tokens and what three rows round up


@pytest.mark.parametrize("given", ["512, 128,512", [512, 128], (128, "512")])
def test_contexts_come_in_rising_order_and_once(given: Any) -> None:
    assert resolve(None, {"contexts": given}).contexts == (128, 512)


def test_one_context_needs_no_list(tmp_path: Path) -> None:
    assert resolve(_config(tmp_path, "contexts: 512"), {}).contexts == (512,)


def test_a_dataset_goes_with_the_one_task_that_takes_texts() -> None:
    given = {"dataset": "xsum", "split": "validation", "tasks": "latency,summarization,fidelity"}
    assert resolve(None, given).dataset == "xsum"


def test_a_null_where_nothing_is_a_choice_is_the_default(tmp_path: Path) -> None:
    assert (
        resolve(_config(tmp_path, "{contexts: null, dataset: null, max_new_tokens: null}"), {}) == Settings()
    )


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert resolve(_config(tmp_path, "# nothing\n"), {}) == Settings()


def test_a_written_config_resolves_to_the_same_settings(tmp_path: Path) -> None:
    import yaml

    settings = Settings(limit=2, output="somewhere", max_new_tokens=4, contexts=(64, 128))
    assert resolve(_config(tmp_path, yaml.safe_dump(settings.to_dict())), {}) == settings


@pytest.mark.parametrize(
    ("yaml_text", "message"),
    [
        ("limits: 3", "unknown setting 'limits'; choose from: batch_size, caches, "),
        ("tasks: [poetry]", "unknown task 'poetry'; choose from: all, fidelity, latency, perplexity, "),
        ("caches: dynamic,fast", "unknown cache 'fast'; choose from: all, dynamic, hqq-int4, "),
        ("dtype: float8", "unknown dtype 'float8'; choose from: bfloat16, float16, float32"),
        ("limit: many", "limit must be an integer of at least 1, got 'many'"),
        ("limit: true", "limit must be an integer of at least 1, got True"),
        ("batch_size: 0", "batch_size must be an integer of at least 1, got 0"),
        ("seed: -1", "seed must be an integer of at least 0, got -1"),
        ("limit: null", "limit must be an integer of at least 1, got None"),
        ("model: 7", "model must be a non-empty string, got 7"),
        ("tasks: []", "tasks must be a list or one comma-separated string, got []"),
        ("tasks: ', '", "tasks must name at least one of them, got ', '"),
        ("tasks: null", "tasks must be a list or one comma-separated string, got None"),
        ("caches: [dynamic, 7]", "caches must be a list of names or one comma-separated string, got"),
        ("contexts: []", "contexts must be a list or one comma-separated string, got []"),
        ("contexts: [512, 0]", "contexts must be an integer of at least 1, got 0"),
        ("contexts: [true]", "contexts must be an integer of at least 1, got True"),
        ("contexts: 512,,1024", "contexts must be an integer of at least 1, got ''"),
        ("contexts: 5²", "contexts must be an integer of at least 1, got '5²'"),
        ("max_new_tokens: 1.5", "max_new_tokens must be an integer of at least 1, got 1.5"),
        ("dataset: ''", "dataset must be a non-empty string, got ''"),
        ("split: train", "split says how to read a dataset, and no dataset is given"),
        (
            "{input_column: a, instruction: 'b {input}'}",
            "input_column, instruction says how to read a dataset, and no dataset is given",
        ),
        (
            "dataset: xsum",
            "the chosen tasks that take one are: summarization, translation, retrieval, perplexity; name one",
        ),
        ("{dataset: xsum, tasks: 'fidelity,latency'}", "the chosen tasks that take one are: none; name one"),
        (
            "{dataset: xsum, tasks: retrieval, instruction: 'Find {input}'}",
            "an instruction is for tasks that chat with the model, and retrieval does not",
        ),
        ("tasks: {a: 1}", "tasks must be a list or one comma-separated string"),
        ("- limit", "holds a list, not a mapping of settings"),
        ("a: [", "cannot read the config file"),
    ],
)
def test_a_bad_config_is_refused_in_one_line(tmp_path: Path, yaml_text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(_config(tmp_path, yaml_text), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_config_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the config file"):
        resolve(tmp_path / "no.yaml", {})
