"""How a backward is run: whole or checkpointed, behind one signature.

    gradient(params, inputs, layout) -> (loss, metrics, gradients)

params: the model's trainable arrays as a tree; gradients: the same tree. The loss and metrics are the
micro-batch's already weighted shares of its window's.
"""

from collections import OrderedDict
from typing import Any, Callable, Optional, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.noise import noisy
from mlxft.layouts.pieces import Layout
from mlxft.losses import Head, linear_cross_entropy, linear_logps
from mlxft.models.decoder import DecoderView, State
from mlxft.models.lora_linear import dropout_keys

# Called as observe(phase, arrays) after each phase of a step; evaluates the arrays.
Observer = Callable[[str, Any], None]

Result = tuple[mx.array, dict[str, mx.array], Any]

# Compiled programs kept: one for each layout and set of shapes still in use.
_MAX_PROGRAMS = 64
_MAX_SEEN = 512  # layouts remembered, to know which come again


class Objective(Protocol):
    """What a gradient needs of an objective (training/objectives has them)."""

    head: Any  # with chunk_for(number of targets)

    def loss(self, logps: mx.array, inputs: dict[str, mx.array]) -> tuple[mx.array, dict]:
        """Returns the weighted loss and metrics of the log-probabilities (M,) of inputs["targets"]."""

    def token_weights(self, inputs: dict[str, mx.array]) -> Optional[mx.array]:
        """Returns what each target's -log p counts (M,) if the loss is their sum, None if it is not."""


class Gradient:
    """Loss and gradients of a model's trainable arrays; `kind` is "whole" or "checkpoint".

    compiled: trace each layout and set of shapes once. On a GPU that saves launching small kernels
    one by one; on a CPU every new shape would cost a run of the C++ compiler. observe: told each phase's
    arrays in turn (not with `compiled`, which leaves no phases to tell apart).
    """

    def __init__(
        self,
        view: DecoderView,
        objective: Objective,
        kind: str = "whole",
        compiled: bool = False,
        repeatable: bool = False,
        observe: Optional[Observer] = None,
    ):
        self.view = view
        self.objective = objective
        self.repeatable = repeatable
        self.compiled = compiled
        self.observe = observe
        self._run_layers = {"whole": _run_plain, "checkpoint": _run_checkpointed}[kind]
        self._traced = False
        self._programs: OrderedDict[tuple, Callable] = OrderedDict()
        self._seen: OrderedDict[tuple, None] = OrderedDict()

    def __call__(self, params: Any, inputs: dict[str, mx.array], layout: Layout) -> Result:
        self._traced = False
        try:
            (loss, metrics, hidden), gradients = self._program(inputs, layout)(params, inputs)
        finally:
            if self._traced:  # which left its placeholders on the modules
                self.view.model.update(params)
        if self.observe:
            for phase, arrays in (("forward", hidden), ("head", loss), ("backward", gradients)):
                self.observe(phase, arrays)
        return loss, metrics, gradients

    def _program(self, inputs: dict[str, mx.array], layout: Layout) -> Callable:
        # What tracing reads from Python is in the key; weights and dropout keys are inputs.
        if not self.compiled:
            return self._differentiated(layout)
        shapes = tuple((name, tuple(array.shape)) for name, array in sorted(inputs.items()))
        key = (layout, shapes)
        if key not in self._programs:
            # Pieces may differ every step, and a program for one use costs more than it saves: they
            # are worth one when they come again.
            worth_it = layout.is_plain or key in self._seen
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)
            if not worth_it:
                return self._differentiated(layout)
            self._programs[key] = mx.compile(self._differentiated(layout))
            if len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _differentiated(self, layout: Layout) -> Callable:
        cache = TrainingCache(layout, repeatable=self.repeatable)

        def loss(params, inputs):
            self.view.model.update(params)
            hidden = self.view.finish(self._run_layers(self.view, embedded(self.view, inputs), cache))
            value, metrics = head_loss(self.objective, trained_head(self.view, True), hidden, inputs)
            return value, metrics, hidden if self.observe else ()

        def differentiated(params, inputs):
            self._traced = True
            # The recompute of a checkpoint is traced within this call: it sees the same key and layout.
            with self.view.active(), dropout_keys(inputs.get("dropout_key")):
                return mx.value_and_grad(loss)(params, inputs)

        return differentiated


