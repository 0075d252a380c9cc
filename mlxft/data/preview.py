"""`mlxft preview`: rows as training will see them, with what is trained on marked; nothing is trained."""

import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mlxft.backend import shape_multiple
from mlxft.config.schema import Config, PreviewConfig
from mlxft.data.batches import order_of, packed_sizes
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.load import is_large, load_first, load_for, mixture_in
from mlxft.data.report import DataReport
from mlxft.data.rows import TokenRows
from mlxft.data.sources import sets_of
from mlxft.data.token_text import TokenReader
from mlxft.errors import EXIT_DONE
from mlxft.models.adapters import read_adapter
from mlxft.models.new_tokens import load_vocabulary
from mlxft.models.resolve import checked_folder, is_hub_id, resolve
from mlxft.training.folder import continued
from mlxft.training.inputs import check_steps, needs_tokenizer
from mlxft.training.resume import Continuation
from mlxft.training.windows import Windows

_MARKS, _PLAIN_MARKS = ("⟦", "⟧"), ("[[", "]]")  # around what is trained on
_TRAINED, _HEADING = "bold green", "bold"
_DROPPED_SHOWN = 5


@dataclass(frozen=True)
class Part:
    """Tokens of a row that are shown together.

    name: "" for a whole row. tokens, trained: (T,). before: the row's tokens before them. note: said beside.
    """

    name: str
    tokens: np.ndarray
    trained: np.ndarray
    before: np.ndarray
    note: str = ""

    @property
    def title(self) -> str:
        """The name with the number of tokens and of those that are trained on."""
        count, num_trained = len(self.tokens), int(self.trained.sum())
        words = f"{count:,} token{'s' * (count != 1)}"
        if self.name != "prompt":
            words += f", {num_trained:,} trained on"
        return ", ".join(filter(None, (self.name, words))) + self.note


def main(overrides: list[str]) -> int:
    """Prints what `overrides` describe and returns the exit code.

    Raises: InputError for a wrong configuration, row or tokenizer.
    """
    from mlxft.config import compose

    composed = compose(overrides, command="preview")
    config, wanted = composed.config, composed.own.preview
    continuation = continued(composed.run_name, asdict(config))
    _check_folders(config)
    folder = resolve(config.model.path, config.model.revision, with_weights=False)
    vocabulary = load_vocabulary(config, folder, required=needs_tokenizer(config))
    source = config.data.train if wanted.split == "train" else config.data.valid
    sets = sets_of(source, config.data, validates=wanted.split == "valid")
    is_streamed = config.data.streaming and wanted.split == "train"
    is_whole = not (is_streamed or is_large(sets))
    arguments = (config.trainer.objective, sets, config.data, vocabulary.tokenizer, vocabulary.size)
    rows, report = load_for(*arguments) if is_whole else load_first(*arguments, wanted.rows)
    if wanted.split == "train":
        _check_steps(rows if is_whole else None, config, continuation)
    ends = _ending(rows, report, config, wanted, is_whole)  # first: it may find fault
    preview = _Preview(config, wanted, TokenReader(vocabulary.tokenizer), report)
    preview.begin(len(rows))
    for row in rows[: wanted.rows]:
        preview.show(row)
    preview.end(ends)
    return EXIT_DONE


def _check_folders(config: Config) -> None:
    """Refuses an adapter to begin with, or a reference, that is not there, as training does."""
    for folder in config.adapter.starts:
        read_adapter(folder)
    named = config.loss.reference
    is_fetched = is_hub_id(named) and not Path(named).expanduser().exists()
    if named not in ("base", "start") and not is_fetched:
        checked_folder(Path(named).expanduser(), "loss.reference")


def _check_steps(rows: Optional[TokenRows], config: Config, continuation: Optional[Continuation]) -> None:
    """Refuses a run of too few steps, as training does. rows: None where not all of them are known."""
    trainer, total = config.trainer, config.trainer.max_steps
    if rows is not None:
        order = order_of(rows, config.data, trainer.seed, mixture_in(rows, config.data, trainer.seed))
        total = Windows(rows, order, trainer.accumulate).total_steps(total, trainer.epochs)
    if total is not None:
        check_steps(config, total, continuation)


def _ending(
    rows: TokenRows, report: DataReport, config: Config, wanted: PreviewConfig, is_whole: bool
) -> list[str]:
    """Returns what training logs of the rows, and where those stand that it leaves out."""
    name = "training rows" if wanted.split == "train" else "validation rows"
    lines = [f"{name}: {line}" for line in report.lines()]
    for where, reason in list(report.dropped_at.items())[:_DROPPED_SHOWN]:
        lines.append(f"dropped: {where}: {reason}")
    if len(report.dropped_at) > _DROPPED_SHOWN:
        lines.append(f"dropped: ... and {len(report.dropped_at) - _DROPPED_SHOWN:,} more")
    seed = config.trainer.seed
    mixture = mixture_in(rows, config.data, seed) if is_whole and wanted.split == "train" else None
    if mixture:
        lines += [f"{name}: {line}" for line in mixture.lines()]
    if config.trainer.layout == "packed" and is_whole:
        order = order_of(rows, config.data, seed, mixture)
        lines.append(f"layout: packed; {packed_sizes(rows, order, shape_multiple())}")
    return lines


