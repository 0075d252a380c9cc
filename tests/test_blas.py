"""The BLAS that mlxft puts before MLX's own: each claim is about a process of its own."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxft import blas

ROOT = Path(blas.__file__).resolve().parent.parent
SHIM = ROOT / "mlxft" / "blas_shim.c"
SITE = Path(np.__file__).resolve().parent.parent


def is_linux_cpu_build() -> bool:
    library = blas._mlx_library() if sys.platform == "linux" else None
    return library is not None and not any("libcuda" in name for name in blas.needed_libraries(library))


pytestmark = pytest.mark.skipif(not is_linux_cpu_build(), reason="concerns MLX's CPU build for Linux")

# Multiplies in float32 and prints the status and what came out, compared with float64.
PRODUCT = """
import hashlib, json
import numpy as np
from mlxft.blas import preload
import mlx.core as mx
rng = np.random.default_rng(0)
a, b = (rng.standard_normal((1024, 1024), dtype=np.float32) for _ in range(2))
ours = np.array(mx.array(a) @ mx.array(b))
again = np.array(mx.array(a) @ mx.array(b))
exact = a.astype(np.float64) @ b.astype(np.float64)
print(json.dumps({
    **preload()._asdict(),
    "error": float(np.linalg.norm(ours - exact) / np.linalg.norm(exact)),
    "sha": hashlib.sha256(ours.tobytes()).hexdigest(),
    "repeats": bool((ours == again).all()),
}))
"""


class Processes:
    """Starts interpreters with a BLAS cache of their own and no OpenBLAS of the system's in sight."""

    def __init__(self, folder: Path):
        self.cache = folder / "cache"
        self.system = folder / "system"  # searched by the dynamic linker before the system's folders
        self.system.mkdir()
        for name in blas._SYSTEM_NAMES:
            (self.system / name).touch()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self.cache),
            "LD_LIBRARY_PATH": str(self.system),
            "OPENBLAS_NUM_THREADS": "2",
        }

    def start(self, code: str, *options: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *options, "-c", code],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, process: subprocess.Popen) -> dict:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return json.loads(out)

    def run(self, code: str, *options: str, **environment: str) -> dict:
        return self.result(self.start(code, *options, **environment))

    def shims(self) -> list[Path]:
        return list((self.cache / "mlxft" / "blas").glob("*/*"))


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path)


STATUS = "import json, mlxft.blas as b; print(json.dumps(b.preload()._asdict()))"


def compile_library(path: Path, *arguments: str) -> Path:
    path.unlink(missing_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), *arguments], check=True)
    return path


def plainly_named_openblas(path: Path) -> Path:
    """Makes a library that is to the linker what a distribution's libopenblas.so.0 is."""
    folder = SITE / "scipy_openblas32" / "lib"
    link = [f"-L{folder}", "-l:libscipy_openblas.so", f"-Wl,-rpath,{folder}", "-Wl,--no-as-needed"]
    return compile_library(path, str(SHIM), "-nostdlib", *link)


def test_the_product_is_right_and_the_status_names_the_library():
    result = json.loads(subprocess.check_output([sys.executable, "-c", PRODUCT], cwd=ROOT, text=True))
    assert result["error"] < 1e-6  # 2**-24 a rounding, 1024 of them that mostly cancel
    assert result["optimised"] and result["name"].startswith("OpenBLAS")


def test_the_package_serves_every_function_that_mlx_imports(processes):
    process = processes.start("import mlxft, mlx.core", LD_DEBUG="bindings")
    bindings = re.findall(
        r"binding file \S*libmlx\.so \[0\] to (\S+) \[0\]: .*`(\w+)'", process.communicate()[1]
    )
    places = {name: Path(file).name for file, name in bindings if re.fullmatch(r"cblas_\w+|[a-z0-9]+_", name)}
    assert {"cblas_sgemm", "sgesdd_"} <= places.keys()
    assert set(places.values()) == {"libmlxft_blas.so"}


def test_the_same_product_has_the_same_bits_in_two_processes(processes):
    first, second = processes.run(PRODUCT), processes.run(PRODUCT)
    assert first["repeats"] and second["repeats"]
    assert first["sha"] == second["sha"]


def test_two_processes_that_build_at_once_both_work(processes):
    started = [processes.start(STATUS), processes.start(STATUS)]
    assert all(processes.result(process)["optimised"] for process in started)
    assert [path.name for path in processes.shims()] == ["libmlxft_blas.so"]


def test_a_second_process_takes_the_shim_that_the_first_one_built(processes):
    processes.run(STATUS)
    (shim,) = processes.shims()
    built = shim.stat().st_mtime_ns
    assert processes.run(STATUS, PATH="")["optimised"]  # without a compiler: there is nothing to build
    assert shim.stat().st_mtime_ns == built


def test_a_damaged_shim_is_built_again(processes):
    processes.run(STATUS)
    (shim,) = processes.shims()
    shim.write_bytes(b"no library")
    assert processes.run(STATUS)["optimised"]
    assert shim.read_bytes().startswith(b"\x7fELF")


