# SPDX-License-Identifier: Apache-2.0
"""The second phase of training: the MTP module alone, along the chains that it will draft.

The first phase teaches the module one draft from the target's own states. Later drafts read the
module's output instead, which was never an input in training, so their acceptance drops. Here the
module learns from its own chains (`chains.py`), which is EAGLE-3's training-time test: every draft
is trained towards the target's whole distribution at that point. The target's weights are frozen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.chains import draft_chains
from tools.train.model import Model, rope_cos_sin
from tools.train.train import Batches, Ids


@dataclass(frozen=True)
class RecycleRecipe:
    """All settings of the second phase, apart from the corpus and the target."""

    steps: int = 400
    batch_tokens: int = 4096
    micro_batch_tokens: int = 2048
    length: int = 512
    long_length: int = 1024
    long_fraction: float = 0.15
    library_repeats: int = 2
    depth: int = 5  # drafts per chain
    chains: float = 0.5  # fraction of the rows that are continued beyond their first draft
    # Weight of a draft after a wrong draft: an engine has dropped the chain by then.
    dead_weight: float = 0.1
    matrix_lr: float = 0.003
    vector_lr: float = 5e-4
    weight_decay: float = 0.1
    warmup_steps: int = 20
    # The module comes from a phase that ended at a small rate; a large one would make it forget.
    decay_fraction: float = 1.0
    final_lr: float = 0.02
    seed: int = 18

    def lr_scale(self, step: int) -> float:
        """Return the learning-rate scale: warm-up, constant, linear decay over `decay_fraction`."""
        scale = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.decay_fraction * self.steps)
        return scale * (self.final_lr + (1 - self.final_lr) * min(1.0, left))

    def length_at(self, step: int) -> int:
        """Return the sequence length of a step."""
        return self.long_length if step >= (1 - self.long_fraction) * self.steps else self.length


def chain_losses(
    model: Model,
    tokens: Tensor,
    starts: Tensor,
    depth: int,
    dead_weight: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return cross-entropies against the target's distributions, and how often drafts are kept.

    Returns:
        losses [depth], each the weighted sum over the rows of a draft divided by their number;
        kept [depth], the fraction of chains that greedy verification keeps up to that draft.
    """
    losses, kept = [], []
    alive = torch.ones(tokens.shape[0], len(starts), dtype=torch.bool, device=tokens.device)
    for step, (drafts, judged) in enumerate(draft_chains(model, tokens, starts, depth, cos, sin)):
        logits = drafts.flatten(0, 1).float()
        wanted = judged.flatten(0, 1).float().softmax(-1)
        rows = F.cross_entropy(logits, wanted, reduction="none")
        with torch.no_grad():
            right = drafts.argmax(-1) == judged.argmax(-1)
            if step == 0:
                right = right[:, starts]
                weight = torch.ones_like(rows)
            else:
                weight = torch.where(alive, 1.0, dead_weight).flatten()
            alive = alive & right
            kept.append(alive.float().mean())
        losses.append((rows * weight).mean())
    return torch.stack(losses), torch.stack(kept)


def _freeze_target(model: Model) -> list[torch.nn.Parameter]:
    model.requires_grad_(False)
    module = model.mtp().requires_grad_(True)
    return list(module.parameters())


def train_chains(
    model: Model,
    training: Sequence[Ids],
    probe: Tensor,
    recipe: RecycleRecipe,
    first_step: int,
    device: torch.device,
    log: Path,
    save: Callable[[int], None],
    save_every_s: float = 300.0,
    compile_model: bool = True,
) -> None:
    """Train the module from `first_step` to `recipe.steps`; arguments as for `train`."""
    config = model.config
    cos, sin = rope_cos_sin(config.max_position_embeddings, config, device)
    parameters = _freeze_target(model)
    matrices = [item for item in parameters if item.ndim == 2]
    vectors = [item for item in parameters if item.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=recipe.weight_decay
        ),
        torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    sources = {
        length: Batches(training, length, recipe.batch_tokens, recipe.seed)
        for length in (recipe.length, recipe.long_length)
    }
    losses_of = torch.compile(chain_losses, dynamic=False) if compile_model else chain_losses

    def losses(tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        # Chains stay within the context, so the last rows cannot start one.
        rows = length - recipe.depth - 1
        generator = torch.Generator().manual_seed(step)
        starts = torch.randperm(rows, generator=generator)[: int(recipe.chains * length)]
        starts = starts.sort().values.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            result: tuple[Tensor, Tensor] = losses_of(
                model, tokens, starts, recipe.depth, recipe.dead_weight, cos, sin
            )
        return result

    with log.open("a") as file:
        file.write(json.dumps({"recycle_start": first_step, **asdict(recipe)}) + "\n")
    started = last_saved = time.monotonic()
    for step in range(first_step, recipe.steps):
        length = recipe.length_at(step)
        batch = sources[length][step][:, :length].to(device)
        parts = batch.split(max(1, recipe.micro_batch_tokens // length))
        scale = recipe.lr_scale(step)
        if first_step:
            scale *= min(1.0, (step - first_step + 1) / recipe.warmup_steps)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        totals = torch.zeros(2, recipe.depth, device=device)
        for index, part in enumerate(parts):
            by_draft, kept = losses(part, step * len(parts) + index)
            (by_draft.sum() / len(parts)).backward()
            totals += torch.stack((by_draft.detach(), kept)) / len(parts)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(totals.sum().item()):
            raise FloatingPointError(f"a loss is not finite at step {step}")

        last = step + 1 == recipe.steps
        if step % 10 == 9 or last:
            row = {
                "recycle_step": step + 1,
                "losses": [round(value, 4) for value in totals[0].tolist()],
                "kept": [round(value, 4) for value in totals[1].tolist()],
                "lr_scale": round(scale, 4),
                "seconds": round(time.monotonic() - started),
            }
            if step % 50 == 49 or last:
                with torch.no_grad():
                    held = [losses(part, 0)[1] for part in probe.to(device).split(len(parts[0]))]
                row["held_out_kept"] = [round(v, 4) for v in torch.stack(held).mean(0).tolist()]
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if last or time.monotonic() - last_saved > save_every_s:
            save(step + 1)
            last_saved = time.monotonic()
    model.requires_grad_(True)
