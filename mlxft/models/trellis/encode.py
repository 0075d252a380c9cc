"""Finds trellis codes for weights: the path through the states that is nearest to them (Viterbi).

Every state is reached from 2^k others, those whose lowest L - k bits are its highest. A block's codes are a
ring, so the state before its first weight is its last. The state to begin in is taken from a first walk over
the block turned by half its length, whose middle is where the ring closes; the second walk is held to it.

On a CPU the walk is compiled C (kernels/trellis_encode), on a GPU MLX's operations, which both also check
each other.
"""

import ctypes
import logging
import os
import platform
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Optional

import mlx.core as mx
import numpy as np

from mlxft import native
from mlxft.backend import backend
from mlxft.models.trellis.format import STATE_BITS, check_geometry, codebook, pack
from mlxft.resources import folder

log = logging.getLogger("mlxft")

# The root mean square that weights have in units of their scale. Codes are no finer far out, where more bits
# are less able to make up for it: of normal weights these gave the least error of several.
_SPREAD = {2: 0.97, 3: 0.92, 4: 0.88}

_STATES = 1 << STATE_BITS
_GPU_BLOCKS = 4096  # walked at once: 64 MB of costs
_CPU_BLOCKS = 256  # a thread takes at once
_ALIGNMENT = 64


def quantize(weight: mx.array, bits: int, block: int = 256) -> tuple[mx.array, mx.array]:
    """Returns codes (rows, width*bits/32) uint32 and scales (rows,) bfloat16 for weight (rows, width).

    bits: 2, 3 or 4 a weight. block: weights that share a ring; it has to divide the width.

    Raises: InputError for a width, block or number of bits that the format doesn't have.
    """
    check_geometry(weight.shape[1], bits, block)
    weights = np.array(weight.astype(mx.float32))
    scales = starting_scales(weights, bits)
    states = tail_biting_states(in_scales(weights, scales).reshape(-1, block), bits)
    codes = pack(states, bits).reshape(len(weights), -1)
    return mx.array(codes), fitted_scales(weights, codebook()[states].reshape(weights.shape), scales)


def starting_scales(weights: np.ndarray, bits: int) -> np.ndarray:
    """Returns the scales (rows,) float32 that bring weights (rows, width) to the code's spread."""
    spread = np.sqrt(np.square(weights).mean(axis=1))
    return np.array(mx.array(spread / _SPREAD[bits]).astype(mx.bfloat16).astype(mx.float32))


