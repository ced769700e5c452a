# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the target's own drafting modules, fed with its hidden states.

docs/mtp.md states what meets what.
"""

import os
from typing import cast

import torch
from torch import Tensor

from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable, TargetStep
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.methods.mtp import METHOD, MtpOptions
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.errors import ModelError
from specops.engine.models import KvCache, MtpBatch, MtpModules, Transformer, load_mtp


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the modules in the target's checkpoint, or in a directory of their own.

    Raises:
        MethodUnavailable: the checkpoint has none that can run.
        ModelError: those that the configuration names cannot be used.
    """
    config = context.config
    own = config.speculative_config.options_of(MtpOptions)
    try:
        modules = load_mtp(
            context.target,
            config.model_dir,
            draft_directory=own.model,
            draft_vocab=own.draft_vocab,
            quantization=own.quantization,
        )
    except ModelError as error:
        if own.model is not None or own.draft_vocab is not None:
            raise
        where = str(config.model_dir)
        reason = str(error).removeprefix(f"{where}: ").removeprefix(f"{where}{os.sep}")
        raise MethodUnavailable(str(error), reason) from error
    head = MtpHead(context.target, modules)
    return RecurrentDrafter(METHOD.name, context, head, draws=own.draws)


class MtpHead:
    """A checkpoint's modules as a `DraftHead`: each is a pass over the rows of a step.

    Args:
        target: the model that they read the states of.
        modules: on top of it.

    Attributes:
        modules: these.
        cache: their keys and values.
        taps: none: they read the states after the final norm.
    """

    taps: tuple[int, ...] = ()
    num_likeliest = 2
    reads_states = True
    max_drafts = None
    is_independent = False

    def __init__(self, target: Transformer, modules: MtpModules) -> None:
        self._target, self.modules = target, modules
        self.cache: KvCache

    @property
    def num_passes(self) -> int:
        """How many modules there are."""
        return self.modules.num_modules

    @property
    def is_chained(self) -> bool:
        """Whether a module reads what the one before it gave."""
        return self.modules.convention.chained

    @property
    def lookahead(self) -> int:
        """A token for each module."""
        return self.num_passes

    @property
    def hidden_size(self) -> int:
        """Of the target's states."""
        return self.modules.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's states."""
        return self.modules.dtype

    @property
    def vocab_size(self) -> int:
        """Tokens that the modules may draft."""
        return self.modules.lm_head.num_outputs

    @property
    def token_map(self) -> Tensor | None:
        """These tokens; None: all of the target's."""
        return self.modules.token_map

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all modules."""
        return self.modules.kv_bytes_per_token()

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of passes with up to `rows` rows."""
        self.modules.reserve(rows)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocates the modules' keys and values, on the target's pages."""
        self.cache = self.modules.new_kv_cache(num_pages, page_size)

    def workspace_size(self, rows: int, batch: int, pages: int) -> int:
        """Returns the floats that attention takes: the modules' layers are like the target's."""
        return self.modules.workspace_size(rows, batch, pages, self.cache)

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with."""
        return self.modules.sums_size(rows, outputs)

    def target_states(self, target: TargetStep) -> Tensor:
        """Returns the states after the final norm."""
        return target.hidden

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Runs module `index` over rows; as `DraftHead.forward`."""
        return self.modules.forward(index, cast(MtpBatch, rows), states, self.cache)

    def logits(
        self, index: int, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of rows, of the modules' vocabulary."""
        return self.modules.logits(hidden, out=out, sums=sums)
