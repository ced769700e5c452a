# SPDX-License-Identifier: Apache-2.0
"""Dry run of a model over one row, so that ops raise at load time instead of in a request."""

import torch
from torch import Tensor

from specops.engine.models.batch import StepBatch
from specops.engine.models.transformer import Transformer

_PAGE_SIZE = 16


def dry_run(model: Transformer) -> Tensor:
    """Compute the logits of token 0 at position 0.

    Returns:
        [1, vocab_size], fp32, on the CPU.

    Raises:
        ValueError: an op rejected its arguments; the message begins with the op's name.
    """

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=model.device)

    batch = StepBatch(
        token_ids=ints(0),
        positions=ints(0),
        cache_slots=ints(0, dtype=torch.int64),
        qo_indptr=ints(0, 1),
        kv_indptr=ints(0, 1),
        kv_indices=ints(0),
        kv_lens=ints(1),
        slots=ints(0),
    )
    cache = model.new_kv_cache(1, _PAGE_SIZE)
    return model.logits(model.forward(batch, cache)).cpu()
