"""The list of everything that is wrong with a configuration, told at once."""

from collections.abc import Mapping

from mlxft.errors import InputError


class Problems:
    """Collects what is wrong; `sources` says in which file and line a key was set, where it was one."""

    def __init__(self) -> None:
        self.sources: Mapping[str, str] = {}
        self._found: list[tuple[str, str]] = []

    def add(self, key: str, text: str) -> None:
        """Notes that `key` (or the argument, as it was typed) is wrong, once."""
        if (key, text) not in self._found:
            self._found.append((key, text))

    def about(self, key: str) -> bool:
        """Returns whether something is wrong with `key` already."""
        return any(key == other for other, _ in self._found)

    def __len__(self) -> int:
        return len(self._found)

    def raise_any(self) -> None:
        """Raises InputError with every problem, a line each, if there is one."""
        if not self._found:
            return
        count = "a problem" if len(self) == 1 else f"{len(self)} problems"
        lines = [f"the configuration has {count}:"]
        for key, text in self._found:
            source = self.sources.get(key)
            lines.append(f"  {key} ({source}): {text}" if source else f"  {key}: {text}")
        raise InputError("\n".join(lines))
