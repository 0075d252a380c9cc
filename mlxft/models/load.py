"""Loads a model and its tokenizer: mlx-lm's model code, every tensor of the checkpoint accounted for."""

import difflib
import logging
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from mlxft.config.choices import DTYPES
from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.resolve import resolve
from mlxft.sizes import written

# mlx and transformers are imported where they are used: `mlxft.models` has to stay cheap to import.
if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlxft.models.new_tokens import NewToken

log = logging.getLogger("mlxft")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken")


def load(path: str, revision: Optional[str] = None, dtype: str = "auto",
         tokenizer_required: bool = True) -> tuple["nn.Module", Optional["TokenizerWrapper"]]:
    """Returns the model that `path` names, with all parameters in memory, and its tokenizer.

    path, revision: as in `resolve`. dtype: "auto" is float32 on a CPU and the checkpoint's own elsewhere.
    On a CPU quantised layers are made dense where they fit. Nothing is frozen; modules are in
    evaluation mode, as mlx-lm returns them. The tokenizer is None for a folder without one if
    `tokenizer_required` is false. Code that comes with a checkpoint is never run.

    Raises: InputError naming the file, tensor or key that is wrong.
    """
    if dtype not in DTYPES:
        raise InputError(f"model.dtype={dtype} is none of {', '.join(DTYPES)}")
    folder = resolve(path, revision)
    return load_model(folder, dtype), load_tokenizer(folder, tokenizer_required)


def load_model(folder: Path, dtype: str = "auto", new: Sequence["NewToken"] = ()) -> "nn.Module":
    """Returns the model in `folder`, with all parameters in memory, and rows for new tokens.

    Raises: InputError.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxft.models.new_tokens import add_new_tokens

    try:
        model, config = lazy_model(folder, dtype)
        add_new_tokens(model, new)
        mx.eval(model.parameters())  # reads the files
    except RuntimeError as error:
        raise InputError(f"the weights in {folder} cannot be read: {error}") from error
    parameters = [array for _, array in tree_flatten(model.parameters())]
    size = sum(array.nbytes for array in parameters)
    log.info("%s: %s, %s in memory", folder, config["model_type"], written(size))
    return model


def lazy_model(
    folder: Path, dtype: str = "auto", lazily: bool = False
) -> tuple["nn.Module", dict[str, Any]]:
    """Returns the model in `folder` and its configuration, weights not yet read but for their headers.

    lazily: nothing is read, and nothing said, where quantised layers are to be made dense either.
    Raises: InputError.
    """
    import mlx.core as mx

    from mlxft.available_memory import available_bytes
    from mlxft.backend import backend

    model, config = stored_model(folder)
    on_cpu = backend() == "cpu"
    target = _target_dtype(dtype, on_cpu)
    if on_cpu:
        from mlxft.models.dequantise import dequantise_where_it_fits

        held = mx.get_active_memory() if lazily else 0  # by the model itself, where it is loaded already
        dequantise_where_it_fits(model, target, available_bytes() + held, lazily)
    if target is not None:
        model.set_dtype(target)
    return model, config


def stored_model(folder: Path) -> tuple["nn.Module", dict[str, Any]]:
    """Returns the model in `folder` as it is stored, quantised layers packed, and its configuration.

    Weights are not yet read but for their headers. Raises: InputError.
    """
    _check_config(folder)
    audit.weight_files(folder)
    return _audited_model(folder)


def sanitized(config: dict[str, Any], weights: dict[str, "mx.array"]) -> dict[str, "mx.array"]:
    """Returns a checkpoint's tensors as the code of its family names and arranges them.

    What it leaves as it was are the same objects. config: of the model, as `stored_model` returns it.
    """
    model_class, args_class = _model_classes(config)
    model = model_class(args_class.from_dict(config))  # its own: some take parts off while they do it
    return dict(model.sanitize(dict(weights))) if hasattr(model, "sanitize") else dict(weights)


def load_tokenizer(folder: Path, required: bool = True) -> Optional["TokenizerWrapper"]:
    """Returns the folder's tokenizer in mlx-lm's wrapper, None if it has none and none is `required`.

    Answers end at the tokenizer's end-of-sequence token and at those that the model's configuration names.

    Raises: InputError if there is none or it cannot be read.
    """
    from mlx_lm import utils

    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        if not required:
            return None
        raise InputError(f"{folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            audit.read_json(folder / name)
    try:
        ends = utils.load_config(folder).get("eos_token_id")
        return utils.load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=ends)
    except Exception as error:  # whatever transformers, tokenizers and sentencepiece raise for bad files
        raise InputError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def chat_template(tokenizer: Optional["TokenizerWrapper"]) -> Optional[str]:
    """Returns the text of a tokenizer's chat template, None without one."""
    template = getattr(getattr(tokenizer, "_tokenizer", None), "chat_template", None)
    return template if isinstance(template, str) else None


