"""Of which files the reference of dpo and kto is made, and whether it can read the rows' tokens."""

import filecmp
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from mlxft.config.choices import LOSS_KEYS
from mlxft.config.schema import AdapterConfig, Config
from mlxft.data.example import Pair, Unpaired
from mlxft.errors import InputError
from mlxft.models.fingerprint import adapter_digests, weight_digests
from mlxft.models.load import load_tokenizer, vocabulary_size
from mlxft.models.new_tokens import NewToken, Vocabulary
from mlxft.models.resolve import resolve

# Of the files of a model or an adapter, by name.
Digests = Mapping[str, str]

NEW_TOKENS = "model.new_tokens"  # also those of adapters
_TOKENIZER = "tokenizer.json"


def is_the_start(config: Config) -> bool:
    """Tells whether the reference is the policy as training begins: asked for, or nothing to switch off."""
    return is_start(config.trainer.objective, config.loss.reference, config.adapter.kind)


def is_start(objective: str, reference: str, adapter: str) -> bool:
    """As `is_the_start`, of the keys trainer.objective, loss.reference and adapter.kind."""
    has_reference = "reference" in LOSS_KEYS[objective]
    return has_reference and (reference == "start" or (reference == "base" and adapter == "full"))


def model_folder(config: Config, policy: Path) -> Path:
    """Returns the folder of the model that is the reference: the policy's, or the one that is named.

    Raises: InputError if there is none of that name.
    """
    named = config.loss.reference
    return policy if named in ("base", "start") else resolve(named, key="loss.reference")


def digests_of_files(config: Config, policy: Path, reference: Path) -> dict[str, Digests]:
    """Returns digests of the files that model and reference are made of, by the key that names them.

    policy, reference: the folders of the two models. `loss.reference` is among the keys where the
    reference is a model of its own, `adapter.init_from` where it is the policy that began with that.

    Raises: InputError for files that are damaged or cannot be read.
    """
    digests: dict[str, Digests] = {"model.path": weight_digests(policy)}
    if reference != policy:
        digests["loss.reference"] = weight_digests(reference)
    if is_the_start(config) and config.adapter.init_from:
        digests["adapter.init_from"] = _of_starts(config.adapter)
    return digests


def digests_of_tokens(new: Sequence[NewToken]) -> dict[str, Digests]:
    """Returns what the rows of new tokens begin as, by the key that names them; nothing without new ones."""
    return {NEW_TOKENS: {token.text: f"{token.number} {token.pieces}" for token in new}} if new else {}


def _of_starts(adapter: AdapterConfig) -> Digests:
    """Returns the digests of the adapters that are added up, each file's name with its adapter's number."""
    folders = [Path(folder).expanduser() for folder in adapter.starts]
    if len(folders) == 1 and adapter.init_weights is None:
        return adapter_digests(folders[0])
    found = {
        f"{number}/{name}": digest
        for number, folder in enumerate(folders)
        for name, digest in adapter_digests(folder).items()
    }
    return found | {"adapter.init_weights": str(adapter.init_weights)}


def check_tokens(
    rows: Sequence[Pair | Unpaired], vocabulary: Vocabulary, policy: Path, reference: Path
) -> None:
    """Refuses a reference, a model of its own, to which the tokens of these rows mean something else.

    vocabulary: of the policy. policy, reference: the folders of the two models. Where
    one has no tokenizer, only the reference's vocabulary is looked at.

    Raises: InputError for a row with a token that the reference has no embedding for, or for one that the
    two tokenizers read differently.
    """
    size = vocabulary_size(reference)
    for row in rows:
        highest = max(int(part.max(initial=0)) for part in _parts(row))
        if highest >= size:
            raise InputError(
                f"{row.where}: token {highest} is beyond the vocabulary of loss.reference, which ends at "
                f"{size - 1}. A reference needs the tokenizer of the model that is trained"
            )
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        return
    if not vocabulary.new and _same_file(policy / _TOKENIZER, reference / _TOKENIZER):
        return
    other = load_tokenizer(reference, required=False)
    if other is not None:
        _check_meaning(rows, tokenizer, other)


def _check_meaning(rows: Sequence[Pair | Unpaired], ours: Any, theirs: Any) -> None:
    """Only the ids that occur count: models of one family name ids differently that no row has."""
    checked: set[int] = set()
    for row in rows:
        for token in sorted(set(np.concatenate(_parts(row)).tolist()) - checked):
            here, there = _token(ours, token), _token(theirs, token)
            if here != there:
                raise InputError(
                    f"{row.where}: token {token} is {here!r} to the model that is trained and {there!r} to "
                    "loss.reference, which has another tokenizer. Its log-probabilities would be of another "
                    "text: name a reference with the tokenizer of the model that is trained"
                )
            checked.add(token)


def _parts(row: Pair | Unpaired) -> tuple[np.ndarray, ...]:
    answers = (row.completion,) if isinstance(row, Unpaired) else (row.chosen, row.rejected)
    return (row.prompt, *answers)


def _token(tokenizer: Any, number: int) -> Optional[str]:
    try:
        return tokenizer.convert_ids_to_tokens(number)
    except (IndexError, KeyError):  # as some say that they have no such token
        return None


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
