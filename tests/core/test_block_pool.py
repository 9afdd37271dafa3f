"""The block pool: who is free, who is evicted first, and what a random history leaves behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.core.block_pool import NULL_BLOCK, BlockPool


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0
    assert pool.usage == 1.0
    pool.check_invariants([1, 2, 3])


def test_freed_blocks_keep_their_prefix_until_handed_out_again():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.register(a, digest(1))
    pool.register(b, digest(2))
    pool.free([a, b, c])
    assert pool.find(digest(1)) == a
    # The block without a prefix goes first, then the tail of the freed sequence.
    assert pool.allocate(1) == [c]
    assert pool.allocate(1) == [b]
    assert pool.find(digest(2)) is None
    assert pool.find(digest(1)) == a


def test_touching_a_free_block_takes_it_out_of_the_queue():
    pool = BlockPool(3)
    (a,) = pool.allocate(1)
    pool.register(a, digest(1))
    pool.free([a])
    pool.touch([a])
    assert pool.num_free == 1
    pool.touch([a])
    pool.free([a])
    assert not pool.is_free(a)
    pool.free([a])
    assert pool.is_free(a)
    pool.check_invariants([])


def test_second_block_of_one_prefix_stays_unknown():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.register(a, digest(1))
    pool.register(b, digest(1))
    assert pool.find(digest(1)) == a
    pool.free([a, b])
    assert pool.allocate(1) == [b]
    pool.check_invariants([b])


def test_reset_refuses_while_blocks_are_in_use():
    pool = BlockPool(3)
    (a,) = pool.allocate(1)
    pool.register(a, digest(1))
    assert not pool.reset()
    assert pool.find(digest(1)) == a
    pool.free([a])
    assert pool.reset()
    assert pool.find(digest(1)) is None
    pool.check_invariants([])


def test_invariants_catch_a_leak():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_invariants([])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("afrth"), st.integers(0, 7)), max_size=80))
def test_any_history_keeps_the_invariants(history):
    pool = BlockPool(8)
    sequences: list[list[int]] = []
    for action, number in history:
        if action == "a" and pool.num_free >= number % 4:
            sequences.append(pool.allocate(number % 4))
        elif action == "f" and sequences:
            pool.free(sequences.pop(number % len(sequences)))
        elif action == "r" and sequences and sequences[number % len(sequences)]:
            pool.register(sequences[number % len(sequences)][0], digest(number))
        elif action == "t" and (block := pool.find(digest(number))) is not None:
            pool.touch([block])
            sequences.append([block])
        elif action == "h":
            assert pool.reset() == (not any(sequences))
        pool.check_invariants([block for sequence in sequences for block in sequence])
        assert pool.num_free + len({b for s in sequences for b in s} | {NULL_BLOCK}) == pool.num_blocks
