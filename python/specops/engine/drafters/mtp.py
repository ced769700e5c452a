# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the target's own drafting modules, which read its hidden states.

docs/mtp.md describes which hidden state and token each module reads.
"""

import os
from typing import cast

from torch import Tensor

from specops.api.errors import ModelError
from specops.api.methods.mtp import METHOD, MtpOptions
from specops.engine.drafters.base import Drafter, DrafterContext, MethodUnavailable
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead
from specops.engine.models import MtpBatch, MtpModules, load_mtp


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the modules in the target's checkpoint or in a separate directory.

    Raises:
        MethodUnavailable: the checkpoint has no usable modules.
        ModelError: the modules that the configuration names cannot be used.
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
    head = MtpHead(modules)
    return RecurrentDrafter(METHOD.name, context, head, draws=own.draws)


class MtpHead(StackHead):
    """MTP modules as a `DraftHead`: each module is one pass over the rows of a step.

    Args:
        modules: the modules, loaded for their target.

    Attributes:
        modules: the argument.
    """

    def __init__(self, modules: MtpModules) -> None:
        super().__init__(modules)
        self.modules, self.token_map = modules, modules.token_map
        # Each module drafts one token.
        self.num_passes = self.lookahead = modules.num_modules
        self.is_chained = modules.convention.chained

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run module `index` over rows; see `DraftHead.forward`."""
        return self.modules.forward(index, cast(MtpBatch, rows), states, self.cache)
