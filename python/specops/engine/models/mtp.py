# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules: what the model families call them, their weights, their pass.

A module drafts one token further than the target. Its row i reads the embedding of token i + m
(module m = 1, 2, ..) and a hidden state of position i: the target's, after its final norm, or the
module's before it. Both are normalised, laid side by side, projected back to the hidden size, and
sent through one decoder layer; the target's own LM head reads the result.
"""

import re
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.errors import ModelError
from specops.engine.models.config import ModelConfig, read_config
from specops.engine.models.loader import Checkpoint, RandomWeights, Source, load_layer
from specops.engine.models.transformer import (
    ActivationBuffers,
    Activations,
    KvCache,
    Layer,
    LayerBatch,
    Transformer,
)


@dataclass(frozen=True, kw_only=True)
class MtpConvention:
    """How one family names its modules' tensors, and what it feeds them.

    In names, {index} is the module's number from 0 and {layer} the number of decoder layers below
    it. A name without either is shared by all modules.

    Attributes:
        families: the models that use it.
        count_fields: where config.json says how many modules there are; the first one present.
        embed_norm: of the embedding's norm.
        hidden_norm: of the hidden state's norm.
        projection: of the matrix [hidden_size, 2 * hidden_size], without ".weight" or ".bias".
        head_norm: of the norm before the LM head; None: there is none.
        block: what the names of the decoder layer begin with.
        copies: tensors that checkpoints of the family repeat for each module; the target's own
            embedding and LM head are used in their place.
        hidden_first: the hidden state, not the embedding, is the projection's first half.
        norm_offset: added to every norm weight of the modules as it is loaded, and rounded to the
            model's dtype (Gemma's and Qwen3-Next's 1 + w).
        recycle_normed: a later draft reads the state after the head norm, not before it.
        masks_position_0: the embedding read at position 0 is replaced by zeros. True of no family
            here: some engines do it, which takes the second token from every first draft.
        chained: module m reads what module m - 1 gave; otherwise each reads the target's state.
    """

    families: tuple[str, ...]
    count_fields: tuple[str, ...] = ("num_nextn_predict_layers",)
    embed_norm: str
    hidden_norm: str
    projection: str
    head_norm: str | None
    block: str
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    norm_offset: float = 0.0
    recycle_normed: bool = True
    masks_position_0: bool = False
    chained: bool = True


CONVENTIONS: dict[str, MtpConvention] = {
    "deepseek_v3": MtpConvention(
        families=("DeepSeek-V3", "DeepSeek-R1", "GLM-4.5", "the bundled model"),
        embed_norm="model.layers.{layer}.enorm",
        hidden_norm="model.layers.{layer}.hnorm",
        projection="model.layers.{layer}.eh_proj",
        head_norm="model.layers.{layer}.shared_head.norm",
        block="model.layers.{layer}.",
        copies=("model.layers.{layer}.embed_tokens", "model.layers.{layer}.shared_head.head"),
    ),
    "mimo": MtpConvention(
        families=("MiMo-7B",),
        embed_norm="model.mtp_layers.{index}.token_layernorm",
        hidden_norm="model.mtp_layers.{index}.hidden_layernorm",
        projection="model.mtp_layers.{index}.input_proj",
        head_norm="model.mtp_layers.{index}.final_layernorm",
        block="model.mtp_layers.{index}.",
        hidden_first=True,
    ),
    "ernie4_5": MtpConvention(
        families=("ERNIE-4.5",),
        embed_norm="model.mtp_emb_norm.{index}",
        hidden_norm="model.mtp_hidden_norm.{index}",
        projection="model.mtp_linear_proj.{index}",
        head_norm=None,
        block="model.mtp_block.{index}.",
    ),
    "qwen3_next": MtpConvention(
        families=("Qwen3-Next", "Qwen3.5"),
        count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        head_norm="mtp.norm",
        block="mtp.layers.{index}.",
        norm_offset=1.0,
    ),
}

# What the names of the block's tensors give away about blocks that do not run yet.
_FOREIGN_BLOCKS = {
    "mlp.experts.": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "self_attn.kv_a_proj": "multi-head latent attention",
    "linear_attn.": "linear attention",
}


@dataclass(frozen=True)
class MtpModule:
    """The weights of one module; the projection packed."""

    embed_norm: Tensor
    hidden_norm: Tensor
    projection: PackedWeight
    projection_bias: Tensor | None
    layer: Layer
    head_norm: Tensor | None


class MtpOutput(NamedTuple):
    """What a module gives for its rows; both [rows, hidden_size], often the same tensor."""

    hidden: Tensor  # what the LM head reads
    recycled: Tensor  # what the next draft, or the next module, reads as its hidden state


@dataclass(slots=True, kw_only=True)
class MtpBatch(LayerBatch):
    """The rows of one pass of a module, and where their tokens and states are.

    The first two are of `batching.DraftIndices`; the others as `dense.mtp_input` takes them.
    """

    row_to_request: Tensor  # int32 [rows]
    source_rows: Tensor  # int32 [rows]
    slots: Tensor  # int32 [batch]
    token_ids: Tensor  # int32 [num_slots, max_len]
    lens: Tensor  # int32 [num_slots]
    draft_token_ids: Tensor  # int32 [num_slots, k]
    kept: Tensor | None = None  # [num_slots, window, hidden_size]


class MtpModules:
    """The modules of a checkpoint on top of their target, whose embedding and RoPE they share.

    Attributes:
        convention: what they are fed.
        modules: in the order in which they draft.
        lm_head: the target's, or the rows of it that a reduced draft vocabulary keeps.
        token_map: int32 [draft vocabulary]: the token of each row of `lm_head`; None: all tokens.
    """

    def __init__(
        self,
        target: Transformer,
        convention: MtpConvention,
        modules: list[MtpModule],
        *,
        lm_head: PackedWeight,
        token_map: Tensor | None = None,
    ) -> None:
        self.convention = convention
        self.modules = modules
        self.lm_head = lm_head
        self.token_map = token_map
        self._target = target
        self._activations = ActivationBuffers(target.config, target.dtype, target.device)
        self._pairs: Tensor | None = None

    @property
    def num_modules(self) -> int:
        """How many modules there are."""
        return len(self.modules)

    @property
    def hidden_size(self) -> int:
        """Of the target's states, and the modules'."""
        return self._target.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the states."""
        return self._target.dtype

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        self._activations.reserve(rows)
        if self._pairs is None or self._pairs.shape[0] < rows:
            width = 2 * self._target.config.hidden_size
            target = self._target
            self._pairs = torch.empty(rows, width, dtype=target.dtype, device=target.device)

    def new_kv_cache(self, num_pages: int, page_size: int) -> KvCache:
        """Allocates the paged cache of every module."""
        return self._target.new_kv_cache(num_pages, page_size, num_layers=self.num_modules)

    def kv_bytes_per_token(self) -> int:
        """Returns the bytes one cached token takes over all modules."""
        target = self._target
        return target.kv_bytes_per_token() // target.config.num_layers * self.num_modules

    def sums_size(self, rows: int, outputs: int) -> int:
        """Returns the floats that projections split their sums with, the head of `outputs` too."""
        sizes = [dense.linear_workspace_size(outputs, self.lm_head)]
        for module in self.modules[:1]:  # the others have the same shapes
            layer = module.layer
            for weight in (module.projection, layer.qkv, layer.o, layer.gate_up, layer.down):
                sizes.append(dense.linear_workspace_size(rows, weight))
        return max(sizes)

    def forward(self, index: int, batch: MtpBatch, hidden: Tensor, cache: KvCache) -> MtpOutput:
        """Runs module `index` over rows and writes their keys and values.

        Args:
            index: which module, from 0; its row at position i reads token i + index + 1.
            batch: the rows.
            hidden: [source rows, hidden_size], the target's states after its final norm, or what
                this module or the one before it gave as `recycled`.
            cache: from `new_kv_cache`.

        Returns:
            The states. They lie in this object's own buffers: the next call overwrites them.
        """
        module, convention, target = self.modules[index], self.convention, self._target
        eps = target.config.rms_norm_eps
        rows = batch.positions.shape[0]
        self.reserve(rows)
        assert self._pairs is not None
        buffers = self._activations.first(rows)
        pairs = dense.mtp_input(
            batch.row_to_request,
            batch.positions,
            batch.source_rows,
            batch.slots,
            batch.token_ids,
            batch.lens,
            batch.draft_token_ids,
            target.embedding,
            module.embed_norm,
            module.hidden_norm,
            hidden,
            eps=eps,
            ahead=index + 1,
            kept=batch.kept,
            hidden_first=convention.hidden_first,
            mask_first_position=convention.masks_position_0,
            out=self._pairs[:rows],
        )
        residual, sums = buffers.residual, batch.sums
        dense.linear(pairs, module.projection, module.projection_bias, out=residual, workspace=sums)
        dense.rms_norm(residual, module.layer.input_norm, eps, out=buffers.normed)
        target.run_layer(module.layer, batch, cache.layers[index], buffers)
        return self._finish(module, buffers)

    def _finish(self, module: MtpModule, buffers: Activations) -> MtpOutput:
        if module.head_norm is None:
            hidden = buffers.residual.add_(buffers.branch)
            return MtpOutput(hidden, hidden)
        eps = self._target.config.rms_norm_eps
        hidden = dense.rms_norm(
            buffers.branch, module.head_norm, eps, residual=buffers.residual, out=buffers.normed
        )
        recycled = hidden if self.convention.recycle_normed else buffers.residual
        return MtpOutput(hidden, recycled)

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Returns the fp32 logits [rows, draft vocabulary] of rows that `forward` returned."""
        return dense.linear(hidden, self.lm_head, out=out, out_dtype=torch.float32, workspace=sums)


class _Offset:
    """A source of the tensors of modules, which remembers which were read; norms get an offset."""

    def __init__(self, source: Source, norm_offset: float) -> None:
        self._source = source
        self._norm_offset = norm_offset
        self.read: set[str] = set()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns one tensor; the vectors that are no biases are norms."""
        self.read.add(name)
        is_norm = len(shape) == 1 and not name.endswith(".bias")
        if not (is_norm and self._norm_offset):
            return self._source.get(name, shape, dtype)
        weight = self._source.get(name, shape, torch.float32)
        return (weight + self._norm_offset).to(dtype)


