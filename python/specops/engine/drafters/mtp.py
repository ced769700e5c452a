# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the target's own drafting modules, which read its hidden states.

docs/mtp.md describes which hidden state and token each module reads.
"""

import os
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from specops.api.errors import ModelError
from specops.api.methods.mtp import METHOD, MtpOptions
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    MethodUnavailable,
    TargetStep,
)
from specops.engine.drafters.head import DraftRows
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.drafters.stack_head import StackHead
from specops.engine.models import (
    Assistant,
    CacheCapacity,
    KvCache,
    LayerKv,
    MtpBatch,
    MtpModules,
    load_assistant,
    load_mtp,
)


def load(context: DrafterContext) -> Drafter:
    """Make the drafter for the modules in the target's checkpoint or in a separate directory.

    Raises:
        MethodUnavailable: the checkpoint has no usable modules.
        ModelError: the modules that the configuration names cannot be used.
    """
    config = context.config
    own = config.speculative_config.options_of(MtpOptions)
    if own.model is not None and (assistant := _assistant(context, own.model, own)) is not None:
        return RecurrentDrafter(METHOD.name, context, AssistantHead(assistant), draws=True)
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


def _assistant(context: DrafterContext, directory: str, own: MtpOptions) -> Assistant | None:
    """Load the assistant model in a directory; return None for another kind of model."""
    assistant = load_assistant(
        context.target,
        directory,
        num_slots=context.config.max_num_seqs,
        quantization=own.quantization,
    )
    if assistant is not None and own.draft_vocab is not None:
        raise ModelError(f"draft_vocab must be absent with an assistant model, got {directory}")
    return assistant


class AssistantHead(StackHead):
    """Assistant model as a `DraftHead` that reads the target's keys and values.

    Args:
        assistant: the model, loaded for its target.
    """

    def __init__(self, assistant: Assistant) -> None:
        super().__init__(assistant)
        self._assistant = assistant
        self._caches: Sequence[LayerKv] = ()
        self._is_first = True  # the next pass is a step's first

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate nothing: the assistant has no keys and values."""
        self.cache = KvCache([], capacity, [])

    def target_states(self, target: TargetStep) -> Tensor:
        """Return the output of the final norm; note the target's keys and values."""
        self._caches = [target.cache.layers[index] for index in self._assistant.sources]
        self._is_first = True
        return target.hidden

    def forward(self, index: int, rows: DraftRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the assistant over rows; see `DraftHead.forward`."""
        batch = cast(MtpBatch, rows)
        find = self._assistant.begin if self._is_first else self._assistant.repeat
        self._is_first = False
        return self._assistant.forward(batch, find(batch), states, self._caches)


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
