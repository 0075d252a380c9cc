"""Predicted peaks and times against those of real steps, each in a process of its own.

    python benchmarks/plan_accuracy.py --model FOLDER [--cases 1x512,4x512,1x2048] [--steps 2]
    python benchmarks/plan_accuracy.py --tiny [--window 1024]

Rows of random tokens, all trained on; one line a case: rows x positions, adapter, backward, what `mlxft
plan` predicts, `peak_bytes` and `seconds` of the last step in metrics.jsonl. --tiny: 16 layers of width 128,
4 heads, a vocabulary of 8,192, LoRA of rank 4 on q, v and down, in place of --model. --window: of Gemma 3's
kind, five of six layers with a sliding window of so many positions. Cases that are predicted
not to fit this machine are left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

import numpy as np

TINY = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
WINDOWED = TINY | {
    "model_type": "gemma3_text",
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 1000.0,
}
WHOLE, CHECKPOINT = ["trainer.gradient=whole"], ["trainer=checkpoint"]
ONE, HALF = (["trainer=segmented", f"trainer.segment_layers={layers}"] for layers in ("1", "half"))
LORA, FULL = [WHOLE, CHECKPOINT, ONE, HALF], [WHOLE, ONE]
TINY_ADAPTER = ["adapter.rank=4", "adapter.targets=[q_proj,v_proj,down_proj]"]


def run(command: str, overrides: list[str]) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "mlxft", command, *overrides]
    return subprocess.run(words, capture_output=True, text=True)


def write_rows(path: Path, rows: int, length: int, vocabulary: int) -> None:
    random = np.random.default_rng(0)
    with open(path, "w") as file:
        for _ in range(rows):
            tokens = random.integers(3, vocabulary, length + 1).tolist()
            file.write(json.dumps({"input_ids": tokens, "completion_mask": [1] * len(tokens)}) + "\n")


def measure(model: Path, case: tuple[int, int], how: list[str], steps: int, folder: Path) -> None:
    rows, length = case
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    data = folder / f"{rows}x{length}.jsonl"
    write_rows(data, rows, length, vocabulary)
    overrides = [f"model.path={model}", f"data.train={data}", "data.format=tokens", f"data.batch_size={rows}"]
    overrides += [f"data.max_length={length + 1}", "trainer.epochs=1000", *how]
    planned = run("plan", ["--json", *overrides])
    if planned.returncode:
        raise SystemExit(planned.stderr)
    plan = json.loads(planned.stdout)
    taken = plan["taken"]
    said = next(each for each in plan["plans"] if taken.items() <= each.items())
    layers = "half" if taken["halves"] else taken["segment_layers"]
    backward = f"segmented {layers}" if taken["kind"] == "segmented" else taken["kind"]
    adapter = "full" if "adapter=full" in how else "lora"
    line = f"{rows} x {length:<6} {adapter:<5} {backward:<14}"
    if not plan["taken_fits"]:
        print(f"{line} predicted {said['peak_bytes'] / 1e6:9.1f} MB: does not fit", flush=True)
        return
    run_dir = folder / f"run-{rows}x{length}-{adapter}-{backward.replace(' ', '-')}"
    trained = run("train", [*overrides, f"trainer.max_steps={steps}", f"run.dir={run_dir}"])
    if trained.returncode:
        raise SystemExit(trained.stderr)
    record = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    peak, seconds = said["peak_bytes"], said["seconds"]
    real_peak, real_seconds = record["peak_bytes"], record["seconds"]
    print(
        f"{line} predicted {peak / 1e6:9.1f} MB {seconds:7.2f} s  "
        f"measured {real_peak / 1e6:9.1f} MB {real_seconds:7.2f} s  "
        f"off by {100 * (peak / real_peak - 1):+5.1f}% {100 * (seconds / real_seconds - 1):+5.0f}%",
        flush=True,
    )


def tiny_model(folder: Path, window: Optional[int]) -> Path:
    """Writes the tiny model with random weights, with sliding windows where given one."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

    import mlx.core as mx  # isort: skip
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = TINY if window is None else WINDOWED | {"sliding_window": window}
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    folder.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", type=Path, help="a folder with a model")
    models.add_argument("--tiny", action="store_true", help="the tiny model instead")
    parser.add_argument("--window", type=int, default=None, help="of the tiny model's sliding attention")
    parser.add_argument("--cases", default=None, help="rows x positions, several with commas")
    parser.add_argument("--steps", type=int, default=2, help="optimiser steps of each case")
    options = parser.parse_args()
    cases = options.cases or ("1x2048,1x4096,4x512" if options.tiny else "1x512,4x512,1x2048,4x2048")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny_model(folder / "tiny", options.window) if options.tiny else options.model
        adapter = TINY_ADAPTER if options.tiny else []
        for case in cases.split(","):
            rows, length = map(int, case.split("x"))
            for how in LORA:
                measure(model, (rows, length), [*how, *adapter], options.steps, folder)
            for how in FULL:
                measure(model, (rows, length), [*how, "adapter=full"], options.steps, folder)


if __name__ == "__main__":
    main()
