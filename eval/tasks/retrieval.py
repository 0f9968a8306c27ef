"""Find one entry in a long catalogue, at every depth: what coarse keys lose first.

The catalogue is forwarded once. Each question goes on from a copy of that cache: the name of an entry, which
the model completes with what the catalogue says of it.

```
Catalogue of software packages.

xsnow: Christmas animation on your X desktop ...          depth 0 %
...
jq: lightweight and flexible command-line JSON ...        depth 100 %

xsnow:           -> Christmas animation on your X desktop          exact
```
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from eval.caches import CacheEntry, Demand
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.data import text
from eval.data.source import Source, chosen, read
from eval.run.generate import contexts, generate, measured, prefill
from eval.run.rows import HeatCell
from eval.run.settings import Settings

from .base import Answer, MetricSpec, Outcome, Sample, Task, Unit, mean_of

HEAD = "Catalogue of software packages.\n\n"
ENTRY_WORDS = 45  # of an entry, so that a catalogue has many
ANSWER_WORDS = 4  # of the entry's first sentence, that have to be right
DEPTHS_PERCENT = (0, 25, 50, 75, 100)
TOKENS_PER_QUESTION = 512  # of a catalogue, at each depth: long ones are dear to read, so are asked more
_QUESTION_TOKENS = 60  # room left for a name and an answer
_DEFAULT_CONTEXTS = (512, 1024, 2048, 4096)


class _Question(NamedTuple):
    ids: torch.Tensor  # [1, tokens]
    answer_tokens: int  # that are enough for the words that have to be right

    @property
    def tokens(self) -> int:
        return self.ids.shape[1] + self.answer_tokens


class Catalogue(NamedTuple):
    """One text to search, and the questions about it."""

    ids: torch.Tensor  # `[1, tokens]`
    questions: tuple[_Question, ...]  # of each sample


class Retrieval(Task):
    """Catalogues of several lengths, questions at every depth; an answer is right if its words are."""

    name = "retrieval"
    title = "one entry of a catalogue, asked for by its name"
    metrics = (MetricSpec("exact", "exact match", "%", mean_of("exact", 100.0)),)
    takes_dataset = True
    source: ClassVar[Source] = Source(
        str(text.CATALOGUE), {"id": "name", "input": "name", "reference": "text"}
    )

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """Catalogues; `settings.limit` questions or a few more, about as many at every length and depth."""
        texts = chosen(settings, self.source)
        rows = read(texts, ("input", "reference"), None, settings.seed)
        entries = [_entry(row["input"], row["reference"]) for row in rows]
        entries = [entry for entry in entries if entry.answer]
        lengths = _lengths(loaded, settings)
        wanted = -(-settings.limit // (len(lengths) * len(DEPTHS_PERCENT)))  # of a length and depth
        jobs = [
            (length, per_depth, f"{settings.seed} {length} {turn}")
            for length in lengths
            for per_depth in [max(1, min(wanted, length // TOKENS_PER_QUESTION))]
            for turn in range(-(-wanted // per_depth))
        ]
        return [_unit(loaded, entries, index, *job) for index, job in enumerate(jobs)]

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        """Forward one catalogue and ask all questions about it."""
        catalogue: Catalogue = unit.inputs
        capacity = catalogue.ids.shape[1] + max(question.tokens for question in catalogue.questions)
        with torch.inference_mode(), measured(loaded, entry, Demand(1, capacity)) as made:
            prefill(loaded, catalogue.ids, made.cache)
        measures = made.measures()
        answers = tuple(
            _ask(loaded, catalogue.ids, question, entry.duplicate(made.cache), sample)
            for sample, question in zip(unit.samples, catalogue.questions, strict=True)
        )
        return Outcome(answers, measures)

    def details(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Exact matches by length and depth."""
        cells: dict[tuple[int, int], list[float]] = {}
        for values in (answer.values for outcome in outcomes for answer in outcome.answers):
            key = int(values["length_tokens"]), int(values["depth_percent"])
            cells.setdefault(key, []).append(100 * values["exact"])
        heat = (HeatCell(*key, sum(found) / len(found), len(found)) for key, found in sorted(cells.items()))
        return {"heat": tuple(heat)}


