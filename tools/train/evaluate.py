# SPDX-License-Identifier: Apache-2.0
"""Held-out metrics of an exported model: loss, bits per byte, acceptance of the MTP drafts.

Two views answer different questions:

* *Held-out text.* Every held-out file as the model would read it: EOS, then the text, in windows of
  the full context that overlap by one token, so that each token of the text is predicted exactly
  once. (A later window starts with no context, which costs a little: that is counted.)
* *Own continuations.* The first tokens of every held-out library module, continued greedily, as an
  engine does.

In both, `evaluate_text` judges only first drafts, at every row; chains of several drafts, in which
the module reads its own output, are judged at every few rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train.chains import Branches, draft_chains
from tools.train.corpus import Document
from tools.train.model import Experts, Model, rope_cos_sin
from tools.train.train import encode


@dataclass
class TextFigures:
    """Sums over held-out files.

    First-draft acceptance: over all rows i with a true token i+1, how often the argmax of MTP row
    i, which has read the true tokens 0..i+1, equals the argmax of target row i+1, which has read
    the same tokens. It estimates the probability that greedy verification keeps a first draft after
    a prefix of human text.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    nats: float = 0.0
    correct: int = 0
    mtp_rows: int = 0
    mtp_accepted: int = 0

    def summary(self) -> dict[str, float]:
        """Return the metrics for the model card and `metrics.json`."""
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "nats_per_token": round(self.nats / self.tokens, 4),
            "bits_per_byte": round(self.nats / math.log(2) / self.bytes, 4),
            "greedy_accuracy": round(self.correct / self.tokens, 4),
            "mtp_first_draft_acceptance": round(self.mtp_accepted / self.mtp_rows, 4),
        }


@torch.no_grad()
def evaluate_text(
    model: Model, tokenizer: Tokenizer, documents: Sequence[Document], device: torch.device
) -> TextFigures:
    """Measure `model` on `documents`, in fp32, with the weights as they were exported."""
    config = model.config
    window = config.max_position_embeddings
    cos, sin = rope_cos_sin(window, config, device)
    figures = TextFigures()
    for document, ids in zip(documents, encode(tokenizer, documents), strict=True):
        figures.documents += 1
        figures.bytes += len(document.text.encode("utf-8"))
        for start in range(0, len(ids) - 1, window - 1):
            tokens = torch.from_numpy(ids[start : start + window].astype("int64")).to(device)
            rows = len(tokens)
            hidden = model.hidden(tokens[None], cos[:rows], sin[:rows])
            logits = model.logits(hidden)[0].float()
            greedy = logits.argmax(-1)
            figures.tokens += rows - 1
            figures.nats += F.cross_entropy(logits[:-1], tokens[1:], reduction="sum").item()
            figures.correct += int((greedy[:-1] == tokens[1:]).sum())
            embedded = model.model.embed_tokens(tokens[None, 1:])
            size = rows - 1
            drafted = model.mtp().draft(embedded, hidden[:, :-1], cos[:size], sin[:size])
            drafts = model.logits(drafted)[0].argmax(-1)
            figures.mtp_rows += size
            figures.mtp_accepted += int((drafts == greedy[1:]).sum())
    return figures


@dataclass
class ChainFigures:
    """Draft chains and how many of their drafts greedy verification keeps.

    A draft counts as kept only while all drafts before it are kept, as in an engine; a chain is
    judged by the target's own greedy continuation of the tokens before it (`chains.py`).
    """

    depth: int
    chains: int = 0
    kept: list[int] = field(default_factory=list)  # by draft position

    def add(self, kept: Tensor) -> None:
        """Add chains: bool [depth, ...], whether a draft and all before it are right."""
        counts = kept.flatten(1).sum(1).tolist()
        self.kept = [a + b for a, b in zip(self.kept or [0] * self.depth, counts, strict=True)]
        self.chains += kept[0].numel()

    def summary(self) -> dict[str, Any]:
        """Return kept drafts by position, and for k = 1.. the tokens per step: kept plus one."""
        kept = [count / self.chains for count in self.kept]
        return {
            "chains": self.chains,
            "kept_by_position": [round(value, 4) for value in kept],
            "mean_acceptance_length": [
                round(1 + sum(kept[:k]), 3) for k in range(1, self.depth + 1)
            ],
        }


