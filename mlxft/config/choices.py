"""What the keys with a fixed choice may be, known without importing anything heavy."""

OBJECTIVES = ("sft",)
LAYOUTS = ("padded",)
GRADIENTS = ("auto", "whole", "checkpoint")
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("auto", "messages", "completion", "text", "tokens")
TRUNCATIONS = ("prompt_left", "right", "drop", "error")
TRAIN_ON = ("assistant", "last_assistant", "all")
HEADS = ("auto", "full", "chunked")
ADAPTERS = ("lora", "full")
SCHEDULES = ("constant", "cosine", "linear")

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