def load_mtp(
    target: Transformer,
    directory: str | Path,
    *,
    draft_directory: str | Path | None = None,
    draft_vocab: str | Path | None = None,
    load_format: str = "auto",
) -> MtpModules:
    """Loads the MTP modules that belong to a target.

    The convention is told by the names of the tensors; config.json says how many modules there
    are. The target's embedding and LM head serve the modules too: copies in the checkpoint are
    left unread.

    Args:
        target: the model that the modules draft for.
        directory: the directory the target was loaded from.
        draft_directory: another directory that holds the modules, with its own config.json.
        draft_vocab: a safetensors file with the tensor `d2t`, int64 [draft vocabulary], in
            ascending order: row i of the draft head is token i + d2t[i], as in EAGLE-3's
            checkpoints. The head then proposes no other tokens, and costs less.
        load_format: "auto"; or "dummy" for random weights, as the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    where = Path(draft_directory) if draft_directory is not None else directory
    if not where.is_dir():
        raise ModelError(f"{where}: no such directory")
    raw = _text_config(read_config(where))
    config = target.config
    for field in ("hidden_size", "vocab_size"):
        wanted = getattr(config, field)
        if raw.get(field, wanted) != wanted:
            raise ModelError(
                f"{where / 'config.json'}: {field} is {raw[field]}, but the target in {directory} "
                f"has {wanted}"
            )
    with ExitStack() as stack:
        if load_format == "dummy":
            source: Source = RandomWeights(target.device)
            names: Collection[str] = ()
            convention, layers = _dummy_layers(config, raw, where)
        else:
            source = checkpoint = Checkpoint(where, target.device, stack)
            names = checkpoint.names()
            convention, layers = _found_layers(names, raw, where)
        recorded = _Offset(source, convention.norm_offset)
        modules = [
            _load_module(target, convention, recorded, index, layer, names)
            for index, layer in enumerate(layers)
        ]
        _refuse_unread(names, recorded.read, convention, layers, where)
    lm_head, token_map = target.lm_head, None
    if draft_vocab is not None:
        token_map = _token_map(Path(draft_vocab), config.vocab_size)
        lm_head = _reduced_head(target, directory, token_map, load_format)
        token_map = token_map.to(target.device)
    return MtpModules(target, convention, modules, lm_head=lm_head, token_map=token_map)


def _found_layers(
    names: Collection[str], raw: dict[str, Any], where: Path
) -> tuple[MtpConvention, list[int]]:
    """The convention of a checkpoint's modules, and their numbers."""
    convention = _convention_of(names, raw, where)
    layers = _layers_of(names, convention, raw, where)
    _refuse_foreign(names, convention, layers, where)
    return convention, layers


