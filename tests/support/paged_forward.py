"""Drives a model directly: sequences with block tables of their own, any mix of chunks in one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_svc.model.interface import ForwardBatch, Model


@dataclass
class PagedSequence:
    """Token ids, how many of them are in the cache, and the sequence's blocks in order."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0


@dataclass
class PagedRunner:
    """A KV cache and its free blocks, handed out in the given (shuffled) order; block 0 is never used."""

    model: Model
    block_size: int
    free_blocks: list[int]
    kv_cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.kv_cache = self.model.allocate_kv_cache(max(self.free_blocks) + 1, self.block_size)

    def sequence(self, token_ids: Sequence[int]) -> PagedSequence:
        return PagedSequence(list(token_ids), [])

    def forward(self, work: Sequence[tuple[PagedSequence, int]], *, all_logits: bool = False) -> torch.Tensor:
        """Computes the next n tokens of each sequence; logits of all of them, or of the last of each."""
        tokens, positions, slots, starts, lengths, wanted = [], [], [], [0], [], []
        for sequence, count in work:
            end = sequence.num_computed + count
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free_blocks.pop(0))
            for position in range(sequence.num_computed, end):
                tokens.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(tokens))
            wanted += range(starts[-2], starts[-1]) if all_logits else [len(tokens) - 1]
            lengths.append(end)
            sequence.num_computed = end
        width = max(len(sequence.blocks) for sequence, _ in work)
        tables = torch.zeros((len(work), width), dtype=torch.int32)
        for row, (sequence, _) in enumerate(work):
            tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
        device = self.model.device
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            logits_indices=torch.tensor(wanted, device=device),
            max_query_len=max(count for _, count in work),
            max_seq_len=max(lengths),
        )
        return self.model.forward(batch, self.kv_cache)

    def greedy(self, token_ids: Sequence[int], max_tokens: int, eos: int | None) -> list[int]:
        """Continues one prompt with the most likely tokens, the end token included."""
        sequence = self.sequence(token_ids)
        logits = self.forward([(sequence, len(sequence.token_ids))])
        output: list[int] = []
        while True:
            output.append(int(logits[0].argmax()))
            if len(output) == max_tokens or output[-1] == eos:
                self.free_blocks += sequence.blocks
                return output
            sequence.token_ids.append(output[-1])
            logits = self.forward([(sequence, 1)])
