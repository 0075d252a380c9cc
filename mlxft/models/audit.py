"""Accounts for every tensor of a checkpoint: what is missing, has no place, or is dropped on the way."""

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Iterable

from mlxft.errors import InputError

if TYPE_CHECKING:
    import mlx.core as mx

log = logging.getLogger("mlxft")

MAX_NAMES = 12

# What a text model may leave out of a checkpoint: tables it computes itself, the encoders of other
# media, and the layers that predict further tokens ahead.
_LEFT_OUT = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.(masked_bias|position_ids)$|\.attn\.bias$"
    r"|(^|\.)\w*(vision|visual|audio|image|multi_modal|multimodal|mm_projector)\w*\.|(^|\.)mtp\w*\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that are loaded, after checking that each is whole.

    Raises: InputError naming a damaged file, a listed shard that is not there, or a tensor in two files.
    """
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = read_json(index)
        shards = content.get("weight_map")
        if not isinstance(shards, dict):
            raise InputError(f"{index} has no weight_map")
        absent = sorted(set(shards.values()) - {f.name for f in files})
        if absent:
            raise InputError(f"{folder} lacks {listed(absent)}, listed in {index.name}; fetch it again")
    seen: dict[str, str] = {}
    for file in files:
        for name in tensor_names(file):
            if name in seen:
                raise InputError(f"{folder}: the tensor {name} is in {seen[name]} and in {file.name}; "
                                 "remove the file that does not belong to the model")
            seen[name] = file.name
    return files


def tensor_names(file: Path) -> list[str]:
    """Returns the names of a safetensors file's tensors. Raises: InputError if it is damaged or cut short."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise InputError(f"{file} is no safetensors file, or was cut short: {size:,} bytes")
            header = json.loads(handle.read(length))
        names = [name for name in header if name != "__metadata__"]
        end = 8 + length + max((header[name]["data_offsets"][1] for name in names), default=0)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} is damaged: its header cannot be read ({error})") from error
    if size < end:
        raise InputError(f"{file} was cut short: {size:,} bytes of {end:,}; fetch it again")
    return names


def read_json(file: Path) -> dict:
    """Returns the object in a JSON file. Raises: InputError with file, line and what is wrong."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        where = f"{file}:{error.lineno}"
        raise InputError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from error
    except RecursionError:
        raise InputError(f"{file}: not what a configuration is: it is nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not valid JSON: it is not UTF-8 text ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected an object {{...}}, found {type(content).__name__}")
    return content


def check_fit(weights: dict[str, "mx.array"], parameters: dict[str, "mx.array"], folder: Path) -> None:
    """Compares what is about to be loaded with what the model has.

    Raises: InputError listing missing tensors, unused ones and wrong shapes, by name.
    """
    problems = []
    missing = sorted(parameters.keys() - weights.keys())
    unused = sorted(weights.keys() - parameters.keys())
    wrong = [f"{name} {tuple(weights[name].shape)} instead of {tuple(parameters[name].shape)}"
             for name in sorted(weights.keys() & parameters.keys())
             if weights[name].shape != parameters[name].shape]
    for found, what in ((missing, "missing from the checkpoint"),
                        (unused, "in the checkpoint, but not in the model"),
                        (wrong, "of the wrong shape")):
        if found:
            problems.append(f"{_count(found)} {what}: {listed(found)}")
    if problems:
        raise InputError(f"the weights in {folder} do not fit its config.json:\n  " + "\n  ".join(problems))


def check_dropped(before: dict[str, "mx.array"], after: dict[str, "mx.array"],
                  config: dict, folder: Path) -> None:
    """Finds what the model's own `sanitize` dropped between `before` and `after` without a known reason.

    A name that is gone is fine where its array went on under another name, or where new arrays of the
    same total size were made of such arrays (experts stacked, fused projections split).
    Raises: InputError listing the names, or saying that a head was dropped that isn't the embedding.
    """
    kept = {id(array) for array in after.values()}
    gone = sorted(name for name, array in before.items() if name not in after and id(array) not in kept)
    heads = [name for name in gone if re.search(r"(^|\.)lm_head\.weight$", name)]
    for head in heads:
        _check_tied(before, head, folder)
    left_out = [name for name in gone if _may_be_left_out(name, config)]
    gone = [name for name in gone if name not in heads and name not in left_out]
    if left_out:
        log.info("%s: %s left out, not part of the text model: %s",
                 folder, _count(left_out), listed(left_out, 3))
    originals = {id(array) for array in before.values()}
    made = [array for array in after.values() if id(array) not in originals]
    if not gone or sum(before[name].size for name in gone) == sum(array.size for array in made):
        return
    if made:
        log.warning("%s: %s combined into others or dropped by mlx-lm's code for %s: %s",
                    folder, _count(gone), config.get("model_type"), listed(gone))
        return
    raise InputError(f"the weights in {folder} do not fit its config.json: mlx-lm's code for "
                     f"{config.get('model_type')} has no use for {_count(gone)}: {listed(gone)}")


def _may_be_left_out(name: str, config: dict) -> bool:
    if _LEFT_OUT.search(name):
        return True
    layer = _LAYER.search(name)
    extra = config.get("num_nextn_predict_layers") or 0
    return bool(layer and extra and int(layer[1]) >= config.get("num_hidden_layers", 0))


def _check_tied(before: dict[str, "mx.array"], head: str, folder: Path) -> None:
    import mlx.core as mx

    embeddings = [name for name in before if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if any(before[name].shape == before[head].shape and mx.array_equal(before[name], before[head]).item()
           for name in embeddings):
        return
    raise InputError(f"{folder}: {head} would be dropped because config.json ties the head to the embedding, "
                     'but the two differ. Set "tie_word_embeddings": false in config.json.')


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"


def listed(names: Iterable[str], limit: int = MAX_NAMES) -> str:
    """Returns the first names in a sentence, and how many more there are."""
    names = list(names)
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
