"""`mlxft doctor`: what this machine is, which libraries compute, how fast and how exactly, on one screen.

The exit code is 0, with warnings marked, if MLX computes rightly; 1 if it can't be loaded or gets a
product wrong.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import mlxft
from mlxft import blas
from mlxft.available_memory import available_bytes
from mlxft.errors import EXIT_DONE, EXIT_FAULT

_PACKAGES = ("mlx", "mlx-lm", "hydra-core", "transformers", "datasets", "numpy")
_MLX_BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")

# Variables that change what the libraries do; mlxft itself reads none.
_VARIABLES = re.compile(
    r"(HF|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|OPENBLAS|GOTO|OMP|MLX|WANDB|HYDRA)_\w+"
    r"|CUDA_VISIBLE_DEVICES|LD_PRELOAD|LD_LIBRARY_PATH|XDG_CACHE_HOME|TMPDIR|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy"
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSWORD")

# Relative error of a product of random matrices in float32, in the Frobenius norm. 1,024 roundings of
# 2**-24 each stay under the first; the second leaves room for TensorFloat-32 (11 bits), a GPU's default.
_TOLERANCE = {"cpu": 1e-5, "gpu": 2e-3}

_LITTLE_DISK_BYTES = 2 * 1024**3
_LITTLE_MEMORY_BYTES = 2 * 1024**3
_HUB_ANSWERS_WITHIN_S = 3.0
_TIMED_S = 0.15


@dataclass
class Report:
    """Everything doctor found out; sizes in bytes, speeds in GFLOP/s. `--json` prints it as it is."""

    packages: dict[str, Optional[str]] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Optional[int]] = field(default_factory=dict)
    blas: dict[str, Any] = field(default_factory=dict)
    product: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    compiler: dict[str, Optional[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    hub: Optional[dict[str, Any]] = None
    disk: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Prints the report; returns 0, or 1 if MLX can't be loaded or computes wrongly."""
    described = "Backend, versions, BLAS, memory and speed in one screen."
    parser = argparse.ArgumentParser(prog="mlxft doctor", description=described)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--online", action="store_true", help="also see whether the model hub can be reached")
    options = parser.parse_args(args)
    report = examine(options.online)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)
    return EXIT_FAULT if report.errors else EXIT_DONE


def examine(online: bool = False) -> Report:
    """Returns the report on this machine. The network is asked only if `online`."""
    report = Report()
    _find_packages(report)
    try:
        _find_device(report)
        _find_blas(report)
        _check_product(report)
        _measure_speed(report)
    except (ImportError, RuntimeError) as error:
        advice = "Install what fits this machine: mlxft[cpu], mlxft[cuda12] or mlxft[cuda13]"
        report.errors.append(f"MLX does not work here: {error}. {advice}")
    _find_compiler(report)
    _find_environment(report)
    if online:
        _ask_hub(report)
    _find_disk(report)
    return report


