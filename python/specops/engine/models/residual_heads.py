# SPDX-License-Identifier: Apache-2.0
"""Medusa and Hydra heads: residual blocks on the target's last state.

Each head drafts the token at a fixed distance. Medusa heads read only the state that the newest
token was sampled from. Hydra heads also read the embeddings of the newest token and of the earlier
drafts, concatenated to the state. The input passes through blocks x + silu(W x + b) and then the
head's own LM head. Hydra++ heads read the states of a prefix layer instead of the target's.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", section 2.1; Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa
Decoding", section 3.
"""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.families.fields import read_config
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.prefix_layer import UNREAD, PrefixLayer, load_prefix
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

logger = logging.getLogger(__name__)


class _Layout(NamedTuple):
    """Name patterns of a head's blocks and of its LM head."""

    block: str
    lm_head: str
    # Module number of the first block, and distance to the next: 2 if dropout modules lie between.
    first: int = 0
    step: int = 1

    def name(self, head: int, block: int) -> str:
        """Return the name of a head's block in the checkpoint."""
        return self.block.format(head=head, block=self.first + self.step * block)


# Layouts of the authors and of vLLM.
_MEDUSA = (
    _Layout("{head}.{block}.linear", "{head}.{blocks}"),
    _Layout("blocks.{head}.layers.{block}", "lm_heads.{head}"),
)
_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_HYDRA = (
    _Layout("hydra_mlp.{head}.{block}.linear", "hydra_lm_head.{head}"),
    _Layout("hydra_mlp.{head}.{block}.linear", "hydra_lm_head.{head}.1", first=1, step=2),
)
_ARCHITECTURES = ("mlp", "prefix-mlp")
_HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")


@dataclass(frozen=True)
class Projection:
    """Linear projection with an optional bias."""

    weight: PackedWeight
    bias: Tensor | None

    def run(
        self,
        x: Tensor,
        out: Tensor | None,
        sums: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply rows by the weight, and add the bias."""
        return dense.linear(x, self.weight, self.bias, out=out, out_dtype=out_dtype, workspace=sums)


@dataclass(frozen=True)
class ResidualBlock:
    """Residual block: x + silu(inner(x)); outer(x) replaces the first x if widths differ."""

    inner: Projection
    outer: Projection | None


@dataclass(frozen=True)
class ResidualHead:
    """One draft head: residual blocks and an LM head."""

    blocks: tuple[ResidualBlock, ...]
    lm_head: Projection


class ResidualHeads:
    """Medusa or Hydra heads of a checkpoint.

    Args:
        heads: the heads in drafting order.
        target: the model that they draft for.
        reads_tokens: whether heads read the newest token and the earlier drafts.
        prefix: prefix layer whose states the heads read; None: they read the target's states.

    Attributes:
        heads, reads_tokens, prefix: the arguments.
        hidden_size, dtype, device: properties of the target's states.
        vocab_size: the target's vocabulary size.
    """

    def __init__(
        self,
        heads: Sequence[ResidualHead],
        target: Transformer,
        *,
        reads_tokens: bool,
        prefix: PrefixLayer | None = None,
    ) -> None:
        self.heads, self.reads_tokens, self.prefix = heads, reads_tokens, prefix
        self.hidden_size, self.dtype, self.device = target.hidden_size, target.dtype, target.device
        self.vocab_size = target.config.vocab_size
        self._embedding = target.embedding
        projections = [
            projection.weight
            for head in heads
            for one in head.blocks
            for projection in (one.inner, one.outer, head.lm_head)
            if projection is not None
        ]
        sizes = {(one.workspace_per_row, one.max_workspace_rows): one for one in projections}
        self._weights = list(sizes.values())
        self._inputs, self._gates, self._added, self._wide, self._even, self._odd = (
            torch.empty(0, 0),
        ) * 6

    def reserve(self, requests: int) -> None:
        """Allocate buffers for up to `requests` requests."""
        width = self.hidden_size

        def new(columns: int) -> Tensor:
            return torch.empty(requests, columns, dtype=self.dtype, device=self.device)

        self._inputs = new((1 + len(self.heads) * self.reads_tokens) * width)
        self._gates = new(2 * width).fill_(1)  # second half stays 1: silu_mul multiplies by it
        self._added, self._wide = new(width), new(width)
        self._even, self._odd = new(width), new(width)

    def sums_size(self, requests: int) -> int:
        """Return the size of the workspace of linear layers, in floats."""
        return max(dense.linear_workspace_size(requests, one) for one in self._weights)

    def read_token(self, index: int, token_ids: Tensor) -> None:
        """Embed the tokens, int32 [requests], that head `index` is the first to read."""
        begin = (1 + index) * self.hidden_size
        into = self._inputs[: token_ids.shape[0], begin : begin + self.hidden_size]
        into.copy_(dense.embedding(token_ids, self._embedding))

    def logits(self, index: int, states: Tensor, out: Tensor | None, sums: Tensor | None) -> Tensor:
        """Return the fp32 logits of head `index`.

        Args:
            index: index of the head, from 0.
            states: [requests, hidden_size], states of the target or of the prefix layer.
            out: [requests, vocab_size], receives the logits.
            sums: linear workspace.
        """
        head = self.heads[index]
        width = self.hidden_size
        rows = states.shape[0]
        x = states
        if self.reads_tokens:
            inputs = self._inputs[:rows]
            inputs[:, :width].copy_(states)
            x = inputs[:, : (2 + index) * width]
        gates, added = self._gates[:rows], self._added[:rows]
        for place, block in enumerate(head.blocks):
            gates[:, :width].copy_(block.inner.run(x, added, sums))
            dense.silu_mul(gates, out=added)
            if block.outer is not None:
                x = block.outer.run(x, self._wide[:rows], sums)
            x = torch.add(x, added, out=(self._even, self._odd)[place % 2][:rows])
        return head.lm_head.run(x, out, sums, torch.float32)


def load_medusa(
    target: Transformer, directory: str | Path, *, quantization: str | None = None
) -> ResidualHeads:
    """Load Medusa heads, in the layout of the authors or of vLLM.

    The tensors determine the number of heads, since config.json is wrong in some published files.

    Args:
        target: the model that they draft for.
        directory: the heads' directory.
        quantization: format of the heads' LM heads; None: the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    source = open_head(directory, target.settings.of_drafter(quantization), _MEDUSA_FILES)
    raw = read_config(directory)
    size = raw.get("truncated_vocab_size") or target.config.vocab_size
    if size != target.config.vocab_size:
        raise ModelError(
            f"{directory / 'config.json'}: truncated_vocab_size is {size!s:.60}, and must be the "
            f"target's vocab_size {target.config.vocab_size}"
        )
    return _load(target, source, directory, _MEDUSA, "Medusa heads", 0)


def load_hydra(
    target: Transformer, directory: str | Path, *, quantization: str | None = None
) -> ResidualHeads:
    """Load Hydra heads, or Hydra++ heads with their prefix layer, in the authors' layout.

    Args:
        target, directory, quantization: as for `load_medusa`.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target; or
            the heads are of an unsupported kind, such as those with cross attention.
    """
    directory = Path(directory)
    source = open_head(directory, target.settings.of_drafter(quantization), _HYDRA_FILES)
    raw = read_config(directory)
    kind = raw.get("hydra_head_arch", "mlp")
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"{directory / 'config.json'}: hydra_head_arch must be {' or '.join(_ARCHITECTURES)}, "
            f"got {kind!s:.60}"
        )
    offset = raw.get("hidden_state_offset", 0)
    if offset != 0:
        raise ModelError(
            f"{directory / 'config.json'}: hidden_state_offset must be 0, got {offset!r:.60}"
        )
    grounded = raw.get("grounded_heads", True)
    if not isinstance(grounded, bool):
        raise ModelError(
            f"{directory / 'config.json'}: grounded_heads must be true or false, "
            f"got {grounded!r:.60}"
        )
    if grounded and target.config.embedding_scale != 1.0:
        raise ModelError(f"{directory}: Hydra heads cannot read the target's scaled embedding")
    has_prefix = kind == _ARCHITECTURES[1]
    return _load(target, source, directory, _HYDRA, "Hydra heads", int(grounded), has_prefix)


