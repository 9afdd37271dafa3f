"""Bitmasks on logits, against bits read one by one."""

import math

import numpy as np
import pytest
import torch

from engine_svc.core.interfaces import MASKED_TOKEN, KVCacheConfig
from engine_svc.core.scheduler_output import GrammarBitmask
from engine_svc.executor.grammar_mask import apply_grammar_mask
from engine_svc.executor.row_mirror import RowMirror, grammar_mask
from engine_svc.executor.sampler import sample
from engine_svc.executor.sampling_batch import GrammarMask


def random_words(rng, rows, vocab_size):
    return rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)


def is_allowed(words, token):
    return bool((int(words[token // 32]) >> (token % 32)) & 1)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("rows", [[], [0], [2], [0, 3], [0, 1, 2, 3, 4]])
def test_only_allowed_tokens_of_the_constrained_rows_stay(vocab_size, rows):
    rng = np.random.default_rng(vocab_size + len(rows))
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    before = logits.clone()
    words = random_words(rng, len(rows), vocab_size)
    apply_grammar_mask(logits, GrammarMask(np.array(rows, np.int64), words))
    for row in range(5):
        for token in range(vocab_size):
            stays = row not in rows or is_allowed(words[rows.index(row)], token)
            assert logits[row, token] == (before[row, token] if stays else -math.inf)


def test_rows_of_a_step_are_found_in_any_order():
    words = np.arange(3, dtype=np.int32)[:, np.newaxis]
    mask = grammar_mask(
        np.array([9, 4, 7, 1], np.int32), GrammarBitmask(rows=np.array([7, 9, 1], np.int32), words=words)
    )
    assert mask.rows.tolist() == [0, 2, 3]
    assert mask.words[:, 0].tolist() == [1, 0, 2]


def mirror_with(rows):
    mirror = RowMirror(
        KVCacheConfig(block_size=4, num_blocks=9, max_num_seqs=8, max_model_len=32, max_num_batched_tokens=64)
    )
    for row in rows:
        mirror.temperature[row], mirror.top_p[row], mirror.seed[row] = 1.0, 1.0, row
        mirror.num_prompt_tokens[row] = mirror.num_tokens[row] = 3
    return mirror


def bitmask(rows, allowed, vocab_size):
    words = np.zeros((len(rows), -(-vocab_size // 32)), np.uint32)
    for index, tokens in enumerate(allowed):
        for token in tokens:
            words[index, token // 32] |= np.uint32(1 << token % 32)
    return GrammarBitmask(rows=np.array(rows, np.int32), words=words.view(np.int32))


def test_sampled_tokens_are_allowed_and_free_rows_are_as_without():
    rows = np.array([0, 1, 2, 3], np.int32)
    mirror = mirror_with(rows)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 100)).astype(np.float32))
    free = sample(logits.clone(), mirror.sampling_batch(rows))
    held = sample(logits.clone(), mirror.sampling_batch(rows, bitmask([1, 3], [[7, 40], [99]], 100)))
    assert held[1] in (7, 40)
    assert held[3] == 99
    assert held[[0, 2]].tolist() == free[[0, 2]].tolist()


def test_a_row_whose_options_and_grammar_share_no_token_is_told():
    rows = np.array([0], np.int32)
    mirror = mirror_with(rows)
    logits = torch.zeros((1, 40))
    assert sample(logits, mirror.sampling_batch(rows, bitmask([0], [[]], 40))).tolist() == [MASKED_TOKEN]


def test_the_bitmask_decides_on_end_tokens_below_min_tokens():
    rows = np.array([0, 1], np.int32)
    mirror = mirror_with(rows)
    mirror.min_tokens[rows] = 5
    mirror.stop_token_ids[rows, 0] = 2
    logits = torch.zeros((2, 40))
    logits[:, 2] = 50.0
    free, held = sample(logits, mirror.sampling_batch(rows, bitmask([1], [[2]], 40))).tolist()
    assert free != 2
    assert held == 2