def test_a_cache_that_cannot_be_written_costs_a_build_and_leaves_nothing(processes, tmp_path):
    processes.cache.write_text("a file where the folder should be")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = processes.run(PRODUCT, TMPDIR=str(scratch))
    assert result["optimised"] and result["error"] < 1e-6
    assert list(scratch.iterdir()) == []


def test_without_a_compiler_a_sentence_says_so(processes, tmp_path):
    result = processes.run(PRODUCT, PATH=str(tmp_path))
    assert not result["optimised"] and result["name"] == "MLX's own BLAS"
    assert "needs a C compiler once, and PATH has none of cc, gcc, g++" in result["reason"]
    assert result["error"] < 1e-5


def test_a_compiler_that_fails_is_named_with_its_complaint(processes, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 1\n")
    compiler.chmod(0o755)
    reason = processes.run(STATUS, PATH=str(tmp_path))["reason"]
    assert f"{compiler} could not compile" in reason and "(out of order)" in reason


def test_without_any_openblas_a_sentence_says_what_to_install(processes, tmp_path):
    site = tmp_path / "site"  # an environment with MLX and numpy only
    site.mkdir()
    for name in ("mlx", "mlx_cpu.libs", "numpy", "numpy.libs"):
        (site / name).symlink_to(SITE / name)
    result = processes.run(PRODUCT, "-S", PYTHONPATH=f"{ROOT}:{site}")
    assert not result["optimised"] and result["error"] < 1e-5
    assert "pip install scipy-openblas32" in result["reason"]
    empty = processes.run(STATUS, "-S")
    assert (empty["optimised"], empty["reason"]) == (False, "MLX is not installed with a backend for Linux")


def test_mlx_imported_first_is_reported(processes):
    result = processes.run("import mlx.core;" + STATUS)
    assert not result["optimised"] and result["reason"].startswith("mlx was imported first")


def test_the_systems_openblas_comes_first_and_needs_no_compiler(processes, tmp_path):
    library = plainly_named_openblas(processes.system / "libopenblas.so.0")
    result = processes.run(PRODUCT, PATH=str(tmp_path))
    assert (result["path"], result["reason"]) == (str(library), "the system's")
    assert result["error"] < 1e-6 and processes.shims() == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("void cblas_sgemm(void) {}", "computes wrong products on this processor"),
        (
            'void cblas_sgemm(void) {} char *openblas_get_config(void) { return "OpenBLAS USE64BITINT"; }',
            "takes 64-bit integers",
        ),
        ("int nothing;", "has no cblas_sgemm"),
        (None, "can't be loaded"),
    ],
)
def test_a_system_library_that_will_not_do_is_passed_over_and_named(processes, tmp_path, source, fault):
    if source is not None:
        (tmp_path / "bad.c").write_text(source)
        compile_library(processes.system / "libopenblas.so.0", str(tmp_path / "bad.c"))
    assert "scipy-openblas32" in processes.run(STATUS)["reason"]
    shutil.rmtree(processes.cache)
    assert fault in processes.run(STATUS, PATH=str(tmp_path))["reason"]


def test_a_blas_that_is_already_in_the_process_is_left_in_charge(processes, tmp_path):
    library = plainly_named_openblas(tmp_path / "libmine.so")
    result = processes.run(PRODUCT, LD_PRELOAD=str(library))
    assert result["optimised"] and result["path"] == str(library)
    assert result["reason"] == "it was in the process before mlxft was imported"


def test_a_cuda_build_of_mlx_is_left_alone(processes, tmp_path):
    (tmp_path / "empty.c").write_text("")
    (tmp_path / "mlx" / "lib").mkdir(parents=True)
    empty = str(tmp_path / "empty.c")
    cuda = compile_library(tmp_path / "libcublasLt.so.13", empty, "-Wl,-soname,libcublasLt.so.13")
    compile_library(tmp_path / "mlx" / "lib" / "libmlx.so", empty, "-Wl,--no-as-needed", str(cuda))
    result = processes.run(STATUS, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert not result["optimised"] and result["reason"] == "a CUDA build of MLX computes on the GPU"


def test_importing_mlxft_imports_nothing_heavy(processes):
    code = "import json, sys, mlxft; print(json.dumps(sorted(sys.modules)))"
    processes.run(STATUS)  # builds
    modules = set(processes.run(code))
    heavy = {
        "mlx",
        "numpy",
        "transformers",
        "datasets",
        "hydra",
        "scipy_openblas32",
        "subprocess",
        "tempfile",
    }
    assert not modules & heavy


def numpy_sgemm(fault: float):
    """Returns a cblas_sgemm made of numpy whose last entry is off by `fault`."""

    def sgemm(_order, _ta, _tb, m, n, k, _alpha, a, _lda, b, _ldb, _beta, c, _ldc):
        a, b, c = (ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)) for pointer in (a, b, c))
        out = np.ctypeslib.as_array(c, (m, n))
        out[:] = np.ctypeslib.as_array(a, (m, k)) @ np.ctypeslib.as_array(b, (k, n))
        out[-1, -1] += fault

    return sgemm


def test_the_check_tells_a_right_product_from_a_slightly_wrong_one():
    assert blas.multiplies_exactly(numpy_sgemm(fault=0))
    assert not blas.multiplies_exactly(numpy_sgemm(fault=1))