def _load(
    target: Transformer,
    source: WeightSource,
    directory: Path,
    layouts: Sequence[_Layout],
    what: str,
    reads_tokens: int,
    has_prefix: bool = False,
) -> ResidualHeads:
    layout = _layout_of(source.names(), layouts, directory, what)
    blocks_of = _count(source.names(), layout.block)
    heads = []
    for index, num_blocks in enumerate(blocks_of):
        widths = [(1 + reads_tokens * (1 + index)) * target.hidden_size]
        widths += [target.hidden_size] * (num_blocks - 1)
        blocks = tuple(
            _block(source, layout.name(index, block), width, target.hidden_size)
            for block, width in enumerate(widths)
        )
        name = layout.lm_head.format(head=index, blocks=num_blocks)
        vocab_size, quantization = target.config.vocab_size, source.settings.quantize_head
        lm_head = _projection(source, name, target.hidden_size, vocab_size, quantization)
        heads.append(ResidualHead(blocks, lm_head))
    prefix = None
    if has_prefix:
        prefix = load_prefix(source, directory, heads[0].lm_head.weight, target)
    refuse_unread(source, directory, what, UNREAD if has_prefix else ())
    logger.info("%s: %d %s of %s blocks", directory, len(heads), what, blocks_of)
    return ResidualHeads(heads, target, reads_tokens=bool(reads_tokens), prefix=prefix)


def _layout_of(
    names: Collection[str], layouts: Sequence[_Layout], directory: Path, what: str
) -> _Layout:
    for one in layouts:
        if f"{one.name(0, 0)}.weight" in names:
            return one
    looked = ", ".join(f"{one.name(0, 0)}.weight" for one in layouts)
    raise ModelError(f"{directory}: the file holds no {what}; looked for tensors named {looked}")


def _count(names: Collection[str], block: str) -> list[int]:
    """Return the number of blocks of each head."""
    pattern = re.escape(f"{block}.weight").replace(r"\{head\}", r"(\d+)")
    pattern = pattern.replace(r"\{block\}", r"(\d+)")
    found = {match.groups() for name in names if (match := re.fullmatch(pattern, name))}
    heads = sorted({int(head) for head, _ in found})
    return [sum(int(head) == one for head, _ in found) for one in range(len(heads))]


def _block(source: WeightSource, name: str, width: int, hidden_size: int) -> ResidualBlock:
    inner = _projection(source, name, width, hidden_size, "none")
    if width == hidden_size:
        return ResidualBlock(inner, None)
    other = name.removesuffix("linear") + "res_connection"
    return ResidualBlock(inner, _projection(source, other, width, hidden_size, "none"))


def _projection(
    source: WeightSource, name: str, inputs: int, outputs: int, quantization: str
) -> Projection:
    weight = source.linear("", (name,), (outputs,), inputs, quantization=quantization)
    has_bias = f"{name}.bias" in source.names()
    return Projection(weight, source.bias("", (name,), (outputs,)) if has_bias else None)
