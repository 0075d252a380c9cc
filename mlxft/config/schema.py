"""The shape of a run's configuration: one dataclass a group, each key with its type and default.

A key that is None by default is decided later and said in the log: `adapter.rank` becomes 8, or
the rank of the adapter in `adapter.init_from`.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The group `model`: the base model."""

    path: str = MISSING  # a folder or a hub id
    revision: Optional[str] = None  # a hub branch, tag or commit
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    new_tokens: Any = None  # texts that become one token each, ["<|call|>"]; their rows are trained
    new_special_tokens: Any = None  # the same for markup, left out where text is shown


@dataclass
class DataConfig:
    """The group `data`: the rows, and what becomes of them before training."""

    train: Any = None  # a file, a folder, a hub id, "bundled:NAME", or a list; {path: ..., weight: ...}
    valid: Any = None  # the same, never trained on
    split: Optional[str] = None  # of a hub data set or a folder, for data.train; None: train
    revision: Optional[str] = None  # of a hub data set: branch, tag or commit
    subset: Optional[str] = None  # of a hub data set: its configuration's name
    format: str = "auto"  # auto | messages | completion | text | ... | alpaca | sharegpt
    cache: Any = "auto"  # tokenised rows kept on disk: auto (sets of more than 4 MB) | true | false
    num_workers: Any = "auto"  # processes that tokenise: auto (for large sets as many as cores) | a number
    on_bad_row: str = "refuse"  # refuse: the first faulty row ends the command | skip: it is counted
    max_length: int = 2048  # tokens of a row; of a pair, of its prompt with the longer answer
    truncate: str = "prompt_left"  # prompt_left | right | drop | error
    batch_size: int = 4  # rows of a micro-batch: texts, pairs or labelled answers
    batch_tokens: Optional[int] = None  # with packed: as many rows as fit so many tokens, not batch_size
    shuffle: bool = True  # false: in file order
    streaming: bool = False  # rows are read and tokenised as they are needed, never held all at once
    buffer: int = 4096  # of streaming: rows that are shuffled and sorted by length together
    train_on: str = "assistant"  # whose turns are targets: assistant | last_assistant | all
    columns: dict[str, str] = field(default_factory=dict)  # {our name: their name}


@dataclass
class TrainerConfig:
    """The group `trainer`: objective, layout and gradient, and how the loop goes."""

    objective: str = "sft"  # what is minimised: sft | dpo | orpo | cpo | simpo | kto
    layout: str = "auto"  # how rows share one forward: auto | padded | packed | prefix_shared
    gradient: str = "auto"  # of the backward: auto (fastest that fits) | whole | checkpoint | segmented
    segment_layers: Any = "auto"  # of segmented: auto | layers at once | half: attention, MLP apart
    in_flight: Any = "auto"  # of segmented: segments submitted before one is waited for; each takes memory
    memory_limit: Any = "auto"  # GB of arrays at once; auto: 0.9 of what is free, or of what the GPU has
    max_steps: Optional[int] = None  # optimiser steps; wins over epochs
    epochs: float = 1.0  # passes over the rows
    accumulate: int = 1  # micro-batches of an optimiser step
    seed: int = 0  # of the row order, dropout and new adapters
    clip_norm: float = 1.0  # of the gradient; 0 turns clipping off
    neftune_alpha: float = 0.0  # noise on embeddings: alpha / sqrt(tokens of the row x width); 0: none
    deterministic: bool = False  # repeatable to the bit on a GPU too, as far as it reaches; slower
    eval_every: int = 0  # optimiser steps; 0: at the end only, when there is validation data
    save_every: int = 0  # optimiser steps; 0: at the end only
    keep: Any = 2  # checkpoints kept: a number or "all"
    save_only_adapter: bool = False  # checkpoints without what resuming needs
    resume: str = "none"  # none | auto | a run's folder or a checkpoint's folder
    patience: int = 0  # validations without improvement before stopping; 0: never stop early
    min_delta: float = 0.0  # smallest fall of the validation loss that counts as improvement
    dry_run: bool = False  # one step on the longest batch, to see what it takes; writes nothing
    log_memory: bool = False  # peak, active and cached bytes of each phase of a step, to memory.jsonl
    samples: list[str] = field(default_factory=list)  # questions answered before and after training


