# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train`: corpus, tokenizer, training, export, evaluation, in that order."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.train import corpus, export
from tools.train.card import write_papers
from tools.train.evaluate import evaluate_continuations, evaluate_text
from tools.train.model import Model, ModelConfig
from tools.train.tokenizer import train_tokenizer
from tools.train.train import Batches, Recipe, encode, train


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(prog="python -m tools.train", description=__doc__)
    parser.add_argument(
        "--corpus",
        type=Path,
        help="directory of .py files to train on, unchecked; default: this Python's library, "
        f"which must be CPython {corpus.PYTHON_VERSION}'s",
    )
    parser.add_argument("--out", type=Path, default=Path("build/model"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=recipe.steps, help="total, resumed or not")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--resume", type=Path, help="a directory written by an earlier run")
    parser.add_argument("--matrix-lr", type=float, default=recipe.matrix_lr)
    parser.add_argument("--vector-lr", type=float, default=recipe.vector_lr)
    parser.add_argument("--micro-batch-tokens", type=int, default=recipe.micro_batch_tokens)
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    parser.add_argument(
        "--write-manifest",
        action="store_true",
        help="record this Python's library in manifest.json and held_out.json, and stop",
    )
    return parser.parse_args(argv)


def logged_runs(log: Path) -> tuple[int, list[int]]:
    """Training time of all runs in a log, in seconds, and the steps at which runs resumed."""
    total = last = 0
    resumed_at: list[int] = []
    rows = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    for row in map(json.loads, rows):
        if "start" in row:  # each run counts its seconds from its own start
            total, last = total + last, 0
            resumed_at += [row["start"]] if row["start"] else []
        else:
            last = row["seconds"]
    return total + last, resumed_at


def machine(device: str, threads: int) -> str:
    """The class of machine, for the model card."""
    if device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{threads} threads of a shared {platform.machine()} CPU ({isa})"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the whole chain."""
    args = _arguments(argv)
    if args.write_manifest:
        corpus.write_manifest(Path(sysconfig.get_paths()["stdlib"]))
        return
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    recipe = dataclasses.replace(
        Recipe(),
        steps=args.steps,
        matrix_lr=args.matrix_lr,
        vector_lr=args.vector_lr,
        micro_batch_tokens=args.micro_batch_tokens,
    )
    documents = corpus.load(args.corpus)
    training = [document for document in documents if not document.held_out]
    library = [item for item in documents if item.held_out and not item.is_test]
    tests = [item for item in documents if item.held_out and item.is_test]
    if args.resume:
        model, tokenizer, step = export.load_model(args.resume)
    else:
        tokenizer = train_tokenizer(document.text for document in training)
        model, step = Model(ModelConfig()), 0
        model.reset(recipe.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "train.jsonl"
    encoded = encode(tokenizer, training)
    if step < recipe.steps:
        model.to(device)
        held_out = encode(tokenizer, library)
        train(
            model,
            [
                ids
                for document, ids in zip(training, encoded, strict=True)
                for _ in range(1 if document.is_test else recipe.library_repeats)
            ],
            Batches(held_out, recipe.length, recipe.batch_tokens, recipe.seed)[0],
            recipe,
            step,
            device,
            log,
            lambda done: export.save_model(args.out, model, tokenizer, done),
            compile_model=not args.eager,
        )
    else:
        export.save_model(args.out, model, tokenizer, step)
    model, tokenizer, step = export.load_model(args.out)  # with the weights rounded to bf16
    model.to(device)
    seconds, resumed_at = logged_runs(log)
    metrics = {
        "model": {
            **dataclasses.asdict(model.config),
            "parameters": sum(item.numel() for item in model.parameters()) / 1e6,
            "megabytes": (args.out / "model.safetensors").stat().st_size / 1e6,
        },
        "corpus": {
            "python": None if args.corpus else corpus.PYTHON_VERSION,
            "manifest_sha256": None if args.corpus else corpus.manifest_sha256(),
            "files": len(documents),
            "bytes": sum(len(document.text.encode()) for document in documents),
            "held_out_files": len(documents) - len(training),
            "training_tokens": sum(len(ids) for ids in encoded),
        },
        "recipe": dataclasses.asdict(recipe),
        "training": {
            "steps": step,
            "tokens": step * recipe.batch_tokens,
            "seconds": seconds,
            "resumed_at": resumed_at,
            "machine": machine(args.device, args.threads),
        },
        "held_out": {
            "library": evaluate_text(model, tokenizer, library, device).summary(),
            "tests": evaluate_text(model, tokenizer, tests, device).summary(),
            "own_continuations": evaluate_continuations(model, tokenizer, library, device),
        },
    }
    write_papers(args.out, metrics)
    print(json.dumps(metrics["held_out"], indent=2))


if __name__ == "__main__":
    main()
