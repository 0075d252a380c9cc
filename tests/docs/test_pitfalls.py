"""The page on what goes wrong elsewhere: every test that it names is there to be run."""

import ast
import re

from tests.docs.pages import ROOT, code_spans

PAGE = ROOT / "docs/pitfalls.md"


def rows() -> list[str]:
    lines = re.findall(r"^\| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [line for line in lines if not line.startswith("| what goes wrong")]


def test_every_row_names_a_test():
    assert len(rows()) > 30
    assert all("::test_" in line.rsplit(" | ", 1)[1] for line in rows())


def test_every_test_that_is_named_is_collected():
    names = [span.split("::") for span in code_spans(PAGE) if "::" in span]
    files = {file: functions_of(file) for file, _ in names}
    missing = [f"{file}::{test}" for file, test in names if test not in files[file]]
    assert not missing


def functions_of(file: str) -> set[str]:
    """Returns the test functions that pytest finds in a file."""
    assert re.fullmatch(r"tests/.*/test_\w+\.py", file), file
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")}
