# SPDX-License-Identifier: Apache-2.0
"""A whole decoding engine in one file: read it from top to bottom to see how a step works.

    python -m specops.minimal "def add(a, b):"
    python -m specops.minimal --model DIR --method mtp --drafts 3 "def add(a, b):" "class Stack:"

It reads a Llama or Qwen3 directory, keeps keys and values on pages, runs a batch of requests with
chunked prefill, drafts with n-grams or with the checkpoint's MTP module, verifies the drafts of all
requests in one pass of the model, and streams text. Everything numerical is a public op of this
package or an elementwise addition, and gives a row the same bits whatever else is in the batch. So
a request's tokens and logprobs are the same alone or in a batch, and with or without drafts. They
are also the same in `specops.engine`, the serving engine, which adds what a server needs: more
models, methods and parameters, preemption, a prefix cache, structured output, tensor parallelism.

The vocabulary of `MinimalEngine.step`: a *slot* is a request's place in every table. A *row* is one
position of one request in one step. A request with exactly one token that is not cached yet has a
row for that token and one for each of its drafts; any other request has a chunk of its prompt.

An example: one request with five prompt tokens, in chunks of four. The drafter proposes nothing in
step 1, and three drafts in step 2, of which step 3 rejects the second:

    step    text     cached    rows                      then
    1       5        0         tokens 0 to 3             cached 4; no logits
    2       5        4         token 4                   emits token 5; cached 5
    3       6        5         token 5, drafts 6, 7, 8   emits draft 6 and a new token 7; cached 7

The row of draft 6 stays valid, since the emitted token 6 equals the draft. The keys and values of
drafts 7 and 8 are overwritten by the next step, whose rows begin at position 7.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from specops import attention, batching, dense, sampling
from specops.attention import PagedBatch, PagedKv
from specops.batching import BatchIndices, DraftIndices
from specops.dense import ModuleRows, PackedWeight, TokenTables
from specops.ngram import ngram_propose

BUNDLED = Path(__file__).parent / "assets"
PAGE_SIZE = 16  # tokens
NO_LOGITS, LAST_ROW, ALL_ROWS = batching.OutputMode  # which rows of a request get logits


class Checkpoint:
    """A Hugging Face directory: its configuration, tensors, and table of rotary embeddings."""

    def __init__(self, directory: Path, max_len: int) -> None:
        config = json.loads((directory / "config.json").read_text())
        kind = config["architectures"][0]
        if kind not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            raise ValueError(f"{directory}: the model must be a Llama or Qwen3, got {kind}")
        num_heads = config["num_attention_heads"]
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // num_heads
        config["num_key_value_heads"] = config.get("num_key_value_heads") or num_heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
        self.cos_sin = attention.rope_cos_sin(max_len, config["head_dim"], theta, rope)
        self.config: dict[str, Any] = config
        self.tensors: dict[str, Tensor] = {}
        for path in directory.glob("*.safetensors"):
            self.tensors |= load_file(path)

    def packed(self, prefix: str, *names: str, activation: str | None = None) -> PackedWeight:
        """Return the named projections as one weight, in the layout that `dense.linear` reads."""
        weights = [self.tensors[f"{prefix}{name}_proj.weight"] for name in names]
        return dense.pack_weight(torch.cat(weights), activation=activation)


class Layer:
    """A decoder layer and its KV cache: attention with grouped queries, and a gated MLP."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, num_pages: int) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        self.eps, self.head_dim = config["rms_norm_eps"], config["head_dim"]
        num_kv_heads = config["num_key_value_heads"]
        self.qkv_heads = [config["num_attention_heads"], num_kv_heads, num_kv_heads]
        self.cos_sin = checkpoint.cos_sin
        self.input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self.qkv = checkpoint.packed(f"{prefix}self_attn.", "q", "k", "v")
        self.head_norms: dict[str, Any] = {  # Qwen3 has these weights, Llama does not
            "q_norm_weight": tensors.get(f"{prefix}self_attn.q_norm.weight"),
            "k_norm_weight": tensors.get(f"{prefix}self_attn.k_norm.weight"),
            "norm_eps": self.eps,
        }
        self.o = checkpoint.packed(f"{prefix}self_attn.", "o")
        self.mlp_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        # `linear` returns silu(gate) * up of a weight that was packed with an activation.
        self.gate_up = checkpoint.packed(f"{prefix}mlp.", "gate", "up", activation="silu")
        self.down = checkpoint.packed(f"{prefix}mlp.", "down")
        shape = (2, num_pages, PAGE_SIZE, num_kv_heads, self.head_dim)
        self.cache = PagedKv(*torch.zeros(shape, dtype=self.input_norm.dtype))

    def run(self, hidden: Tensor, rows: BatchIndices | DraftIndices, paged: PagedBatch) -> None:
        """Add the outputs of attention and of the MLP to the hidden states, in place."""
        normed = dense.rms_norm(hidden, self.input_norm, self.eps)
        heads = dense.linear(normed, self.qkv).view(len(hidden), -1, self.head_dim)
        q, k, v = torch.split(heads, self.qkv_heads, dim=1)
        q = attention.rope_append_kv(
            q, k, v, self.cache, rows.cache_slots, rows.positions, self.cos_sin, **self.head_norms
        )
        attended = attention.append_attention(q, self.cache, paged)
        hidden += dense.linear(attended.flatten(1), self.o)
        normed = dense.rms_norm(hidden, self.mlp_norm, self.eps)
        hidden += dense.linear(dense.linear(normed, self.gate_up), self.down)


