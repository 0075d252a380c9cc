"""memory.jsonl: what each phase of a step costs in memory, for `trainer.log_memory=true`."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx


class MemoryLog:
    """Evaluates the phases of a step one by one and writes a line for each.

    phase: forward (what the backward needs is kept), head, backward, optimiser. Bytes as MLX counts
    them: `peak_bytes` since the phase began, `active_bytes` and `cache_bytes` at its end.
    """

    def __init__(self, path: Path):
        self._path = path

    def __call__(self, phase: str, arrays: Any) -> None:
        mx.reset_peak_memory()
        mx.eval(arrays)
        record = {
            "phase": phase,
            "peak_bytes": mx.get_peak_memory(),
            "active_bytes": mx.get_active_memory(),
            "cache_bytes": mx.get_cache_memory(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