def in_scales(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns weights (rows, width) in units of their rows' scales (rows,)."""
    return weights / np.where(scales == 0, 1, scales)[:, None]


def fitted_scales(
    weights: np.ndarray, values: np.ndarray, scales: np.ndarray, hessian: Optional[np.ndarray] = None
) -> mx.array:
    """Returns the scales (rows,) bfloat16 for which scale x values (rows, width) is nearest to the weights.

    hessian: (width, width) of the layer's inputs, in whose outputs they are to be near; None: themselves.
    Rows whose starting scale is 0 keep it.
    """
    seen = values if hessian is None else values @ hessian.astype(np.float32)
    fitted = (weights * seen).sum(axis=1) / (values * seen).sum(axis=1)
    return mx.array(np.where(scales == 0, 0, fitted).astype(np.float32)).astype(mx.bfloat16)


def tail_biting_states(weights: np.ndarray, bits: int) -> np.ndarray:
    """Returns the states (blocks, T) int32 of rings near weights (blocks, T) float32, in units of a scale."""
    walk = _walk_in_c if backend() == "cpu" and _library() is not None else walk_in_mlx
    middle = weights.shape[1] // 2
    turned = walk(np.roll(weights, middle, axis=1), bits)
    return walk(weights, bits, turned[:, middle] >> bits)


def walk_in_mlx(weights: np.ndarray, bits: int, overlaps: Optional[np.ndarray] = None) -> np.ndarray:
    """Returns the states (blocks, T) int32 of the cheapest paths along weights (blocks, T).

    overlaps: (blocks,), the L - k bits that the first state has highest and the last one lowest; None: any.
    """
    parts = []
    for first in range(0, len(weights), _GPU_BLOCKS):
        some = slice(first, first + _GPU_BLOCKS)
        ring = None if overlaps is None else mx.array(overlaps[some].astype(np.int32))
        parts.append(np.array(_walk_at_once(mx.array(weights[some]), bits, ring)))
    return np.concatenate(parts)


def _walk_at_once(weights: mx.array, bits: int, ring: Optional[mx.array]) -> mx.array:
    branches, overlaps, values = 1 << bits, _STATES >> bits, mx.array(codebook())
    costs = mx.square(weights[:, :1] - values)
    if ring is not None:
        before = mx.arange(_STATES, dtype=mx.int32) >> bits
        costs = mx.where(before == ring[:, None], costs, mx.inf)
    won = []
    for t in range(1, weights.shape[1]):
        by_branch = costs.reshape(-1, branches, overlaps)
        won.append(mx.argmin(by_branch, axis=1).astype(mx.uint8))
        best = by_branch.min(axis=1)[..., None]
        off = mx.square(weights[:, t, None] - values).reshape(-1, overlaps, branches)
        costs = (best + off).reshape(-1, _STATES)
        mx.eval(costs, won[-1])
    if ring is not None:
        after = mx.arange(_STATES, dtype=mx.int32) & (overlaps - 1)
        costs = mx.where(after == ring[:, None], costs, mx.inf)
    states = [mx.argmin(costs, axis=1).astype(mx.int32)]
    for from_branch in reversed(won):
        before = states[-1] >> bits
        branch = mx.take_along_axis(from_branch, before[:, None], axis=1)[:, 0].astype(mx.int32)
        states.append(branch * overlaps + before)
        mx.eval(states[-1])
    return mx.stack(states[::-1], axis=1)


def _walk_in_c(weights: np.ndarray, bits: int, overlaps: Optional[np.ndarray] = None) -> np.ndarray:
    blocks, length = weights.shape
    weights = np.ascontiguousarray(weights, np.float32)
    ring = np.full(blocks, -1, np.int32) if overlaps is None else np.ascontiguousarray(overlaps, np.int32)
    states, values, library = np.empty((blocks, length), np.int32), codebook(), _library()

    def walk(first: int) -> None:
        some = slice(first, first + _CPU_BLOCKS)
        scratch = np.empty(library.trellis_scratch_bytes(length, bits, STATE_BITS) + _ALIGNMENT, np.uint8)
        scratch = scratch[-scratch.ctypes.data % _ALIGNMENT :]
        library.trellis_encode(
            *(_pointer(array) for array in (weights[some], ring[some], values, states[some])),
            *(ctypes.c_long(len(weights[some])), length, bits, STATE_BITS, _pointer(scratch)),
        )

    with ThreadPoolExecutor(_num_threads()) as pool:
        list(pool.map(walk, range(0, blocks, _CPU_BLOCKS)))
    return states


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _library() -> Optional[ctypes.CDLL]:
    """Returns the compiled walk, or None, after a warning, where there is no compiler."""
    source = folder("kernels") / "trellis_encode" / "encode.c"
    options = ["-O3", "-march=native"] if platform.machine() in ("x86_64", "AMD64") else ["-O3"]
    key = f"{platform.machine()}-{zlib.crc32(source.read_bytes() + _processor()):08x}"
    kept = os.path.join(native.cache_folder("trellis"), key, "libmlxft_trellis.so")
    try:
        library = native.use_library(str(source), options, kept, ctypes.CDLL)
    except (native.CannotCompile, OSError) as why:
        log.warning("looking for trellis codes takes far longer than it has to: %s", why)
        return None
    library.trellis_scratch_bytes.restype = ctypes.c_size_t
    return library


def _processor() -> bytes:
    """Returns what the processor can do, as far as the system tells: the library is compiled for that."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return next((line for line in file if line.startswith((b"flags", b"Features"))), b"")
    except OSError:
        return b""
