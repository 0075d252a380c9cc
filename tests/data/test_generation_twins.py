"""Masks of real chat templates, found from their plain text, against copies of them with marks.

TRL's wheel has chat templates of many families, and twins of 31 of them in which {% generation %} marks what
the assistant says. The twin's marks tell which tokens are answers; here the plain template has to.

What the twins mark besides the answer and its end token is taken off before the two are compared: white space
around it, the header of the turn that a generation prompt gives, an empty think block or the opening of one
that the prompt may bring along, and what ALSO_MARKED names.
"""

import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxft.config.schema import DataConfig
from mlxft.data.chat import ChatEncoder
from mlxft.data.formats import ChatRow
from mlxft.data.load import load_examples
from mlxft.errors import InputError

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
NAMES = sorted(file.name.removesuffix("_training.jinja") for file in TEMPLATES.glob("*_training.jinja"))
SPECIAL = re.compile(
    r"<\|[^|>'\"{}]+\|>|<｜[^｜>]+｜>|<(?:start|end)_of_turn>|<bos>|\[/?INST\]|<end_of_utterance>|\[gMASK\]|<sop>"
    r"|<\|?(?:turn|channel|tool_call|tool_response|tool)\|?>"
)
ENDS = (
    *("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|return|>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "<turn|>", "<end_of_utterance>", "<|user|>"),
)
ALSO_MARKED = {
    # The token of the next turn, after the last answer: the plain template ends without it.
    "glm4moe": r"(<\|user\|>|<\|observation\|>)$",
    # The end of the text, after the end token and a line break of the template's own.
    "phi3": r"\n<\|endoftext\|>$",
    "phi3_5": r"\n<\|endoftext\|>$",
    # The end of a call's result.
    "deepseek_r1_distill": "^<｜tool▁outputs▁end｜>",
    "deepseekv3": "^<｜tool▁outputs▁end｜>",
    # Not marked by the twin, and what generation stops at after a call.
    "diffusion_gemma": r"<\|tool_response>$",
}


def call(name: str, **arguments) -> dict:
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, **more) -> dict:
    return {"role": "assistant", "content": text} | more


PLACE = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PLACE}}]
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "a key"}
TURNS = [message for n in range(6) for message in (user(f"Question {n}?"), said(f"Answer {n}."))]
CALLED = [user("Where?"), said("", tool_calls=[call("look", at="it")]), RESULT, said("A key.")]
CONVERSATIONS = {
    **{f"{n} turns": (TURNS[: 2 * n], None) for n in range(1, 7)},
    "system": ([{"role": "system", "content": "Be kind."}, *TURNS[:4]], None),
    "thinking": ([TURNS[0], said("Yes.", reasoning_content="I think.")], None),
    "thinking twice": (
        [TURNS[0], said("Yes.", reasoning_content="I think.")]
        + [TURNS[2], said("No.", reasoning_content="Again.")],
        None,
    ),
    "think tags": ([TURNS[0], said("<think>\nI think.\n</think>\n\nYes.")], None),
    "call": (CALLED, TOOLS),
    "call without a list of tools": (CALLED, None),
    "words and call": ([CALLED[0], said("I look.", tool_calls=[call("look", at="it")]), *CALLED[2:]], TOOLS),
    "two calls": (
        [CALLED[0], said("", tool_calls=[call("look", at="it"), call("look", at="there")])]
        + [RESULT, RESULT, CALLED[3]],
        TOOLS,
    ),
    "tools unused": (TURNS[:2], TOOLS),
}