def _find_packages(report: Report) -> None:
    report.packages = {"mlxft": mlxft.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        report.packages[name] = _version(name)
        if report.packages[name] is None:
            report.warnings.append(f"the package {name} is not installed")
    backends = {name: _version(name) for name in _MLX_BACKENDS}
    report.packages |= {name: version for name, version in backends.items() if version}


def _version(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_device(report: Report) -> None:
    """Fills in device and memory. Raises: ImportError or RuntimeError where MLX does not work."""
    import mlx.core as mx

    from mlxft.backend import backend

    info = mx.device_info()
    report.device = {
        "backend": backend(),
        "name": str(info.get("device_name") or platform.processor() or platform.machine()),
        "cores": _usable_cores(),
        "system": platform.platform(),
    }
    page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    report.memory = {
        "total_bytes": page_bytes * pages,
        "available_bytes": available_bytes(),
        "device_bytes": info.get("total_memory") or info.get("memory_size"),
        "mlx_limit_bytes": mx.get_memory_limit(),
    }
    available = report.memory["available_bytes"]
    if available < _LITTLE_MEMORY_BYTES:
        report.warnings.append(f"only {_size(available)} of memory is available")


def _usable_cores() -> int:
    """Returns the cores this process may use: what a container allows, where it is less than the machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, round(int(allowed) / int(period))))
    return cores


def _find_blas(report: Report) -> None:
    status = blas.preload()
    threads = blas.num_threads()
    report.blas = {**status._asdict(), "threads": threads}
    if report.device["backend"] != "cpu":
        return
    if not status.optimised:
        report.warnings.append(f"products in float32 are slow: {status.reason}")
    cores = report.device["cores"]
    if threads and threads > cores:
        advice = f"set OPENBLAS_NUM_THREADS={cores}"
        report.warnings.append(f"BLAS runs {threads} threads on {_count(cores, 'core')}: {advice}")


def _check_product(report: Report) -> None:
    """Multiplies two random matrices in float32 and compares with numpy in float64."""
    import mlx.core as mx
    import numpy as np

    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal((512, 512), dtype=np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    ours = np.array(mx.array(left) @ mx.array(right))
    error = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    on_cpu = report.device["backend"] == "cpu"
    tolerance = _TOLERANCE["cpu" if on_cpu else "gpu"]
    right_enough = error <= tolerance  # false for NaN too
    report.product = {"relative_error": error, "tolerance": tolerance, "right": right_enough}
    if not right_enough:
        report.errors.append(
            f"a float32 product is wrong: relative error {error:.1e}, at most {tolerance:.0e} is right. "
            f"It was computed by {report.blas['name'] if on_cpu else report.device['name']}"
        )


def _measure_speed(report: Report) -> None:
    """Times square products in float32 and bfloat16, and on a CPU one with 4-bit quantised weights."""
    import mlx.core as mx
    import numpy as np

    on_cpu = report.device["backend"] == "cpu"
    generator = np.random.default_rng(0)

    def operands(size: int, dtype: mx.Dtype) -> list[mx.array]:
        pair = generator.standard_normal((2, size, size), dtype=np.float32)
        return [mx.array(matrix).astype(dtype) for matrix in pair]

    float32 = operands(1024 if on_cpu else 4096, mx.float32)
    report.speed["float32_gflops"] = _gflops(lambda: float32[0] @ float32[1], float32)
    threads = report.blas["threads"]
    if on_cpu and threads and threads > 1:
        blas.set_num_threads(1)
        one_thread = _gflops(lambda: float32[0] @ float32[1], float32)
        blas.set_num_threads(threads)
        if advice := _thread_advice(one_thread, report.speed["float32_gflops"], threads):
            report.warnings.append(advice)
    bfloat16 = operands(384 if on_cpu else 4096, mx.bfloat16)
    report.speed["bfloat16_gflops"] = _gflops(lambda: bfloat16[0] @ bfloat16[1], bfloat16)
    if on_cpu:
        rows, weights = operands(256, mx.float32)
        quantised = mx.quantize(weights, bits=4)
        report.speed["quantised_4bit_gflops"] = _gflops(
            lambda: mx.quantized_matmul(rows, *quantised, bits=4), [rows, *quantised]
        )


def _thread_advice(one_thread: float, all_threads: float, num_threads: int) -> Optional[str]:
    """Returns a warning if products are faster on one thread, from GFLOP/s with one and with all of them.

    OpenBLAS's threads wait for each other within a product: where other programs hold a core, all wait
    for the one that lost it, and a product can take ten times as long.
    """
    if all_threads >= one_thread:
        return None
    return (
        f"other programs keep the cores busy: float32 products run at {all_threads:,.0f} GFLOP/s with "
        f"{num_threads} threads and at {one_thread:,.0f} with one. OPENBLAS_NUM_THREADS=1 helps meanwhile"
    )


def _gflops(product: Callable[[], Any], operands: list) -> float:
    """Returns the speed of a square product over a short while, after one that is not counted."""
    import mlx.core as mx

    mx.eval(operands, product())
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _TIMED_S:
        mx.eval(product())
        count += 1
    return round(2 * operands[0].shape[0] ** 3 * count / seconds / 1e9, 1)


def _find_compiler(report: Report) -> None:
    """Looks for the compiler that MLX's CPU backend calls when a program runs."""
    name = "clang++" if sys.platform == "darwin" else "g++"
    path = shutil.which(name)
    version = None
    if path:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
        version = (done.stdout.splitlines() or [""])[0]
    report.compiler = {"name": name, "path": path, "version": version}
    if path is None and report.device.get("backend") == "cpu":
        consequence = "MLX's CPU backend can't fuse operations, which slows training"
        report.warnings.append(f"no {name} in PATH: {consequence}")


def _find_environment(report: Report) -> None:
    for name in sorted(filter(_VARIABLES.fullmatch, os.environ)):
        value = "(set, not shown)" if _SECRET.search(name) else os.environ[name]
        report.environment[name] = re.sub(r"//[^/@]+@", "//...@", value)  # no password of a proxy


def _ask_hub(report: Report) -> None:
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    address, fault = constants.ENDPOINT, None
    started = time.perf_counter()
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "mlxft"})
        with urllib.request.urlopen(request, timeout=_HUB_ANSWERS_WITHIN_S):
            pass
    except urllib.error.HTTPError:
        pass  # whatever the status: somebody is there
    except (OSError, ValueError) as error:
        fault = str(getattr(error, "reason", error))
    seconds = round(time.perf_counter() - started, 2)
    report.hub = {"address": address, "reached": fault is None, "seconds": seconds, "fault": fault}
    if fault is not None:
        report.warnings.append(f"the hub can't be reached ({fault}): models must be local or cached")
    elif constants.HF_HUB_OFFLINE:
        report.warnings.append("HF_HUB_OFFLINE is set: models must be local or cached")


