# SPDX-License-Identifier: Apache-2.0
"""`specops models`: tested models, and the cached models on this machine that `--model` accepts."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specops.api.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from specops.api.errors import ModelError
from specops.cli import Parser

# figures: ngram: {{ zen5.ratio("gemma.*.greedy.ngram", 1, min) }}x
# to {{ zen5.ratio("gemma.*.greedy.ngram", 1, max) }}x
_GEMMA_PAYS = "ngram: 2.1x to 3.0x"
# figures: ngram: {{ zen4.ratio("ngram.*.greedy.vs_plain", 1, min) }}x
# to {{ zen4.ratio("ngram.*.greedy.vs_plain", 1, max) }}x
_BUNDLED_PAYS = "ngram: 1.8x to 1.9x"


class _Model(NamedTuple):
    """A row of the list of models.

    Attributes:
        name: value for `--model`.
        size: bytes on disk.
        license: license of its weights, in the words of its authors.
        pays: method with a measured speed-up (docs/figures.md); empty if not measured.
        says: note on whether the model runs, or why not.
    """

    name: str
    size: int
    license: str
    pays: str
    says: str


# Models that targets of the Makefile download, named by their files in the user's cache.
_FETCHED = (
    _Model(
        "gemma/gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "Gemma Terms of Use",
        _GEMMA_PAYS,
        "is not here: make gemma fetches it",
    ),
    _Model(
        "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "apache-2.0",
        "not measured",
        "is not here: make chat fetches it",
    ),
)


def main(arguments: Sequence[str], program: str) -> int:
    """Print a line for each model and return the exit code."""
    _parser(program).parse_args(arguments)
    bundled = sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir())
    default = "runs; without --model, it is this one"
    license = _license(BUNDLED_MODEL)
    first = _Model(BUNDLED_MODEL_NAME, bundled, license, _BUNDLED_PAYS, default)
    models = [first, *map(_fetched, _FETCHED), *sorted(_cached())]
    rows = [("model", "size", "license", "what pays", "")]
    rows += [(model.name, f"{model.size / 1e6:,.0f} MB", *model[2:]) for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        cells[1] = row[1].rjust(widths[1])
        print("  ".join([*cells, row[4]]).rstrip())
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    return Parser(
        prog=program,
        description="List the models that have been tested, with their fastest method and its "
        "speed-up for one greedy request (docs/figures.md), and the models in this "
        "machine's Hugging Face Hub cache (HF_HUB_CACHE or HF_HOME). --model "
        "accepts these names, and downloads other models.",
    )


def _fetched(model: _Model) -> _Model:
    """Return the row of a model that a target of the Makefile downloads to the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache, "specops", model.name)
    if file.is_file():
        return model._replace(name=str(file), says="runs")
    return model._replace(name=file.name)


def _cached() -> Iterator[_Model]:
    """Yield the models in the Hub's cache, described by their newest revision."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            path = newest.snapshot_path
            size = repository.size_on_disk
            yield _Model(repository.repo_id, size, _license(path), "not measured", _status_of(path))


def _license(directory: Path) -> str:
    """Return the license named in the metadata at the top of the model card."""
    try:
        card = (directory / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    head = card.removeprefix("---\n").partition("\n---")[0] if card.startswith("---\n") else ""
    fields = dict(re.findall(r"^(license|license_name): *(\S.*?) *$", head, re.MULTILINE))
    named = fields.get("license", "unknown")
    return str(fields.get("license_name", named) if named == "other" else named).strip("'\"")


def _status_of(directory: Path) -> str:
    from specops.engine.models.families import read_model_config  # imports torch

    try:
        read_model_config(directory)
    except ModelError as error:
        reason = str(error).removeprefix(f"{directory / 'config.json'}: ")
        return f"does not run: {reason}"
    if not any(directory.glob("*.safetensors")):
        return "does not run: its weights are not here; --model fetches them"
    return "runs"
