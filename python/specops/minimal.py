# SPDX-License-Identifier: Apache-2.0
"""A whole decoding engine in one file: read it from top to bottom to see how a step works.

    python -m specops.minimal "def add(a, b):"
    python -m specops.minimal --model DIR --method mtp --drafts 3 "def add(a, b):" "class Stack:"

It reads a Llama or Qwen3 directory, keeps keys and values on pages, runs a batch of requests with
chunked prefill, drafts with n-grams or with the checkpoint's MTP module, verifies the drafts in the
step that computes them, and streams text. Everything numerical is a public op of this package, and
every op gives a row the same bits whatever else is in the batch. So a request's tokens and logprobs
are the same alone or in a batch, with or without drafts, and in this engine or in `specops.engine`,
the serving engine, which adds what a server needs: more models, methods and parameters, preemption,
a prefix cache, structured output, tensor parallelism.

The vocabulary of a step: a *slot* is a request's row in every table below. A *row* is one position
of one request in one step. A request with exactly one token that is not cached yet has a row for
that token and one for each of its drafts; any other request has a chunk of its prompt.

One request of five prompt tokens, three drafts of which the second is rejected, chunks of four:

    step    text     cached    rows                      then
    1       5        0         tokens 0 to 3             cached 4; no logits
    2       5        4         token 4                   emits token 5; cached 5
    3       6        5         token 5, drafts 6, 7, 8   emits draft 6 and a new token 7; cached 7

The row of draft 6 is correct, since token 6 is the draft. The keys and values of drafts 7 and 8 are
overwritten by the next step, whose rows begin at position 7.
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
from specops.attention import PagedBatch
from specops.dense import PackedWeight
from specops.ngram import ngram_propose

BUNDLED = Path(__file__).parent / "assets"
PAGE_SIZE = 16  # tokens
NO_LOGITS, LAST_ROW, ALL_ROWS = batching.OutputMode  # which rows of a request get logits


# ---- the model ----


class Checkpoint:
    """The configuration and the tensors of a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.tensors |= load_file(path)

    def packed(self, prefix: str, *names: str, activation: str | None = None) -> PackedWeight:
        """Return the named projections as one weight, in the layout that `dense.linear` reads."""
        weights = [self.tensors[f"{prefix}{name}.weight"] for name in names]
        return dense.pack_weight(torch.cat(weights), activation=activation)