@dataclass
class LossConfig:
    """The group `loss`: what preference objectives take; `sft` has none of it."""

    beta: Optional[float] = None  # weight of the preference; None: 0.1, for simpo 2.0
    variant: str = "sigmoid"  # of dpo: sigmoid | robust | cdpo | ipo | hinge | norm | exo_pair | apo_zero
    label_smoothing: float = 0.0  # the chance that a pair's label is wrong
    gamma: Optional[float] = None  # of simpo, the lead in reward that is asked for; None: 0.5
    nll_scope: str = "full"  # of orpo, the tokens of its own loss: full (prompt too) | response
    nll_weight: Optional[float] = None  # of the chosen answers' own loss; None: 1 for cpo, 0 for dpo, simpo
    desirable_weight: float = 1.0  # of kto's answers labelled true
    undesirable_weight: float = 1.0  # of kto's answers labelled false
    reference: str = "base"  # of dpo and kto: base (adapter off) | start (with init_from) | a model's path
    reference_scored: str = "once"  # when: once, before training and kept on disk | every_step


@dataclass
class HeadConfig:
    """The group `head`: how many logits exist at once."""

    kind: str = "auto"  # auto | full | chunked
    chunk: int = 1024  # supervised tokens whose logits exist at once


@dataclass
class AdapterConfig:
    """The group `adapter`: what is trained."""

    kind: str = "lora"  # lora | dora | full
    rank: Optional[int] = None  # None: 8, or init_from's
    alpha: Optional[float] = None  # scale = alpha / rank; None: 2 x rank, or init_from's
    rslora: bool = False  # scale = alpha / sqrt(rank)
    rank_by: str = "constant"  # constant | bits: a layer's rank is rank x its bits / 4, at least 2
    ranks: dict[str, int] = field(default_factory=dict)  # {name or pattern: rank}, before rank_by
    dropout: float = 0.0  # share of the adapter's inputs set to zero
    targets: Any = None  # names or patterns of linear layers, experts too; None: all linear ones of a block
    layers: Any = "all"  # "all", or the last N: "last 8"
    modules_to_save: Any = None  # names of modules that are trained whole beside it: [norm,lm_head]
    init_from: Any = None  # an adapter's folder, mlx-lm's or PEFT's; several are added up
    init_weights: Optional[list[float]] = None  # what each of several counts; None: 1
    any_base: bool = False  # true: init_from may have been trained on other weights than the model's

    @property
    def starts(self) -> list[str]:
        """The folders in `init_from`."""
        return [self.init_from] if isinstance(self.init_from, str) else list(self.init_from or [])


@dataclass
class OptimizerConfig:
    """The group `optimizer`: how a gradient changes what is trained."""

    name: str = "adamw"  # adamw | adam | adamax | lion | muon | adafactor | sgd | rmsprop | ...
    lr: float = 1e-4  # the highest learning rate
    weight_decay: float = 0.01  # apart from the gradient, times the learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # of the two moments
    eps: float = 1e-8  # keeps the division finite
    bias_correction: bool = True  # of the moments' first steps
    lora_plus_ratio: float = 1.0  # the learning rate of an adapter's B over that of all else
    decay_vectors: bool = True  # false: no weight decay for norms, biases and DoRA's magnitudes


@dataclass
class ScheduleConfig:
    """The group `schedule`: the learning rate over the steps."""

    name: str = "cosine"  # constant | cosine | linear | wsd
    warmup_steps: int = 0  # optimiser steps from nothing to the highest learning rate
    final_ratio: float = 0.0  # the last learning rate over the highest
    decay_share: float = 0.1  # of wsd: the share of all steps, the last ones, that it falls in


