"""What the model runner needs of a model; the border between executor and model rooms.

A model knows tensors and its own KV cache. It does not know requests, rows, sampling or scheduling.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_svc.core.interfaces import KVCacheSpec, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward pass over `num_seqs` sequences with `num_tokens` new tokens in all, sequence after sequence.

    Keys and values of the new tokens are written to their slots first, for all tokens of a layer; then every query
    at position p attends to the keys at positions 0..p of its sequence, read through the block table.
    All tensors are on the model's device.
    """

    # [num_tokens] int64 and int32: ids, and positions within their sequence.
    token_ids: torch.Tensor
    positions: torch.Tensor
    # [num_tokens] int64: block_id * block_size + offset.
    slot_mapping: torch.Tensor
    # [num_seqs + 1] int32: where each sequence's new tokens start.
    query_start: torch.Tensor
    # [num_seqs] int32: tokens of each sequence including the new ones.
    seq_lens: torch.Tensor
    # [num_seqs, max_blocks] int32; entries past a sequence's blocks are 0.
    block_tables: torch.Tensor
    # [num_logits] int64: which of the new tokens need logits.
    logits_indices: torch.Tensor
    # Largest number of new tokens and of tokens of any sequence, as numbers so that nothing waits for the device.
    max_query_len: int
    max_seq_len: int


class Model(Protocol):
    """A causal language model with a paged KV cache."""

    @property
    def info(self) -> ModelInfo:
        """Sizes, end tokens, dtype and numerics."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """KV needs, one entry a group."""

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> Any:
        """Makes an empty KV cache of this model's own kind."""

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """Runs the batch and returns float32 logits [num_logits, vocab_size]."""

    def hidden_states(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        """Runs the batch and returns what the logits are made of, [num_logits, hidden_size] after the final norm."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits of hidden states; together with `hidden_states` the same as `forward`."""