def _dummy_layers(
    config: ModelConfig, raw: dict[str, Any], where: Path
) -> tuple[MtpConvention, list[int]]:
    """The convention of modules without a checkpoint, and their numbers."""
    is_mimo = config.architecture == "MiMoForCausalLM"
    convention = CONVENTIONS["mimo" if is_mimo else "deepseek_v3"]
    field, count = _declared(raw, convention, where)
    if not count:
        raise ModelError(f"{where / 'config.json'}: {field} must be at least 1")
    return convention, list(range(config.num_layers, config.num_layers + count))


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the decoder: multimodal families nest it."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def _pattern(convention: MtpConvention) -> re.Pattern[str]:
    """Matches one tensor of each module; group 1 is its {index} or {layer}."""
    name = convention.projection + ".weight"
    if "{" not in name:
        name = convention.block + "input_layernorm.weight"
    return re.compile(re.sub(r"\\{(index|layer)\\}", r"(\\d+)", re.escape(name)))


def _convention_of(names: Collection[str], raw: dict[str, Any], where: Path) -> MtpConvention:
    for convention in CONVENTIONS.values():
        if any(_pattern(convention).fullmatch(name) for name in names):
            return convention
    fields = {field for one in CONVENTIONS.values() for field in one.count_fields}
    said = [f"{field} is {raw[field]}" for field in sorted(fields) if raw.get(field)]
    but = f", though {said[0]} in config.json" if said else ""
    known = ", ".join(one.projection + ".weight" for one in CONVENTIONS.values())
    raise ModelError(
        f"{where}: the checkpoint holds no MTP weights{but}; looked for tensors named {known}"
    )


