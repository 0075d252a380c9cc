"""Keys that are each right and make no sense together, and files that are not there."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxft.config.choices import (
    LOSS_KEYS,
    LOW_RANK_KEYS,
    OPTIMIZERS,
    PAIR_OBJECTIVES,
    SMOOTHED_VARIANTS,
    is_embedding,
    wsd_decay_steps,
)
from mlxft.config.keys import Key, is_missing
from mlxft.data.files import on_hub
from mlxft.resources import bundled_data, folder

Found = Iterator[tuple[str, str]]


def training_contradictions(settings: Mapping[str, Any], keys: Mapping[str, Key]) -> Found:
    """Yields (key, what is wrong) for settings of a training run that exclude each other.

    Settings equal to their default count as not given.
    """
    given = {name for name, value in settings.items() if name in keys and value != keys[name].default}
    yield from _steps(settings)
    yield from _schedule(settings, given)
    yield from _rows(settings, given)
    yield from _sources(settings, given)
    yield from _streaming(settings, given)
    yield from _objective(settings, given)
    yield from _dry_run(settings)
    yield from _segments(settings, given)
    yield from _loss(settings, given)
    yield from _validation(settings)
    yield from _adapter(settings, given)
    yield from starting_adapters(settings)
    yield from _optimizer(settings, given)
    yield from _parameter_groups(settings)
    yield from _saving(settings)
    if settings["head.kind"] == "full" and "head.chunk" in given:
        yield "head.chunk", "it has no meaning with head.kind=full; leave one of them out"


def evaluation_contradictions(settings: Mapping[str, Any], keys: Mapping[str, Key]) -> Found:
    """Yields (key, what is wrong) for settings of an evaluation that exclude each other."""
    given = {name for name, value in settings.items() if name in keys and value != keys[name].default}
    if settings["eval.reference"] == "base" and is_missing(settings["adapter.init_from"]):
        yield "eval.reference", "there is no adapter to compare with its base; give adapter.init_from"
    if settings["eval.stride"] is not None and settings["eval.stride"] >= settings["data.max_length"]:
        yield "eval.stride", f"windows have data.max_length={settings['data.max_length']} tokens; give fewer"
    if "eval.timeout" in given and not settings["eval.run_code"]:
        yield "eval.timeout", "it is of programs, and none is run; give eval.run_code=true, or leave it out"
    if is_missing(settings["eval.tasks"]):
        if "eval.num_fewshot" in given:
            yield "eval.num_fewshot", "it is of lm-eval's tasks; give eval.tasks, or leave it out"
        return
    for name in ("data.valid", "eval.stride", "eval.max_tokens", "eval.extract", "eval.run_code"):
        if name in given:
            yield name, "lm-eval's tasks bring their own; leave it out (over a recipe: null), or eval.tasks"


def _steps(settings: Mapping[str, Any]) -> Found:
    steps, warmup = settings["trainer.max_steps"], settings["schedule.warmup_steps"]
    if steps is not None and warmup >= steps:
        yield "schedule.warmup_steps", f"{warmup} steps are not fewer than trainer.max_steps={steps}"


def _schedule(settings: Mapping[str, Any], given: set[str]) -> Found:
    name = settings["schedule.name"]
    if name == "constant" and "schedule.final_ratio" in given:
        yield "schedule.final_ratio", "a constant schedule ends where it began; leave it out"
    steps, warmup = settings["trainer.max_steps"], settings["schedule.warmup_steps"]
    if name == "wsd" and steps is not None and warmup < steps:
        falling = wsd_decay_steps(steps, settings["schedule.decay_share"])
        if warmup + falling > steps:
            yield "schedule.warmup_steps", f"{warmup} steps, and {falling} to fall in, are more than {steps}"
    if name != "wsd" and "schedule.decay_share" in given:
        yield "schedule.decay_share", f"it is of schedule.name=wsd, not {name}; leave it out"


def _rows(settings: Mapping[str, Any], given: set[str]) -> Found:
    if "data.train_on" not in given:
        return
    if settings["data.format"] == "tokens":
        yield "data.train_on", "rows of tokens say by their mask what is trained on; leave it out"
    elif settings["data.format"] == "text" and settings["data.train_on"] != "all":
        yield "data.train_on", "plain text has no turns and all of it is trained on; leave it out"


def _sources(settings: Mapping[str, Any], given: set[str]) -> Found:
    """Keys of hub data sets without one, and weights that mix nothing or cannot be kept to."""
    sources = [*_paths(settings["data.train"]), *_paths(settings["data.valid"])]
    names_hub = any(on_hub(path) for path in sources)
    for name in sorted({"data.revision", "data.subset"} & given):
        if not names_hub:
            yield name, "it is of data sets on the hub, and none is named; leave it out"
    folders = [path for path in _paths(settings["data.train"]) if Path(path).expanduser().is_dir()]
    if "data.split" in given and not names_hub and not folders:
        yield "data.split", "it is of data sets on the hub and of folders, and none is named; leave it out"
    if _has_weights(settings["data.valid"]):
        yield "data.valid", "every row is validated with once, whatever its set; leave weight out"
    if not _has_weights(settings["data.train"]):
        return
    if not isinstance(settings["data.train"], list) or len(settings["data.train"]) < 2:
        yield "data.train", "a weight mixes sets, and this is one; leave weight out, or name more"
    elif not settings["data.shuffle"]:
        yield "data.shuffle", "rows of sets with weights are drawn at random; leave it out, or the weights"
    elif settings["data.batch_tokens"] is not None:
        yield "data.batch_tokens", "rows are put together once for all epochs, so weights cannot be kept to"


def _streaming(settings: Mapping[str, Any], given: set[str]) -> Found:
    """What needs all rows at once, and so cannot be had of a stream."""
    if not settings["data.streaming"]:
        if "data.buffer" in given:
            yield "data.buffer", "it is of streamed rows; give data.streaming=true, or leave it out"
        return
    if settings["trainer.max_steps"] is None:
        yield "trainer.max_steps", "how many rows a stream has is not known, so say how many steps to train"
    if "trainer.epochs" in given:
        yield "trainer.epochs", "how many rows a stream has is not known; give trainer.max_steps"
    for name in sorted({"data.cache", "data.num_workers"} & given):
        yield name, "streamed rows are tokenised as they are needed and not kept; leave it out"
    if settings["data.batch_tokens"] is not None:
        yield "data.batch_tokens", "rows of a stream are not known beforehand; give data.batch_size"
    if _has_weights(settings["data.train"]):
        yield "data.train", "a stream is read from its beginning to its end; leave weight out"
    objective = settings["trainer.objective"]
    if objective == "kto":
        yield "trainer.objective", "kto takes other rows' answers, which a stream does not have; use dpo"
    elif "reference_scored" in LOSS_KEYS[objective] and settings["loss.reference_scored"] == "once":
        yield "loss.reference_scored", "a stream's rows are not scored beforehand; give every_step"


def _has_weights(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, Mapping) and "weight" in entry for entry in entries)


def _paths(value: Any) -> Iterator[str]:
    """Yields the names in a value of data.train."""
    for entry in value if isinstance(value, list) else [value]:
        named = entry["path"] if isinstance(entry, Mapping) else entry
        yield from named if isinstance(named, list) else [named] if isinstance(named, str) else []


def _objective(settings: Mapping[str, Any], given: set[str]) -> Found:
    """Formats and layouts that the objective's rows cannot have."""
    objective, form = settings["trainer.objective"], settings["data.format"]
    own = "preference" if objective in PAIR_OBJECTIVES else "unpaired" if objective == "kto" else None
    if own and form not in ("auto", own, "tokens"):
        yield "data.format", f"{objective} trains on rows of the format {own} (or tokens), not {form}"
    elif own is None and form in ("preference", "unpaired"):
        others = ", ".join(PAIR_OBJECTIVES) if form == "preference" else "kto"
        yield "data.format", f"{form} rows are for trainer.objective={others}, not {objective}"
    if settings["trainer.layout"] == "prefix_shared" and objective not in PAIR_OBJECTIVES:
        yield "trainer.layout", f"the rows of {objective} share no prompts; use packed"
    if settings["data.batch_tokens"] is not None:
        if own == "preference":
            yield "data.batch_tokens", f"a micro-batch of {objective} is so many pairs; give data.batch_size"
        if settings["trainer.layout"] != "packed":
            yield "data.batch_tokens", "only packed rows fill a number of tokens; give trainer.layout=packed"
        if "data.batch_size" in given:
            yield "data.batch_size", "data.batch_tokens says what a micro-batch holds; leave one of them out"
    if own and settings["data.train_on"] == "all":
        yield "data.train_on", f"{objective} trains on the answers; leave it out, or say last_assistant"


