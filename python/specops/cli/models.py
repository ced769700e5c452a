# SPDX-License-Identifier: Apache-2.0
"""`specops models`: the models of this machine that `--model` takes by name, and which run."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specops.engine.config import BUNDLED_MODEL, BUNDLED_MODEL_NAME
from specops.engine.errors import ModelError
from specops.engine.models.families import read_model_config


class _Model(NamedTuple):
    """A model's name, its bytes on disk, and whether it runs, or why not."""

    name: str
    size: int
    says: str


def main(arguments: Sequence[str], program: str) -> int:
    """Prints a line for each; returns the exit code."""
    _parser(program).parse_args(arguments)
    bundled = sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir())
    default = "runs; without --model, it is this one"
    models = [_Model(BUNDLED_MODEL_NAME, bundled, default), *sorted(_cached())]
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:<{width}}  {model.size / 1e6:>9,.0f} MB  {model.says}")
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=program,
        description="Lists the bundled model, and those in the Hugging Face Hub's cache on this "
        "machine, as HF_HUB_CACHE or HF_HOME says where that is. --model takes their names, and "
        "downloads others.",
    )


def _cached() -> Iterator[_Model]:
    """Those of the Hub's cache, by what their newest version says."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repository in cache.repos:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            says = _says(newest.snapshot_path)
            yield _Model(repository.repo_id, repository.size_on_disk, says)


def _says(directory: Path) -> str:
    try:
        read_model_config(directory)
    except ModelError as error:
        reason = str(error).removeprefix(f"{directory / 'config.json'}: ")
        return f"does not run: {reason}"
    if not any(directory.glob("*.safetensors")):
        return "does not run: its weights are not here; --model fetches them"
    return "runs"
