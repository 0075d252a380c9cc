"""Rows made in several processes: the same rows in the same order, and the same faults."""

import subprocess
import sys

import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.chunks import chunks_of
from mlxft.data.fingerprint import rows_digest
from mlxft.data.load import load_examples, make_task, num_workers
from mlxft.data.sources import sets_of
from mlxft.data.workers import Workers, num_cores
from mlxft.errors import GuardStop, InputError
from tests.command import environment


def row(n):
    answer = "a " * (n % 7 + 1)
    return {"messages": [{"role": "user", "content": f"q {n}?"}, {"role": "assistant", "content": answer}]}


def load(path, tokenizer, **settings):
    return load_examples(path, DataConfig(cache=False, **settings), tokenizer, 1000)


def test_rows_and_report_are_the_same_whoever_makes_them(write_rows, make_tokenizer, tmp_path):
    from mlx_lm.tokenizer_utils import load as wrapped

    path = write_rows([row(n) for n in range(1600)])
    make_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    tokenizer = wrapped(tmp_path / "tokenizer", eos_token_ids=[7])
    alone, said = load(path, tokenizer, num_workers=0, max_length=30)
    shared, report = load(path, tokenizer, num_workers=2, max_length=30)
    assert rows_digest(alone) == rows_digest(shared) and said == report
    assert [each.where for each in alone] == [each.where for each in shared]


def test_the_first_fault_is_told_whichever_process_finds_one_first(write_rows, make_tokenizer):
    rows = [row(n) for n in range(2000)]
    rows[700] = {"messages": [{"role": "asistant", "content": "a"}]}
    rows[1100] = "no row"
    path = write_rows(rows)
    with pytest.raises(InputError, match=rf"^{path}:701: messages\[0\]\.role is \"asistant\""):
        load(path, make_tokenizer("chatml"), num_workers=2)


def test_a_fault_of_the_file_comes_after_those_of_the_rows_before_it(tmp_path, make_tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "hello\n" * 600 + '" "\n' + 'a"b\n"', encoding="utf-8")
    for number in (0, 2):
        with pytest.raises(InputError, match=rf"^{path}:602: text is empty"):
            load(str(path), make_tokenizer(), num_workers=number)


def test_workers_end_with_a_script_that_has_no_main_guard(write_rows, tmp_path):
    """multiprocessing would run such a script once more in every process."""
    path = write_rows([{"input_ids": [1, 2]}] * 1200)
    script = tmp_path / "script.py"
    script.write_text(
        "from mlxft.config.schema import DataConfig; from mlxft.data.load import load_examples\n"
        f"print(len(load_examples({path!r}, DataConfig(num_workers=2), None, 9)[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1200\n", "")


def test_how_many_processes_there_are_by_default_depends_on_how_much_there_is_to_do():
    assert num_workers(DataConfig(), 1 << 20) == 0
    assert num_workers(DataConfig(), 1 << 30) == num_cores() > 0
    assert num_workers(DataConfig(num_workers=3), 1) == 3


def test_a_process_that_is_killed_stops_the_run_and_a_fault_of_ours_is_told(write_rows):
    rows = sets_of(write_rows([{"input_ids": [1, 2]}]), DataConfig())[0]
    task = make_task("examples", rows, rows.parts(), DataConfig(), None, 9)
    with Workers(1, task, None) as workers:
        workers._all[0]._process.kill()
        with pytest.raises(GuardStop, match="was killed, .* Lower data.num_workers"):
            list(workers.made(chunks_of(rows.parts())))
    with Workers(1, task, None) as workers, pytest.raises(RuntimeError, match="(?s)Traceback.*Attribute"):
        list(workers.made([[("no place", b"{}")]]))
