"""A tiny random Llama and a byte-level tokenizer: the harness end to end in a second or two."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.core.models import LoadedModel

TEMPLATE = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}<answer>"
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text) for text in ("<end>", "<pad>", "<user>", "<answer>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
        padding_side="left",
    )


def tiny_model(tokenizer: Any, context: int = 4096) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    # Every memory gauge collects garbage first, and would walk all objects of the libraries each time.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # A tiny model gains nothing from a second thread and waits long for it on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def loaded() -> LoadedModel:
    tokenizer = tiny_tokenizer()
    return LoadedModel(tiny_model(tokenizer), tokenizer, torch.device("cpu"), "tiny")


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    folder = tmp_path / "tiny"
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