def byte_tokenizer(template: str, special_of: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single bytes, and of the special tokens that stand in `special_of`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {*SPECIAL.findall(special_of), "<s>", "</s>"}
    if "<|end|>" in special and "eos_token" in special_of:  # Phi's
        special |= {"<|endoftext|>"}
    special = sorted(special)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    end = next((text for text in ("<|endoftext|>", *ENDS) if text in special), "</s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, chat_template=template
    )


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    """(name, a tokenizer with the plain template, one with its twin's)."""
    plain, twin = ((TEMPLATES / f"{request.param}{end}.jinja").read_text() for end in ("", "_training"))
    return request.param, byte_tokenizer(plain, plain), byte_tokenizer(twin, plain)


def runs(tokenizer, ids, mask) -> list[str]:
    """Returns the text of each run of marked tokens, without white space around it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, int), [0]])))
    texts = [tokenizer.decode(ids[a:b]).strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [text for text in texts if text]


def bare(text: str, name: str, prompt: str, twin_differs: bool) -> str:
    """Returns an answer without what only the twins mark."""
    text = re.sub(ALSO_MARKED.get(name, r"\Z"), "", text).strip()
    header, opens, _ = prompt.partition("<think>")
    text = text.removeprefix(header.strip()).strip()
    text = re.sub(r"^<think>\s*</think>\s*", "", text)
    if opens:
        text = re.sub(r"^<think>\s*", "", text)
    if twin_differs:  # thoughts of earlier turns, which the plain template leaves out
        text = re.sub(r"^(<think>)?((?!<think>).)*</think>\s*", "", text, flags=re.DOTALL)
    return text.strip()


def generation_prompt(tokenizer) -> str:
    texts = [
        tokenizer.apply_chat_template([user("Hi")], tokenize=False, add_generation_prompt=prompted)
        for prompted in (False, True)
    ]
    return texts[1][len(os.path.commonprefix(texts)) :]


def writes_calls(tokenizer) -> bool:
    try:
        return "look" in tokenizer.apply_chat_template(CALLED, tokenize=False)
    except Exception:  # one that takes no calls at all
        return False


def test_the_wheel_has_all_the_twins():
    assert len(NAMES) == 31


@pytest.mark.parametrize("messages, tools", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_what_a_plain_template_is_trained_on_equals_its_twins_marks(pair, messages, tools):
    name, plain, twin = pair
    encoder, row = ChatEncoder(plain), ChatRow(messages, tools, 0, "row")
    try:
        own = plain.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # whatever the template raises for what it doesn't take
        with pytest.raises(InputError, match="does not take this row"):
            encoder.encode(row, "assistant")
        return
    last = messages[-1]["content"].rpartition("</think>")[2].strip()
    if any(message.get("tool_calls") for message in messages) and not writes_calls(plain):
        with pytest.raises(InputError, match="tool calls need a template|writes nothing|leaves out the call"):
            encoder.encode(row, "assistant")  # the twin has an empty answer, or one without the call
        return
    if last not in own:  # a template of pictures, for contents that are lists of parts
        with pytest.raises(InputError, match="cannot find messages"):
            encoder.encode(row, "assistant")
        return
    made = encoder.encode(row, "assistant")
    own = plain.apply_chat_template(messages, tools=tools, return_dict=True)
    assert made.tokens.tolist() == own["input_ids"]
    marked = twin.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    differs = marked["input_ids"] != made.tokens.tolist()
    prompt = generation_prompt(plain)
    ours, theirs = (
        [text for run in found if (text := bare(run, name, prompt, differs))]
        for found in (
            runs(plain, made.tokens, made.mask),
            runs(twin, np.array(marked["input_ids"]), marked["assistant_masks"]),
        )
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma3", "qwen3_instruct_2507", "cohere2"])
@pytest.mark.parametrize("policy", ["right", "prompt_left"])
def test_a_row_that_is_cut_keeps_the_marks_of_what_is_left(name, policy, tmp_path):
    plain, twin = ((TEMPLATES / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
    marked = byte_tokenizer(twin, plain).apply_chat_template(
        TURNS[:6], return_dict=True, return_assistant_tokens_mask=True
    )
    whole = np.array(marked["input_ids"])
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": TURNS[:6]}) + "\n")
    tokenizer = byte_tokenizer(plain, plain)
    (full,), _ = load_examples(str(file), DataConfig(max_length=4096), tokenizer, 4096)
    assert np.array_equal(full.tokens, whole) and len(runs(tokenizer, full.tokens, full.mask)) == 3
    for length in range(len(whole) - 12, len(whole), 3):
        cfg = DataConfig(max_length=length, truncate=policy)
        (cut,), _ = load_examples(str(file), cfg, tokenizer, 4096)
        assert len(cut.tokens) <= length
        if policy == "right":
            assert np.array_equal(cut.tokens, whole[:length])
            assert np.array_equal(cut.mask, full.mask[:length])
        else:  # the prompt's left gives way, BOS stays, and every answer is whole
            assert runs(tokenizer, cut.tokens, cut.mask) == runs(tokenizer, full.tokens, full.mask)