class Layer:
    """A decoder layer: attention with grouped queries, and a gated MLP."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, cos_sin: Tensor) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        attention_prefix = f"{prefix}self_attn."
        self.eps = float(config["rms_norm_eps"])
        self.num_heads = int(config["num_attention_heads"])
        self.num_kv_heads = int(config.get("num_key_value_heads") or self.num_heads)
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.num_heads)
        self.cos_sin = cos_sin
        self.input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self.mlp_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self.q_norm = tensors.get(
            f"{attention_prefix}q_norm.weight"
        )  # Qwen3 has q_norm and k_norm, Llama does not
        self.k_norm = tensors.get(f"{attention_prefix}k_norm.weight")
        self.qkv = checkpoint.packed(attention_prefix, "q_proj", "k_proj", "v_proj")
        self.o = checkpoint.packed(attention_prefix, "o_proj")
        # `linear` returns silu(gate) * up of a weight that was packed with an activation.
        self.gate_up = checkpoint.packed(f"{prefix}mlp.", "gate_proj", "up_proj", activation="silu")
        self.down = checkpoint.packed(f"{prefix}mlp.", "down_proj")

    def new_kv(self, num_pages: int, dtype: torch.dtype) -> Tensor:
        """Allocate keys and values on pages: [2, pages, page size, heads, head size]."""
        return torch.zeros(2, num_pages, PAGE_SIZE, self.num_kv_heads, self.head_dim, dtype=dtype)

    def run(
        self,
        residual: Tensor,
        normed: Tensor,
        kv: Tensor,
        cache_slots: Tensor,
        positions: Tensor,
        paged: PagedBatch,
    ) -> Tensor:
        """Add attention to `residual` in place, and return the output of the MLP.

        The caller's next `rms_norm` adds that output to `residual`, in one pass with the norm.
        """
        heads = dense.linear(normed, self.qkv).view(len(normed), -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        cache = attention.PagedKv(*kv.unbind())
        q = attention.rope_append_kv(
            q,
            k,
            v,
            cache,
            cache_slots,
            positions,
            self.cos_sin,
            q_norm_weight=self.q_norm,
            k_norm_weight=self.k_norm,
            norm_eps=self.eps,
        )
        attended = attention.append_attention(q, cache, paged)
        branch = dense.linear(attended.flatten(1), self.o)
        normed = dense.rms_norm(branch, self.mlp_norm, self.eps, residual=residual)
        return dense.linear(dense.linear(normed, self.gate_up), self.down)


class Model:
    """A Llama or Qwen3, and its MTP module if the checkpoint has one."""

    def __init__(self, directory: Path, max_len: int) -> None:
        checkpoint = Checkpoint(directory)
        config, tensors = checkpoint.config, checkpoint.tensors
        self.config = config
        if config["architectures"] not in (["LlamaForCausalLM"], ["Qwen3ForCausalLM"]):
            names = ", ".join(config["architectures"])
            raise ValueError(
                f"{directory}: the minimal engine runs LlamaForCausalLM and Qwen3ForCausalLM, got "
                f"{names}; specops.engine runs more"
            )
        self.eps = float(config["rms_norm_eps"])
        self.embedding = tensors["model.embed_tokens.weight"]
        self.final_norm = tensors["model.norm.weight"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        theta = float((rope or {}).get("rope_theta", config.get("rope_theta", 10_000.0)))
        cos_sin = attention.rope_cos_sin(max_len, int(head_dim), theta, rope)
        num_layers = int(config["num_hidden_layers"])
        self.layers = [Layer(checkpoint, f"model.layers.{i}.", cos_sin) for i in range(num_layers)]
        head = tensors.get("lm_head.weight")
        self.lm_head = dense.pack_weight(self.embedding if head is None else head)
        has_mtp = f"model.layers.{num_layers}.eh_proj.weight" in tensors
        self.mtp = (
            MtpModule(checkpoint, f"model.layers.{num_layers}.", cos_sin) if has_mtp else None
        )

    def new_kv(self, num_pages: int) -> list[Tensor]:
        """Allocate the pages of keys and values of every layer."""
        return [layer.new_kv(num_pages, self.embedding.dtype) for layer in self.layers]

    def forward(
        self,
        input_ids: Tensor,
        kv: Sequence[Tensor],
        rows: batching.BatchIndices,
        paged: PagedBatch,
    ) -> Tensor:
        """Run all rows through all layers, and return their hidden states after the final norm."""
        residual = dense.embedding(input_ids, self.embedding)
        normed = dense.rms_norm(residual, self.layers[0].input_norm, self.eps)
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, layer_kv, next_norm in zip(self.layers, kv, norms, strict=True):
            branch = layer.run(residual, normed, layer_kv, rows.cache_slots, rows.positions, paged)
            normed = dense.rms_norm(branch, next_norm, self.eps, residual=residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits of rows."""
        return dense.linear(hidden, self.lm_head, out_dtype=torch.float32)


