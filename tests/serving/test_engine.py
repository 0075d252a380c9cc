"""The engine: rows of one batch stay apart, adapters come and go, places and memory are counted."""

import json
import queue

import mlx.core as mx
import pytest

from mlxft.config import compose
from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.evaluation.command import evaluate_config
from mlxft.models import load
from mlxft.models.adapters import load_adapter, save_adapter
from mlxft.models.lora import apply_adapter
from mlxft.serving.engine import Limits, load_engine
from mlxft.serving.requests import Refused, Request
from mlxft.serving.sampling import Sampling
from tests.evaluation.made import randomise
from tests.serving.made import ask

PROMPT = list(range(70, 90))
NO_PROMPTS_KEPT = Limits(prompt_cache_bytes=0)


@pytest.fixture(scope="module")
def engine(folder, adapters):
    engine = load_engine(folder, limits=NO_PROMPTS_KEPT).start()
    for name, adapter in adapters.items():
        engine.mount(name, [str(adapter)])
    yield engine
    engine.stop()


def plain_logprobs(folder, adapter, tokens, first):
    """Scores tokens[first:] by the plain forward of a model that has the adapter to itself."""
    model, _ = load(str(folder))
    if adapter is not None:
        load_adapter(model, adapter)
    logits = model(mx.array([tokens]))[0, first - 1 : -1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(logprobs, mx.array(tokens[first:])[:, None], axis=-1)[:, 0].tolist()


@pytest.mark.parametrize("name", [None, "a", "b"])
def test_log_probabilities_are_those_of_a_model_with_that_adapter_alone(engine, folder, adapters, name):
    (answer,) = ask(engine, {"adapter": name})
    expected = plain_logprobs(folder, adapters.get(name), PROMPT + answer.ids, len(PROMPT))
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_base_and_two_adapters_in_one_batch_answer_as_each_alone(engine):
    wanted = [{"adapter": None}, {"adapter": "a"}, {"adapter": "b"}, {"adapter": "a", "prompt": PROMPT[:7]}]
    alone = [ask(engine, each)[0] for each in wanted]
    together = ask(engine, *wanted)
    assert [each.text for each in together] == [each.text for each in alone]
    assert len({each.text for each in alone}) == 4
    for one, other in zip(alone, together, strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_once_adapters_are_unmounted_log_probabilities_are_the_base_s_to_the_bit(folder, adapters):
    engine = load_engine(folder, limits=NO_PROMPTS_KEPT).start()
    try:
        (before,) = ask(engine, {})
        engine.mount("a", [str(adapters["a"])])
        (with_a,) = ask(engine, {"adapter": "a"})
        (beside,) = ask(engine, {})
        assert engine.unmount("a")
        (after,) = ask(engine, {})
        assert with_a.logprobs != before.logprobs
        assert beside.logprobs == after.logprobs == before.logprobs
        with pytest.raises(Refused, match="no adapter 'a'"):
            ask(engine, {"adapter": "a"})
    finally:
        engine.stop()


def test_another_adapter_mounted_under_the_same_name_gets_no_prompts_of_the_first(folder, adapters):
    engine = load_engine(folder).start()
    try:
        engine.mount("x", [str(adapters["a"])])
        (first,) = ask(engine, {"adapter": "x"})
        engine.unmount("x")
        engine.mount("x", [str(adapters["b"])])
        (second,) = ask(engine, {"adapter": "x"})
        expected = plain_logprobs(folder, adapters["b"], PROMPT + second.ids, len(PROMPT))
        assert second.end.cached_tokens == 0 and first.text != second.text
        assert second.logprobs == pytest.approx(expected, abs=1e-4)
    finally:
        engine.stop()


def test_dora_is_applied_row_by_row_too(engine, folder, tmp_path):
    model, _ = load(str(folder))
    config = AdapterConfig(kind="dora", rank=4, alpha=8.0)
    apply_adapter(model, config, 3)
    randomise(model, 3, 0.3)
    save_adapter(tmp_path / "dora", model, config, str(folder))
    engine.mount("dora", [str(tmp_path / "dora")])
    try:
        answers = ask(engine, {"adapter": "dora"}, {"adapter": None}, {"adapter": "a"})
        expected = plain_logprobs(folder, tmp_path / "dora", PROMPT + answers[0].ids, len(PROMPT))
        assert answers[0].logprobs == pytest.approx(expected, abs=1e-4)
        assert answers[1].text == ask(engine, {})[0].text
    finally:
        engine.unmount("dora")


def test_what_changes_more_than_linear_layers_is_refused_with_what_to_do(engine, folder, tmp_path):
    model, _ = load(str(folder))
    config = AdapterConfig(rank=4, alpha=8.0, modules_to_save=["norm"])
    apply_adapter(model, config, 3)
    save_adapter(tmp_path / "more", model, config, str(folder))
    with pytest.raises(InputError, match="to=merged"):
        engine.mount("more", [str(tmp_path / "more")])
    assert engine.residents.get("more") is None
    assert ask(engine, {"adapter": "a"})[0].text  # the others are in place again


def test_served_log_probabilities_are_what_eval_says_of_the_same_tokens(engine, folder, adapters, tmp_path):
    (answer,) = ask(engine, {"adapter": "a"})
    mask = [0] * len(PROMPT) + [1] * len(answer.ids)
    row = {"input_ids": PROMPT + answer.ids, "completion_mask": mask}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    overrides = [f"model.path={folder}", f"data.valid={tmp_path}/rows.jsonl", "data.format=tokens"]
    config = compose([*overrides, f"adapter.init_from={adapters['a']}"], command="eval").config
    loss = evaluate_config(config).as_dict()["loss"]
    assert -sum(answer.logprobs) / len(answer.logprobs) == pytest.approx(loss, abs=1e-4)


def test_a_kept_prompt_changes_nothing_but_the_time(folder, engine):
    keeping = load_engine(folder).start()
    try:
        (first,), (again,) = ask(keeping, {}), ask(keeping, {})
        assert (first.end.cached_tokens, again.end.cached_tokens) == (0, len(PROMPT) - 1)
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)
        longer = PROMPT + again.ids + [80, 81]
        (on,) = ask(keeping, {"prompt": longer})
        assert on.end.cached_tokens >= len(PROMPT) + len(again.ids) - 1
        assert on.logprobs == pytest.approx(ask(engine, {"prompt": longer})[0].logprobs, abs=1e-4)
    finally:
        keeping.stop()


def test_a_seed_draws_the_same_whatever_shares_the_batch(engine):
    drawn = {"sampling": Sampling(temperature=1.0, seed=7, top_p=0.95)}
    other = {"sampling": Sampling(temperature=1.0, seed=8, top_p=0.95)}
    (alone,) = ask(engine, drawn)
    first, _, _, last = ask(engine, drawn, other, {"adapter": "b"}, drawn)
    assert first.ids == last.ids == alone.ids
    assert ask(engine, other)[0].ids != alone.ids


def test_draws_follow_the_model_s_probabilities(engine):
    """Of 160 first tokens at temperature 1 the likeliest is drawn about as often as it is likely."""
    (greedy,) = ask(engine, {"max_tokens": 1})
    chance = 2.718281828 ** greedy.logprobs[0]
    drawn = []
    for begin in range(0, 160, 32):
        draws = [Sampling(temperature=1.0, seed=seed) for seed in range(begin, begin + 32)]
        seeds = [{"max_tokens": 1, "sampling": each} for each in draws]
        drawn += [answer.ids[0] if answer.ids else None for answer in ask(engine, *seeds)]
    share = drawn.count(greedy.ids[0]) / len(drawn)
    assert abs(share - chance) < 4 * (chance * (1 - chance) / len(drawn)) ** 0.5  # four standard errors


def test_the_likeliest_tokens_come_first_and_sum_to_less_than_one(engine):
    events: queue.Queue = queue.Queue()
    engine.submit(Request(PROMPT, 3, events.put, num_top=5))
    tokens = [token for _ in range(3) for token in events.get(timeout=20).tokens]
    for token in tokens:
        values = [value for _, value in token.top]
        assert values == sorted(values, reverse=True) and len(values) == 5
        assert token.top[0] == (token.id, token.logprob)  # greedy
        assert sum(2.718281828**value for value in values) < 1


@pytest.mark.parametrize("begin", [0, 3, 9])
def test_a_stop_string_ends_the_answer_before_it(engine, begin):
    (whole,) = ask(engine, {})
    stop = whole.text[begin : begin + 3]
    (cut,) = ask(engine, {"stop": ["never", stop]})
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.end.reason, cut.end.stopped_by) == ("stop", stop)
    assert engine.num_active == 0


