"""The questions of `trainer.samples`, answered before and after training."""

from typing import Any, Sequence

import mlx.nn as nn

MAX_TOKENS = 60


def answer_all(model: nn.Module, tokenizer: Any, questions: Sequence[str]) -> list[dict[str, str]]:
    """Returns [{"question", "answer"}] with the model's likeliest answers, at most 60 tokens each."""
    if not questions:
        return []
    from mlxft.evaluation.generate import answer

    return [
        {"question": question, "answer": answer(model, tokenizer, question, MAX_TOKENS)}
        for question in questions
    ]


def show_samples(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> None:
    """Prints each question with its answers before and after."""
    earlier = {sample["question"]: sample["answer"] for sample in before}
    for sample in after:
        print(f"\n{sample['question']}")
        if sample["question"] in earlier:
            print(f"  before: {earlier[sample['question']]}")
        print(f"  after:  {sample['answer']}")
