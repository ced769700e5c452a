# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train.mixture`: the bundled model as a mixture of experts, without training.

The neurons of every MLP, including the MTP module's, are divided among experts of equal size, so
that neurons that are strong for the same rows are together. A router predicts how much each expert
would contribute, and a row uses only the highest of them (MoEfication, Zhang et al. 2022). The sum
of all experts would be the dense MLP. The assignment of neurons and the routers are in
`mixture.safetensors`; `--fit` recomputes that file from texts of the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tools.train import corpus, export
from tools.train.model import MixtureConfig, Model, rope_cos_sin
from tools.train.train import encode

ASSETS = Path(__file__).resolve().parents[2] / "python" / "specops" / "assets"
PARTS = Path(__file__).with_name("mixture.safetensors")

TEXTS, TOKENS, SEED = 24, 512, 0  # read by --fit
ROUNDS = 10  # of k-means
RIDGE = 1e-2  # of routers, relative to the mean square of their inputs
# A router only has to rank experts. Its logits are scaled down so that all chosen experts have
# nearly the same weight, as the parts of a dense sum do.
LOGITS = 2.0**-6


def _digest() -> str:
    return hashlib.sha256((ASSETS / "model.safetensors").read_bytes()).hexdigest()


def share_out(strengths: Tensor, num_experts: int) -> Tensor:
    """Divide neurons among experts of equal size by balanced k-means.

    Args:
        strengths: [rows, neurons], how much each neuron contributes to each row.
        num_experts: a divisor of the number of neurons.

    Returns:
        int64 [num_experts, neurons / num_experts], ascending in each expert.
    """
    features = F.normalize((strengths - strengths.mean(0)).T, dim=1)
    count = len(features)
    generator = torch.Generator().manual_seed(SEED)
    centres = features[torch.randperm(count, generator=generator)[:num_experts]]
    expert = torch.empty(count, dtype=torch.int64)
    for _ in range(ROUNDS):
        likeness = features @ centres.T
        wishes = likeness.argsort(dim=1, descending=True).tolist()
        # The neuron with the most to lose chooses first.
        order = (likeness.max(1).values - likeness.mean(1)).argsort(descending=True)
        room = [count // num_experts] * num_experts
        for neuron in order.tolist():
            chosen = next(one for one in wishes[neuron] if room[one])
            room[chosen] -= 1
            expert[neuron] = chosen
        means = [features[expert == one].mean(0) for one in range(num_experts)]
        centres = F.normalize(torch.stack(means), dim=1)
    return torch.stack([(expert == one).nonzero()[:, 0] for one in range(num_experts)])


def router_of(x: Tensor, given: Tensor) -> Tensor:
    """Fit the logarithm of the experts' contributions by least squares.

    Args:
        x: [rows, hidden], inputs of the router.
        given: [rows, experts], the norm of what each expert adds.

    Returns:
        [experts, hidden]; the mean over experts, which changes no choice, is subtracted.
    """
    wanted = given.log()
    wanted = wanted - wanted.mean(1, keepdim=True)
    square = x.T @ x
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square))
    router = torch.linalg.solve(square + ridge, x.T @ wanted)
    return router.T * LOGITS


@torch.no_grad()
def fit(model: Model, texts: Tensor, config: MixtureConfig) -> dict[str, Tensor]:
    """Divide the neurons of every MLP among experts and fit its router.

    Args:
        model: the model with dense MLPs.
        texts: int64 [texts, tokens], token ids.
        config: shape of the mixture.

    Returns:
        per layer i: "i.neurons", int16 [experts, width], and "i.router", bf16 [experts, hidden].
    """
    read: dict[int, list[Tensor]] = {}
    layers = list(model.model.layers)
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, x, i=index: read.setdefault(i, []).append(x[0].flatten(0, -2))
        )
        for index, layer in enumerate(layers)
    ]
    cos, sin = rope_cos_sin(texts.shape[1], model.config, texts.device)
    for part in texts.split(4):
        model(part, cos[:-2], sin[:-2])
    for hook in hooks:
        hook.remove()
    parts = {}
    for index, layer in enumerate(layers):
        x, mlp = torch.cat(read[index]), layer.mlp
        gated, down = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight
        neurons = share_out(gated.abs() * down.norm(dim=0), config.num_experts)
        given = [F.linear(gated[:, own], down[:, own]).norm(dim=1) for own in neurons]
        parts[f"{index}.neurons"] = neurons.to(torch.int16)
        parts[f"{index}.router"] = router_of(x, torch.stack(given, 1)).bfloat16()
    return parts


def split(model: Model, parts: Mapping[str, Tensor], config: MixtureConfig) -> Model:
    """Return the mixture: the dense weights in another order, and the routers.

    Each expert of a row has weight 1 / top_k, so its output is scaled by top_k.
    """
    dense = dict(model.state_dict())
    state = {name: value for name, value in dense.items() if ".mlp." not in name}
    for index in range(config.num_hidden_layers + 1):
        prefix = f"model.layers.{index}.mlp."
        gate, up, down = (dense[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        state[f"{prefix}gate.weight"] = parts[f"{index}.router"].float()
        for expert, neurons in enumerate(parts[f"{index}.neurons"].long()):
            own = f"{prefix}experts.{expert}."
            state[f"{own}gate_proj.weight"] = gate[neurons]
            state[f"{own}up_proj.weight"] = up[neurons]
            state[f"{own}down_proj.weight"] = down[:, neurons] * config.num_experts_per_tok
    mixture = Model(config)
    mixture.load_state_dict(state)
    return mixture


def write_mixture(directory: Path) -> None:
    """Write the mixture, a model directory, from the bundled model and `mixture.safetensors`.

    Raises:
        ValueError: the bundled model is not the one that the file was made for.
    """
    model, tokenizer, step = export.load_model(ASSETS)
    with safe_open(PARTS, framework="pt") as file:
        if file.metadata()["model"] != _digest():
            raise ValueError(
                f"{PARTS.name} was made for another model than the one in {ASSETS}; "
                "run python -m tools.train.mixture --fit"
            )
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    mixture = split(model, parts, MixtureConfig())
    export.save_model(directory, mixture, tokenizer, step, export.recycle_steps(ASSETS))


def _fit_to_corpus(root: Path | None) -> None:
    model, tokenizer, _ = export.load_model(ASSETS)
    modules = [one for one in corpus.load(root) if not (one.held_out or one.is_test)]
    order = np.random.default_rng(SEED).permutation(len(modules))
    encoded = encode(tokenizer, [modules[i] for i in order[: 3 * TEXTS]])
    texts = [ids[:TOKENS].astype("int64") for ids in encoded if len(ids) >= TOKENS][:TEXTS]
    parts = fit(model, torch.from_numpy(np.stack(texts)), MixtureConfig())
    save_file(parts, PARTS, metadata={"model": _digest()})


def main(argv: Sequence[str] | None = None) -> None:
    """Write the mixture."""
    parser = argparse.ArgumentParser(prog="python -m tools.train.mixture", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/mixture"))
    parser.add_argument("--fit", action="store_true", help="make mixture.safetensors anew before")
    parser.add_argument("--corpus", type=Path, help="of --fit; as for tools.train")
    args = parser.parse_args(argv)
    if args.fit:
        _fit_to_corpus(args.corpus)
    write_mixture(args.out)


if __name__ == "__main__":
    main()