def test_a_request_that_is_given_up_leaves_its_place_and_the_others_go_on(engine):
    given_up, kept = queue.Queue(), queue.Queue()
    long = Request(PROMPT, 450, given_up.put)
    engine.submit(long, Request(PROMPT, 30, kept.put))
    given_up.get(timeout=20)
    engine.cancel(long)
    pieces = []
    while True:
        event = kept.get(timeout=20)
        if hasattr(event, "reason"):
            break
        pieces.append(event.text)
    assert "".join(pieces) == ask(engine, {"max_tokens": 30})[0].text
    assert engine.num_active == engine.num_waiting == 0


def test_an_adapter_unmounted_while_it_answers_answers_to_the_end(folder, adapters):
    engine = load_engine(folder, limits=NO_PROMPTS_KEPT).start()
    try:
        engine.mount("a", [str(adapters["a"])])
        (expected,) = ask(engine, {"adapter": "a", "max_tokens": 60})
        events: queue.Queue = queue.Queue()
        engine.submit(Request(PROMPT, 60, events.put, adapter="a"))
        text = events.get(timeout=20).text
        engine.unmount("a")
        while not hasattr(event := events.get(timeout=20), "reason"):
            text += event.text
        assert text == expected.text
        assert ask(engine, {})[0].text != expected.text[:16]
    finally:
        engine.stop()