def vocabulary_size(folder: Path) -> int:
    """Returns the number of token ids that the model in `folder` has an embedding for. Raises: InputError."""
    config = audit.read_json(folder / "config.json")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"{folder / 'config.json'}: vocab_size is {size!r}; it has to be a number above 0")
    return size


def num_positions(folder: Path) -> Optional[int]:
    """Returns the number of positions that the model in `folder` was made for, None where it doesn't say."""
    config = audit.read_json(folder / "config.json")
    inner = config.get("text_config")
    number = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    return number if isinstance(number, int) and number > 0 else None


def _target_dtype(dtype: str, on_cpu: bool) -> Optional["mx.Dtype"]:
    """Returns what floating weights are cast to, None for no cast.

    MLX multiplies in float32 through BLAS on a CPU, everything else in loops 10 to 100 times slower.
    """
    import mlx.core as mx

    if dtype == "auto":
        return mx.float32 if on_cpu else None
    return getattr(mx, dtype)


def _check_config(folder: Path) -> None:
    """Raises InputError if config.json is broken or names a model that mlx-lm has no code for."""
    import mlx_lm.models

    file = folder / "config.json"
    config = audit.read_json(file)
    if "model_file" in config:
        raise InputError(f"{file} asks to run the code in {config['model_file']!r}; "
                         "mlxft never runs code that comes with a checkpoint")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[\w-]+", kind):
        raise InputError(f"{file}: model_type is {kind!r}; it has to name a model family, such as 'llama'")
    try:
        _model_classes(config)
    except (ValueError, AttributeError) as error:
        known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
        near = difflib.get_close_matches(kind, known, n=3)
        hint = f" (near it: {', '.join(near)})" if near else ""
        raise InputError(f"{file}: models of type {kind!r} are not supported by mlx-lm{hint}") from error


def _model_classes(config: dict) -> tuple[type, type]:
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def _audited_model(folder: Path) -> tuple["nn.Module", dict[str, Any]]:
    """Returns mlx-lm's model with weights not yet read, after checking what became of each tensor."""
    from mlx_lm import utils

    def audited_classes(config: dict):
        model_class, args_class = _model_classes(config)
        return (lambda args: _watched(_built(model_class(args), config, folder), config, folder)), args_class

    try:
        model, config = utils.load_model(folder, lazy=True, get_model_classes=audited_classes)
    except InputError:
        raise
    except Exception as error:  # a model's code meets a config or tensors it was not written for
        raise InputError(f"mlx-lm cannot build the model in {folder} from its config.json and weights: "
                         f"{type(error).__name__}: {error}") from error
    for name in ("sanitize", "load_weights"):
        vars(model).pop(name, None)
    return model, config


def _built(model: "nn.Module", config: dict, folder: Path) -> "nn.Module":
    """Returns `model` with the layers that only mlxft has in their places."""
    if "trellis" in config:
        from mlxft.models.trellis.linear import geometries, insert

        insert(model, geometries(config, folder), folder)
    return model


def _watched(model: "nn.Module", config: dict, folder: Path) -> "nn.Module":
    """Returns `model` whose `sanitize` and `load_weights`, on this instance, check what passes through."""
    from mlx.utils import tree_flatten

    sanitize, load_weights = getattr(model, "sanitize", None), model.load_weights

    def checked_sanitize(weights):
        before = dict(weights)
        after = sanitize(weights)
        audit.check_dropped(before, dict(after), config, folder)
        return after

    def checked_load(weights, strict=True):
        audit.check_fit(dict(weights), dict(tree_flatten(model.parameters())), folder)
        return load_weights(weights, strict=strict)

    if sanitize is not None:
        model.sanitize = checked_sanitize
    model.load_weights = checked_load
    return model
