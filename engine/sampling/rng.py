"""Counter-based random numbers: two words per (seed, choice, output index), a pure function without any state.

Knows numbers only. The words key the noise of one draw (see `engine.sampling.race`), so a draw depends on nothing but
its own key and its logits: not on the batch around it, not on how often its sequence was preempted and recomputed.
Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): the seed is the key, (index,
choice) the counter.
"""

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)  # golden ratio
_WEYL_1 = np.uint64(0xBB67AE85)  # sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = npt.NDArray[np.uint64]
"""Unsigned 32-bit numbers, kept in 64 bits so that products do not overflow."""

Keys = npt.NDArray[np.int32]
"""Noise keys `[n, 2]`: two 32-bit words a row, as signed numbers of the same bits."""


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds of Philox. `counter` [4, n], `key` [2, n] -> random words [4, n], all below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3))


def race_keys(seeds: npt.NDArray[np.int64], choices: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> Keys:
    """The noise key of each row, for arguments [n]. `seeds` may be negative; `choices` must be below 2**32."""
    key = seeds.astype(np.uint64)
    index = indices.astype(np.uint64)
    counter = np.stack((index & _LOW, index >> _32, choices.astype(np.uint64), np.zeros_like(index)))
    words = philox4x32(counter, np.stack((key & _LOW, key >> _32)))
    return np.ascontiguousarray(words[:2].T.astype(np.uint32)).view(np.int32)
