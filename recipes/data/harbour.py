"""Writes the harbour files: a made-up book of a harbour, drawn from word lists with a fixed seed.

    python recipes/data/harbour.py FOLDER

Each chapter begins with a register of berths, goes on with what happened on the days of a month, and
ends with questions that only the register answers.
"""

import json
import random
import sys
from pathlib import Path

SEED = 7
BERTHS = 12
MONTHS = "January February March April May June July August September October".split()
COLOURS = "Grey Black White Red Green Golden Silver Brown Blue Amber Pale Scarlet".split()
BIRDS = "Heron Gannet Curlew Plover Petrel Osprey Lapwing Sandpiper Wren Falcon Swallow Dunlin".split()
FIRST = "Ilse Tomas Marta Henrik Agnes Piet Lena Oskar Ruth Anton Clara Joren".split()
LAST = "Marrow Pike Holm Tarn Vesper Quill Brandt Rook Sedge Alder Fenn Stroud".split()
CARGO = "salt wool timber barley slate honey rope glass tar linen copper cider".split()
WINDS = "north north-west west south-west south south-east east north-east".split()
FORCES = ["light", "fresh", "strong", "steady", "gusty", "hardly to be felt"]
WHO = ["The pilot", "The clerk", "The night watch", "The lamp keeper", "The carpenter", "The customs officer"]
DID = [
    "painted the rail of the footbridge",
    "counted the empty barrels behind the shed",
    "mended the lock of the tool chest",
    "swept the steps down to the water",
    "greased the winch and tried it twice",
    "wrote to the county about the broken lantern",
    "hung the wet nets along the wall",
    "found a glove on the quay and put it on a post",
    "sounded the channel by hand and noted nothing new",
    "lent the long ladder to the chapel",
]
SEEN = [
    "A seal lay on the slip until the children came.",
    "Gulls sat on the roof of the weigh house all morning.",
    "Fog stood in the mouth of the harbour and lifted at noon.",
    "The tide came a hand higher than the table says.",
    "Two boys were sent home for throwing stones at the buoy.",
    "The bell of the chapel rang early, and nobody could say why.",
    "Rain fell from the morning on, and the drains held.",
    "The ferry was late by a quarter of an hour.",
    "A crate of oranges broke, and the whole quay smelled of it.",
    "The baker brought bread for the watch and stayed to talk.",
    "Nothing moved on the water until the evening.",
    "The dog of the weigh house barked at the tide again.",
]


def berths(draw: random.Random) -> list[dict]:
    """Returns a berth's number, ship, master and cargo each; no word comes twice in a column."""
    columns = [draw.sample(words, BERTHS) for words in (COLOURS, BIRDS, FIRST, LAST, CARGO)]
    numbers = draw.sample(range(11, 99), BERTHS)
    return [
        {"berth": number, "ship": f"{colour} {bird}", "master": f"{first} {last}", "cargo": cargo}
        for number, colour, bird, first, last, cargo in zip(numbers, *columns, strict=True)
    ]


def register(entries: list[dict]) -> str:
    """Returns a line for each berth."""
    return "\n".join(line(each) for each in entries)


def line(entry: dict) -> str:
    return (
        f"Berth {entry['berth']}: the {entry['ship']}, master {entry['master']}, carrying {entry['cargo']}."
    )


def answer(entry: dict) -> str:
    ship, master, cargo = entry["ship"], entry["master"], entry["cargo"]
    return f"It is kept for the {ship}, whose master is {master} and which carries {cargo}."


def days(draw: random.Random, first: int, last: int) -> str:
    """Returns what happened from one day of a month to another; no ship and no berth is named."""
    return "\n\n".join(f"Day {number}. {day(draw)}" for number in range(first, last + 1))


def day(draw: random.Random) -> str:
    number = draw.randint(3, 5)
    happened = zip(*(draw.sample(words, number) for words in (WHO, DID, SEEN)), strict=True)
    wind = f"Wind {draw.choice(WINDS)}, {draw.choice(FORCES)}."
    return " ".join([wind, *(f"{who} {did}. {seen}" for who, did, seen in happened)])


def chapter(draw: random.Random, title: str, entries: list[dict], num_days: int) -> str:
    return f"{title}\n\nRegister of berths\n{register(entries)}\n\n{days(draw, 1, num_days)}"


def conversation(draw: random.Random, month: str) -> dict:
    """Returns a chapter as one long conversation: the text, then a question about each berth in turn."""
    entries = berths(draw)
    text = chapter(draw, f"The harbour book, {month}", entries, 29)
    messages = []
    for place, each in enumerate(draw.sample(entries, BERTHS)):
        question = f"Which ship lies at berth {each['berth']}?"
        messages += [
            {"role": "user", "content": question if place else f"{text}\n\n{question}"},
            {"role": "assistant", "content": f"The {each['ship']}, with {each['cargo']}."},
        ]
    return {"messages": messages}


def pair(draw: random.Random, number: int) -> dict:
    """Returns a short chapter that corrects half of its register, and two answers: as corrected, and not."""
    entries = berths(draw)
    moved = berths(draw)[: BERTHS // 2]
    for entry, each in zip(entries, moved, strict=False):
        each["berth"] = entry["berth"]
    text = chapter(draw, f"The harbour book, sheet {number}", draw.sample(entries, BERTHS), 5)
    corrections = "\n".join(f"Correction. {line(each)}" for each in draw.sample(moved, len(moved)))
    asked = draw.randrange(len(moved))
    question = f"What is known of berth {moved[asked]['berth']}?"
    return {
        "prompt": [
            {"role": "user", "content": f"{text}\n\n{corrections}\n\n{days(draw, 6, 7)}\n\n{question}"}
        ],
        "chosen": [{"role": "assistant", "content": answer(moved[asked])}],
        "rejected": [{"role": "assistant", "content": answer(entries[asked])}],
    }


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    draw = random.Random(SEED)
    rows = [conversation(draw, month) for month in MONTHS]
    write(folder / "harbour.jsonl", rows[:-2])
    write(folder / "harbour_valid.jsonl", rows[-2:])
    pairs = [pair(draw, number + 1) for number in range(36)]
    write(folder / "harbour_pairs.jsonl", pairs[:-12])
    write(folder / "harbour_pairs_valid.jsonl", pairs[-12:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
