"""Small real tokenizers with chat templates of the kinds that models come with."""

import json

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "What is the name of the sea? The name of the sea is the Baltic. ",
    "Tell me about tea and the time it takes. Tea takes three minutes. ",
    "hello there, and hello again: one two three four five six seven",
] * 4

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
)

TEMPLATES = {
    "chatml": "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT,
    # A system turn of its own where the conversation has none.
    "default_system": (
        "{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are Stock.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
    ),
    # BOS in the template, content stripped.
    "headers": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
    ),
    # Another name for the assistant, turns closed by a token that is not EOS, strict order.
    "model_role": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Turns must alternate') }}{% endif %}"
        "{{ '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
        "{{ '</turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    # Thinking of earlier turns dropped; an empty think block put into the last answer without thinking.
    "thinking": (
        LAST_USER + "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% set parts = m['content'].split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
        "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
        "{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
        "{{ answer + '<|im_end|>\n' }}{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT + ""
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    ),
    # A prompt that opens a think block which the whole text does not have.
    "opens_thinking": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}{{ '<|bot|>' + m['content'].split('</think>')[-1] + '<|stop|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|><think>\n' }}{% endif %}"
    ),
    # Marks around the answer but not around its end token.
    "marked": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    ),
    # Marks that take in a think block, although a prompt may bring it along.
    "marked_thinking": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ '<think></think>' + m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT + ""
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{ '<think></think>' }}{% endif %}"
    ),
    # Marks that take in the newline after the end token.
    "marked_wide": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    ),
    # Tools as JSON in a system turn, calls as JSON in the answer.
    "tools": (
        "{% if tools %}{{ '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
        "{% for call in m['tool_calls'] or [] %}"
        "{{ '<call>' + call['function'] | tojson + '</call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
    ),
    # A call's result written into the turn of the call, which goes on with the next answer.
    "folded_tools": (
        LAST_USER + "{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '<turn>user\\n' + m['content'] + '</turn>\\n' }}"
        "{% elif m['role'] == 'assistant' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}"
        "{{ '<turn>model\n' }}{% endif %}"
        "{% if m['thought'] and loop.index0 > ns.last %}"
        "{{ '<think>' + m['thought'] + '</think>' }}{% endif %}"
        "{% for call in m['tool_calls'] or [] %}{{ '<call>' + call['function']['name'] + '</call><result>' }}"
        "{% endfor %}{% if m['tool_calls'] %}{% if not loop.last %}"
        "{{ messages[loop.index0 + 1]['content'] + '</result>' }}{% endif %}"
        "{% else %}{{ m['content'] }}"
        "{% if loop.last or messages[loop.index0 + 1]['role'] == 'user' %}"
        "{{ '</turn>\n' }}{% endif %}"
        "{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<turn>model\n' }}{% endif %}"
    ),
    # No generation prompt: an answer follows the question's mark, words after a space and calls without.
    # Turns must alternate but for calls and results, and tools stand before the last question.
    "unprompted": (
        LAST_USER + "{{ bos_token }}{% set plain = namespace(count=0) %}{% for m in messages %}"
        "{% if m['role'] != 'tool' and not m['tool_calls'] %}"
        "{% if (m['role'] == 'user') != (plain.count % 2 == 0) %}"
        "{{ raise_exception('Turns must alternate') }}{% endif %}"
        "{% set plain.count = plain.count + 1 %}{% endif %}"
        "{% if m['role'] == 'user' %}"
        "{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' if tools and loop.index0 == ns.last else '' }}"
        "{{ '<turn>' + m['content'] + '</turn>' }}"
        "{% elif m['tool_calls'] %}{{ '[CALLS] [' }}{% for call in m['tool_calls'] %}"
        "{{ call['function'] | tojson }}{% endfor %}{{ ']' + eos_token }}"
        "{% elif m['role'] == 'tool' %}{{ '<result>' + m['content'] + '</result>' }}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    # Turns that nothing closes.
    "unclosed": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    # Turns that nothing closes, with a think block that a prompt brings along when thinking is off.
    "unclosed_thinking": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
        "{{ '<think>' + (m['thought'] or '') + '</think>' }}{% endif %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
        "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
    ),
    # The user's turns closed, the assistant's not.
    "half_closed": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
        "{{ '<|end|>' if m['role'] == 'user' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    # A mark of the template's own, then the token that stops generation.
    "two_ends": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
        "{{ eos_token if m['role'] == 'assistant' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    # A prompt that is longer with thinking off; the text is as if it were off.
    "two_prompts": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
        "{{ '\n' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
    ),
    # A token before the answer that swallows the white space after it.
    "swallowing": (
        "{% for m in messages %}{{ '<|wide|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|wide|>' }}{% endif %}"
    ),
    # What the assistant said is written once more into the user's next turn.
    "echo": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'user' and not loop.first %}"
        "{{ '(you said: ' + messages[loop.index0 - 1]['content'] + ') ' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    ),
    # The last turn first.
    "backwards": "{% for m in messages | reverse %}" + TURN + "{% endfor %}" + PROMPT,
    # Marks around the last answer only.
    "marked_last": (
        "{% for m in messages %}{% if loop.last %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    ),
    # Another token before more turns than at the very end, and a channel that the model itself writes.
    "channels": (
        LAST_USER + "{% for m in messages %}{% if m['thought'] and loop.index0 > ns.last %}"
        "{{ '<|start|>assistant<|channel|>thought<|message|>' + m['thought'] + '<|end|>' }}{% endif %}"
        "{{ '<|start|>' + m['role'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
        "{{ '<|message|>' + m['content'] }}"
        "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    ),
    # Plain words for roles, so that a token may span the seam before an answer.
    "words": (
        "{% for m in messages %}{{ 'Bot: ' if m['role'] == 'assistant' else 'Me: ' }}{{ m['content'] }}"
        "{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}"
    ),
    # Leaves out what the assistant says.
    "silent": (
        "{% for m in messages %}{% if m['role'] == 'user' %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    ),
}

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>",
    "<|user|>", "<|assistant|>", "<|bot|>", "<|stop|>", "<result>", "</result>", "<|start|>", "<|end|>",
    "<|return|>", "<|channel|>", "<|message|>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<call>", "</call>")


def build(template=None, adds_bos=False, adds_eos=False, pad="</s>", eos="</s>", drops=None, trims=False):
    """Returns a byte-level BPE tokenizer of about 400 tokens, which ignores the character `drops`.

    trims: white space at the ends of a token is not among its characters.
    """
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_special_tokens([AddedToken("<|wide|>", special=True, normalized=False, rstrip=True)])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    single = ("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else "")
    ends = [(token, inner.token_to_id(token)) for token in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    if trims:
        trimming = processors.ByteLevel(trim_offsets=True, add_prefix_space=False)
        inner.post_processor = processors.Sequence([trimming, inner.post_processor])
    if drops:
        inner.normalizer = normalizers.Replace(drops, "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token=pad)
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    """Returns a function with the arguments of `build`; the same ones give the same tokenizer."""
    made = {}

    def make(*args, **kwargs):
        key = (args, tuple(sorted(kwargs.items())))
        if key not in made:
            made[key] = build(*args, **kwargs)
        return made[key]

    return make


@pytest.fixture(scope="session")
def trained_text():
    """Returns a function (tokenizer, tokens, mask) -> the text of each run of trained tokens."""

    def text(tokenizer, tokens, mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        return [tokenizer.decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    return text


@pytest.fixture
def write_rows(tmp_path):
    """Returns a function (rows, name="rows.jsonl") -> path of a file of JSON lines; a row may be raw text."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
