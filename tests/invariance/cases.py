"""Every way to train: the axes as the code names them, what it refuses, and the cases to try.

    objective, gradient, layout, family      the whole product has every combination of them
    everything else                          two or three values each

A value that is added to the configuration's choices, or to the tiny models, is in the cases by itself.
"""

import json
from collections.abc import Hashable
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

from mlxft.config.choices import (
    ADAPTERS,
    DPO_VARIANTS,
    GRADIENTS,
    HEADS,
    LAYOUTS,
    LOSS_KEYS,
    NLL_SCOPES,
    OBJECTIVES,
    SMOOTHED_VARIANTS,
)
from mlxft.config.combinations import training_contradictions
from mlxft.config.keys import keys_of
from mlxft.config.schema import Config
from mlxft.models.decoder import DecoderView
from mlxft.models.families import VIEWS
from mlxft.models.families.whole import PADDED_ONLY
from tests.invariance.pairwise import Case, completed, pairwise
from tests.tiny_models import FAMILIES, MORE_FAMILIES, PADDED_FAMILIES, model_config

Settings = dict[str, Any]  # of the configuration, by key

_KEYS = keys_of(Config)
_DEFAULTS = {name: key.default for name, key in _KEYS.items()}

NO_WINDOW = "no window"
_WINDOWS = {"short window": 8, "long window": 64}  # positions; the longest prompt has 13, a row 22
_CHUNK = 5  # supervised tokens; a window has up to 40


def _named(settings: Settings) -> str:
    return " ".join(str(value) for value in settings.values())


def _objectives() -> dict[str, Settings]:
    """Returns every objective with every kind of loss it has, by name."""
    kinds = {"variant": DPO_VARIANTS, "nll_scope": NLL_SCOPES}
    found = []
    for objective in OBJECTIVES:
        keys = [key for key in kinds if key in LOSS_KEYS[objective]]
        for values in product(*(kinds[key] for key in keys)):
            loss = {f"loss.{key}": value for key, value in zip(keys, values, strict=True)}
            found.append({"trainer.objective": objective} | loss)
    return {_named(settings): settings | _smoothing(settings) for settings in found}


def _smoothing(settings: Settings) -> Settings:
    """Returns the label smoothing of losses that know it."""
    knows = "label_smoothing" in LOSS_KEYS[settings["trainer.objective"]]
    if knows and settings.get("loss.variant", SMOOTHED_VARIANTS[0]) in SMOOTHED_VARIANTS:
        return {"loss.label_smoothing": 0.1}
    return {}


def _one_key(key: str, values: tuple, **more: Settings) -> dict[str, Settings]:
    """Returns the settings of one key by its values, without "auto". more: what else a value needs."""
    return {str(value): {key: value} | more.get(str(value), {}) for value in values if value != "auto"}


def _adapters() -> dict[str, Settings]:
    """Returns every kind of adapter, on all layers and, those that can be, on the last ones only.

    Also LoRA on experts and the embedding, which may be the head, norms trained whole beside LoRA, and rows
    of new tokens.
    """
    found = _one_key("adapter.kind", ADAPTERS)
    for kind, settings in list(found.items()):
        last = settings | {"adapter.layers": "last 2"}
        if not any(training_contradictions(_DEFAULTS | last, _KEYS)):
            found[f"{kind} on the last layers"] = last
    found["lora on everything"] = {"adapter.targets": ["*", EMBEDDING]}
    found["lora and whole norms"] = {"adapter.modules_to_save": [NORMS]}
    found["lora and a whole embedding"] = {"adapter.modules_to_save": [EMBEDDING]}
    found[NEW_TOKENS] = {"adapter.kind": "lora"}
    return found


NEW_TOKENS = "lora and new tokens"  # an adapter; the tokens are the model's

# What most families call these modules, and what others do.
EMBEDDING, NORMS = "embed_tokens", "*norm"
_CALLED = {
    "gpt2": {EMBEDDING: "wte", NORMS: "ln_*"},
    "gpt_bigcode": {EMBEDDING: "wte", NORMS: "ln_*"},
    "nemotron_h": {EMBEDDING: "embeddings"},
    "qwen": {EMBEDDING: "wte", NORMS: "ln_*"},
}

