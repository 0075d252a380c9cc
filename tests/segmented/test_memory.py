"""What the segmented backward holds in memory: Qwen3's shape, 16 layers of width 128, LoRA on q, v, down."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.qwen3 import Model, ModelArgs

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import view
from mlxft.models.lora import apply_adapter
from mlxft.segmented.segments import SegmentedGradient
from mlxft.training.objectives.common import HeadPlan
from mlxft.training.objectives.sft import Sft
from tests.devices import cpu_figures

VOCABULARY = 8192
SHAPE = dict(
    model_type="qwen3",
    hidden_size=128,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    rope_theta=1e6,
    tie_word_embeddings=True,
)


def gradient_of(num_layers: int) -> SegmentedGradient:
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(SHAPE | {"num_hidden_layers": num_layers}))
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=4, targets=["q_proj", "v_proj", "down_proj"]))
    mx.eval(model.parameters())
    return SegmentedGradient(made, Sft(HeadPlan("chunked", 128), Arranger()))


def step(gradient: SegmentedGradient, length: int) -> float:
    """Runs one row of `length` positions; returns its loss."""
    tokens = np.random.default_rng(length).integers(0, VOCABULARY, length + 1).astype(np.int32)
    row = Example(tokens, np.ones(length + 1, bool), "")
    prepared = gradient.objective.prepare([row], {"tokens": length})
    result = gradient(gradient.view.model.trainable_parameters(), prepared.inputs, prepared.layout)
    mx.eval(result)
    return result[0].item()


def peak(gradient: SegmentedGradient, length: int) -> int:
    """Returns the bytes that a step takes at most, over those that were there before it."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step(gradient, length)
    return mx.get_peak_memory() - before


@cpu_figures
def test_a_row_of_2048_tokens_takes_at_most_110_megabytes_over_the_weights():
    assert peak(gradient_of(16), 2048) <= 110e6


@pytest.mark.slow
def test_memory_grows_with_the_length_and_no_faster():
    gradient = gradient_of(16)
    assert peak(gradient, 4096) <= 2.2 * peak(gradient, 2048)


def test_200_steps_of_60_lengths_leave_nothing_behind():
    gradient = gradient_of(2)
    gc.collect()  # other tests' models
    active = []
    for number in range(200):
        step(gradient, 16 + 7 * number % 60)
        active.append(mx.get_active_memory())
    assert active[199] == active[19]