def _find_disk(report: Report) -> None:
    from huggingface_hub import constants

    for what, folder in (("hub cache", Path(constants.HF_HUB_CACHE)), ("runs", Path("runs").absolute())):
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        report.disk.append({"what": what, "path": str(folder), "free_bytes": free, "writable": writable})
        if free < _LITTLE_DISK_BYTES:
            report.warnings.append(f"only {_size(free)} of disk is free for the {what} in {folder}")
        if not writable:
            report.warnings.append(f"the folder of the {what} can't be written: {folder}")


def show(report: Report) -> None:
    """Prints the report on one screen: a table in a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    verdicts = [("error", "red", text) for text in report.errors]
    verdicts += [("warning", "yellow", text) for text in report.warnings]
    rows = [(label, "", text) for label, text in _lines(report)]
    rows += verdicts or [("verdict", "green", "all is well")]
    if not console.is_terminal:
        for label, _, text in rows:
            print(f"{label}: {text}")
        return
    table, above = Table.grid(padding=(0, 2)), ""
    for label, colour, text in rows:
        shown = Text("" if label == above else label, style=f"bold {colour}")
        table.add_row(shown, Text(text, overflow="fold"))
        above = label
    console.print(table)


def _lines(report: Report) -> list[tuple[str, str]]:
    """Returns the report as labels and texts, in the order of the screen."""
    versions = [f"{name} {version or 'missing'}" for name, version in report.packages.items()]
    lines = [("versions", ", ".join(versions)), *_device_lines(report)]
    lines.append(("compiler", report.compiler["version"] or f"no {report.compiler['name']}"))
    if report.hub:
        state = f"answers in {report.hub['seconds']} s" if report.hub["reached"] else "out of reach"
        lines.append(("hub", f"{report.hub['address']} {state}"))
    for disk in report.disk:
        lines.append((disk["what"], f"{disk['path']}, {_size(disk['free_bytes'])} free"))
    return lines + [("environment", f"{name}={value}") for name, value in report.environment.items()]


def _device_lines(report: Report) -> list[tuple[str, str]]:
    lines = []
    if device := report.device:
        where = f"{device['backend']} backend, {_count(device['cores'], 'core')}"
        lines.append(("device", f"{device['name']}, {where}, {device['system']}"))
        words = {
            "total": "total",
            "available": "available",
            "device": "on the GPU",
            "mlx_limit": "MLX's limit",
        }
        sizes = {word: report.memory[f"{key}_bytes"] for key, word in words.items()}
        lines.append(("memory", ", ".join(f"{_size(size)} {word}" for word, size in sizes.items() if size)))
    if found := report.blas:
        threads = f" ({_count(found['threads'], 'thread')})" if found["threads"] else ""
        path = f", {found['path']}" if found["path"] else ""
        lines.append(("BLAS", f"{found['name']}{threads}: {found['reason']}{path}"))
    if product := report.product:
        verdict = "right" if product["right"] else "wrong"
        lines.append(("product", f"{verdict}, off by {product['relative_error']:.1e} from float64's"))
    if report.speed:
        speeds = {key.removesuffix("_gflops").replace("_", " "): value for key, value in report.speed.items()}
        lines.append(("GFLOP/s", ", ".join(f"{name} {value:,.1f}" for name, value in speeds.items())))
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.1f} GB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
