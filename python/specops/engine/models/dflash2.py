# SPDX-License-Identifier: Apache-2.0
"""DFlash2's additions to DFlash: convolutions along a block, and a selector of candidates.

A convolution mixes a row with the rows before it in its block. The weight of a tap is the sum of a
fixed weight per channel and a weight per group of channels, which is projected from the row. There
is a convolution before and after every attention and every MLP of block rows, but none for the keys
and values computed from target states.

The selector keeps the likeliest tokens of a draft, its candidates. To the logit of candidate c, it
adds <a(before) * p(state), b(c)>, which depends on the token before the draft and on its state.

Source: `DFlash2DraftModel`, which is vLLM's implementation of published heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.families.fields import count
from specops.engine.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class Dflash2Config:
    """Configuration of DFlash2's parts.

    Attributes:
        taps: number of rows that a convolution reads, including the current one.
        group: number of channels per group.
        rank: rank of the selector.
        num_candidates: number of candidates per draft.
        embedding_scale: factor on the block's embeddings.
        logit_scale: factor on logits.
        softcap: soft bound of logits; None: no bound.
    """

    taps: int
    group: int
    rank: int
    num_candidates: int
    embedding_scale: float
    logit_scale: float
    softcap: float | None


class Kernel(NamedTuple):
    """Weights of the convolutions before and after one attention or MLP."""

    base: Tensor  # float32 [2, taps, channels]
    projection: PackedWeight  # from a row to [2 * taps * groups]


@dataclass(frozen=True, kw_only=True)
class Dflash2Weights:
    """Weights of DFlash2's parts, with packed projections.

    Attributes:
        kernels: convolution weights of each layer, for its attention and its MLP.
        predecessors: [vocab_size, rank], embedding a of the token before a draft.
        hidden: projection p from a draft's state to rank.
        successors: projection b from rank to the vocabulary.
    """

    kernels: tuple[tuple[Kernel, Kernel], ...]
    predecessors: Tensor
    hidden: PackedWeight
    successors: PackedWeight

    @property
    def projections(self) -> list[PackedWeight]:
        """All packed projections."""
        kernels = [kernel.projection for layer in self.kernels for kernel in layer]
        return [*kernels, self.hidden, self.successors]


def read_dflash2(own: Mapping[str, Any], hidden_size: int, vocab_size: int) -> Dflash2Config | None:
    """Read the config fields of DFlash2's parts; return None if the head is not a DFlash2.

    Args:
        own: fields of config.json merged with those of dflash_config.
        hidden_size: width of the head's states.
        vocab_size: the target's vocabulary size.

    Raises:
        KeyError: a field is missing.
        ModelError: a field has an invalid value.
    """
    if "conv_kernel_size" not in own and "selector_rank" not in own:
        return None
    found = Dflash2Config(
        taps=count(own, "conv_kernel_size"),
        group=count(own, "conv_group_size"),
        rank=count(own, "selector_rank"),
        num_candidates=count(own, "selector_top_k"),
        embedding_scale=_number(own, "input_embedding_scale", 1.0),
        logit_scale=_number(own, "output_multiplier", 1.0),
        softcap=_number(own, "final_logit_softcapping", 0.0) or None,
    )
    if hidden_size % found.group:
        raise ModelError(f"conv_group_size must divide {hidden_size}, got {found.group}")
    if found.num_candidates > vocab_size:
        raise ModelError(
            f"selector_top_k must be at most {vocab_size}, the target's tokens, "
            f"got {found.num_candidates}"
        )
    return found


def _number(own: Mapping[str, Any], field: str, default: float) -> float:
    value = own.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ModelError(f"{field} must be a number of at least 0, got {value!r:.60}")
    return float(value)


def load_dflash2(
    source: WeightSource, config: Dflash2Config, num_layers: int, hidden_size: int, vocab_size: int
) -> Dflash2Weights:
    """Load the weights of DFlash2's parts.

    Args:
        source: source of the weights.
        config: configuration of these parts.
        num_layers: number of layers of the head.
        hidden_size: width of the head's states.
        vocab_size: the target's vocabulary size.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    outputs = 2 * config.taps * (hidden_size // config.group)

    def kernel(name: str) -> Kernel:
        shape = (2, config.taps, hidden_size)
        return Kernel(
            source.tensor(f"{name}.base_kernel", *shape, dtype=torch.float32),
            source.linear(
                f"{name}.", ("kernel_projection",), (outputs,), hidden_size, quantization="none"
            ),
        )

    book, rank = "candidate_selector.", config.rank
    successors = source.tensor(f"{book}successor_codebook", vocab_size, rank)
    return Dflash2Weights(
        kernels=tuple(
            (kernel(f"layers.{index}.attention_conv"), kernel(f"layers.{index}.mlp_conv"))
            for index in range(num_layers)
        ),
        predecessors=source.tensor(f"{book}predecessor_codebook", vocab_size, rank),
        hidden=source.linear(
            book, ("hidden_projection",), (rank,), hidden_size, quantization="none"
        ),
        successors=dense.pack_weight(successors),
    )


