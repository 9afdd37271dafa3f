"""Philox4x32-10 (Salmon et al., 2011) over tensors, and the Gumbel noise that sampling draws from it.

The noise of a token is a function of the request's seed, the output index, the token id and the kind of draw, and of
nothing else: it has no state, so batch, row, order and device do not matter.
"""

import math

import torch

# Kinds of draw, the third word of the counter.
DRAW_TOKEN = 0

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Bounds of the noise: a 32-bit word w gives -log(-log((w + 0.5) / 2**32)).
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33)))
MIN_GUMBEL = -math.log(33 * math.log(2.0))


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words for each counter and key.

    All tensors are int64, hold values in [0, 2**32), and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product's 64 bits are right although int64 wraps. c1 and c3 are only ever xored, so their upper halves
        # may hold anything until the mask.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK, ((product0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def token_gumbel(seeds: torch.Tensor, output_index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Float64 Gumbel noise of each token, in [MIN_GUMBEL, MAX_GUMBEL].

    `seeds` are int64 with the bits of the unsigned seed; all arguments are int64 and broadcast.
    """
    kind = torch.full_like(output_index, DRAW_TOKEN)
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    word = philox4x32((output_index, token_ids, kind, torch.zeros_like(output_index)), key)[0]
    uniform = (word.double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()
