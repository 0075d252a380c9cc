"""Digests of what a model is made of: the same of a copy, others where something has changed."""

import hashlib
import json
from pathlib import Path

from mlxft.errors import InputError
from mlxft.models import audit, mlxlm_adapter, peft_adapter

CONFIG = "config.json"
ADAPTER_CONFIG = mlxlm_adapter.CONFIG  # which is PEFT's name for it too

_BLOCK_BYTES = 4096


def weight_digests(folder: Path) -> dict[str, str]:
    """Returns a digest of the config.json and of each weight file of the model in `folder`, by its name.

    It takes a moment: it is of a weight file's size, its header and 4 KiB in the middle of every tensor.
    Weights that were trained on, merged or rounded anew have another; a few values changed in a large
    tensor may not. How the configuration is written, its spaces and the order of its keys, has no say.

    Raises: InputError as `audit.weight_files` and `audit.read_json`.
    """
    digests = {file.name: _sampled(file) for file in audit.weight_files(folder)}
    return {CONFIG: _of_json(folder / CONFIG)} | digests


def adapter_digests(folder: Path) -> dict[str, str]:
    """Returns a digest of the configuration and of the whole weights of the adapter in `folder`, by name.

    A file that is not there has none. Raises: InputError for one that cannot be read.
    """
    digests = {}
    for name in (mlxlm_adapter.WEIGHTS, peft_adapter.WEIGHTS):
        if (folder / name).is_file():
            digests[name] = _whole(folder / name)
    if (folder / ADAPTER_CONFIG).is_file():
        digests[ADAPTER_CONFIG] = _of_json(folder / ADAPTER_CONFIG)
    return digests


def _sampled(file: Path) -> str:
    digest = hashlib.sha256(file.stat().st_size.to_bytes(8, "little"))
    with open(file, "rb") as handle:
        length = handle.read(8)
        header = handle.read(int.from_bytes(length, "little"))
        digest.update(length + header)
        first = handle.tell()
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        for begin, end in sorted(tensor["data_offsets"] for tensor in tensors):
            handle.seek(first + max(begin, (begin + end - _BLOCK_BYTES) // 2))
            digest.update(handle.read(min(end - begin, _BLOCK_BYTES)))
    return digest.hexdigest()


def _whole(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error


def _of_json(file: Path) -> str:
    return hashlib.sha256(json.dumps(audit.read_json(file), sort_keys=True).encode()).hexdigest()
