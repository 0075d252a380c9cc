"""`mlxft export`: a trained adapter in the form that another program loads, checked before it is kept."""

import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import numpy as np

import mlxft
from mlxft.config.schema import Config, ExportConfig
from mlxft.errors import EXIT_DONE, InputError
from mlxft.evaluation.adapted import load_adapted
from mlxft.export.card import Card, licence_of, run_of
from mlxft.export.comparison import Comparison, compare, logits_of, rows_of
from mlxft.export.folder import check_out, staged
from mlxft.export.forms import Form, Gguf, GgufAdapter, Merged, Peft
from mlxft.export.hub import check_login, upload
from mlxft.models import manifest
from mlxft.models.adapters import read_adapter
from mlxft.models.fingerprint import adapter_digests, weights_fingerprint
from mlxft.models.load import load_model
from mlxft.models.lora_linear import AdaptedLayer, adapter_disabled
from mlxft.models.new_tokens import load_vocabulary
from mlxft.models.resolve import resolve
from mlxft.training.disk import as_json, disk_guard

log = logging.getLogger("mlxft")

MANIFEST = "manifest.json"  # of a model; an adapter's is manifest.NAME

_LIMIT = 0.5
_LIMIT_OF_SUMS = 0.05  # where nothing is rounded but what half precision adds up


@dataclass(frozen=True)
class Exported:
    """What came out. lines: (name, value) as text, for people. record: the manifest in the folder."""

    out: Path
    lines: list[tuple[str, str]]
    record: dict[str, Any]
    address: Optional[str] = None


def main(overrides: list[str]) -> int:
    """Exports as `overrides` say and returns the exit code; `--json`: what was done as one object on stdout.

    Raises: InputError for a wrong configuration, model or adapter; GuardStop for a full disk, and where the
    exported logits are not the trained ones.
    """
    from mlxft.config import compose

    composed = compose([text for text in overrides if text != "--json"], command="export")
    done = export(composed.config, composed.own)
    if "--json" in overrides:
        print(json.dumps(done.record | {"out": str(done.out), "hub": done.address}, ensure_ascii=False))
    else:
        print("\n".join(f"{name}: {value}" for name, value in done.lines))
    return EXIT_DONE


def export(config: Config, wanted: ExportConfig) -> Exported:
    """Returns what was exported, after comparing its logits with the trained model's. Raises: as `main`."""
    out = Path(wanted.out).expanduser()
    check_out(out)
    if wanted.hub is not None:
        check_login(wanted.hub)
    task = _Task(with_base(config), wanted)
    with disk_guard(out, "Nothing was kept", "export again"), staged(out) as folder:
        form = task.form(folder)
        trained, base = task.trained_logits(form)
        form.write()
        comparison = compare(logits_of(form.load_back(), task.rows), trained, base)
        comparison.check(task.limit(form), form.remedy)
        record = task.record(form, comparison)
        (folder / (manifest.NAME if form.name == "peft" else MANIFEST)).write_text(as_json(record), "utf-8")
        lines = [*task.lines(form), ("logits", str(comparison))]
        (folder / "README.md").write_text(task.card(form, lines).text(), encoding="utf-8")
    lines.append(("out", str(out)))
    address = None
    if wanted.hub is not None:
        address = upload(out, wanted.hub, wanted.hub_private)
        lines.append(("hub", address))
    return Exported(out, lines, record, address)


def with_base(config: Config) -> Config:
    """Returns the configuration with the model that the adapter names as its base, where none is given.

    Raises: InputError for an adapter that names none, or several adapters that name different ones.
    """
    if config.model.path is not None:
        return config
    named = {manifest.base_of(Path(adapter).expanduser()) for adapter in config.adapter.starts}
    if len(named) > 1:
        raise InputError(
            "model.path: the adapters name different models as their base: "
            f"{', '.join(sorted(str(path) for path, _ in named))}. Give the one to export with"
        )
    [(path, revision)] = named
    if not isinstance(path, str):
        raise InputError("model.path: the adapter does not say which model it is of. Give it: model.path=...")
    log.info("model.path=%s, as the adapter says", path)
    return replace(config, model=replace(config.model, path=path, revision=config.model.revision or revision))


