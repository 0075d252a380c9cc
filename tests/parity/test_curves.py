"""Twenty steps of `mlxft train` against the loss, gradient norm and weights of TRL, PEFT and torch.

The reference files and the tolerances are described in README.md beside this file.
"""

from pathlib import Path

import numpy as np
import pytest

from mlxft.config.choices import GRADIENTS
from tests.parity.kit import ADAPTER, HERE, MODEL, PLAIN, assert_equals_curve
from tests.runs import column, train, write_rows

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
