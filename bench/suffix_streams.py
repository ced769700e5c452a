# SPDX-License-Identifier: Apache-2.0
"""Token streams for the suffix tree: Python's standard library, and near-copies of it.

`code`: a BPE of 8,192 entries is trained on a third of the files; the files are cut into requests
of 1,024 to 4,096 tokens, and 5 % of the files are held out. `edit` imitates an agent's loop: it has
eight revisions of each document, and each revision has about one edit of 1 to 8 tokens per 64
tokens of the previous one. Two versions of the ninth revision of each document are held out.
Everything is seeded.
"""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common import WORK

Tokens = NDArray[np.int32]

VOCAB = 8192
SHORTEST, LONGEST = 1024, 4096
REVISIONS, HELD_REVISIONS = 8, 2
TOKENS_AN_EDIT, LONGEST_EDIT = 64, 8
EDIT_TOKENS = 6_500_000
STREAMS = ("code", "edit")


def streams() -> Path:
    """Return the folder of the streams, creating them if they do not exist.

    `<stream>.npy` and `<stream>.held.npy` are the tokens of all requests, one after the other;
    `.ends.npy` of either holds where each request ends.
    """
    folder = WORK / f"suffix-streams-{sys.version_info.major}.{sys.version_info.minor}"
    if all((folder / f"{stream}.held.ends.npy").exists() for stream in STREAMS):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    print("  making the token streams", flush=True)
    generator = np.random.default_rng(0)
    shown, held = _code(generator)
    save(folder / "code", shown, held)
    save(folder / "edit", *_edit(generator, shown))
    return folder


def _code(generator: np.random.Generator) -> tuple[list[Tokens], list[Tokens]]:
    """Return requests from files of the standard library, and from its held-out files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    generator.shuffle(texts)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::3], trainer)

    shown: list[Tokens] = []
    held: list[Tokens] = []
    for i, text in enumerate(texts):
        token_ids = np.array(tokenizer.encode(text).ids, dtype=np.int32)
        (held if i % 20 == 7 else shown).extend(_cut(generator, token_ids))
    return shown, held


def _cut(generator: np.random.Generator, token_ids: Tokens) -> Iterator[Tokens]:
    """Yield consecutive pieces of SHORTEST to LONGEST tokens; drop a shorter rest."""
    begin = 0
    while len(token_ids) - begin >= SHORTEST:
        size = min(int(generator.integers(SHORTEST, LONGEST + 1)), len(token_ids) - begin)
        yield token_ids[begin : begin + size]
        begin += size


def _edit(
    generator: np.random.Generator, documents: Sequence[Tokens]
) -> tuple[list[Tokens], list[Tokens]]:
    """Return the revisions of all documents, and the held-out ninth revisions."""
    words = np.concatenate(documents)
    shown: list[Tokens] = []
    held: list[Tokens] = []
    num_tokens = 0
    for document in documents:
        for _ in range(REVISIONS):
            shown.append(document)
            num_tokens += len(document)
            document = _revised(generator, document, words)
        held += [_revised(generator, shown[-1], words) for _ in range(HELD_REVISIONS)]
        if num_tokens >= EDIT_TOKENS:
            break
    return shown, held


def _revised(generator: np.random.Generator, document: Tokens, words: Tokens) -> Tokens:
    """Return a document in which runs of tokens are replaced, usually changing its length."""
    pieces, begin = [], 0
    while True:
        length = int(generator.geometric(1 / TOKENS_AN_EDIT))
        pieces.append(document[begin : begin + length])
        begin += length + int(generator.integers(1, LONGEST_EDIT + 1))
        if begin >= len(document):
            break
        size = int(generator.integers(1, LONGEST_EDIT + 1))
        place = int(generator.integers(0, len(words) - size))
        pieces.append(words[place : place + size])
    return np.concatenate(pieces)


def save(stem: Path, shown: Sequence[Tokens], held: Sequence[Tokens]) -> None:
    """Write cached and held-out requests; the file that `streams` checks for is written last."""
    for name, requests in ((stem.name, shown), (f"{stem.name}.held", held)):
        np.save(stem.parent / f"{name}.npy", np.concatenate(requests))
        ends = np.cumsum([len(request) for request in requests])
        np.save(stem.parent / f"{name}.ends.npy", ends)