class Model:
    """A Llama or Qwen3 with its KV cache, and its MTP module if the checkpoint has one."""

    def __init__(self, directory: Path, num_pages: int, max_len: int) -> None:
        checkpoint = Checkpoint(directory, max_len)
        self.config, tensors = checkpoint.config, checkpoint.tensors
        prefixes = [f"model.layers.{i}." for i in range(self.config["num_hidden_layers"] + 1)]
        self.layers = [Layer(checkpoint, prefix, num_pages) for prefix in prefixes[:-1]]
        # A checkpoint stores its MTP module as one more layer.
        has_mtp = f"{prefixes[-1]}eh_proj.weight" in tensors
        self.mtp = MtpModule(checkpoint, prefixes[-1], num_pages) if has_mtp else None
        self.embedding = tensors["model.embed_tokens.weight"]
        self.final_norm = tensors["model.norm.weight"]
        self.lm_head = dense.pack_weight(tensors.get("lm_head.weight", self.embedding))

    def forward(self, input_ids: Tensor, rows: BatchIndices, paged: PagedBatch) -> Tensor:
        """Run all rows through all layers, and return their hidden states after the final norm."""
        hidden = dense.embedding(input_ids, self.embedding)
        for layer in self.layers:
            layer.run(hidden, rows, paged)
        return dense.rms_norm(hidden, self.final_norm, self.config["rms_norm_eps"])

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the float32 logits of the given rows of the hidden states."""
        chosen = batching.gather_output_rows(hidden, rows)
        return dense.linear(chosen, self.lm_head, out_dtype=torch.float32)


class MtpModule:
    """A layer that drafts: it predicts token i + 2 from token i + 1 and the state of position i."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, num_pages: int) -> None:
        self.layer = Layer(checkpoint, prefix, num_pages)
        self.projection = checkpoint.packed(prefix, "eh")
        self.embedding = checkpoint.tensors["model.embed_tokens.weight"]
        self.embed_norm = checkpoint.tensors[f"{prefix}enorm.weight"]
        self.state_norm = checkpoint.tensors[f"{prefix}hnorm.weight"]
        self.head_norm = checkpoint.tensors[f"{prefix}shared_head.norm.weight"]
        self.eps = self.layer.eps

    def forward(
        self, states: Tensor, tokens: TokenTables, indices: DraftIndices, paged: PagedBatch
    ) -> Tensor:
        """Return the module's own states, from which the LM head computes the logits of drafts."""
        # A row's input is the normalized embedding of the next token, concatenated with the
        # normalized state.
        rows = ModuleRows(indices.row_to_request, indices.positions, indices.source_rows)
        pairs = dense.mtp_input(
            rows, tokens, self.embedding, self.embed_norm, self.state_norm, states, eps=self.eps
        )
        hidden = dense.linear(pairs, self.projection)
        self.layer.run(hidden, indices, paged)
        return dense.rms_norm(hidden, self.head_norm, self.eps)


