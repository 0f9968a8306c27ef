from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval.caches import CACHES, CacheUnavailable, Demand, stock, tensor_bytes
from eval.core import results
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.core.statistics import kl_divergence
from eval.data import DATA_DIR, text
from eval.data.source import Source, read
from eval.run.generate import _until_stop, generate, prefill
from eval.run.settings import Settings
from eval.tasks import TASKS, fidelity, latency, perplexity, retrieval, texts
from eval.tasks.base import Answer, Outcome, Unit
from hf_paged_cache import disable
from tests.eval.conftest import HEAD_DIM, KV_HEADS, LAYERS, tiny_model, tiny_tokenizer

SETTINGS = Settings(limit=3, batch_size=2, max_new_tokens=5)
TEXT_TASKS = [TASKS["summarization"], TASKS["translation"]]
DYNAMIC = CACHES["dynamic"]
LONG_TEXT = text.shipped()[:4000]  # a byte is a token here


@pytest.fixture(scope="module")
def few_texts(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("data") / "few.jsonl"
    written = (DATA_DIR / "catalogue.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(written[:5]), encoding="utf-8")
    return Source(str(path), {"input": "text"})


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch: pytest.MonkeyPatch, few_texts: Source) -> None:
    monkeypatch.setattr(fidelity, "_CATALOGUE", few_texts)
    monkeypatch.setattr(fidelity, "PROMPT_TOKENS", 48)
    monkeypatch.setattr(fidelity, "STEPS", 12)
    monkeypatch.setattr(fidelity, "SAMPLES_PER_TEXT", 1)
    monkeypatch.setattr(latency, "STEPS", 3)
    monkeypatch.setattr(latency, "ROUNDS", 2)
    monkeypatch.setattr(perplexity, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(perplexity, "SAMPLES_PER_WINDOW", 1)
    monkeypatch.setattr(retrieval, "ENTRY_WORDS", 5)
    monkeypatch.setattr(text, "shipped", lambda: LONG_TEXT)
    monkeypatch.setattr(retrieval, "_QUESTION_TOKENS", 90)


@pytest.fixture
def broad() -> LoadedModel:
    """Heads of 64, which every quantized cache can group."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.3,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LoadedModel(LlamaForCausalLM(config).eval(), tokenizer, torch.device("cpu"), "broad")


def _settings(task: str) -> Settings:
    contexts = {"retrieval": (512, 768), "perplexity": (40,), "latency": (24, 70)}
    return dataclasses.replace(SETTINGS, contexts=contexts.get(task))


def _outcomes(loaded: LoadedModel, task: str, cache: str, units: list[Unit]) -> list[Outcome]:
    found = [
        TASKS[task].run(loaded, unit, CACHES[cache], TASKS[task].reference(loaded, unit)) for unit in units
    ]
    disable(loaded.model)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_every_task_gives_the_same_answers_with_the_paged_cache(task: str, loaded: LoadedModel) -> None:
    units = TASKS[task].units(loaded, _settings(task))
    default, paged = (_outcomes(loaded, task, cache, units) for cache in ("dynamic", "paged"))
    assert [unit.index for unit in units] == list(range(len(units)))
    for unit, mine, theirs in zip(units, paged, default, strict=True):
        assert [answer.id for answer in mine.answers] == [sample.id for sample in unit.samples]
        assert [answer.tokens for answer in mine.answers] == [answer.tokens for answer in theirs.answers]
        assert [answer.text for answer in mine.answers] == [answer.text for answer in theirs.answers]
        for one, other in zip(mine.answers, theirs.answers, strict=True):
            assert one.values == pytest.approx(other.values, abs=1e-3)
        assert mine.measures is not None
        assert mine.measures.kv.used_bytes > 0
        assert mine.measures.rows == (
            len(unit.samples) if task in ("fidelity", *map(_name, TEXT_TASKS)) else 1
        )


def _name(task: Any) -> str:
    return str(task.name)


@pytest.mark.parametrize("task", TASKS)
def test_what_was_written_down_reads_back(task: str, loaded: LoadedModel) -> None:
    units = TASKS[task].units(loaded, _settings(task))[:1]
    for cache in ("dynamic", "paged-int8"):
        (outcome,) = _outcomes(loaded, task, cache, units)
        assert results.build(Outcome, json.loads(json.dumps(dataclasses.asdict(outcome)))) == outcome


# texts


@pytest.mark.parametrize("task", TEXT_TASKS, ids=_name)
def test_one_seed_chooses_the_same_samples_and_another_seed_others(task: texts.TextTask) -> None:
    ids = [sample.id for sample in task.samples(Settings(limit=20, seed=1))]
    assert ids == [sample.id for sample in task.samples(Settings(limit=20, seed=1))]
    assert len(set(ids)) == 20
    assert ids != [sample.id for sample in task.samples(Settings(limit=20, seed=2))]


@pytest.mark.parametrize("task", TEXT_TASKS, ids=_name)
def test_a_prompt_holds_the_instruction_and_the_whole_text(task: texts.TextTask) -> None:
    written = Path(task.source.name).read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in map(json.loads, written)}
    columns = task.source.columns
    for sample in task.samples(Settings(limit=5)):
        row = rows[sample.id]
        assert sample.prompt == task.instruction.replace("{input}", row[columns["input"]])
        assert sample.reference == row[columns["reference"]]


@pytest.mark.parametrize("task", TEXT_TASKS, ids=_name)
def test_a_limit_beyond_the_data_gives_all_300_of_them(task: texts.TextTask) -> None:
    assert len({sample.id for sample in task.samples(Settings(limit=10_000))}) == 300


def test_texts_and_the_instruction_come_from_the_data_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"long": "a {b} c", "short": "d"}\n', encoding="utf-8")
    given = {"input_column": "long", "reference_column": "short", "instruction": "Shorten {input}!"}
    settings = dataclasses.replace(SETTINGS, tasks=("summarization",), dataset=str(file), **given)
    (sample,) = TASKS["summarization"].samples(settings)  # type: ignore[attr-defined]
    assert (sample.id, sample.prompt, sample.reference) == ("0", "Shorten a {b} c!", "d")
    without = dataclasses.replace(settings, instruction="Shorten it")
    with pytest.raises(UsageError, match=r"instruction must hold \{input\}"):
        TASKS["summarization"].samples(without)  # type: ignore[attr-defined]


def test_samples_are_batched_in_order(loaded: LoadedModel) -> None:
    task = TASKS["translation"]
    units = task.units(loaded, dataclasses.replace(SETTINGS, limit=5))
    assert [len(unit.samples) for unit in units] == [2, 2, 1]
    ids = [sample.id for sample in task.samples(dataclasses.replace(SETTINGS, limit=5))]  # type: ignore[attr-defined]
    assert [sample.id for unit in units for sample in unit.samples] == ids


def test_padding_is_on_the_left_and_special_tokens_come_once(loaded: LoadedModel) -> None:
    encoded = texts._encode(loaded, ["a", "abc"])
    assert encoded["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert loaded.tokenizer.decode(encoded["input_ids"][1]) == "<user>abc<answer>"


def test_measurements_of_a_batch_are_those_of_the_default_cache_to_the_byte(loaded: LoadedModel) -> None:
    task = TASKS["translation"]
    (unit, *_) = task.units(loaded, SETTINGS)
    (outcome,) = _outcomes(loaded, "translation", "dynamic", [unit])
    measures = outcome.measures
    assert measures is not None
    rows, tokens = unit.inputs[0]["input_ids"].shape
    # 5 tokens: the first comes with the prefill, the last is never put into the cache.
    assert measures.kv.used_bytes == 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * rows * (tokens + 5 - 1)
    assert measures.kv.allocated_bytes == measures.kv.used_bytes
    assert (measures.rows, len(measures.prefill_ms), len(measures.step_ms)) == (2, 1, 4)
    assert min(*measures.prefill_ms, *measures.step_ms) > 0
    assert measures.peak_bytes > measures.rise_bytes >= 0


def test_a_prompt_beyond_the_models_context_is_refused(loaded: LoadedModel) -> None:
    short = dataclasses.replace(loaded, model=tiny_model(loaded.tokenizer, context=64))
    with pytest.raises(UsageError, match=r"need \d+ tokens; the model's context is 64"):
        TASKS["translation"].units(short, SETTINGS)


# perplexity


def test_perplexity_is_that_of_one_plain_forward(loaded: LoadedModel) -> None:
    units = TASKS["perplexity"].units(loaded, _settings("perplexity"))
    outcomes = _outcomes(loaded, "perplexity", "dynamic", units)
    assert len(units) == SETTINGS.limit
    total = 0.0
    for unit, outcome in zip(units, outcomes, strict=True):
        ids = unit.inputs
        with torch.inference_mode():
            logits = loaded.model(ids).logits[0, :-1].double()
        expected = float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        assert outcome.answers[0].values == pytest.approx({"nll": expected, "tokens": 39.0}, rel=1e-5)
        total += expected
    answers = [outcome.answers[0] for outcome in outcomes]
    value = TASKS["perplexity"].metrics[0].statistic(answers)(np.arange(len(answers)))
    assert value == pytest.approx(np.exp(total / (39 * len(units))), rel=1e-5)


@pytest.mark.parametrize(
    ("text_tokens", "windows", "expected"),
    [(100, 3, [0, 30, 60]), (100, 1, [0]), (100, 9, [0, 30, 60]), (30, 2, [0]), (300, 4, [0, 60, 150, 210])],
)
def test_windows_are_spread_over_the_text_and_do_not_overlap(
    text_tokens: int, windows: int, expected: list[int]
) -> None:
    assert perplexity._starts(text_tokens, 30, windows) == expected


def test_a_text_of_ones_own_is_read_as_one(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("first line\nsecond line\n", encoding="utf-8")
    settings = dataclasses.replace(
        _settings("perplexity"), tasks=("perplexity",), dataset=str(file), input_column="text", contexts=(23,)
    )
    (unit,) = TASKS["perplexity"].units(loaded, settings)
    assert loaded.tokenizer.decode(unit.inputs[0]) == "first line\n\nsecond line"
    with pytest.raises(UsageError, match="the text has 23 tokens, and a window needs 24"):
        TASKS["perplexity"].units(loaded, dataclasses.replace(settings, contexts=(24,)))


# fidelity


def test_the_default_cache_is_faithful_to_itself(loaded: LoadedModel) -> None:
    units = TASKS["fidelity"].units(loaded, SETTINGS)
    answers = [a for outcome in _outcomes(loaded, "fidelity", "dynamic", units) for a in outcome.answers]
    assert len(answers) == SETTINGS.limit
    assert [answer.values for answer in answers] == [{"kl": 0.0, "top1": 1.0, "divergence": 12.0}] * 3


class _Forgetful(DynamicCache):
    """After a few steps it takes values for others."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *given: Any, **more: Any) -> Any:
        is_lost = self.get_seq_length() > 48 + 4
        return super().update(keys, -9 * values if is_lost else values, *given, **more)


def test_the_first_difference_is_where_a_free_answer_leaves_the_defaults(broad: LoadedModel) -> None:
    (unit, *_) = TASKS["fidelity"].units(broad, dataclasses.replace(SETTINGS, limit=6, batch_size=6))
    reference = TASKS["fidelity"].reference(broad, unit)
    entry = dataclasses.replace(DYNAMIC, create=lambda model, demand: _Forgetful(config=model.config))
    outcome = TASKS["fidelity"].run(broad, unit, entry, reference)
    with torch.inference_mode():
        caches = _Forgetful(config=broad.model.config), DynamicCache(config=broad.model.config)
        free, default = (
            torch.stack([s.argmax(-1) for s in fidelity._steps(broad, unit.inputs, cache, None)], 1)
            for cache in caches
        )
    parted = [next((i for i, same in enumerate(row) if not same), 12) for row in (free == default).tolist()]
    assert 4 < min(parted) < 12
    assert [answer.values["divergence"] for answer in outcome.answers] == parted
    assert all(answer.values["kl"] > 0 for answer in outcome.answers)


def test_the_default_caches_tokens_are_those_of_generate(loaded: LoadedModel) -> None:
    (unit, *_) = TASKS["fidelity"].units(loaded, SETTINGS)
    tokens = TASKS["fidelity"].reference(loaded, unit).argmax(-1)
    plain = loaded.model.generate(
        unit.inputs,
        attention_mask=torch.ones_like(unit.inputs),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
    )
    assert tokens.tolist() == plain[:, 48:].tolist()


def test_kl_is_that_of_torch() -> None:
    one, other = torch.randn(2, 3, 11).double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(kl_divergence(5.0 + other, one), expected, atol=1e-12)


# retrieval


def _catalogues(loaded: LoadedModel, limit: int, *contexts: int) -> list[Unit]:
    settings = dataclasses.replace(SETTINGS, limit=limit, contexts=contexts)
    return TASKS["retrieval"].units(loaded, settings)


def test_questions_are_spread_evenly_over_lengths_and_depths(loaded: LoadedModel) -> None:
    units = _catalogues(loaded, 20, 512, 1024)
    facts = [(int(s.facts["length_tokens"]), int(s.facts["depth_percent"])) for u in units for s in u.samples]
    expected = [(length, depth) for length in (512, 1024) for depth in retrieval.DEPTHS_PERCENT]
    assert sorted(facts) == sorted(2 * expected)


def test_an_entry_lies_at_the_depth_it_is_asked_for(loaded: LoadedModel) -> None:
    for unit in _catalogues(loaded, 30, 512, 1024, 2000):
        content = loaded.tokenizer.decode(unit.inputs.ids[0])
        entries = content.removeprefix(retrieval.HEAD).split("\n\n")[:-1]
        assert len({entry.split(": ")[0] for entry in entries}) == len(entries)
        for sample in unit.samples:
            places = [i for i, entry in enumerate(entries) if entry.startswith(sample.prompt + " ")]
            (place,) = places
            assert entries[place].removeprefix(sample.prompt + " ").startswith(sample.reference)
            fifth = retrieval.DEPTHS_PERCENT.index(int(sample.facts["depth_percent"]))
            assert (
                fifth / 5 - 0.5 / len(entries) <= place / len(entries) < (fifth + 1) / 5 + 0.5 / len(entries)
            )


def test_catalogue_question_and_answer_have_room_in_the_length(loaded: LoadedModel) -> None:
    for unit in _catalogues(loaded, 10, 512, 2000):
        length = int(unit.samples[0].facts["length_tokens"])
        tokens = unit.inputs.ids.shape[1]
        longest = max(q.ids.shape[1] + q.answer_tokens for q in unit.inputs.questions)
        assert tokens + longest <= length
        assert tokens > length - 90 - 120  # one entry more would not have fitted


def test_an_entry_whose_question_is_too_long_is_not_in_the_catalogue(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_QUESTION_TOKENS", 40)
    (unit, *_) = _catalogues(loaded, 5, 1024)
    assert max(q.ids.shape[1] + q.answer_tokens for q in unit.inputs.questions) <= 40
    entry = retrieval._entry("n" * 40, "short text")
    assert list(retrieval._that_fit(loaded, [entry], 1000)) == []
    monkeypatch.setattr(retrieval, "_QUESTION_TOKENS", 60)
    assert list(retrieval._that_fit(loaded, [entry], 1000)) == [entry]


def test_an_entry_without_words_is_not_asked_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read(TASKS["retrieval"].source, ("input", "reference"), None, 0)
    rows = [dict(row, reference=" " if i % 2 else row["reference"]) for i, row in enumerate(rows)]
    monkeypatch.setattr(retrieval, "read", lambda *given: rows)
    asked = {sample.id for unit in _catalogues(loaded, 20, 1024) for sample in unit.samples}
    assert asked
    assert asked <= {row["input"] for row in rows[::2]}


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("tool for finding things on disks. It is fast.", "tool for finding things"),
        ("short one. And more.", "short one"),
        ("only words", "only words"),
        ("ends in four words.\nNext sentence.", "ends in four words"),
        (" \n ", ""),
        (". ", ""),
    ],
)
def test_the_answer_is_the_beginning_of_the_first_sentence(said: str, answer: str) -> None:
    assert retrieval._entry("name", said).answer == answer


@pytest.mark.parametrize(
    ("said", "exact"),
    [
        (" tool for finding things on disks", 1.0),
        ("tool for finding things", 1.0),
        ("tool  for\nfinding things.", 1.0),
        ("tool for finding", 0.0),
        ("tool for finding thing", 0.0),
        ("Tool for finding things", 0.0),
        ("a tool for finding things", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_exact_when_its_words_are(
    said: str, exact: float, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = retrieval._entry("find", "tool for finding things on disks. It is fast.")
    question = retrieval._question(loaded, entry)
    monkeypatch.setattr(retrieval, "generate", lambda *given: [loaded.tokenizer(said)["input_ids"]])
    sample = retrieval.Sample("find", "find:", entry.answer, {"length_tokens": 512.0})
    answer = retrieval._ask(loaded, question.ids, question, None, sample)
    assert answer.values == {"length_tokens": 512.0, "exact": exact}


def test_the_heat_map_counts_by_length_and_depth() -> None:
    def answer(length: int, depth: int, exact: int) -> Answer:
        values = {"length_tokens": float(length), "depth_percent": float(depth), "exact": float(exact)}
        return Answer("x", values=values)

    outcomes = [
        Outcome((answer(512, 0, 1), answer(512, 25, 0))),
        Outcome((answer(512, 0, 0), answer(1024, 0, 1))),
    ]
    heat = TASKS["retrieval"].details(outcomes)["heat"]
    assert [(c.length_tokens, c.depth_percent, c.exact_percent, c.samples) for c in heat] == [
        (512, 0, 50.0, 2),
        (512, 25, 0.0, 1),
        (1024, 0, 100.0, 1),
    ]


def test_too_small_a_catalogue_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match=r"a catalogue of 200 tokens holds \d entries; .* larger --contexts"):
        _catalogues(loaded, 5, 200)


@pytest.mark.parametrize(
    "name", ["dynamic", "static", "quanto-int4", "hqq-int8", "stock-fp8", "paged", "paged-int8", "paged-int4"]
)
def test_a_question_to_a_copy_is_answered_as_after_a_fresh_prefill(name: str, broad: LoadedModel) -> None:
    entry = CACHES[name]
    catalogue = torch.randint(0, 250, (1, 150))
    questions = torch.randint(0, 250, (3, 1, 7))

    def read() -> Any:
        cache = entry.create(broad.model, Demand(1, 150 + 7 + 9))
        prefill(broad, catalogue, cache)
        return cache

    def ask(cache: Any, question: torch.Tensor) -> list[list[int]]:
        ids = torch.cat([catalogue, question], dim=1)
        return generate(broad, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, 9)

    with torch.inference_mode():
        try:
            shared = read()
        except CacheUnavailable as error:
            pytest.skip(str(error))
        before = entry.kv_bytes(shared).used_bytes
        of_copies = [ask(entry.duplicate(shared), question) for question in questions]
        assert shared.get_seq_length() == 150
        assert entry.kv_bytes(shared).used_bytes == before
        assert of_copies == [ask(read(), question) for question in questions]
        # The first cache itself goes on as if no copy had ever been.
        assert ask(shared, questions[0]) == of_copies[0]
    disable(broad.model)
    assert of_copies[0] != of_copies[1]


def test_a_copy_of_a_hybrid_models_cache_leaves_its_states_alone() -> None:
    from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

    cache = DynamicCache()
    cache.layers = [DynamicLayer(), LinearAttentionLayer()]
    cache.layers[0].update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    cache.layers[1].update_conv_state(torch.ones(1, 2, 4))
    twin = stock._copied(cache)
    twin.layers[0].update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    twin.layers[1].update_conv_state(torch.zeros(1, 2, 1))
    assert cache.layers[0].get_seq_length() == 3
    assert torch.equal(cache.layers[1].conv_states[0], torch.ones(1, 2, 4))
    assert not torch.equal(twin.layers[1].conv_states[0], torch.ones(1, 2, 4))


def test_forks_for_questions_leave_no_blocks_behind(loaded: LoadedModel) -> None:
    (unit, *_) = _catalogues(loaded, 5, 512)
    entry, made = CACHES["paged"], []

    def create(model: Any, demand: Demand) -> Any:
        made.append(entry.create(model, demand))
        return made[-1]

    outcome = TASKS["retrieval"].run(loaded, unit, dataclasses.replace(entry, create=create), None)
    disable(loaded.model)
    assert len(outcome.answers) == 5
    assert outcome.measures is not None
    assert entry.kv_bytes(made[0]).used_bytes == outcome.measures.kv.used_bytes


# latency


def test_latency_looks_at_every_context_in_every_round(loaded: LoadedModel) -> None:
    units = TASKS["latency"].units(loaded, _settings("latency"))
    assert [unit.inputs.shape for unit in units] == [(1, 24), (1, 70)] * 2
    outcomes = _outcomes(loaded, "latency", "dynamic", units)
    assert [len(outcome.answers[0].tokens) for outcome in outcomes] == [4] * 4
    contexts = TASKS["latency"].details(outcomes)["contexts"]
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    assert [(at.context_tokens, at.prefill_ms.count, at.decode_ms.count, at.kv_bytes) for at in contexts] == [
        (24, 2, 6, (24 + 3) * per_token),
        (70, 2, 6, (70 + 3) * per_token),
    ]
    assert all(at.tokens_per_s == pytest.approx(1000 / at.decode_ms.median) for at in contexts)


@pytest.mark.parametrize("task", ["retrieval", "perplexity", "latency"])
def test_contexts_beyond_the_model_are_refused(task: str, loaded: LoadedModel) -> None:
    settings = dataclasses.replace(SETTINGS, contexts=(512, 4097))
    with pytest.raises(
        UsageError, match=rf"'{task}' need \d+ tokens; the model's context is 4096: .*--contexts"
    ):
        TASKS[task].units(loaded, settings)


def test_fidelity_needs_a_context_for_its_texts(loaded: LoadedModel) -> None:
    short = dataclasses.replace(loaded, model=tiny_model(loaded.tokenizer, context=59))
    with pytest.raises(UsageError, match=r"'fidelity' need 60 tokens; the model's context is 59: .* leave"):
        TASKS["fidelity"].units(short, SETTINGS)


@pytest.mark.parametrize(("task", "lengths"), [("retrieval", [512, 700]), ("latency", [256, 675])])
def test_without_contexts_the_model_sets_the_end(
    task: str, lengths: list[int], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "STEPS", 24)
    short = dataclasses.replace(loaded, model=tiny_model(loaded.tokenizer, context=700))
    module = {"retrieval": retrieval._lengths, "latency": latency._contexts}[task]
    assert list(module(short, SETTINGS)) == lengths[:1]
    tiny = dataclasses.replace(loaded, model=tiny_model(loaded.tokenizer, context=100))
    assert list(module(tiny, SETTINGS)) == [100 - (25 if task == "latency" else 0)]


def test_a_window_of_one_token_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="a window of 1 token predicts none"):
        TASKS["perplexity"].units(loaded, dataclasses.replace(SETTINGS, contexts=(1,)))


# what they share


@pytest.mark.parametrize(
    ("row", "kept"),
    [([4, 5, 9, 0, 0], [4, 5, 9]), ([9, 9], [9]), ([4, 5], [4, 5]), ([4, 8, 5], [4, 8])],
)
def test_tokens_end_with_the_first_stop_token(row: list[int], kept: list[int]) -> None:
    assert _until_stop(row, {8, 9}) == kept


def test_a_storage_shared_by_two_layers_counts_once() -> None:
    class Layer:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.keys, self.values, self.states = tensor, tensor[:2], {0: [tensor]}

    class Cache:
        layers = [Layer(torch.zeros(8)), Layer(torch.zeros(4))]  # noqa: RUF012

    assert tensor_bytes(Cache()).used_bytes == 4 * (8 + 4)


def test_a_missing_data_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = Source(str(tmp_path / "no.jsonl"), {"input": "a", "reference": "b"})
    monkeypatch.setattr(type(TASKS["translation"]), "source", gone)
    with pytest.raises(UsageError, match=r"the data file .*no\.jsonl is missing"):
        TASKS["translation"].samples(SETTINGS)  # type: ignore[attr-defined]
