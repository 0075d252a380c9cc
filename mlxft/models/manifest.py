"""adapter_manifest.json: what an adapter was trained on, so that it is not put on something else."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import mlxft
from mlxft.config.schema import ModelConfig
from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.fingerprint import weights_fingerprint

NAME = "adapter_manifest.json"


def describe(
    model: ModelConfig,
    base: Path,
    data: Mapping[str, Optional[str]],
    config: str,
    template: Optional[str] = None,
) -> dict[str, Any]:
    """Returns the manifest of an adapter that is trained on the model in `base`, which `model` names.

    data: digests of the rows. config: the text of the run's config.yaml. template: the chat template, where
    there is one. Raises: InputError as
    `weights_fingerprint`.
    """
    return {
        "mlxft": mlxft.__version__,
        "base": {"path": model.path, "revision": model.revision, "weights": weights_fingerprint(base)},
        "data": dict(data),
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "chat_template": None if template is None else template_digest(template),
    }


def template_digest(template: str) -> str:
    """Returns what tells one chat template from another; spaces around it do not."""
    return hashlib.sha256(template.strip().encode()).hexdigest()


def read_manifest(adapter: Path) -> Optional[dict[str, Any]]:
    """Returns the manifest in an adapter's folder, None without one. Raises: InputError if damaged."""
    file = adapter / NAME
    if not file.is_file():
        return None
    manifest = audit.read_json(file)
    base = manifest.get("base")
    if not isinstance(base, dict) or not isinstance(base.get("weights"), str):
        raise InputError(f"{file} does not say which model the adapter is of: base.weights is missing")
    return manifest


def base_of(adapter: Path) -> tuple[Optional[str], Optional[str]]:
    """Returns path and revision of the model that an adapter's folder names as its base, None for unknown.

    Raises: InputError for files that are damaged.
    """
    if manifest := read_manifest(adapter):
        return manifest["base"].get("path"), manifest["base"].get("revision")
    file = adapter / "adapter_config.json"
    config = audit.read_json(file) if file.is_file() else {}
    return config.get("model") or config.get("base_model_name_or_path"), None


def check_base(adapters: list[str], base: Path) -> None:
    """Refuses adapters that say that they were trained on other weights than those of the model in `base`.

    Raises: InputError naming the adapter and its base.
    """
    found = None
    for adapter in adapters:
        manifest = read_manifest(Path(adapter).expanduser())
        if manifest is None:
            continue
        found = found or weights_fingerprint(base)
        if manifest["base"]["weights"] != found:
            raise InputError(
                f"the adapter in {adapter} was trained on {manifest['base'].get('path')}, and the weights in "
                f"{base} are others. Give that model, or, if these are meant (the same model in another "
                "precision, for instance), adapter.any_base=true"
            )


def check_template(adapter: Path, template: Optional[str]) -> None:
    """Refuses an adapter that says that it was trained with another chat template than `template`.

    It says so in the manifest, or with a file of PEFT's folders. Raises: InputError.
    """
    recorded = (read_manifest(adapter) or {}).get("chat_template")
    file = adapter / "chat_template.jinja"
    if recorded is None and file.is_file():
        recorded = template_digest(file.read_text(encoding="utf-8", errors="replace"))
    if recorded is not None and recorded != (None if template is None else template_digest(template)):
        raise InputError(
            f"the adapter in {adapter} was trained with another chat template than the model has. "
            "Give the model that it was trained on, or, if this is meant, any_template=true"
        )
