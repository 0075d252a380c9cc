"""From what a person wrote to a checked configuration: Hydra puts it together, our own pass checks it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING

from mlxft.config.combinations import (
    absent_files,
    evaluation_contradictions,
    starting_adapters,
    tokens_named_twice,
    training_contradictions,
)
from mlxft.config.keys import Key, flatten, groups_of, is_among, is_missing, keys_of, nest, unknown_key
from mlxft.config.overrides import Request, read_overrides
from mlxft.config.problems import Problems
from mlxft.config.recipes import RecipeBody, find_recipes, read_recipe
from mlxft.config.schema import (
    ChatConfig,
    Config,
    EvalKeys,
    ExportConfig,
    GenerateConfig,
    PreviewKeys,
    QuantizeConfig,
    ServerKeys,
    SweepKeys,
)
from mlxft.config.values import settle
from mlxft.errors import InputError
from mlxft.resources import folder

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Composed:
    """A checked configuration, with the recipe's name if it came from one.

    own: the keys that only the command has, of its schema; None where it has none.
    """

    config: Config
    recipe: str | None = None
    own: Any = None

    @property
    def run_name(self) -> str:
        """What a run of it is called: the name of its folder's folder."""
        return self.recipe or self.config.trainer.objective


# What Hydra would take for instructions to itself and act on, or drop, in silence.
_NOT_IN_RECIPES = {
    "hydra": "a recipe has no settings of Hydra itself; the run's folder is run.dir",
    "defaults": "a recipe has no list of defaults; write the keys themselves, optimizer: {name: lion}",
}


@dataclass(frozen=True)
class Command:
    """What a command's configuration is made of.

    uses: the groups and keys it reads, None for all. needs: the keys of which one must be given,
    each with an example. own: the schema of the keys that it alone has.
    """

    name: str
    uses: tuple[str, ...] | None
    needs: tuple[tuple[tuple[str, ...], str], ...]
    own: type | None = None


_MODEL = (("model.path",), "a folder or a hub id: model.path=HuggingFaceTB/SmolLM2-135M-Instruct")
_ROWS = (("data.train",), "a file: data.train=rows.jsonl")
_ADAPTED = ("adapter.init_from", "adapter.init_weights", "adapter.any_base")
_READING = ("train", "valid", "format", "max_length", "truncate", "batch_size", "train_on", "columns")
COMMANDS = {
    command.name: command
    for command in (
        Command("train", None, (_MODEL, _ROWS)),
        Command("sweep", ("sweep",), (), own=SweepKeys),  # train -m: each run is checked by itself
        Command("plan", None, (_MODEL, _ROWS)),
        Command("preview", None, (_MODEL, _ROWS), own=PreviewKeys),
        Command(
            "eval",
            ("model", "head", "eval", *_ADAPTED, *(f"data.{name}" for name in _READING)),
            (_MODEL, (("data.valid", "data.train", "eval.tasks"), "a file: data.valid=rows.jsonl")),
            own=EvalKeys,
        ),
        Command(
            "generate",
            ("model", *_ADAPTED),
            (_MODEL, (("prompt",), 'a question: prompt="Who are you?"')),
            own=GenerateConfig,
        ),
        Command(
            "quantize",
            ("model", *(f"data.{name}" for name in _READING)),
            (
                _MODEL,
                (("to",), "a kind: to=trellis (or affine)"),
                (("out",), "a folder that is new or empty: out=quantized"),
            ),
            own=QuantizeConfig,
        ),
        Command(
            "export",
            ("model", *_ADAPTED, *(f"data.{name}" for name in _READING)),
            (
                (("adapter.init_from",), "a run's adapter: adapter.init_from=runs/x/adapter"),
                (("to",), "a form: to=merged (or peft, gguf)"),
                (("out",), "a folder that is new or empty: out=exported"),
            ),
            own=ExportConfig,
        ),
        Command("serve", ("model", *_ADAPTED, "server"), (_MODEL,), own=ServerKeys),
        Command("chat", ("model", *_ADAPTED), (_MODEL,), own=ChatConfig),
    )
}


def compose(overrides: list[str], command: str = "train") -> Composed:
    """Returns the configuration of what was typed after `mlxft COMMAND`, checked as a whole.

    Raises: InputError with every problem at once, before any model or data is touched.
    """
    wanted = COMMANDS[command]
    keys = _keys(wanted)
    problems = Problems()
    request = read_overrides(overrides, keys, problems)
    _refuse_unused(request, wanted, keys, problems)
    body = _chosen_body(request, keys, problems)
    values = _resolved(_run_hydra(request, body), keys, problems)
    settings = _checked(values | request.texts, wanted, keys, problems)
    own = _build(wanted.own, settings) if wanted.own else None
    return Composed(_build(Config, settings), request.recipe, own)


def from_dict(values: Mapping[str, Any] | Config) -> Config:
    """Returns the checked configuration of a training run from a dictionary, nested or with dotted keys.

    Raises: InputError with every problem at once.
    """
    given = nest(asdict(values) if isinstance(values, Config) else values)
    wanted = COMMANDS["train"]
    keys = _keys(wanted)
    flat = {name: key.default for name, key in keys.items()} | flatten(given, keys)
    return _build(Config, _checked(flat, wanted, keys, Problems()))


