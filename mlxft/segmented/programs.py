"""The forward and the backward of one segment of layers, traced anew or compiled once for all alike.

Arrays are inputs: a program traced on one segment's modules computes another's, of the same kind, from
the other's arrays. What else tracing reads is in the key it is kept under.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Optional

import mlx.core as mx

from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView, State
from mlxft.models.lora_linear import dropout_keys
from mlxft.segmented.kinds import kind_of, parameters_of

_MAX_PROGRAMS = 128  # kept: one for each kind of segment, layout and shape still in use


class Segment:
    """Layers [start, stop) of a model, and their arrays by name. paths: the layers' own names."""

    part = "whole"

    def __init__(self, view: DecoderView, start: int, stop: int, paths: list[str]):
        self.view, self.start, self.stop = view, start, stop
        self._slots = {
            f"{path}.{name}": (module, attribute)
            for index, path in zip(range(start, stop), paths[start:stop], strict=True)
            for name, module, attribute in parameters_of(view.layers[index])
            if self._has(name)
        }

    def _has(self, name: str) -> bool:
        return True

    @cached_property
    def kind(self) -> Hashable:
        """What two segments have equal if one program serves both."""
        layers = tuple(kind_of(layer) for layer in self.view.layers[self.start : self.stop])
        return self.part, layers, None if self.view.layers_are_alike else self.start

    @cached_property
    def trained(self) -> list[str]:
        """The names of the arrays that a gradient is wanted for."""
        return [name for name, (module, attribute) in self._slots.items() if attribute not in module._no_grad]

    @cached_property
    def frozen(self) -> list[str]:
        return [name for name in self._slots if name not in set(self.trained)]

    def arrays(self, names: list[str]) -> list[mx.array]:
        """Returns the arrays as they are on the modules now."""
        slots = (self._slots[name] for name in names)
        return [module[attribute] for module, attribute in slots]

    def put(self, names: list[str], arrays: list[mx.array]) -> None:
        """Puts arrays onto the modules."""
        for name, array in zip(names, arrays, strict=True):
            module, attribute = self._slots[name]
            module[attribute] = array

    def run(self, state: State, cache: TrainingCache) -> State:
        """Returns the state after the layers."""
        return self.view.run(state, self.start, self.stop, cache)


class Half(Segment):
    """The attention or the MLP of one layer, with the norm before it."""

    def __init__(self, view: DecoderView, index: int, half: str, paths: list[str]):
        self.part = half
        super().__init__(view, index, index + 1, paths)

    def _has(self, name: str) -> bool:
        of_mlp = name.startswith(("mlp.", "post_attention_layernorm."))
        return of_mlp == (self.part == "mlp")

    def run(self, state: State, cache: TrainingCache) -> State:
        """Returns the state after the half: the hidden states are all there is of it."""
        return (self.view.run_half(state[0], self.start, self.part, cache),)


class SegmentRunner:
    """Runs segments and halves forward and backward. compiled: by programs that outlive the call."""

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self._kept: OrderedDict[tuple, tuple[Segment, Callable]] = OrderedDict()

    def forward(self, segment: Segment, state: State, cache: TrainingCache, key) -> State:
        """Returns the state after the segment. key: of dropout, None for none."""
        return self._call(segment, cache, key, state, None)

    def backward(
        self, segment: Segment, state: State, d_state: State, cache: TrainingCache, key
    ) -> tuple[State, dict[str, mx.array]]:
        """Returns the gradients of the state before the segment, and of its trained arrays by name."""
        gradients = self._call(segment, cache, key, state, d_state)
        own = dict(zip(segment.trained, gradients, strict=False))
        return tuple(gradients[len(own) :]), own

    def _call(self, segment: Segment, cache, key, state: State, d_state: Optional[State]):
        given = segment.arrays(segment.trained), segment.arrays(segment.frozen)
        if not self.compiled:
            return _function(segment, cache)(*given, key, None, list(state), d_state and list(d_state))
        traced, program = self._program(segment, cache, state, d_state is not None, key is not None)
        shift = None if key is None else mx.array(segment.start - traced.start, mx.uint32)
        return program(*given, key, shift, list(state), d_state and list(d_state))

    def _program(self, segment: Segment, cache, state: State, backward: bool, dropout: bool):
        shapes = tuple((tuple(array.shape), str(array.dtype)) for array in state)
        windows = tuple(segment.view.windows()[segment.start : segment.stop])
        kept_under = segment.kind, windows, shapes, cache.layout, cache.repeatable, backward, dropout
        if kept_under not in self._kept:
            self._kept[kept_under] = segment, mx.compile(_function(segment, cache))
            if len(self._kept) > _MAX_PROGRAMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(kept_under)
        return self._kept[kept_under]


def _function(segment: Segment, cache: TrainingCache) -> Callable:
    """Returns f(trained, frozen, key, shift, state, d_state), on this segment's modules.

    It gives the state after the segment; with d_state the gradients of trained arrays, then of the state.
    """

    def function(trained, frozen, key, shift, state, d_state):
        before = segment.arrays(segment.trained), segment.arrays(segment.frozen)

        def run(*primals):
            segment.put(segment.trained, primals[: len(trained)])
            return list(segment.run(tuple(primals[len(trained) :]), cache))

        try:
            segment.put(segment.frozen, frozen)
            with dropout_keys(key, shift):
                if d_state is None:
                    return run(*trained, *state)
                return mx.vjp(run, [*trained, *state], d_state)[1]
        finally:
            segment.put(segment.trained, before[0])
            segment.put(segment.frozen, before[1])

    return function
