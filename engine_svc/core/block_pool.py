"""Owner of the KV cache blocks: who is free, how many use each, and which block holds a prefix.

A block is free when nobody uses it; it can then still hold a hashed prefix, which a request may pick up again until
the block is handed out for new tokens. Invariant: free + used == total, and block 0 (the null block) is always used.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Fixed number of blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._ref_counts[NULL_BLOCK] = 1
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Least recently used first. An OrderedDict, not a deque, because a prefix hit takes from the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Part of the usable blocks that is in use, in [0, 1]."""
        return 1.0 - len(self._free) / max(1, self.num_blocks - 1)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody uses the block."""
        return self._ref_counts[block_id] == 0

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds a hashed prefix, in use or free."""
        return self._by_hash.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks, forgetting the prefixes they held. The caller has checked `num_free`."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
            self._forget(block_id)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a user to blocks found by their prefix."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Removes a user from the blocks of a sequence, given in the sequence's order.

        The tail is freed first, so that it is evicted first. Blocks without a prefix are worth nothing and go to the
        head of the queue.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full block findable. A second block of the same prefix stays unknown: one is enough."""
        if self._hashes[block_id] is None and block_hash not in self._by_hash:
            self._hashes[block_id] = block_hash
            self._by_hash[block_hash] = block_id

    def reset(self) -> bool:
        """Forgets all prefixes; False and no change when blocks other than the null block are in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._hashes = [None] * self.num_blocks
        self._by_hash.clear()
        return True

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None

    def check_invariants(self, users: Iterable[int]) -> None:
        """Raises AssertionError unless every count is right; `users` lists each block once for each use."""
        expected = [0] * self.num_blocks
        expected[NULL_BLOCK] = 1
        for block_id in users:
            expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts do not match the block tables"
        assert NULL_BLOCK not in self._free, "the null block is free"
        unused = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert unused == set(self._free), "free queue does not match the reference counts"
        held = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert held == self._by_hash, "hash table does not match the blocks"