class MtpModule:
    """A layer that drafts: it predicts token i + 2 from token i + 1 and the state of position i."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, cos_sin: Tensor) -> None:
        self.layer, tensors = Layer(checkpoint, prefix, cos_sin), checkpoint.tensors
        self.embed_norm = tensors[f"{prefix}enorm.weight"]
        self.hidden_norm = tensors[f"{prefix}hnorm.weight"]
        self.projection = checkpoint.packed(prefix, "eh_proj")
        self.head_norm = tensors[f"{prefix}shared_head.norm.weight"]

    def forward(
        self, pairs: Tensor, kv: Tensor, rows: batching.DraftIndices, paged: PagedBatch
    ) -> Tensor:
        """Return the hidden states from which the LM head computes logits.

        Args:
            pairs: for each row, a normalized embedding next to a normalized hidden state.
        """
        residual, eps = dense.linear(pairs, self.projection), self.layer.eps
        normed = dense.rms_norm(residual, self.layer.input_norm, eps)
        branch = self.layer.run(residual, normed, kv, rows.cache_slots, rows.positions, paged)
        return dense.rms_norm(branch, self.head_norm, eps, residual=residual)


# ---- requests ----


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


# ---- the engine ----


class MinimalEngine:
    """A batch of requests that come and go; `step` runs all of them once.

    Args:
        directory: directory of the model.
        method: "naive" (no drafts), "ngram" or "mtp".
        num_drafts: drafts per request and step.
        num_slots: requests that run at once.
        num_pages: pages of keys and values, shared by all slots.
        max_len: longest prompt and output together.
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
        self.model = Model(directory, max_len)
        if method not in ("naive", "ngram", "mtp"):
            raise ValueError(f"method must be naive, ngram or mtp, got {method!r}")
        if method == "mtp" and self.model.mtp is None:
            raise ValueError(f"{directory}: method mtp needs a checkpoint with an MTP module")
        self.method, self.num_drafts = method, 0 if method == "naive" else num_drafts
        self.max_len, self.num_pages, self.chunk = max_len, num_pages, chunk
        self.waiting: list[Request] = []
        self.running: dict[int, tuple[Request, list[int]]] = {}  # by slot: request, its pages
        self.num_steps = 0

        # Keys and values on pages, and a list of the free ones. A page has the same number in all
        # layers and in the MTP module.
        self.kv = self.model.new_kv(num_pages)
        self.mtp_kv = self.model.layers[0].new_kv(num_pages, self.model.embedding.dtype)
        self.free_pages = list(range(num_pages))
        self.block_table = torch.zeros(num_slots, -(-max_len // PAGE_SIZE), dtype=torch.int32)
        self.pages = batching.pages_of_block_table(self.block_table)  # kv_indptr, and a view

        # Tables with one entry per slot, as views of one tensor. On a GPU they stay on the device.
        # `lens` is a request's number of tokens, `cached` how many of them have final keys and
        # values, and `max_lens` the number of tokens at which the request ends.
        ints = torch.zeros(5, num_slots, dtype=torch.int32)
        self.lens, self.cached, self.prompt_lens, self.max_lens, self.num_proposed = ints
        self.token_ids = torch.zeros(num_slots, max_len, dtype=torch.int32)  # prompt and output
        self.drafts = torch.full((num_slots, max(self.num_drafts, 1)), -1, dtype=torch.int32)
        self.temperature, self.seeds = torch.zeros(num_slots), torch.zeros(num_slots).long()
        self.sampling = sampling.SamplingTensors(self.temperature, seeds=self.seeds)
        self.finish_reasons = torch.full((num_slots,), sampling.FinishReason.RUNNING).int()
        self.slots = torch.arange(num_slots, dtype=torch.int32)
        stops = self.model.config.get("eos_token_id")
        stops = stops if isinstance(stops, list) else [-1 if stops is None else stops]
        self.stop_token_ids = torch.tensor([stops] * num_slots, dtype=torch.int32)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the request does not fit the engine.
        """
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or total > self.max_len:
            raise ValueError(
                f"a request must have a prompt and at most {self.max_len} tokens with its output, "
                f"got {len(request.prompt)} and {request.max_tokens}"
            )
        if -(-total // PAGE_SIZE) > self.num_pages:
            raise ValueError(
                f"a request must fit {self.num_pages} pages of {PAGE_SIZE} tokens, got {total} "
                "tokens"
            )
        self.waiting.append(request)

    def step(self) -> None:
        """Run one step: admit, draft, compute, verify, commit, release."""
        self._admit()
        num_drafts = self._draft()

        # Rows: the last token and the drafts if all else is cached; else a chunk of the prompt.
        left = self.lens - self.cached
        decodes = left == 1
        qo_lens = torch.where(decodes, 1 + num_drafts, left.clamp(max=self.chunk)).int()
        kv_lens = self.cached + qo_lens
        ends_prompt = torch.where(kv_lens < self.lens, int(NO_LOGITS), int(LAST_ROW))
        modes = torch.where(decodes, int(ALL_ROWS), ends_prompt).int()
        total_rows = int(qo_lens.sum())
        rows = batching.prepare_batch(
            qo_lens,
            kv_lens,
            modes,
            *self.pages,
            page_size=PAGE_SIZE,
            total_rows=total_rows,
            num_output_rows=total_rows,  # an upper bound; the rest is padding
        )
        # Positions from `lens` on are those of drafts.
        input_ids = batching.gather_input_ids(
            rows.row_to_request, rows.positions, self.slots, self.token_ids, self.lens, self.drafts
        )

        # The model computes all rows at once; a row's bits depend on its own request alone.
        paged = PagedBatch(rows.qo_indptr, *self.pages, kv_lens)
        hidden = self.model.forward(input_ids, self.kv, rows, paged)
        logits = self.model.logits(batching.gather_output_rows(hidden, rows.output_rows))

        # At each row, the model's own choice is the argmax, or a sample that depends only on the
        # seed and the position. Accept the drafts that equal these choices, and emit the choice
        # after the last accepted draft.
        logprobs = torch.empty(len(self.lens), self.drafts.shape[1] + 1)
        tokens, _ = sampling.verify(
            logits,
            sampling.Drafts(rows.output_indptr, self.drafts),
            self.lens,  # position of each request's next token
            sampling=self.sampling,
            outputs=sampling.VerifyOutputs(logprobs=logprobs),
        )

        # Append the emitted tokens, up to the end of each request.
        committed = torch.empty_like(self.lens)
        sampling.commit(
            sampling.EmittedTokens(tokens),
            self.slots,
            self.token_ids,
            self.lens,
            prompt_lens=self.prompt_lens,
            rules=sampling.EndingRules(self.max_lens, stop_token_ids=self.stop_token_ids),
            status=sampling.RequestStatus(self.finish_reasons),
            num_committed_tokens=committed,
        )
        # Only final rows count as cached, not rejected drafts. The new last token has no row yet.
        self.cached.copy_(torch.minimum(kv_lens, self.lens - 1).clamp(min=0))
        if self.method == "mtp":
            self._draft_with_mtp(hidden, rows, kv_lens)
        self._release(tokens, logprobs, committed)
        self.num_steps += 1

    def _admit(self) -> None:
        """Assign waiting requests a free slot and all pages that they may need until they end."""
        for slot in range(len(self.lens)):
            if slot in self.running or not self.waiting:
                continue
            request = self.waiting[0]
            total = len(request.prompt) + request.max_tokens
            num_pages = -(-total // PAGE_SIZE)
            if num_pages > len(self.free_pages):
                return
            pages = [self.free_pages.pop() for _ in range(num_pages)]
            self.running[slot] = (self.waiting.pop(0), pages)
            self.block_table[slot, :num_pages] = torch.tensor(pages)
            self.token_ids[slot, : len(request.prompt)] = torch.tensor(request.prompt)
            self.lens[slot] = self.prompt_lens[slot] = len(request.prompt)
            self.max_lens[slot], self.cached[slot], self.num_proposed[slot] = total, 0, 0
            self.temperature[slot], self.seeds[slot] = request.temperature, request.seed
            self.finish_reasons[slot] = sampling.FinishReason.RUNNING

    def _draft(self) -> Tensor:
        """Write drafts to `self.drafts`, and return how many each slot has; int32 [slots]."""
        limits = self._draft_limits() * (self.lens - self.cached == 1)
        if self.method == "ngram":
            _, found = ngram_propose(
                self.token_ids,
                self.lens,
                limits,
                min_ngram_size=1,
                max_ngram_size=4,
                draft_token_ids=self.drafts,
            )
            return found
        if self.method == "mtp":  # made at the end of the previous step
            return torch.minimum(self.num_proposed, limits)
        return torch.zeros_like(limits)

    def _draft_limits(self) -> Tensor:
        """Return how many drafts each slot may have; a step emits one token more."""
        limits: Tensor = (self.max_lens - self.lens - 1).clamp(0, self.num_drafts)
        return limits

    def _draft_with_mtp(self, hidden: Tensor, rows: batching.BatchIndices, kv_lens: Tensor) -> None:
        """Draft for the next step with the MTP module.

        The first pass runs over the rows of this step whose next token is known by now. It replaces
        keys and values that the module computed from drafts, and its last row gives the first
        draft. Each further pass has one row per slot; its inputs are the module's own hidden state
        and its last draft.

        Args:
            hidden: the target's hidden states of this step's rows.
            rows, kv_lens: indices of this step.
        """
        module, mtp_kv = self.model.mtp, self.mtp_kv
        assert module is not None
        slots = torch.where(self.lens > 0, self.slots, -1)
        limits, no_redrafts = self._draft_limits(), torch.zeros_like(self.lens)
        states = hidden  # of the target; of the module itself from the second pass on
        indices = batching.prepare_draft_batch(
            slots,
            rows.qo_indptr,
            kv_lens,
            no_redrafts,
            *self.pages,
            self.lens,
            limits,
            page_size=PAGE_SIZE,
            total_rows=len(hidden),  # an upper bound: rows of rejected drafts are left out
        )
        for index in range(self.num_drafts):
            pairs = dense.mtp_input(
                dense.ModuleRows(indices.row_to_request, indices.positions, indices.source_rows),
                dense.TokenTables(slots, self.token_ids, self.lens, self.drafts),
                self.model.embedding,
                module.embed_norm,
                module.hidden_norm,
                states,
                eps=self.model.eps,
            )
            paged = PagedBatch(indices.qo_indptr, *self.pages, indices.kv_lens)
            states = module.forward(pairs, mtp_kv, indices, paged)
            last = batching.gather_output_rows(states, indices.last_rows)
            # The same random numbers as in verification make drafts agree with it more often.
            sampled = sampling.sample(
                self.model.logits(last), indices.draft_positions, sampling=self.sampling
            )
            following = batching.DraftIndices.empty(len(self.lens), total_rows=len(self.lens))
            batching.advance_draft_batch(
                sampled,
                indices.last_rows,
                slots,
                *self.pages,
                self.lens,
                limits,
                page_size=PAGE_SIZE,
                step=index,
                ahead=1,  # the module reads the token after each position
                draft_token_ids=self.drafts,
                num_draft_tokens=self.num_proposed,
                out=following,
            )
            indices = following

    def _release(self, tokens: Tensor, logprobs: Tensor, committed: Tensor) -> None:
        """Append the new tokens to the requests; free the slots and pages of those that ended."""
        for slot, (request, pages) in list(self.running.items()):
            count = int(committed[slot])
            request.token_ids += tokens[slot, :count].tolist()
            request.logprobs += logprobs[slot, :count].tolist()
            if self.finish_reasons[slot] != sampling.FinishReason.RUNNING:
                request.finished = True
                self.free_pages += pages
                del self.running[slot]
                self.lens[slot] = self.cached[slot] = self.max_lens[slot] = 0

    def generate(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Run requests to their ends, and yield a request whenever it has new tokens."""
        for request in requests:
            self.add(request)
        seen = [0] * len(requests)
        while self.waiting or self.running:
            self.step()
            for place, request in enumerate(requests):
                if len(request.token_ids) > seen[place]:
                    seen[place] = len(request.token_ids)
                    yield request


def main(arguments: Sequence[str] | None = None) -> None:
    """Complete prompts, and print each text as it comes."""
    parser = argparse.ArgumentParser(prog="python -m specops.minimal", description=main.__doc__)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", type=Path, default=BUNDLED, metavar="DIR")
    parser.add_argument("--method", choices=("naive", "ngram", "mtp"), default="ngram")
    parser.add_argument("--drafts", type=int, default=4, metavar="K", help="per step")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    engine = MinimalEngine(given.model, method=given.method, num_drafts=given.drafts)
    requests = [
        Request(tokenizer.encode(text).ids, given.max_tokens, given.temperature, given.seed)
        for text in given.prompts
    ]
    printed = ""
    for request in engine.generate(requests):
        if len(requests) == 1:  # the texts of several would mix
            text = tokenizer.decode(request.token_ids)
            print(text[len(printed) :], end="", flush=True)
            printed = text
        elif request.finished:
            print(tokenizer.decode(request.prompt + request.token_ids), end="\n\n")
    tokens = sum(len(request.token_ids) for request in requests)
    print(f"\n{tokens} tokens in {engine.num_steps} steps")


if __name__ == "__main__":
    main()
