"""Inputs of `generate`: random ids, and what some types want beside them."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from eval.zoo import sizes
from eval.zoo.registry import Entry

_FIRST_ID, _LAST_ID = 10, sizes.VOCAB - 16  # outside are the ids with a meaning
_MUSIC = ("musicgen", "musicgen_melody")


@dataclass(frozen=True)
class Prompt:
    """Arguments of `generate`."""

    arguments: dict[str, Any]  # by name
    grows: str = "input_ids"  # the argument that holds the ids which generation adds to
    mask: str = "attention_mask"  # the one that tells which of them are padding

    def continued(self, ids: torch.Tensor, *, from_token: int = 0) -> Self:
        """The same with other ids `[rows, tokens]`, those from a token on, none of them padding."""
        ids = ids[:, from_token:]
        return replace(self, arguments={**self.arguments, self.grows: ids, self.mask: torch.ones_like(ids)})


def prompt(model: Any, entry: Entry, lengths: tuple[int, ...], seed: int, decoder_tokens: int = 9) -> Prompt:
    """Random prompts, padded on the left (an encoder's, if any); `ValueError` where none can be."""
    generator = torch.Generator().manual_seed(seed)
    if entry.model_type in _MUSIC:
        return _music(model, entry, lengths, generator)
    ids = random_ids(len(lengths), max(lengths), generator)
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    ids[mask == 0] = sizes.PAD
    arguments = {"input_ids": ids, "attention_mask": mask}
    if entry.model_type == "voxtral_realtime":
        size = len(lengths), 64 * model.config.downsample_factor, model.config.audio_config.hidden_size
        arguments["encoder_inputs_embeds"] = torch.randn(size, generator=generator)
    if not model.config.is_encoder_decoder:
        return Prompt(arguments)
    decoder_ids = random_ids(len(lengths), decoder_tokens, generator)
    decoder_ids[:, 0] = sizes.START
    arguments |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": torch.ones_like(decoder_ids)}
    return Prompt(arguments, "decoder_input_ids", "decoder_attention_mask")


def random_ids(rows: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Ids `[rows, tokens]` of ordinary tokens."""
    return torch.randint(_FIRST_ID, _LAST_ID, (rows, tokens), generator=generator)


def _music(model: Any, entry: Entry, lengths: tuple[int, ...], generator: torch.Generator) -> Prompt:
    """With a cache these are fed the last id alone, and rows differ by what they are conditioned on."""
    if len(set(lengths)) > 1:
        raise ValueError("takes prompts of one id, so none to pad")
    rows = len(lengths)
    arguments = {
        "input_ids": random_ids(rows * model.config.num_codebooks, 1, generator),
        "encoder_hidden_states": torch.randn(rows, 6, model.config.hidden_size, generator=generator),
        "encoder_attention_mask": torch.ones(rows, 6, dtype=torch.long),
    }
    if entry.model_type == "musicgen_melody":
        arguments["attention_mask"] = torch.ones(rows, 1, dtype=torch.long)
    return Prompt(arguments)
