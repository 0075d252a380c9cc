"""How one request's tokens are drawn: its own chances, penalties, seed and grammar, alone or in a batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    greedy_sampler,
    make_logits_processors,
)

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Sampling:
    """OpenAI's fields and mlx-lm's further ones, under their names.

    temperature: 0 takes the likeliest token. top_p, min_p: as shares of probability; top_k: 0 for all.
    logit_bias: by token id. *_penalty: 0 for none, repetition_penalty 1; *_context_size: how many of the last
    tokens they look at.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20

    def sampler(self) -> Sampler:
        """Returns a function from log-probabilities (1, V) to a token (1,), for this one request."""
        return greedy_sampler if self.temperature == 0 else _Draws(self)

    def processors(self) -> list[Processor]:
        """Returns what changes the logits (1, V) before they are normalised, given all tokens so far."""
        return make_logits_processors(
            self.logit_bias or None,
            None if self.repetition_penalty == 1 else self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty or None,
            self.presence_context_size,
            self.frequency_penalty or None,
            self.frequency_context_size,
        )


_COLDEST = 1e-5


class _Draws:
    """Draws with keys of its own, the n-th token's from the seed and n alone."""

    def __init__(self, sampling: Sampling):
        self._of = sampling
        self._key = mx.random.key(sampling.seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        of = self._of
        self._key, key, chance = mx.random.split(self._key, 3)
        if 0 < of.top_p < 1:
            logprobs = apply_top_p(logprobs, of.top_p)
        if of.min_p > 0:
            logprobs = apply_min_p(logprobs, of.min_p, 1)
        if of.xtc_probability > 0:
            without = apply_xtc(logprobs, 1.0, of.xtc_threshold, [])
            logprobs = mx.where(mx.random.uniform(key=chance) < of.xtc_probability, without, logprobs)
        if 0 < of.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, of.top_k)
        # So cold that only the likeliest token is left: a smaller number's inverse is none.
        return mx.random.categorical(logprobs * (1 / max(of.temperature, _COLDEST)), key=key)


class Grammars:
    """Turns JSON schemas into what llguidance allows at each step, for one tokenizer."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._made: Any = None

    def check(self, schema: Any) -> None:
        """Raises ValueError if llguidance does not know how to hold answers to `schema`."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(schema)
        if problem := LLMatcher.validate_grammar(grammar, self._ll()):
            raise ValueError(problem)

    def processor(self, schema: Any) -> Processor:
        """Returns a logits processor of one request, which lets through what can still become `schema`."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll(), LLMatcher.grammar_from_json_schema(schema))
        return _Held(matcher, sorted(self._tokenizer.eos_token_ids))

    def _ll(self) -> Any:
        if self._made is None:
            from llguidance.hf import from_tokenizer

            inner, ends = self._tokenizer._tokenizer, sorted(self._tokenizer.eos_token_ids)
            self._made = from_tokenizer(inner, eos_token=ends)
        return self._made


class _Held:
    """Sets logits of tokens that the grammar does not allow to minus infinity."""

    def __init__(self, matcher: Any, end_ids: list[int]):
        self._matcher, self._end_ids = matcher, mx.array(end_ids)
        self._begun = False

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._begun and not self._matcher.is_stopped():
            self._matcher.consume_token(int(tokens[-1].item()))
        self._begun = True
        if self._matcher.is_stopped():  # nothing can follow but the end
            ended = mx.full(logits.shape, -mx.inf, logits.dtype)
            ended[..., self._end_ids] = logits[..., self._end_ids]
            return ended
        allowed = _bits(self._matcher.compute_bitmask(), logits.shape[-1])
        return mx.where(allowed, logits, -mx.inf)


def _bits(mask: bytes, width: int) -> mx.array:
    import numpy as np

    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:width].astype(bool)
    return mx.array(np.pad(bits, (0, width - len(bits))))


def seed_of(seed: Optional[int]) -> int:
    """Returns the seed, or one by chance, which no other request's draws depend on."""
    import secrets

    return secrets.randbits(32) if seed is None else seed