def _dry_run(settings: Mapping[str, Any]) -> Found:
    if settings["trainer.dry_run"] and settings["trainer.log_memory"]:
        yield "trainer.log_memory", "it writes into a run's folder, and trainer.dry_run leaves none"


def _segments(settings: Mapping[str, Any], given: set[str]) -> Found:
    if settings["trainer.gradient"] == "segmented":
        return
    for name in sorted({"trainer.segment_layers", "trainer.in_flight"} & given):
        yield name, "it is of the segmented backward: give trainer=segmented too, or leave it out"


def _loss(settings: Mapping[str, Any], given: set[str]) -> Found:
    objective, variant = settings["trainer.objective"], settings["loss.variant"]
    for name in sorted(given):
        group, _, key = name.partition(".")
        if group == "loss" and key not in LOSS_KEYS[objective]:
            having = ", ".join(other for other, keys in LOSS_KEYS.items() if key in keys)
            yield name, f"{objective} does not use it (it is for {having}); leave it out"
    smoothed = settings["loss.label_smoothing"] > 0
    if objective == "dpo" and smoothed and variant not in SMOOTHED_VARIANTS:
        usable = ", ".join(SMOOTHED_VARIANTS)
        yield "loss.label_smoothing", f"loss.variant={variant} has no use for it; it is for {usable}"
    if objective == "dpo" and variant == "exo_pair" and not smoothed:
        yield "loss.label_smoothing", "loss.variant=exo_pair divides by it; set it above 0, such as 0.001"
    elif objective == "dpo" and variant in SMOOTHED_VARIANTS and not smoothed:
        what = f"without it loss.variant={variant} is sigmoid"
        yield "loss.label_smoothing", f"{what}; set the share of labels that may be wrong, such as 0.1"


