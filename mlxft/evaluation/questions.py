"""`mlxft eval` on questions: choices by likelihood, written answers by comparison, programs by tests."""

import math
import re
import string
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from mlxft.data.questions import ChoiceQuestion, CodeQuestion, WrittenQuestion
from mlxft.evaluation import answers as writing
from mlxft.evaluation import sandbox
from mlxft.evaluation.continuations import Continuation, Scorer
from mlxft.evaluation.generate import Sampling, prompt_tokens

_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CODE_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\nassert ")


@dataclass(frozen=True)
class QuestionEvaluation:
    """Which questions a model answers right.

    figures: shares of the questions by name, the headline first. right: (N,) bool, by the headline. extra:
    further numbers by name. seconds: of all forwards and programs.
    """

    figures: dict[str, float]
    right: np.ndarray
    extra: dict[str, int]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name, each share with its standard error."""
        number = len(self.right)
        made: dict[str, Any] = {}
        for name, share in self.figures.items():
            made |= {name: share, f"{name}_stderr": _share_error(share, number)}
        return made | self.extra | {"questions": number, "seconds": self.seconds}

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        number = len(self.right)
        shares = [
            (name.replace("_", " "), f"{share:.3f} ± {_share_error(share, number):.3f}")
            for name, share in self.figures.items()
        ]
        extra = [(name, f"{value:,}") for name, value in self.extra.items()]
        return [*shares, *extra, ("questions", f"{number:,}"), ("seconds", f"{self.seconds:.1f}")]


def _share_error(share: float, number: int) -> float:
    return math.sqrt(share * (1 - share) / number)


def evaluate_choices(
    scorer: Scorer, tokenizer: Any, questions: Sequence[ChoiceQuestion], chat: bool
) -> QuestionEvaluation:
    """Returns how often the right choice is the likeliest: acc by log p of the whole, acc_norm per character.

    chat: a question is a user's turn and a choice the answer to it; else a choice follows the question after
    a space. Every question is forwarded once, however many its choices.
    """
    began, forwarded = time.perf_counter(), scorer.forwarded
    alone = scorer.alone
    todo = [
        _continuation(tokenizer, question, choice, chat)
        for question in questions
        for choice in question.choices
    ]
    logps = [score.logp for score in scorer(todo)]
    right, right_by_length = [], []
    start = 0
    for question in questions:
        own = np.array(logps[start : start + len(question.choices)])
        start += len(question.choices)
        lengths = np.array([len(choice) for choice in question.choices])
        right.append(int(own.argmax()) == question.right)
        right_by_length.append(int((own / lengths).argmax()) == question.right)
    return QuestionEvaluation(
        {"acc": float(np.mean(right)), "acc_norm": float(np.mean(right_by_length))},
        np.array(right),
        {"forwarded": scorer.forwarded - forwarded, "alone": scorer.alone - alone},
        time.perf_counter() - began,
    )


def _continuation(tokenizer: Any, question: ChoiceQuestion, choice: str, chat: bool) -> Continuation:
    if chat:
        context = prompt_tokens(tokenizer, question.question, question.system)
        tokens = tokenizer.encode(choice, add_special_tokens=False)
    else:
        text = _plain(question)
        space = "" if text[-1].isspace() else " "
        context = tokenizer.encode(text)
        tokens = tokenizer.encode(text + space + choice)[len(context) :]
    return Continuation(np.array(context, np.int32), np.array(tokens, np.int32))


def _plain(question: ChoiceQuestion | WrittenQuestion) -> str:
    return question.question if question.system is None else f"{question.system}\n\n{question.question}"


@dataclass(frozen=True)
class Writing:
    """How answers are written. chat: in the model's chat template. batch_size: at once."""

    tokenizer: Any
    max_tokens: int
    batch_size: int
    chat: bool

    def __call__(
        self, model: Any, texts: Sequence[tuple[str, Optional[str]]], stops: tuple[str, ...]
    ) -> list[str]:
        """Returns the likeliest answers to (question, system); stop strings are for what is plain text."""
        questions = [
            writing.Question(self._prompt(*text), Sampling(self.max_tokens), () if self.chat else stops)
            for text in texts
        ]
        return writing.answers(model, self.tokenizer, questions, self.batch_size)

    def _prompt(self, question: str, system: Optional[str]) -> list[int]:
        if self.chat:
            return prompt_tokens(self.tokenizer, question, system)
        return list(self.tokenizer.encode(question if system is None else f"{system}\n\n{question}"))


