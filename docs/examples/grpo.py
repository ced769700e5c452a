# SPDX-License-Identifier: Apache-2.0
"""Train the bundled model with GRPO, with the same logprobs in the rollout and in the trainer.

    python docs/examples/grpo.py --steps 300 --out curve.json

Each step samples a group of completions per prompt, with drafts, gives each a reward (1 if it is
valid Python), and raises the probability of those that are better than their group. The policy
gradient needs the logprob of every sampled token. The engine has reported it, and the trainer
computes it again, with gradients; `gap` is the largest difference of the two, and it is 0.
`--rollouts transformers` samples with transferred weights in transformers instead, for comparison.
"""

import argparse
import ast
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from specops import attention, autograd
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.minimal import BUNDLED
from tokenizers import Tokenizer
from torch import Tensor, nn

PROMPTS = ["def add(a, b):", "def read_lines(path):", "class Stack:", "def test_empty(self):"]
GROUP = 8  # completions per prompt
NUM_TOKENS = 32


class Policy(nn.Module):
    """The bundled Qwen3, with fp32 weights that every pass rounds to bfloat16.

    Args:
        directory: directory of the model.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.config = json.loads((directory / "config.json").read_text())
        self.frozen = load_file(directory / "model.safetensors")
        draft_module = f"model.layers.{self.config['num_hidden_layers']}."
        self.names = [name for name in self.frozen if not name.startswith(draft_module)]
        self.weights = nn.ParameterList(self.frozen.pop(name).float() for name in self.names)
        self.cos_sin = attention.rope_cos_sin(
            self.config["max_position_embeddings"],
            self.config["head_dim"],
            self.config["rope_theta"],
        )

    def rounded(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16, by name; gradients flow back to the fp32 weights."""
        return {name: w.bfloat16() for name, w in zip(self.names, self.weights, strict=True)}

    def save(self, directory: Path) -> None:
        """Write a checkpoint that an engine can load."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)
        trained = {name: weight.detach() for name, weight in self.rounded().items()}
        save_file(trained | self.frozen, directory / "model.safetensors")

    def forward(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logprobs of all tokens of the texts, one text after another, in one pass."""
        weights, eps = self.rounded(), self.config["rms_norm_eps"]
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        lens = [len(text) for text in texts]
        hidden = autograd.embedding(ids, weights["model.embed_tokens.weight"])
        for i in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            normed = autograd.rms_norm(hidden, own["input_layernorm.weight"], eps)
            q, k, v = (
                autograd.linear(normed, own[f"self_attn.{name}_proj.weight"]).unflatten(
                    1, (-1, self.config["head_dim"])
                )
                for name in "qkv"
            )
            attended = autograd.attention(
                q,
                k,
                v,
                lens,
                self.cos_sin,
                q_norm_weight=own["self_attn.q_norm.weight"],
                k_norm_weight=own["self_attn.k_norm.weight"],
                norm_eps=eps,
            )
            hidden = hidden + autograd.linear(attended.flatten(1), own["self_attn.o_proj.weight"])
            normed = autograd.rms_norm(hidden, own["post_attention_layernorm.weight"], eps)
            gate_up = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
            gated = autograd.linear(normed, gate_up, activation="silu")
            hidden = hidden + autograd.linear(gated, own["mlp.down_proj.weight"])
        hidden = autograd.rms_norm(hidden, weights["model.norm.weight"], eps)
        head = weights["model.embed_tokens.weight"]  # the bundled model ties its embeddings
        logits = autograd.linear(hidden, head, out_dtype=torch.float32)
        return autograd.token_logprobs(logits, ids, lens)


class Rollouts(NamedTuple):
    """Completions with the logprobs that the sampler reports, and their prompts."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[list[float]]


def sample_with_specops(directory: Path, prompts: list[list[int]], seed: int) -> Rollouts:
    """Sample from the engine, with drafts of the MTP module."""
    drafts = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    engine = Engine(
        EngineConfig(model=str(directory), speculative_config=drafts, max_model_len=128)
    )
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, seed=seed + i, logprobs=0)
        for i in range(len(prompts))
    ]
    completions = engine.generate(prompts, params)
    return Rollouts(
        prompts,
        [one.token_ids for one in completions],
        [[token.logprob for token in one.logprobs] for one in completions],
    )


def sample_with_transformers(directory: Path, prompts: list[list[int]], seed: int) -> Rollouts:
    """Sample from transformers in bfloat16, with padded prompts and a KV cache."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    width, end = max(map(len, prompts)), model.config.eos_token_id
    made = model.generate(
        torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
        max_new_tokens=NUM_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=end,
        return_dict_in_generate=True,
        output_logits=True,
    )
    outputs, logprobs = [], []
    for tokens, logits in zip(made.sequences[:, width:], torch.stack(made.logits, 1), strict=True):
        ended = (tokens == end).nonzero()
        tokens = tokens[: int(ended[0]) + 1] if len(ended) else tokens
        rows = logits[: len(tokens)].float().log_softmax(-1)
        outputs.append(tokens.tolist())
        logprobs.append(rows.gather(1, tokens[:, None])[:, 0].tolist())
    return Rollouts(prompts, outputs, logprobs)


def reward_of(text: str) -> float:
    """Return 1 if a text is valid Python, without its last line, which may be cut off."""
    try:
        ast.parse(text.rpartition("\n")[0])
    except (SyntaxError, ValueError):
        return 0.0
    return 1.0


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, rollouts: Rollouts, rewards: Tensor
) -> float:
    """Update the weights once; return the largest difference between the two logprobs."""
    groups = rewards.view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    texts = [a + b for a, b in zip(rollouts.prompts, rollouts.outputs, strict=True)]
    pieces = policy(texts).split([len(text) for text in texts])
    loss, gap = torch.zeros(()), 0.0
    for piece, prompt, sampled, advantage in zip(
        pieces, rollouts.prompts, rollouts.logprobs, advantages.flatten(), strict=True
    ):
        trained = piece[len(prompt) :]
        old = torch.tensor(sampled)
        gap = max(gap, float((trained.detach() - old).abs().max()))
        loss = loss - advantage * (trained - old).exp().mean() / len(texts)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return gap


def main() -> None:
    """Train, print a line per step, and write the curve."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rollouts", choices=("specops", "transformers"), default="specops")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rewards and gaps as JSON")
    args = parser.parse_args()

    policy = Policy(BUNDLED)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-5, weight_decay=0.0)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS for _ in range(GROUP)]
    sample = sample_with_specops if args.rollouts == "specops" else sample_with_transformers
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(args.steps):
            policy.save(Path(folder))
            rollouts = sample(Path(folder), prompts, step * len(prompts))
            rewards = torch.tensor(
                [
                    reward_of(tokenizer.decode(prompt + output))
                    for prompt, output in zip(rollouts.prompts, rollouts.outputs, strict=True)
                ]
            )
            gap = train_step(policy, optimizer, rollouts, rewards)
            curve.append({"reward": float(rewards.mean()), "gap": gap})
            print(f"step {step}: reward {curve[-1]['reward']:.2f}, gap {gap}", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
