"""What a person sees of a run: plain lines in a pipe, a bar on a terminal, in any encoding."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

from mlxft.training.screen import LastingStream, PlainScreen, lasting_output
from tests.command import MLXFT, environment, mlxft
from tests.runs import train


def record(step, **more):
    return {
        **{
            "step": step,
            "seconds": 0.5,
            "loss": 2.5,
            "lr": 1e-4,
            "tokens_per_s": 1234.5,
            "positions": 700,
            "peak_bytes": 2.5e9,
        },
        **more,
    }


# ---- plain lines ----


def test_a_line_shows_loss_speed_memory_time_left_and_rate(capsys):
    PlainScreen(101).step(record(1))
    assert capsys.readouterr().out == (
        "step 1/101  loss 2.5000  1,234 tokens/s  peak 2.50 GB  0:50 left  lr 1.00e-04\n"
    )


def test_a_long_row_with_few_trained_tokens_shows_how_many_positions_went_by(capsys):
    PlainScreen(101).step(record(1, tokens_per_s=0.34, seconds=100.0, positions=4000))
    assert "  0.3 tokens/s of 40 positions/s  " in capsys.readouterr().out


def test_hours_are_shown_where_there_are_any(capsys):
    PlainScreen(10_001).step(record(1))
    assert "  1:23:20 left  " in capsys.readouterr().out


def test_many_quick_steps_are_few_lines_and_the_last_is_among_them(capsys):
    screen = PlainScreen(10_000)
    for step in range(1, 10_001):
        screen.step(record(step, **({"skipped": step} if step % 2 else {})))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 4
    assert lines[0].startswith("step 1/10000  ") and lines[-1].startswith("step 10000/10000  ")


def test_a_skipped_step_and_a_validation_are_told(capsys):
    screen = PlainScreen(5)
    screen.step(record(1, loss=float("nan"), skipped=1))
    screen.valid({"step": 1, "loss": 1.25, "best": True})
    screen.valid({"step": 2, "loss": 1.5, "best": False})
    shown = capsys.readouterr().out
    assert "SKIPPED (not finite)  loss nan" in shown
    assert "validation at step 1: loss 1.2500  (best so far)\nvalidation at step 2: loss 1.5000\n" in shown


def test_a_runs_lines_are_on_standard_output_without_control_characters(model, data, tmp_path, capsys):
    train(model, data, tmp_path / "run", "trainer.max_steps=3", "adapter.rank=2")
    shown = capsys.readouterr().out
    assert re.findall(r"^step (\d)/3 ", shown, re.MULTILINE) == ["1", "3"]
    assert "\x1b" not in shown and "\r" not in shown


# ---- streams ----


def ascii_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def test_characters_that_the_encoding_lacks_become_question_marks():
    stream = ascii_stream()
    print("grün — 你好", file=LastingStream(stream, "standard output"), flush=True)
    assert stream.buffer.getvalue() == b"gr?n ? ??\n"


def test_a_stream_that_was_never_there_takes_everything(monkeypatch):
    """`mlxft train >&-` starts without a standard output."""
    monkeypatch.setattr(sys, "stdout", None)
    with lasting_output():
        print("to nobody", flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is None


def test_streams_are_as_they_were_after_a_run():
    before = sys.stdout, sys.stderr
    with lasting_output():
        assert (sys.stdout, sys.stderr) != before
        assert sys.stdout.fileno() == before[0].fileno()  # what it does not do itself the stream does
    assert (sys.stdout, sys.stderr) == before


def test_a_stream_whose_reader_has_gone_is_silent_and_says_so_once(caplog):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        lasting = LastingStream(stream, "standard output")
        for _ in range(3):
            print("a line", file=lasting, flush=True)
    told = [message for message in caplog.messages if "standard output is closed (Broken pipe)" in message]
    assert len(told) == 1


def test_a_run_in_an_ascii_locale_shows_answers_that_are_not_ascii(model, data, tmp_path):
    ascii_only = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = mlxft(
        "train", f"model.path={model}", f"data.train={data}", "data.format=tokens", "run.dir=run",
        "trainer.max_steps=1", "trainer.samples=[Why?]", folder=tmp_path, text=False, env=ascii_only,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"Why?\n  before: " in done.stdout
    answer = (tmp_path / "run" / "summary.json").read_text()
    assert "\\u" in answer  # a model of random bytes answers with other characters too


# ---- a terminal ----


class Terminal:
    """The command at work in a pseudo-terminal of so many columns; `shown` is all that it printed."""

    def __init__(self, columns: int, *overrides: str):
        self.ours, theirs = pty.openpty()
        self.resize(columns)
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        variables = environment(TERM="xterm-256color")
        for name in ("COLUMNS", "LINES"):  # which go over the terminal's own; test workers have them
            variables.pop(name, None)
        self.process = subprocess.Popen([*MLXFT, "train", *overrides], env=variables, **streams)
        os.close(theirs)
        self.shown = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self, bars: int) -> list[str]:
        """Reads until so many more bars were shown, and returns them without colours."""
        begin, found = len(self.shown), []
        while len(found) < bars:
            assert select.select([self.ours], [], [], 60)[0], self.shown
            self.shown += os.read(self.ours, 65536).decode(errors="replace")
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown[begin:])
            found = [
                line for line in re.split(r"[\r\n]+", plain)[1:-1] if re.search(r"step \d+/\d+  loss ", line)
            ]
        return found

    def read_until(self, is_new: Callable[[str], bool]) -> list[str]:
        """Reads past the bars that were on their way when the terminal changed; returns two new ones."""
        for _ in range(30):
            bars = self.read(2)
            if all(map(is_new, bars)):
                break
        return bars

    def end(self) -> int:
        """Reads what is left and returns the exit code."""
        while True:
            try:
                more = os.read(self.ours, 65536)
            except OSError:  # how Linux tells that the other end is closed
                break
            if not more:
                break
            self.shown += more.decode(errors="replace")
        os.close(self.ours)
        return self.process.wait(30)


def test_a_terminal_shows_a_bar_that_follows_its_width(model, data, tmp_path):
    terminal = Terminal(
        80, f"model.path={model}", f"data.train={data}", "data.format=tokens", "trainer.max_steps=100000",
        "adapter.rank=2", f"run.dir={tmp_path / 'run'}", f"data.valid={data}", "trainer.eval_every=1000",
    )  # fmt: skip
    try:
        step = r"step \d+/100000  loss \d\.\d{4}"
        whole = step + r"  [\d,]+ tokens/s  peak \d+\.\d\d? [MG]B  \d+:\d\d(:\d\d)? left"
        for line in terminal.read(2):
            assert re.search(whole, line) and len(line) <= 80
        terminal.resize(40)
        for line in terminal.read_until(lambda line: len(line) <= 40):
            assert re.search(step, line) and len(line) <= 40
        terminal.resize(140)
        for line in terminal.read_until(lambda line: "  lr " in line):
            assert re.match(r" *[━╸╺]{24} +" + whole + r"  lr \d\.\d\de-\d\d", line)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    finally:
        terminal.process.kill()
    assert re.search(
        r"\rvalidation at step 0: loss \d\.\d{4}  \(best so far\)", terminal.shown.replace("\x1b[2K", "")
    )
    assert terminal.shown.count("\x1b[?25l") <= terminal.shown.count("\x1b[?25h")  # the cursor is back
    assert "interrupted: saved step" in terminal.shown and "Traceback" not in terminal.shown
