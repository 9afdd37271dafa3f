"""The requests' view of the KV cache: block tables by row over the block pool, and prefix reuse.

Owns the block tables, and each request's chain of block hashes. A block is registered under its hash when all its
tokens are known and a step that computes them has been scheduled: steps run in order, so whoever finds the block is
computed later than it. Invariant: the first `num_blocks[row]` cells of a row's table are the blocks it uses.
"""

import numpy as np

from engine_svc.core.block_hash import ROOT_HASH, extra_keys, hash_block
from engine_svc.core.block_pool import BlockPool
from engine_svc.core.interfaces import KVCacheConfig
from engine_svc.core.request import Request
from engine_svc.core.rows import RowTable
from engine_svc.core.scheduler_output import BlockTableCells, IntArray


class KVCacheManager:
    """Block tables of shape [max_num_seqs, max_blocks]; there is one KV cache group."""

    def __init__(self, config: KVCacheConfig, rows: RowTable, *, enable_prefix_caching: bool) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self._rows = rows
        self._enable_prefix_caching = enable_prefix_caching
        max_blocks = self.blocks_for(config.max_model_len)
        self._tables: IntArray = np.zeros((config.max_num_seqs, max_blocks), np.int32)
        self.num_blocks: IntArray = np.zeros(config.max_num_seqs, np.int32)
        # Blocks at the front of each table that are registered, or known to be registered by another.
        self._num_registered: IntArray = np.zeros(config.max_num_seqs, np.int32)
        self._changed: list[tuple[int, int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix of a waiting request, leaving at least one token to compute."""
        if not self._enable_prefix_caching:
            return []
        limit = request.num_skippable_tokens // self.block_size
        if not limit:
            return []
        tokens = request.token_ids
        self._extend_hashes(request, tokens, limit)
        found: list[int] = []
        for block_hash in request.block_hashes[:limit]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _extend_hashes(self, request: Request, tokens: IntArray, count: int) -> None:
        hashes = request.block_hashes
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else ROOT_HASH
            extra = extra_keys(request.cache_salt) if index == 0 else b""
            block = tokens[index * self.block_size : (index + 1) * self.block_size]
            hashes.append(hash_block(parent, block, extra))

    def can_admit(self, request: Request, computed_blocks: list[int]) -> bool:
        """Whether all known tokens of the request, and the one it samples first, fit into the free blocks."""
        new_blocks = self.blocks_for(min(request.num_tokens + 1, request.max_total_tokens)) - len(computed_blocks)
        free_hits = sum(self.pool.is_free(block_id) for block_id in computed_blocks)
        return new_blocks <= self.pool.num_free - free_hits

    def admit(self, row: int, computed_blocks: list[int], num_tokens: int) -> IntArray:
        """Fills the table of a new row: cached blocks, then new ones up to `num_tokens`; returns its blocks."""
        self.pool.touch(computed_blocks)
        count = self.blocks_for(num_tokens)
        blocks = computed_blocks + self.pool.allocate(count - len(computed_blocks))
        self._tables[row, :count] = blocks
        self.num_blocks[row] = count
        self._num_registered[row] = len(computed_blocks)
        return self._tables[row, :count].copy()

    def missing_blocks(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """New blocks that each row needs to hold so many tokens."""
        missing: IntArray = np.maximum(-(-num_tokens // self.block_size) - self.num_blocks[rows], 0)
        return missing

    def grow(self, rows: IntArray, missing: IntArray) -> None:
        """Appends new blocks to the tables; the caller has checked that they are free."""
        for row, count in zip(rows.tolist(), missing.tolist(), strict=True):
            start = int(self.num_blocks[row])
            blocks = self.pool.allocate(count)
            self._tables[row, start : start + count] = blocks
            self.num_blocks[row] = start + count
            self._changed += [(row, start + offset, block_id) for offset, block_id in enumerate(blocks)]

    def take_changed_cells(self) -> BlockTableCells:
        """Returns and clears the cells that changed in rows that the workers know already."""
        cells = np.array(self._changed, np.int32).reshape(-1, 3)
        self._changed = []
        return BlockTableCells(
            groups=np.zeros(len(cells), np.int32), rows=cells[:, 0], columns=cells[:, 1], block_ids=cells[:, 2]
        )

    def register_full_blocks(self, rows: IntArray) -> None:
        """Makes blocks findable whose tokens are all known and computed by a step that is now scheduled."""
        if not self._enable_prefix_caching:
            return
        known = np.minimum(self._rows.num_computed_tokens[rows], self._rows.num_tokens[rows])
        full = known // self.block_size
        crossing = full > self._num_registered[rows]
        for row, count in zip(rows[crossing].tolist(), full[crossing].tolist(), strict=True):
            request = self._rows.request(row)
            self._extend_hashes(request, self._rows.token_ids[row], count)
            for index in range(int(self._num_registered[row]), count):
                self.pool.register(int(self._tables[row, index]), request.block_hashes[index])
            self._num_registered[row] = count

    def free(self, row: int) -> None:
        """Gives the blocks of a row back; their hashes stay until they are handed out again."""
        self.pool.free(self._tables[row, : self.num_blocks[row]].tolist())
        self.num_blocks[row] = 0
        self._num_registered[row] = 0
        if self._changed:
            self._changed = [cell for cell in self._changed if cell[0] != row]

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tables and the pool agree and idle rows hold nothing."""
        running = set(self._rows.running.tolist())
        idle = [row for row in range(len(self.num_blocks)) if row not in running]
        assert not self.num_blocks[idle].any(), "a row without a request holds blocks"
        users = [block for row in running for block in self._tables[row, : self.num_blocks[row]].tolist()]
        self.pool.check_invariants(users)
        for row in running:
            needed = self.blocks_for(int(self._rows.num_computed_tokens[row]))
            assert needed <= self.num_blocks[row], "computed tokens without a block"
