"""Attention layers without a model: K and V of many layers, and the function that attends them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.bench.models.workload import SEED, check, dtype_name, remove_last
from eval.core.hardware import CPU, Device
from eval.core.table import WrongAnswer
from eval.core.timing import Contender
from hf_paged_cache.config import KVCacheDtype
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import Attention, LayerBlocks, RowLengths
from hf_paged_cache.store.pool_tensors import PoolShape, PoolTensors

_SPARE_TOKENS = 64
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Heads of one attention layer."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


SMOLLM2 = Shape("SmolLM2-135M", 9, 3, 64)
LLAMA_3_8B = Shape("Llama-3-8B", 32, 8, 128)


@dataclass(frozen=True)
class Case:
    """One thing to measure: a step that attends `tokens` tokens, the new one included."""

    shape: Shape
    batch: int
    dtype: torch.dtype
    tokens: int
    least_bits: float | None = None  # per value of the smallest contender, if fewer than the dtype has
    device: Device = CPU

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one layer attends."""
        shape = self.shape
        return 2 * self.batch * shape.kv_heads * self.tokens * shape.head_dim * self.dtype.itemsize

    @property
    def layers(self) -> int:
        """Layers to go round, so that K and V come from memory and not from the processor's caches."""
        bits = 8 * self.dtype.itemsize
        least_bytes = int(self.kv_bytes * (self.least_bits or bits) / bits)
        return max(2, -(-4 * self.device.cache_bytes() // least_bytes))

    def random(self, *heads_and_tokens: tuple[int, int], seed: int = SEED) -> list[torch.Tensor]:
        """States `[batch, heads, tokens, head_dim]` as projections leave them: the middle two swapped."""
        where = self.device.torch_device
        generator = torch.Generator(where).manual_seed(seed)
        return [
            torch.randn(self.batch, tokens, heads, self.shape.head_dim, generator=generator, device=where)
            .to(self.dtype)
            .transpose(1, 2)
            for heads, tokens in heads_and_tokens
        ]

    def __str__(self) -> str:
        return f"{self.shape.name}, batch {self.batch}, {dtype_name(self.dtype)}, {self.tokens} tokens"


class Stack:
    """The layers of one contender. `step` is a decode step of all of them, one after the other."""

    def __init__(self, name: str, case: Case, layers: int) -> None:
        self.name, self.case, self.layers = name, case, layers
        self.scaling = case.shape.head_dim**-0.5
        sizes = ((heads, 1) for heads in (case.shape.q_heads, case.shape.kv_heads, case.shape.kv_heads))
        self.query, self.keys, self.values = case.random(*sizes)

    def attend(self, layer_idx: int) -> torch.Tensor:
        """The new token of one layer: write, attend. `[batch, 1, q_heads, head_dim]`."""
        raise NotImplementedError

    def stored(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that the step before has attended, `[kv_heads, tokens, head_dim]`."""
        raise NotImplementedError

    def step(self) -> None:
        """The new token of every layer."""
        for layer_idx in range(self.layers):
            self.attend(layer_idx)

    def restore(self, steps: int) -> None:
        """Take the last tokens back."""

    def contender(self) -> Contender:
        """The stack, to be timed."""
        return Contender(self.name, self.step, self.restore)


class LayerStack(Stack):
    """The layers of a cache, with the attention function that a model would call."""

    def __init__(
        self,
        name: str,
        case: Case,
        cache: Any,
        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"],
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__(name, case, len(cache.layers))
        self.cache, self.attention, self.mask = cache, attention, mask
        groups = case.shape.q_heads // case.shape.kv_heads
        # What attention functions read of a layer.
        self.modules = [
            SimpleNamespace(num_key_value_groups=groups, is_causal=True, layer_idx=index, training=False)
            for index in range(self.layers)
        ]

    def attend(self, layer_idx: int) -> torch.Tensor:
        """Through the cache."""
        keys, values = self.cache.update(self.keys, self.values, layer_idx)
        inputs = (self.modules[layer_idx], self.query, keys, values, self.mask)
        output: torch.Tensor = self.attention(*inputs, dropout=0.0, scaling=self.scaling)[0]
        return output

    def stored(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache gives back."""
        layer = self.cache.layers[layer_idx]
        return layer.keys[row], layer.values[row]

    def restore(self, steps: int) -> None:
        """Crop."""
        remove_last(self.cache, steps)


class BlockStack(Stack):
    """The kernels alone, over one pool with shuffled blocks: the new token is written anew at every step."""

    def __init__(self, case: Case) -> None:
        super().__init__("blocks", case, case.layers)
        shape, where = case.shape, case.device.torch_device
        num_blocks = case.batch * -(-case.tokens // BLOCK_SIZE)
        heads = PoolShape(shape.kv_heads, shape.head_dim, shape.head_dim, case.dtype, where)
        pool = PoolTensors(heads, num_blocks=num_blocks, num_layers=self.layers, block_size=BLOCK_SIZE)
        generator = torch.Generator(where).manual_seed(SEED)
        keys, values = (states.normal_(generator=generator) for states in pool.tensors)
        order = torch.randperm(num_blocks, generator=generator, device=where)
        table = order.to(torch.int32).view(case.batch, -1).contiguous()
        lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=where)
        layers = zip(keys.unbind(1), values.unbind(1), strict=True)
        self.blocks = [LayerBlocks(*layer, table, RowLengths(case.tokens, lengths)) for layer in layers]
        self.last_output = torch.empty(0)

    def attend(self, layer_idx: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """By the dispatcher."""
        blocks, tokens = self.blocks[layer_idx], self.case.tokens
        dispatch.write(blocks, self.keys, self.values, tokens - 1)
        return dispatch.decode(blocks, Attention(self.query, 0, tokens, self.scaling, mask))[0]

    def step(self, mask: torch.Tensor | None = None) -> None:
        """The new token of every layer."""
        for layer_idx in range(self.layers):
            self.last_output = self.attend(layer_idx, mask)

    def stored(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens before, and the new one as it should have been written."""
        blocks = self.blocks[layer_idx]
        one_row = LayerBlocks(blocks.keys, blocks.values, blocks.table[row : row + 1])
        keys, values = reference.gather(one_row, 0, self.case.tokens - 1)
        return torch.cat((keys[0], self.keys[row]), dim=1), torch.cat((values[0], self.values[row]), dim=1)

    def error(self, step: Callable[[], object], tolerance: float) -> float:
        """RMS error ratio of the last layer after a step, which has to write everything; `WrongAnswer`."""
        blocks, last = self.blocks[-1], self.case.tokens - 1
        ids = blocks.table[:, last // BLOCK_SIZE].long()
        for pool in (blocks.keys, blocks.values):
            pool[ids, :, last % BLOCK_SIZE] = torch.nan
        self.last_output.fill_(torch.nan)
        step()
        want = _exact(self, self, self.layers - 1)
        return check(f"{self.name}, {self.case}", self.last_output, want, tolerance)


def fill(stacks: list[LayerStack]) -> list[LayerStack]:
    """Give all stacks of one case the same random K and V of `case.tokens - 1` tokens."""
    case = stacks[0].case
    states = (case.shape.kv_heads, case.tokens - 1)
    for layer_idx in range(max(stack.layers for stack in stacks)):
        keys, values = (x.contiguous() for x in case.random(states, states, seed=SEED + layer_idx))
        for stack in (stack for stack in stacks if layer_idx < stack.layers):
            stack.cache.update(keys, values, layer_idx)
    return stacks


def filled(case: Case) -> list[LayerStack]:
    """The caches of transformers and a `PagedCache`, all with one content."""
    length = case.tokens + _SPARE_TOKENS
    mask = (torch.arange(length) < case.tokens).expand(case.batch, 1, 1, length)  # as `generate` makes it
    static = StaticCache(config=config_of(case), max_cache_len=length)
    return fill([dynamic(case), LayerStack("static", case, static, mask=mask), paged(case)])


def dynamic(case: Case) -> LayerStack:
    """A `DynamicCache`, empty, with SDPA."""
    return LayerStack("dynamic", case, DynamicCache(config=config_of(case)))


def paged(case: Case, kv_cache_dtype: KVCacheDtype = "auto") -> LayerStack:
    """A `PagedCache`, empty."""
    from hf_paged_cache import PagedCache

    config = config_of(case)
    tokens = case.batch * BLOCK_SIZE * -(-(case.tokens + _SPARE_TOKENS) // BLOCK_SIZE)
    cache = PagedCache(config, block_size=BLOCK_SIZE, max_tokens=tokens, kv_cache_dtype=kv_cache_dtype)
    name = "paged" if kv_cache_dtype == "auto" else kv_cache_dtype
    return LayerStack(name, case, cache, ALL_ATTENTION_FUNCTIONS[config._attn_implementation])


def config_of(case: Case, layers: int | None = None) -> LlamaConfig:
    """A model with such layers, of which there are `case.layers` unless said otherwise."""
    shape = case.shape
    config = LlamaConfig(
        hidden_size=shape.q_heads * shape.head_dim,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=case.layers if layers is None else layers,
        max_position_embeddings=2 * case.tokens,
    )
    config._attn_implementation = "sdpa"
    return config


def errors_of(stacks: list[Any], tolerance: float, expected: Stack | None = None) -> dict[str, float]:
    """RMS error ratio of each stack's step in its first and last layer; of its own K and V or `expected`."""
    errors = {stack.name: 0.0 for stack in stacks}
    for layer_idx in sorted({0, *(stack.layers - 1 for stack in stacks)}):
        answers = [(stack, stack.attend(layer_idx)) for stack in stacks if layer_idx < stack.layers]
        for stack, got in answers:
            if stack.name == "stock":  # gives nothing back but to attention itself
                if not got.isfinite().all():
                    raise WrongAnswer("the stock cache's attention holds NaN or infinity")
                continue
            want = _exact(stack, expected or stack, layer_idx)
            error = check(f"{stack.name} cache, {stack.case}", got, want, tolerance)
            errors[stack.name] = max(errors[stack.name], error)
    for stack in stacks:
        for layer_idx in set(range(stack.layers)) - {0, *(other.layers - 1 for other in stacks)}:
            stack.attend(layer_idx)  # a step is one of all layers
        stack.restore(1)
    return errors


def _exact(stack: Stack, expected: Stack, layer_idx: int) -> torch.Tensor:
    """Attention `[batch, 1, q_heads, head_dim]` in float64, a row at a time so that the copies stay small."""
    shape = stack.case.shape
    outputs = []
    for row in range(stack.case.batch):
        keys, values = (states.double() for states in expected.stored(layer_idx, row))
        query = stack.query[row].double().view(shape.kv_heads, -1, shape.head_dim)
        weights = (query @ keys.transpose(1, 2) * stack.scaling).softmax(dim=-1)
        outputs.append((weights @ values).view(1, shape.q_heads, -1))
    return torch.stack(outputs)
