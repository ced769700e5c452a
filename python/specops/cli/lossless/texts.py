# SPDX-License-Identifier: Apache-2.0
"""Built-in prompts: prose, code, chats, and copies of code with a changed name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A prompt.

    Attributes:
        kind: "prose", "code", "chat", "copy" or "yours".
        prompt: the text; for a chat, the user's message.
    """

    kind: str
    prompt: str


_PROSE = (
    "The old lighthouse stood at the end of the pier. Every evening, the keeper climbed the",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "Water boils at 100 degrees and freezes at 0 degrees. Iron melts at",
    "Once upon a time there was a king who had three daughters. The first daughter was wise, the "
    "second daughter was brave, and the third daughter",
    "To whom it may concern: I am writing to you because the parcel that I ordered on the third "
    "of May has not arrived. The parcel that I ordered",
)
_CODE = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "try:\n    value = int(text)\nexcept ValueError:\n    value = 0\n\ntry:\n    other = int(",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;\nSELECT name FROM people WHERE",
    '{"name": "anna", "age": 31}\n{"name": "bert", "age": 42}\n{"name":',
)
_CHATS = (
    "List the months of the year, one per line, each with its number of days.",
    "Write a Python function that reverses a list in place, then the same for a string.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "What is the difference between a list and a tuple? Answer in two sentences.",
    "Count from one to twenty in words.",
)
# A file, and the beginning of a copy in which a name has changed: drafts copy the rest and are
# wrong wherever the name occurs. The prompts share a prefix, like edits of one file.
_FILE = """def load(path):
    with open(path) as file:
        lines = file.readlines()
    rows = [line.split(",") for line in lines]
    return [row for row in rows if row]
"""
_COPIES = tuple(
    f"{_FILE}\n\n# the same as {name}\ndef {name}("
    for name in ("read", "load_rows", "loads", "parse", "load_all")
)

# Kinds alternate, so that the first few prompts include every kind.
TEXTS = tuple(
    Text(kind, prompt)
    for row in zip(_PROSE, _CODE, _CHATS, _COPIES, strict=True)
    for kind, prompt in zip(("prose", "code", "chat", "copy"), row, strict=True)
)
