"""Chained SHA-256 of full blocks: equal hashes mean equal tokens from the start of the sequence, and equal extra keys.

Every part has a fixed or a written length, so that no two different inputs feed the hash the same bytes.
"""

import hashlib
import struct

from engine_svc.core.scheduler_output import IntArray

# The parent of every first block.
ROOT_HASH = hashlib.sha256(b"takt block hash root").digest()

_SALT_TAG = b"S"


def extra_keys(cache_salt: str) -> bytes:
    """Extra keys of a first block, tagged by kind; empty when there are none."""
    if not cache_salt:
        return b""
    salt = cache_salt.encode()
    return _SALT_TAG + struct.pack("<I", len(salt)) + salt


def hash_block(parent: bytes, token_ids: IntArray, extra: bytes = b"") -> bytes:
    """The hash of a full block. `token_ids` has shape [block_size]; `extra` belongs to first blocks alone."""
    digest = hashlib.sha256(parent)
    digest.update(token_ids.astype("<i4", copy=False).tobytes())
    digest.update(extra)
    return digest.digest()
