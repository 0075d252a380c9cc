"""Weights & Biases (offline) and TensorBoard have what metrics.jsonl has, and stop no run."""

import json
import math
import shutil
import struct
from pathlib import Path

import pytest

from mlxft import cli
from mlxft.training import trackers
from tests.runs import train

pytest.importorskip("wandb")
pytest.importorskip("tensorboardX")

BOTH = ["logger=[wandb,tensorboard]", "logger.offline=true", "adapter.rank=2", "trainer.save_every=1"]


@pytest.fixture(scope="module")
def followed(model, data, valid, tmp_path_factory):
    """A run of four steps that both follow, and which goes on in between."""
    run_dir = tmp_path_factory.mktemp("runs") / "followed"
    more = [*BOTH, f"data.valid={valid}", "trainer.eval_every=2", "trainer.keep=all"]
    train(model, data, run_dir, *more, "trainer.max_steps=4")
    for step in (3, 4):  # what came after step 2 is lost, but for the trackers
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:06d}")
    train(model, data, run_dir, *more, "trainer.max_steps=4", "trainer.resume=auto")
    return run_dir


def expected(run_dir: Path, kind: str, key: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if line["kind"] == kind]


def test_tensorboard_shows_the_curves_of_metrics_once_after_a_resume_too(followed):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(followed / "tensorboard"))
    events.Reload()
    for kind, key in (("train", "loss"), ("train", "lr"), ("train", "grad_norm"), ("valid", "loss")):
        found = [(event.step, event.value) for event in events.Scalars(f"{kind}/{key}")]
        wanted = expected(followed, kind, key)
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found, wanted, strict=True))


def test_wandb_has_the_curves_of_metrics_and_a_continued_run_is_the_same_one(followed):
    files = sorted((followed / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # one number, begun twice
    rows = [row for file in files for row in history(file)]
    for kind, key in (("train", "loss"), ("train", "lr"), ("valid", "loss")):
        found = {row["step"]: row[f"{kind}/{key}"] for row in rows if f"{kind}/{key}" in row}
        assert found == dict(expected(followed, kind, key))


def history(file: Path) -> list[dict[str, float]]:
    """Returns the rows of a W&B run's file: records of protobuf in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as protobuf

    rows, held, content, at = [], b"", file.read_bytes(), 7  # after the header
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # a record does not begin at the end of a block
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = protobuf.Record.FromString(held)
            held = b""
            if record.WhichOneof("record_type") == "history":
                items = [(item.key or "/".join(item.nested_key), item) for item in record.history.item]
                rows.append({name: json.loads(item.value_json) for name, item in items})
    return rows


def test_a_tracker_that_fails_stops_no_run(model, data, here, caplog, monkeypatch):
    def fail(*arguments):
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(trackers._TensorBoard, "write", fail)
    monkeypatch.setattr(trackers._Wandb, "__init__", fail)
    result = train(model, data, here / "run", *BOTH, "trainer.max_steps=2")
    assert (result.status, result.steps) == ("completed", 2)
    assert "logger.wandb gets nothing of this run: the line is dead" in caplog.text
    assert caplog.text.count("logger.tensorboard gets nothing after step 0: the line is dead") == 1


def test_without_a_login_a_run_does_not_begin(model, data, here, capsys, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("NETRC", str(here / "netrc"))
    words = [f"model.path={model}", f"data.train={data}", "data.format=tokens", "logger=wandb", "run.dir=run"]
    assert cli.main(["train", *words]) == 2
    assert "nobody is logged in to Weights & Biases; run wandb login, or keep" in capsys.readouterr().err
    assert not (here / "run").exists()


def test_none_turns_a_recipes_trackers_off(here):
    from mlxft.config import compose

    (here / "recipes").mkdir()
    body = "model: {path: a/b}\ndata: {train: a/b}\nlogger: {wandb: true}\n"
    (here / "recipes" / "mine.yaml").write_text(body)
    assert compose(["+recipe=mine"]).config.logger.wandb
    assert not compose(["+recipe=mine", "logger=none"]).config.logger.wandb
