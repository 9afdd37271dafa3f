"""Every option against a NumPy computation on random logits, alone and mixed, while rows grow, come and go."""

import random

import numpy as np
import pytest
import torch

from engine_svc.core.interfaces import INVALID_TOKEN, MASKED_TOKEN, KVCacheConfig
from engine_svc.core.scheduler_output import BlockTableCells, RowAdded, SchedulerOutput
from engine_svc.executor.logits_processors import process_logits
from engine_svc.executor.row_mirror import RowMirror
from engine_svc.executor.sampler import sample
from shared.types import SamplingParams
from tests.support.options_oracle import processed
from tests.support.sampling_oracle import sample_token

VOCAB_SIZE = 40
CONFIG = KVCacheConfig(block_size=16, num_blocks=64, max_num_seqs=12, max_model_len=80, max_num_batched_tokens=64)
STOPS = (3, 7)


def ids(values) -> np.ndarray:
    return np.array(list(values), np.int32)


class Rows:
    """A row mirror, and beside it the sequences that its rows must hold."""

    def __init__(self) -> None:
        self.mirror = RowMirror(CONFIG)
        self.sequences: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}

    def change(self, *, removed=(), added=()) -> None:
        """`added` are (row, sampling, prompt, output)."""
        rows_added = tuple(
            RowAdded(
                row=row,
                request_id="r",
                token_ids=ids([*prompt, *output]),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                sampling=sampling,
                all_stop_token_ids=STOPS,
                block_ids=(ids([1]),),
            )
            for row, sampling, prompt, output in added
        )
        empty = ids([])
        cells = BlockTableCells(groups=empty, rows=empty, columns=empty, block_ids=empty)
        self.mirror.apply(
            SchedulerOutput(
                step=1,
                rows_removed=ids(removed),
                rows_added=rows_added,
                block_table_cells=cells,
                rows=empty,
                num_computed_tokens=empty,
                num_scheduled_tokens=empty,
                samples=np.zeros(0, np.bool_),
            )
        )
        for row in removed:
            del self.sequences[row]
        for row, sampling, prompt, output in added:
            self.sequences[row] = (sampling, list(prompt), list(output))

    def append(self, rows, tokens) -> None:
        self.mirror.append_sampled(ids(rows), ids(tokens))
        for row, token in zip(rows, tokens, strict=True):
            self.sequences[row][2].append(token)

    def expected(self, rows, logits: np.ndarray) -> np.ndarray:
        return np.stack([processed(one, *self.sequences[row], STOPS) for row, one in zip(rows, logits, strict=True)])

    def processed(self, rows, logits: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(logits.copy())
        process_logits(tensor, self.mirror.sampling_batch(ids(rows)))
        return tensor.numpy()


def random_logits(rng: random.Random, rows: int) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).normal(0, 4, (rows, VOCAB_SIZE)).astype(np.float32)


def random_words(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.choices(range(6), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 6)))


# Few different tokens, so that sequences repeat themselves.
MAKERS = {
    "presence_penalty": lambda rng: rng.choice([-2.0, -0.3, 0.7, 2.0]),
    "frequency_penalty": lambda rng: rng.choice([-1.5, 0.25, 2.0]),
    "repetition_penalty": lambda rng: rng.choice([0.5, 1.3, 10.0]),
    "logit_bias": lambda rng: tuple((token, rng.uniform(-100, 100)) for token in rng.sample(range(VOCAB_SIZE), 5)),
    "bad_words": random_words,
    "allowed_token_ids": lambda rng: tuple(rng.sample(range(VOCAB_SIZE), rng.choice([1, 6, VOCAB_SIZE]))),
    "min_tokens": lambda rng: rng.choice([2, 30]),
}


def random_sampling(rng: random.Random, names) -> SamplingParams:
    return SamplingParams(
        max_tokens=50,
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_k=rng.choice([0, 3]),
        **{name: MAKERS[name](rng) for name in names},
    )


def random_row(rng: random.Random, row: int, names) -> tuple:
    prompt = rng.choices(range(8), k=rng.randint(1, 10))
    output = rng.choices(range(6), k=rng.choice([0, 0, 1, 8]))
    return row, random_sampling(rng, names), prompt, output


