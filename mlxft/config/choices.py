"""What the keys with a fixed choice may be, known without importing anything heavy."""

OBJECTIVES = ("sft", "dpo", "orpo", "cpo", "simpo", "kto")
LAYOUTS = ("auto", "padded", "packed", "prefix_shared")
GRADIENTS = ("auto", "whole", "checkpoint", "segmented")
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = (
    "auto", "messages", "completion", "text", "preference", "unpaired", "tokens", "alpaca", "sharegpt",
    "choices", "answer", "code",
)  # fmt: skip
SET_KEYS = ("path", "weight", "split", "revision", "subset", "columns")  # of a set of rows
BAD_ROWS = ("refuse", "skip")
SPLITS = ("train", "valid")
TRUNCATIONS = ("prompt_left", "right", "drop", "error")
TRAIN_ON = ("assistant", "last_assistant", "all")
HEADS = ("auto", "full", "chunked")
ADAPTERS = ("lora", "dora", "full")
SCHEDULES = ("constant", "cosine", "linear", "wsd")
DPO_VARIANTS = ("sigmoid", "robust", "cdpo", "ipo", "hinge", "norm", "exo_pair", "apo_zero")
SMOOTHED_VARIANTS = ("robust", "cdpo", "exo_pair")  # those that label_smoothing has a meaning for
NLL_SCOPES = ("full", "response")
REFERENCE_TIMES = ("once", "every_step")
EXPORTS = ("peft", "merged", "gguf")
QUANTIZATIONS = ("trellis", "affine")
EXPORTED_QUANTIZATIONS = ("mixed", "none", "same")
EXPORTED_GGUF = ("model", "adapter")

# The keys of `adapter` that say something of low-rank updates.
LOW_RANK_KEYS = (
    "rank", "alpha", "rslora", "rank_by", "ranks", "dropout", "targets", "layers", "modules_to_save"
)  # fmt: skip
RANKS_BY = ("constant", "bits")
EMBEDDINGS = ("embed_tokens", "wte", "embeddings")  # what models call theirs

PAIR_OBJECTIVES = ("dpo", "orpo", "cpo", "simpo")
# The keys of `loss` that each objective reads.
LOSS_KEYS: dict[str, frozenset[str]] = {
    "sft": frozenset(),
    "dpo": frozenset({"beta", "variant", "label_smoothing", "nll_weight", "reference", "reference_scored"}),
    "orpo": frozenset({"beta", "nll_scope"}),
    "cpo": frozenset({"beta", "label_smoothing", "nll_weight"}),
    "simpo": frozenset({"beta", "gamma", "nll_weight"}),
    "kto": frozenset({"beta", "desirable_weight", "undesirable_weight", "reference", "reference_scored"}),
}

# MLX's optimisers by name, each with the settings of ours it has; the learning rate they all have.
OPTIMIZERS: dict[str, frozenset[str]] = {
    "adamw": frozenset({"weight_decay", "betas", "eps", "bias_correction"}),
    "adam": frozenset({"betas", "eps", "bias_correction"}),
    "adamax": frozenset({"betas", "eps"}),
    "lion": frozenset({"weight_decay", "betas"}),
    "muon": frozenset({"weight_decay"}),
    "adafactor": frozenset({"weight_decay"}),
    "sgd": frozenset({"weight_decay"}),
    "rmsprop": frozenset({"eps"}),
    "adagrad": frozenset({"eps"}),
    "adadelta": frozenset({"eps"}),
}


def is_embedding(name: str) -> bool:
    """Tells whether a layer's name or path is that of a model's embedding."""
    return name.rpartition(".")[2] in EMBEDDINGS


def wsd_decay_steps(total_steps: int, share: float) -> int:
    """Returns how many of a run's steps the schedule wsd falls in, at least one."""
    return max(1, round(total_steps * share))

# Of a sweep.
SEARCHES = ("grid", "optuna")
GOALS = ("min", "max")
LAUNCHERS = ("local", "submitit")

GROUP_SIZES = (32, 64, 128)  # of affine quantisation