def _validation(settings: Mapping[str, Any]) -> Found:
    if not is_missing(settings["data.valid"]):
        if settings["trainer.patience"] and not settings["trainer.eval_every"]:
            yield "trainer.patience", "it counts validations, of which there is one; give trainer.eval_every"
        return
    for name in ("trainer.eval_every", "trainer.patience", "trainer.min_delta"):
        if settings[name] > 0:
            yield name, "it needs validation data; give data.valid"
    if settings.get("preview.split") == "valid":
        yield "preview.split", "there is no validation data; give data.valid"


def _adapter(settings: Mapping[str, Any], given: set[str]) -> Found:
    kind = settings["adapter.kind"]
    if kind == "full":
        for name in [f"adapter.{key}" for key in LOW_RANK_KEYS if f"adapter.{key}" in given]:
            yield name, "it has no meaning with adapter.kind=full, which trains every weight; leave it out"
    yield from _ranks(given)
    if kind != "full" and settings["adapter.rslora"] and not is_missing(settings["adapter.init_from"]):
        yield "adapter.rslora", "the scale of adapter.init_from is taken over as it is; leave it out"
    if kind == "dora":
        embeddings = [name for name in settings["adapter.targets"] or () if is_embedding(name)]
        if embeddings:
            yield "adapter.targets", f"DoRA is of linear layers only, not of {embeddings[0]}: use lora for it"


def tokens_named_twice(settings: Mapping[str, Any]) -> Found:
    """Yields (key, what is wrong) for new tokens that are to be special and plain."""
    plain = settings.get("model.new_tokens") or ()
    for text in settings.get("model.new_special_tokens") or ():
        if text in plain:
            yield "model.new_special_tokens", f"{text!r} is in model.new_tokens too; name it once"


