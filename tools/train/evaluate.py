# SPDX-License-Identifier: Apache-2.0
"""Held-out figures of an exported model: loss, bits per byte, acceptance of the MTP drafts.

Two views, because they answer different questions:

* *Held-out text.* Every held-out file as the model would read it: EOS, then the text, in windows of
  the full context that overlap by one token, so that each token of the text is predicted exactly
  once. (A later window starts with nothing before it, which costs a little: it is counted.)
* *Own continuations.* The first tokens of every held-out library module, continued greedily, which
  is what an engine does; there the draft of the draft can be judged as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train.corpus import Document
from tools.train.model import Model, rope_cos_sin, rotate
from tools.train.train import encode


@dataclass
class TextFigures:
    """Sums over held-out files.

    First-draft acceptance: over all rows i with a true token i+1, how often the argmax of MTP row
    i, which has read the true tokens 0..i+1, equals the argmax of target row i+1, which has read
    the same tokens. It is the chance that greedy verification keeps a first draft after a prefix
    of human text.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    nats: float = 0.0
    correct: int = 0
    mtp_rows: int = 0
    mtp_accepted: int = 0

    def summary(self) -> dict[str, float]:
        """The figures that the model card and `metrics.json` give."""
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
    """Measures `model` on `documents`, in fp32, with the weights as they were exported."""
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


def _second_step(model: Model, embedded: Tensor, first: Tensor, hidden: Tensor) -> Tensor:
    """The module's next step after each of its rows at once: hidden states [batch, rows, width].

    Row i drafted from (embedded[i], hidden[i]) and gave `first`[i]. Its next step runs at position
    i+1 on (the embedding of its draft, first[i]) and attends to the rows 0..i, which hold the
    target's hidden states, and to itself: exactly the cache that an engine has at that point.
    The draft is taken to be right, so its embedding is embedded[i+1].
    """
    config, layer = model.config, model.mtp()
    attention = layer.self_attn
    batch, rows, _ = first.shape
    cos, sin = rope_cos_sin(rows + 1, config, first.device)
    group = config.num_attention_heads // config.num_key_value_heads

    def project(embedding: Tensor, state: Tensor) -> Tensor:
        pair = torch.cat((layer.enorm(embedding), layer.hnorm(state)), dim=-1)
        projected: Tensor = layer.eh_proj(pair)
        return projected

    def heads(x: Tensor) -> Tensor:
        return x.view(batch, rows, -1, config.head_dim).transpose(1, 2)

    def keys_values(x: Tensor, first_position: int) -> tuple[Tensor, Tensor]:
        table = slice(first_position, first_position + rows)
        k = rotate(attention.k_norm(heads(attention.k_proj(x))), cos[table], sin[table])
        v = heads(attention.v_proj(x))
        return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    cached = layer.input_layernorm(project(embedded[:, :rows], hidden[:, :rows]))
    x = project(embedded[:, 1 : rows + 1], first)
    normed = layer.input_layernorm(x)
    q = rotate(attention.q_norm(heads(attention.q_proj(normed))), cos[1:], sin[1:])
    old_k, old_v = keys_values(cached, 0)
    own_k, own_v = keys_values(normed, 1)
    future = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ old_k.transpose(2, 3)).masked_fill(future, -torch.inf)
    own = (q * own_k).sum(-1, keepdim=True)
    weights = (torch.cat((scores, own), dim=-1) * config.head_dim**-0.5).softmax(-1)
    y = weights[..., :-1] @ old_v + weights[..., -1:] * own_v
    x = x + attention.o_proj(y.transpose(1, 2).reshape(batch, rows, -1))
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed_out: Tensor = layer.shared_head["norm"](x)
    return normed_out


@torch.no_grad()
def evaluate_continuations(
    model: Model,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    device: torch.device,
    prompt_tokens: int = 192,
    new_tokens: int = 64,
) -> dict[str, float]:
    """Continues every document greedily and counts which drafts greedy verification would keep.

    The second draft is counted where the first was kept, as it is in an engine.
    """
    encoded = [ids for ids in encode(tokenizer, documents) if len(ids) >= prompt_tokens]
    prompts = [torch.from_numpy(ids[:prompt_tokens].astype("int64")) for ids in encoded]
    tokens = torch.stack(prompts).to(device)
    cos, sin = rope_cos_sin(prompt_tokens + new_tokens, model.config, device)
    for length in range(prompt_tokens, prompt_tokens + new_tokens):
        hidden = model.hidden(tokens, cos[:length], sin[:length])
        following = model.logits(hidden[:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
    length = tokens.shape[1]
    hidden = model.hidden(tokens, cos[:length], sin[:length])
    embedded = model.model.embed_tokens(tokens[:, 1:])
    rows = length - 1
    first = model.mtp().draft(embedded, hidden[:, :-1], cos[:rows], sin[:rows])
    second = _second_step(model, embedded, first[:, : rows - 1], hidden)
    # Row i drafts token i+2; only tokens that the model chose itself are judged.
    own = slice(prompt_tokens - 1, rows - 2)
    kept = model.logits(first).argmax(-1)[:, own] == tokens[:, prompt_tokens + 1 : length - 1]
    again = model.logits(second).argmax(-1)[:, own] == tokens[:, prompt_tokens + 2 :]
    return {
        "prompts": len(prompts),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "mtp_first_draft_acceptance": round(kept.float().mean().item(), 4),
        "mtp_second_draft_acceptance": round(int(again[kept].sum()) / max(1, int(kept.sum())), 4),
    }
