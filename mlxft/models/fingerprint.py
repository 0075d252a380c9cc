"""Digests of what a model is made of: the same of a copy, others where something has changed."""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

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


def weights_fingerprint(folder: Path) -> str:
    """Returns one digest of all weights of the model in `folder`, however they are spread over files.

    It is of every tensor's name, type, shape and 4 KiB in its middle. The configuration has no say.

    Raises: InputError as `audit.weight_files`.
    """
    parts = []
    for file in audit.weight_files(folder):
        with open(file, "rb") as handle:
            header = _header(handle)
            first = handle.tell()
            for name, tensor in header.items():
                what = f"{name} {tensor['dtype']} {tensor['shape']}".encode()
                parts.append(what + hashlib.sha256(_middle(handle, first, tensor)).digest())
    digest = hashlib.sha256()
    for part in sorted(parts):
        digest.update(part)
    return digest.hexdigest()


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
        header = _header(handle)
        first = handle.tell()
        handle.seek(0)
        digest.update(handle.read(first))
        for tensor in sorted(header.values(), key=lambda tensor: tensor["data_offsets"]):
            digest.update(_middle(handle, first, tensor))
    return digest.hexdigest()


def _header(handle: BinaryIO) -> dict[str, dict]:
    """Returns what a safetensors file says of its tensors, by name, and leaves the file at the first one."""
    header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def _middle(handle: BinaryIO, first: int, tensor: dict) -> bytes:
    begin, end = tensor["data_offsets"]
    handle.seek(first + max(begin, (begin + end - _BLOCK_BYTES) // 2))
    return handle.read(min(end - begin, _BLOCK_BYTES))


def _whole(file: Path) -> str:
    try:
        with open(file, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error


def _of_json(file: Path) -> str:
    return hashlib.sha256(json.dumps(audit.read_json(file), sort_keys=True).encode()).hexdigest()
