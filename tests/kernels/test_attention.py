"""Rotary embedding, cache and paged attention against the reference, bit for bit the same in every batch."""

import random
from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.interface import ForwardBatch  # noqa: E402 - after importorskip
from engine_svc.model.ops import AttentionSpec, KVCacheShape, NormWeight, RotaryTable  # noqa: E402
from engine_svc.model.reference_ops import ReferenceOps  # noqa: E402
from tests.support.kernel_variants import VARIANTS, poison, poisoned_ops  # noqa: E402

pytestmark = pytest.mark.model

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
NUM_LAYERS = 2
NUM_BLOCKS = 400


def spec(num_heads: int, num_kv_heads: int, head_dim: int, **options) -> AttentionSpec:
    fields = {"layer": 1, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return AttentionSpec(**(fields | {"scale": head_dim**-0.5} | options))


def norms(head_dim: int, heads: tuple[int, int], per_head: bool) -> dict:
    weights = [torch.rand(head_dim * (1 if per_head else count)) + 0.5 for count in heads]
    q_norm, k_norm = (NormWeight(weight=weight, eps=1e-6) for weight in weights)
    return {"q_norm": q_norm, "k_norm": k_norm, "qk_norm_per_head": per_head}


SPECS = {
    "gqa": spec(9, 3, 64),
    "mha": spec(2, 2, 80),
    "mqa": spec(4, 1, 96, sliding_window=30),
    "wide": spec(4, 1, 256, sliding_window=140, **norms(256, (4, 1), True)),
    "capped": spec(4, 2, 128, soft_cap=2.0, scale=0.3),
    "many": spec(64, 1, 16),
    "norm over all": spec(4, 2, 24, soft_cap=1.5, sliding_window=17, **norms(24, (4, 2), False)),
}


@dataclass
class Sequences:
    """Inputs of several sequences, and which blocks hold each."""

    qkv: list[torch.Tensor]
    blocks: list[list[int]]
    block_size: int

    def batch(self, work: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ForwardBatch]:
        """The step that computes positions [start, stop) of sequences, as (sequence, start, stop)."""
        positions, slots, starts = [], [], [0]
        for index, start, stop in work:
            for position in range(start, stop):
                block = self.blocks[index][position // self.block_size]
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(positions))
        width = max(-(-stop // self.block_size) for _, _, stop in work)
        tables = torch.zeros((len(work), width), dtype=torch.int32)
        for row, (index, _, stop) in enumerate(work):
            used = self.blocks[index][: -(-stop // self.block_size)]
            tables[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([stop for _, _, stop in work], dtype=torch.int32),
            block_tables=tables,
            logits_indices=torch.zeros(0, dtype=torch.int64),
            max_query_len=max(stop - start for _, start, stop in work),
            max_seq_len=max(stop for _, _, stop in work),
        )
        return torch.cat([self.qkv[index][start:stop] for index, start, stop in work]), batch


def make_sequences(attention: AttentionSpec, lengths: tuple[int, ...], block_size: int, dtype) -> Sequences:
    generator = torch.Generator().manual_seed(block_size)
    width = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    free = list(range(1, NUM_BLOCKS))
    random.Random(block_size).shuffle(free)
    qkv = [torch.randn((length, width), generator=generator).to(dtype) for length in lengths]
    blocks = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
    return Sequences(qkv, blocks, block_size)


def rope(attention: AttentionSpec) -> RotaryTable:
    # A part of each head passes unrotated.
    half = attention.head_dim // 4
    return RotaryTable(1.0 / 100.0 ** (torch.arange(half) / half), 1.1)


class Runner:
    """Rotary embedding and attention of an op set over a cache full of NaN."""

    def __init__(self, ops, attention: AttentionSpec, sequences: Sequences, dtype) -> None:
        self.ops, self.attention, self.sequences = ops, attention, sequences
        shape = KVCacheShape(
            num_layers=NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=sequences.block_size,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
        )
        self.cache = ops.allocate_kv_cache(shape, dtype, torch.device("cpu"))
        poison(self.cache, dtype)

    def step(self, work: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        qkv, batch = self.sequences.batch(work)
        step = self.ops.begin_step(batch, [rope(self.attention)], self.cache)
        query = self.ops.rotary_and_cache(qkv, self.attention, step)
        out = self.ops.paged_attention(query, self.attention, step)
        return list(out.split([stop - start for _, start, stop in work]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(variant, name, dtype) -> None:
    ops, attention = poisoned_ops(variant), SPECS[name]
    for block_size, lengths in ((16, (150, 1, 33)), (48, (300, 128)), (128, (40, 17))):
        sequences = make_sequences(attention, lengths, block_size, dtype)
        exact = Sequences([part.float() for part in sequences.qkv], sequences.blocks, block_size)
        prompts = [(index, 0, length) for index, length in enumerate(lengths)]
        expected = Runner(ReferenceOps(), attention, exact, torch.float32).step(prompts)
        whole = Runner(ops, attention, sequences, dtype).step(prompts)
        for got, want in zip(whole, expected, strict=True):
            torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        check_chunks(Runner(ops, attention, sequences, dtype), lengths, whole)


def check_chunks(runner: Runner, lengths: tuple[int, ...], whole: list[torch.Tensor]) -> None:
    """Any mix of chunks and single tokens gives the same bits as whole prompts."""
    rng = random.Random(len(lengths))
    done = [0] * len(lengths)
    while any(start < length for start, length in zip(done, lengths, strict=True)):
        work = []
        for index, length in enumerate(lengths):
            if done[index] < length and rng.random() < 0.8:
                count = 1 if rng.random() < 0.4 else rng.randint(1, 90)
                stop = min(length, done[index] + count)
                work.append((index, done[index], stop))
                done[index] = stop
        if work:
            for (index, start, stop), got in zip(work, runner.step(work), strict=True):
                assert torch.equal(got, whole[index][start:stop])


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_do_not_matter(variant) -> None:
    """A long sequence alone is split over threads, beside others it is not."""
    ops, attention = poisoned_ops(variant), replace(SPECS["gqa"], sliding_window=None)
    sequences = make_sequences(attention, (1500, *[40] * 9), 16, torch.bfloat16)
    runner = Runner(ops, attention, sequences, torch.bfloat16)
    runner.step([(index, 0, len(qkv)) for index, qkv in enumerate(sequences.qkv)])
    alone = runner.step([(0, 1499, 1500)])[0]
    beside = runner.step([(0, 1499, 1500), *((index, 39, 40) for index in range(1, 10))])[0]
    assert torch.equal(alone, beside)
