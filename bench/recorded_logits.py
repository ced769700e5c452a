# SPDX-License-Identifier: Apache-2.0
"""Logits of a real model on real text: the bundled model reads the benchmarks' own prompts.

Kernels take different times on a trained model's rows than on random ones: some rows are peaked,
some flat, and tokens that never occur have much lower logits.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from specops import batching
from specops.api.tokenizer import Tokenizer
from specops.batching import OutputMode
from specops.engine.models import StepBatch, Transformer, load_model
from torch import Tensor

from bench.common import BENCH, ROOT

MODEL = ROOT / "python" / "specops" / "assets"
PAGE_SIZE = 16


@dataclass(frozen=True)
class Recorded:
    """Rows of logits in the order of the text, and the token that follows each row in the text.

    Attributes:
        logits: [rows, vocab_size], float32.
        next_token_ids: [rows], int32.
    """

    logits: Tensor
    next_token_ids: Tensor

    def rolled(self, rows: int) -> "Recorded":
        """Return a copy with the first `rows` rows moved to the end."""
        return Recorded(self.logits.roll(-rows, 0), self.next_token_ids.roll(-rows, 0))


def record(device: torch.device, num_rows: int, max_prompt: int) -> Recorded:
    """Run the model on prompts, at most `max_prompt` tokens of each, for `num_rows` rows."""
    model = load_model(MODEL, device=device)
    logits, following = [], []
    left = num_rows
    for token_ids in prompts(Tokenizer.from_dir(MODEL)):
        rows = min(left, len(token_ids) - 1, max_prompt)
        logits.append(one_step(model, token_ids[:rows]))
        following.append(torch.tensor(token_ids[1 : rows + 1], dtype=torch.int32))
        left -= rows
        if left == 0:
            return Recorded(torch.cat(logits), torch.cat(following).to(device))
    raise ValueError(f"record: num_rows must be at most {num_rows - left}, got {num_rows}")


def prompts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the benchmarks' prompts as tokens."""
    for kind in ("edits", "completions"):
        for prompt in json.loads((BENCH / "prompts" / f"{kind}.json").read_text()):
            yield tokenizer.encode(prompt["text"])


def one_step(model: Transformer, token_ids: list[int]) -> Tensor:
    """Return the logits [len(token_ids), vocab_size] of one request, read in one step."""
    rows, device = len(token_ids), model.device
    pages = -(-rows // PAGE_SIZE)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    kv_lens, kv_indptr = ints(rows), ints(0, pages)
    kv_indices = torch.arange(pages, dtype=torch.int32, device=device)
    indices = batching.prepare_batch(
        ints(rows),
        kv_lens,
        ints(OutputMode.ALL),
        kv_indptr,
        kv_indices,
        page_size=PAGE_SIZE,
    )
    batch = StepBatch(
        token_ids=ints(*token_ids),
        positions=indices.positions,
        cache_slots=indices.cache_slots,
        qo_indptr=indices.qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_lens=kv_lens,
    )
    cache = model.new_kv_cache(pages, PAGE_SIZE)
    return model.logits(model.forward(batch, cache)).clone()
