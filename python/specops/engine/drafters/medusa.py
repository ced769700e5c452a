# SPDX-License-Identifier: Apache-2.0
"""Medusa heads: each drafts a token from the last state alone."""

import json
from pathlib import Path

from specops.api.errors import ModelError
from specops.api.methods.medusa import METHOD, MedusaOptions
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.residual import load_residual
from specops.engine.models import load_medusa


def load(context: DrafterContext) -> Drafter:
    """Make the drafter of the heads that the configuration names; see `load_residual`.

    Raises:
        ModelError: also if the file of the tree cannot be used.
    """
    own = context.config.speculative_config.options_of(MedusaOptions)
    paths = None
    if own.medusa_choices is not None:
        paths = read_paths(Path(own.medusa_choices), context.target.config.vocab_size)
    return load_residual(context, METHOD, MedusaOptions, load_medusa, paths)


def read_paths(file: Path, vocab_size: int) -> list[list[int]]:
    """Read a fixed tree shape: a JSON list of paths, see `static_tree`.

    Args:
        file: to read.
        vocab_size: exclusive upper bound of ranks.

    Raises:
        ModelError: the file is missing, damaged or does not describe a tree.
    """
    try:
        paths = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a file of a tree: {error}") from error
    if not isinstance(paths, list) or not paths:
        raise ModelError(f"{file}: expected a list of paths, got {type(paths).__name__}")
    seen: set[tuple[int, ...]] = {()}
    for path in paths:
        ranks = path if isinstance(path, list) else []
        if not ranks or not all(type(one) is int and 0 <= one < vocab_size for one in ranks):
            raise ModelError(
                f"{file}: a path must be a list of ranks from 0 to {vocab_size - 1}, got {path!r}"
            )
        if tuple(ranks) in seen:
            raise ModelError(f"{file}: path {ranks} is there twice")
        if tuple(ranks[:-1]) not in seen:
            raise ModelError(f"{file}: path {ranks} needs {ranks[:-1]} before it")
        seen.add(tuple(ranks))
    return paths