def evaluate_written(
    write: Writing, model: Any, questions: Sequence[WrittenQuestion], extract: Optional[str]
) -> QuestionEvaluation:
    """Returns how often what the model writes is a right answer (exact_match), or holds one (contains).

    Compared is what `normalised` leaves. extract: a pattern; what it last finds in an answer, its first group
    if it has one, is taken for the answer, and nothing where it finds nothing.
    """
    began = time.perf_counter()
    texts = write(model, [(each.question, each.system) for each in questions], ("\n\n", "\nQuestion:"))
    exact, contains = [], []
    for question, text in zip(questions, texts, strict=True):
        own = normalised(_extracted(text, extract))
        accepted = [normalised(each) for each in question.accepted]
        exact.append(own in accepted)
        contains.append(any(f" {each} " in f" {own} " for each in accepted if each))
    return QuestionEvaluation(
        {"exact_match": float(np.mean(exact)), "contains": float(np.mean(contains))},
        np.array(exact),
        {},
        time.perf_counter() - began,
    )


def normalised(text: str) -> str:
    """Returns the text as answers are compared: small letters, no articles, no punctuation, single spaces.

    A number is taken as a number: 1,000.0 is 1000. Source: Rajpurkar et al. 2016, "SQuAD", section 6.1.
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    words = [_word(word) for word in text.split()]
    return " ".join(word for word in " ".join(words).split() if word not in _ARTICLES)


def _word(word: str) -> str:
    bare = word.strip(string.punctuation.replace("-", "").replace("+", "")) if word.strip("-+") else ""
    if re.fullmatch(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?", bare):
        return f"{float(bare.replace(',', '')):.10g}"
    return word.translate(_PUNCTUATION)


def _extracted(text: str, pattern: Optional[str]) -> str:
    if pattern is None:
        return text
    found = list(re.finditer(pattern, text))
    if not found:
        return ""
    return (found[-1].group(1) or "") if found[-1].re.groups else found[-1].group()


def evaluate_code(
    write: Writing, model: Any, questions: Sequence[CodeQuestion], timeout: float
) -> QuestionEvaluation:
    """Returns how many programs pass their tests (pass@1), each run in the sandbox for `timeout` seconds."""
    began = time.perf_counter()
    asked = [(_asked(each) if write.chat else each.prompt, None) for each in questions]
    texts = write(model, asked, _CODE_STOPS)
    right = [
        sandbox.run(program(question, text), timeout).passed
        for question, text in zip(questions, texts, strict=True)
    ]
    return QuestionEvaluation(
        {"pass_at_1": float(np.mean(right))}, np.array(right), {}, time.perf_counter() - began
    )


def _asked(question: CodeQuestion) -> str:
    asked = "Complete this function. Answer with the whole of it in one block of code."
    return f"{asked}\n\n```python\n{question.prompt}```"


def program(question: CodeQuestion, answer: str) -> str:
    """Returns the program to run: what the model was given and wrote, then the tests.

    An answer with a block of code that has the function in it is taken for the whole of it.
    """
    block = _BLOCK.search(answer)
    code = block[1] if block else answer
    whole = re.search(rf"^\s*def {re.escape(question.entry_point)}\b", code, re.MULTILINE)
    before = question.prompt.partition(f"def {question.entry_point}")[0]
    written = before + code if whole else question.prompt + code
    return f"{written}\n\n{question.test}\n\ncheck({question.entry_point})\n"


@dataclass(frozen=True)
class Change:
    """How a model's answers differ from a reference's: both right, right only now, right only before."""

    both: int
    gained: int
    lost: int

    def as_dict(self) -> dict[str, int]:
        """Returns the numbers by name."""
        return {"both_right": self.both, "gained": self.gained, "lost": self.lost}

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        return [("right in both", f"{self.both:,}"), ("gained, lost", f"{self.gained:,}, {self.lost:,}")]


def change(made: QuestionEvaluation, reference: QuestionEvaluation) -> Change:
    """Returns how the answers to the same questions differ."""
    now, before = made.right, reference.right
    return Change(int((now & before).sum()), int((now & ~before).sum()), int((before & ~now).sum()))