class _Page(io.StringIO):
    """What rich has made of the last thing to print, in characters that the encoding has."""

    def __init__(self, encoding: str):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        """Rich draws lines with what this has."""
        return self._encoding

    def has(self, text: str) -> bool:
        """Tells whether the encoding has all of the text's characters."""
        return text.encode(self._encoding, "ignore").decode(self._encoding) == text

    def taken(self) -> str:
        """Returns what was written since the last call; other characters are written out: \\u27e6."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)


class _Preview:
    """Rows printed one by one on standard output."""

    def __init__(self, config: Config, wanted: PreviewConfig, reader: TokenReader, report: DataReport):
        self._wanted = wanted
        self._reader = reader
        self._report = report
        loss = config.loss
        self._trains_prompts = config.trainer.objective == "orpo" and loss.nll_scope == "full"
        self._page = _Page(getattr(sys.stdout, "encoding", None) or "utf-8")
        watched = sys.stdout is not None and sys.stdout.isatty()
        self._console = Console(
            file=self._page, force_terminal=watched, highlight=False, markup=False, emoji=False
        )
        self._marks = _MARKS if self._page.has("".join(_MARKS)) else _PLAIN_MARKS

    def begin(self, num_rows: int) -> None:
        """Says which rows follow and how to read them."""
        shown = min(self._wanted.rows, num_rows)
        which = "the first row" if shown == 1 else f"the first {shown:,} rows"
        of = "" if shown == num_rows else f" of {num_rows:,}"
        opening, closing = self._marks
        self._print(Text(f"{which}{of}; {opening} and {closing} enclose what is trained on"))

    def show(self, row: Example | Pair | Unpaired) -> None:
        """Prints a row: where it stands, its sizes, its text; with `preview.tokens` a table of tokens."""
        whole = isinstance(row, Example)
        parts = self._parts(row)
        about = parts[0].title if whole else f"{row.num_tokens:,} tokens, {row.num_supervised:,} trained on"
        if isinstance(row, Unpaired):
            about += f"; {'desirable (label true)' if row.label else 'undesirable (label false)'}"
        self._print(Text(f"\n==> {row.where} <==  {about}", _HEADING))
        self._say_what_is_special(row)
        if isinstance(row, Pair):
            prompt, *answers = parts
            self._print_part(prompt)
            self._print(self._side_by_side(answers))
        else:
            for part in parts:
                self._print_part(part)
        if self._wanted.tokens:
            for part in parts:
                if part.name:
                    self._print(Text(f"--- {part.name}, token by token", _HEADING))
                self._print(self._token_table(part))

    def end(self, lines: Sequence[str]) -> None:
        """Prints the report on all rows."""
        self._print(Text("\n" + "\n".join(lines)))

    def _parts(self, row: Example | Pair | Unpaired) -> list[Part]:
        if isinstance(row, Example):
            trained = row.mask.copy()
            trained[:1] = False  # nothing comes before it that could predict it
            return [Part("", row.tokens, trained, row.tokens[:0])]
        # ORPO's own loss covers the chosen row whole; the prompt's marks are those of answers all the same.
        note = "; orpo trains on it with the chosen answer: loss.nll_scope=full" * self._trains_prompts
        prompt = Part("prompt", row.prompt, np.zeros(len(row.prompt), bool), row.prompt[:0], note)
        if isinstance(row, Unpaired):
            return [prompt, Part("completion", row.completion, row.completion_mask, row.prompt)]
        return [
            prompt,
            Part("chosen", row.chosen, row.chosen_mask, row.prompt),
            Part("rejected", row.rejected, row.rejected_mask, row.prompt),
        ]

    def _say_what_is_special(self, row: Example | Pair | Unpaired) -> None:
        lost = self._report.truncated_at.get(row.where)
        if lost:
            self._print(Text(f"cut to fit into data.max_length={self._report.limit}; lost: {lost}"))
        if isinstance(row, Pair) and row.is_identical:
            self._print(Text("both answers are the same; they teach no preference"))

    def _print_part(self, part: Part) -> None:
        if part.name:
            self._print(Text(f"--- {part.title}", _HEADING))
        self._print(self._text(part))

    def _text(self, part: Part) -> Text:
        """Returns the part's text, the marks around each run that is trained on."""
        text, (opening, closing) = Text(), self._marks
        for run in self._reader.runs(part.tokens, part.trained, part.before):
            if run.trained:
                text.append(f"{opening}{run.text}{closing}", _TRAINED)
            else:
                text.append(run.text)
        return text

    def _side_by_side(self, answers: Sequence[Part]) -> Table:
        table = Table(expand=True, header_style=_HEADING)
        for part in answers:
            table.add_column(part.title, ratio=1, overflow="fold")
        table.add_row(*(self._text(part) for part in answers))
        return table

    def _token_table(self, part: Part) -> Table:
        """Returns a line for each token: its place in the row, id, piece, text, whether it is trained on."""
        reader, table = self._reader, Table(header_style=_HEADING)
        for name in ("place", "id", *(("piece", "text") if reader.has_words else ()), "trained"):
            table.add_column(name, justify="right" if name in ("place", "id") else "left", overflow="fold")
        both = zip(part.tokens.tolist(), part.trained.tolist(), strict=True)
        for place, (token, trained) in enumerate(both, len(part.before)):
            words = (reader.piece(token), reader.text_of(token)) if reader.has_words else ()
            cells = (str(place), str(token), *words, "yes" if trained else "")
            table.add_row(*map(Text, cells), style=_TRAINED if trained else None)
        return table

    def _print(self, what: RenderableType) -> None:
        """Prints by way of `print`: where nobody reads any more, rich ends a process in its own way."""
        self._console.print(what, soft_wrap=isinstance(what, Text))
        print(self._page.taken(), end="")