class _Entry(NamedTuple):
    name: str
    text: str
    answer: str


def _entry(name: str, text: str) -> _Entry:
    """Its answer is empty where the text has no words."""
    words = text.split()
    first_sentence = " ".join(words).split(". ")[0]
    answer = " ".join(first_sentence.split()[:ANSWER_WORDS]).rstrip(".")
    return _Entry(name, f"{name}: {' '.join(words[:ENTRY_WORDS])}\n\n", answer)


def _lengths(loaded: LoadedModel, settings: Settings) -> Sequence[int]:
    what = "the catalogues of the task 'retrieval'"
    lengths = contexts(loaded, settings.contexts, _DEFAULT_CONTEXTS, 0, what)
    # A question at each depth of each length: few samples are for the shorter of those that nobody asked for.
    return lengths if settings.contexts else lengths[: -(-settings.limit // len(DEPTHS_PERCENT))]


def _unit(
    loaded: LoadedModel, entries: Sequence[_Entry], index: int, length: int, per_depth: int, seed: str
) -> Unit:
    rng = random.Random(seed)
    order = rng.sample(list(entries), len(entries))
    fitting = list(_that_fit(loaded, order, length - _QUESTION_TOKENS))
    if len(fitting) < len(DEPTHS_PERCENT):
        raise UsageError(
            f"a catalogue of {length} tokens holds {len(fitting)} entries; the task 'retrieval' needs at "
            f"least {len(DEPTHS_PERCENT)}: choose larger --contexts"
        )
    samples, questions = [], []
    for depth in DEPTHS_PERCENT:
        for place in _places(depth, len(fitting), per_depth, rng):
            entry = fitting[place]
            facts = {"length_tokens": float(length), "depth_percent": float(depth)}
            samples.append(Sample(entry.name, f"{entry.name}:", entry.answer, facts))
            questions.append(_question(loaded, entry))
    ids = _ids(loaded, HEAD + "".join(entry.text for entry in fitting))
    label = f"{length} tokens, catalogue {index + 1}"
    return Unit(index, label, tuple(samples), Catalogue(ids, tuple(questions)))


def _question(loaded: LoadedModel, entry: _Entry) -> _Question:
    enough = _ids(loaded, f" {entry.answer}").shape[1] + 2
    return _Question(_ids(loaded, f"{entry.name}:"), enough)


def _that_fit(loaded: LoadedModel, entries: Sequence[_Entry], room: int) -> Iterator[_Entry]:
    """The first entries whose text and question fit; those named or answered alike come once."""
    room -= _ids(loaded, HEAD).shape[1]
    taken: set[str] = set()
    for entry in entries:
        if _question(loaded, entry).tokens > _QUESTION_TOKENS or taken & {entry.name, entry.answer}:
            continue
        room -= _ids(loaded, entry.text).shape[1]
        if room < 0:
            return
        taken |= {entry.name, entry.answer}
        yield entry


def _places(depth_percent: int, entries: int, count: int, rng: random.Random) -> list[int]:
    """So many different entries of that fifth of the catalogue that belongs to a depth, or all it has."""
    band = entries / len(DEPTHS_PERCENT)
    first = DEPTHS_PERCENT.index(depth_percent) * band
    places = range(round(first), max(round(first) + 1, round(first + band)))
    return sorted(rng.sample(places, min(count, len(places))))


def _ids(loaded: LoadedModel, content: str) -> torch.Tensor:
    return text.token_ids(loaded.tokenizer, content)[None].to(loaded.device)


def _ask(
    loaded: LoadedModel, catalogue: torch.Tensor, question: _Question, cache: Any, sample: Sample
) -> Answer:
    ids = torch.cat([catalogue, question.ids], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (tokens,) = generate(loaded, inputs, cache, question.answer_tokens)
    answer = loaded.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    words = " ".join(answer.split()[: len(sample.reference.split())]).rstrip(".")
    values = {**sample.facts, "exact": float(words == sample.reference)}
    return Answer(sample.id, answer, sample.reference, tuple(tokens), values)
