"""`mlxft doctor` as a user runs it: one process each, its output and its exit code."""

import http.server
import json
import os
import pty
import subprocess
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxft
from mlxft.doctor import _thread_advice

ROOT = Path(mlxft.__file__).resolve().parent.parent
linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu),
    reason="about MLX's CPU build for Linux",
)
SITE = Path(np.__file__).resolve().parent.parent
DOCTOR = "import sys; from mlxft.doctor import main; sys.exit(main(sys.argv[1:]))"


def doctor(*args: str, code: str = DOCTOR, **environment: str) -> subprocess.CompletedProcess:
    settings = {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )


def report(*args: str, **environment: str) -> dict:
    done = doctor("--json", *args, **environment)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def here() -> dict:
    return report(WANDB_API_KEY="a-secret", HTTPS_PROXY="http://me:a-secret@127.0.0.1:1", OMP_NUM_THREADS="2")


def test_the_product_of_this_machine_is_right(here):
    assert here["product"]["right"] and here["errors"] == []
    assert 0 < here["product"]["relative_error"] < here["product"]["tolerance"]


def test_what_was_found_is_there_and_plausible(here):
    assert here["packages"]["mlxft"] == mlxft.__version__
    assert here["packages"]["python"] == sys.version.split()[0]
    assert all(here["packages"][name] for name in ("mlx", "mlx-lm", "hydra-core", "transformers", "datasets"))
    assert here["device"]["name"] and 1 <= here["device"]["cores"] <= os.cpu_count()
    assert 0 < here["memory"]["mlx_limit_bytes"]
    assert {"float32_gflops", "bfloat16_gflops"} <= here["speed"].keys()
    assert all(speed > 0 for speed in here["speed"].values())
    assert [disk["what"] for disk in here["disk"]] == ["hub cache", "runs"]
    assert here["hub"] is None  # the network is asked on request only


def test_variables_of_the_libraries_are_listed_without_their_secrets(here):
    assert here["environment"]["OMP_NUM_THREADS"] == "2"
    assert here["environment"]["WANDB_API_KEY"] == "(set, not shown)"
    assert here["environment"]["HTTPS_PROXY"] == "http://...@127.0.0.1:1"
    assert "PATH" not in here["environment"]


def test_plain_lines_when_nobody_watches():
    done = doctor()
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert all(len(line) == 2 for line in lines)
    labels = [label for label, _ in lines]
    assert labels[:6] == ["versions", "device", "memory", "BLAS", "product", "GFLOP/s"]
    assert labels[-1] in ("verdict", "warning")


def test_a_table_in_a_terminal():
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", DOCTOR], env=environment, stdout=theirs, timeout=120, check=True)
    os.close(theirs)
    screen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "\x1b[1mversions" in screen
    assert screen.count("\n") < 40


@linux_cpu
def test_a_wrong_product_is_an_error(tmp_path):
    # Right where the import looks (whole numbers, 128 cubed), wrong elsewhere.
    folder = SITE / "scipy_openblas32" / "lib"
    (tmp_path / "wrong.c").write_text("""
        typedef const float *in;
        void scipy_cblas_sgemm(int, int, int, int, int, int, float, in, int, in, int, float, float *, int);
        void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float alpha, in a, int lda, in b,
                         int ldb, float beta, float *c, int ldc) {
          scipy_cblas_sgemm(o, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
          if (m != 128) c[0] += 1000;
        }
    """)
    link = [f"-L{folder}", "-l:libscipy_openblas.so", f"-Wl,-rpath,{folder}"]
    target = ["-o", str(tmp_path / "libopenblas.so.0"), str(tmp_path / "wrong.c")]
    subprocess.run(["cc", "-shared", "-fPIC", *target, *link], check=True)
    done = doctor(LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "product: wrong" in done.stdout
    assert "It was computed by libopenblas.so.0" in done.stdout


@linux_cpu
def test_without_an_optimised_blas_it_warns_and_says_what_to_do(tmp_path):
    done = doctor("--json", PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    found = json.loads(done.stdout)
    assert done.returncode == 0 and not found["blas"]["optimised"]
    assert any("slow" in text and "needs a C compiler" in text for text in found["warnings"])
    assert any(text.startswith("no g++ in PATH") for text in found["warnings"])


def test_threads_that_wait_for_each_other_are_a_warning():
    advice = _thread_advice(one_thread=90.4, all_threads=6.6, num_threads=2)
    assert "at 7 GFLOP/s with 2 threads and at 90 with one" in advice
    assert "OPENBLAS_NUM_THREADS=1" in advice
    assert _thread_advice(one_thread=90.4, all_threads=180.0, num_threads=2) is None


@linux_cpu
def test_more_threads_than_cores_is_a_warning():
    one_core = "import os, mlxft; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);" + DOCTOR
    found = json.loads(doctor("--json", code=one_core).stdout)
    crowded = found["blas"]["threads"] > 1
    assert any("set OPENBLAS_NUM_THREADS=1" in text for text in found["warnings"]) == crowded


def test_an_mlx_that_cannot_be_loaded_is_an_error_and_the_rest_is_still_told(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / f"core{EXTENSION_SUFFIXES[0]}").touch()
    done = doctor("--json", PYTHONPATH=f"{ROOT}:{tmp_path}")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert "MLX does not work here" in found["errors"][0] and "mlxft[cpu]" in found["errors"][0]
    assert found["disk"] and found["packages"]["mlx"]


def test_the_hub_is_reached_when_it_answers_and_a_warning_when_it_does_not():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    assert report("--online", HF_ENDPOINT=address)["hub"]["reached"]  # with an error status: it is there
    server.shutdown()
    server.server_close()
    found = report("--online", HF_ENDPOINT=address)
    assert not found["hub"]["reached"]
    assert any("the hub can't be reached" in text and "refused" in text for text in found["warnings"])


@linux_cpu
def test_a_cache_without_room_is_a_warning():
    found = report(HF_HUB_CACHE="/proc/nowhere")
    assert any("only 0.0 GB of disk is free for the hub cache" in text for text in found["warnings"])


def test_an_unknown_option_is_an_input_error():
    done = doctor("--jsn")
    assert done.returncode == 2 and "--jsn" in done.stderr and "Traceback" not in done.stderr
