"""A digest of a model's weights that takes a moment: the same of a copy, another of what has changed."""

import hashlib
import json
from pathlib import Path

from mlxft.models import audit

_BLOCK_BYTES = 4096


def fingerprint(folder: Path) -> dict[str, str]:
    """Returns a digest of each weight file in `folder`, by its name.

    It is of the file's size, its header and 4 KiB in the middle of every tensor: weights that were trained
    on, merged or rounded anew have another; a few values changed in a large tensor may not.

    Raises: InputError as `audit.weight_files`.
    """
    return {file.name: _digest(file) for file in audit.weight_files(folder)}


def _digest(file: Path) -> str:
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
