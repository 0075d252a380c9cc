"""How much memory there is: of the machine, of the container it is in, of the GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# The files of a control group: version 2, then version 1.
_LIMIT_AND_USE = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_SHARE = 0.9  # of what is free: Python, the tokenizer and other programs breathe too


def available_bytes() -> int:
    """Returns how much memory this process may still take: the system's or its container's, if less.

    All that the machine has where the system does not tell what is free (macOS).
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        entries = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(entries["MemAvailable"].split()[0]) * 1024
    return max(min([free, *_left_in_groups(_group_folders())]), 0)


def memory_limit_bytes(setting: float | str = "auto") -> int:
    """Returns how many bytes of arrays MLX may have at once, those that it has now included.

    setting: `trainer.memory_limit`, in GB of 10^9 bytes, or "auto" for 0.9 of what is free, on CUDA
    of what the GPU has; no more than MLX itself allows.
    """
    import mlx.core as mx

    from mlxft.backend import backend

    if setting != "auto":
        return int(float(setting) * 1e9)
    held = mx.get_active_memory() + mx.get_cache_memory()
    if backend() == "cuda":  # its memory is its own
        return int(_SHARE * min(_device_bytes(mx.device_info()), mx.get_memory_limit()))
    limits = [_SHARE * (available_bytes() + held), mx.get_memory_limit()]
    if backend() == "metal":
        limits.append(mx.device_info()["max_recommended_working_set_size"])
    return int(min(limits))


@contextmanager
def memory_kept_to(num_bytes: int) -> Iterator[None]:
    """Within the block, where arrays take more than that, what is under way ends before more begins.

    So a GPU is given as much work ahead as there is memory for, and what cannot do with less still runs.
    """
    import mlx.core as mx

    before = mx.set_memory_limit(num_bytes)
    try:
        yield
    finally:
        mx.set_memory_limit(before)


def _device_bytes(info: dict) -> int:
    return int(info.get("total_memory") or info["memory_size"])


def _left_in_groups(folders: list[Path]) -> list[int]:
    """Returns what is left of each control group's limit, of those that have one."""
    left = []
    for folder in folders:
        for limit, used in _LIMIT_AND_USE:
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None:
                # Files that were read count as used and are given back when memory is wanted.
                left.append(most - now + _reclaimable(folder / "memory.stat"))
    return left


def _group_folders() -> list[Path]:
    """Returns this process's control groups for memory and those around them, which limit it too."""
    folders = [_GROUPS]
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        inside = root / path.lstrip("/")
        folders += [inside, *(parent for parent in inside.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _number(file: Path) -> Optional[int]:
    """Returns the number in a file, None where there is no file or no number ("max")."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable(file: Path) -> int:
    try:
        entries = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get("total_inactive_file", entries.get("inactive_file", 0)))
