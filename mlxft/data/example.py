"""One training row as tokens with masks; plain numpy, no model needed."""

from dataclasses import dataclass, replace
from typing import Optional

import numpy as np


@dataclass(frozen=True)
class Example:
    """A row ready for training.

    tokens: (T,) int32. mask: (T,) bool, true where the token itself is a target (it is predicted
    from the position before it, so `mask[0]` never counts). where: "file:line" it came from.
    """

    tokens: np.ndarray
    mask: np.ndarray
    where: str

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.num_tokens

    @property
    def num_supervised(self) -> int:
        """Targets; nothing predicts the first token, so it is none."""
        return int(self.mask[1:].sum())


    def stretched(self, length: int) -> "Example":
        """Returns a row of `length` tokens with about the same share supervised, to measure with."""
        return Example(np.resize(self.tokens, length), np.resize(self.mask, length), self.where)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, ready for training.

    prompt: (P,) int32, at least one token, the same for both. chosen, rejected: (C,), (R,) int32, what
    follows it in each. chosen_mask, rejected_mask: (C,), (R,) bool, true on the answer and its end token;
    false on what is not the answer's, such as a newline that the template writes after it. where:
    "file:line". ref_logps: the reference's summed log-probabilities of both, once they are known.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    chosen_mask: np.ndarray
    rejected_mask: np.ndarray
    where: str
    ref_logps: Optional[tuple[float, float]] = None

    @property
    def num_tokens(self) -> int:
        """Tokens with the prompt counted once."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def num_supervised(self) -> int:
        """Targets of both answers."""
        return int(self.chosen_mask.sum() + self.rejected_mask.sum())

    def stretched(self, length: int) -> "Pair":
        """Returns a pair whose prompt and longer answer have `length` tokens, to measure with."""
        prompt = max(length * len(self.prompt) // self.length, 1)
        sizes = [max(length * len(each) // self.length, 1) for each in (self.chosen, self.rejected)]
        sizes = [size + length - prompt - max(sizes) if size == max(sizes) else size for size in sizes]
        chosen, rejected = sizes
        return Pair(
            np.resize(self.prompt, prompt),
            np.resize(self.chosen, chosen),
            np.resize(self.rejected, rejected),
            np.resize(self.chosen_mask, chosen),
            np.resize(self.rejected_mask, rejected),
            self.where,
        )

    @property
    def is_identical(self) -> bool:
        """Whether the answers are the same, so that there is nothing to prefer."""
        return np.array_equal(self.chosen, self.rejected)


@dataclass(frozen=True)
class Unpaired:
    """An answer that is wanted (label true) or not, ready for training.

    prompt: (P,) int32, at least one token. completion: (C,) int32. completion_mask: (C,) bool, true on
    the answer and its end token. where: "file:line". other, other_mask: another row's answer, which does
    not belong to this prompt, for KTO's KL. ref_logps: the reference's summed log-probabilities of the
    completion and of the other answer, once they are known.
    """

    prompt: np.ndarray
    completion: np.ndarray
    completion_mask: np.ndarray
    label: bool
    where: str
    other: Optional[np.ndarray] = None
    other_mask: Optional[np.ndarray] = None
    ref_logps: Optional[tuple[float, float]] = None

    def stretched(self, length: int) -> "Unpaired":
        """Returns a row of `length` tokens, prompt and answer in proportion, to measure with."""
        prompt = max(length * len(self.prompt) // self.length, 1)
        answer = max(length - prompt, 1)
        return replace(
            self,
            prompt=np.resize(self.prompt, prompt),
            completion=np.resize(self.completion, answer),
            completion_mask=np.resize(self.completion_mask, answer),
            other=None if self.other is None else np.resize(self.other, answer),
            other_mask=None if self.other_mask is None else np.resize(self.other_mask, answer),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def length(self) -> int:
        return self.num_tokens

    @property
    def num_supervised(self) -> int:
        return int(self.completion_mask.sum())
