"""Time and peak memory of an ORPO step on a pair with a long prompt, the prompt forwarded in four ways.

    python benchmarks/shared_prompt.py [--shape smollm2|qwen3] [--prompt 1536] [--answers 256] [--turns 5]
        [--ways "two forwards" pieces]

one by one      the row prompt + chosen, then the row prompt + rejected, each in a forward of its own
                (as trainers do that call the model once an answer; exists only in this script)
two forwards    the same rows side by side (trainer.layout=padded)
boolean mask    prompt, chosen and rejected in one row, what each may see as a mask over the whole row
                (how it is usually done; exists only in this script)
pieces          the same row, attention in pieces without a mask (trainer.layout=prefix_shared)

Random weights of the shape (smollm2: SmolLM2-135M, float32 on a CPU; qwen3: Qwen3-0.6B, bfloat16), LoRA
rank 8 on all projections, AdamW; one pair a step, taken as the trainer takes it. The ways take turns, since a
device's speed changes as it grows warm: a step a turn on a CPU, five on a GPU of which the first is left
out, as the whole first turn is. Seconds: the median over the turns of a turn's mean. Peak: MLX's, over what
the model itself takes. Loss: of a turn's first step, which each way takes from the same weights.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
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
LAYOUTS = {
    "one by one": "padded",
    "two forwards": "padded",
    "boolean mask": "prefix_shared",
    "pieces": "prefix_shared",
}
STEPS_A_TURN = {"cpu": 1, "gpu": 5}


class Way:
    """One way to take steps, and what they took. num_prompt, num_answer: tokens."""

    def __init__(self, name: str, view: Any, vocabulary: int, num_prompt: int, num_answer: int):
        from mlxft.backend import shape_multiple
        from mlxft.config.schema import OptimizerConfig
        from mlxft.layouts.arrange import Arranger
        from mlxft.segmented.build import build
        from mlxft.segmented.plan import GradientPlan
        from mlxft.training import optimizer
        from mlxft.training.objectives import HeadPlan, Orpo
        from mlxft.training.objectives.preference import LossSettings
        from mlxft.training.step import Stepper

        self.name, self.view = name, view
        self.sizes = num_prompt, num_answer
        multiple = 1 if name == "boolean mask" else shape_multiple()
        settings = LossSettings(0.1, nll_weight=1.0, nll_scope="full")
        objective = Orpo(HeadPlan(), Arranger(LAYOUTS[name], multiple), settings)
        gradient = build(view, objective, GradientPlan("whole"))
        made = optimizer.build(OptimizerConfig())
        made.init(view.model.trainable_parameters())
        self.stepper = Stepper(objective, gradient, made, clip_norm=1.0, seed=0, has_dropout=False)
        self.batches = [[random_pair(vocabulary, num_prompt, num_answer)]]
        self.seconds: list[float] = []
        self.positions, self.peak_bytes, self.loss = 0, 0, 0.0

    def turn(self, start: Any, num_steps: int) -> None:
        """Takes steps from the weights `start`; notes their mean seconds, peak and first loss."""
        import mlx.core as mx

        self.view.model.update(start)
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before, took = mx.get_active_memory(), []
        with self.patched():
            for _ in range(num_steps):
                began = time.perf_counter()
                window = self.stepper.take(self.batches, len(took), 1e-4)
                took.append(time.perf_counter() - began)
                if len(took) == 1:
                    self.loss, self.positions = window.loss, window.positions
        self.seconds.append(statistics.mean(took[1:] or took))
        self.peak_bytes = mx.get_peak_memory() - before

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block mlxft takes steps in this way, also in the one that it doesn't have."""
        from mlxft.segmented import gradients

        original = gradients.TrainingCache
        if self.name == "one by one":
            self.stepper.gradient._run_layers = row_by_row
        if self.name == "boolean mask":
            gradients.TrainingCache = masked_cache(*self.sizes)
        try:
            yield
        finally:
            gradients.TrainingCache = original


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


def row_by_row(view, state: tuple, cache):
    """Runs all layers on one row of the state, arrays (B, T, H), after the other."""
    import mlx.core as mx

    rows = zip(*(mx.split(array, len(array)) for array in state), strict=True)
    ran = [view.run(row, 0, view.num_layers, cache) for row in rows]
    return tuple(mx.concatenate(arrays) for arrays in zip(*ran, strict=True))


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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args()
    for way in measure(options.ways, options.shape, options.prompt, options.answers, options.turns):
        print(way, flush=True)


def measure(names: list[str], shape: str, num_prompt: int, num_answer: int, turns: int) -> Iterator[str]:
    """Yields a table, line by line."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

    import mlx.core as mx  # isort: skip

    device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    num_steps = STEPS_A_TURN[device]
    view = random_view(shape)
    start = view.model.trainable_parameters()
    ways = [Way(name, view, SHAPES[shape]["vocab_size"], num_prompt, num_answer) for name in names]
    for _ in range(1 + turns):
        for way in ways:
            way.turn(start, num_steps)
    took = [statistics.median(way.seconds[1:]) for way in ways]
    yield f"{shape}, prompt {num_prompt}, answers of {num_answer}, one pair a step, {turns} turns each"
    yield f"{'way':<14} {'positions':>9} {'seconds':>9} {'peak GB':>8} {'faster':>7}  loss"
    for way, seconds in zip(ways, took, strict=True):
        yield (
            f"{way.name:<14} {way.positions:>9,} {seconds:>9.3f} {way.peak_bytes / 1e9:>8.2f} "
            f"{took[0] / seconds:>6.2f}x  {way.loss:.5f}"
        )


if __name__ == "__main__":
    main()
