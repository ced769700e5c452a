# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train`: corpus, tokenizer, both phases of training, export, evaluation."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.train import corpus, export
from tools.train.card import write_papers
from tools.train.evaluate import evaluate_chains, evaluate_continuations, evaluate_text
from tools.train.model import Model, ModelConfig
from tools.train.recycle import RecycleRecipe, train_chains
from tools.train.tokenizer import train_tokenizer
from tools.train.train import Batches, Recipe, encode, train


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    recipe, recycle = Recipe(), RecycleRecipe()
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
    parser.add_argument(
        "--recycle-steps",
        type=int,
        default=recycle.steps,
        help="total of the second phase, which trains the MTP module alone on its own chains",
    )
    parser.add_argument("--recycle-depth", type=int, default=recycle.depth, help="drafts per chain")
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


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Return the rows of a log; empty if it does not exist yet."""
    rows = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [json.loads(row) for row in rows]


def note(log: Path, **row: Any) -> None:
    """Append a row to a log."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def noted(log: Path, key: str) -> dict[str, Any]:
    """Return the value of the last row with `key`; empty if there is none."""
    found: list[dict[str, Any]] = [row[key] for row in rows_of(log) if key in row]
    return found[-1] if found else {}


def logged_runs(log: Path, phase: str = "") -> tuple[int, list[int]]:
    """Return the total seconds of a phase's runs ("" or "recycle_"), and the steps of resumes."""
    total = last = 0
    resumed_at: list[int] = []
    for row in rows_of(log):
        if f"{phase}start" in row:  # each run counts its seconds from its own start
            start = row[f"{phase}start"]
            total, last = total + last, 0
            resumed_at += [start] if start else []
        elif f"{phase}step" in row:
            last = row["seconds"]
    return total + last, resumed_at


def machine(device: str, threads: int) -> str:
    """Return the class of machine, for the model card."""
    if device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{threads} threads of a shared {platform.machine()} CPU ({isa})"


def phase_metrics(
    log: Path, phase: str, steps: int, batch_tokens: int, machine: str
) -> dict[str, Any]:
    """Return what a log records about a phase; empty if it has none of its runs."""
    seconds, resumed_at = logged_runs(log, phase)
    if not any(f"{phase}start" in row for row in rows_of(log)):
        return {}
    return {
        "steps": steps,
        "tokens": steps * batch_tokens,
        "seconds": seconds,
        "resumed_at": resumed_at,
        "machine": machine,
    }


def chain_metrics(
    model: Model, tokenizer: Tokenizer, library: Sequence[corpus.Document], device: torch.device
) -> dict[str, Any]:
    """Evaluate draft chains on held-out library modules and on the model's own continuations."""
    return {
        "library": evaluate_chains(model, tokenizer, library, device).summary(),
        "own_continuations": evaluate_continuations(model, tokenizer, library, device),
    }


def target_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Copy the target's own tensors, which the second phase must not change."""
    module = f"model.layers.{model.config.num_hidden_layers}."
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.startswith(module)
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the whole pipeline."""
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
    recycle = dataclasses.replace(
        RecycleRecipe(), steps=args.recycle_steps, depth=args.recycle_depth
    )
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "train.jsonl"
    if args.resume:
        model, tokenizer, step = export.load_model(args.resume)
        recycled = export.recycle_steps(args.resume)
        before = args.resume / "metrics.json"
        if before.exists() and not log.exists():  # the earlier training is not in it
            note(log, earlier=json.loads(before.read_text(encoding="utf-8")))
    else:
        tokenizer = train_tokenizer(document.text for document in training)
        model, step, recycled = Model(ModelConfig()), 0, 0
        model.reset(recipe.seed)
    encoded = encode(tokenizer, training)
    repeated = [
        ids
        for document, ids in zip(training, encoded, strict=True)
        for _ in range(1 if document.is_test else recipe.library_repeats)
    ]
    probe = Batches(encode(tokenizer, library), recipe.length, recipe.batch_tokens, recipe.seed)[0]
    if step < recipe.steps:
        model.to(device)
        train(
            model,
            repeated,
            probe,
            recipe,
            step,
            device,
            log,
            lambda done: export.save_model(args.out, model, tokenizer, done),
            compile_model=not args.eager,
        )
        recycled = 0
    else:
        export.save_model(args.out, model, tokenizer, step, recycled)
    model, tokenizer, step = export.load_model(args.out)  # with the weights rounded to bf16
    model.to(device)
    if recycled < recycle.steps:
        if recycled == 0:
            note(log, before_recycling=chain_metrics(model, tokenizer, library, device))
        target = target_tensors(model)
        train_chains(
            model,
            repeated,
            probe[:, : recycle.length],
            recycle,
            recycled,
            device,
            log,
            lambda done: export.save_model(args.out, model, tokenizer, step, done),
            compile_model=not args.eager,
        )
        model, tokenizer, step = export.load_model(args.out)
        model.to(device)
        after = target_tensors(model)
        assert all(torch.equal(after[name], target[name]) for name in target)
    earlier = noted(log, "earlier")
    own_machine = machine(args.device, args.threads)
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
        "training": phase_metrics(log, "", step, recipe.batch_tokens, own_machine)
        or earlier["training"],
        "recycle_recipe": dataclasses.asdict(recycle),
        "recycling": phase_metrics(
            log, "recycle_", export.recycle_steps(args.out), recycle.batch_tokens, own_machine
        )
        or earlier.get("recycling", {}),
        "held_out": {
            "library": evaluate_text(model, tokenizer, library, device).summary(),
            "tests": evaluate_text(model, tokenizer, tests, device).summary(),
            "chains": chain_metrics(model, tokenizer, library, device),
            "chains_before_recycling": noted(log, "before_recycling")
            or earlier.get("held_out", {}).get("chains_before_recycling", {}),
        },
    }
    write_papers(args.out, metrics)
    print(json.dumps(metrics["held_out"], indent=2))


if __name__ == "__main__":
    main()
