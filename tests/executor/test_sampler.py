"""Sampling: exact distributions, the kept set against NumPy, independence of the batch, masks and bad logits."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from engine_svc.core.interfaces import INVALID_TOKEN
from engine_svc.executor import sampler
from engine_svc.executor.sampler import kept_tokens, sample
from engine_svc.executor.sampling_batch import SamplingBatch
from tests.support.sampling_oracle import kept_probabilities, sample_token

DATA = Path(__file__).parents[1] / "data"


def batch_of(*rows: dict, masked=()) -> SamplingBatch:
    """A batch from a dictionary for each row; what is left out keeps everything at temperature 1."""

    def column(name, default, dtype):
        return np.array([row.get(name, default) for row in rows], dtype)

    temperature = column("temperature", 1.0, np.float64)
    return SamplingBatch(
        is_greedy=temperature < 1e-5,
        temperature=temperature,
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float64),
        seed=column("seed", 0, np.uint64),
        output_index=column("output_index", 0, np.int32),
        masked_rows=np.array([row for row, _ in masked], np.int64),
        masked_token_ids=np.array([token for _, token in masked], np.int64),
    )


def random_logits(seed: int, rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab_size)).astype(np.float32)


KINDS = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("by", ["seed", "output_index"])
def test_20000_samples_match_the_exact_probabilities(kind, by):
    count, vocab_size = 20_000, 24
    logits = random_logits(5, 1, vocab_size)[0] / 2
    fixed = {"seed": 99, "output_index": 4}
    rows = [{**kind, **fixed, by: number} for number in range(count)]
    tokens = sample(torch.from_numpy(np.tile(logits, (count, 1))), batch_of(*rows))
    expected = kept_probabilities(logits, **kind)
    counts = np.bincount(tokens, minlength=vocab_size)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    result = stats.chisquare(counts[kept], expected[kept] * count)
    assert result.pvalue > 1e-3, result


def test_every_row_against_the_definition():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    logits = random_logits(seed, 40, 300)
    rows = [
        {
            "temperature": rng.choice([0.0, 0.3, 1.0, 2.0]),
            "top_k": rng.choice([0, 1, 7, 300, 1000]),
            "top_p": rng.choice([1.0, 0.05, 0.5, 0.99]),
            "min_p": rng.choice([0.0, 0.01, 0.3, 1.0]),
            "seed": rng.randrange(2**64),
            "output_index": rng.randrange(5000),
        }
        for _ in range(40)
    ]
    tokens = sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist()
    assert tokens == [sample_token(logits[index], **row) for index, row in enumerate(rows)]


@pytest.mark.parametrize("short_list", [1, 3, 16, 128])
def test_kept_set_against_numpy(monkeypatch, short_list):
    monkeypatch.setattr(sampler, "_SHORT_LIST", short_list)
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    # Rounded, so that many tokens are exactly equal at every cut.
    logits = np.round(rng.normal(0, 1.5, (200, 61)) * 4) / 4
    top_k = rng.choice([0, 1, 2, 10, 60, 61, 100], 200).astype(np.int32)
    top_p = rng.choice([1.0, 0.001, 0.3, 0.77, 0.999999], 200)
    min_p = rng.choice([0.0, 0.01, 0.2, 1.0], 200)
    scaled = torch.from_numpy(logits - logits.max(axis=1, keepdims=True))
    kept = kept_tokens(scaled, top_k, top_p, min_p).numpy()
    for row in range(200):
        expected = kept_probabilities(logits[row], top_k=int(top_k[row]), top_p=top_p[row], min_p=min_p[row]) > 0
        assert (kept[row] == expected).all(), (row, top_k[row], top_p[row], min_p[row])


def test_same_tokens_alone_and_in_a_batch_of_16():
    logits = random_logits(11, 16, 2000)
    rows = [{**KINDS[index % len(KINDS)], "seed": index * 7, "output_index": index} for index in range(16)]
    together = sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist()
    alone = [sample(torch.from_numpy(logits[i : i + 1].copy()), batch_of(rows[i])).tolist()[0] for i in range(16)]
    assert together == alone
    backwards = sample(torch.from_numpy(logits[::-1].copy()), batch_of(*rows[::-1])).tolist()
    assert backwards[::-1] == together


def test_cost_settings_do_not_change_tokens(monkeypatch):
    logits = random_logits(12, 16, 500)
    rows = [{**KINDS[index % len(KINDS)], "seed": index, "output_index": 3} for index in range(16)]
    expected = sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist()
    monkeypatch.setattr(sampler, "_BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(sampler, "_NOISE_AT_ONCE", 7)
    monkeypatch.setattr(sampler, "_MANY_TOKENS", 2)
    monkeypatch.setattr(sampler, "_LIKELY", 0.0)
    assert sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist() == expected
    monkeypatch.setattr(sampler, "MAX_GUMBEL", math.inf)
    assert sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist() == expected


def test_golden_tokens():
    """These must never change: a seed has to mean the same in every version."""
    golden = json.loads((DATA / "sampled_tokens.json").read_text())
    token_ids = np.arange(golden["vocab_size"])
    logits = (((token_ids * 2654435761) % 1009) / 100).astype(np.float32)
    for case in golden["cases"]:
        rows = [{**case["params"], "output_index": index} for index in range(len(case["tokens"]))]
        tokens = sample(torch.from_numpy(np.tile(logits, (len(rows), 1))), batch_of(*rows)).tolist()
        assert tokens == case["tokens"]


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 50)
    logits[0, [9, 30]] = 2.0
    logits[2, 49] = 1.0
    assert sample(logits, batch_of(*[{"temperature": 0.0}] * 3)).tolist() == [9, 0, 49]


def test_greedy_batch_draws_no_noise(monkeypatch):
    monkeypatch.setattr(sampler, "token_gumbel", None)
    assert sample(torch.eye(4), batch_of(*[{"temperature": 0.0}] * 4)).tolist() == [0, 1, 2, 3]


def test_top_k_1_and_tiny_top_p_are_greedy():
    logits = random_logits(3, 32, 400)
    rows = [{"top_k": 1, "seed": index} if index % 2 else {"top_p": 1e-9, "seed": index} for index in range(32)]
    assert sample(torch.from_numpy(logits.copy()), batch_of(*rows)).tolist() == logits.argmax(axis=1).tolist()


def test_seeds_use_all_64_bits():
    tokens = sample(torch.zeros(64, 8000), batch_of(*({"seed": 1 << bit} for bit in range(64)))).tolist()
    assert len(set(tokens)) > 55


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_not_sampled(temperature):
    logits = np.zeros((200, 4), np.float32)
    logits[:, 1] = 8.0
    rows = [{"temperature": temperature, "seed": index} for index in range(200)]
    masked = [(row, token) for row in range(100) for token in (1, 2)]
    tokens = sample(torch.from_numpy(logits), batch_of(*rows, masked=masked)).tolist()
    assert not {1, 2} & set(tokens[:100])
    assert tokens[100:].count(1) > 90


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_finite_logits_are_invalid_and_alone_in_it(temperature):
    logits = torch.zeros(5, 8)
    logits[:, 3] = 50.0
    logits[0, 5] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, 5] = -math.inf
    tokens = sample(logits, batch_of(*[{"temperature": temperature, "top_p": 0.9, "top_k": 3, "min_p": 0.1}] * 5))
    assert tokens.tolist() == [INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN, 3, 3]


def test_no_rows_no_tokens():
    assert sample(torch.zeros(0, 8), batch_of()).tolist() == []