def _kept(
    model: Model,
    tokens: Tensor,
    starts: Tensor,
    depth: int,
    cos: Tensor,
    sin: Tensor,
    draft_vocab: Tensor | None = None,
) -> Tensor:
    kept: list[Tensor] = []
    for step, (drafts, judged) in enumerate(draft_chains(model, tokens, starts, depth, cos, sin)):
        if draft_vocab is None:
            right = drafts.argmax(-1) == judged.argmax(-1)
        else:
            right = draft_vocab[drafts[..., draft_vocab].argmax(-1)] == judged.argmax(-1)
        right = right[:, starts] if step == 0 else right
        kept.append(right & kept[-1] if kept else right)
    return torch.stack(kept)


@torch.no_grad()
def evaluate_chains(
    model: Model,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    device: torch.device,
    depth: int = 5,
    stride: int = 16,
    draft_vocab: Tensor | None = None,
) -> ChainFigures:
    """Draft `depth` tokens after every `stride`-th token of the documents, in fp32.

    The windows are those of `evaluate_text`; chains that would leave the context are skipped. With
    `draft_vocab`, int64 token ids, the module proposes no other tokens.
    """
    window = model.config.max_position_embeddings
    cos, sin = rope_cos_sin(window, model.config, device)
    figures = ChainFigures(depth)
    for ids in encode(tokenizer, documents):
        for start in range(0, len(ids) - 1, window - 1):
            tokens = torch.from_numpy(ids[start : start + window].astype("int64")).to(device)
            rows = min(len(tokens) - 1, window - depth)
            starts = torch.arange(0, rows, stride, device=device)
            figures.add(_kept(model, tokens[None], starts, depth, cos, sin, draft_vocab))
    return figures


@torch.no_grad()
def evaluate_continuations(
    model: Model,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    device: torch.device,
    prompt_tokens: int = 192,
    new_tokens: int = 64,
    depth: int = 5,
) -> dict[str, Any]:
    """Continue every document greedily and draft after every token of the continuations."""
    encoded = [ids for ids in encode(tokenizer, documents) if len(ids) >= prompt_tokens]
    prompts = [torch.from_numpy(ids[:prompt_tokens].astype("int64")) for ids in encoded]
    tokens = torch.stack(prompts).to(device)
    cos, sin = rope_cos_sin(prompt_tokens + new_tokens + depth, model.config, device)
    embedding, layers = model.model.embed_tokens, model.model.layers[:-1]
    end = torch.tensor([prompt_tokens - 1], device=device)
    target = Branches(list(layers), embedding(tokens), cos, sin, end)
    hidden = model.model.norm(target.out[:, -1:])
    for _ in range(new_tokens):
        following = model.logits(hidden).argmax(-1)
        tokens = torch.cat((tokens, following), dim=1)
        hidden = model.model.norm(target.step(embedding(following)))
    # Row i drafts token i+2: an engine makes its first draft from the prompt's last row.
    starts = torch.arange(prompt_tokens - 1, tokens.shape[1] - 1, device=device)
    figures = ChainFigures(depth)
    for part in tokens.split(8):
        figures.add(_kept(model, part, starts, depth, cos, sin))
    return {
        "prompts": len(prompts),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        **figures.summary(),
    }


@torch.no_grad()
def evaluate_routing(
    model: Model, tokenizer: Tokenizer, documents: Sequence[Document]
) -> dict[str, list[float]]:
    """Return how many different experts neighboring rows use, averaged over layers and texts.

    The result also has the number for independent choices. It is empty for a model without experts.
    """
    layers = [one for one in model.modules() if isinstance(one, Experts)]
    if not layers:
        return {}
    window = model.config.max_position_embeddings
    cos, sin = rope_cos_sin(window, model.config, torch.device("cpu"))
    chosen: list[Tensor] = []  # [rows, experts] of a layer and text
    hooks = [
        one.register_forward_pre_hook(lambda layer, x: chosen.append(layer.weights(x[0])[0] > 0))
        for one in layers
    ]
    for ids in encode(tokenizer, documents):
        tokens = torch.from_numpy(ids[:window].astype("int64"))
        model.hidden(tokens[None], cos[: len(tokens)], sin[: len(tokens)])
    for hook in hooks:
        hook.remove()
    count = len(layers[0].experts)
    left = 1 - layers[0].top_k / count
    rows = (1, 2, 3, 4, 6, 8)
    of_rows = [
        torch.cat([one.unfold(0, size, size).any(-1).sum(-1) for one in chosen]) for size in rows
    ]
    return {
        "rows": list(rows),
        "distinct": [round(one.float().mean().item(), 2) for one in of_rows],
        "independent": [round(count * (1 - left**size), 2) for size in rows],
    }
