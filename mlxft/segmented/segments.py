"""Segmented backward: layers run forward keeping only what enters each segment, then walked back.

    forward      state -> [segment 1] -> state -> [segment 2] -> ... -> head
    backward     each segment is run again, last first, and takes the gradient of what left it

What is alive at once is what enters each segment, and one segment's activations. Gradients are those of
the whole backward. Layers below the first trained array are run forward once and not walked.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Optional

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import Layout
from mlxft.losses import stepped_cross_entropy, stepped_gradients
from mlxft.models.decoder import DecoderView, State
from mlxft.models.lora_linear import dropout_keys
from mlxft.segmented.gradients import (
    Objective,
    Observer,
    Result,
    embedded,
    head_loss,
    target_rows,
    trained_head,
)
from mlxft.segmented.plan import GradientPlan
from mlxft.segmented.programs import Half, Segment, SegmentRunner

Arrays = dict[str, mx.array]

_ONE_LAYER = GradientPlan("segmented")

MLP_TOKENS = 16_384  # whose MLP is computed at once, of layers in halves


class SegmentedGradient:
    """Loss and gradients of a model's trainable arrays, segment by segment.

    plan: of segments in flight each keeps its activations alive, and waiting costs a GPU speed; halves are
    walked of layers that are made of attention and an MLP. compiled: one program for all segments alike.
    Other arguments as in `Gradient`.
    """

    def __init__(
        self,
        view: DecoderView,
        objective: Objective,
        plan: GradientPlan = _ONE_LAYER,
        compiled: bool = False,
        repeatable: bool = False,
        observe: Optional[Observer] = None,
    ):
        self.view = view
        self.objective = objective
        self.in_flight = plan.in_flight
        self.compiled = compiled
        self.repeatable = repeatable
        self.observe = observe
        self._runner = SegmentRunner(compiled)
        names = {id(module): path for path, module in view.model.named_modules()}
        self._head_path = names[id(view.head_module)]
        self._decoder_path = names[id(view.decoder)]
        self._read_above = f"{self._head_path}.", f"{self._decoder_path}.{view.last_norm}."
        paths = [names[id(layer)] for layer in view.layers]
        self._below, self._walked = _segments(view, plan.segment_layers, paths)
        self._halves = _halves(view, self._walked, paths) if plan.halves else {}

    def __call__(self, params: Any, inputs: dict[str, mx.array], layout: Layout) -> Result:
        cache = TrainingCache(layout, repeatable=self.repeatable)
        self.view.model.update(params)
        try:
            with self.view.active():
                return self._walk(params, inputs, cache)
        finally:  # tracing leaves its placeholders on the modules
            self.view.model.update(params)

    def _walk(self, params: Any, inputs: dict[str, mx.array], cache: TrainingCache) -> Result:
        key = inputs.get("dropout_key")
        entering, state = self._forward(inputs, cache, key)
        loss, metrics, d_state, gradients = self._head(self._outside(params, self._is_above), state, inputs)
        del state
        waiting = _Waiting(self.in_flight)
        for segment in reversed(self._walked):
            backward = self._by_halves if segment.start in self._halves else self._runner.backward
            d_state, own = backward(segment, entering.pop(), d_state, cache, key)
            gradients |= own
            waiting.submit([own, d_state if entering or self.view.embedding_trains else []])
        if self.view.embedding_trains:
            outside = self._outside(params, self._is_below)
            gradients = _added(gradients, self._embedding(outside, inputs, d_state))
        self._tell("backward", gradients)
        return loss, metrics, tree_map_with_path(lambda path, _: gradients[path], params)

    def _by_halves(self, segment: Segment, state: State, d_state: State, cache: TrainingCache, key):
        """A layer's backward in two: its attention runs forward once more, and less is alive at once.

        The MLP takes each token by itself, and so many of them at once.
        """
        attention, mlp = self._halves[segment.start]
        (middle,) = self._runner.forward(attention, state, cache, key)
        mx.eval(middle)
        # With dropout all at once: the masks are made for the whole row.
        at_once = middle.shape[1] if key is not None else MLP_TOKENS
        own, parts = {}, []
        for start in range(0, middle.shape[1], at_once):
            span = slice(start, start + at_once)
            given = (middle[:, span],), (d_state[0][:, span],)
            (d_part,), d_own = self._runner.backward(mlp, *given, cache, key)
            own = _added(own, d_own) if parts else d_own
            mx.eval(d_part, own)
            parts.append(d_part)
        d_state, d_own = self._runner.backward(attention, state, (mx.concatenate(parts, axis=1),), cache, key)
        return d_state, own | d_own

    def _outside(self, params: Any, is_wanted: Callable[[str], bool]) -> Arrays:
        """Returns the wanted ones of the trainable arrays that are in no layer.

        Of one that its function does not read a gradient would be zeros, as many as there are words.
        """
        inside = {name for segment in self._walked for name in segment.trained}
        return {
            name: array for name, array in tree_flatten(params) if name not in inside and is_wanted(name)
        }

    def _is_above(self, name: str) -> bool:
        """Returns whether what comes after the last layer may read the array."""
        return name.startswith(self._read_above) or not name.startswith(f"{self._decoder_path}.")

    def _is_below(self, name: str) -> bool:
        """Returns whether what comes before the first layer may, which a head does that is the embedding."""
        head, _ = self._read_above
        return self.view.is_tied and name.startswith(head) or not name.startswith(self._read_above)

    def _forward(self, inputs: Arrays, cache: TrainingCache, key) -> tuple[list[State], State]:
        """Returns the states that enter the walked segments, and the last one."""
        waiting, entering = _Waiting(self.in_flight), []
        with dropout_keys(key):
            state = embedded(self.view, inputs)
        for segment in self._below:
            state = self._runner.forward(segment, state, cache, key)
            waiting.submit(state)
        for segment in self._walked:
            entering.append(state)
            state = self._runner.forward(segment, state, cache, key)
            waiting.submit(state)
        self._tell("forward", state)
        return entering, state

    def _head(self, outside: Arrays, state: State, inputs) -> tuple[mx.array, dict, State, Arrays]:
        """Returns loss, metrics, the gradient of the last state, and those of the arrays outside."""
        chunk = self.objective.head.chunk_for(inputs["targets"].shape[0])
        with dropout_keys(inputs.get("dropout_key")):
            if chunk is None:
                loss, metrics, d_outside, d_state = self._head_at_once(outside, state, inputs)
            else:
                loss, metrics, d_outside, d_state = self._head_in_chunks(outside, state, inputs, chunk)
        mx.eval(loss, metrics, d_outside, d_state)
        self._tell("head", loss)
        return loss, metrics, d_state, d_outside

    def _head_at_once(self, outside: Arrays, state: State, inputs):
        def head(outside, state):
            self.view.model.update(tree_unflatten(list(outside.items())))
            return head_loss(self.objective, trained_head(self.view), self.view.finish(state), inputs)

        (loss, metrics), (d_outside, d_state) = mx.value_and_grad(head, argnums=(0, 1))(outside, state)
        return loss, metrics, d_outside, d_state

    def _head_in_chunks(self, outside: Arrays, state: State, inputs, chunk: int):
        """The same, chunks of targets evaluated one by one: no more than one chunk's logits exist."""
        names = [name for name in outside if not name.startswith(f"{self._head_path}.")]
        count = len(names)

        def rows_of(*arrays):
            self.view.model.update(tree_unflatten(list(zip(names, arrays[:count], strict=True))))
            return [target_rows(self.view.finish(arrays[count:]), inputs)]

        given = [*(outside[name] for name in names), *state]
        rows = rows_of(*given)[0]
        mx.eval(rows)
        head, targets = trained_head(self.view), inputs["targets"]
        weights, metrics = self.objective.token_weights(inputs), {}
        if weights is None:
            (loss, metrics), d_head, d_rows = stepped_gradients(
                head, rows, targets, lambda logps: self.objective.loss(logps, inputs), chunk
            )
        else:
            loss, d_head, d_rows = stepped_cross_entropy(head, rows, targets, weights, chunk)
        gradients = mx.vjp(rows_of, given, [d_rows])[1]
        d_outside = dict(zip(names, gradients[:count], strict=True))
        own = {f"{self._head_path}.{name}": array for name, array in tree_flatten(d_head)}
        return loss, metrics, _added(d_outside, own), tuple(gradients[count:])

    def _embedding(self, outside: Arrays, inputs: Arrays, d_state: State) -> Arrays:
        """Returns what the arrays outside of the layers get from below the first layer."""
        names = list(outside)

        def embed(*arrays):
            self.view.model.update(tree_unflatten(list(zip(names, arrays, strict=True))))
            return embedded(self.view, inputs)

        with dropout_keys(inputs.get("dropout_key")):
            _, gradients = mx.vjp(embed, list(outside.values()), list(d_state))
        return dict(zip(names, gradients, strict=True))

    def _tell(self, phase: str, arrays: Any) -> None:
        if self.observe:
            self.observe(phase, arrays)


