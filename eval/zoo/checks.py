"""Four uses of a cache, each compared with what transformers does without one being given."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from eval.zoo import inputs, runs
from eval.zoo.inputs import Prompt
from eval.zoo.registry import Entry
from eval.zoo.runs import Run

EQUAL = "equal"  # tokens and logits of a run that was given no cache (`runs.difference`)
AS_DEFAULT = "as default"  # not those, but what the default cache gives when it is handed in
DIFFERENT = "not equal"
FAILED = "failed"  # an error that PagedCache did not raise on purpose
IGNORED = "ignored"  # nothing was ever written to the cache
REFUSED = "refused"  # an error of PagedCache
NO_REFERENCE = "no reference"  # transformers itself cannot run the case
WRONG = (DIFFERENT, FAILED, IGNORED)  # verdicts that must not be, where the default cache is equal

_NEW_TOKENS, _MORE_TOKENS, _LATER_TOKENS = 12, 5, 6

MakeCache = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """A use of a cache."""

    name: str  # what the tables call it
    lengths: tuple[int, ...] = (21, 21)  # tokens of the prompts, one for each row
    beams: int = 1  # of beam search; 1 is greedy
    turns: int = 1  # 2 if the same cache is given once more, with the whole conversation and some ids on top
    meaning: str = ""  # for readers of the tables


CASES = (
    Case("plain", meaning="a batch without padding"),
    Case("padded", (21, 13, 5), meaning="prompts of several lengths, padded on the left"),
    Case("second turn", turns=2, meaning="the same cache given again with the longer conversation"),
    Case("beams", beams=3, meaning="beam search"),
)


@dataclass(frozen=True)
class Verdict:
    """What a case gave."""

    status: str  # one of the above
    difference: float | None = None  # largest difference of logits, as a share of their standard deviation
    reason: str | None = None  # the error
    default: str | None = None  # the status of the default cache when handed in, where ours is not `equal`

    @property
    def is_wrong(self) -> bool:
        """Whether this must not be."""
        return self.status in WRONG and self.default == EQUAL


def default_cache(model: Any) -> Any:
    """What transformers itself makes for a model."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache


class Reference:
    """What a case has to give, computed once before any PagedCache exists."""

    def __init__(self, model: Any, entry: Entry, case: Case) -> None:
        self.case = case
        self.run: Run | None = None  # tokens and logits; None if transformers cannot run the case
        self.problem: str | None = None  # why not
        self._model = model
        try:
            self.prompt = inputs.prompt(model, entry, case.lengths, seed=len(case.name))
            self.run = self._first = self._generate(self.prompt)
            if case.turns > 1:
                self._whole = self._conversation(entry)
                self.run = self._generate(self._whole)
        except Exception as error:  # whatever the model's code raises
            self.run, self.problem = None, one_line(error)

    def judge(self, make_cache: MakeCache) -> Verdict:
        """How the case goes with a cache, and where it is not equal, how with the default cache."""
        verdict, mine = self._judge(make_cache)
        if verdict.status in (EQUAL, NO_REFERENCE):
            return verdict
        default, theirs = self._judge(default_cache)
        status = verdict.status
        if status == default.status == DIFFERENT and mine is not None and theirs is not None:
            status = AS_DEFAULT if runs.difference(theirs, mine, self.case.beams).is_none else status
        return Verdict(status, verdict.difference, verdict.reason, default.status)

    def _judge(self, make_cache: MakeCache) -> tuple[Verdict, Run | None]:
        try:
            cache = make_cache(self._model)
            if self.run is None:
                return Verdict(NO_REFERENCE, reason=self.problem), None
            expected, mine = self._with(cache, self.run)
        except Exception as error:
            return Verdict(REFUSED if is_refusal(error) else FAILED, reason=one_line(error)), None
        if not _is_written(cache):
            return Verdict(IGNORED, reason="nothing was written to the cache"), mine
        found = runs.difference(expected, mine, self.case.beams)
        return Verdict(EQUAL if found.is_none else DIFFERENT, found.logits), mine

    def _with(self, cache: Any, expected: Run) -> tuple[Run, Run]:
        """The run with a cache, and before it the one to compare it with."""
        first = self._generate(self.prompt, cache)
        if self.case.turns == 1:
            return expected, first
        if not torch.equal(first.sequences, self._first.sequences):
            return self._first, first  # the cache holds another conversation than the second turn's
        whole = self._whole
        if all(getattr(cache, "is_linear", [False])):
            # `generate` cuts the known ids off by the length of attention layers, and there are none.
            known = first.sequences.shape[1] - 1
            whole = self.prompt.continued(whole.arguments[whole.grows], from_token=known)
        return expected, self._generate(whole, cache)

    def _generate(self, prompt: Prompt, cache: Any = None) -> Run:
        tokens = _NEW_TOKENS if prompt is self.prompt else _LATER_TOKENS
        return runs.generate(self._model, prompt, tokens, cache=cache, beams=self.case.beams)

    def _conversation(self, entry: Entry) -> Prompt:
        first = self._first.sequences
        if first.dim() != 2:  # of music: rows, codebooks, tokens
            raise ValueError(f"{entry.model_type} takes prompts of one id, so there is no second turn")
        generator = torch.Generator().manual_seed(1)
        more = inputs.random_ids(first.shape[0], _MORE_TOKENS, generator)
        return self.prompt.continued(torch.cat((first, more), dim=1))


def one_line(error: BaseException) -> str:
    """An error as a cell of a table; those of PagedCache need no name."""
    name = "" if is_refusal(error) else f"{type(error).__name__}: "
    return textwrap.shorten(name + str(error), 300, placeholder=" …")


def is_refusal(error: BaseException) -> bool:
    """Whether PagedCache raised an error on purpose."""
    return isinstance(error, Exception) and type(error).__module__.startswith("hf_paged_cache")


def _is_written(cache: Any) -> bool:
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return any(
        getattr(layer, "is_initialized", False)
        or any(getattr(layer, "is_conv_states_initialized", {}).values())  # keeps no K and V
        for layer in cache.layers
    )
