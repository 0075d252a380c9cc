"""OpenAI's and Anthropic's own clients against a live server."""

import json

import anthropic
import httpx
import openai
import pytest

from mlxft.serving.text import AnswerParts, StopStrings
from tests.serving.made import CALL, TOOL, events_of, make_caller, serving

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="module")
def server(folder, adapters):
    mounted = ",".join(f"{name}:{path}" for name, path in adapters.items())
    with serving(folder, f"server.adapters={{{mounted}}}") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    with serving(make_caller(tmp_path_factory.mktemp("caller"))) as server:
        yield server


def chat(client, **fields):
    usual = {"model": "local", "messages": HELLO, "max_tokens": 12}
    return client.chat.completions.create(**usual | fields)


def test_a_chat_is_answered_and_counted(client):
    answer = chat(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and len(choice.message.content) == 12
    assert choice.finish_reason == "length"
    prompt = len("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n") - 3 * len("<|im_start|>") + 4
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert 20 < answer.usage.prompt_tokens <= prompt + 12  # a byte a token, markup one


def test_a_stream_says_the_role_first_the_reason_last_and_then_the_usage(client):
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    *said, last = [chunk for chunk in chunks if chunk.choices]
    assert all(chunk.choices[0].finish_reason is None for chunk in said)
    assert last.choices[0].finish_reason == "length" and not last.choices[0].delta.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole
    assert len(said) > 3
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_ends_with_done_and_has_no_usage_unless_asked(server):
    body = {"messages": HELLO, "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert all("usage" not in event for event in events_of(answer.text))


def test_adapters_are_chosen_by_model_or_by_field(client):
    base, a, b = (chat(client, model=model).choices[0].message.content for model in ("local", "a", "b"))
    assert len({base, a, b}) == 3
    assert chat(client, extra_body={"adapter": "a"}).choices[0].message.content == a
    assert chat(client, model="b", extra_body={"adapter": "none"}).choices[0].message.content == base


def test_several_answers_differ_by_seed_and_come_again_with_it(client):
    one, other = (chat(client, n=3, seed=4, temperature=1.0) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert len(set(texts)) == 3 and texts == [choice.message.content for choice in other.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert one.usage.completion_tokens == 36


def test_log_probabilities_are_the_same_whole_and_streamed(client):
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = chat(client, **fields).choices[0].logprobs.content
    chunks = chat(client, stream=True, **fields)
    streamed = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert len(whole) == 12
    for entry, other in zip(whole, streamed, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4) and entry.logprob < 0
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode() == entry.token


def test_a_stop_string_across_tokens_is_left_out_whole_and_streamed(client):
    whole = chat(client).choices[0].message.content
    stop = whole[4:7]
    cut = chat(client, stop=stop)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in chat(client, stop=[stop], stream=True))
    assert streamed == whole[: whole.index(stop)]


def test_a_bias_forces_and_forbids_tokens(client):
    letter = "q"
    forced = chat(client, logit_bias={str(ord(letter) + 3): 100}).choices[0].message.content
    assert forced == letter * 12
    first = chat(client).choices[0].message.content[0]
    forbidden = chat(client, logit_bias={str(ord(first) + 3): -100}).choices[0].message.content
    assert first not in forbidden


def test_penalties_keep_tokens_from_coming_again(client):
    fields = {"presence_penalty": 2.0, "extra_body": {"repetition_penalty": 10.0, "top_k": 1}}
    text = chat(client, **fields).choices[0].message.content
    assert len(set(text)) > len(set(chat(client).choices[0].message.content))


def test_an_answer_holds_to_a_schema(client):
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    shorter = {"logit_bias": {str(ord(" ") + 3): -50, str(ord("\n") + 3): -50, str(ord("}") + 3): 5}}
    for seed in range(3):
        answer = chat(client, response_format=form, max_tokens=200, temperature=1.0, seed=seed, **shorter)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"n", "ok"} and isinstance(value["ok"], bool)
        assert answer.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="schema"):
        broken = {"name": "x", "schema": {"type": "nothing"}}
        chat(client, response_format={"type": "json_schema", "json_schema": broken})


def test_a_text_is_continued(client):
    answer = client.completions.create(model="local", prompt="abc", max_tokens=6, logprobs=1)
    assert len(answer.choices[0].text) == 6 and answer.usage.prompt_tokens == 3
    assert answer.choices[0].logprobs.tokens == list(answer.choices[0].text)
    chunks = client.completions.create(model="local", prompt="abc", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_the_models_are_the_base_and_its_adapters(client, folder):
    models = {model.id: model for model in client.models.list()}
    assert list(models) == [str(folder), "a", "b"]
    assert models["a"].parent == str(folder) and models["a"].context_window == 512
    assert (models["a"].reasoning, models["a"].input) == (False, ["text"])
    assert client.models.retrieve("local").id == str(folder)


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "no model 'gpt-4'"),
        ({"extra_body": {"adapter": "zz"}}, openai.NotFoundError, "no adapter 'zz'; mounted: a, b"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 600}, openai.BadRequestError, "512 positions"),
        ({"n": 9}, openai.BadRequestError, "more than the 8 allowed"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logprobs": "yes"}, openai.BadRequestError, "logprobs"),
        ({"top_logprobs": 2}, openai.BadRequestError, "needs logprobs"),
        ({"logit_bias": {"70000": 1}}, openai.BadRequestError, "no token 70000"),
        ({"logit_bias": {"007": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"tempreture": 1}}, openai.BadRequestError, "tempreture"),
        ({"tools": [TOOL]}, openai.BadRequestError, "no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "content"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_openai_s_form(client, fields, kind, said):
    with pytest.raises(kind, match=said) as refused:
        chat(client, **fields)
    assert refused.value.body["type"] and refused.value.body["message"]
    assert "Traceback" not in refused.value.response.text


def test_anthropic_s_client_gets_the_same_answer_whole_and_streamed(claude, client):
    expected = chat(client, model="a").choices[0].message.content
    fields = {"model": "a", "max_tokens": 12, "messages": HELLO}
    answer = claude.messages.create(**fields)
    assert [block.text for block in answer.content] == [expected]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    stop = expected[3:6]
    cut = claude.messages.create(stop_sequences=[stop], **fields)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_what_is_wrong_is_said_in_anthropic_s_form(claude):
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude'") as refused:
        claude.messages.create(model="claude", max_tokens=3, messages=HELLO)
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="512 positions"):
        claude.messages.create(model="local", max_tokens=600, messages=HELLO)


def test_a_tool_is_called_and_its_result_goes_back(caller):
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)
    fields = {"messages": WEATHER, "tools": [TOOL], "max_tokens": 100}
    choice = chat(client, **fields).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rom"}
    assert choice.message.content is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*WEATHER, choice.message.model_dump(exclude_none=True), result]
    assert chat(client, messages=turns, tools=[TOOL]).choices[0].finish_reason

    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **fields)]
    calls = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
    assert "".join(each.function.arguments for each in calls) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_without_tools_the_markup_is_text(caller):
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)
    choice = chat(client, messages=WEATHER, tools=[TOOL], tool_choice="none", max_tokens=100).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason != "tool_calls"


