"""What trellis codes mean.

A block of T weights of one row is a ring of T*k bits, least significant bit first in 32-bit words. Weight t
reads the L = 12 bits that begin at bit (T - 1 - t) * k; so its lowest k bits are its own, and the higher ones
those of the weights before it, of the first weights those of the last. The L bits are a state s, and a state
stands for a value that needs no table to be kept:

    z = s * 34038481 + 76625530 mod 2^32;  value = (sum of the four bytes of z - 510) / 147.800537109375

which looks like a draw from a normal distribution. A weight is its value times its row's scale.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxft.errors import InputError

STATE_BITS = 12
BITS = (2, 3, 4)
_MOST_BLOCK = 256
_WORD = 32


def block_for(width: int) -> int:
    """Returns the longest block, up to 256 weights, that rows of `width` weights can be cut into.

    Raises: InputError if none can: a block is a multiple of 32 weights.
    """
    for block in range(_MOST_BLOCK, 0, -_WORD):
        if width % block == 0:
            return block
    raise InputError(f"rows of {width} weights can't be cut into trellis blocks: 32 doesn't divide {width}")


def check_geometry(width: int, bits: int, block: int) -> None:
    """Raises: InputError where rows of `width` weights can't have codes of so many bits in such blocks."""
    if bits not in BITS:
        raise InputError(f"trellis codes have 2, 3 or 4 bits a weight, not {bits}")
    if block < _WORD or block % _WORD or block > _MOST_BLOCK:
        raise InputError(f"a trellis block is a multiple of 32 weights, 256 at the most, not {block}")
    if width % block:
        raise InputError(f"rows of {width} weights can't be cut into trellis blocks of {block}")


@lru_cache(maxsize=1)
def codebook() -> np.ndarray:
    """Returns the value (4096,) float32 that each state stands for."""
    mixed = (np.arange(1 << STATE_BITS, dtype=np.uint64) * 34038481 + 76625530) & 0xFFFFFFFF
    total = sum((mixed >> np.uint64(8 * byte)) & np.uint64(255) for byte in range(4))
    return (total.astype(np.int64) - 510).astype(np.float32) / np.float32(147.800537109375)


def pack(states: np.ndarray, bits: int) -> np.ndarray:
    """Returns the words (blocks, T*bits/32) uint32 that hold the lowest bits of states (blocks, T)."""
    own = states[:, ::-1].astype(np.uint32)  # the last weight is at bit 0
    as_bits = (own[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    packed = np.packbits(as_bits.astype(np.uint8).reshape(len(states), -1), axis=1, bitorder="little")
    return packed.view("<u4")


def dequantize(
    codes: mx.array, scales: mx.array, bits: int, block: int = _MOST_BLOCK, dtype: mx.Dtype = mx.float32
) -> mx.array:
    """Returns the weights (rows, width) that codes (rows, width*bits/32) uint32 and scales (rows,) stand for.

    The product of value and scale is computed in float32 and rounded once, to `dtype`.

    Raises: InputError for codes or scales that don't fit each other.
    """
    if codes.ndim != 2 or codes.dtype != mx.uint32:
        raise InputError(f"trellis codes are (rows, words) of uint32, not {codes.shape} of {codes.dtype}")
    rows, width = codes.shape[0], codes.shape[1] * _WORD // bits if bits in BITS else 0
    check_geometry(width, bits, block)
    if codes.shape[1] * _WORD != width * bits or scales.size != rows:
        raise InputError(
            f"codes of shape {tuple(codes.shape)} with {bits} bits in blocks of {block}, and {scales.size} "
            "scales, don't fit each other"
        )
    words = codes.reshape(rows, width // block, block * bits // _WORD)
    values = mx.array(codebook())[_states(words, bits, block)]
    weights = values * scales.reshape(rows, 1, 1).astype(mx.float32)
    return weights.reshape(rows, width).astype(dtype)


def _states(words: mx.array, bits: int, block: int) -> mx.array:
    """Returns the states (..., block) uint32 that words (..., block*bits/32) hold."""
    begins = (block - 1 - np.arange(block)) * bits
    first, offset = begins // _WORD, (begins % _WORD).astype(np.uint32)
    second = (first + 1) % words.shape[-1]
    low = words[..., mx.array(first)] >> mx.array(offset)
    # By one bit first: a shift by all 32 bits of a word is undefined.
    high = (words[..., mx.array(second)] << 1) << mx.array(31 - offset)
    return (low | high) & ((1 << STATE_BITS) - 1)
