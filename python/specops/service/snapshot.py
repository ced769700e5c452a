# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an engine as plain data: its constant properties and its current state."""

import copy
from typing import Any

from specops.api.messages import Capabilities, Status
from specops.api.methods import methods
from specops.engine.engine import Engine
from specops.service.contract import contract_of


def capabilities_of(
    engine: Engine,
    role: str = "",
    contract: dict[str, Any] | None = None,
    *,
    has_sessions: bool = False,
) -> Capabilities:
    """Return the constant properties of an engine.

    Args:
        engine: the engine.
        role: as in `Capabilities`.
        contract: the engine's contract; None computes it with `contract_of`.
        has_sessions: as in `Capabilities`.
    """
    config = engine.config
    return Capabilities(
        model_name=engine.model_name,
        model_dir=str(config.model_dir),
        device=engine.device,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        max_num_drafts=engine.max_num_drafts,
        num_pages=engine.num_pages,
        page_size=config.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
        times_drafting=engine.times_drafting,
        methods=list(engine.runnable_methods),
        drafters=[method.facts() for method in methods()],
        drafter_gauges={name: text for method in methods() for name, text in method.gauges},
        speculative_config=config.speculative_config.as_dict(without_files=True),
        contract=contract or contract_of(engine),
        role=role,
        has_sessions=has_sessions,
    )


def status_of(engine: Engine, *, num_outside: int = 0) -> Status:
    """Return the current state of an engine.

    Args:
        engine: the engine; call this in the thread that owns it.
        num_outside: number of choices that wait outside the engine.
    """
    return Status(
        num_running=engine.num_running,
        num_waiting=engine.num_waiting + num_outside,
        num_free_pages=engine.num_free_pages,
        stats=copy.copy(engine.stats),  # the engine continues to count
        drafter_gauges=engine.drafter_gauges,
        adapters=engine.adapters,
    )