def _declared(
    raw: dict[str, Any], convention: MtpConvention, where: Path
) -> tuple[str, int | None]:
    """The field that says how many modules there are, and what it says."""
    for field in convention.count_fields:
        if raw.get(field) is not None:
            count = raw[field]
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ModelError(
                    f"{where / 'config.json'}: {field} must be a number of modules, got {count!r}"
                )
            return field, count
    return convention.count_fields[0], None


def _layers_of(
    names: Collection[str], convention: MtpConvention, raw: dict[str, Any], where: Path
) -> list[int]:
    """The number in the tensor names of each module, in order; as many as config.json says."""
    pattern = _pattern(convention)
    found = sorted(int(match.group(1)) for name in names if (match := pattern.fullmatch(name)))
    field, count = _declared(raw, convention, where)
    if count is not None and count != len(found):
        raise ModelError(
            f"{where / 'config.json'}: {field} is {count}, but the checkpoint holds the tensors of "
            f"{len(found)} MTP module{'s' if len(found) > 1 else ''} ({pattern.pattern})"
        )
    first = found[0]
    if "{layer}" not in convention.block:
        expected = range(len(found))
    elif first != raw.get("num_hidden_layers", first) and first != 0:
        raise ModelError(
            f"{where / 'config.json'}: num_hidden_layers is {raw['num_hidden_layers']}, but the "
            f"first MTP module's tensors are those of layer {first}"
        )
    else:  # a draft directory of its own may count its modules from 0
        expected = range(first, first + len(found))
    if found != list(expected):
        raise ModelError(f"{where}: MTP modules must be numbered without gaps, got {found}")
    return found


