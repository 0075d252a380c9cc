"""Tokens per second and peak memory of LoRA training on a GPU, beside mlx-lm's in the same run.

    python benchmarks/gpu_throughput.py [--cases 1x8192 1x8100 4x1000] [--gradients whole checkpoint]
        [--bits 4] [--trainers mlxft] [--steps 12] [--out FILE.json]

Qwen3-0.6B's shape (28 layers, width 1,024, MLP 3,072, 16 heads and 8 key-value heads of 128, vocabulary
151,936, tied) with random bfloat16 weights, LoRA rank 8 on all seven projections of all layers, AdamW,
every token supervised, rows of random tokens. --bits: the base quantised, in groups of 64. A gradient is
one of trainer.gradient, segmented:N with N the segment_layers, or segmented:N:GB with trainer.memory_limit
too; mlx-lm has whole and checkpoint. A case is rows x tokens; tokens/s is of a row's tokens for both
trainers (mlx-lm pads to 1 + a multiple of 32 and also trains on one padding token a row). Each trainer is a
process of its own, which takes the cases one after the other; the first steps of each compile and are left
out; tokens/s is of the median step, the peak that of all steps after them.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PROJECTIONS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
WARM_UP = 4


def write_model(folder: Path, bits: int | None) -> None:
    """Writes the random model, quantised to `bits` if given, and a tokenizer that only has to load."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models.qwen3 import Model, ModelArgs
    from tokenizers import Tokenizer, models

    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(SHAPE))
    arrays = tree_map(lambda p: (0.02 * p if p.ndim == 1 else p).astype(mx.bfloat16), model.parameters())
    arrays = {name: mx.ones_like(a) if "norm" in name else a for name, a in tree_flatten(arrays)}
    config = dict(SHAPE)
    if bits:
        model.load_weights(list(arrays.items()))
        nn.quantize(model, bits=bits)
        arrays = dict(tree_flatten(model.parameters()))
        config["quantization"] = {"group_size": 64, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def token_rows(case: str, steps: int) -> tuple[int, list[list[int]]]:
    """Returns the batch size and enough rows for `steps` batches."""
    import numpy as np

    batch, tokens = (int(n) for n in case.split("x"))
    random = np.random.default_rng(0)
    return batch, random.integers(0, SHAPE["vocab_size"], (steps * batch, tokens)).tolist()


def run_mlxft(model: Path, case: str, steps: int, gradient: str) -> dict:
    """Trains with `mlxft train` and reads its metrics.jsonl."""
    import mlxft

    batch, rows = token_rows(case, steps)
    kind, layers, limit = [*gradient.split(":"), "", ""][:3]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        mlxft.train(
            [
                f"model.path={model}",
                f"data.train={data}",
                "data.format=tokens",
                "data.max_length=200000",
                f"data.batch_size={batch}",
                f"trainer.max_steps={steps}",
                f"trainer.gradient={kind}",
                *([f"trainer.segment_layers={layers}"] if layers else []),
                *([f"trainer.memory_limit={limit}"] if limit else []),
                f"run.dir={folder}/run",
                "adapter.rank=8",
                "adapter.alpha=160",
            ]
        )
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()]
    timed = lines[min(WARM_UP, steps - 1) :]
    return {
        "tokens_per_s": batch * len(rows[0]) / statistics.median(line["seconds"] for line in timed),
        "peak_bytes": max(line["peak_bytes"] for line in timed),
        "loss": [round(line["loss"], 4) for line in lines[:3]],
    }


def run_mlx_lm(model: Path, case: str, steps: int, gradient: str) -> dict:
    """Trains with mlx-lm's own trainer, loss and batches."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    batch, rows = token_rows(case, steps)
    loaded, _ = load_model(model)
    loaded.freeze()
    lora = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": PROJECTIONS}
    linear_to_lora_layers(loaded, len(loaded.layers), lora)
    reports = []

    class Report(TrainingCallback):
        def on_train_loss_report(self, info):
            if len(reports) == min(WARM_UP, steps - 1):
                mx.reset_peak_memory()
            reports.append((info["tokens_per_second"], info["train_loss"], mx.get_peak_memory()))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArgs(
            batch_size=batch,
            iters=steps,
            steps_per_report=1,
            steps_per_save=10**6,
            max_seq_length=200_000,
            adapter_file=f"{folder}/adapters.safetensors",
            grad_checkpoint=gradient == "checkpoint",
        )
        dataset = [(row, 0) for row in rows]
        optimizer = optimizers.AdamW(learning_rate=1e-4)
        train(loaded, optimizer, dataset, args=arguments, training_callback=Report())
    return {
        "tokens_per_s": statistics.median(report[0] for report in reports[min(WARM_UP, steps - 1) :]),
        "peak_bytes": reports[-1][2],
        "loss": [round(report[1], 4) for report in reports[:3]],
    }


TRAINERS = {"mlxft": run_mlxft, "mlx-lm": run_mlx_lm}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["1x8192", "1x8100", "4x1000"])
    parser.add_argument("--gradients", nargs="+", default=["whole", "checkpoint"])
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--bits", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("TRAINER", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        trainer, model = options.one
        run_all(trainer, Path(model), options.cases, options.gradients, options.steps)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.bits)
        print(f"{'case':>8} {'gradient':>15} {'trainer':>8} {'tokens/s':>10} {'peak GB':>8}  losses")
        for trainer in options.trainers:
            results += measure(trainer, folder, sys.argv[1:])
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def run_all(trainer: str, model: Path, cases: list[str], gradients: list[str], steps: int) -> None:
    """Runs every case in this process and prints a line of JSON for each."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

    import mlx.core as mx  # isort: skip

    for case in cases:
        for gradient in gradients:
            if trainer == "mlx-lm" and gradient not in ("whole", "checkpoint"):
                continue
            gc.collect()  # models and programs refer to themselves
            mx.clear_cache()
            result = {"case": case, "gradient": gradient, "trainer": trainer}
            try:
                result |= TRAINERS[trainer](model, case, steps, gradient)
            except RuntimeError as error:  # of MLX: no memory, say; the next case may have it
                result["failed"] = str(error)
            print("RESULT " + json.dumps(result), flush=True)


def measure(trainer: str, folder: str, given: list[str]) -> list[dict]:
    """Runs one trainer in a fresh process, prints a line for each case and returns them all."""
    command = [sys.executable, __file__, *given, "--one", trainer, folder]
    results = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("RESULT "):
                continue
            result = json.loads(line.removeprefix("RESULT "))
            results.append(result)
            print(line_of(result), flush=True)
        if process.wait():
            print(f"{trainer} failed: {process.stderr.read().strip()[-800:]}", flush=True)
    return results


def line_of(result: dict) -> str:
    """Returns a result's line of the table."""
    place = f"{result['case']:>8} {result['gradient']:>15} {result['trainer']:>8}"
    if "failed" in result:
        return f"{place}  failed: {result['failed'][-800:]}"
    return f"{place} {result['tokens_per_s']:>10,.0f} {result['peak_bytes'] / 1e9:>8.2f}  {result['loss']}"


if __name__ == "__main__":
    main()