def to_yaml(config: Config) -> str:
    """Returns the whole configuration as YAML, which `from_dict` reads back to the same."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def _keys(command: Command) -> dict[str, Key]:
    return keys_of(Config, command.own) if command.own else keys_of(Config)


def _refuse_unused(request: Request, command: Command, keys: Mapping[str, Key], problems: Problems) -> None:
    if command.uses is None:
        return
    names = [text.lstrip("+").partition("=")[0] for text in request.assignments] + list(request.choices)
    for name in names:
        own = name in keys and "." not in name
        if not own and not is_among(name, command.uses):
            problems.add(name, f"mlxft {command.name} does not use it")


def _chosen_body(request: Request, keys: Mapping[str, Key], problems: Problems) -> RecipeBody | None:
    """Returns the chosen recipe's body without what could not be merged: a group that is no dictionary."""
    if request.recipe is None:
        return None
    try:
        body = read_recipe(find_recipes()[request.recipe])
    except InputError as error:
        problems.add("recipe", str(error))
        problems.raise_any()
        raise
    typed = {text.lstrip("+").partition("=")[0] for text in request.assignments}
    problems.sources = {name: line for name, line in body.lines.items() if name not in typed}
    values: dict[str, Any] = {}
    for name, value in body.values.items():
        if name in _NOT_IN_RECIPES:
            problems.add(name, _NOT_IN_RECIPES[name])
        elif name not in groups_of(keys) or isinstance(value, dict):
            values[name] = value
        elif value is not None:
            problems.add(name, unknown_key(name, keys))
    return RecipeBody(values, body.lines)


def _run_hydra(request: Request, body: RecipeBody | None) -> Any:
    """Returns Hydra's composition: defaults, recipe, chosen files, then single keys."""
    from hydra import __version__, compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _store(request, body)
    # Hydra 1.3 wants to be told whose behaviour it shall have; 1.4 has only its own.
    base = {"version_base": "1.3"} if __version__.startswith("1.3.") else {}
    try:
        with initialize_config_dir(str(folder("configs")), job_name="mlxft", **base):
            return compose("config", request.as_hydra_overrides())
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).strip().partition("\n")[0]
        where = find_recipes()[request.recipe].shown_path if request.recipe else "the command line"
        raise InputError(f"{where}: this does not compose: {reason}") from None


def _store(request: Request, body: RecipeBody | None) -> None:
    """Registers every key's default and the chosen recipe in Hydra's ConfigStore.

    The dataclasses go in as plain values: a typed node would stop at the first wrong type, and the
    check that follows reports them all.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for stale in ("schema.yaml", "recipe"):
        store.repo.pop(stale, None)
    store.store(name="schema", node=asdict(Config()))
    if request.recipe and body:
        store.store(group="recipe", name=request.recipe, node=body.values, package="_global_")


def _resolved(composed: Any, keys: Mapping[str, Key], problems: Problems) -> dict[str, Any]:
    """Returns the composed values by full key name, interpolations replaced by what they point to."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    raw = flatten(OmegaConf.to_container(composed, resolve=False), keys)
    resolved: dict[str, Any] = {}
    for name, value in raw.items():
        if "${" not in str(value):
            resolved[name] = value
            continue
        try:
            node = OmegaConf.select(composed, name)
            resolved[name] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            reason = str(error).strip().partition("\n")[0]
            problems.add(name, f"{value!r} leads nowhere: {reason}")
    return resolved


def _checked(
    values: Mapping[str, Any], command: Command, keys: Mapping[str, Key], problems: Problems
) -> dict[str, Any]:
    """Returns every key's value in its settled form.

    Raises: InputError with all that `problems` holds and all that is found here.
    """
    settings = {name: None if key.default == MISSING else key.default for name, key in keys.items()}
    for name, value in values.items():
        if name not in keys:
            problems.add(name, unknown_key(name, keys))
        elif value in ("", MISSING) and keys[name].default in (None, []):
            problems.add(name, "it is empty; give a value, or leave it out")
        elif value == [] or not (is_missing(value) and is_missing(keys[name].default)):
            try:
                settings[name] = settle(keys[name], value)
            except ValueError as error:
                problems.add(name, str(error))
    for names, example in command.needs:
        groups = [name.partition(".")[0] for name in names]
        told = any(problems.about(name) for name in ("recipe", *names, *groups))
        if not told and all(is_missing(settings[name]) for name in names):
            problems.add(" or ".join(names), f"it is missing; give {example}")
    if not problems.about("recipe"):
        _check_together(settings, command, keys, problems)
    problems.raise_any()
    return settings


def _check_together(
    settings: Mapping[str, Any], command: Command, keys: Mapping[str, Key], problems: Problems
) -> None:
    checks = [absent_files(settings), tokens_named_twice(settings)]
    if command.uses is None:
        checks.append(training_contradictions(settings, keys))
    else:
        checks.append(starting_adapters(settings))
    if command.own is EvalKeys:
        checks.append(evaluation_contradictions(settings, keys))
    for check in checks:
        for name, text in check:
            if not problems.about(name):
                problems.add(name, text)


def _build(schema: type[Schema], settings: Mapping[str, Any], prefix: str = "") -> Schema:
    hints = get_type_hints(schema)
    values: dict[str, Any] = {}
    for item in fields(schema):  # type: ignore[arg-type]
        name, hint = prefix + item.name, hints[item.name]
        values[item.name] = _build(hint, settings, name + ".") if is_dataclass(hint) else settings[name]
    return schema(**values)
