"""Time and peak memory of one ORPO step on a pair with a long prompt, the prompt forwarded in four ways.

    python benchmarks/shared_prompt.py [--shape smollm2|qwen3] [--prompt 1536] [--answers 256] [--steps 5]
        [--ways "two forwards" pieces]

two forwards    the rows prompt + chosen and prompt + rejected side by side (trainer.layout=padded)
one by one      the same rows, each in a forward of its own
                (as trainers do that call the model once an answer; exists only in this script)
boolean mask    prompt, chosen and rejected in one row, what each may see as a mask over the whole row
                (how it is usually done; exists only in this script)
pieces          the same row, attention in pieces without a mask (trainer.layout=prefix_shared)

Random weights of the shape (smollm2: SmolLM2-135M, float32 on a CPU; qwen3: Qwen3-0.6B, bfloat16), LoRA
rank 8 on all projections. Loss and gradients, one pair a step. The ways take turns, step by step, since a
device's speed changes as it grows warm; first turns (one on a CPU, three on a GPU) are left out, then it is
the median of each way's. Peak: MLX's, over what the model itself takes.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHAPES = {
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "qwen3": {
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
    },
}
GPU_WARM_UP = 3  # kernels and programs are compiled in the first steps; a CPU's are warm after one
LAYOUTS = {
    "two forwards": "padded",
    "one by one": "padded",
    "boolean mask": "prefix_shared",
    "pieces": "prefix_shared",
}


class Way:
    """One way to take the step, and what its steps took. num_prompt, num_answer: tokens."""

    def __init__(self, name: str, view: Any, vocabulary: int, num_prompt: int, num_answer: int):
        import mlx.core as mx

        from mlxft.backend import shape_multiple
        from mlxft.layouts.arrange import Arranger
        from mlxft.segmented.gradients import Gradient
        from mlxft.training.objectives import HeadPlan, Orpo
        from mlxft.training.objectives.preference import LossSettings

        self.name, self.view = name, view
        self.sizes = num_prompt, num_answer
        multiple = 1 if name == "boolean mask" else shape_multiple()
        settings = LossSettings(0.1, nll_weight=1.0, nll_scope="full")
        objective = Orpo(HeadPlan(), Arranger(LAYOUTS[name], multiple), settings)
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.gradient = Gradient(view, objective, "whole", compiled=not on_cpu)
        batches, counts = objective.begin([[random_pair(vocabulary, num_prompt, num_answer)]], view)
        self.prepared = objective.prepare(batches[0], counts)
        self.seconds: list[float] = []
        self.peak_bytes, self.loss = 0, 0.0

    def step(self) -> None:
        """Takes a step and notes its seconds, peak and loss."""
        import mlx.core as mx

        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        params, before = self.view.model.trainable_parameters(), mx.get_active_memory()
        with self.patched():
            began = time.perf_counter()
            result = self.gradient(params, self.prepared.inputs, self.prepared.layout)
            mx.eval(result)
            self.seconds.append(time.perf_counter() - began)
        self.loss, self.peak_bytes = result[0].item(), mx.get_peak_memory() - before

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block mlxft takes the step in this way, also in those that it doesn't have."""
        from mlxft.segmented import gradients

        originals = gradients.hidden_states, gradients.TrainingCache
        if self.name == "one by one":
            gradients.hidden_states = row_by_row(gradients.hidden_states)
        if self.name == "boolean mask":
            gradients.TrainingCache = masked_cache(*self.sizes)
        try:
            yield
        finally:
            gradients.hidden_states, gradients.TrainingCache = originals


def random_view(shape: str):
    """Returns the decoder view of a random model of the shape, with an adapter that does something."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import _get_classes

    from mlxft.config.schema import AdapterConfig
    from mlxft.models.decoder import view
    from mlxft.models.lora import apply_adapter

    mx.random.seed(0)
    model_class, arguments = _get_classes(SHAPES[shape])
    model = model_class(arguments.from_dict(SHAPES[shape]))
    if mx.default_device().type != mx.DeviceType.cpu:
        model.set_dtype(mx.bfloat16)
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=8))
    model.update(tree_map(lambda p: p + 0.01 * mx.random.normal(p.shape), model.trainable_parameters()))
    mx.eval(model.parameters())
    return made


def random_pair(vocabulary: int, num_prompt: int, num_answer: int):
    import numpy as np

    from mlxft.data.example import Pair

    random = np.random.default_rng(0)
    sizes = (num_prompt, num_answer, num_answer)
    tokens = [random.integers(0, vocabulary, size).astype(np.int32) for size in sizes]
    return Pair(*tokens, np.ones(num_answer, bool), np.ones(num_answer, bool), "")


def row_by_row(hidden_states: Callable) -> Callable:
    """Returns hidden_states for one row of tokens (B, T) after the other."""
    import mlx.core as mx

    def each(view, tokens, *rest):
        rows = mx.split(tokens, tokens.shape[0])
        return mx.concatenate([hidden_states(view, row, *rest) for row in rows])

    return each


def masked_cache(num_prompt: int, num_answer: int):
    """Returns a training cache that attends through one boolean mask over the whole row."""
    import mlx.core as mx
    import numpy as np

    from mlxft.layouts.cache import TrainingCache

    first = num_prompt + num_answer - 1
    length = first + num_answer - 1
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    allowed = (column <= row) & ((row < first) | (column < num_prompt) | (column >= first))
    mask = mx.array(allowed)

    class MaskedCache(TrainingCache):
        def attend(self, q, k, v, scale, mask_, sinks=None):
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    return MaskedCache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    usual = [name for name in LAYOUTS if name != "one by one"]
    parser.add_argument("--ways", nargs="+", choices=LAYOUTS, default=usual)
    options = parser.parse_args()
    for way in measure(options.ways, options.shape, options.prompt, options.answers, options.steps):
        print(way, flush=True)


def measure(names: list[str], shape: str, num_prompt: int, num_answer: int, steps: int) -> Iterator[str]:
    """Yields a table, line by line."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

    import mlx.core as mx  # isort: skip

    warm_up = 1 if mx.default_device().type == mx.DeviceType.cpu else GPU_WARM_UP
    view = random_view(shape)
    ways = [Way(name, view, SHAPES[shape]["vocab_size"], num_prompt, num_answer) for name in names]
    for _ in range(steps + warm_up):
        for way in ways:
            way.step()
    yield f"{shape}, prompt {num_prompt}, answers of {num_answer}, one pair a step, {steps} steps each"
    yield f"{'way':<14} {'positions':>9} {'seconds':>9} {'peak GB':>8} {'faster':>7}  loss"
    base = statistics.median(ways[0].seconds[warm_up:])
    for way in ways:
        seconds = statistics.median(way.seconds[warm_up:])
        yield (
            f"{way.name:<14} {way.prepared.num_positions:>9,} {seconds:>9.3f} {way.peak_bytes / 1e9:>8.2f} "
            f"{base / seconds:>6.2f}x  {way.loss:.5f}"
        )


if __name__ == "__main__":
    main()