def _segments(view: DecoderView, size: int, paths: list[str]) -> tuple[list[Segment], list[Segment]]:
    """Returns the layers below the first trained one, and the segments to walk; the last are full."""
    lowest, count = view.lowest_trainable(), view.num_layers
    below = [Segment(view, index, index + 1, paths) for index in range(lowest)]
    starts = range(count, lowest, -size)
    walked = [Segment(view, max(stop - size, lowest), stop, paths) for stop in starts]
    return below, walked[::-1]


def _halves(view: DecoderView, walked: list[Segment], paths: list[str]) -> dict[int, tuple[Half, Half]]:
    """Returns attention and MLP of the layers that consist of these two, by number."""
    agree: dict[Any, bool] = {}  # one of a kind is compared
    for segment in walked:
        if segment.kind not in agree:
            agree[segment.kind] = view.has_halves(segment.start)
    return {
        segment.start: tuple(Half(view, segment.start, half, paths) for half in ("attention", "mlp"))
        for segment in walked
        if agree[segment.kind]
    }


class _Waiting:
    """Submits arrays for evaluation, and waits for those of `in_flight` submissions ago."""

    def __init__(self, in_flight: int):
        self.in_flight = in_flight
        self.submitted: deque[Any] = deque()

    def submit(self, arrays: Any) -> None:
        if self.in_flight == 1:
            mx.eval(arrays)
            return
        mx.async_eval(arrays)
        self.submitted.append(arrays)
        if len(self.submitted) >= self.in_flight:
            mx.eval(self.submitted.popleft())


def _added(some: Arrays, more: Arrays) -> Arrays:
    both = {name: some[name] + array for name, array in more.items() if name in some}
    return some | more | both
