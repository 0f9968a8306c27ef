"""Model types of every kind give with PagedCache what they give with the default cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from eval.zoo import checks, kinds, registry, runs
from eval.zoo.examine import RUNS, Options, examine
from eval.zoo.reads import BLOCKS, DENSE, NONE
from tests.support.tails import few

SUBSET = {
    "bamba": BLOCKS,
    "bart/seq2seq": BLOCKS,
    "bloom": DENSE,
    "cohere2": BLOCKS,
    "deepseek_v3": DENSE,
    "deepseek_v4": BLOCKS,
    "diffllama": DENSE,
    "dory": BLOCKS,
    "dots3_note_text": DENSE,
    "falcon": DENSE,
    "falcon_h1": BLOCKS,
    "gemma2": BLOCKS,
    "gemma3_text": BLOCKS,
    "gemma3n_text": BLOCKS,
    "gemma4_text": DENSE,
    "glm_moe_dsa": DENSE,
    "gpt2": BLOCKS,
    "gpt_oss": BLOCKS,
    "inkling_text": BLOCKS,
    "jamba": BLOCKS,
    "kimi_linear": DENSE,
    "lfm2": BLOCKS,
    "llama": BLOCKS,
    "llama4_text": BLOCKS,
    "mamba": NONE,
    "mamba2": NONE,
    "mimo_v2_flash": BLOCKS,
    "minimax_m3_vl_text": DENSE,
    "mistral": BLOCKS,
    "mllama": BLOCKS,
    "moshi": BLOCKS,
    "mpt": DENSE,
    "musicgen": NONE,
    "nemotron_h": BLOCKS,
    "opt": BLOCKS,
    "phi3": BLOCKS,
    "qwen3": BLOCKS,
    "qwen3_next": BLOCKS,
    "qwen4_exp_text": BLOCKS,
    "recurrent_gemma": BLOCKS,
    "t5": BLOCKS,
    "t5gemma2": DENSE,
    "zamba2": BLOCKS,
    "zaya": BLOCKS,
}
"""Type -> how a decode step reads what is stored, at the least. One or more of every kind of layers."""

QUICK = {
    *("llama", "t5", "bloom", "gpt_oss", "mllama", "mamba2", "lfm2", "falcon_h1"),
    *("dots3_note_text", "deepseek_v4", "gemma3n_text", "llama4_text", "qwen3_next"),
}
"""Those of `make test`: every kind of layers, and every way of reading them."""

TELLS_RECURRENT_LAYERS = hasattr(transformers.RecurrentGemmaConfig(), "layer_types")
OWN_CACHES = ("minimax", "openai-gpt", "reformer", "rwkv", "xlnet", "xlstm")
REFUSED = OWN_CACHES if TELLS_RECURRENT_LAYERS else (*OWN_CACHES, "recurrent_gemma")

FORMATS = ("int8", "int4")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # A tiny model gains nothing from a second thread and waits long for it on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def entry_of(name: str) -> registry.Entry:
    entry = registry.entries().get(name)
    if entry is None:
        pytest.skip(f"the installed transformers has no {name}")
    return entry


@pytest.mark.parametrize("name", few([name for name in SUBSET if name not in REFUSED], QUICK))
def test_a_type_gives_what_it_gives_with_the_default_cache(name: str) -> None:
    report = examine(entry_of(name), Options(formats=FORMATS))
    assert report.problem is None
    unlike = {case: verdict for case, verdict in report.verdicts.items() if verdict.status != checks.EQUAL}
    # Where the default cache fails or differs too, equal is too much to ask.
    assert {case: v for case, v in unlike.items() if v.default == checks.EQUAL} == {}
    assert report.verdicts["plain"].status == checks.EQUAL
    assert report.reads in (SUBSET[name], BLOCKS)  # other versions of a model may do better
    assert report.formats == dict.fromkeys(("auto", *FORMATS), RUNS)
    assert all(moved > 5 * runs.TOLERANCE for moved in report.reach), "a lost token would go unseen"


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_be_served_is_refused_by_name(name: str) -> None:
    report = examine(entry_of(name), Options(formats=()))
    assert report.refusal is not None
    assert f"{name!r}" in report.refusal
    assert {verdict.status for verdict in report.verdicts.values()} == {checks.REFUSED}
    assert not report.is_wrong


def test_the_subset_has_thirty_types_and_every_kind_of_layers() -> None:
    known = registry.entries()
    subset = [known[name] for name in SUBSET if name in known]
    assert len(subset) >= 30
    everywhere = {kind for entry in known.values() for kind in kinds.of_entry(entry)}
    assert everywhere == {kind for entry in subset for kind in kinds.of_entry(entry)}
    quick = [known[name] for name in QUICK if name in known]
    if len(quick) == len(QUICK):  # older versions lack some
        assert {kind for entry in quick for kind in kinds.of_entry(entry)} == everywhere
    assert everywhere <= set(kinds.KINDS)