class Convolution:
    """Convolutions over block rows, before and after one attention or MLP.

    Args:
        kernel: weights of the convolutions.
        places: int32 [rows], index of each row in its block.
        sums: linear workspace.
    """

    def __init__(self, kernel: Kernel, places: Tensor, sums: Tensor | None) -> None:
        self._kernel, self._places, self._sums = kernel, places, sums
        self._deltas: Tensor  # weights that depend on the input rows

    def before(self, x: Tensor) -> None:
        """Mix the input rows [rows, channels], in place."""
        base, projection = self._kernel
        deltas = dense.linear(x, projection, out_dtype=torch.float32, workspace=self._sums)
        self._deltas = deltas.view(len(x), 2, base.shape[1], -1)
        self._mix(x, 0)

    def behind(self, x: Tensor) -> None:
        """Mix the output rows, in place. The weights depend on the rows given to `before`."""
        self._mix(x, 1)

    def _mix(self, x: Tensor, side: int) -> None:
        base, deltas = self._kernel.base[side], self._deltas[:, side]
        num_rows, num_groups = len(x), deltas.shape[2]
        grouped = x.float().view(num_rows, num_groups, -1)
        mixed = torch.zeros_like(grouped)
        for tap in range(base.shape[0]):
            weights = base[tap].view(num_groups, -1) + deltas[:, tap, :, None]
            is_in_block = (self._places[tap:] >= tap)[:, None, None]
            mixed[tap:] += weights[tap:] * grouped[: num_rows - tap] * is_in_block
        x.copy_(mixed.view_as(x))


def candidate_logits(
    config: Dflash2Config,
    weights: Dflash2Weights,
    logits: Tensor,
    states: Tensor,
    before: Tensor,
    sums: Tensor | None,
) -> Tensor:
    """Add the selector's terms to the logits of candidates, in place; set other logits to -inf.

    Args:
        config: the selector's configuration.
        weights: the selector's weights.
        logits: float32 [rows, vocab_size], from the LM head.
        states: [rows, hidden_size], the states that the logits were computed from.
        before: int32 [rows], the token before each draft.
        sums: linear workspace.
    """
    # All tokens that tie with the least candidate become candidates, so that the order in which
    # topk returns ties does not matter.
    least = logits.topk(config.num_candidates, dim=1).values[:, -1:]
    is_excluded = logits < least
    logits.mul_(config.logit_scale)
    if config.softcap is not None:
        logits.div_(config.softcap).tanh_().mul_(config.softcap)
    pairs = dense.linear(states, weights.hidden, workspace=sums)
    pairs.mul_(dense.embedding(before, weights.predecessors))
    logits.add_(dense.linear(pairs, weights.successors, out_dtype=torch.float32, workspace=sums))
    return logits.masked_fill_(is_excluded, -torch.inf)
