"""Questions with answers that can be checked, for `mlxft eval`: choices, written answers, programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Optional

from mlxft.config.schema import DataConfig
from mlxft.data.checks import filled_text, shown
from mlxft.data.formats import Form, check_columns, check_keys, check_same
from mlxft.data.json_row import kind_of
from mlxft.data.sources import Row, check_columns_exist, sets_of
from mlxft.errors import InputError


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with answers to choose from. right: the number of the right one, from 0 on."""

    question: str
    choices: tuple[str, ...]
    right: int
    system: Optional[str]
    where: str


@dataclass(frozen=True)
class WrittenQuestion:
    """A question whose answer is written. accepted: the right answer in all its forms."""

    question: str
    accepted: tuple[str, ...]
    system: Optional[str]
    where: str


@dataclass(frozen=True)
class CodeQuestion:
    """The beginning of a program, `prompt`. test: code that defines `check(candidate)`, as in HumanEval."""

    prompt: str
    test: str
    entry_point: str
    where: str


Question = ChoiceQuestion | WrittenQuestion | CodeQuestion


def load_questions(source: Any, cfg: DataConfig, form: Form, limit: Optional[int] = None) -> list[Question]:
    """Returns the questions that `source`, as `data.valid`, names, in order; the first `limit` of them.

    form: that of the first row, which all have. Raises: InputError with the row and what is wrong with it.
    """
    check_columns(cfg.columns)
    read = {"choices": _choice, "answer": _written, "code": _code}[form.format]
    made, first = [], None
    for rows in sets_of(source, cfg, validates=True):
        check_columns_exist(rows, rows.parts())
        for row in islice(rows.rows(), None if limit is None else limit - len(made)):
            first = first or row.where
            check_same(row, form, cfg.format, first)
            check_keys(row, form)
            made.append(read(row))
    return made


def _choice(row: Row) -> ChoiceQuestion:
    question = filled_text(row.values["question"], "question", row.where)
    choices = row.values["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise InputError(f"{row.where}: choices is {shown(choices)}; it must be a list of two texts or more.")
    texts = tuple(filled_text(choice, f"choices[{place}]", row.where) for place, choice in enumerate(choices))
    if len(set(texts)) < len(texts):
        raise InputError(f"{row.where}: two of the choices are the same text. Leave one out.")
    return ChoiceQuestion(question, texts, _right(row, texts), _system(row), row.where)


def _right(row: Row, choices: Sequence[str]) -> int:
    """Returns which choice `answer` means: its text, its number from 0 on, or its letter from A on."""
    answer = row.values["answer"]
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, str) and len(answer.strip()) == 1:
        place = ord(answer.strip().upper()) - ord("A")
    else:
        place = answer if type(answer) is int else -1
    if not 0 <= place < len(choices):
        raise InputError(
            f"{row.where}: answer is {shown(answer)}; it must be one of the {len(choices)} choices: its "
            f"text, its number (0 to {len(choices) - 1}), or its letter (A to {chr(64 + len(choices))})."
        )
    return place


def _written(row: Row) -> WrittenQuestion:
    question, answer = filled_text(row.values["question"], "question", row.where), row.values["answer"]
    answers = answer if isinstance(answer, list) else [answer]
    numbers = [str(each) if type(each) in (int, float) else each for each in answers]
    if not numbers:
        raise InputError(f"{row.where}: answer is an empty list; give the answers that are right.")
    accepted = tuple(filled_text(each, "answer", row.where) for each in numbers)
    return WrittenQuestion(question, accepted, _system(row), row.where)


def _code(row: Row) -> CodeQuestion:
    prompt, test, name = (
        filled_text(row.values[key], key, row.where) for key in ("prompt", "test", "entry_point")
    )
    if not name.isidentifier():
        raise InputError(f"{row.where}: entry_point is {shown(name)}; it must be the name of a function.")
    return CodeQuestion(prompt, test, name, row.where)


def _system(row: Row) -> Optional[str]:
    system = row.values.get("system")
    if system is not None and not isinstance(system, str):
        raise InputError(f"{row.where}: system is {kind_of(system)}; it must be text.")
    return system
