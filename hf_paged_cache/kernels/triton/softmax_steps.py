"""Parts of the attention kernel: ranges of tokens, masks, the online softmax, and what is left in memory."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

NO_MASK: tl.constexpr = tl.constexpr(0)
BOOL_MASK: tl.constexpr = tl.constexpr(1)
ADDITIVE_MASK: tl.constexpr = tl.constexpr(2)


@triton.jit
def _tanh(x):
    """Accurate for small x too, where 1 - exp(-2x) would cancel."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def part_pointers(part_ptr, splits, rows, V_HEAD_DIM: tl.constexpr):
    """Where the maxima of the scores, and where the sums of the weights begin in what splits leave.

    That is one piece of memory: sums of values, not yet divided, `[splits, rows, v_head_dim]`; maxima
    `[splits, rows]`; sums of weights `[splits, rows]`. A row is a query of a head of the batch.
    """
    maxima = part_ptr + tl.cast(splits, tl.int64) * rows * V_HEAD_DIM
    return maxima, maxima + tl.cast(splits, tl.int64) * rows


@triton.jit
def stored_range(lengths_ptr, offsets_ptr, b, start, back, PADDED: tl.constexpr):
    """Where in a row columns `[start, length - back)` are stored, and where column 0 of the mask would be.

    The latter is below 0 where the row begins later.
    """
    end = tl.load(lengths_ptr + b) - back
    mask_start = start
    if PADDED:
        offset = tl.load(offsets_ptr + b)
        end -= offset
        mask_start -= offset
        start = tl.maximum(mask_start, 0)
    return start, end, mask_start


@triton.jit
def tokens_in_sight(start, end, first_query, last_query, window, RULES: tl.constexpr):
    """The tokens that queries at positions `[first_query, last_query]` may see of `[start, end)`."""
    low, high = start, end
    if RULES.window:
        low = tl.maximum(low, first_query - window + 1)
    if RULES.causal:
        high = tl.minimum(high, last_query + 1)
    return low, high


@triton.jit
def masked_scores(
    score,
    visible,
    token,
    position,
    tile_mask,  # [N], the mask where it is the same for all queries
    mask_ptr,
    mask_offsets,
    mask_columns,
    window,
    RULES: tl.constexpr,
):
    """The scores `[M, N]` with the mask, -inf where a query does not see a token, and what is visible."""
    if RULES.causal:
        visible = visible & (token[None, :] <= position[:, None])
    if RULES.window:
        visible = visible & (token[None, :] > position[:, None] - window)
    if RULES.mask != NO_MASK:
        if RULES.mask_rows:
            mask = tl.load(mask_ptr + mask_offsets[:, None] + mask_columns[None, :], mask=visible, other=0)
            visible = visible & (mask != (0 if RULES.mask == BOOL_MASK else -float("inf")))
            if RULES.mask == ADDITIVE_MASK:
                score = score + mask.to(tl.float32)
        elif RULES.mask == ADDITIVE_MASK:
            score = score + tile_mask.to(tl.float32)[None, :]
    return tl.where(visible, score, -float("inf")), visible


@triton.jit
def soft_capped(score, softcap):
    """`softcap * tanh(score / softcap)`."""
    return softcap * _tanh(score / softcap)


@triton.jit
def online_update(score, row_max, row_sum):
    """A step of the online softmax: weights, the new maxima and sums, and the factor of what came before."""
    new_max = tl.maximum(row_max, tl.max(score, 1))
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight = tl.exp2((score - base[:, None]) * LOG2E)
    shrink = tl.exp2((row_max - base) * LOG2E)
    row_sum = row_sum * shrink + tl.sum(weight, 1)
    return weight, new_max, row_sum, shrink


@triton.jit
def store_part(part_ptr, acc, row_max, row_sum, row, is_query, splits, part_rows, V: tl.constexpr):
    """Leave sums for the merge, at rows `[M]`."""
    e = tl.arange(0, V.padded)
    part_max_ptr, part_sum_ptr = part_pointers(part_ptr, splits, part_rows, V.dim)
    tl.store(part_max_ptr + row, row_max, mask=is_query)
    tl.store(part_sum_ptr + row, row_sum, mask=is_query)
    written = is_query & (row_sum != 0.0)
    is_value = e[None, :] < V.dim
    tl.store(part_ptr + row[:, None] * V.dim + e[None, :], acc, mask=written[:, None] & is_value)


@triton.jit
def store_answer(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    acc,
    row_max,
    row_sum,
    b,
    q_head,
    query_index,
    q_tokens,
    is_query,
    Q_HEADS: tl.constexpr,
    V: tl.constexpr,
    RULES: tl.constexpr,
):
    """Divide sums by weights, sinks included, and store them and the log-sum-exp."""
    e = tl.arange(0, V.padded)
    if RULES.sinks:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32)
        new_max = tl.maximum(row_max, sink)
        shrink = tl.exp2((row_max - new_max) * LOG2E)
        row_sum = row_sum * shrink + tl.exp2((sink - new_max) * LOG2E)
        acc = acc * shrink[:, None]
        row_max = new_max
    nothing = row_sum == 0.0
    out = acc / tl.where(nothing, 1.0, row_sum)[:, None]
    lse = tl.where(nothing, -float("inf"), row_max + tl.log2(row_sum) / LOG2E)
    out_row = (b.to(tl.int64) * q_tokens + query_index) * Q_HEADS + q_head
    tl.store(
        out_ptr + out_row[:, None] * V.dim + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & (e[None, :] < V.dim),
    )
    row = b * Q_HEADS + q_head
    tl.store(lse_ptr + row.to(tl.int64) * q_tokens + query_index, lse, mask=is_query)
