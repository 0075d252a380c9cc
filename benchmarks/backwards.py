"""Time and peak memory of one step by each backward, and what a second row length costs.

    python benchmarks/backwards.py [--model FOLDER] [--lengths 512 384] [--steps 5]
        [--backwards whole checkpoint segmented:1 segmented:2 segmented:half]

Loss and gradients of one row of random tokens, all of them trained on, LoRA of rank 8 on all layers. The
backwards take turns, step by step, and so does the next length after the first: its first step shows what
a shape costs that was not met before. Times are medians of the steps after the first of each length. Peak:
MLX's, over what the model takes.
"""

import argparse
import gc
import statistics
import time
from typing import Any


class Backward:
    """One way to take the step. name: one of trainer.gradient, or segmented:N with trainer.segment_layers."""

    def __init__(self, name: str, view: Any):
        from mlxft.layouts.arrange import Arranger
        from mlxft.segmented.build import build
        from mlxft.segmented.plan import GradientPlan
        from mlxft.training.objectives import HeadPlan, Sft

        kind, _, layers = name.partition(":")
        number = int(layers) if layers.isdecimal() else 1
        self.name, self.view = name, view
        self.objective = Sft(HeadPlan(), Arranger("padded"))
        self.gradient = build(view, self.objective, GradientPlan(kind, number, 1, layers == "half"))

    def step(self, row: Any) -> tuple[float, int, float]:
        """Returns seconds, bytes of the peak and the loss."""
        import mlx.core as mx

        batches, counts = self.objective.begin([[row]], self.view)
        prepared = self.objective.prepare(batches[0], counts)
        params = self.view.model.trainable_parameters()
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before, began = mx.get_active_memory(), time.perf_counter()
        result = self.gradient(params, prepared.inputs, prepared.layout)
        mx.eval(result)
        return time.perf_counter() - began, mx.get_peak_memory() - before, result[0].item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 384])
    parser.add_argument("--steps", type=int, default=5)
    usual = ["whole", "checkpoint", "segmented:1", "segmented:2", "segmented:half"]
    parser.add_argument("--backwards", nargs="+", default=usual)
    options = parser.parse_args()
    view, vocabulary = trained_view(options.model)
    backwards = [Backward(name, view) for name in options.backwards]
    print(f"{'tokens':>7} {'backward':>15} {'first s':>8} {'seconds':>8} {'times':>6} {'peak GB':>8}  loss")
    for length in options.lengths:
        row = random_row(vocabulary, length)
        taken = [[backward.step(row) for backward in backwards] for _ in range(options.steps + 1)]
        medians = [statistics.median(step[0] for step in steps[1:]) for steps in zip(*taken, strict=True)]
        for backward, first, last, seconds in zip(backwards, taken[0], taken[-1], medians, strict=True):
            times = seconds / medians[0]
            print(
                f"{length:>7,} {backward.name:>15} {first[0]:>8.2f} {seconds:>8.2f} {times:>5.2f}x "
                f"{last[1] / 1e9:>8.3f}  {last[2]:.5f}",
                flush=True,
            )


def trained_view(model: str) -> tuple[Any, int]:
    """Returns the checked view of the model with an adapter, and the size of its vocabulary."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported
    from mlxft.config.schema import Config
    from mlxft.models.load import vocabulary_size
    from mlxft.models.resolve import resolve
    from mlxft.training.inputs import load_trained

    folder = resolve(model)
    return load_trained(Config(), folder)[0], vocabulary_size(folder)


def random_row(vocabulary: int, length: int) -> Any:
    import numpy as np

    from mlxft.data.example import Example

    tokens = np.random.default_rng(length).integers(0, vocabulary, length + 1).astype(np.int32)
    return Example(tokens, np.ones(length + 1, bool), "")


if __name__ == "__main__":
    main()
