"""The documentation as a reader goes through it: pages, and in each the blocks of commands, files and code.

What the tests know is visible in the Markdown:

    ```bash                     commands, run in the order of the page in one folder of its own
    ```python                   code, run in one namespace a page
    ```text                     what the block above prints, each line somewhere in its output; of commands,
                                without the numbers, which depend on the model
    <!-- file: NAME -->         before a block: its content is saved as NAME
    <!-- exits: 2 -->           before commands: the exit code each of them ends with
    <!-- needs: download -->    before commands: not run (also: gpu, checkout); they are only looked through
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>file|exits|needs): (?P<value>.+?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_CONTINUED = re.compile(r"\\\n\s*")
_NOTE = re.compile(r"\s+#\s.*$")


@dataclass(frozen=True)
class Block:
    """A fenced block. where: "docs/data.md:12". marks: what the comment before it says."""

    where: str
    language: str
    body: str
    marks: dict[str, str]

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and "needs" not in self.marks

    def commands(self) -> list[str]:
        """Returns the block's command lines, continued ones joined, remarks taken off."""
        lines = _CONTINUED.sub(" ", self.body).splitlines()
        return [command for command in (_NOTE.sub("", line).strip() for line in lines) if command]


def blocks_of(page: Path) -> list[Block]:
    """Returns the page's fenced blocks in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start('language')) + 1}"
        marks = {match["mark"]: match["value"]} if match["mark"] else {}
        found.append(Block(where, match["language"], match["body"], marks))
    return found


def code_spans(page: Path) -> list[str]:
    """Returns what stands in backticks within the page's sentences and tables."""
    return _CODE_SPAN.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))


def commands_of(page: Path, language: str = "bash") -> list[tuple[Block, str]]:
    """Returns every command line of the page with its block, those that are not run included."""
    return [(b, line) for b in blocks_of(page) if b.language == language for line in b.commands()]
