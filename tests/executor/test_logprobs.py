"""Log-probabilities, ranks and order of candidates against NumPy; raw and processed; independence of the batch."""

import numpy as np
import pytest
import torch

from engine_svc.executor import logprobs
from engine_svc.executor.logprobs import chosen_logprobs, sampled_logprobs, top_logprobs
from engine_svc.executor.row_options import LogprobsWanted
from engine_svc.executor.sampler import final_logits, sample
from tests.executor.test_sampler import batch_of
from tests.support.options_oracle import log_softmax, ranked
from tests.support.sampling_oracle import kept_probabilities

VOCAB_SIZE = 60


def rounded_logits(seed: int, rows: int) -> np.ndarray:
    """Many equal values."""
    return (np.random.default_rng(seed).normal(0, 2, (rows, VOCAB_SIZE)) * 2).round().astype(np.float32) / 2


@pytest.mark.parametrize("count", [0, 1, 5, 59, 60, -1])
@pytest.mark.parametrize("block", [1, 130, 1 << 22])
def test_top_logprobs_against_numpy(monkeypatch, count, block):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", block)
    logits = rounded_logits(count + 1, 20)
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 20).astype(np.int32)
    ids, values, ranks = top_logprobs(torch.from_numpy(logits), tokens, count)
    for row in range(20):
        expected, rank = ranked(logits[row], int(tokens[row]), count)
        assert ids[row].tolist() == expected
        assert ranks[row] == rank
        np.testing.assert_allclose(values[row], log_softmax(logits[row])[expected], atol=2e-6)


def test_chosen_tokens():
    logits = rounded_logits(3, 4)
    ids, values, ranks = chosen_logprobs(torch.from_numpy(logits), np.array([1, 2, 3, 4], np.int32), np.array([9, 4]))
    for row in range(4):
        assert ids[row].tolist() == [row + 1, 9, 4]
        assert ranks[row] == ranked(logits[row], row + 1, 0)[1]
        np.testing.assert_allclose(values[row], log_softmax(logits[row])[[row + 1, 9, 4]], atol=2e-6)


def test_rows_that_ask_for_different_things():
    logits = rounded_logits(4, 5)
    tokens = np.array([7, 8, -1, 9, 10, 11], np.int32)
    wanted = [
        LogprobsWanted(0, 3, None),
        LogprobsWanted(2, 3, None),
        LogprobsWanted(3, 0, None),
        LogprobsWanted(4, 2, np.array([1, 2])),
        LogprobsWanted(5, 3, None),
    ]
    results = {one.index: one for one in sampled_logprobs(torch.from_numpy(logits), tokens, wanted)}
    assert sorted(results) == [0, 3, 4, 5]
    for row, one in enumerate(wanted):
        if one.index == 2:
            continue
        expected, rank = ranked(logits[row], int(tokens[one.index]), one.count)
        if one.token_ids is not None:
            expected = [int(tokens[one.index]), 1, 2]
        result = results[one.index]
        assert result.token_ids.tolist() == [expected]
        assert result.ranks.tolist() == [rank]
        np.testing.assert_allclose(result.logprobs[0], log_softmax(logits[row])[expected], atol=2e-6)


def test_processed_logits_are_those_of_the_sampled_distribution():
    logits = np.random.default_rng(5).normal(0, 2, (6, VOCAB_SIZE)).astype(np.float32)
    rows = [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2, "temperature": 1.5},
        {"temperature": 0.0},
    ]
    batch = batch_of(*rows, masked=[(1, 3), (5, 4)])
    tensor = torch.from_numpy(logits.copy())
    sample(tensor, batch)
    chosen = np.array([5, 4, 3, 2, 1])
    found = final_logits(tensor, batch, chosen).double().log_softmax(dim=1).numpy()
    logits[1, 3] = logits[5, 4] = -np.inf
    for index, row in enumerate(chosen.tolist()):
        params = {"temperature": 1.0} if rows[row].get("temperature") == 0.0 else rows[row]
        np.testing.assert_allclose(np.exp(found[index]), kept_probabilities(logits[row], **params), atol=1e-6)