@dataclass
class LoggerConfig:
    """The group `logger`: who follows a run beside metrics.jsonl."""

    wandb: bool = False  # Weights & Biases
    tensorboard: bool = False  # event files in the run's folder
    project: str = "mlxft"  # of wandb, as all that follows
    entity: Optional[str] = None  # a user or a team; None: your default one
    name: Optional[str] = None  # the run's there; None: its folder's name
    group: Optional[str] = None  # runs that belong together; None: a sweep's jobs do
    tags: list[str] = field(default_factory=list)  # words to find runs by
    offline: bool = False  # keep the records in the run's folder; wandb sync uploads them


@dataclass
class RunConfig:
    """The group `run`: where the run's folder is."""

    dir: Optional[str] = None  # None: runs/<recipe or objective>/<time>


@dataclass
class Config:
    """All of a training run's groups, each at its defaults until something is set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass
class SweepConfig:
    """The group `sweep`: how `mlxft train -m` goes through the runs."""

    dir: Optional[str] = None  # None: runs/sweeps/<recipe or objective>/<time>
    resume: str = "none"  # none | auto (the newest of the same arguments) | a sweep's folder
    retry_failed: bool = False  # of a sweep that is continued: try those that failed again
    search: str = "grid"  # grid: every combination | optuna: what earlier runs suggest
    trials: int = 20  # of optuna: runs in all
    seed: int = 0  # of optuna's choices
    metric: str = "loss"  # compared: the best of a validation's; without validation training's last
    goal: str = "min"  # min | max: which of two values is the better one
    params: dict[str, str] = field(default_factory=dict)  # {key: its values}, as arguments have them
    jobs: int = 1  # at once; on one GPU they share its memory
    launcher: str = "local"  # local | submitit: jobs of a cluster
    submitit: dict[str, Any] = field(default_factory=dict)  # {partition: gpu, timeout_min: 600, ...}


@dataclass
class SweepKeys:
    """The group that only `mlxft train -m` has; what it varies are keys of a training run."""

    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass
class PreviewConfig:
    """The group `preview`: what `mlxft preview` shows."""

    rows: int = 3  # how many are shown, from the first on
    split: str = "train"  # of which data: train | valid
    tokens: bool = False  # a table of their tokens as well


@dataclass
class PreviewKeys:
    """The group that only `mlxft preview` has, beside all that a training run has."""

    preview: PreviewConfig = field(default_factory=PreviewConfig)


@dataclass
class EvalConfig:
    """The group `eval`: what `mlxft eval` does beside scoring rows, and how."""

    reference: Optional[str] = None  # scored beside the model: base (adapter off) | a model's path
    stride: Optional[int] = None  # tokens a window of long text scores; null: all but its first
    limit: Optional[int] = None  # only the first rows, or questions of each task
    batch_tokens: int = 4096  # tokens of one forward when choices are scored
    chat: Optional[bool] = None  # questions as turns of the chat template; null: rows yes, tasks no
    max_tokens: int = 256  # tokens of an answer that is written, at most
    extract: Optional[str] = None  # a pattern: what it last finds in an answer is what counts
    run_code: bool = False  # run what the model writes, in a sandbox, where rows have tests
    timeout: float = 10.0  # seconds that such a program may take
    tasks: Any = None  # of lm-eval: names, or YAML files of tasks; in place of rows
    num_fewshot: Optional[int] = None  # of tasks: examples before each question; null: as the task says


@dataclass
class EvalKeys:
    """The group that only `mlxft eval` has, beside what it shares with a training run."""

    eval: EvalConfig = field(default_factory=EvalConfig)


@dataclass
class GenerateConfig:
    """The keys of `mlxft generate` beside those of the model and the adapter."""

    prompt: str = MISSING  # what the user says
    system: Optional[str] = None  # a system turn; None: what the model's own template puts there
    max_tokens: int = 256  # tokens of the answer, at most
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # the share of probability that is drawn from
    seed: int = 0  # of the draws
    thinking: bool = False  # let the model think first, where its template knows how


@dataclass
class ExportConfig:
    """The keys of `mlxft export` beside those of the model, the adapter and the rows to compare on."""

    to: str = MISSING  # peft | merged | gguf
    out: str = MISSING  # a folder, new or empty
    dtype: str = "auto"  # of dense weights that are written: auto (the base's own) | float32 | bfloat16 | ...
    quantization: str = "mixed"  # merged, of a quantised base: mixed (changed layers dense) | none | same
    gguf: str = "model"  # of to=gguf: model (merged) | adapter
    limit: Optional[float] = None  # share of the adapter's effect that may be lost; None: 0.5 (same: any)
    hub: Optional[str] = None  # USER/NAME: uploaded there afterwards
    hub_private: Optional[bool] = None  # a new repository's visibility; None: as the account has it


@dataclass
class ServerConfig:
    """The group `server`: what `mlxft serve` listens on, and how much it takes on."""

    host: str = "127.0.0.1"  # the address it listens on; other machines reach 0.0.0.0
    port: int = 8080  # 0: one that is free
    api_key: Optional[str] = None  # what clients have to send; None: nothing. ${oc.env:NAME} keeps it unseen
    name: Optional[str] = None  # the model's for clients; None: model.path
    adapters: dict[str, str] = field(default_factory=dict)  # {name: folder}, mounted from the start
    any_template: bool = False  # true: adapters may have been trained with another chat template
    allow_mount: bool = True  # clients may mount and unmount adapters
    temperature: float = 0.0  # of requests that say none
    thinking: bool = False  # let the model think first where a request does not say
    default_tokens: int = 1024  # of an answer, at most, where a request does not say
    max_concurrent: int = 32  # answers in the making at once
    max_queue: int = 64  # more that may wait; beyond them a request gets 429
    max_choices: int = 8  # answers to one request (n)
    max_messages: int = 1024  # turns of one request
    max_body: float = 4.0  # MB of one request
    memory_limit: Any = "auto"  # GB of arrays, the model among them; auto: 0.9 of what is free
    prompt_cache: float = 0.5  # GB for what was computed of earlier prompts; 0: nothing is kept
    shutdown_s: float = 30.0  # seconds that answers have to end after a signal


@dataclass
class ServerKeys:
    """The group that only `mlxft serve` has."""

    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class ChatConfig:
    """The keys of `mlxft chat` beside those of the model and the adapter."""

    adapters: dict[str, str] = field(default_factory=dict)  # {name: folder}, for /adapter NAME
    system: Optional[str] = None  # a system turn; None: what the model's own template puts there
    max_tokens: int = 1024  # tokens of an answer, at most
    temperature: float = 0.7  # 0: always the likeliest token
    top_p: float = 1.0  # the share of probability that is drawn from
    seed: Optional[int] = None  # of the draws; None: by chance
    thinking: bool = False  # let the model think first, where its template knows how
    any_template: bool = False  # true: adapters may have been trained with another chat template


@dataclass
class QuantizeConfig:
    """The keys of `mlxft quantize` beside those of the model and the rows.

    data.train: what it calibrates on. data.valid: what the model is measured on, before and after.
    """

    to: str = field(default=MISSING, metadata={"rule": "to.quantize"})  # trellis | affine
    out: str = MISSING  # a folder, new or empty
    bits: int = 4  # a weight: trellis has 2, 3 and 4; affine 2, 3, 4, 5, 6 and 8
    rotate: bool = True  # of trellis: rotate inputs at random, which evens out what is hard to quantise
    block: Optional[int] = None  # of trellis: weights of a ring; None: 32 with data.train, else up to 256
    group_size: int = 64  # of affine: weights that share a scale
    calibration_rows: int = 32  # of data.train: how many of its rows are read
