"""What a run leaves in its folder, and what each of its settings does, on tiny models."""

import json
import os
from contextlib import suppress

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import yaml
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import TransformerBlock

import mlxft
from mlxft.config import from_dict
from mlxft.config.choices import OPTIMIZERS
from mlxft.errors import GuardStop
from mlxft.training.checkpoint import CheckpointStore
from tests.devices import ON_CPU
from tests.runs import arrays, column, metrics, same, train, write_rows
from tests.tiny_models import make_model

# 10 rows in batches of 2, windows of 2 micro-batches: three steps an epoch, the third with one.
LENGTHS = [5, 9, 30, 7, 12, 18, 6, 25, 11, 4]
WINDOWS = ["data.batch_size=2", "trainer.accumulate=2", "adapter.rank=2"]

TRAIN_KEYS = {
    *(
        "kind",
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "positions",
        "seconds",
        "tokens_per_s",
        "peak_bytes",
    )
}


@pytest.fixture(scope="module")
def left(model, data, valid, tmp_path_factory):
    """The folder of a run with validation, a checkpoint every second step and all of them kept."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    more = [f"data.valid={valid}", "trainer.eval_every=2", "trainer.save_every=2", "trainer.keep=all"]
    train(model, data, run_dir, *WINDOWS, *more, "trainer.epochs=2", "optimizer.lr=1e-2")
    return run_dir


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the folder ----


def test_a_run_leaves_these_files_and_no_others(left):
    assert {path.name for path in left.iterdir()} == {
        *("config.yaml", "environment.json", "metrics.jsonl", "train.log", "summary.json", "checkpoints"),
        *("adapter", "best", "samples_before.json", ".lock"),
    }
    assert {path.name for path in (left / "checkpoints").iterdir()} == {
        *("step-000002", "step-000004", "step-000006", "last")
    }
    assert {path.name for path in (left / "best").iterdir()} == {
        *("adapters.safetensors", "adapter_config.json", "adapter_manifest.json", "best.json")
    }


def test_the_configuration_in_the_folder_gives_the_same_run(left, tmp_path):
    values = yaml.safe_load((left / "config.yaml").read_text())
    config = from_dict(values)
    assert config.optimizer.lr == 1e-2 and config.trainer.save_every == 2
    values["run"]["dir"] = str(tmp_path / "again")
    mlxft.train(values)
    assert metrics(tmp_path / "again") == metrics(left)
    assert same(arrays(tmp_path / "again" / "adapter"), arrays(left / "adapter"))


def test_a_training_line_has_these_keys_and_counts_what_was_trained(left):
    lines = [line for line in written(left / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line.keys() == TRAIN_KEYS
        assert line["seconds"] > 0 and line["peak_bytes"] > 100_000
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["seconds"])
    # Of n tokens those from the middle on are targets; padding makes the rest of the positions.
    supervised = sum(n - -(-n // 2) for n in LENGTHS)
    for epoch in (lines[:3], lines[3:]):
        assert sum(line["tokens"] for line in epoch) == supervised
        assert sum(line["positions"] for line in epoch) >= sum(n - 1 for n in LENGTHS)


def test_validations_stand_at_the_start_at_every_second_step_and_once_at_the_end(left):
    lines = metrics(left, "valid")
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert all(line["tokens"] == sum(n - -(-n // 2) for n in [8, 13, 5]) for line in lines)
    best = np.minimum.accumulate([line["loss"] for line in lines])
    assert [line["best"] for line in lines] == [
        bool(a == b["loss"]) for a, b in zip(best, lines, strict=True)
    ]


def test_the_summary_says_how_the_run_ended(left):
    summary = json.loads((left / "summary.json").read_text())
    lines, checks = metrics(left, "train"), metrics(left, "valid")
    best = min(checks, key=lambda line: line["loss"])
    assert summary["status"] == "completed" and summary["steps"] == 6
    assert summary["loss"] == lines[-1]["loss"]
    assert (summary["best_loss"], summary["best_step"]) == (best["loss"], best["step"])
    assert summary["tokens"] == sum(line["tokens"] for line in lines)
    assert summary["positions"] == sum(line["positions"] for line in lines)
    assert summary["skipped_steps"] == 0 and summary["adapter"] == "adapter"
    # Rank 2 on all of a block's linears: (64 + 64) + 2 (64 + 32) + (64 + 64) + 3 (64 + 96), twice.
    assert summary["trainable_parameters"] == 2 * 2 * (128 + 2 * 96 + 128 + 3 * 160)
    assert summary["samples"] == {"before": [], "after": []}


def test_the_environment_says_what_ran(left):
    environment = json.loads((left / "environment.json").read_text())
    assert environment["mlxft"] == mlxft.__version__
    assert environment["packages"]["mlx"] == mx.__version__
    assert environment["backend"] in ("cpu", "metal", "cuda")


def test_the_log_has_what_was_said(left):
    text = (left / "train.log").read_text()
    for words in (
        "10 rows of tokens",
        "parameters are trained",
        "gradient: whole",
        "completed after 6 steps",
    ):
        assert words in text


def test_the_adapter_is_the_last_checkpoints_and_mlx_lm_loads_it(left, model):
    assert same(arrays(left / "adapter"), arrays(left / "checkpoints" / "last"))
    loaded, _ = mlx_lm.load(str(model), adapter_path=str(left / "adapter"))
    theirs = dict(tree_flatten(loaded.trainable_parameters()))
    assert same({k: v for k, v in theirs.items() if "lora" in k}, arrays(left / "adapter"))


def test_without_validation_data_there_is_no_best(model, data, tmp_path):
    train(model, data, tmp_path / "run", *WINDOWS, "trainer.max_steps=1")
    assert not (tmp_path / "run" / "best").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_loss"] is None


# ---- how long ----


@pytest.mark.parametrize("more, steps", [
    (["trainer.epochs=0.5"], 2),  # 1.5 windows: the second is taken whole
    (["trainer.epochs=0.01"], 1),
    (["trainer.epochs=1.4"], 5),
    (["trainer.max_steps=7", "trainer.epochs=1"], 7),
])  # fmt: skip
def test_a_run_takes_as_many_steps_as_its_epochs_or_its_limit_say(more, steps, model, data, tmp_path):
    assert train(model, data, tmp_path / "run", *WINDOWS, *more).steps == steps
    assert len(column(tmp_path / "run", "step")) == steps


def test_several_epochs_are_the_same_whether_counted_in_epochs_or_steps(model, data, left, tmp_path):
    train(model, data, tmp_path / "run", *WINDOWS, "trainer.max_steps=6", "optimizer.lr=1e-2")
    assert metrics(tmp_path / "run", "train") == metrics(left, "train")


def test_the_last_window_of_an_epoch_is_trained_by_its_own_count(model, data, tmp_path):
    """Its one micro-batch alone is a step of its own size: as without accumulation."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    more = ["data.shuffle=false", "adapter.rank=2", "data.batch_size=2"]
    train(model, data, tmp_path / "whole", *more, "trainer.accumulate=2", "schedule=constant")
    alone = write_rows(tmp_path / "alone.jsonl", rows[8:])
    before = tmp_path / "whole" / "before"
    train(model, data, before, *more, "trainer.accumulate=2", "trainer.max_steps=2", "schedule=constant")
    init = [f"adapter.init_from={before / 'adapter'}", "data.batch_size=2", "data.shuffle=false"]
    train(model, alone, tmp_path / "alone", *init, "schedule=constant")
    last, [only] = metrics(tmp_path / "whole")[-1], metrics(tmp_path / "alone")
    assert (last["tokens"], last["loss"], last["grad_norm"]) == (
        only["tokens"], only["loss"], only["grad_norm"],
    )  # fmt: skip


