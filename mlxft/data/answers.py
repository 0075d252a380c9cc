"""Finds the tokens of an assistant's turn in a rendered conversation.

A span begins where the generation prompt ends and ends with the token that closes the turn. Where
the template marks answers ({% generation %}), its marks are taken. Else prefixes alone do not give
the span: a template may strip an answer, drop the thinking of earlier turns, or put into the prompt
what the whole text does not have. So the conversation is rendered once more with the answer replaced
by a mark: what differs is what the answer brought in.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from mlxft.data.formats import ChatRow
from mlxft.data.template import (
    FIRST_MARK,
    ChatTemplate,
    Refused,
    Rendered,
    has_marks,
    shared_prefix,
    shared_suffix,
)

_GENERATION_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_PLAIN = {"role", "content"}

Span = tuple[int, int]  # first and last token


@dataclass(frozen=True)
class Words:
    """What one message put into the text.

    start, end: the characters that depend on it. whole: its tool calls are among them; where not,
    only `start` is known, and `end` equals it.
    """

    start: int
    end: int
    whole: bool


def find_answers(
    template: ChatTemplate, row: ChatRow, rendered: Rendered, turns: list[int]
) -> dict[int, Span | None]:
    """Returns {turn: its span} for the given turns of the assistant; None where it cannot be told.

    turns: places in `row.messages`. rendered: the whole conversation.
    """
    marked = _marked_spans(template, row, rendered)
    if marked:
        return {turn: marked[turn] for turn in turns}
    plain = plain_words(template, row, rendered.text)
    return {
        turn: _find_span(template, row, rendered, turn, plain[turn] if plain else None) for turn in turns
    }


def plain_words(template: ChatTemplate, row: ChatRow, text: str) -> list[Words] | None:
    """Returns what each message put into the text, without rendering it again; None where that needs more.

    Where the text is what the template writes around the turns of any conversation of these roles, with
    this one's contents in between, each content as it stands or stripped, those are the words.
    """
    if row.tools or any(message.keys() != _PLAIN for message in row.messages):
        return None
    pieces = template.pieces(tuple(message["role"] for message in row.messages))
    if pieces is None or not text.startswith(pieces[0]) or has_marks(text):
        return None
    words, end = [], len(pieces[0])
    for message, piece in zip(row.messages, pieces[1:], strict=True):
        start = end
        for content in (message["content"], message["content"].strip()):
            end = start + len(content)
            if content and text.startswith(content, start) and text.startswith(piece, end):
                break
        else:
            return None
        words.append(Words(start, end, True))
        end += len(piece)
    return words if end == len(text) else None


def _marked_spans(template: ChatTemplate, row: ChatRow, rendered: Rendered) -> dict[int, Span]:
    """Returns {turn: its span} by the template's own marks; empty where it does not mark every answer."""
    source = template.inner.chat_template and template.inner.get_chat_template(None, row.tools)
    if not source or not _GENERATION_MARKS.search(source):
        return {}
    wrapped = template.tokenizer is not template.inner  # mlx-lm's wrapper sets the thinking by itself
    setting = {"enable_thinking": template.tokenizer.has_thinking} if wrapped else {}
    marked = template.inner.apply_chat_template(
        row.messages, tools=row.tools, return_dict=True, return_assistant_tokens_mask=True, **setting
    )
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked["assistant_masks"], [0]])))
    runs = [(int(begin), int(end) - 1) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    turns = [place for place, message in enumerate(row.messages) if message["role"] == "assistant"]
    if len(runs) != len(turns) or not np.array_equal(marked["input_ids"], rendered.tokens):
        return {}
    return {
        turn: (first, _close_run(template, rendered, first, last))
        for turn, (first, last) in zip(turns, runs, strict=True)
    }


def _close_run(template: ChatTemplate, rendered: Rendered, first: int, last: int) -> int:
    """Returns the end token of a marked run: its last one before white space, or the one right after."""
    tokens = rendered.tokens.tolist()

    def is_blank(place: int) -> bool:
        return not rendered.text_of(place, place).strip()

    place = last
    while place > first and is_blank(place):
        place -= 1
    if tokens[place] in template.end_ids or tokens[place] in template.special_ids:
        return place
    place = last + 1
    while place < len(tokens) and is_blank(place):
        place += 1
    return place if place < len(tokens) and tokens[place] in template.end_ids else last


def _find_span(
    template: ChatTemplate, row: ChatRow, rendered: Rendered, turn: int, words: Words | None
) -> Span | None:
    words = words or _find_words(template, row, rendered.text, turn)
    if words is None:
        return None
    if not words.whole and row.messages[turn].get("tool_calls") and not any(template.prompts):
        start = _find_opening(template, row, rendered.text, turn)
        if start is None:
            return None
        words = replace(words, start=start, end=start)
    bound = len(rendered.tokens)
    if turn + 1 < len(row.messages) and (not words.whole or row.messages[turn].get("tool_calls")):
        # Some templates write a call's result into the turn of the call: stop before the next message.
        following = _find_words(template, row, rendered.text, turn + 1)
        if following is None:
            return None
        bound = rendered.token_after(following.start)
    last = _find_last(template, rendered, words, bound)
    if last is None:
        return None
    start = _find_start(template, rendered, words)
    first = rendered.token_after(start)
    if first < len(rendered.tokens) and rendered.offsets[first, 0] < start:
        # A token across the seam holds some of the answer and is trained, unless it is the template's own.
        first += int(rendered.tokens[first]) in template.added_ids
    return first, last


def _find_words(template: ChatTemplate, row: ChatRow, text: str, turn: int) -> Words | None:
    """Returns what changes in the text when messages[turn] says something else."""
    mark = next(chr(code) for code in range(FIRST_MARK, 0x10FFFF) if chr(code) not in text)
    message = row.messages[turn]
    plain = {"role": message["role"], "content": mark}
    partly = message | plain
    if message.get("tool_calls"):
        partly = message | {"tool_calls": [_renamed(call, mark) for call in message["tool_calls"]]}
    for whole, other in ((True, plain), (False, partly)):
        try:
            changed = template.render(row.messages[:turn] + [other] + row.messages[turn + 1 :], row.tools)
        except Refused:  # such as a tool's result without the call before it
            continue
        if mark not in changed:
            continue
        start = shared_prefix(text, changed)
        if not whole:
            return Words(start, start, whole)
        tail = changed.partition(mark)[2]
        shared = min(shared_suffix(text, tail), len(text) - start)
        if len(tail) - shared <= template.closing_length:  # after it, nothing but the closing differs
            return Words(start, len(text) - shared, whole)
    return None


def _find_opening(template: ChatTemplate, row: ChatRow, text: str, turn: int) -> int | None:
    """Returns the character where a turn of calls begins, for a template that has no generation prompt.

    That is where a plain answer would begin. It stands in for the calls, their results and what is said to
    these, since without its call a result may be refused; or the conversation ends with it.
    """
    mark = next(chr(code) for code in range(FIRST_MARK, 0x10FFFF) if chr(code) not in text)
    messages, after = row.messages, turn + 1
    while after < len(messages) and (messages[after]["role"] == "tool" or messages[after].get("tool_calls")):
        after += 1
    if after < len(messages) and messages[after]["role"] == "assistant":
        after += 1
    for rest in (messages[after:], []):
        plain = [*messages[:turn], {"role": "assistant", "content": mark}, *rest]
        try:
            before, found, _ = template.render(plain, row.tools).partition(mark)
        except Refused:
            continue
        if found and text.startswith(before.rstrip()):  # a template may put a space before words alone
            return shared_prefix(text, before)
    return None


def find_content(template: ChatTemplate, row: ChatRow, rendered: Rendered, turn: int) -> Span | None:
    """Returns the tokens of the content of messages[turn], without its calls and its end; None if it has none
    in the text or cannot be told from the rest."""
    mark = next(chr(code) for code in range(FIRST_MARK, 0x10FFFF) if chr(code) not in rendered.text)
    other = row.messages[turn] | {"content": mark}
    try:
        changed = template.render(row.messages[:turn] + [other] + row.messages[turn + 1 :], row.tools)
    except Refused:
        return None
    before, found, after = changed.partition(mark)
    if not found or not rendered.text.startswith(before) or not rendered.text.endswith(after):
        return None
    first = rendered.token_after(len(before))
    return first, rendered.token_after(len(rendered.text) - len(after)) - 1


def _renamed(call: dict, name: str) -> dict:
    """Returns a tool call under another name, in OpenAI's form or the bare one."""
    function = call.get("function")
    return call | ({"function": function | {"name": name}} if isinstance(function, dict) else {"name": name})


def _find_last(template: ChatTemplate, rendered: Rendered, words: Words, bound: int) -> int | None:
    """Returns the token that closes the answer, or its last token if the template closes none."""
    after = rendered.token_after(words.end)
    if words.whole and after <= bound:
        tokens = rendered.tokens
        for place in range(after, bound):
            token = int(tokens[place])
            if token in template.end_ids:
                while place + 1 < len(tokens) and int(tokens[place + 1]) in template.stop_ids:
                    place += 1  # a mark of the template's own, then the token that stops generation
                return place
            if token in template.special_ids:
                break  # the next turn has begun
        return after - 1
    # Where the words are says nothing about the calls after them: take the last end before the bound.
    tokens = rendered.tokens.tolist()
    begin = rendered.token_after(words.start)
    return max((place for place in range(begin, bound) if tokens[place] in template.end_ids), default=None)


def _find_start(template: ChatTemplate, rendered: Rendered, words: Words) -> int:
    """Returns the character after the generation prompt: from there on the model writes by itself.

    The longest prompt goes first: an empty think block that a prompt brings with it is not the model's.
    """
    text, prompts = rendered.text, sorted(filter(None, template.prompts), key=len, reverse=True)
    before = text[: words.start].rstrip()
    for prompt in prompts:
        begin = len(before) - len(prompt.rstrip())
        if begin >= 0 and text.startswith(prompt, begin):
            return begin + len(prompt)
    # More stands before the words: an opened think block, or a channel that the model itself chooses.
    places = [(text.rfind(prompt, 0, words.start), len(prompt)) for prompt in prompts]
    ends = [
        place + length
        for place, length in places
        if place >= 0 and not _closes_between(template, rendered, place, words.start)
    ]
    return max(ends, default=words.start)


def _closes_between(template: ChatTemplate, rendered: Rendered, start: int, end: int) -> bool:
    inside = (rendered.offsets[:, 0] >= start) & (rendered.offsets[:, 1] <= end)
    return any(token in template.end_ids for token in rendered.tokens[inside].tolist())
