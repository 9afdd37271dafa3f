"""What a row's penalties and bad words need to know of its tokens, kept up to date token by token. No torch.

Nothing here knows rows or logits. Invariant: the counts are those of the tokens given so far, whatever the steps in
which they came.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_svc.core.scheduler_output import IntArray

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64
# Matches any token in a prefix, and stands where an output is too short to match.
_ANY = -1
_MISSING = -2


class TokenCounts:
    """The distinct tokens of a sequence, each with the number of times that it was generated."""

    def __init__(self, prompt: IntArray, output: IntArray) -> None:
        """Tokens of `prompt` are present without having been generated."""
        distinct = np.unique(np.concatenate([prompt, output]))
        counts = np.zeros(len(distinct), np.float32)
        if len(output):
            generated, times = np.unique(output, return_counts=True)
            counts[np.searchsorted(distinct, generated)] = times
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._token_ids: IndexArray = np.zeros(capacity, np.int64)
        self._counts: FloatArray = np.zeros(capacity, np.float32)
        self._token_ids[: len(distinct)] = distinct
        self._counts[: len(distinct)] = counts
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        self.num_output_tokens = len(output)

    @property
    def token_ids(self) -> IndexArray:
        """The distinct tokens, in no particular order."""
        return self._token_ids[: len(self._index)]

    @property
    def counts(self) -> FloatArray:
        """How often each of `token_ids` was generated."""
        return self._counts[: len(self._index)]

    def extend(self, generated: Sequence[int]) -> None:
        """Counts more generated tokens."""
        for token in generated:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[index] = token
            self._counts[index] += 1
        self.num_output_tokens += len(generated)


class BadWords:
    """Token sequences that must not appear in an output."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Every word has at least one token."""
        self.longest_prefix = max(map(len, words)) - 1
        self._prefixes: IntArray = np.full((len(words), self.longest_prefix), _ANY, np.int32)
        for index, word in enumerate(words):
            self._prefixes[index, self.longest_prefix - len(word) + 1 :] = word[:-1]
        self._last: IndexArray = np.array([word[-1] for word in words], np.int64)

    def completing_tokens(self, output: IntArray) -> IndexArray:
        """The tokens that would complete a word after `output`; its last `longest_prefix` tokens are enough."""
        if not self.longest_prefix:
            return self._last
        tail: IntArray = np.full(self.longest_prefix, _MISSING, np.int32)
        length = min(len(output), self.longest_prefix)
        if length:
            tail[-length:] = output[-length:]
        matches = ((self._prefixes == _ANY) | (self._prefixes == tail)).all(axis=1)
        completing: IndexArray = self._last[matches]
        return completing
