"""Puts an optimised BLAS in front of the reference one that MLX's Linux CPU wheel links.

The dynamic linker binds `libmlx.so` to the first `cblas_sgemm` of the process's global scope: an
OpenBLAS loaded there before `mlx.core` is imported runs every float32, float64 and complex64 product
and every decomposition. This happens when mlxft is imported, so nothing heavy is imported here.
"""

import binascii
import ctypes
import functools
import importlib.util
import os
import struct
import sys
from array import array
from collections import namedtuple

from mlxft import native

# Distributions name the threaded build differently; a plain name may be the threaded or the serial one.
_SYSTEM_NAMES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblaso.so.0")
_SHIM_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "blas_shim.c")


class BlasStatus(namedtuple("BlasStatus", "optimised name path reason")):
    """Which BLAS runs MLX's products: `optimised` or not, its `name`, its file's `path`, and why it."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class _Unusable(Exception):
    """Why a library can't be used, as part of a sentence."""


@functools.cache
def preload() -> BlasStatus:
    """Loads an optimised BLAS where MLX will find it, once a process, and says which; never raises."""
    try:
        return _nothing_to_do() or _load()
    except Exception as error:  # mlxft must be importable on a system this file has never seen
        return BlasStatus(False, "MLX's own BLAS", None, f"preparing an optimised one failed: {error!r}")


def _nothing_to_do() -> BlasStatus | None:
    """Returns the status where MLX's own choice is the right one or can't be changed any more, else None."""
    if sys.platform != "linux":
        name = "Accelerate" if sys.platform == "darwin" else "MLX's own BLAS"
        return BlasStatus(True, name, None, "what MLX is built with on this system")
    if "mlx.core" in sys.modules:
        reason = "mlx was imported first; import mlxft before mlx to change that"
        return BlasStatus(False, "MLX's own BLAS", None, reason)
    library = _mlx_library()
    if library is None:
        return BlasStatus(False, "no BLAS", None, "MLX is not installed with a backend for Linux")
    needed = needed_libraries(library)
    if any(name.startswith(("libcuda.", "libcublas")) for name in needed):
        return BlasStatus(False, "MLX's own BLAS", None, "a CUDA build of MLX computes on the GPU")
    if linked := next((name for name in needed if "openblas" in name or "mkl" in name), None):
        return BlasStatus(True, linked, None, "MLX is linked to it")
    process = ctypes.CDLL(None)
    if hasattr(process, "cblas_sgemm"):
        path = _file_of(process.cblas_sgemm)
        reason = "it was in the process before mlxft was imported"
        return BlasStatus(True, _version(process) or path, path, reason)
    return None


def _mlx_library() -> str | None:
    spec = importlib.util.find_spec("mlx")
    folders = spec.submodule_search_locations if spec else ()  # a namespace package may lie in several
    files = [os.path.join(folder, "lib", "libmlx.so") for folder in folders]
    return next(filter(os.path.exists, files), None)


def _load() -> BlasStatus:
    refused = []
    for name in _system_names():
        try:
            return _load_system(name)
        except OSError as why:
            if not str(why).startswith(f"{name}: cannot open"):  # that one is not installed, which is no news
                refused.append(f"the system's OpenBLAS can't be loaded ({why})")
        except _Unusable as why:
            refused.append(str(why))
    try:
        return _load_packaged()
    except (OSError, _Unusable) as why:
        refused.append(str(why))
    except native.CannotCompile as why:
        refused.append(f"the package scipy-openblas32 can't be used: {why}")
    reason = "; ".join(refused) + " (products in float32 are some 30 times slower without)"
    return BlasStatus(False, "MLX's own BLAS", None, reason)


def _system_names() -> list[str]:
    """Returns what to try: the dynamic linker's names, then the same in the interpreter's own prefix."""
    beside = [os.path.join(sys.prefix, "lib", name) for name in _SYSTEM_NAMES]  # a conda environment
    return [*_SYSTEM_NAMES, *filter(os.path.exists, beside)]


def _load_system(name: str) -> BlasStatus:
    """Loads an OpenBLAS with plain names. Raises OSError if it is not there, _Unusable if it won't do."""
    library = ctypes.CDLL(name)  # for us alone, until it has proved itself
    if not hasattr(library, "cblas_sgemm"):
        raise _Unusable(f"the system's {name} has no cblas_sgemm")
    path = _file_of(library.cblas_sgemm)
    version = _version(library) or os.path.basename(path)
    if "USE64BITINT" in version:
        raise _Unusable(f"{path} takes 64-bit integers, which MLX does not pass")
    if not multiplies_exactly(library.cblas_sgemm):
        raise _Unusable(f"{path} computes wrong products on this processor")
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return BlasStatus(True, version, path, "the system's")


