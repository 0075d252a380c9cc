"""A configuration of mlx-lm as a recipe: the same run, and nothing of it lost without a word."""

import json

import pytest
import yaml

from mlxft.config import compose
from mlxft.config.migrate import migrate
from mlxft.errors import InputError
from tests.command import mlxft

FILE = """\
model: owner/name
train: true
data: rows
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw: {weight_decay: 0.1}
num_layers: 8
batch_size: 2
iters: 600
learning_rate: 1e-5
steps_per_report: 5
steps_per_eval: 100
grad_accumulation_steps: 4
save_every: 200
max_seq_length: 512
grad_checkpoint: true
mask_prompt: true
lora_parameters: {keys: [self_attn.q_proj, self_attn.v_proj], rank: 4, scale: 10.0, dropout: 0.1}
lr_schedule: {name: cosine_decay, warmup: 50, warmup_init: 1e-7, arguments: [2e-4, 100, 2e-5]}
report_to: wandb
"""


def written(here, text):
    (here / "lora_config.yaml").write_text(text)
    (here / "rows").mkdir(exist_ok=True)
    for split in ("train", "valid"):
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        (here / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here / "lora_config.yaml"


def test_every_setting_arrives_under_its_name_here(here):
    migrated = migrate(written(here, FILE))
    assert migrated.keys == {
        "model.path": "owner/name",
        "data.train": "rows/train.jsonl",
        "data.valid": "rows/valid.jsonl",
        "data.train_on": "last_assistant",
        "data.max_length": 512,
        "data.truncate": "right",
        "data.batch_size": 2,
        "trainer.max_steps": 150,  # 600 micro-batches, four a step
        "trainer.save_every": 50,
        "trainer.eval_every": 25,
        "trainer.accumulate": 4,
        "trainer.seed": 0,
        "trainer.gradient": "checkpoint",
        "trainer.clip_norm": 0.0,
        "run.dir": "adapters",
        "adapter.kind": "lora",
        "adapter.rank": 4,
        "adapter.alpha": 40.0,  # scale x rank
        "adapter.dropout": 0.1,
        "adapter.layers": "last 8",
        "adapter.targets": ["self_attn.q_proj", "self_attn.v_proj"],
        "optimizer.name": "adamw",
        "optimizer.lr": 2e-4,
        "optimizer.bias_correction": False,  # MLX's default
        "optimizer.weight_decay": 0.1,
        "schedule.name": "cosine",
        "schedule.warmup_steps": 50,
        "schedule.final_ratio": pytest.approx(0.1),
    }
    said = " ".join(migrated.notes)
    assert "warmup_init" in said and "wandb" in said and "steps_per_report" in said
    assert "ended" not in said  # 50 + 100 steps are the run's 150


def test_the_recipe_is_one_that_train_takes(here):
    file = written(here, FILE)
    done = mlxft("migrate", str(file))
    assert done.returncode == 0
    (here / "recipes").mkdir()
    (here / "recipes" / "mine.yaml").write_text(done.stdout)
    config = compose(["+recipe=mine", "model.path=owner/name"]).config
    assert (config.adapter.rank, config.trainer.max_steps, config.schedule.warmup_steps) == (4, 150, 50)
    assert done.stdout.startswith("# From ") and yaml.safe_load(done.stdout)["optimizer"]["lr"] == 2e-4


def test_what_a_file_leaves_out_stands_at_mlx_lms_default(here):
    keys = migrate(written(here, "model: owner/name\ndata: rows\n")).keys
    assert keys["optimizer.name"] == "adam" and keys["optimizer.bias_correction"] is False
    assert (keys["optimizer.lr"], keys["adapter.alpha"], keys["adapter.layers"]) == (1e-5, 160.0, "last 16")
    assert (keys["trainer.max_steps"], keys["data.train_on"]) == (1000, "all")
    assert keys["schedule.name"] == "constant"


@pytest.mark.parametrize(
    "line, said",
    [
        ("learning_rat: 1e-4", "did you mean learning_rate?"),
        ("optimizer: lion", "mlx-lm has no 'lion'"),
        ("optimizer_config: {adam: {beta: 1}}", "optimizer_config.adam: beta cannot be set here"),
        ("lr_schedule: {name: step_decay, arguments: [1, 0.9, 10]}", "step_decay with 3 arguments"),
        ("trust_remote_code: true", "never run here"),
        ("fine_tune_type: prefix", "none of lora, dora, full"),
        ("lora_parameters: {rank: 8, alpha: 16}", "mlx-lm has no alpha"),
        ("lora_parameters: {rank: many}", "lora_parameters.rank: 'many' is not a number"),
        ("lora_parameters: [1]", "lora_parameters: .* is no set of settings"),
        ("lr_schedule: 5", "lr_schedule: 5.* is no set of settings"),
        ("lr_schedule: {name: cosine_decay, arguments: [x, 10]}", "lr_schedule.arguments: 'x' is not a num"),
        ("lr_schedule: {name: cosine_decay, arguments: [0, 10]}", "begins with 0 trains nothing"),
        ("iters: abc", "iters: 'abc' is not a number"),
        ("iters: .nan", "iters: nan is not a number"),
        ("grad_accumulation_steps: 0", "it has to be at least 1"),
    ],
)
def test_what_has_no_counterpart_is_refused(here, line, said):
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        migrate(written(here, f"model: owner/name\ndata: rows\n{line}\n"))


@pytest.mark.parametrize(
    "text, said",
    [("- a\n", "holds no settings"), ("a: [\n", "not YAML"), ("model: &a [*a]\n", "a value holds itself")],
)
def test_a_file_that_is_no_configuration_ends_with_exit_code_2(here, text, said):
    done = mlxft("migrate", str(written(here, text)))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