def check_history(rng: random.Random, names_of_a_row) -> None:
    """Rows come, sample in random groups and orders, and go; logits and tokens are checked in every step."""
    rows = Rows()
    for _ in range(40):
        free = [row for row in range(CONFIG.max_num_seqs) if row not in rows.sequences]
        removed = [row for row in rows.sequences if rng.random() < 0.08 or len(rows.sequences[row][2]) > 45]
        # A row that is given back may be taken again in the same step.
        taken = rng.sample(free + removed, min(rng.randint(0, 3), len(free + removed)))
        rows.change(removed=removed, added=[random_row(rng, row, names_of_a_row(rng)) for row in taken])
        chosen = rng.sample(sorted(rows.sequences), rng.randint(0, len(rows.sequences)))
        logits = random_logits(rng, len(chosen))
        if not chosen:
            continue
        expected = rows.expected(chosen, logits)
        np.testing.assert_array_equal(rows.processed(chosen, logits), expected)
        tokens = sample(torch.from_numpy(logits.copy()), rows.mirror.sampling_batch(ids(chosen))).tolist()
        for row, token, one in zip(chosen, tokens, expected, strict=True):
            sampling, _, output = rows.sequences[row]
            kept = {"temperature": sampling.temperature, "top_k": sampling.top_k}
            if np.isneginf(one).all():
                assert token == MASKED_TOKEN
            else:
                assert token == sample_token(one, seed=sampling.seed, output_index=len(output), **kept)
        # What was sampled, or something that repeats.
        rows.append(chosen, [max(0, token) if rng.random() < 0.5 else rng.randrange(6) for token in tokens])


@pytest.mark.parametrize("name", MAKERS)
def test_one_option_against_numpy(name):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    check_history(random.Random(seed), lambda rng: [name])


def test_mixed_rows_against_numpy():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    names = list(MAKERS)
    for _ in range(4):
        check_history(random.Random(seed), lambda rng: rng.sample(names, rng.choice([0, 0, 1, 2, len(names)])))
        seed += 1


def test_options_leave_the_other_rows_alone():
    rng = random.Random(4)
    rows = Rows()
    rows.change(added=[random_row(rng, row, list(MAKERS) if row == 1 else []) for row in range(3)])
    logits = random_logits(rng, 3)
    changed = rows.processed([0, 1, 2], logits)
    assert (changed[[0, 2]] == logits[[0, 2]]).all()
    assert (changed[1] != logits[1]).any()
    alone = rows.processed([1], logits[1:2])
    assert (alone[0] == changed[1]).all()


def test_rows_without_options_have_no_options_batch():
    rng = random.Random(4)
    rows = Rows()
    rows.change(added=[random_row(rng, row, []) for row in range(3)])
    assert rows.mirror.sampling_batch(ids([0, 1, 2])).options is None
    assert rows.mirror.options.logprobs_wanted(ids([0, 1, 2])) == []
    assert not rows.mirror.options.reads_prompts


def test_a_row_that_may_sample_nothing_fails_alone():
    rows = Rows()
    impossible = SamplingParams(max_tokens=9, min_tokens=5, allowed_token_ids=STOPS)
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    rows.change(added=[(0, plain, [1], []), (1, impossible, [1], []), (2, plain, [1], [])])
    logits = random_logits(random.Random(2), 3)
    logits[2, 4] = np.nan
    tokens = sample(torch.from_numpy(logits.copy()), rows.mirror.sampling_batch(ids([0, 1, 2]))).tolist()
    assert tokens == [int(logits[0].argmax()), MASKED_TOKEN, INVALID_TOKEN]


def test_an_allowed_token_may_be_biased_and_penalised():
    rows = Rows()
    sampling = SamplingParams(
        max_tokens=9, allowed_token_ids=(5,), logit_bias=((5, -2.0), (6, 100.0)), repetition_penalty=2.0
    )
    rows.change(added=[(0, sampling, [5, 6], [5])])
    changed = rows.processed([0], np.ones((1, VOCAB_SIZE), np.float32))
    assert changed[0, 5] == -2.0
    assert np.isneginf(np.delete(changed[0], 5)).all()


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_penalties_of_any_size_leave_finite_logits(penalty):
    rows = Rows()
    rows.change(added=[(0, SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=penalty), [5, 6], [])])
    logits = random_logits(random.Random(2), 1)
    assert np.isfinite(rows.processed([0], logits)).all()
    assert sample(torch.from_numpy(logits), rows.mirror.sampling_batch(ids([0])))[0] >= 0
