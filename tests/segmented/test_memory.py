"""What the segmented backward holds in memory: Qwen3's shape, 16 layers of width 128, LoRA on q, v, down."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.qwen3 import Model, ModelArgs

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import DecoderView, view
from mlxft.models.lora import apply_adapter
from mlxft.segmented.build import AnyGradient
from mlxft.segmented.gradients import Gradient
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


OBJECTIVE = Sft(HeadPlan("chunked", 128), Arranger())


def view_of(num_layers: int, **adapter) -> DecoderView:
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(SHAPE | {"num_hidden_layers": num_layers, **adapter.pop("shape", {})}))
    made = view(model)
    adapter = adapter or {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}
    apply_adapter(model, AdapterConfig(**adapter))
    mx.eval(model.parameters())
    return made


def gradient_of(num_layers: int) -> SegmentedGradient:
    return SegmentedGradient(view_of(num_layers), OBJECTIVE)


def step(gradient: AnyGradient, length: int, trained_on: int = 0) -> float:
    """Runs one row of `length` positions, all trained on or the last so many; returns its loss."""
    tokens = np.random.default_rng(length).integers(0, VOCABULARY, length + 1).astype(np.int32)
    mask = np.arange(length + 1) > length - (trained_on or length + 1)
    prepared = gradient.objective.prepare([Example(tokens, mask, "")], {"tokens": trained_on or length})
    result = gradient(gradient.view.model.trainable_parameters(), prepared.inputs, prepared.layout)
    mx.eval(result)
    return result[0].item()


def peak(gradient: AnyGradient, length: int, trained_on: int = 0) -> int:
    """Returns the bytes that a step takes at most, over those that were there before it."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step(gradient, length, trained_on)
    return mx.get_peak_memory() - before


@cpu_figures
def test_a_row_of_2048_tokens_takes_at_most_110_megabytes_over_the_weights():
    assert peak(gradient_of(16), 2048) <= 110e6


@pytest.mark.slow
def test_memory_grows_with_the_length_and_no_faster():
    gradient = gradient_of(16)
    assert peak(gradient, 4096) <= 2.2 * peak(gradient, 2048)


@cpu_figures
def test_checkpointing_computes_one_layer_again_at_a_time():
    """As segments of one layer do; with one token trained on the head takes next to nothing."""
    checkpointed = Gradient(view_of(12), OBJECTIVE, "checkpoint")
    assert max(peak(checkpointed, 512, 1) for _ in range(2)) < 1.1 * peak(gradient_of(12), 512, 1)


@cpu_figures
def test_the_heads_backward_makes_no_gradient_of_an_embedding_that_it_does_not_read():
    peaks = {}
    trained = view_of(1, kind="full", shape={"tie_word_embeddings": False})
    gradient = SegmentedGradient(trained, OBJECTIVE, observe=lambda phase, _: peaks.update({phase: memory()}))

    def memory() -> int:
        found = mx.get_peak_memory()
        mx.reset_peak_memory()
        return found

    gc.collect()
    before = mx.get_active_memory()
    step(gradient, 16)
    table = 4 * VOCABULARY * 128  # the head's own gradient, and 3 logits for each of 16 tokens
    assert table < peaks["head"] - before < 1.9 * table


def test_200_steps_of_60_lengths_leave_nothing_behind():
    gradient = gradient_of(2)
    gc.collect()  # other tests' models
    active = []
    for number in range(200):
        step(gradient, 16 + 7 * number % 60)
        active.append(mx.get_active_memory())
    assert active[199] == active[19]
