"""A shuffle that is computed, not stored: where index i goes in a pseudo-random order of [0, size), in constant memory.

A generalised Feistel network permutes the pairs (x, y) of a grid of a x b numbers, a b >= size; an index that lands
outside is sent through again until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002,
sections 5 and 4). Both steps are bijections, so every index of an epoch comes up exactly once. With a =
ceil(sqrt(size)) fewer than a numbers are outside.
"""

import hashlib

import numpy as np

ROUNDS = 6
_ODD = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
)  # the multipliers of SplitMix64
_HALF = np.uint64(32)


def key_of(*parts: int | str) -> np.uint64:
    """A 64-bit key that depends on every part, the same on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return np.uint64(
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    )


def keys_of(epochs: np.ndarray, *parts: int | str) -> np.ndarray:
    """The key of the parts and each epoch [N]; uint64 [N]."""
    distinct, which = np.unique(epochs, return_inverse=True)
    keys = [key_of(*parts, epoch) for epoch in distinct.tolist()]
    return np.array(keys, np.uint64)[which]


def permute(
    index: np.ndarray, size: int | np.ndarray, key: np.uint64 | np.ndarray
) -> np.ndarray:
    """Returns where the indices [N] (0 <= index < size < 2^52) go in the order of `key`, int64 [N]; size and key may
    also be arrays [N].
    """
    key = np.asarray(key)
    size = np.asarray(size, np.uint64)
    a = np.ceil(np.sqrt(size)).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    # Arithmetic modulo 2^64 is meant.
    with np.errstate(over="ignore"):
        value = _network(index.astype(np.uint64), a, b, key)
        outside = np.flatnonzero(value >= size)
        while outside.size:
            a_out, b_out, key_out, size_out = (
                array[outside] if array.ndim else array for array in (a, b, key, size)
            )
            again = _network(value[outside], a_out, b_out, key_out)
            value[outside] = again
            outside = outside[again >= size_out]
    return value.astype(np.int64)


def _network(
    value: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.uint64 | np.ndarray
) -> np.ndarray:
    x, y = np.divmod(value, b)
    for turn in range(1, ROUNDS, 2):
        x = (x + _mix(y, key, turn)) % a
        y = (y + _mix(x, key, turn + 1)) % b
    return x * b + y


def _mix(half: np.ndarray, key: np.uint64 | np.ndarray, turn: int) -> np.ndarray:
    turn_key = key + np.uint64(turn) * _ODD[1]
    mixed = (half + turn_key) * _ODD[0]
    mixed ^= mixed >> _HALF
    return (mixed * _ODD[1]) >> _HALF
