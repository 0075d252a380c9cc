"""Supervised tokens a second of packed rows against padded ones, on the same rows and model.

    python benchmarks/packing.py [--data FILE.jsonl] [--model ID] [--rows 64] [--batch-size 8]

random order    batches of --batch-size rows in a random order, padded to the longest
by length       the same, rows of similar length together (what mlxft does without packing)
packed          rows end to end, as many as fit --batch-size times the mean length (trainer.layout=packed)

Loss and gradients of LoRA rank 8 for every row once, after a warm-up on the first batch; the loss a token
over all rows has to be the same three times. --data: rows that `mlxft train` reads, for instance Alpaca's;
without, random tokens with lengths as Alpaca's have (log-normal, median 130, half of them answers).
"""

import argparse
import time

import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

import mlx.core as mx  # isort: skip
import numpy as np

from mlxft.backend import backend, shape_multiple
from mlxft.config.schema import AdapterConfig, DataConfig
from mlxft.data.batches import BatchOrder, PackedOrder
from mlxft.data.example import Example
from mlxft.data.load import load_examples
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import view
from mlxft.models.load import load, vocabulary_size
from mlxft.models.lora import apply_adapter
from mlxft.models.resolve import resolve
from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives import HeadPlan, Sft


def rows_of(options, tokenizer, vocabulary: int) -> list[Example]:
    random = np.random.default_rng(0)
    if options.data:
        examples, _ = load_examples(options.data, DataConfig(max_length=512), tokenizer, vocabulary)
        return [examples[place] for place in random.permutation(len(examples))[: options.rows]]
    lengths = np.clip(random.lognormal(np.log(130), 0.6, options.rows), 20, 512).astype(int)
    return [
        Example(random.integers(0, vocabulary, n).astype(np.int32), 2 * np.arange(n) >= n, "")
        for n in lengths
    ]


def batches_of(way: str, rows: list[Example], batch_size: int) -> list[list[Example]]:
    lengths = [row.num_tokens for row in rows]
    if way == "random order":
        order = BatchOrder(lengths, batch_size, shuffle=False, seed=0)  # the rows are shuffled already
    elif way == "by length":
        order = BatchOrder(lengths, batch_size, shuffle=True, seed=0)
    else:
        order = PackedOrder(lengths, max(int(np.mean(lengths) * batch_size), max(lengths)), True, 0)
    return [[rows[place] for place in batch] for batch in order.epoch(0)]


def measure(made, way: str, rows: list[Example], batch_size: int) -> tuple[float, float, int, int]:
    """Returns seconds, loss a token, positions forwarded and batches, of every row once."""
    objective = Sft(HeadPlan(), Arranger("packed" if way == "packed" else "padded", shape_multiple()))
    gradient = Gradient(made, objective, "whole", compiled=backend() != "cpu")
    batches, counts = objective.begin(batches_of(way, rows, batch_size), made)
    params = made.model.trainable_parameters()
    loss, seconds, positions = 0.0, 0.0, 0
    for number, batch in enumerate([batches[0], *batches]):
        began = time.perf_counter()
        prepared = objective.prepare(batch, counts)
        result = gradient(params, prepared.inputs, prepared.layout)
        mx.eval(result)
        if number:  # the first is the warm-up
            seconds += time.perf_counter() - began
            loss += result[0].item()
            positions += prepared.num_positions
    return seconds, loss, positions, len(batches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    folder = resolve(options.model)
    model, tokenizer = load(str(folder))
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=8))
    rows = rows_of(options, tokenizer, vocabulary_size(folder))
    tokens = sum(row.num_supervised for row in rows)
    print(f"{len(rows)} rows, {sum(row.num_tokens for row in rows):,} tokens, {tokens:,} supervised")
    print(f"{'way':<13} {'batches':>7} {'positions':>9} {'tokens/s':>9} {'packed is':>9}  loss a token")
    found = {
        way: measure(made, way, rows, options.batch_size) for way in ("random order", "by length", "packed")
    }
    for way, (seconds, loss, positions, batches) in found.items():
        ratio = seconds / found["packed"][0]
        print(f"{way:<13} {batches:>7} {positions:>9,} {tokens / seconds:>9,.0f} {ratio:>8.2f}x  {loss:.5f}")


if __name__ == "__main__":
    main()
