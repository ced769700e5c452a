# SPDX-License-Identifier: Apache-2.0
"""Draft chains from many rows of a text at once, with the target's own continuation.

The module drafts several tokens by reading its own output: step 1 of row i takes (Emb(t[i+1]),
h[i]), step s takes (Emb(draft s-1), the output of `shared_head.norm` at step s-1) one position
further. A draft is kept if it is the target's greedy choice after all drafts before it, so the
chain that counts is the target's own greedy continuation of t[0..i+1]: the target runs along with
the module, one row per chain and step, and both see exactly the cache that an engine has at that
point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tools.train.model import DecoderLayer, Model, rotate


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def keys_values(
    layer: DecoderLayer, normed: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    attention = layer.self_attn
    head_dim = attention.config.head_dim
    k = rotate(attention.k_norm(heads_of(attention.k_proj(normed), head_dim)), cos, sin)
    return k, heads_of(attention.v_proj(normed), head_dim)


class Branches:
    """Decoder layers over a text, then over chains that branch off some of its rows.

    A chain that branches off row e sees the text's rows 0..e and its own rows, the first of which
    is at position e+1. All chains grow by one row per `step`.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], x: Tensor, cos: Tensor, sin: Tensor, ends: Tensor
    ) -> None:
        rows = x.shape[1]
        self.layers = layers
        self.cos, self.sin, self.ends = cos, sin, ends
        self.unseen = torch.arange(rows, device=x.device) > ends[:, None]
        self.text: list[tuple[Tensor, Tensor]] = []
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        for layer in layers:
            self.text.append(keys_values(layer, layer.normed(x), cos[:rows], sin[:rows]))
            x = layer(x, cos[:rows], sin[:rows])
        self.out = x

    def step(self, x: Tensor) -> Tensor:
        """Compute every chain's next row: from [batch, chains, width] to the layers' output."""
        positions = self.ends + 1 + len(self.own[0])
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            x = layer.rest(x, self._attend(index, layer.normed(x), cos, sin))
        return x

    def _attend(self, index: int, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = self.layers[index].self_attn
        head_dim, heads = attention.config.head_dim, attention.config.num_key_value_heads
        batch, chains, _ = normed.shape
        q = rotate(attention.q_norm(heads_of(attention.q_proj(normed), head_dim)), cos, sin)
        q = q.view(batch, heads, -1, chains, head_dim) * head_dim**-0.5
        own = self.own[index]
        own.append(keys_values(self.layers[index], normed, cos, sin))
        text_k, text_v = self.text[index]
        scores = q.flatten(2, 3) @ text_k.transpose(2, 3)
        scores = scores.view(batch, heads, -1, chains, text_k.shape[2]).float()
        scores = scores.masked_fill(self.unseen, -torch.inf)
        own_scores = [(q * k[:, :, None]).float().sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(-1).to(text_v.dtype)
        on_text, *on_own = weights.split([text_k.shape[2], *[1] * len(own)], dim=-1)
        y = (on_text.flatten(2, 3) @ text_v).view(batch, heads, -1, chains, head_dim)
        for weight, (_, v) in zip(on_own, own, strict=True):
            y = y + weight * v[:, :, None]
        y = y.flatten(1, 2).transpose(1, 2).reshape(batch, chains, -1)
        out: Tensor = attention.o_proj(y)
        return out


def draft_chains(
    model: Model, tokens: Tensor, starts: Tensor, depth: int, cos: Tensor, sin: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (the module's logits, the target's logits) for draft 1, 2, .. `depth`.

    Draft 1 has the logits of every row of the module, [batch, length - 1, vocab]; the later ones
    have those of the rows `starts` (below length - 1), [batch, chains, vocab]. The target is
    frozen; gradients flow through the module, its recycled states and its keys.

    Args:
        model: the target and its module.
        tokens: [batch, length], text.
        starts: [chains], the rows of the module to continue from.
        depth: drafts per chain.
        cos: RoPE table of at least length + depth - 1 rows.
        sin: RoPE table of the same size.
    """
    module, embedding = model.mtp(), model.model.embed_tokens
    layers = [layer for layer in model.model.layers if layer is not module]
    with torch.no_grad():
        target = Branches(layers, embedding(tokens), cos, sin, starts + 1)
        hidden = model.model.norm(target.out)
        judged = model.logits(hidden[:, 1:])
    draft = Branches(
        [module], module.project(embedding(tokens[:, 1:]), hidden[:, :-1]), cos, sin, starts
    )
    drafted = module.head_norm(draft.out)
    yield model.logits(drafted), judged
    drafted, judged = drafted[:, starts], judged[:, starts]
    for _ in range(depth - 1):
        with torch.no_grad():
            embedded = embedding(judged.argmax(-1))
            judged = model.logits(model.model.norm(target.step(embedded)))
        drafted = module.head_norm(draft.step(module.project(embedded, drafted)))
        yield model.logits(drafted), judged
