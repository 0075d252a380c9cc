"""Twenty steps of `mlxft train` against the loss, gradient norm and weights of TRL, PEFT and torch.

The reference files and the tolerances are described in README.md beside this file.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config.choices import GRADIENTS
from mlxft.models.adapters import load_adapter
from mlxft.models.load import load
from tests.devices import SLACK
from tests.runs import column, train, write_rows

HERE = Path(__file__).parent
MODEL = HERE / "models" / "llama_untied"
# CPU float32; ten times that on a GPU.

PLAIN = ["schedule=constant", "trainer.clip_norm=0"]
ADAPTER = f"adapter.init_from={MODEL / 'adapter'}"
RUNS = {
    "sft_lora": [*PLAIN, ADAPTER, "optimizer.lr=5e-3"],
    "sft_lora_uncorrected_adam": [*PLAIN, ADAPTER, "optimizer.lr=5e-4", "optimizer.bias_correction=false"],
    "sft_lora_clip_warmup_cosine": [
        ADAPTER,
        "optimizer.lr=5e-3",
        "trainer.clip_norm=1.0",
        "schedule=cosine",
        "schedule.warmup_steps=5",
    ],
    "sft_full": [*PLAIN, "adapter=full", "optimizer.lr=1e-3"],
}


def curve_rows(path: Path) -> Path:
    """Batch i of the curves is rows 4 i to 4 i + 3, and starts again after four batches."""
    data = np.load(HERE / "curves_llama_untied.npz")
    rows = []
    for batch in range(4):
        for row in range(4):
            length = int(data["sft.attention_mask"][batch, row].sum())
            rows.append(
                {
                    "input_ids": data["sft.input_ids"][batch, row, :length].tolist(),
                    "completion_mask": data["sft.completion_mask"][batch, row, :length].tolist(),
                }
            )
    return write_rows(path, rows)


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


@pytest.mark.parametrize("gradient", GRADIENTS[1:])
@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_equal_trl(name, gradient, tmp_path):
    overrides = [
        "data.shuffle=false",
        "data.batch_size=4",
        "trainer.max_steps=20",
        f"trainer.gradient={gradient}",
        *RUNS[name],
    ]
    result = train(MODEL, curve_rows(tmp_path / "rows.jsonl"), tmp_path / "run", *overrides)
    assert_equals_curve(result, name)
    expected = np.load(HERE / "curves_llama_untied.npz")[f"{name}.lr"]
    assert column(result.run_dir, "lr") == pytest.approx(expected, rel=1e-6)
