# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.train_heads`: draft heads of other methods for the bundled model.

Each draft is trained towards the target's whole distribution at its position, on texts that the
target wrote. The target is frozen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.train import corpus
from tools.train.export import load_model, write_text
from tools.train.heads import HEADS, Head, new_head, run_target
from tools.train.model import Model, rope_cos_sin
from tools.train.outputs import own_outputs
from tools.train.train import Ids, encode

ASSETS = Path("python/specops/assets")
PROBE_TEXTS = 48
TABLES = {"lm_head", "embed_tokens", "markov_head"}  # modules with one row per token


@dataclass(frozen=True)
class HeadRecipe:
    """All settings of a head's training, apart from the target and its outputs."""

    steps: int = 1200
    texts: int = 4000  # texts of the target, including the probe's
    batch_texts: int = 8
    chains: int = 96  # per text and step
    # Weight of a draft after a wrong draft: an engine has dropped the chain by then.
    dead_weight: float = 0.2
    matrix_lr: float = 0.01
    vector_lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    decay_fraction: float = 0.6
    final_lr: float = 0.02
    seed: int = 19

    def lr_scale(self, step: int) -> float:
        """Return the learning-rate scale: warm-up, constant, linear decay over `decay_fraction`."""
        scale = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / (self.decay_fraction * self.steps)
        return scale * (self.final_lr + (1 - self.final_lr) * min(1.0, left))