def test_a_tool_is_called_through_anthropic_s_client(caller):
    claude = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0)
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    fields = {"model": "local", "max_tokens": 100, "messages": WEATHER, "tools": [tool]}
    answer = claude.messages.create(**fields)
    (block,) = answer.content
    assert (answer.stop_reason, block.name, block.input) == ("tool_use", "weather", {"city": "Rom"})
    with claude.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.type, streamed.input) == ("tool_use", {"city": "Rom"})
    turns = [*WEATHER, {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id,
                                           "content": "sunny"}]}]  # fmt: skip
    assert claude.messages.create(**fields | {"messages": turns}).usage.input_tokens > 0


class Thinker:
    """A tokenizer's markup only: thoughts, and calls in JSON."""

    has_thinking, think_start, think_end = True, "<think>", "</think>"
    has_tool_calling, tool_call_start, tool_call_end = True, "<tool_call>", "</tool_call>"
    structural_markers, response_transitions, response_initial_state = None, {}, None

    def rfind_think_start(self, prompt):
        return max((place for place, token in enumerate(prompt) if token == 1), default=-1)

    def rfind_think_end(self, prompt):
        return max((place for place, token in enumerate(prompt) if token == 2), default=-1)

    def tool_parser(self, text, tools):
        return json.loads(text)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("prompt", "begin"), [([0], "<think>"), ([0, 1], "")])
def test_thoughts_words_and_calls_are_told_apart_however_the_text_is_cut(size, prompt, begin):
    text = f"{begin}hm < 3</think>Well.{CALL}{CALL}"
    parts, said = AnswerParts(Thinker(), prompt, [TOOL]), []
    said = [parts.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parts.finish()]
    assert "".join(each.reasoning for each in said) == "hm < 3"
    assert "".join(each.content for each in said) == "Well."
    calls = [call for each in said for call in each.calls]
    assert [call["name"] for call in calls] == ["weather"] * 2 and calls[0]["id"] != calls[1]["id"]


@pytest.mark.parametrize("broken", ["<tool_call>{nothing</tool_call>", '<tool_call>{"a": 1}</tool_call>'])
def test_markup_that_is_no_call_stays_text(broken):
    parts = AnswerParts(Thinker(), [0], [TOOL])
    said = [parts.feed(broken), parts.finish()]
    assert "".join(each.content for each in said) == broken and not any(each.calls for each in said)


def test_text_that_only_begins_like_a_stop_string_comes_in_the_end():
    stops = StopStrings(["END", "NEVER"])
    assert [stops.feed(text) for text in ("a E", "N", "X", " EN")] == ["a ", "", "ENX", " "]
    assert stops.rest() == "EN" and stops.hit is None
