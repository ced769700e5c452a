# SPDX-License-Identifier: Apache-2.0
"""Prompts for trying speculation: twenty built-in ones, or prompts from a file."""

import json
from pathlib import Path

# Repetitive texts, so that drafters find drafts, with changes, so that some drafts are wrong.
PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "import os\nimport sys\nimport ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    for j in range(10):\n        print(i, j)\n\nfor i in range(",
    'names = ["anna", "bert", "carl"]\nages = [31, 42, 53]\nfor name, age in zip(names, ages):\n',
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    '{"name": "anna", "age": 31}\n{"name": "bert", "age": 42}\n{"name":',
    "| name | age |\n| --- | --- |\n| anna | 31 |\n| bert | 42 |\n|",
    "def read_lines(path):\n    with open(path) as file:\n        return list(file)\n\n\ndef ",
    "try:\n    value = int(text)\nexcept ValueError:\n    value = 0\n\ntry:\n    other = int(",
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>three</li>\n",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;\nSELECT name FROM people WHERE",
    "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\n",
    "if x > 0:\n    sign = 1\nelif x < 0:\n    sign = -1\nelse:\n    sign = 0\n\nif y > 0:\n",
    "Once upon a time there was a king who had three daughters. The first daughter",
    "assert add(1, 2) == 3\nassert add(2, 3) == 5\nassert add(3, 4) == 7\nassert add(",
    "# Installation\n\n    pip install package\n\n# Usage\n\n    import package\n\n# ",
    "x = [i * i for i in range(10)]\ny = [i + 1 for i in x]\nz = [i - 1 for i in y]\n",
)


def read_prompts(file: str) -> list[str]:
    """Return the prompts of a file: a JSON list of texts, or a text per line.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no prompts, or has another format.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text: {error}") from None
    if text.lstrip().startswith("["):
        try:
            prompts = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from None
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ValueError(
            f"{file} must hold prompts: a JSON list of strings, or one prompt per line"
        )
    return list(prompts)
