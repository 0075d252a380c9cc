"""New tokens: those of `model.new_tokens` and of adapters, in the tokenizer and as rows of a model.

A tokenizer with new tokens is written and read again, so that what is used is what an adapter's folder gets.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxft.config.schema import Config
from mlxft.errors import InputError
from mlxft.models import audit, mlxlm_adapter
from mlxft.models.decoder import unchecked_view
from mlxft.models.load import load_tokenizer, vocabulary_size
from mlxft.models.new_rows import EmbeddingWithNewRows, HeadWithNewRows, mean_rows
from mlxft.models.targets import EMBEDDINGS, LINEARS

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

log = logging.getLogger("mlxft")

_CONFIGS = ("config.json", "generation_config.json")  # which say what ends answers


@dataclass(frozen=True)
class NewToken:
    """A token that a model is given. special: markup, which readers may leave out of a text.

    pieces: the tokens that its text was before.
    """

    number: int
    text: str
    special: bool
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a model, in the order of their numbers; on it as `new_tokens`.

    An object of its own: a module takes a tuple for parts of itself.
    """

    tokens: tuple[NewToken, ...]


@dataclass(frozen=True)
class Vocabulary:
    """What a model reads and writes. size: ids that it has an embedding for. new: its new tokens, in order.

    tokenizer: with the new tokens; None where the model has none and none is needed.
    """

    tokenizer: Optional["TokenizerWrapper"]
    size: int
    new: tuple[NewToken, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A new token as it is asked for: where, and with which number if an adapter has it already."""

    text: str
    special: bool
    where: str
    number: Optional[int] = None


def load_vocabulary(config: Config, folder: Path, required: bool = True) -> Vocabulary:
    """Returns the vocabulary of the model in `folder` with the new tokens of its adapters and of the keys.

    Tokens of `model.new_tokens` and `model.new_special_tokens` that it has already are used as they are; the
    log says which. required: whether there has to be a tokenizer; new tokens always need one.

    Raises: InputError as `load_tokenizer`, for tokens that a tokenizer cannot take, and for adapters whose
    new tokens would get other numbers here.
    """
    asked = [*_of_adapters(config.adapter.starts), *_of_keys(config)]
    tokenizer, size = load_tokenizer(folder, required or bool(asked)), vocabulary_size(folder)
    if not asked:
        return Vocabulary(tokenizer, size)
    known = tokenizer.get_vocab()
    wanted = _unknown(asked, known)
    if not wanted:
        return Vocabulary(tokenizer, size)
    pieces = [tuple(tokenizer.encode(each.text, add_special_tokens=False)) for each in wanted]
    numbers, tokenizer = _extended(tokenizer, wanted, folder)
    first, last = numbers[0], numbers[-1]
    for place, (each, number) in enumerate(zip(wanted, numbers, strict=True)):
        _check_number(each, number, folder)
        if number != first + place or not pieces[place]:
            what = f"the tokenizer in {folder} does not take {each.text!r} as a token"
            raise InputError(f"{each.where}: {what}. Leave it out")
        _check_text(each, tokenizer.decode([number]), folder)
    new = tuple(
        NewToken(number, each.text, each.special, made_of)
        for each, number, made_of in zip(wanted, numbers, pieces, strict=True)
    )
    if first > size:
        raise InputError(
            f"the tokenizer in {folder} has {first:,} tokens and the model an embedding of {size:,}, so new "
            "tokens would have no place. Take a tokenizer that fits the model"
        )
    room = "in rows that the vocabulary has to spare" if last < size else "and the embedding grows"
    ids = f"ids {first} to {last}" if last > first else f"id {first}"
    log.info("new tokens: %s; %s, %s", ", ".join(token.text for token in new), ids, room)
    return Vocabulary(tokenizer, max(size, last + 1), new)


def _of_keys(config: Config) -> list[_Asked]:
    plain, special = config.model.new_tokens or (), config.model.new_special_tokens or ()
    return [_Asked(text, False, "model.new_tokens") for text in plain] + [
        _Asked(text, True, "model.new_special_tokens") for text in special
    ]


def _of_adapters(folders: Iterable[str]) -> list[_Asked]:
    """Returns the new tokens of adapters in the order of their numbers, each once."""
    found: dict[str, _Asked] = {}
    for folder in folders:
        file = Path(folder).expanduser() / mlxlm_adapter.CONFIG
        if not file.is_file():
            continue  # reading the adapter will say so
        for each in mlxlm_adapter.new_tokens_in(audit.read_json(file), file):
            number, special = each["id"], each["special"]
            other = found.setdefault(each["text"], _Asked(each["text"], special, str(folder), number))
            if other.number != number:
                raise InputError(
                    f"the adapters in {other.where} and {folder} have the new token {each['text']!r} as "
                    f"{other.number} and as {number}. They cannot be added up"
                )
    return sorted(found.values(), key=lambda each: each.number)


def _unknown(asked: Iterable[_Asked], known: dict[str, int]) -> list[_Asked]:
    """Returns those that the tokenizer does not know, each once; says which ones of the keys it knows."""
    wanted: dict[str, _Asked] = {}
    for each in asked:
        if each.text in wanted:
            continue  # an adapter's, which a key names again
        if each.text not in known:
            wanted[each.text] = each
        elif each.number is None:
            log.info(
                "%s: %r is in the vocabulary already, as token %d, and is used as it is",
                each.where, each.text, known[each.text],
            )  # fmt: skip
        else:
            raise InputError(
                f"the adapter in {each.where} brings the new token {each.text!r}, and the model's tokenizer "
                "has it already. It was trained on another model: give that one as model.path"
            )
    return list(wanted.values())


def _extended(tokenizer: Any, wanted: list[_Asked], folder: Path) -> tuple[list[int], Any]:
    """Returns the numbers of new tokens, and the tokenizer with them, read from files."""
    from transformers import AddedToken

    for each in wanted:
        # Exactly this text, wherever it stands: not what a tokenizer would make of it first.
        token = AddedToken(each.text, special=each.special, normalized=False)
        tokenizer.add_tokens([token], special_tokens=each.special)
    with tempfile.TemporaryDirectory() as written:
        try:
            tokenizer.save_pretrained(written)
            for name in _CONFIGS:
                if (folder / name).is_file():
                    shutil.copy(folder / name, written)
            extended = load_tokenizer(Path(written))
        except (OSError, NotImplementedError) as error:
            raise InputError(f"the tokenizer in {folder} cannot be given new tokens: {error}") from error
    return [extended.get_vocab().get(each.text, -1) for each in wanted], extended


def _check_number(asked: _Asked, number: int, folder: Path) -> None:
    """Raises InputError for an adapter's token that would have another number here."""
    if asked.number is not None and number != asked.number:
        raise InputError(
            f"the adapter in {asked.where} has the new token {asked.text!r} as {asked.number}, and with the "
            f"tokenizer in {folder} it would be {number}. It was trained on another model: give that one as "
            "model.path"
        )


def _check_text(asked: _Asked, written: str, folder: Path) -> None:
    """Raises InputError for a token that the tokenizer does not write as it reads it."""
    if written.strip() != asked.text.strip():
        raise InputError(
            f"{asked.where}: the tokenizer in {folder} would write the token {asked.text!r} as {written!r}. "
            "Many take letters beyond ASCII for bytes of a text: name a token without them"
        )


def add_new_tokens(model: nn.Module, new: Sequence[NewToken]) -> None:
    """Gives the embedding and the head of `model` rows for new tokens, in place; they may be lazy.

    The rows begin as the mean of the token's pieces' (`new_rows.mean_rows`). The model has them as
    `new_tokens` from then on.

    Raises: InputError for a model of a family that looks tokens up in other tables too.
    """
    if not new:
        return
    view = unchecked_view(model)
    view.require_new_tokens()
    paths = {id(module): path for path, module in model.named_modules()}
    tables = [(view.embedding, EMBEDDINGS, EmbeddingWithNewRows)]
    if not view.is_tied:
        tables.append((view.head_module, LINEARS, HeadWithNewRows))
    replaced = []
    for table, kinds, made in tables:
        path = paths[id(table)]
        if type(table) not in kinds:
            raise InputError(
                f"model.new_tokens: {path} of this model is a {type(table).__name__}, which no rows can be "
                "added to"
            )
        start = mean_rows(table, [token.pieces for token in new])
        replaced.append((path, made(table, new[0].number, start)))
    model.update_modules(tree_unflatten(replaced))
    model.new_tokens = NewTokens(tuple(new))


def new_tokens_of(model: nn.Module) -> tuple[NewToken, ...]:
    """Returns the new tokens that a model was given, in the order of their numbers."""
    given = getattr(model, "new_tokens", None)
    return () if given is None else given.tokens


def described(new: Sequence[NewToken]) -> list[dict[str, Any]]:
    """Returns new tokens as an adapter's configuration has them."""
    return [{"id": token.number, "text": token.text, "special": token.special} for token in new]
