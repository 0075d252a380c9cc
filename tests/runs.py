"""What tests of whole runs share: rows on disk, runs from overrides, and what a run left."""

import json
from pathlib import Path
from typing import Any, Sequence

import numpy as np

import mlxft

# What a resume cannot repeat: how long a step took and what else was in memory.
TIMED = ("seconds", "tokens_per_s", "peak_bytes")


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
