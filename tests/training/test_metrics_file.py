"""metrics.jsonl after a resume: cut back to the checkpoint's step, whatever came after."""

import json

from mlxft.training.metrics import MetricsFile


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resume_drops_the_lines_of_steps_taken_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"kind": "valid", "step": 0, "loss": 3.0})
    for step in (1, 2, 3):
        file.write({"kind": "train", "step": step, "loss": 1.0 / step})
    file.close()
    resumed = MetricsFile(path, from_step=2)
    resumed.write({"kind": "train", "step": 3, "loss": 0.25})
    resumed.close()
    assert [(line["kind"], line["step"]) for line in lines(path)] == [
        ("valid", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]
    assert lines(path)[-1]["loss"] == 0.25


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "train", "st')
    MetricsFile(path, from_step=1).close()
    assert lines(path) == [{"kind": "train", "step": 1, "loss": 2.0}]


def test_values_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    file.close()
    assert lines(path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""
