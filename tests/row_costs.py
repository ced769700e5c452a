# SPDX-License-Identifier: Apache-2.0
"""Costs of rows that do not depend on this machine."""

from specops.engine import Engine


def set_row_cost(engine: Engine, cost: float = 0.0) -> None:
    """Let an engine select drafts as if a step took 1 + `cost` seconds per row.

    Measured times would select other drafts on a busy machine, or none.
    """
    rows = range(engine.config.max_num_batched_tokens + 1)
    engine._drafting.select_by([1.0 + cost * count for count in rows])