# The axes that are settings of a run, and the settings of each value.
_SETTINGS: dict[str, dict[str, Settings]] = {
    "objective": _objectives(),
    "gradient": _one_key("trainer.gradient", GRADIENTS),
    "layout": _one_key("trainer.layout", LAYOUTS),
    "adapter": _adapters(),
    "dropout": {"no dropout": {}, "dropout": {"adapter.dropout": 0.3}},
    "noise": {"no noise": {}, "noise": {"trainer.neftune_alpha": 5.0}},
    "own loss": {"plain": {}, "with its own loss": {"loss.nll_weight": 0.5}},
    "head": _one_key("head.kind", HEADS, chunked={"head.chunk": _CHUNK}),
    "batch": {"one row": {"data.batch_size": 1}, "rows": {"data.batch_size": 3}},
    "accumulate": {"at once": {}, "accumulated": {"trainer.accumulate": 2}},
    "segments": {"segments of one": {}}
    | {f"segments of {n}": {"trainer.segment_layers": n} for n in (2, 3, "half")},
    "in flight": {"waited for": {}, "two in flight": {"trainer.in_flight": 2}},
}
MAIN_AXES = ("objective", "gradient", "layout", "family")
AXES: dict[str, list[Hashable]] = {axis: list(values) for axis, values in _SETTINGS.items()} | {
    "family": [*FAMILIES, *MORE_FAMILIES, *PADDED_FAMILIES],
    "window": [NO_WINDOW, *_WINDOWS],
    "multiple": [1, 4],  # what lengths are rounded up to; a GPU's is 128
}
AXES = {axis: AXES[axis] for axis in (*MAIN_AXES, *AXES)}  # those that refuse most first


def settings(case: Case) -> Settings:
    """Returns the settings of a run that a case, or a part of one, says."""
    said = [values[case[axis]] for axis, values in _SETTINGS.items() if axis in case]
    given = {key: value for each in said for key, value in each.items()}
    called = _CALLED.get(case.get("family"), {})
    for key in ("adapter.targets", "adapter.modules_to_save"):
        if key in given:
            given[key] = [called.get(name, name) for name in given[key]]
    return given


def window_size(case: Case) -> int | None:
    """Returns the sliding window in positions of those layers that have one."""
    return _WINDOWS.get(case["window"])


def name(case: Case) -> str:
    """Returns a case's name: its values, the first one of what is not a main axis left out."""
    ordinary = {axis: values[0] for axis, values in AXES.items() if axis not in MAIN_AXES}
    axes = (*reversed(MAIN_AXES), *ordinary)
    return "-".join(str(case[axis]) for axis in axes if case[axis] != ordinary.get(axis))


def refused(part: Case) -> bool:
    """Tells whether the code refuses to train so: the family, or the check of the configuration."""
    if "family" in part and _refused_by_family(part):
        return True
    known = {"objective", "gradient"} <= part.keys()  # which other settings belong to
    return known and _contradictory(json.dumps(settings(part)))


def _refused_by_family(part: Case) -> bool:
    family = part["family"]
    if "window" in part and (part["window"] != NO_WINDOW) != has_windows(family):
        return True
    if part.get("adapter") == NEW_TOKENS and family.startswith("gemma4"):  # their second table of tokens
        return True
    if part.get("noise") == "noise" and not VIEWS.get(family, DecoderView).in_parts:
        return True
    return not trains(family, part.get("layout", "padded"), part.get("gradient", "whole"))


def trains(family: str, layout: str, gradient: str) -> bool:
    """Tells whether models of the family can be trained so, by what their view's code says."""
    in_parts = VIEWS.get(family, DecoderView).in_parts
    return (layout == "padded" or family not in PADDED_ONLY) and (gradient == "whole" or in_parts)


@lru_cache
def has_windows(family: str) -> bool:
    """Tells whether layers of the family look through a sliding window."""
    config = model_config(family)
    return "sliding_window" in config | config.get("text_config", {}) and family not in PADDED_ONLY


@lru_cache(maxsize=None)
def _contradictory(given: str) -> bool:
    return any(training_contradictions(_DEFAULTS | json.loads(given), _KEYS))


def cover() -> list[Case]:
    """Returns cases in which every two values of any two axes meet, one family after the other."""
    return _sorted(pairwise(AXES, refused))


def whole_product() -> list[Case]:
    """Returns every combination of the main axes, all other axes drawn at random, the same every time."""
    random = Random(0)

    def drawn(axis: str, part: Case) -> list[Hashable]:
        return random.sample(AXES[axis], len(AXES[axis]))

    cases = []
    for values in product(*(AXES[axis] for axis in MAIN_AXES)):
        case = completed(dict(zip(MAIN_AXES, values, strict=True)), AXES, refused, drawn)
        cases += [case] if case else []
    return _sorted(cases)


def _sorted(cases: list[Case]) -> list[Case]:
    """By family, then by what is trained: models that were made last are used again."""
    place = {family: number for number, family in enumerate(AXES["family"])}
    return sorted(cases, key=lambda case: (place[case["family"]], case["adapter"]))
