# SPDX-License-Identifier: Apache-2.0
"""Extract the texts of the replay benchmark (`bench/bench_replay.py`) from their sources.

`python bench/prompts/make_replay.py CHAT_HISTORY` rewrites replay/*.json. CHAT_HISTORY is
tests/fixtures/chat-history.md of aider-chat 0.86.2 (PyPI, Apache-2.0): the sessions of a programmer
with aider and its models, over a year.

* agent: replies that edit files, in sessions with the output of tools.
* dialogue: replies of prose.
* edits: pieces of this repository's files, before a commit and then after it.

Each file is a list of documents: the source of the text, the text, and `starts`. At each start a
reply begins; all before it is the prompt.
"""

import difflib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

CHATS = "aider-chat 0.86.2, tests/fixtures/chat-history.md, Apache-2.0"
OUT = Path(__file__).resolve().parent / "replay"
NUM_STARTS = 64
PROMPT_CHARS, REPLY_CHARS = 1400, 600
EDIT_CHARS = 1300
LEAST_PROMPT_CHARS = 300
# Lines with places or people in them, and what aider says about costs.
UNWANTED = re.compile(r"://|/Users/|/home/|/tmp/|gauthier|@|Tokens: |> ?Aider v", re.IGNORECASE)


def replies(history: str) -> Iterator[tuple[str, int]]:
    """Yield every reply: the session's text and the position where the reply begins."""
    for session in re.split(r"^# aider chat started.*$", history, flags=re.MULTILINE):
        lines = [line.rstrip() for line in session.splitlines() if not UNWANTED.search(line)]
        text, place, is_answered = "\n".join(lines), 0, True
        for line in lines:
            if line.startswith("####"):
                is_answered = False
            elif line and not line.startswith(">") and not is_answered:
                is_answered = True
                yield text, place
            place += len(line) + 1


def chats(history: str) -> dict[str, list[dict[str, Any]]]:
    """Return agent and dialogue documents: one reply each, spread over the whole history."""
    found: dict[str, dict[str, str]] = {"agent": {}, "dialogue": {}}  # prompts by their replies
    for text, start in replies(history):
        whole = re.split(r"^(?:>|####)", text[start:], maxsplit=1, flags=re.MULTILINE)[0]
        reply = whole[:REPLY_CHARS]
        prompt = text[max(start - PROMPT_CHARS, 0) : start]
        if len(prompt) < LEAST_PROMPT_CHARS or len(reply) < REPLY_CHARS:
            continue
        code = sum(map(len, reply.split("```")[1::2]))
        if "<<<<<<< SEARCH" in reply:
            found["agent"][reply] = prompt
        elif code < REPLY_CHARS // 4 and "@@" not in reply and "<source>" not in reply:
            found["dialogue"][reply] = prompt
    return {
        kind: [
            {"source": CHATS, "text": prompt + reply, "starts": [len(prompt)]}
            for reply, prompt in spread(list(prompts.items()), NUM_STARTS)
        ]
        for kind, prompts in found.items()
    }


def spread(found: list[Any], count: int) -> list[Any]:
    """Return `count` elements at equal distances."""
    if len(found) < count:
        raise SystemExit(f"{len(found)} texts found, {count} wanted")
    return [found[index * len(found) // count] for index in range(count)]


def git(*arguments: str) -> str:
    """Return git's output in this repository."""
    command = ["git", "-C", str(OUT.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def edits() -> list[dict[str, Any]]:
    """Return documents of edits: at most one per commit, two starts each, over the history."""
    found = []
    for commit in git("log", "--no-merges", "--format=%h").split():
        names = git("diff-tree", "-r", "--no-commit-id", "--diff-filter=M", "--name-only", commit)
        for name in names.split():
            if name.endswith((".py", ".cpp", ".cuh", ".h")):
                old = git("show", f"{commit}^:{name}").splitlines(keepends=True)
                new = git("show", f"{commit}:{name}").splitlines(keepends=True)
                if document := edited(old, new):
                    found.append({"source": f"specops, {name}, Apache-2.0", **document})
                    break
    return spread(found, NUM_STARTS // 2)


def edited(old: list[str], new: list[str]) -> dict[str, Any] | None:
    """Return a piece of a file before and after an edit of a few of its lines, or None."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    places = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]  # unchanged lines
    for (first, again), (following, _) in pairwise(places):
        if following == first + 1:
            continue
        begin, begin_again = max(first - 5, 0), max(again - 5, 0)
        if old[begin:first] != new[begin_again:again]:
            continue
        for end, end_again in reversed(places):
            before, after = "".join(old[begin:end]), "".join(new[begin_again:end_again])
            if end <= first or max(len(before), len(after)) > EDIT_CHARS:
                continue
            changed = sum(line not in old[begin:end] for line in new[begin_again:end_again])
            is_fit = min(len(before), len(after)) > EDIT_CHARS - 300 and (before + after).isascii()
            if is_fit and 1 <= changed <= 10:
                middle = len(before) + 1 + len(after) // 2
                return {"text": f"{before}\n{after}", "starts": [len(before) + 1, middle]}
            break
    return None


def main() -> None:
    """Write the files."""
    OUT.mkdir(exist_ok=True)
    kinds = {**chats(Path(sys.argv[1]).read_text()), "edits": edits()}
    for kind, documents in kinds.items():
        (OUT / f"{kind}.json").write_text(
            json.dumps(documents, indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