def trained_head(view: DecoderView, differentiated: bool = False) -> Head:
    """Returns the head with its trainable arrays as they are on the module now."""
    return Head(view.head, view.head_module.trainable_parameters(), differentiated)


def head_loss(
    objective: Objective, head: Head, hidden: mx.array, inputs: dict[str, mx.array]
) -> tuple[mx.array, dict]:
    """Returns the objective's weighted loss and metrics for hidden states (B, T, H)."""
    rows, targets = target_rows(hidden, inputs), inputs["targets"]
    chunk, weights = objective.head.chunk_for(rows.shape[0]), objective.token_weights(inputs)
    if weights is not None:
        return linear_cross_entropy(rows, head, targets, weights, chunk), {}
    return objective.loss(linear_logps(rows, head, targets, chunk), inputs)


def target_rows(hidden: mx.array, inputs: dict[str, mx.array]) -> mx.array:
    """Returns the hidden states (M, H) that predict the inputs' targets, of hidden (B, T, H)."""
    return hidden.reshape(-1, hidden.shape[-1])[inputs["index"]]


def hidden_states(view: DecoderView, tokens: mx.array, cache: TrainingCache) -> mx.array:
    """Returns what the head reads, (B, T, H), for tokens (B, T)."""
    return view.finish(_run_plain(view, view.embed(tokens), cache))


def embedded(view: DecoderView, inputs: dict[str, mx.array]) -> State:
    """Returns the state before layer 0, with noise on the embeddings where the inputs say so."""
    tokens = inputs["tokens"]
    if "noise_key" not in inputs:
        return view.embed(tokens)
    return view.embed(tokens, noisy(view.embedding(tokens), inputs))


def _run_plain(view: DecoderView, state: State, cache: TrainingCache) -> State:
    return view.run(state, 0, view.num_layers, cache)


def _run_checkpointed(view: DecoderView, state: State, cache: TrainingCache) -> State:
    """Runs the layers keeping only what enters each; the backward runs each again.

    Layers below the first trainable array have no backward and are run as they are.
    """
    lowest = view.lowest_trainable()
    state = view.run(state, 0, lowest, cache)
    for index in range(lowest, view.num_layers):
        state = _checkpointed_layer(view, index, cache, state)
    return state


def _checkpointed_layer(view: DecoderView, index: int, cache: TrainingCache, state: State) -> State:
    """Returns the state after a layer that the backward runs again.

    Left to itself the graph has several layers' recomputed arrays alive at a time, waiting for gradients
    that nothing below asks for: the layers below are made to wait for all gradients of this one.
    """
    layer: nn.Module = view.layers[index]
    trained = tree_flatten(layer.trainable_parameters())
    names = [name for name, _ in trained]

    def run(*given):
        # The arrays come in as arguments: read from the module they would count as constants.
        layer.update(tree_unflatten(list(zip(names, given, strict=False))))
        return list(view.run(tuple(given[len(names) :]), index, index + 1, cache))

    checkpointed = mx.custom_function(run)

    @checkpointed.vjp
    def backward(given, d_state, _):
        waiting = mx.depends(list(given), list(d_state))
        gradients = mx.vjp(run, waiting, list(d_state))[1]
        own, d_entering = gradients[: len(names)], gradients[len(names) :]
        return [*own, *(mx.depends(d_entering, own) if own else d_entering)]

    return tuple(checkpointed(*(array for _, array in trained), *state))