def test_a_run_stops_early_after_so_many_validations_without_improvement(model, data, valid, tmp_path):
    """With a learning rate of nothing the loss stays: step 0 is the best, 2 and 4 are no better."""
    more = [f"data.valid={valid}", "trainer.eval_every=2", "trainer.patience=2", "optimizer.lr=1e-30"]
    run_dir = tmp_path / "run"
    result = train(model, data, run_dir, *WINDOWS, *more, "trainer.max_steps=20")
    assert (result.status, result.steps) == ("early_stopped", 4)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["best_step"]) == ("early_stopped", 0)
    assert CheckpointStore(run_dir).latest().step == 4
    assert "stopped early: no improvement in 2 validations" in (run_dir / "train.log").read_text()
    # Resumed, it has ended already.
    again = train(model, data, run_dir, *WINDOWS, *more, "trainer.max_steps=20", "trainer.resume=auto")
    assert (again.status, again.steps) == ("early_stopped", 4)


def test_an_improvement_below_min_delta_does_not_count(model, data, left, valid, tmp_path):
    losses = [line["loss"] for line in metrics(left, "valid")]
    assert losses[0] > losses[1] > losses[2]
    more = [f"data.valid={valid}", "trainer.eval_every=2", "trainer.epochs=2", "optimizer.lr=1e-2"]
    patient = ["trainer.patience=1", f"trainer.min_delta={losses[0] - losses[1] + 1e-3}"]
    result = train(model, data, tmp_path / "run", *WINDOWS, *more, *patient)
    assert (result.status, result.steps, result.best_loss) == ("early_stopped", 2, losses[0])