def losses_of(
    head: Head, model: Model, tokens: Tensor, starts: Tensor, dead_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the losses of a batch by draft, and how many drafts are kept.

    A draft counts as kept if it and all before it are the text's tokens, which the target wrote.

    Returns:
        losses [depth], each the weighted mean over chains; kept [depth], fractions of the chains.
    """
    cos, sin = rope_cos_sin(tokens.shape[1], model.config, tokens.device)
    target = run_target(model, tokens, cos, sin)
    losses, kept = [], []
    alive = torch.ones(len(tokens), len(starts), dtype=torch.bool, device=tokens.device)
    for draft, logits in enumerate(head.chains(target, starts), start=1):
        wanted = target.logits[:, starts + draft].float().softmax(-1)
        rows = F.cross_entropy(
            logits.flatten(0, 1).float(), wanted.flatten(0, 1), reduction="none"
        ).view(alive.shape)
        losses.append((rows * torch.where(alive, 1.0, dead_weight)).mean())
        alive = alive & (logits.argmax(-1) == tokens[:, starts + draft + 1])
        kept.append(alive.float().mean())
    return torch.stack(losses), torch.stack(kept).detach()


def save_head(directory: Path, head: Head, step: int) -> None:
    """Write a directory that an engine reads, replacing each file atomically."""
    write_text(directory / "config.json", json.dumps(head.fields(), indent=2) + "\n")
    tensors = {
        name: one.detach().to(torch.bfloat16).contiguous() for name, one in head.tensors().items()
    }
    temporary = directory / f".{head.file}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt", "step": str(step)})
    temporary.chmod(0o644)
    os.replace(temporary, directory / head.file)


def _optimizers(head: Head, recipe: HeadRecipe) -> list[torch.optim.Optimizer]:
    matrices, vectors = [], []
    for name, parameter in head.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim == 2 and not TABLES & set(name.split("."))
        (matrices if is_matrix else vectors).append(parameter)
    decay = recipe.weight_decay
    of_vectors = torch.optim.AdamW(
        vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    if not matrices:
        return [of_vectors]
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=decay)
    return [muon, of_vectors]


def train_head(
    head: Head,
    model: Model,
    texts: Tensor,
    recipe: HeadRecipe,
    out: Path,
    *,
    compile_head: bool,
    last_step: int | None = None,
    save_every_s: float = 120.0,
) -> None:
    """Train a head to `recipe.steps`, resuming from the state in `out`.

    Args:
        head: the head to train.
        model: its target, which is not trained.
        texts: [texts, length], from the target; the first `PROBE_TEXTS` are not trained on.
        recipe: settings.
        out: a directory for the head, a log, and the state to resume from.
        compile_head: whether to use `torch.compile`.
        last_step: where to stop for now; None for the end of the recipe.
        save_every_s: seconds between checkpoints.
    """
    model.requires_grad_(False)
    optimizers, first = _optimizers(head, recipe), 0
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    state = out / "state.pt"
    if state.exists():
        found = torch.load(state, weights_only=True)
        first = found["step"]
        head.load_state_dict(found["head"])
        for optimizer, one in zip(optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(one)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    losses = torch.compile(losses_of, dynamic=False) if compile_head else losses_of
    probe, trained = texts[:PROBE_TEXTS], texts[PROBE_TEXTS:]
    last_start = texts.shape[1] - head.depth - 1

    def pass_over(batch: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randperm(last_start, generator=generator)[: recipe.chains].sort().values
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: tuple[Tensor, Tensor] = losses(head, model, batch, starts, recipe.dead_weight)
        return result

    def save(step: int) -> None:
        save_head(out, head, step)
        whole = {"step": step, "head": head.state_dict()}
        whole["optimizers"] = [one.state_dict() for one in optimizers]
        torch.save(whole, out / ".state.tmp")
        os.replace(out / ".state.tmp", state)

    with (out / "train.jsonl").open("a") as log:
        log.write(json.dumps({"start": first, **asdict(recipe)}) + "\n")
        started = saved = time.monotonic()
        end = recipe.steps if last_step is None else last_step
        for step in range(first, end):
            per_epoch = len(trained) // recipe.batch_texts
            epoch, index = divmod(step, per_epoch)
            generator = torch.Generator().manual_seed(recipe.seed + epoch)
            order = torch.randperm(len(trained), generator=generator)
            batch = trained[order[index * recipe.batch_texts : (index + 1) * recipe.batch_texts]]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * recipe.lr_scale(step)
            by_draft, kept = pass_over(batch, step)
            by_draft.mean().backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            is_last = step + 1 == end
            if step % 20 == 19 or is_last:
                row = {
                    "step": step + 1,
                    "losses": [round(one, 4) for one in by_draft.tolist()],
                    "kept": [round(one, 4) for one in kept.tolist()],
                    "seconds": round(time.monotonic() - started),
                }
                if step % 100 == 99 or is_last:
                    with torch.no_grad():
                        held = [pass_over(one, 0)[1] for one in probe.split(recipe.batch_texts)]
                    row["held_kept"] = [round(v, 4) for v in torch.stack(held).mean(0).tolist()]
                log.write(json.dumps(row) + "\n")
                log.flush()
            if is_last or time.monotonic() - saved > save_every_s:
                save(step + 1)
                saved = time.monotonic()


def begin_with(head: Head, directory: Path) -> None:
    """Copy the tensors of a smaller head into this one and freeze them."""
    tensors = load_file(directory / head.file)
    head.load_state_dict(tensors, strict=False)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name not in tensors)


def training_documents(tokenizer: Tokenizer, directory: Path | None) -> list[Ids]:
    """Return the documents that prompts are cut from; library modules appear twice."""
    documents = [one for one in corpus.load(directory) if not one.held_out]
    encoded = encode(tokenizer, documents)
    return [
        ids
        for document, ids in zip(documents, encoded, strict=True)
        for _ in range(1 if document.is_test else 2)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the target's outputs unless they exist, and train a head on them."""
    recipe = HeadRecipe()
    parser = argparse.ArgumentParser(prog="python -m tools.train.train_heads", description=__doc__)
    parser.add_argument("--head", choices=HEADS, required=True)
    parser.add_argument("--model", type=Path, default=ASSETS, help="the target, of tools.train")
    parser.add_argument(
        "--out", type=Path, help="goes on where it has left off; default: build/heads/HEAD"
    )
    parser.add_argument(
        "--outputs", type=Path, help="file of the target's texts; default: beside out"
    )
    parser.add_argument(
        "--begin-with", type=Path, help="a head whose tensors it has, such as DFlash's of DSpark's"
    )
    parser.add_argument("--steps", type=int, default=recipe.steps, help="total, resumed or not")
    parser.add_argument("--corpus", type=Path, help="as for tools.train")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)
    recipe = HeadRecipe(steps=args.steps)
    args.out = args.out or Path("build/heads") / args.head
    args.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer, _ = load_model(args.model)
    outputs = args.outputs or args.out.parent / "outputs.safetensors"
    documents = [] if outputs.exists() else training_documents(tokenizer, args.corpus)
    texts = own_outputs(args.model, documents, recipe.texts, recipe.seed, outputs)
    head = new_head(args.head, model)
    if args.begin_with is not None:
        begin_with(head, args.begin_with)
    if args.head == "draft_model":  # it is a complete model, with the target's vocabulary
        write_text(args.out / "tokenizer.json", tokenizer.to_str())
    train_head(head, model, texts, recipe, args.out, compile_head=not args.eager)


if __name__ == "__main__":
    main()