def _ranks(given: set[str]) -> Found:
    for name in sorted({"adapter.rank_by", "adapter.ranks"} & given):
        if "adapter.init_from" in given:
            yield name, "the ranks of adapter.init_from are taken over as they are; leave it out"
        elif "adapter.rslora" in given:
            yield name, "with adapter.rslora each rank would have a scale of its own; leave one of them out"


def starting_adapters(settings: Mapping[str, Any]) -> Found:
    """Yields (key, what is wrong) for adapters that cannot be added up as they are asked for."""
    folders, weights = settings.get("adapter.init_from"), settings.get("adapter.init_weights")
    number = 0 if is_missing(folders) else 1 if isinstance(folders, str) else len(folders)
    if weights is not None and not number:
        yield "adapter.init_weights", "there is nothing to weigh; give adapter.init_from"
    elif weights is not None and len(weights) != number:
        yield "adapter.init_weights", f"{len(weights)} weights for the {number} in adapter.init_from"
    if settings.get("adapter.any_base") and not number:
        yield "adapter.any_base", "it is of adapter.init_from, which is not given; leave it out"
    kind = settings.get("adapter.kind", "lora")
    if (number > 1 or weights is not None) and kind != "lora":
        yield "adapter.init_from", f"only LoRA adapters can be added up or weighed, not those of kind {kind}"


def _parameter_groups(settings: Mapping[str, Any]) -> Found:
    full = settings["adapter.kind"] == "full"
    if full and settings["optimizer.lora_plus_ratio"] != 1:
        yield "optimizer.lora_plus_ratio", "adapter.kind=full has no B to give another rate; leave it out"
    if settings["optimizer.decay_vectors"]:
        return
    name = settings["optimizer.name"]
    if "weight_decay" not in OPTIMIZERS[name] or not settings["optimizer.weight_decay"]:
        yield "optimizer.decay_vectors", "nothing decays: give optimizer.weight_decay, or leave it out"
    elif settings["adapter.kind"] == "lora" and settings["adapter.modules_to_save"] is None:
        yield "optimizer.decay_vectors", "of a LoRA adapter only matrices are trained; leave it out"


def _optimizer(settings: Mapping[str, Any], given: set[str]) -> Found:
    name = settings["optimizer.name"]
    for option in ("weight_decay", "betas", "eps", "bias_correction"):
        key = f"optimizer.{option}"
        turned_off = option == "weight_decay" and settings[key] == 0
        if option not in OPTIMIZERS[name] and key in given and not turned_off:
            having = ", ".join(other for other, options in OPTIMIZERS.items() if option in options)
            yield key, f"{name} has no {option}; leave it out, or use one of {having}"


def _saving(settings: Mapping[str, Any]) -> Found:
    if settings["trainer.save_only_adapter"] and settings["trainer.resume"] != "none":
        yield (
            "trainer.save_only_adapter",
            ("a run that saves only its adapter can't be resumed: leave it out, or trainer.resume"),
        )


def absent_files(settings: Mapping[str, Any]) -> Found:
    """Yields (key, what is wrong) for paths that plainly name a file or folder and lead nowhere."""
    for name in ("data.train", "data.valid"):
        for file in _paths(settings.get(name)):
            yield from ((name, text) for text in _absent_data(file))
    for name in ("model.path", "adapter.init_from", "loss.reference", "trainer.resume"):
        given = settings.get(name)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, str) and value.startswith(("/", "./", "../")) and not Path(value).exists():
                yield name, f"there is no {value}"


def _absent_data(file: str) -> Iterator[str]:
    bundled = file.removeprefix("bundled:")
    if bundled != file:
        if not bundled_data(bundled).is_file():
            there = sorted(path.name for path in (folder("recipes") / "data").glob("*.json*"))
            yield f"no data called {bundled} comes with mlxft; there is {', '.join(there) or 'none'}"
    elif not Path(file).expanduser().exists() and not on_hub(file):
        yield f"there is no file {file}; paths are taken from {Path.cwd()}"