def test_best_is_the_adapter_of_the_best_validation(model, data, valid, tmp_path):
    """A high learning rate after a good start: the best step is neither the first nor the last."""
    more = [f"data.valid={valid}", "trainer.eval_every=1", "trainer.save_every=1", "trainer.keep=all"]
    run_dir = tmp_path / "run"
    train(model, data, run_dir, *WINDOWS, *more, "trainer.epochs=3", "optimizer.lr=6e-2", "schedule=constant")
    checks = metrics(run_dir, "valid")
    best = min(checks, key=lambda line: line["loss"])["step"]
    assert 0 < best < checks[-1]["step"]
    assert json.loads((run_dir / "best" / "best.json").read_text()) == {"step": best}
    for name in ("adapters.safetensors", "adapter_config.json"):
        kept = run_dir / "checkpoints" / f"step-{best:06d}" / name
        assert (run_dir / "best" / name).read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("keep, first", [("1", 5), ("3", 3), ("all", 1)])
def test_so_many_checkpoints_are_kept(keep, first, model, data, tmp_path):
    more = ["adapter.rank=2", "trainer.max_steps=5", "trainer.save_every=1", f"trainer.keep={keep}"]
    train(model, data, tmp_path / "run", *more)
    folders = CheckpointStore(tmp_path / "run").folders()
    assert [path.name for path in folders] == [f"step-00000{step}" for step in range(first, 6)]


# ---- what each setting does ----


