# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.draft_vocab`: a reduced draft vocabulary of the most frequent tokens.

The program writes the file that the engine takes as a token map (tensor `d2t`, as in EAGLE-3's
checkpoints), and reports the loss of a model's drafts on held-out library modules.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.train import corpus, export
from tools.train.evaluate import evaluate_chains
from tools.train.train import Ids, encode


def most_frequent(encoded: Sequence[Ids], vocab_size: int, count: int) -> Tensor:
    """Return the `count` most frequent tokens, ascending; ties go to the lower id."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in encoded:
        counts += np.bincount(ids, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")[:count]
    return torch.from_numpy(np.sort(order))


def main(argv: Sequence[str] | None = None) -> None:
    """Count tokens, write the map, and measure the chains."""
    parser = argparse.ArgumentParser(prog="python -m tools.train.draft_vocab", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a directory of tools.train")
    parser.add_argument("--size", type=int, required=True, help="tokens to keep")
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file")
    parser.add_argument("--corpus", type=Path, help="as for tools.train")
    parser.add_argument("--stride", type=int, default=16, help="of the measured chains")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model, tokenizer, _ = export.load_model(args.model)
    vocab_size = model.config.vocab_size
    if not 1 <= args.size <= vocab_size:
        parser.error(f"--size must be in [1, {vocab_size}]")
    documents = corpus.load(args.corpus)
    training = encode(tokenizer, [one for one in documents if not one.held_out])
    library = [one for one in documents if one.held_out and not one.is_test]
    kept = most_frequent(training, vocab_size, args.size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"d2t": kept - torch.arange(args.size)}, args.out)
    held_out = np.concatenate(encode(tokenizer, library))
    figures = {
        "size": args.size,
        "of_held_out_tokens": round(float(np.isin(held_out, kept.numpy()).mean()), 4),
        **evaluate_chains(
            model, tokenizer, library, torch.device("cpu"), stride=args.stride, draft_vocab=kept
        ).summary(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
