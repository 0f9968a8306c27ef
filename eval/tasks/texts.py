"""Tasks whose answers are texts: a data set of (input, reference), prompts, batches."""

from typing import Any, ClassVar

from eval.caches import CacheEntry
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.data import DATA_DIR
from eval.data.source import Source, chosen, read
from eval.run.generate import check_context, generate_batch
from eval.run.settings import Settings

from .base import Answer, MetricSpec, Outcome, Sample, Task, Unit
from .metrics import bleu, chrf, rouge


class TextTask(Task):
    """Prompts in a chat, answers generated greedily."""

    source: ClassVar[Source]  # the texts that ship
    instruction: ClassVar[str]  # the user's message; `{input}` is the text
    max_new_tokens: ClassVar[int]  # default length of an answer
    needs_chat: ClassVar[bool] = True
    takes_dataset: ClassVar[bool] = True

    def samples(self, settings: Settings) -> list[Sample]:
        """The samples that settings ask for, chosen by their seed; a `UsageError` if they cannot be had."""
        texts = chosen(settings, self.source)
        instruction = texts.instruction or self.instruction
        if "{input}" not in instruction:
            raise UsageError(f"instruction must hold {{input}} where the text goes, got {instruction!r}")
        rows = read(texts, ("input", "reference"), settings.limit, settings.seed)
        return [
            Sample(row["id"], instruction.replace("{input}", row["input"]), row["reference"]) for row in rows
        ]

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """Batches of `settings.batch_size` samples."""
        samples = self.samples(settings)
        new_tokens = settings.max_new_tokens or self.max_new_tokens
        groups = [samples[i : i + settings.batch_size] for i in range(0, len(samples), settings.batch_size)]
        batches = [_encode(loaded, [sample.prompt for sample in group]) for group in groups]
        needed = max(batch["input_ids"].shape[1] for batch in batches) + new_tokens
        check_context(loaded.model, needed, "the longest prompt and its answer", "fewer --max-new-tokens")
        return [
            Unit(index, f"batch {index + 1}/{len(groups)}", tuple(group), (batch, new_tokens))
            for index, (group, batch) in enumerate(zip(groups, batches, strict=True))
        ]

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        """Generate one batch."""
        prompts, new_tokens = unit.inputs
        rows, measures = generate_batch(loaded, prompts, entry, new_tokens)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = loaded.tokenizer.batch_decode(rows, **options)
        answers = [
            Answer(sample.id, text.strip(), sample.reference, tuple(tokens))
            for sample, text, tokens in zip(unit.samples, texts, rows, strict=True)
        ]
        return Outcome(tuple(answers), measures)


def _shipped(name: str, **columns: str) -> Source:
    return Source(str(DATA_DIR / f"{name}.jsonl"), {"id": "id", **columns})


class Summarization(TextTask):
    """Long descriptions of software, and the one-line summaries people wrote for them."""

    name = "summarization"
    title = "summaries of software descriptions, in the words people chose"
    source = _shipped("summarization", input="document", reference="summary")
    instruction = "Describe the following software package in at most ten words.\n\n{input}"
    max_new_tokens = 32
    metrics = (
        MetricSpec("rouge_l", "ROUGE-L", "%", rouge("rougeL")),
        MetricSpec("rouge_1", "ROUGE-1", "%", rouge("rouge1")),
        MetricSpec("rouge_2", "ROUGE-2", "%", rouge("rouge2")),
    )
    agreement = metrics[0]


class Translation(TextTask):
    """Descriptions of software in English, and the French that translators wrote for them."""

    name = "translation"
    title = "software descriptions from English to French"
    source = _shipped("translation_en_fr", input="en", reference="fr")
    instruction = "Translate the following English text to French:\n\n{input}"
    max_new_tokens = 96
    metrics = (MetricSpec("chrf", "chrF", "%", chrf), MetricSpec("bleu", "BLEU", "%", bleu))
    agreement = metrics[0]


def _encode(loaded: LoadedModel, prompts: list[str]) -> dict[str, Any]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    template = loaded.tokenizer.apply_chat_template
    texts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # The template has written the special tokens already.
    encoded = loaded.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {key: encoded[key].to(loaded.device) for key in ("input_ids", "attention_mask")}