@pytest.mark.parametrize("schedule, expected", [
    (["schedule=constant"], [1, 1, 1, 1]),
    (["schedule=linear"], [1, 3 / 4, 1 / 2, 1 / 4]),
    (["schedule=cosine", "schedule.final_ratio=0.2"],
     [0.2 + 0.4 * (1 + np.cos(np.pi * s / 4)) for s in range(4)]),
    (["schedule=linear", "schedule.warmup_steps=2"], [1 / 2, 1, 1, 1 / 2]),
])  # fmt: skip
def test_the_learning_rate_of_each_step_is_the_schedules(schedule, expected, model, data, tmp_path):
    train(model, data, tmp_path / "run", *WINDOWS, "trainer.max_steps=4", "optimizer.lr=1e-3", *schedule)
    assert column(tmp_path / "run", "lr") == pytest.approx(1e-3 * np.array(expected))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_trains_and_resumes_to_the_bit(name, model, data, tmp_path):
    more = [f"optimizer={name}", "optimizer.lr=1e-3", "adapter.rank=2", "trainer.save_every=1"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(model, data, straight, *more, "trainer.max_steps=2")
    first = straight / "checkpoints" / "step-000001"
    train(model, data, stopped, *more, "trainer.max_steps=2", f"trainer.resume={first}")
    assert metrics(stopped) == metrics(straight)
    last = [run / "checkpoints" / "step-000002" for run in (straight, stopped)]
    assert same(*(arrays(folder) for folder in last))
    assert same(*(arrays(folder, "optimizer") for folder in last))
    assert not same(arrays(first), arrays(last[0]))


@pytest.mark.parametrize("gradient", ["whole", "segmented"])
def test_a_memory_log_has_each_phase_of_each_micro_batch_and_changes_nothing(
    gradient, model, data, left, tmp_path
):
    run_dir = tmp_path / "run"
    more = [*WINDOWS, "trainer.max_steps=6", "optimizer.lr=1e-2", f"trainer.gradient={gradient}"]
    train(model, data, run_dir, *more, "trainer.log_memory=true")
    assert metrics(run_dir, "train") == metrics(left, "train")
    assert same(arrays(run_dir / "adapter"), arrays(left / "adapter"))
    lines = written(run_dir / "memory.jsonl")
    micro = ["forward", "head", "backward"]
    for step, phases in ((1, [*micro, *micro, "optimiser"]), (3, [*micro, "optimiser"])):
        assert [line["phase"] for line in lines if line["step"] == step] == phases
    weights = sum(array.nbytes for array in mx.load(str(model / "model.safetensors")).values())
    for line in lines:
        assert line.keys() == {"step", "phase", "peak_bytes", "active_bytes", "cache_bytes"}
        assert line["peak_bytes"] >= line["active_bytes"] >= weights and line["cache_bytes"] >= 0
    # A step's peak is that of its phases, not only that of the last one.
    of_steps = {line["step"]: line["peak_bytes"] for line in written(run_dir / "metrics.jsonl")}
    for step, peak in of_steps.items():
        assert peak >= max(line["peak_bytes"] for line in lines if line["step"] == step)


def test_a_memory_log_goes_on_after_a_resume(model, data, tmp_path):
    more = ["adapter.rank=2", "trainer.log_memory=true", "trainer.save_every=1", "trainer.max_steps=3"]
    train(model, data, tmp_path / "run", *more)
    first = tmp_path / "run" / "checkpoints" / "step-000002"
    train(model, data, tmp_path / "more", *more, f"trainer.resume={first}")
    assert {line["step"] for line in written(tmp_path / "more" / "memory.jsonl")} == {3}


@pytest.mark.parametrize("gradient, forwards", [("whole", 1), ("checkpoint", 2), ("segmented", 2)])
def test_the_backward_is_run_as_asked_and_the_run_says_how(
    model, data, tmp_path, monkeypatch, gradient, forwards
):
    """A whole backward runs every layer once a micro-batch, the others once more to recompute it."""
    calls = []
    original = TransformerBlock.__call__

    def counted(self, x, mask=None, cache=None):
        calls.append(self)
        return original(self, x, mask, cache)

    more = ["adapter.rank=2", "data.batch_size=2", f"trainer.gradient={gradient}"]
    for steps in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(TransformerBlock, "__call__", counted)
            train(model, data, tmp_path / str(steps), *more, f"trainer.max_steps={steps}")
        calls.append(None)
    first = calls.index(None)
    assert len(calls) - 2 - 2 * first == 2 * 2 * forwards  # of two more steps, two blocks each
    run_dir = tmp_path / "3"
    assert f"gradient: {gradient}" in (run_dir / "train.log").read_text()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["gradient"] == gradient
    assert CheckpointStore(run_dir).latest().state["gradient"]["kind"] == gradient


def test_deterministic_changes_nothing_on_a_cpu(model, data, left, tmp_path):
    more = [*WINDOWS, "trainer.max_steps=6", "optimizer.lr=1e-2", "trainer.deterministic=true"]
    train(model, data, tmp_path / "run", *more)
    if ON_CPU:
        assert metrics(tmp_path / "run") == metrics(left, "train")
    else:
        assert column(tmp_path / "run", "loss") == pytest.approx(column(left, "loss"), rel=1e-3)


def test_questions_are_answered_before_and_after(model, data, tmp_path, capsys):
    more = [
        "trainer.samples=[Who are you?,Why?]",
        "adapter.rank=2",
        "optimizer.lr=1e-2",
        "trainer.max_steps=2",
    ]
    run_dir = tmp_path / "run"
    train(model, data, run_dir, *more, "trainer.save_every=1")
    samples = json.loads((run_dir / "summary.json").read_text())["samples"]
    for when in ("before", "after"):
        assert [sample["question"] for sample in samples[when]] == ["Who are you?", "Why?"]
    assert samples["before"] == json.loads((run_dir / "samples_before.json").read_text())
    assert samples["before"] != samples["after"]
    shown = capsys.readouterr().out
    assert "Who are you?\n  before: " in shown and "  after:  " in shown
    # A continued run keeps what its beginning answered, also in another folder.
    first = run_dir / "checkpoints" / "step-000001"
    train(model, data, tmp_path / "more", *more, f"trainer.resume={first}")
    assert json.loads((tmp_path / "more" / "summary.json").read_text())["samples"] == samples


# ---- what is trained ----


def test_a_full_fine_tune_loads_again_and_goes_on(model, data, tmp_path):
    more = ["adapter=full", "optimizer.lr=1e-3", "trainer.save_every=1", "trainer.max_steps=3"]
    straight = tmp_path / "straight"
    train(model, data, straight, *more)
    first = straight / "checkpoints" / "step-000002"
    train(model, data, tmp_path / "resumed", *more, f"trainer.resume={first}")
    assert metrics(tmp_path / "resumed") == metrics(straight)
    assert same(arrays(tmp_path / "resumed" / "adapter"), arrays(straight / "adapter"))
    loaded, _ = mlx_lm.load(str(model), adapter_path=str(straight / "adapter"))
    assert same(dict(tree_flatten(loaded.parameters())), arrays(straight / "adapter"))
    # Its first loss as a beginning is the loss at which it ended.
    once = ["data.shuffle=false", "data.batch_size=10", "trainer.max_steps=1"]
    train(model, data, tmp_path / "more", *once, "adapter=full", f"adapter.init_from={straight / 'adapter'}")
    model_now, _ = mlx_lm.load(str(model))
    model_now.update(tree_unflatten(list(arrays(straight / "adapter").items())))
    assert column(tmp_path / "more", "loss")[0] == pytest.approx(mean_loss(model_now, data), rel=1e-5)


def mean_loss(model, data) -> float:
    """The mean of -log p over all supervised tokens, one row at a time."""
    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        row = json.loads(line)
        tokens, mask = mx.array(row["input_ids"]), np.array(row["completion_mask"][1:], bool)
        logits = model(tokens[None, :-1])[0]
        logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = np.array(mx.take_along_axis(logps, tokens[1:, None], axis=-1)[:, 0])
        total, count = total - picked[mask].sum(), count + mask.sum()
    return total / count


def test_training_goes_on_from_an_adapter(model, data, left, tmp_path):
    once = ["data.shuffle=false", "data.batch_size=10", "trainer.max_steps=1"]
    train(model, data, tmp_path / "run", f"adapter.init_from={left / 'adapter'}", *once)
    loaded, _ = mlx_lm.load(str(model), adapter_path=str(left / "adapter"))
    assert column(tmp_path / "run", "loss")[0] == pytest.approx(mean_loss(loaded, data), rel=1e-5)


def test_a_quantised_base_trains_and_resumes(data, tmp_path):
    model = make_model(tmp_path / "model", "qwen3", quantize=4, num_hidden_layers=2)
    more = ["adapter.rank=2", "optimizer.lr=1e-2", "trainer.save_every=1", "trainer.max_steps=2"]
    straight = tmp_path / "straight"
    train(model, data, straight, *more)
    first = straight / "checkpoints" / "step-000001"
    train(model, data, tmp_path / "resumed", *more, f"trainer.resume={first}")
    assert metrics(tmp_path / "resumed") == metrics(straight)
    loaded, _ = mlx_lm.load(str(model), adapter_path=str(straight / "adapter"))
    assert mx.isfinite(loaded(mx.array([[5, 6, 7]]))).all()


@pytest.mark.parametrize("steps, words", [(1, "completed after 1 step."), (2, "completed after 2 steps.")])
def test_the_last_line_counts_the_steps(steps, words, model, data, tmp_path):
    train(model, data, tmp_path / "run", "adapter.rank=2", f"trainer.max_steps={steps}")
    assert words in (tmp_path / "run" / "train.log").read_text().splitlines()[-1]


def test_a_run_leaves_none_of_its_files_open(model, data, tmp_path):
    more = ["adapter.rank=2", "trainer.max_steps=1", "trainer.log_memory=true"]
    train(model, data, tmp_path / "run", *more)
    with pytest.raises(GuardStop):  # nor does one that is stopped
        train(model, data, tmp_path / "stopped", *more, "optimizer.lr=3e38")
    identities = {(path.stat().st_dev, path.stat().st_ino): path for path in tmp_path.rglob("*")}
    held = []
    for descriptor in range(256):
        with suppress(OSError):  # most are not open
            found = os.fstat(descriptor)
            held.append(identities.get((found.st_dev, found.st_ino)))
    assert set(held) == {None}