def _load_packaged() -> BlasStatus:
    """Loads scipy-openblas32's OpenBLAS through the shim. Raises OSError, _Unusable or CannotCompile."""
    path = _packaged_library()
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # its names have a prefix: only the shim finds them
    version = _version(library, "scipy_")
    with open(_SHIM_SOURCE, "rb") as file:
        fingerprint = binascii.crc32(file.read())
    version_name = version.split(" DYNAMIC_ARCH")[0].replace(" ", "-")
    key = f"{version_name}-{os.uname().machine}-{fingerprint:08x}"
    kept = os.path.join(native.cache_folder("blas"), key, "libmlxft_blas.so")
    native.use_library(_SHIM_SOURCE, ["-nostdlib"], kept, _load_shim)
    return BlasStatus(True, version, path, "from the package scipy-openblas32")


def _load_shim(path: str) -> None:
    if not multiplies_exactly(ctypes.CDLL(path).cblas_sgemm):
        raise _Unusable("scipy-openblas32 computes wrong products on this processor")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _packaged_library() -> str:
    spec = importlib.util.find_spec("scipy_openblas32")  # not imported: that costs more than the rest
    if spec is None or spec.origin is None:
        raise _Unusable("no OpenBLAS is installed: pip install scipy-openblas32, or the system's libopenblas")
    library = os.path.join(os.path.dirname(spec.origin), "lib", "libscipy_openblas.so")
    if not os.path.exists(library):
        raise _Unusable(f"the package scipy-openblas32 lacks {library}")
    return library


def multiplies_exactly(sgemm) -> bool:
    """Returns whether `sgemm` (a cblas_sgemm) gets a product of whole numbers, 128 cubed, exactly right.

    Every partial sum is a whole number below 2**24, so any order of summation gives the same float32s.
    """
    size = 128
    two_rows = [array("f", range(size)), array("f", (5 - k % 11 for k in range(size)))]
    cycle = array("f", range(7)) * (size // 7 + 3)
    right, expected = array("f"), array("f")
    for k in range(size):
        right += cycle[k % 7 : k % 7 + size]  # right[k, j] = (k + j) % 7
    for row in two_rows:
        period = array("f", (sum(x * ((k + j) % 7) for k, x in enumerate(row)) for j in range(7)))
        expected += (period * (size // 7 + 1))[:size]
    left, expected = (two_rows[0] + two_rows[1]) * (size // 2), expected * (size // 2)
    out = array("f", bytes(4 * size * size))
    (a, _), (b, _), (c, _) = left.buffer_info(), right.buffer_info(), out.buffer_info()
    whole, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    sgemm.argtypes = [whole] * 6 + [real, pointer, whole, pointer, whole, real, pointer, whole]
    sgemm.restype = None
    row_major, plain = 101, 111
    sgemm(row_major, plain, plain, size, size, size, 1.0, a, size, b, size, 0.0, c, size)
    return out == expected


def needed_libraries(path: str) -> list[str]:
    """Returns the shared libraries that a 64-bit little-endian ELF file asks for (its DT_NEEDED entries)."""
    with open(path, "rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return []
        table, entry_bytes, count = struct.unpack_from("<32xQ14xHH", header)
        file.seek(table)
        programs = [struct.unpack("<IIQQQQQQ", file.read(entry_bytes)[:56]) for _ in range(count)]
        load, dynamic, str_table, needed = 1, 2, 5, 1
        loads = [p for p in programs if p[0] == load]
        _, _, offset, _, _, size, _, _ = next(p for p in programs if p[0] == dynamic)
        file.seek(offset)
        entries = list(struct.iter_unpack("<qQ", file.read(size - size % 16)))
        address = next(value for tag, value in entries if tag == str_table)
        start = next(p[2] + address - p[3] for p in loads if p[3] <= address < p[3] + p[5])
        names = []
        for tag, value in entries:
            if tag == needed:
                file.seek(start + value)
                names.append(file.read(256).split(b"\0", 1)[0].decode())
        return names


class _SymbolPlace(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _file_of(function) -> str:
    """Returns the path of the loaded library that `function` comes from (dladdr)."""
    place = _SymbolPlace()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return os.path.realpath(os.fsdecode(place.file)) if found and place.file else ""


def _version(library, prefix: str = "") -> str:
    """Returns OpenBLAS's own description of itself: version, options, kernel; "" if it has none."""
    try:
        describe = library[f"{prefix}openblas_get_config"]
    except AttributeError:
        return ""
    describe.restype = ctypes.c_char_p
    return describe().decode(errors="replace").strip()


def num_threads() -> int | None:
    """Returns how many threads the OpenBLAS of this process runs a product with, None without one."""
    function = _openblas("get_num_threads")
    return function() if function else None


def set_num_threads(number: int) -> None:
    """Has OpenBLAS, if this process has one, run products with `number` threads from now on."""
    if function := _openblas("set_num_threads"):
        function(number)


def _openblas(name: str):
    process = ctypes.CDLL(None)
    names = (f"openblas_{name}", f"scipy_openblas_{name}")
    return next((process[full] for full in names if hasattr(process, full)), None)
