"""Paged causal attention in plain PyTorch.

Sequences with one new token are computed together, in groups of similar length; the others one after another, in
tiles of queries. Keys and values are gathered through the block table first. Invariant: positions past a
sequence's length, and keys outside its window, have no influence whatever they hold.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_svc.model.interface import ForwardBatch
from engine_svc.model.ops import AttentionSpec

# Bounds the score matrix of a soft-capped tile, and what a group of decodes may gather for nothing.
_QUERY_TILE = 256
_SMALLEST_GROUP_LENGTH = 256


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with its new tokens at rows [start, stop) and the positions [length - (stop - start), length)."""

    start: int
    stop: int
    length: int
    # [num_blocks of the sequence] int64.
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one new token each: their rows, lengths [n] and blocks [n, num_blocks of the longest]."""

    rows: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a step's queries are grouped; the same for all layers."""

    chunks: tuple[_Chunk, ...]
    decodes: tuple[_Decodes, ...]


def make_plan(batch: ForwardBatch, block_size: int) -> AttentionPlan:
    """Groups the sequences of a batch. Reads lengths on the host, so it waits for the device once."""
    starts = batch.query_start.tolist()
    lengths = batch.seq_lens.tolist()
    block_tables = batch.block_tables.to(torch.int64)
    chunks: list[_Chunk] = []
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if starts[i + 1] - starts[i] == 1:
            groups.setdefault(_group(length), []).append(i)
        elif starts[i + 1] > starts[i]:
            blocks = block_tables[i, : math.ceil(length / block_size)]
            chunks.append(_Chunk(starts[i], starts[i + 1], length, blocks))
    return AttentionPlan(
        tuple(chunks),
        tuple(_decodes(batch, block_tables, members, lengths, block_size) for members in groups.values()),
    )


def _group(length: int) -> int:
    return max(_SMALLEST_GROUP_LENGTH, 1 << (length - 1).bit_length())


def _decodes(
    batch: ForwardBatch, block_tables: torch.Tensor, members: list[int], lengths: list[int], block_size: int
) -> _Decodes:
    index = torch.tensor(members, device=block_tables.device)
    max_length = max(lengths[i] for i in members)
    return _Decodes(
        rows=batch.query_start[index].to(torch.int64),
        lengths=batch.seq_lens[index].to(torch.int64),
        blocks=block_tables[index, : math.ceil(max_length / block_size)],
        max_length=max_length,
    )


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> torch.Tensor:
    """Attention of one layer.

    `query` is [num_tokens, num_heads, head_dim], `keys` and `values` the layer's cache [num_blocks, block_size,
    num_kv_heads, head_dim]; the result has the query's shape, with the head size of the values.
    """
    output = query.new_empty((*query.shape[:2], values.shape[-1]))
    for group in plan.decodes:
        output[group.rows] = _attend_decodes(query[group.rows], keys, values, spec, group)
    for chunk in plan.chunks:
        key, value = (_gather(cache, chunk.blocks)[: chunk.length] for cache in (keys, values))
        for start in range(chunk.start, chunk.stop, _QUERY_TILE):
            stop = min(start + _QUERY_TILE, chunk.stop)
            # Keys after the tile's last query are left out rather than masked.
            seen = chunk.length - (chunk.stop - stop)
            output[start:stop] = _attend_tile(query[start:stop], key[:seen], value[:seen], spec)
    return output


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks in order, [..., num_blocks] -> [..., num_blocks * block_size, num_kv_heads, head_dim]."""
    flat = cache.index_select(0, blocks.reshape(-1))
    return flat.reshape(*blocks.shape[:-1], blocks.shape[-1] * cache.shape[1], *cache.shape[2:])


def _attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, group: _Decodes
) -> torch.Tensor:
    """One query a sequence: the heads that share keys are the queries of one product."""
    key = _gather(keys, group.blocks)[:, : group.max_length].transpose(1, 2)
    value = _gather(values, group.blocks)[:, : group.max_length].transpose(1, 2)
    positions = torch.arange(group.max_length, device=query.device)
    lengths = group.lengths.unsqueeze(1)
    visible = positions < lengths
    if spec.sliding_window is not None:
        visible &= positions >= lengths - spec.sliding_window
    # Weight 0 does not hide a NaN in a value of a stale block, so padding is cleared.
    key = key.masked_fill(~visible[:, None, :, None], 0)
    value = value.masked_fill(~visible[:, None, :, None], 0)
    grouped = query.reshape(query.shape[0], spec.num_kv_heads, -1, query.shape[-1])
    return _softmax_product(grouped, key, value, visible[:, None, None, :], spec).flatten(1, 2)


def _attend_tile(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Queries at the last positions of [num_keys, num_kv_heads, head_dim] keys."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    first_key = 0
    if spec.sliding_window is not None:
        first_key = max(0, num_keys - num_queries - spec.sliding_window + 1)
        key, value = key[first_key:], value[first_key:]
    last = torch.arange(num_keys - num_queries, num_keys, device=query.device).unsqueeze(1)
    positions = torch.arange(first_key, num_keys, device=query.device)
    visible = positions <= last
    if spec.sliding_window is not None:
        visible &= positions > last - spec.sliding_window
    grouped = query.reshape(query.shape[0], spec.num_kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
    shape = (-1, grouped.shape[1], -1, -1)
    key = key.permute(1, 0, 2).unsqueeze(1).expand(shape)
    value = value.permute(1, 0, 2).unsqueeze(1).expand(shape)
    return _softmax_product(grouped, key, value, visible, spec).permute(2, 0, 1, 3).flatten(1, 2)


def _softmax_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """softmax(cap(scale * query @ key.T)) @ value over the visible keys, softmax in float32."""
    if spec.soft_cap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=spec.scale)
    scores = (query @ key.transpose(-1, -2)) * spec.scale
    scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value
