# SPDX-License-Identifier: Apache-2.0
"""The training loop: packed batches, Muon and AdamW, a schedule by step count, checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.train.corpus import Document
from tools.train.model import Model, rope_cos_sin
from tools.train.tokenizer import EOS_ID

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Recipe:
    """All settings of training, apart from the corpus."""

    steps: int = 1250
    batch_tokens: int = 16384
    micro_batch_tokens: int = 2048
    length: int = 512
    long_length: int = 1024
    # The last part runs at the full context, so that positions beyond `length` are trained too.
    long_fraction: float = 0.15
    library_repeats: int = 2  # library modules appear twice per epoch, tests once
    matrix_lr: float = 0.02
    vector_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 30
    rewarm_steps: int = 15  # after a resume, while the optimizer's averages are rebuilt
    decay_fraction: float = 0.5
    final_lr: float = 0.02
    mtp_weight: float = 0.3
    mtp_weight_in_decay: float = 0.1
    seed: int = 17

    def lr_scale(self, step: int) -> float:
        """Return the learning-rate scale: warm-up, constant, linear decay over `decay_fraction`."""
        scale = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.decay_fraction * self.steps)
        return scale * (self.final_lr + (1 - self.final_lr) * min(1.0, left))

    def mtp_scale(self, step: int) -> float:
        """Return the weight of the MTP loss: DeepSeek-V3's two stages, the second in the decay."""
        decaying = step >= (1 - self.decay_fraction) * self.steps
        return self.mtp_weight_in_decay if decaying else self.mtp_weight

    def length_at(self, step: int) -> int:
        """Return the sequence length of a step."""
        return self.long_length if step >= (1 - self.long_fraction) * self.steps else self.length


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Ids]:
    """Encode each document, preceded by the EOS that separates documents."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([EOS_ID, *item.ids], dtype=np.uint16) for item in encoded]


class Batches:
    """Windows of packed documents in a seeded order; batch k is a function of k alone."""

    def __init__(self, documents: Sequence[Ids], length: int, batch_tokens: int, seed: int) -> None:
        self.documents = documents
        self.length = length
        self.rows = batch_tokens // length
        self.seed = seed
        total = sum(len(document) for document in documents)
        # One window is reserved for the random offset; two tokens overlap into the next window,
        # because the last row's targets lie beyond it.
        self.per_epoch = ((total - 2) // length - 1) // self.rows
        if self.per_epoch < 1:
            raise ValueError(f"the corpus has {total} tokens, fewer than one batch")
        self.epoch = -1
        self.stream: Ids = np.empty(0, np.uint16)
        self.starts: NDArray[np.int64] = np.empty(0, np.int64)

    def _load(self, epoch: int) -> None:
        rng = np.random.default_rng((self.seed, self.length, epoch))
        order = rng.permutation(len(self.documents))
        self.stream = np.concatenate([self.documents[i] for i in order])
        offset = int(rng.integers(self.length))
        self.starts = offset + self.length * rng.permutation(self.per_epoch * self.rows)
        self.epoch = epoch

    def __getitem__(self, k: int) -> Tensor:
        """Return batch k: int64 [rows, length + 2]."""
        epoch, index = divmod(k, self.per_epoch)
        if epoch != self.epoch:
            self._load(epoch)
        starts = self.starts[index * self.rows : (index + 1) * self.rows]
        window = np.stack([self.stream[start : start + self.length + 2] for start in starts])
        return torch.from_numpy(window.astype(np.int64))


def _optimizers(model: Model, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # The embedding is also the LM head: its rows are looked up, so Adam, not Muon.
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else vectors).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=recipe.weight_decay
    )
    adam = torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def train(
    model: Model,
    training: Sequence[Ids],
    probe: Tensor,
    recipe: Recipe,
    first_step: int,
    device: torch.device,
    log: Path,
    save: Callable[[int], None],
    save_every_s: float = 300.0,
    compile_model: bool = True,
) -> dict[str, float]:
    """Train from `first_step` to `recipe.steps`; return the totals of this run.

    `training` are encoded documents, already repeated as the recipe requires; `probe` is a fixed
    held-out batch [rows, length + 2] whose loss is logged; `save(step)` writes a checkpoint.
    """
    torch.manual_seed(recipe.seed)
    config = model.config
    cos, sin = rope_cos_sin(config.max_position_embeddings, config, device)
    optimizers = _optimizers(model, recipe)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    sources = {
        length: Batches(training, length, recipe.batch_tokens, recipe.seed)
        for length in (recipe.length, recipe.long_length)
    }
    forward = torch.compile(model, dynamic=False) if compile_model else model

    def losses(tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1] - 2
        with torch.autocast(device.type, dtype=torch.bfloat16):
            result: tuple[Tensor, Tensor] = forward(tokens, cos[:length], sin[:length])
        return result

    with log.open("a") as file:
        file.write(json.dumps({"start": first_step, **asdict(recipe)}) + "\n")
    started = last_saved = last_logged = time.monotonic()
    logged_step, done = first_step, {"seconds": 0.0, "tokens": 0.0}
    for step in range(first_step, recipe.steps):
        length = recipe.length_at(step)
        batch = sources[length][step].to(device)
        rows = max(1, min(recipe.micro_batch_tokens, recipe.batch_tokens) // length)
        parts = batch.split(rows)
        scale = recipe.lr_scale(step)
        if first_step:
            scale *= min(1.0, (step - first_step + 1) / recipe.rewarm_steps)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        totals = torch.zeros(2, device=device)
        for part in parts:
            loss, mtp_loss = losses(part)
            ((loss + recipe.mtp_scale(step) * mtp_loss) / len(parts)).backward()
            totals += torch.stack((loss.detach(), mtp_loss.detach())) / len(parts)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done["tokens"] += recipe.batch_tokens
        if not math.isfinite(totals[0].item()):
            raise FloatingPointError(f"the loss is {totals[0].item()} at step {step}")

        last = step + 1 == recipe.steps
        if step % 10 == 9 or last:
            now = time.monotonic()
            row: dict[str, float] = {
                "step": step + 1,
                "loss": round(totals[0].item(), 4),
                "mtp_loss": round(totals[1].item(), 4),
                "lr_scale": round(scale, 4),
                "tokens_per_s": round(
                    (step + 1 - logged_step) * recipe.batch_tokens / (now - last_logged)
                ),
                "seconds": round(now - started),
            }
            if step % 100 == 99 or last:
                with torch.no_grad():
                    held = [losses(part) for part in probe.to(device).split(rows)]
                row["held_out_loss"] = round(sum(a.item() for a, _ in held) / len(held), 4)
                row["held_out_mtp_loss"] = round(sum(b.item() for _, b in held) / len(held), 4)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            last_logged, logged_step = time.monotonic(), step + 1
        if last or time.monotonic() - last_saved > save_every_s:
            save(step + 1)
            last_saved = time.monotonic()
    done["seconds"] = time.monotonic() - started
    return done
