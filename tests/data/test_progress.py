"""The bar that follows rows being tokenised: on a terminal, after a moment, and nowhere else."""

import os
import pty
import subprocess
import sys

import pytest

from tests.command import environment

CODE = """
import sys
from mlxft.config.schema import DataConfig
from mlxft.data import load, progress
progress._MOMENT_S = float(sys.argv[2])
rows, _ = load.load_examples(sys.argv[1], DataConfig(cache=False), None, 9)
print(len(rows))
"""


@pytest.fixture
def command(write_rows):
    """Returns a function (seconds of a moment) -> the command that loads 1,200 rows."""
    path = write_rows([{"input_ids": [1, 2]}] * 1200)
    return lambda moment: [sys.executable, "-c", CODE, path, str(moment)]


def on_a_terminal(command) -> str:
    """Returns what a command writes on standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    variables = environment(TERM="xterm", COLUMNS="100")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=variables) as process:
        os.close(theirs)
        written = b""
        try:
            while more := os.read(ours, 4096):
                written += more
        except OSError:  # Linux says so when the other end is closed
            pass
        os.close(ours)
        assert process.stdout.read() == b"1200\n"
    return written.decode()


def test_a_terminal_shows_how_far_it_is(command):
    shown = on_a_terminal(command(0))
    assert "tokenising" in shown and "1,200 rows" in shown


def test_what_takes_no_more_than_a_moment_shows_nothing(command):
    assert on_a_terminal(command(60)) == ""


def test_a_pipe_gets_nothing(command):
    done = subprocess.run(command(0), env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1200\n", "")
