"""README.md of what was exported: the hub's model card, of what is known and nothing else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import yaml

from mlxft.data.files import on_hub
from mlxft.models.resolve import is_hub_id

_USE = {
    "peft": """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```""",
    "merged": """```bash
mlx_lm.generate --model {name} --prompt "Hello"
```""",
    "gguf": """```bash
llama-cli -m {file} -p "Hello"
```""",
    "gguf adapter": """```bash
llama-cli -m BASE.gguf --lora {file} -p "Hello"
```""",
}


@dataclass(frozen=True)
class Run:
    """What is known of the run that an adapter is of: its config.yaml and, if it ended, its summary.json."""

    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def datasets(self) -> list[str]:
        """What it was trained on, as the configuration names it."""
        train = self.config.get("data", {}).get("train")
        entries = train if isinstance(train, list) else [train]
        paths = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in entries]
        flat = [name for path in paths for name in (path if isinstance(path, list) else [path])]
        return [name for name in flat if isinstance(name, str)]


def run_of(adapter: Path) -> Optional[Run]:
    """Returns the run whose adapter, best adapter or checkpoint lies in `adapter`, None if there is none."""
    for folder in (adapter.resolve().parent, adapter.resolve().parent.parent):
        if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
            try:
                config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
                summary = folder / "summary.json"
                found = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
            except (OSError, ValueError, yaml.YAMLError):  # not a run's, or one that is being written
                return None
            return Run(config, found) if isinstance(config, Mapping) and isinstance(found, Mapping) else None
    return None


def licence_of(folder: Path) -> Optional[str]:
    """Returns the licence that the model card in the base's folder names, None where none says it."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return None
    licence = head.get("license") if isinstance(head, Mapping) else None
    return licence if isinstance(licence, str) else None


@dataclass(frozen=True)
class Card:
    """What the card says. form: peft, merged, gguf or "gguf adapter". library: what loads it.

    name: of the model, as it is loaded. checked: what comparing logits gave. file: the GGUF file's name.
    """

    form: str
    library: str
    name: str
    base: str
    licence: Optional[str]
    trained: str
    runs: list[Run]
    checked: list[tuple[str, str]]
    file: str = ""

    def text(self) -> str:
        """Returns the whole README.md."""
        head = yaml.safe_dump(self._head(), sort_keys=False, allow_unicode=True)
        return f"---\n{head}---\n\n" + "\n".join(self._body()).rstrip() + "\n"

    def _head(self) -> dict[str, Any]:
        datasets = [name for run in self.runs for name in run.datasets if on_hub(name)]
        head: dict[str, Any] = {
            "base_model": self.base if is_hub_id(self.base) else None,
            "base_model_relation": "adapter" if self.form in ("peft", "gguf adapter") else "finetune",
            "library_name": self.library,
            "pipeline_tag": "text-generation",
            "license": self.licence,
            "datasets": sorted(set(datasets)) or None,
            "tags": ["mlxft", "mlx"],
        }
        if head["base_model"] is None:
            del head["base_model_relation"]
        return {name: value for name, value in head.items() if value is not None}

    def _body(self) -> Iterator[str]:
        yield f"# {self.name.rpartition('/')[2]}\n"
        what = "An adapter for" if self.form in ("peft", "gguf adapter") else "A fine-tuned version of"
        base = f"`{Path(self.base).name}`"  # a folder: where it lies is nobody's business
        if is_hub_id(self.base):
            base = f"[{self.base}](https://huggingface.co/{self.base})"
        licence = "" if self.licence is None else f" The base's licence is {self.licence}."
        yield f"{what} {base}, made with mlxft.{licence}\n"
        yield "## Use\n"
        yield _USE[self.form].format(name=self.name, file=self.file) + "\n"
        yield "## Training\n"
        yield f"- {self.trained}"
        for run in self.runs:
            yield from _of_run(run)
        yield "\n## Checked\n"
        yield from (f"- {name}: {value}" for name, value in self.checked)


def _of_run(run: Run) -> Iterator[str]:
    trainer, data, optimizer = (run.config.get(group) or {} for group in ("trainer", "data", "optimizer"))
    names = ", ".join(f"`{Path(name).name if not on_hub(name) else name}`" for name in run.datasets)
    yield f"- Objective {trainer.get('objective')} on {names or 'rows that are not named'}"
    yield (
        f"- {optimizer.get('name')}, learning rate {optimizer.get('lr')}; {data.get('batch_size')} rows a "
        f"micro-batch, {trainer.get('accumulate')} micro-batches a step, rows of at most "
        f"{data.get('max_length')} tokens; seed {trainer.get('seed')}"
    )
    said = {
        "steps": "steps",
        "tokens": "trained tokens",
        "loss": "last loss",
        "best_loss": "best validation loss",
    }
    figures = [
        f"{what} {run.summary[key]:.6g}" for key, what in said.items() if _is_number(run.summary.get(key))
    ]
    if figures:
        yield f"- {', '.join(figures)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
