# SPDX-License-Identifier: Apache-2.0
"""Extract the benchmark prompts from library modules that the bundled model never saw.

`python bench/prompts/make_prompts.py` rewrites edits.json and completions.json from the running
Python's standard library, whose files must be those of tools/train/manifest.json.

* An edit is a module's first lines, then the same lines again with two or three identifiers
  renamed, cut in the middle: what a model sees while it rewrites a file.
* A completion is the text before and including a function's first line in the middle of a module.
"""

import hashlib
import io
import json
import keyword
import re
import sysconfig
import tokenize
from collections import Counter
from pathlib import Path

PROMPTS = Path(__file__).resolve().parent
TRAIN = PROMPTS.parents[1] / "tools" / "train"
NUM_PROMPTS = 32
# The bundled model reads 1,024 tokens, about three characters each; 128 remain for the answer.
EDIT_CHARS = 1100
COMPLETION_CHARS = 900
RENAMED = 3


def sources() -> dict[str, str]:
    """Return the held-out modules by path, checked against the manifest."""
    library = Path(sysconfig.get_paths()["stdlib"])
    wanted = json.loads((TRAIN / "manifest.json").read_text())["files"]
    texts = {}
    for path in json.loads((TRAIN / "held_out.json").read_text())["modules"]:
        content = (library / path).read_bytes()
        if hashlib.sha256(content).hexdigest() != wanted[path]:
            raise SystemExit(f"{path} is not the file that the manifest names")
        lines = content.decode().replace("\r\n", "\n").splitlines(keepends=True)
        # Web addresses are not code, and our prompts should not name any.
        texts[path] = "".join(line for line in lines if "://" not in line)
    return texts


def first_lines(text: str, limit: int) -> str:
    """Return whole lines from the start of `text`, at most `limit` characters."""
    return text[: text.rfind("\n", 0, limit) + 1]


def names(text: str) -> Counter[str]:
    """Count each identifier; the text may end in the middle of a construct."""
    counts: Counter[str] = Counter()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                counts[token.string] += 1
    except (tokenize.TokenError, IndentationError):
        pass
    return counts


def renamed(text: str, renames: dict[str, str]) -> str:
    """Return `text` with identifiers replaced wherever the tokenizer sees a name."""
    lines = text.splitlines(keepends=True)
    edits = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in renames:
                edits.append((token.start, token.end, renames[token.string]))
    except (tokenize.TokenError, IndentationError):
        pass
    for (line, begin), (_, end), name in reversed(edits):
        row = lines[line - 1]
        lines[line - 1] = row[:begin] + name + row[end:]
    return "".join(lines)


def edit(path: str, text: str) -> dict[str, object] | None:
    """Return an edit prompt, or None if too few identifiers occur twice."""
    head = first_lines(text, EDIT_CHARS)
    counts = names(head)
    often = [name for name, count in counts.most_common() if count >= 2 and len(name) >= 3]
    often = [name for name in often if name not in ("self", "cls", "__all__", "import")]
    if len(often) < 2:
        return None
    renames = {name: f"new_{name.lstrip('_')}" for name in often[:RENAMED]}
    again = renamed(head, renames)
    middle = again.rfind("\n", 0, len(again) // 2) + 1
    return {"module": path, "renames": renames, "text": f"{head}\n\n{again[:middle]}"}


def completion(path: str, text: str) -> dict[str, object] | None:
    """Return a completion prompt, or None if the module's second half defines no function."""
    match = re.search(r"^( *)def [^\n]*:\n", text[len(text) // 2 :], re.MULTILINE)
    if not match:
        return None
    stop = len(text) // 2 + match.end()
    begin = text.find("\n", max(0, stop - COMPLETION_CHARS)) + 1 if stop > COMPLETION_CHARS else 0
    return {"module": path, "text": text[begin:stop]}


def main() -> None:
    """Write both files, one prompt per module, modules in path order."""
    texts = sources()
    for name, make in (("edits", edit), ("completions", completion)):
        prompts = [prompt for path, text in texts.items() if (prompt := make(path, text))]
        if len(prompts) < NUM_PROMPTS:
            raise SystemExit(f"{name}: {len(prompts)} prompts, {NUM_PROMPTS} wanted")
        content = json.dumps(prompts[:NUM_PROMPTS], indent=1, ensure_ascii=False) + "\n"
        (PROMPTS / f"{name}.json").write_text(content)


if __name__ == "__main__":
    main()