def test_what_memory_cannot_hold_is_refused_before_it_starts(folder):
    engine = load_engine(folder, limits=Limits(memory_limit=0.002, prompt_cache_bytes=0)).start()
    try:
        # 4 blocks x 2 heads x 16 numbers x 4 bytes, keys and values: 1 KiB a token, and half more for growth
        with pytest.raises(Refused, match="ask for fewer") as refused:
            ask(engine, {"max_tokens": 480})
        assert refused.value.code == "context_over_budget"
    finally:
        engine.stop()


def test_requests_that_do_not_fit_at_once_wait_for_each_other(folder):
    roomy = load_engine(folder, limits=NO_PROMPTS_KEPT)
    one = roomy._plan.row_bytes(36)
    held = mx.get_active_memory()
    engine = load_engine(
        folder, limits=Limits(memory_limit=(held * 2 + 2.5 * one) / 1e9, prompt_cache_bytes=0)
    )
    most = []
    engine._room = int(2.5 * one)
    engine.start()
    try:
        insert = engine._insert

        def counted(request):
            insert(request)
            most.append(engine.num_active)

        engine._insert = counted
        answers = ask(engine, *[{}] * 6)
        assert len({answer.text for answer in answers}) == 1 and max(most) == 2
    finally:
        engine.stop()


def test_too_long_and_empty_prompts_and_too_many_requests_are_refused(folder):
    engine = load_engine(folder, limits=Limits(max_concurrent=1, max_queue=1)).start()
    try:
        with pytest.raises(Refused, match="512 positions"):
            ask(engine, {"max_tokens": 493})
        with pytest.raises(Refused, match="no token"):
            ask(engine, {"prompt": []})
        with pytest.raises(Refused, match="too many requests"):
            ask(engine, {}, {}, {})
        assert len(ask(engine, {}, {})) == 2
    finally:
        engine.stop()
    with pytest.raises(Refused, match="shutting down"):
        ask(engine, {})
