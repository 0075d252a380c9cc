"""Answers of a model to many prompts at once, each up to its end, a stop string or a number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlxft.evaluation.generate import Sampling


@dataclass(frozen=True)
class Question:
    """A prompt (tokens) and how it is answered. stops: texts that end an answer and are no part of it."""

    prompt: Sequence[int]
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()


@dataclass
class _Answer:
    question: Question
    tokens: list[int] = field(default_factory=list)

    def is_stopped(self, tokenizer: Any) -> bool:
        """True once a stop string stands in what the last token can have completed."""
        if not self.question.stops:
            return False
        # A token is a byte at least.
        length = max(len(stop.encode()) for stop in self.question.stops) + 4
        tail = tokenizer.decode(self.tokens[-length:])
        return any(stop in tail for stop in self.question.stops)

    def text(self, tokenizer: Any) -> str:
        text = tokenizer.decode(self.tokens)
        found = [text.find(stop) for stop in self.question.stops if stop in text]
        return text[: min(found)] if found else text


def answers(
    model: nn.Module, tokenizer: Any, questions: Sequence[Question], batch_size: int, seed: int = 0
) -> list[str]:
    """Returns the model's answers in the order of the questions; `batch_size` of them are written at once."""
    if any(question.sampling.temperature > 0 for question in questions):
        mx.random.seed(seed)
    writer = BatchGenerator(
        model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
    )
    # The longest prompts first: neighbours are alike in length, and what doesn't fit shows at once.
    order = sorted(range(len(questions)), key=lambda number: -len(questions[number].prompt))
    try:
        numbers = writer.insert(
            [list(questions[number].prompt) for number in order],
            [questions[number].sampling.max_tokens for number in order],
            samplers=[_sampler(questions[number].sampling) for number in order],
        )
        written = {uid: _Answer(questions[number]) for uid, number in zip(numbers, order, strict=True)}
        while responses := writer.next_generated():
            for response in responses:
                if response.finish_reason == "stop":
                    continue
                answer = written[response.uid]
                answer.tokens.append(response.token)
                if response.finish_reason is None and answer.is_stopped(tokenizer):
                    writer.remove([response.uid])
    finally:
        writer.close()
    place = dict(zip(order, numbers, strict=True))
    return [written[place[number]].text(tokenizer) for number in range(len(questions))]


def _sampler(sampling: Sampling) -> Optional[Callable]:
    if sampling.temperature == 0:
        return None  # the writer's own: the likeliest token
    return make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
