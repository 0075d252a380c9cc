"""Time and peak memory of one ORPO step on a pair with a long prompt, the prompt forwarded in three ways.

    python benchmarks/shared_prompt.py [--shape smollm2|qwen3] [--prompt 1536] [--answers 256] [--steps 5]

one by one      the rows prompt + chosen and prompt + rejected, each in a forward of its own
                (as trainers do that call the model once an answer; exists only in this script)
two forwards    the same rows side by side (trainer.layout=padded)
boolean mask    prompt, chosen and rejected in one row, what each may see as a mask over the whole row
                (how it is usually done; exists only in this script)
pieces          the same row, attention in pieces without a mask (trainer.layout=prefix_shared)

Random weights of the shape (smollm2: SmolLM2-135M, float32 on a CPU; qwen3: Qwen3-0.6B, bfloat16), LoRA
rank 8 on all projections. Each way is a process of its own: loss and gradients, one pair a step, first
steps that warm up and are left out (one on a CPU, three on a GPU), then the median step. Peak: MLX's,
over what the model itself takes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

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
WAYS = {
    "one by one": "padded",
    "two forwards": "padded",
    "boolean mask": "prefix_shared",
    "pieces": "prefix_shared",
}


def measure(way: str, shape: str, num_prompt: int, num_answer: int, steps: int) -> dict:
    """Returns seconds of the median step, bytes of the peak, and the loss, of one way."""
    import mlxft  # noqa: F401  first: MLX binds to the BLAS it finds when it is imported

    import mlx.core as mx  # isort: skip

    from mlxft.backend import shape_multiple
    from mlxft.layouts.arrange import Arranger
    from mlxft.segmented import gradients
    from mlxft.training.objectives import HeadPlan, Orpo
    from mlxft.training.objectives.preference import LossSettings

    made = random_view(shape)
    multiple = 1 if way == "boolean mask" else shape_multiple()
    settings = LossSettings(0.1, nll_weight=1.0, nll_scope="full")
    objective = Orpo(HeadPlan(), Arranger(WAYS[way], multiple), settings)
    if way == "one by one":
        gradients.hidden_states = row_by_row(gradients.hidden_states)
    if way == "boolean mask":
        gradients.TrainingCache = masked_cache(num_prompt, num_answer)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    warm_up = 1 if on_cpu else GPU_WARM_UP
    gradient = gradients.Gradient(made, objective, "whole", compiled=not on_cpu)
    batches, counts = objective.begin(
        [[random_pair(SHAPES[shape]["vocab_size"], num_prompt, num_answer)]], made
    )
    prepared = objective.prepare(batches[0], counts)
    params = made.model.trainable_parameters()
    seconds = []
    for step in range(steps + warm_up):
        mx.clear_cache()
        mx.reset_peak_memory()
        before, began = mx.get_active_memory(), time.perf_counter()
        result = gradient(params, prepared.inputs, prepared.layout)
        mx.eval(result)
        if step >= warm_up:
            seconds.append(time.perf_counter() - began)
        loss, peak = result[0].item(), mx.get_peak_memory() - before
        del result
    return {
        "seconds": statistics.median(seconds),
        "peak_bytes": peak,
        "loss": loss,
        "positions": prepared.num_positions,
    }


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


def row_by_row(hidden_states):
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[1:])
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        result = measure(options.way, options.shape, options.prompt, options.answers, options.steps)
        print("RESULT " + json.dumps(result))
        return
    print(f"{options.shape}, prompt {options.prompt}, answers of {options.answers}, one pair a step")
    print(f"{'way':<14} {'positions':>9} {'seconds':>9} {'peak GB':>8} {'faster':>7}  loss")
    base = None
    for way in options.ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = json.loads(output[output.index("RESULT ") + 7 :])
        base = base or found["seconds"]
        print(
            f"{way:<14} {found['positions']:>9,} {found['seconds']:>9.3f} {found['peak_bytes'] / 1e9:>8.2f} "
            f"{base / found['seconds']:>6.2f}x  {found['loss']:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
