# SPDX-License-Identifier: Apache-2.0
"""Compare llama.cpp's speculation with plain decoding, with and without libggml-specops.so.

    .venv-llamacpp/bin/python integrations/llamacpp/compare.py MODEL.gguf --texts 100

Two processes, one with the library, decode the same prompts greedily: one token per step, and with
prompt lookup. Each prints a line of JSON: how many texts differ, how many rows of logits before the
first different token, and the time of steps of 1, 5 and 512 rows.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

PROMPTS = Path(__file__).resolve().parents[2] / "bench" / "prompts"
DRAFTS = 4
MOST_PROMPT = 600  # tokens
UBATCH = 512


class Decoder:
    """A model and a context with one sequence."""

    def __init__(self, options: argparse.Namespace, length: int) -> None:
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        if options.no_mmap:
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        self._model = llama_cpp.llama_model_load_from_file(str(options.model).encode(), params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(self._vocab)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = -(-length // 256) * 256
        context.n_batch = context.n_ubatch = UBATCH
        context.n_seq_max = 1
        context.n_threads = context.n_threads_batch = options.threads
        context.flash_attn_type = int(options.flash_attention)
        context.type_k = context.type_v = {"f16": 1, "q8_0": 8}[options.kv_type]
        context.swa_full = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        data = text.encode()
        out = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), out, len(out), True, False)
        return list(out[:count])

    def keep(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)

    def step(self, begin: int, tokens: list[int], outputs: int) -> np.ndarray:
        """Return the logits of the last `outputs` tokens."""
        for i, token in enumerate(tokens):
            self._batch.token[i], self._batch.pos[i] = token, begin + i
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
            self._batch.logits[i] = i >= len(tokens) - outputs
        self._batch.n_tokens = len(tokens)
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(outputs, self.num_tokens))

    def generate(self, prompt: list[int], count: int, drafts: int) -> tuple[list[int], list[bytes]]:
        """Return `count` greedy tokens, and the bits of the logits of all but the first."""
        self.keep(0)
        for begin in range(0, len(prompt), UBATCH):
            logits = self.step(begin, prompt[begin : begin + UBATCH], 1)
        tokens, bits = [*prompt, int(logits[0].argmax())], []
        while len(tokens) < len(prompt) + count:
            found: list[int] = []
            if drafts:
                lookup = LlamaPromptLookupDecoding.find_candidate_pred_tokens
                found = [int(token) for token in lookup(np.array(tokens, np.intc), 3, drafts)]
            logits = self.step(len(tokens) - 1, [tokens[-1], *found], 1 + len(found))
            for row, draft in zip(logits, [*found, -1], strict=True):
                tokens.append(int(row.argmax()))
                bits.append(row.tobytes())
                if tokens[-1] != draft:
                    break
            self.keep(len(tokens) - 1)
        return tokens[len(prompt) : len(prompt) + count], bits[: count - 1]

    def milliseconds(self, rows: int, times: int) -> float:
        """Return the median time of a step of `rows` random tokens after 200 others."""
        random, seconds = np.random.default_rng(0), []
        self.keep(0)
        prefix = random.integers(0, self.num_tokens, 200).tolist()
        self.step(0, prefix, 1)
        for _ in range(times):
            tokens = random.integers(0, self.num_tokens, rows).tolist()
            begun = time.perf_counter()
            self.step(len(prefix), tokens, 1 if rows == UBATCH else rows)
            seconds.append(time.perf_counter() - begun)
            self.keep(len(prefix))
        return round(1000 * float(np.median(seconds)), 1)


def prompts(count: int) -> list[str]:
    """Return prompts of prose, chat, code and edits, a quarter each."""
    texts = []
    for kind in ("prose", "chat", "completions", "edits"):
        for entry in json.loads((PROMPTS / f"{kind}.json").read_text())[: -(-count // 4)]:
            text = entry["text"]
            if kind == "edits":
                text = f"Repeat the file.\n\n{text[:1200]}\n\nAgain:\n\n{text[:200]}"
            texts.append(text)
    return texts[:count]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Return the counts and times of one process."""
    decoder = Decoder(options, MOST_PROMPT + options.max_tokens + UBATCH)
    changed_texts = changed_rows = rows = 0
    for text in prompts(options.texts):
        prompt = decoder.tokenize(text)[:MOST_PROMPT]
        plain, plain_bits = decoder.generate(prompt, options.max_tokens, 0)
        drafted, drafted_bits = decoder.generate(prompt, options.max_tokens, DRAFTS)
        changed_texts += plain != drafted
        for before in range(options.max_tokens - 1):
            if plain[: before + 1] != drafted[: before + 1]:
                break
            rows += 1
            changed_rows += plain_bits[before] != drafted_bits[before]
    times = {f"ms_{n}_rows": decoder.milliseconds(n, 15) for n in (1, 5)}
    return {
        "texts": options.texts,
        "changed_texts": changed_texts,
        "rows": rows,
        "changed_rows": changed_rows,
        **times,
        "ms_512_rows": decoder.milliseconds(UBATCH, 3),
        "resident_mb": {
            line.split(":")[0]: int(line.split()[1]) // 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("Rss")
        },
    }


def main() -> None:
    """Run both processes, or one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--texts", type=int, default=20, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="M")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--flash-attention", action="store_true")
    parser.add_argument("--kv-type", choices=["f16", "q8_0"], default="f16")
    parser.add_argument("--no-mmap", action="store_true", help="read the file")
    parser.add_argument("--only", choices=["ggml", "specops"], help="one of the two processes")
    options = parser.parse_args()
    if options.only is None:
        for only in ("ggml", "specops"):
            subprocess.run([sys.executable, *sys.argv, "--only", only], check=True)
        return
    if options.only == "specops":
        from specops.integrations import llamacpp

        llamacpp.register()
    print(json.dumps({"kernels": options.only, **compare(options)}), flush=True)


if __name__ == "__main__":
    main()