def _load_module(
    target: Transformer,
    convention: MtpConvention,
    source: _Offset,
    index: int,
    layer: int,
    names: Collection[str],
) -> MtpModule:
    hidden, dtype = target.config.hidden_size, target.dtype

    def named(name: str) -> str:
        return name.format(index=index, layer=layer)

    def norm(name: str) -> Tensor:
        return source.get(named(name) + ".weight", (hidden,), dtype)

    projection = named(convention.projection)
    has_bias = projection + ".bias" in names
    return MtpModule(
        embed_norm=norm(convention.embed_norm),
        hidden_norm=norm(convention.hidden_norm),
        projection=dense.pack_weight(
            source.get(projection + ".weight", (hidden, 2 * hidden), dtype)
        ),
        projection_bias=(source.get(projection + ".bias", (hidden,), dtype) if has_bias else None),
        layer=load_layer(target.config, source, named(convention.block), dtype, None),
        head_norm=norm(convention.head_norm) if convention.head_norm else None,
    )


def _refuse_foreign(
    names: Collection[str], convention: MtpConvention, layers: list[int], where: Path
) -> None:
    """Refuses modules whose decoder layer is of a kind that does not run yet, by its name."""
    for index, layer in enumerate(layers):
        prefix = convention.block.format(index=index, layer=layer)
        for part, kind in _FOREIGN_BLOCKS.items():
            for name in names:
                if name.startswith(prefix + part):
                    raise ModelError(
                        f"{where}: the MTP module's block is {kind} (tensor {name}), which is "
                        "not supported yet"
                    )


def _refuse_unread(
    names: Collection[str],
    read: set[str],
    convention: MtpConvention,
    layers: list[int],
    where: Path,
) -> None:
    """Refuses tensors of the modules that nothing has read: the block is of another kind."""
    for index, layer in enumerate(layers):
        prefix = convention.block.format(index=index, layer=layer)
        copies = tuple(one.format(index=index, layer=layer) for one in convention.copies)
        for name in sorted(names):
            if not name.startswith(prefix) or name in read or name.startswith(copies or ("\0",)):
                continue
            raise ModelError(f"{where}: tensor {name} has no place in a dense MTP module")


def _token_map(path: Path, vocab_size: int) -> Tensor:
    """The tokens of a reduced draft vocabulary, int32, ascending."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; expected a safetensors file with the tensor d2t")
    try:
        with safe_open(path, framework="pt") as file:
            if "d2t" not in file.keys():  # noqa: SIM118
                raise ModelError(f"{path}: tensor d2t is missing")
            offsets: Tensor = file.get_tensor("d2t")
    except SafetensorError as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
        raise ModelError(
            f"{path}: d2t must be int64 [draft vocabulary], got {offsets.dtype} "
            f"{list(offsets.shape)}"
        )
    tokens = offsets + torch.arange(offsets.numel())
    if int(tokens[0]) < 0 or int(tokens[-1]) >= vocab_size or bool((tokens.diff() <= 0).any()):
        raise ModelError(
            f"{path}: d2t must name tokens in ascending order, each in [0, {vocab_size}), as "
            "i + d2t[i]"
        )
    return tokens.to(torch.int32)


def _reduced_head(
    target: Transformer, directory: Path, token_map: Tensor, load_format: str
) -> PackedWeight:
    """The rows of the target's LM head that a draft vocabulary keeps, packed."""
    config = target.config
    if config.tie_word_embeddings:
        return dense.pack_weight(target.embedding[token_map.long().to(target.device)])
    shape = (config.vocab_size, config.hidden_size)
    with ExitStack() as stack:
        source: Source = (
            RandomWeights(target.device)
            if load_format == "dummy"
            else Checkpoint(directory, target.device, stack)
        )
        head = source.get("lm_head.weight", shape, target.dtype)
        return dense.pack_weight(head[token_map.long().to(target.device)])
