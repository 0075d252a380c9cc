"""Recipes: where they are found, what they say of themselves, and what is wrong with one, by line."""

import pytest

from mlxft.config import compose
from mlxft.config.recipes import description, find_recipe, find_recipes, read_recipe
from mlxft.errors import InputError
from mlxft.resources import folder

RECIPE = """\
# Shows nothing,
# and costs as much.

# Not part of the description.
model:
  path: owner/name
data:
  train: rows.jsonl
trainer:
  objective: sft
  max_steps: 100
optimizer.lr: 1e-3
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's ./recipes, with one recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "made_up.yaml").write_text(RECIPE)
    return tmp_path / "recipes"


def message(*overrides):
    with pytest.raises(InputError) as caught:
        compose(list(overrides))
    return str(caught.value)


def test_a_recipe_sets_its_keys_and_keeps_its_name():
    composed = compose(["+recipe=made_up"])
    assert composed.recipe == "made_up"
    assert composed.config.model.path == "owner/name"
    assert composed.config.trainer.max_steps == 100
    assert composed.config.optimizer.lr == 1e-3


@pytest.mark.parametrize("argument", ["+recipe=made_up", "recipe=made_up", "++recipe=made_up.yaml"])
def test_a_recipe_is_chosen_and_never_a_plain_value(argument):
    composed = compose([argument])
    assert composed.recipe == "made_up"
    assert composed.config.trainer.max_steps == 100


def test_a_file_chosen_by_name_keeps_the_objective_of_the_recipe():
    find_recipe("made_up").path.write_text(RECIPE.replace("objective: sft", "objective: orpo"))
    trainer = compose(["+recipe=made_up", "trainer=checkpoint"]).config.trainer
    assert (trainer.objective, trainer.gradient) == ("orpo", "checkpoint")
    assert compose(["+recipe=made_up", "trainer=[sft,whole]"]).config.trainer.objective == "sft"


def test_what_is_typed_wins_over_the_recipe_in_any_order():
    assert compose(["optimizer.lr=5", "+recipe=made_up"]).config.optimizer.lr == 5
    assert compose(["trainer.max_steps=null", "+recipe=made_up"]).config.trainer.max_steps is None


def test_a_file_chosen_by_name_wins_over_the_recipe(own):
    (own / "made_up.yaml").write_text(RECIPE + "adapter: {rank: 4, dropout: 0.1}\nschedule: {name: linear}\n")
    made = compose(["+recipe=made_up", "adapter=full", "schedule=constant"]).config
    assert (made.adapter.kind, made.adapter.rank, made.adapter.dropout) == ("full", None, 0.0)
    assert made.schedule.name == "constant"


def test_recipes_of_two_folders_do_not_mix(own, tmp_path, monkeypatch):
    assert compose(["+recipe=made_up"]).recipe == "made_up"
    monkeypatch.chdir(own)
    assert "'made_up' does not exist" in message("+recipe=made_up")


def test_the_users_recipe_wins_over_one_of_the_same_name():
    names = [path.stem for path in folder("recipes").glob("*.yaml")]
    assert set(names) <= set(find_recipes())
    for name in names:
        own_file = find_recipe("made_up").path.parent / f"{name}.yaml"
        own_file.write_text(RECIPE)
        assert compose([f"+recipe={name}"]).config.trainer.max_steps == 100


def test_an_unknown_recipe_is_refused_with_the_nearest_and_the_list():
    text = message("+recipe=made_upp")
    assert "'made_upp' does not exist; did you mean made_up? there is " in text
    assert "has a problem" in text, "that keys are missing as well is not worth saying"


def test_two_recipes_are_one_too_many(own):
    (own / "other.yaml").write_text(RECIPE)
    assert "one run has one recipe" in message("+recipe=made_up", "+recipe=other")


@pytest.mark.parametrize("name", ["my-recipe.v2", "two words"])
def test_a_recipe_may_have_any_plain_file_name(own, name):
    (own / f"{name}.yaml").write_text(RECIPE)
    assert compose([f"+recipe={name}"]).recipe == name


def test_the_description_is_the_first_comment():
    assert description(find_recipe("made_up")) == "Shows nothing, and costs as much."


@pytest.mark.parametrize(
    "body, words",
    [
        ("trainer:\n  lrr: 1\n", "trainer.lrr (recipes/made_up.yaml:2): there is no such key; did you mean"),
        (
            "a: 1\nlearning_rate: 1\n",
            "learning_rate (recipes/made_up.yaml:2): there is no such key; here it is opt",
        ),
        (
            "optimizer:\n  name: adamw\n  lr: fast\n",
            "optimizer.lr (recipes/made_up.yaml:3): 'fast' is not a number",
        ),
        ("\noptimizer.lr: -1\n", "optimizer.lr (recipes/made_up.yaml:2): -1.0 is out of range"),
        (
            "data:\n  train: nowhere.jsonl\n",
            "data.train (recipes/made_up.yaml:2): there is no file nowhere.jsonl",
        ),
        ("trainer: 3\n", "trainer (recipes/made_up.yaml:1): this is a group of keys"),
        ("recipe: other\n", "recipe (recipes/made_up.yaml:1): this is no key"),
        ("foo: {}\n", "foo (recipes/made_up.yaml:1): there is no such key"),
        ("hydra: {run: {dir: x}}\n", "hydra (recipes/made_up.yaml:1): a recipe has no settings of Hydra"),
        ("defaults: [base]\n", "defaults (recipes/made_up.yaml:1): a recipe has no list of defaults"),
        ("model:\n  _target_: os.system\n", "model._target_ (recipes/made_up.yaml:2): there is no such key"),
        (
            "trainer:\n  seed: 1\n  seed: 2\n",
            "recipes/made_up.yaml:3: trainer.seed is set here and in line 2; keep one of them",
        ),
        ("trainer: {seed: 1}\ntrainer: {keep: 2}\n", "recipes/made_up.yaml:2: this is not YAML: found dupl"),
        (
            "optimizer.lr: 1\noptimizer:\n  eps: 1\n  lr: 2\n",
            "recipes/made_up.yaml:4: optimizer.lr is set here and in line 1; keep one of them",
        ),
        (
            "data: {columns: {prompt: a}}\ndata.columns.prompt: b\n",
            "recipes/made_up.yaml:2: data.columns.prompt is set here and in line 1",
        ),
        ("optimizer: 3\noptimizer.lr: 1\n", "recipes/made_up.yaml:2: optimizer is set here and in line 1"),
        ("model: {path: a\ntrainer: 3\n", "recipes/made_up.yaml:2: this is not YAML"),
        ("trainer:\n\tseed: 1\n", "recipes/made_up.yaml:2: this is not YAML"),
        ("- a\n", "recipes/made_up.yaml:1: a recipe is a dictionary"),
        ("model:\n  path: ${a.b\n", "recipes/made_up.yaml:2: '${a.b' is not an interpolation"),
        ("model:\n  path: ${no.such}\n", "model.path (recipes/made_up.yaml:2): '${no.such}' leads nowhere"),
        ("trainer: {seed: '${trainer.keep}', keep: '${trainer.seed}'}\n", "leads nowhere: Recursive"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_told_by_file_and_line(own, body, words):
    (own / "made_up.yaml").write_text(body)
    assert words in message("+recipe=made_up")


@pytest.mark.parametrize(
    "body, words",
    [("mask_prompt: true\n", "data.train_on"), ("clear_cache_threshold: 0\n", "there is no such key")],
    ids=["mask_prompt", "clear_cache_threshold"],
)
def test_a_key_that_nothing_reads_is_refused_in_a_recipe_too(own, body, words):
    (own / "made_up.yaml").write_text(body)
    said = message("+recipe=made_up")
    assert "recipes/made_up.yaml:1" in said and body.partition(":")[0] in said and words in said


def test_a_recipe_that_is_not_text_is_refused(own):
    (own / "made_up.yaml").write_bytes(b"\xff\xfe\x00")
    assert "recipes/made_up.yaml: this is not text in UTF-8" in message("+recipe=made_up")


def test_problems_of_recipe_and_command_line_are_told_together(own):
    (own / "made_up.yaml").write_text(RECIPE + "schedule: {nam: linear}\n")
    text = message("+recipe=made_up", "trainer.lrr=1", "optimizer.lr=fast")
    assert "3 problems" in text
    assert "schedule.nam (recipes/made_up.yaml:13)" in text
    assert "  optimizer.lr: 'fast'" in text, "the value is the command line's, so no line is named"


def test_a_broken_recipe_does_not_disturb_the_others(own):
    (own / "broken.yaml").write_text("model: {path: a\n")
    assert compose(["+recipe=made_up"]).recipe == "made_up"
    assert {"broken", "made_up"} <= set(find_recipes())


def test_dotted_and_nested_keys_of_one_group_go_together(own):
    (own / "made_up.yaml").write_text(RECIPE + "optimizer.eps: 1e-6\nschedule:\nschedule.name: linear\n")
    made = compose(["+recipe=made_up"]).config
    assert (made.optimizer.eps, made.schedule.name) == (1e-6, "linear")


def test_an_empty_recipe_sets_nothing(own):
    (own / "empty.yaml").write_text("# Nothing.\n")
    assert read_recipe(find_recipe("empty")).values == {}
    assert "model.path: it is missing" in message("+recipe=empty")


def test_every_recipe_that_comes_with_mlxft_passes_the_check_and_is_described():
    for path in folder("recipes").glob("*.yaml"):
        assert compose([f"+recipe={path.stem}"]).recipe == path.stem
        assert description(find_recipe(path.stem))


def test_a_folder_among_the_recipes_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "mine.yaml").mkdir(parents=True)
    assert "mine" not in find_recipes()


def test_an_anchor_that_contains_itself_is_explained(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir(exist_ok=True)
    (tmp_path / "recipes" / "loop.yaml").write_text("model: &a {path: *a}\n")
    with pytest.raises(InputError, match="an anchor .* contains itself"):
        compose(["+recipe=loop"])


def test_an_argument_that_is_not_utf8_is_explained():
    with pytest.raises(InputError, match="not text in UTF-8"):
        compose(["model.path=caf\udce9", "data.train=a.jsonl"])
