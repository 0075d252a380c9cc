"""What the tests of parity share: the reference model, and comparing with what TRL, PEFT and torch gave.

Tolerances are a CPU's in float32, ten times that on a GPU.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxft.models.adapters import load_adapter
from mlxft.models.load import load
from tests.devices import SLACK
from tests.runs import column

HERE = Path(__file__).parent
MODEL = HERE / "models" / "llama_untied"
PLAIN = ["schedule=constant", "trainer.clip_norm=0"]
ADAPTER = f"adapter.init_from={MODEL / 'adapter'}"


def relative(value, reference) -> float:
    return float(np.abs(np.asarray(value) - reference).max() / np.abs(reference).max())


def assert_equals_curve(result, name: str) -> None:
    """Compares a run's losses, gradient norms, and the logits it ends with, with those of the curve."""
    data = np.load(HERE / "curves_llama_untied.npz")
    loss, norm = (column(result.run_dir, each) for each in ("loss", "grad_norm"))
    assert relative(loss[:5], data[f"{name}.loss"][:5]) < 2e-5 * SLACK
    assert relative(loss, data[f"{name}.loss"]) < 5e-5 * SLACK
    assert relative(norm, data[f"{name}.grad_norm"]) < 5e-5 * SLACK
    model, _ = load(str(MODEL), dtype="float32", tokenizer_required=False)
    load_adapter(model, result.adapter)
    logits = np.array(model(mx.array(data["sft.input_ids"][0])))
    real = data["sft.attention_mask"][0].astype(bool)
    assert relative(logits[real], data[f"{name}.final_logits"][real]) < 5e-5 * SLACK


def compare(gradients, data, prefix, name_of):
    names = [key.removeprefix(prefix) for key in data if key.startswith(prefix)]
    assert len(names) == len(gradients)
    largest = max(np.abs(data[prefix + name]).max() for name in names)
    for name in names:
        ours, transposed = name_of(name)
        expected = data[prefix + name].T if transposed else data[prefix + name]
        assert np.abs(gradients[ours] - expected).max() / largest < 1e-5 * SLACK, name


def lora_name(name: str) -> tuple[str, bool]:
    """PEFT's `...q_proj.lora_A.weight` (r, in) is mlx-lm's `...q_proj.lora_a` (in, r)."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b"), True
