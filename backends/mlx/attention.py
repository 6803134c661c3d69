"""Attention of one group of rows over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class GroupInputs:
    """`GroupArrays` on the device, where shapes and meaning are explained. R rows, Q queries, B blocks."""

    queries: mx.array
    positions: mx.array
    context_lens: mx.array
    tables: mx.array


def attend_group(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    group: GroupInputs,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> mx.array:
    """Causal grouped-query attention.

    Args:
        q: [R * Q, heads, head_dim].
        keys, values: a layer's pool, [num_blocks + 1, kv_heads, block_size, head_dim].

    Returns:
        [R * Q, heads, head_dim].
    """
    num_rows, num_queries = group.positions.shape
    heads = q.reshape(num_rows, num_queries, *q.shape[1:]).swapaxes(1, 2)
    k = _gather(keys, group.tables).astype(q.dtype)
    # A weight of zero doesn't silence a NaN, and slots that nothing has written yet may hold one.
    written = mx.arange(k.shape[2]) < group.context_lens[:, None]  # [R, C]
    v = mx.where(written[:, None, :, None], _gather(values, group.tables).astype(q.dtype), 0)
    mask = _visible(group.positions, k.shape[2], window)
    if soft_cap is None:
        mixed = mx.fast.scaled_dot_product_attention(heads, k, v, scale=scale, mask=mask)
    else:
        mixed = _soft_capped(heads, k, v, mask=mask, scale=scale, soft_cap=soft_cap)
    return mixed.swapaxes(1, 2).reshape(q.shape)


def _gather(pool: mx.array, tables: mx.array) -> mx.array:
    """The contexts of rows, [R, kv_heads, B * block_size, head_dim], out of a layer's pool."""
    num_heads, block_size, head_dim = pool.shape[1:]
    runs = tables[:, None] * num_heads + mx.arange(num_heads)[:, None]  # [R, kv_heads, B]
    taken = mx.take(pool.reshape(-1, block_size * head_dim), runs, axis=0)
    return taken.reshape(*runs.shape[:2], -1, head_dim)


def _visible(positions: mx.array, num_positions: int, window: int | None) -> mx.array:
    """bool[R, 1, Q, C]: which positions of its row each query attends to."""
    at = mx.arange(num_positions)
    last = positions[:, None, :, None]
    visible = at <= last
    return visible if window is None else visible & (at > last - window)


def _soft_capped(
    q: mx.array, k: mx.array, v: mx.array, *, mask: mx.array, scale: float, soft_cap: float
) -> mx.array:
    """[R, heads, Q, head_dim], for which MLX has no fused kernel."""
    num_rows, num_heads, num_queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    shared = q.reshape(num_rows, num_kv_heads, -1, head_dim)  # query heads of a kv head after each other
    scores = (shared @ k.swapaxes(-1, -2)) * scale
    scores = mx.tanh(scores / soft_cap) * soft_cap
    by_head = scores.reshape(num_rows, num_heads, num_queries, -1)
    weights = mx.softmax(mx.where(mask, by_head, -float("inf")), axis=-1, precise=True)
    return (weights.reshape(scores.shape) @ v).reshape(q.shape)
