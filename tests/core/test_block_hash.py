"""Block hashes: what must differ differs, what must agree agrees."""

import hashlib
import struct

import numpy as np

from engine_svc.core.block_hash import ROOT_HASH, extra_keys, hash_block


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_hash_is_sha256_over_parent_tokens_and_extra_keys():
    expected = hashlib.sha256(ROOT_HASH + struct.pack("<3i", 1, 2, 3) + b"S" + struct.pack("<I", 4) + b"salt")
    assert hash_block(ROOT_HASH, ids(1, 2, 3), extra_keys("salt")) == expected.digest()


def test_position_parent_and_salt_separate():
    first = hash_block(ROOT_HASH, ids(1, 2))
    others = [
        hash_block(first, ids(1, 2)),
        hash_block(ROOT_HASH, ids(2, 1)),
        hash_block(ROOT_HASH, ids(1, 2), extra_keys("a")),
        hash_block(ROOT_HASH, ids(1, 2), extra_keys("b")),
        hash_block(ROOT_HASH, ids(1, 2), extra_keys("ab")),
    ]
    assert len({first, *others}) == 6


def test_slices_of_a_larger_array_hash_like_copies():
    table = np.arange(32, dtype=np.int32).reshape(2, 16)
    assert hash_block(ROOT_HASH, table[1, 4:8]) == hash_block(ROOT_HASH, table[1, 4:8].copy())
