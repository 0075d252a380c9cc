"""Any module of the package can be the first to be imported: no two need each other to begin with."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mlxft

ROOT = Path(mlxft.__file__).parent


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in ROOT.rglob("*.py")}


def imports_at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the imports that run with the module: not those in functions or for type checkers."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            yield from imports_at_once(statement.body + statement.orelse)
        elif isinstance(statement, (ast.Try, ast.With, ast.ClassDef)):
            yield from imports_at_once(statement.body)


def named(statement: ast.stmt) -> Iterator[str]:
    """Yields the modules that an import names."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            yield alias.name
        else:
            inside = f"{statement.module}.{alias.name}"
            yield inside if inside in MODULES else statement.module


def packages(module: str) -> list[str]:
    """mlxft and mlxft.data for mlxft.data.files."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def needed(module: str, body: list[ast.stmt]) -> set[str]:
    """Returns what has to be imported first: the modules named, with packages that are not its own."""
    found: set[str] = set()
    for statement in imports_at_once(body):
        for name in named(statement):
            if name in MODULES:
                found |= set(packages(name)) - {module, *packages(module)} | {name}
    return found


def test_no_module_needs_one_that_needs_it():
    graph = {name: needed(name, ast.parse(file.read_text()).body) for name, file in MODULES.items()}
    assert len(graph) > 100 and "mlxft.training.loop" in graph["mlxft.training.run"]
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found():
    body = ast.parse("if True:\n    from mlxft.data import files\n").body
    assert needed("mlxft.config.keys", body) == {"mlxft.data.files", "mlxft.data"}
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