@dataclass
class Request:
    """A prompt, its parameters, and the tokens generated so far."""

    prompt: list[int]
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class MinimalEngine:
    """A batch of requests that come and go; `step` runs all of them once.

    Args:
        directory: directory of the model.
        method: drafter, "ngram" or "mtp".
        num_drafts: drafts per request and step; 0 is plain decoding.
        num_slots: requests that run at once.
        num_pages: pages of keys and values, shared by all slots.
        max_len: maximum number of tokens of a prompt and its output together.
        chunk: rows of a prompt that one step computes.
    """

    def __init__(
        self,
        directory: Path = BUNDLED,
        *,
        method: str = "ngram",
        num_drafts: int = 4,
        num_slots: int = 8,
        num_pages: int = 256,
        max_len: int = 1024,
        chunk: int = 64,
    ) -> None:
        self.model = Model(directory, num_pages, max_len)
        if method not in ("ngram", "mtp"):
            raise ValueError(f"method must be ngram or mtp, got {method!r}")
        if method == "mtp" and self.model.mtp is None:
            raise ValueError(f"{directory}: method mtp needs a checkpoint with an MTP module")
        self.method, self.num_drafts, self.chunk = method, num_drafts, chunk
        self.max_len = min(max_len, num_pages * PAGE_SIZE)
        self.waiting: list[Request] = []
        self.running: dict[int, tuple[Request, list[int]]] = {}  # by slot: request, its pages
        self.num_steps = 0

        # A page has the same number in all layers.
        self.free_pages = list(range(num_pages))
        self.block_table = torch.zeros(num_slots, -(-max_len // PAGE_SIZE), dtype=torch.int32)
        self.pages = batching.pages_of_block_table(self.block_table)  # a view, as the ops take it

        # Tables with one entry per slot, which ops read and write in place. `lens` is the number of
        # tokens, `cached` how many of them have final keys and values, `max_lens` the number of
        # tokens at which the request ends, and `num_proposed` the number of its drafts.
        self.lens, self.cached, self.max_lens, self.num_proposed = torch.zeros(4, num_slots).int()
        self.token_ids = torch.zeros(num_slots, max_len, dtype=torch.int32)  # prompt and output
        self.drafts = torch.full((num_slots, max(num_drafts, 1)), -1, dtype=torch.int32)
        self.logprobs = torch.zeros(num_slots, self.drafts.shape[1] + 1)
        self.temperature, self.seeds = torch.zeros(num_slots), torch.zeros(num_slots).long()
        self.finish_reasons = torch.full((num_slots,), sampling.FinishReason.RUNNING).int()
        eos = self.model.config.get("eos_token_id")
        stops = eos if isinstance(eos, list) else [-1 if eos is None else eos]
        self.stop_token_ids = torch.tensor([stops] * num_slots, dtype=torch.int32)

        # Groups of these tables, as the ops take them.
        self.slots = torch.arange(num_slots, dtype=torch.int32)
        self.tables = TokenTables(self.slots, self.token_ids, self.lens, self.drafts)
        self.sampling = sampling.SamplingTensors(self.temperature, seeds=self.seeds)
        self.outputs = sampling.VerifyOutputs(logprobs=self.logprobs)
        self.rules = sampling.EndingRules(self.max_lens, stop_token_ids=self.stop_token_ids)
        self.status = sampling.RequestStatus(self.finish_reasons)

    def generate(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Run requests to their ends, and yield a request whenever it has new tokens."""
        for request in requests:
            self.add(request)
        while self.waiting or self.running:
            yield from self.step()

    def add(self, request: Request) -> None:
        """Queue a request, or raise ValueError if it does not fit the engine."""
        num_prompt, num_output = len(request.prompt), request.max_tokens
        if num_prompt < 1 or num_output < 1 or num_prompt + num_output > self.max_len:
            raise ValueError(
                "a request must have at least one token of prompt and of output, and at most "
                f"{self.max_len} together, got {num_prompt} and {num_output}"
            )
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Run all requests once, and return those that have new tokens."""
        self._admit()

        # Rows of a slot: the last token and the drafts if all else is cached, else a chunk of the
        # prompt. `qo_lens` is their number, and `kv_lens` the number of tokens up to the last row.
        # An idle slot has no tokens, so it gets neither rows nor logits, and emits nothing.
        left = self.lens - self.cached
        decodes = left == 1
        qo_lens = torch.where(decodes, 1 + self.num_proposed, left.clamp(max=self.chunk))
        kv_lens = self.cached + qo_lens
        of_prompt = torch.where(kv_lens < self.lens, NO_LOGITS, LAST_ROW)
        modes = torch.where(decodes, ALL_ROWS, of_prompt).int()
        rows = batching.prepare_batch(qo_lens, kv_lens, modes, *self.pages, page_size=PAGE_SIZE)
        # `rows` has the request, position and cache slot of each row. A request's drafts continue
        # its text: they have the positions from `lens` on.
        input_ids = batching.gather_input_ids(rows.row_to_request, rows.positions, *self.tables)

        # The model computes all rows at once; a row's bits depend on its own request alone.
        paged = PagedBatch(rows.qo_indptr, *self.pages, kv_lens)
        hidden = self.model.forward(input_ids, rows, paged)
        logits = self.model.logits(hidden, rows.output_rows)

        # At each row, the model's own choice is the argmax, or a sample that depends only on the
        # logits, the seed and the position of the chosen token; the first choice of a request has
        # position `lens`. Accept drafts as long as they equal these choices, and emit the choice
        # after the last accepted draft, too.
        drafts = sampling.Drafts(rows.output_indptr, self.drafts)
        new_tokens, _ = sampling.verify(
            logits, drafts, self.lens, sampling=self.sampling, outputs=self.outputs
        )

        # Append the emitted tokens, up to the end of each request; later ones become -1.
        emitted = sampling.EmittedTokens(new_tokens)
        sampling.commit(
            emitted, self.slots, self.token_ids, self.lens, rules=self.rules, status=self.status
        )
        # Rows of rejected drafts do not count as cached. The newest token has no row yet. The
        # result is clamped for idle slots, whose `lens` is 0.
        self.cached.copy_(torch.minimum(kv_lens, self.lens - 1).clamp(min=0))
        self._draft(hidden, rows, kv_lens)
        self.num_steps += 1
        return self._collect(new_tokens)

    def _admit(self) -> None:
        """Assign waiting requests a free slot and all pages that they may need until they end."""
        free_slots = [slot for slot in range(len(self.slots)) if slot not in self.running]
        for slot in free_slots[: len(self.waiting)]:
            request = self.waiting[0]
            num_prompt, num_tokens = len(request.prompt), len(request.prompt) + request.max_tokens
            num_pages = -(-num_tokens // PAGE_SIZE)
            if num_pages > len(self.free_pages):
                return
            pages = [self.free_pages.pop() for _ in range(num_pages)]
            self.running[slot] = (self.waiting.pop(0), pages)
            self.block_table[slot, :num_pages] = torch.tensor(pages)
            self.token_ids[slot, :num_prompt] = torch.tensor(request.prompt)
            self.lens[slot], self.max_lens[slot] = num_prompt, num_tokens
            self.cached[slot] = self.num_proposed[slot] = 0
            self.temperature[slot], self.seeds[slot] = request.temperature, request.seed
            self.finish_reasons[slot] = sampling.FinishReason.RUNNING

    def _draft(self, hidden: Tensor, rows: BatchIndices, kv_lens: Tensor) -> None:
        """Write drafts for the next step to `drafts`, and their numbers to `num_proposed`."""
        # A step emits one token more than it accepts drafts, so propose at most one draft less than
        # tokens remain. If the next step of a request has a chunk of its prompt, its drafts are
        # not read.
        limits = (self.max_lens - self.lens - 1).clamp(0, self.num_drafts)
        if self.method == "ngram":
            _, self.num_proposed = ngram_propose(
                self.token_ids, self.lens, limits, draft_token_ids=self.drafts
            )
            return

        # The first pass of the MTP module runs over the rows of this step whose next token is known
        # by now. It replaces keys and values that the module computed from drafts, and its last row
        # gives the first draft. Each further pass has one row per request, and reads the module's
        # own state and its last draft.
        assert self.model.mtp is not None
        slots = torch.where(self.lens > 0, self.slots, -1)  # -1: an idle slot
        batch = (slots, *self.pages, self.lens, limits)
        states = hidden  # the model's states; from the second pass on, the module's own
        indices = batching.prepare_draft_batch(rows.qo_indptr, kv_lens, *batch, page_size=PAGE_SIZE)
        for step in range(self.num_drafts):
            paged = PagedBatch(indices.qo_indptr, *self.pages, indices.kv_lens)
            states = self.model.mtp.forward(states, self.tables, indices, paged)
            logits = self.model.logits(states, indices.last_rows)
            # The same random numbers as in verification make drafts agree with it more often.
            drafted = sampling.sample(logits, indices.draft_positions, sampling=self.sampling)
            indices = batching.advance_draft_batch(
                drafted,
                indices.last_rows,
                *batch,
                page_size=PAGE_SIZE,
                step=step,
                draft_token_ids=self.drafts,
                num_draft_tokens=self.num_proposed,
                out=DraftIndices.empty(len(self.slots)),
            )

    def _collect(self, new_tokens: Tensor) -> list[Request]:
        """Append new tokens to their requests; free the slots and pages of those that ended."""
        changed = []
        for slot, (request, pages) in list(self.running.items()):
            new = [token for token in new_tokens[slot].tolist() if token >= 0]
            request.token_ids += new
            request.logprobs += self.logprobs[slot, : len(new)].tolist()
            if new:
                changed.append(request)
            if self.finish_reasons[slot] != sampling.FinishReason.RUNNING:
                request.finished = True
                self.free_pages += pages
                del self.running[slot]
                self.lens[slot] = self.cached[slot] = self.max_lens[slot] = 0
        return changed


def main(arguments: Sequence[str] | None = None) -> None:
    """Complete prompts. Stream the text of a single one; print several texts as they end."""
    parser = argparse.ArgumentParser(prog="python -m specops.minimal", description=main.__doc__)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", type=Path, default=BUNDLED, metavar="DIR")
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram")
    parser.add_argument("--drafts", type=int, default=4, metavar="K", help="0: plain decoding")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    given = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    engine = MinimalEngine(given.model, method=given.method, num_drafts=given.drafts)
    requests = [Request(tokenizer.encode(text).ids, given.max_tokens) for text in given.prompts]
    printed = ""
    for request in engine.generate(requests):
        if len(requests) == 1:
            text = tokenizer.decode(request.token_ids)
            print(text[len(printed) :], end="", flush=True)
            printed = text
        elif request.finished:
            print(tokenizer.decode(request.prompt + request.token_ids), end="\n\n")
    num_tokens = sum(len(request.token_ids) for request in requests)
    print(f"\n{num_tokens} tokens in {engine.num_steps} steps")


if __name__ == "__main__":
    main()