class _Task:
    """One export: its configuration, its base, its adapters, the rows that logits are compared on."""

    def __init__(self, config: Config, wanted: ExportConfig):
        self.config = config
        self.wanted = wanted
        self.adapters = [Path(adapter).expanduser() for adapter in config.adapter.starts]
        self.kinds = {read_adapter(adapter).kind for adapter in self.adapters}
        self._check_keys()
        self.folder = resolve(config.model.path, config.model.revision)
        self.words = load_vocabulary(config, self.folder, required=False)
        if self.words.new and wanted.to != "merged":
            texts = ", ".join(token.text for token in self.words.new)
            raise InputError(
                f"to={wanted.to}: the adapter brings new tokens ({texts}), and the form has no place for "
                "them. Use to=merged, whose tables and tokenizer have them"
            )
        self.rows = rows_of(config, self.words.tokenizer, self.words.size)
        if self.words.new:
            self.rows.append([token.number for token in self.words.new])

    def _check_keys(self) -> None:
        """Raises InputError for keys that the form has no use for."""
        default, to = ExportConfig(), self.wanted.to
        written = ("merged", "gguf")
        of = {"quantization": ("merged",), "dtype": written, "gguf": ("gguf",), "limit": written}
        for key, forms in of.items():
            if to not in forms and getattr(self.wanted, key) != getattr(default, key):
                raise InputError(f"{key} is of to={' and to='.join(forms)}, not of to={to}; leave it out")
        if self.wanted.hub is None and self.wanted.hub_private is not None:
            raise InputError("hub_private: nothing is uploaded; give hub=USER/NAME, or leave it out")
        if "full" in self.kinds and (to == "peft" or self.wanted.gguf == "adapter"):
            raise InputError(
                f"to={to}: {self.adapters[0]} holds whole weights, not an adapter. Export the model: "
                "to=merged, or to=gguf"
            )

    def limit(self, form: Form) -> float:
        """Returns the share of the adapter's effect that may be lost."""
        if not form.rounds:
            return 0.0 if form.dtype == mx.float32 else _LIMIT_OF_SUMS
        if self.wanted.limit is not None:
            return self.wanted.limit
        return math.inf if self.wanted.to == "merged" and self.wanted.quantization == "same" else _LIMIT

    def form(self, folder: Path) -> Form:
        forms = {"peft": Peft, "merged": Merged, "gguf": Gguf if self.wanted.gguf == "model" else GgufAdapter}
        return forms[self.wanted.to](self.config, self.wanted, self.folder, folder, self.words)

    def trained_logits(self, form: Form) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits of the trained model and of its base; what the form needs of it is written."""
        model = load_adapted(self.config, self.folder, self.words.new)
        form.begin(model)
        trained = logits_of(model, self.rows)
        if not any(isinstance(module, AdaptedLayer) for module in model.modules()):
            del model  # whole weights: the base is read anew
            base = load_model(self.folder, self.config.model.dtype, self.words.new)
            return trained, logits_of(base, self.rows)
        with adapter_disabled(model):
            return trained, logits_of(model, self.rows)

    def lines(self, form: Form) -> list[tuple[str, str]]:
        """Returns what was exported, as (name, value)."""
        adapters = ", ".join(map(str, self.adapters))
        return [("model", self.config.model.path), ("adapter", f"{adapters}: {form.trained}"), *form.lines()]

    def record(self, form: Form, comparison: Comparison) -> dict[str, Any]:
        """Returns the manifest: of what it was made, how, and what comparing logits gave."""
        weights = self.config.adapter.init_weights or [1.0] * len(self.adapters)
        return {
            "mlxft": mlxft.__version__,
            "to": form.name,
            "base": {
                "path": self.config.model.path,
                "revision": self.config.model.revision,
                "weights": weights_fingerprint(self.folder),
            },
            "adapters": [
                {
                    "path": str(adapter),
                    "weight": weight,
                    "files": adapter_digests(adapter),
                    "trained": manifest.read_manifest(adapter),
                }
                for adapter, weight in zip(self.adapters, weights, strict=True)
            ],
            "logits": asdict(comparison),
            **form.record(),
        }

    def card(self, form: Form, lines: list[tuple[str, str]]) -> Card:
        """Returns the model card of what was exported; lines: what is said of it."""
        runs = [run for run in map(run_of, self.adapters) if run is not None]
        return Card(
            form=form.name,
            library=form.library,
            name=self.wanted.hub or Path(self.wanted.out).name,
            base=self.config.model.path,
            licence=licence_of(self.folder),
            trained=form.trained,
            runs=runs,
            checked=[line for line in lines if line[0] not in ("model", "adapter")],
            file=form.file,
        )
