"""What tests of whole runs share: rows on disk, runs from overrides, and what a run left."""

import json
import shutil
from pathlib import Path
from typing import Any, Sequence

import mlx.core as mx
import numpy as np

import mlxft
from mlxft.training.checkpoint import CheckpointStore

# What a resume cannot repeat: how long a step took and what else was in memory.
TIMED = ("seconds", "tokens_per_s", "peak_bytes")

# A run of single steps, a checkpoint of each.
STEPS = ["adapter.rank=2", "trainer.save_every=1", "trainer.keep=all", "optimizer.lr=1e-2"]


def write_token_rows(path: Path, lengths: Sequence[int], vocabulary: int = 200, seed: int = 0) -> Path:
    """Writes rows of random tokens of these lengths; the second half of each is supervised."""
    random = np.random.default_rng(seed)
    rows = [
        {
            "input_ids": random.integers(3, vocabulary, length).tolist(),
            "completion_mask": [int(2 * t >= length) for t in range(length)],
        }
        for length in lengths
    ]
    return write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(model: Path, data: Path, run_dir: Path, *overrides: str):
    """Trains on token rows in this process and returns the RunResult."""
    return mlxft.train(
        [f"model.path={model}", f"data.train={data}", "data.format=tokens", f"run.dir={run_dir}", *overrides]
    )


def metrics(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl without what depends on time."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in TIMED}
        for line in lines
        if kind in (None, line["kind"])
    ]


def column(run_dir: Path, name: str) -> np.ndarray:
    """Returns one value of each training step."""
    return np.array([line[name] for line in metrics(run_dir, "train")])


def arrays(folder: Path, name: str = "adapters") -> dict[str, mx.array]:
    """Returns the arrays of a checkpoint's or an adapter's folder; name: "adapters" or "optimizer"."""
    return mx.load(str(folder / f"{name}.safetensors"))


def same(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> bool:
    """Tells whether two sets of arrays have the same names and bits."""
    return ours.keys() == theirs.keys() and all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def content(folder: Path) -> dict[Path, bytes]:
    """Returns every file of a run's folder but its log and its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("train.log", ".lock")]
    return {path: path.read_bytes() for path in files}


def resaved(checkpoint: Path, **changes: Any) -> None:
    """Writes a checkpoint's state anew with these entries, its manifest with it."""
    state = json.loads((checkpoint / "state.json").read_text()) | changes

    def write_adapter(folder: Path) -> None:
        for name in ("adapters.safetensors", "adapter_config.json"):
            shutil.copy(checkpoint / name, folder)

    CheckpointStore(checkpoint.parent.parent, "all").save(
        state, arrays(checkpoint, "optimizer"), write_adapter
    )
