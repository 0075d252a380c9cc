"""The questions of `trainer.samples`, answered before and after training."""

import json
import logging
from pathlib import Path
from typing import Any, Sequence

import mlx.nn as nn

log = logging.getLogger("mlxft")

MAX_TOKENS = 60


def answer_all(model: nn.Module, tokenizer: Any, questions: Sequence[str]) -> list[dict[str, str]]:
    """Returns [{"question", "answer"}] with the model's likeliest answers, at most 60 tokens each."""
    if not questions:
        return []
    from mlxft.evaluation.generate import answer

    log.info("asking the model what trainer.samples has: %d", len(questions))
    return [
        {"question": question, "answer": answer(model, tokenizer, question, MAX_TOKENS)}
        for question in questions
    ]


def read_samples(path: Path) -> list[dict[str, str]]:
    """Returns the answers that a run kept, none if there is no such file.

    They are shown and nothing depends on them: a file that cannot be read is passed over with a warning.
    """
    if not path.exists():
        return []
    try:
        samples = json.loads(path.read_bytes())
        return [{name: str(sample[name]) for name in ("question", "answer")} for sample in samples]
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        log.warning("%s cannot be read (%s): the answers from before training are lost", path, reason)
        return []


def show_samples(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> None:
    """Prints each question with its answers before and after."""
    earlier = {sample["question"]: sample["answer"] for sample in before}
    for sample in after:
        print(f"\n{sample['question']}")
        if sample["question"] in earlier:
            print(f"  before: {earlier[sample['question']]}")
        print(f"  after:  {sample['answer']}")
