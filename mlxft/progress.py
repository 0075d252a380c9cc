"""A bar on standard error for work that a person may wait for."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def followed(items: Sequence[Item], name: str) -> Iterable[Item]:
    """Returns the items; on a terminal a bar of that name follows them."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return items
    return track(items, name, console=console, transient=True)
