"""Programs run apart: what passes, what is stopped, what they cannot do."""

import time

import pytest

from mlxft.evaluation import sandbox


def test_a_program_that_ends_has_passed_and_one_that_fails_has_not():
    assert sandbox.run("assert 1 + 1 == 2", 10).passed
    failed = sandbox.run("assert 1 + 1 == 3, 'wrong sum'", 10)
    assert not failed.passed and "wrong sum" in failed.told


def test_a_program_that_is_no_python_has_not_passed():
    assert "SyntaxError" in sandbox.run("def f(:", 10).told


@pytest.mark.parametrize("ending", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_program_that_ends_itself_before_its_tests_has_not_passed(ending):
    assert not sandbox.run(f"{ending}\nassert False", 10).passed


def test_a_program_that_does_not_end_is_stopped_with_what_it_started():
    began = time.perf_counter()
    stopped = sandbox.run("import subprocess\nsubprocess.run(['sleep', '60'])", 1.5)
    assert not stopped.passed and stopped.told == "stopped after 1.5 seconds"
    assert time.perf_counter() - began < 20


def test_a_program_has_little_memory_and_writes_no_large_file():
    assert not sandbox.run("kept = bytearray(4 << 30)", 10).passed
    assert not sandbox.run("with open('large', 'wb') as file:\n    file.write(bytes(64 << 20))", 10).passed


def test_a_program_has_a_folder_of_its_own_that_is_gone_after(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert sandbox.run("open('made', 'w').write('x')", 10).passed
    assert list(tmp_path.iterdir()) == []


def test_a_program_sees_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert sandbox.run("import os\nassert 'HF_TOKEN' not in os.environ", 10).passed


@pytest.mark.skipif(not sandbox.cuts_network(), reason="this system lets nobody make a network namespace")
def test_a_program_has_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # from here it can be reached
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert not sandbox.run(reach, 10).passed
