# SPDX-License-Identifier: Apache-2.0
"""Compare random engines with plain decoding for half an hour: no token and no logprob bit differs.

    PYTHONPATH=. python tests/engine_campaign.py [--minutes 30] [--seed 0] [--family NAME]
        [--quantization KIND]

A round has a model and requests, some of which share their first tokens. The model is the bundled
one or a small one of some family with random weights; it has an MTP module, or a draft model and a
head of every method. Each request is first decoded alone and without speculation. Then engines with
other limits, instruction sets and threads run all requests: few pages, small chunks, no shared
prefixes, other defaults. Each request has its own method; requests arrive at random times, and
additional requests are aborted. For a difference, the campaign prints all that is needed to
reproduce it and exits with status 1. A failing drafter or request ends the campaign. At the end, a
table shows drafts and accepted drafts by method, or kind of head, and num_model_steps.
"""

import argparse
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small_heads
import specops
from checkpoints import SHARED_KV, make_checkpoint, write_config, write_tokenizer
from pages import check_pages
from specops.api.structured import StructuredOutput
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import load_model

VOCAB = 64  # vocabulary of the small model; with few tokens, texts repeat themselves
REQUESTS, ENGINES = 12, 4  # per round
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
# config.json of each small model, in addition to `checkpoints.BASE`.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_EXPERTS,
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True},
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_intermediate_size": 48,
        "moe_k": 3,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "deepseek_v3": {
        **_EXPERTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
    },
    "qwen3_next": {
        **_EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    "granite": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2,
        "num_nextn_predict_layers": 0,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_state": 32,
        "key_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.25, 0.1, 0.5, 0.3],
        "mlp_multipliers": [0.5, 0.25],
        "num_nextn_predict_layers": 0,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "ME*-M",
        "num_hidden_layers": 5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
    },
    "kimi_linear": {
        **_EXPERTS,
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "mla_use_nope": True,
        "num_experts": 8,
        "routed_scaling_factor": 2.5,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "num_nextn_predict_layers": 0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 50,
        "num_nextn_predict_layers": 0,
    },
    "gemma4": {
        **SHARED_KV,
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "num_nextn_predict_layers": 0,
    },
}
# Families with checkpoints on disk, since heads need a target with weights in files: transformers
# class, changes of its configuration, and the kinds of heads that do not fit the target.
_STATES = {one: FAMILIES["qwen3_5"][one] for one in FAMILIES["qwen3_5"] if "linear" in one}
_MIXED = ["linear_attention", "full_attention"] * (small_heads.LAYERS // 2)
# These heads read unscaled embeddings, but Gemma scales its embeddings.
_UNSCALED = {"hydra", "hydra++", "dflash", "anchored", "dspark", "dflash2", "windows"}
HEAD_FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "qwen3 with heads": ("Qwen3", {}, set()),
    # A prefix layer is a layer of the target's family, so the target must have attention layers
    # only.
    "qwen3_5 with heads": ("Qwen3_5", {**_STATES, "layer_types": _MIXED}, {"hydra++"}),
    "gemma3 with heads": (
        "Gemma3",
        {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 50},
        _UNSCALED,
    ),
    "gemma4 with heads": (
        "Gemma4",
        {**SHARED_KV, "layer_types": FAMILIES["gemma4"]["layer_types"], "num_kv_shared_layers": 2},
        _UNSCALED,
    ),
}
NO_MTP = {
    "gemma3",
    "gemma4",
    "granite",
    "falcon_h1",
    "kimi_linear",
    *HEAD_FAMILIES,
}
NO_8_BIT_CACHES = {"deepseek_v3", "kimi_linear"}  # latents have no 8-bit caches
# Models with recurrent states: the state memory limits the number of drafts.
HAVE_STATES = {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5 with heads",
    "granite",
    "falcon_h1",
    "nemotron_h",
    "kimi_linear",
}
MOST_DRAFTS = 12


def random_speculation(draw: random.Random, weights: dict[str, int]) -> dict[str, Any]:
    """Return a random speculative_config of a request.

    Args:
        draw: source of the choices.
        weights: maximum number of drafts of each method with weights.
    """
    method = draw.choice(["naive", "ngram", "ngram", "suffix", "suffix", *weights, *weights])
    if method == "naive":
        return {"method": method}
    config: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": draw.randint(1, MOST_DRAFTS),
        "adaptive_verification": draw.random() < 0.2,
        "accept_policy": draw.choice(["normal"] * 9 + ["reject_all"]),
    }
    if method == "ngram":
        config["min_ngram_size"] = draw.randint(1, 2)
        config["max_ngram_size"] = draw.randint(2, 5)
        config["ngram_match"] = draw.choice(["most_recent", "leftmost"])
    if method in weights:
        most = min(config["num_speculative_tokens"], weights[method])
        config["num_model_steps"] = draw.randint(1, most)
    if method in weights and method != "mtp":
        config["method"] += draw.choice(["", "", "+ngram", "+suffix"])
    if method in weights and config["method"] == method != "mtp":
        config["num_speculative_tokens"] = config["num_model_steps"]
    if method == "mtp":
        config["method"] += draw.choice(["", "+ngram", "+suffix", "+prediction"])
    return config


def random_budgets(draw: random.Random) -> dict[str, int]:
    """Return random cache budgets of suffix decoding: mostly unlimited, otherwise nearly zero."""
    budgets = {"requests": [0, 3], "tokens": [0, 300], "bytes": [0, 1 << 16]}
    return {
        f"suffix_decoding_max_cached_{name}": draw.choice([-1, -1, *few])
        for name, few in budgets.items()
    }


def random_params(draw: random.Random, vocab: int, max_tokens: int) -> SamplingParams:
    """Return random parameters, each of which is set with a probability of 15 %."""

    def token() -> int:
        return draw.randrange(vocab)

    optional = {
        "top_k": draw.choice([3, 20]),
        "top_p": draw.choice([0.5, 0.9]),
        "min_p": draw.choice([0.02, 0.2]),
        "typical_p": draw.choice([0.5, 0.95]),
        "repetition_penalty": draw.choice([0.9, 1.2]),
        "presence_penalty": draw.choice([-0.3, 0.4]),
        "frequency_penalty": draw.choice([-0.1, 0.2]),
        "logit_bias": {token(): draw.uniform(-5, 5) for _ in range(5)},
        "bad_words_token_ids": [[token()], [token(), token()]],
        "allowed_token_ids": sorted(draw.sample(range(vocab), vocab * 3 // 4)),
        "min_tokens": draw.randint(1, max_tokens),
        "stop_token_ids": [token()],
        "structured_output": StructuredOutput(
            **draw.choice(
                [
                    {"regex": "[0-9]{1,9}(-[0-9A-F]{2,20})*"},
                    {"choice": ("12", "123", "45-67-89", "A" * 30)},
                    {"json_schema": {"type": "array", "items": {"enum": [1, 12, 345]}}},
                ]
            )
        ),
        "stop_token_sequences": [[token(), token()], [token()] * 3],
        "prediction": [token() for _ in range(20)] * 2,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw.choice([0.0, 0.0, 0.3, 0.7, 1.0]),
        seed=draw.getrandbits(64),
        logprobs=draw.choice([0, 0, 3]),
        ignore_eos=draw.random() < 0.7,
        **{name: value for name, value in optional.items() if draw.random() < 0.15},
    )


def random_prompts(
    draw: random.Random, vocab: int, longest: int, count: int = REQUESTS
) -> list[list[int]]:
    """Return random prompts: some share beginnings on three levels, and all repeat themselves."""

    def text(size: int) -> list[int]:
        piece = [draw.randrange(vocab) for _ in range(draw.randint(3, 20))]
        return (piece * (size // len(piece) + 1))[:size]

    roots = [text(draw.randint(1, longest // 3)) for _ in range(2)]
    branches = [draw.choice(roots) + text(draw.randint(1, longest // 3)) for _ in range(3)]
    return [
        draw.choice([[], *roots, *branches, *branches]) + text(draw.randint(1, longest // 3))
        for _ in range(count)
    ]


def random_limits(draw: random.Random, longest: int) -> dict[str, Any]:
    """Return random limits of an engine that still fit a request of `longest` tokens."""
    page_size = draw.choice([16, 16, 32, 64])
    limits: dict[str, Any] = {
        "max_num_seqs": draw.choice([1, 2, 3, 5, 8, 16]),
        "max_num_batched_tokens": draw.choice([32, 48, 100, 512]),
        "page_size": page_size,
        "enable_prefix_caching": draw.random() < 0.8,
        "enable_cascade_attention": draw.random() < 0.8,
        "num_threads": draw.choice([1, 2]),
    }
    if draw.random() < 0.4:  # few pages make the engine preempt requests
        limits["num_pages"] = -(-longest // page_size) + draw.randint(1, 8)
    return limits


def bits(one: Completion) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        one.token_ids,
        one.finish_reason,
        [
            (pack(p.logprob), p.rank, [(i, pack(value)) for i, value in p.alternatives])
            for p in one.logprobs
        ],
    ]


def write_heads(
    draw: random.Random, name: str, folder: Path, target: Path
) -> dict[str, tuple[str, Path, int]]:
    """Write a draft model, and a head for every method.

    Args:
        draw: chooses among the kinds of heads of a method.
        name: name of the target's family.
        folder: parent of their directories, which later rounds reuse.
        target: the target's directory; it also serves as the draft model.

    Returns:
        Kind, directory and maximum number of drafts of each method.
    """
    chosen = {"draft_model": ("draft model", target, 4)}
    kinds = [kind for kind in small_heads.KINDS if kind not in HEAD_FAMILIES[name][2]]
    draw.shuffle(kinds)
    for kind in kinds:
        head = small_heads.KINDS[kind]
        directory = folder / kind
        if not directory.exists():
            directory.mkdir()
            head.write(directory)
        chosen[head.method] = (kind, directory, head.most)
    return chosen


def write_target(name: str, folder: Path) -> Path:
    """Write a target for heads, unless it exists, and return its directory."""
    directory = folder / name
    if not directory.exists():
        directory.mkdir()
        family, changes, _ = HEAD_FAMILIES[name]
        sizes = {"num_hidden_layers": small_heads.LAYERS, "vocab_size": small_heads.VOCAB}
        make_checkpoint(directory, family, **{**changes, **sizes})
        write_tokenizer(directory)
    return directory


def run_at_random(
    engine: Engine,
    draw: random.Random,
    prompts: list[list[int]],
    params: list[SamplingParams],
    speculations: list[dict[str, Any]],
) -> list[Completion]:
    """Run requests in random order and timing, among others that are aborted."""
    order = list(range(len(prompts)))
    draw.shuffle(order)
    names: dict[int, str] = {}
    to_abort: list[str] = []
    while order or engine.has_unfinished():
        while order and (draw.random() < 0.5 or not engine.has_unfinished()):
            index = order.pop()
            add = {"speculative_config": speculations[index]}
            names[index] = engine.add_request(prompts[index], params[index], **add)
            if draw.random() < 0.3:
                to_abort.append(engine.add_request(prompts[index], params[index - 1], **add))
        if to_abort and draw.random() < 0.2:
            engine.abort(to_abort.pop())
        engine.step()
    check_pages(engine._pool)
    assert not engine._drafting.num_failures, "a drafter has failed; see the log"
    assert engine.num_free_pages == engine.num_pages, "pages have leaked"
    done = [engine.completion(names[index]) for index in range(len(prompts))]
    assert all(one.error is None for one in done), "a request has failed; see the log"
    return done


@dataclass(frozen=True)
class Model:
    """Random model of a round, and the limits of its requests.

    Attributes:
        name: name of the family, or "bundled".
        isa: instruction set of the round.
        settings: settings of every engine on which bits depend, and the context.
        weights: maximum number of drafts of each method with weights.
        heads: kind, directory and maximum number of drafts of each method with files of its own.
        longest, max_tokens: limits of prompts and outputs.
    """

    name: str
    isa: str
    settings: dict[str, Any]
    weights: dict[str, int]
    heads: dict[str, tuple[str, Path, int]]
    longest: int
    max_tokens: int

    @classmethod
    def drawn(
        cls, draw: random.Random, name: str, folder: Path, quantization: str | None = None
    ) -> "Model":
        """Return a random model, and set its instruction set.

        Args:
            draw: source of the choices.
            name: name of the family, or "bundled".
            folder: directory of the small model's configuration.
            quantization: quantization of the model; None for a random one.
        """
        isa = draw.choice(specops.runtime.supported_isas())
        specops.runtime.set_isa(isa)
        is_small = name != "bundled"
        longest, max_tokens = (120, 48) if is_small else (300, 64)
        settings: dict[str, Any] = {
            "device": "cpu",
            "kv_cache_dtype": draw.choice(["auto", "auto", "int8", "fp8_e4m3"]),
            "logprobs_mode": draw.choice(["raw_logprobs", "processed_logprobs"]),
            "quantization": draw.choice(["none", "none", "wint8", "wint4"]),
            "max_model_len": longest + max_tokens + 1,
        }
        if quantization is not None:
            settings["quantization"] = quantization
        if name in NO_8_BIT_CACHES:
            settings["kv_cache_dtype"] = "auto"
        weights, heads = ({} if name in NO_MTP else {"mtp": 4}), {}
        if name in HEAD_FAMILIES:
            model = write_target(name, folder)
            heads = write_heads(draw, name, folder, model)
            weights |= {method: most for method, (_, _, most) in heads.items()}
            settings["model"] = str(model)
        elif is_small:
            sizes = {"num_hidden_layers": 2, "vocab_size": VOCAB, "num_nextn_predict_layers": 1}
            model = write_config(folder, **{**sizes, **FAMILIES[name]})
            settings |= {"model": str(model), "load_format": "dummy"}
        return cls(name, isa, settings, weights, heads, longest, max_tokens)

    def plain_engine(self, **changes: Any) -> Engine:
        """Return an engine that decodes one request at a time, without speculation."""
        naive = SpeculativeConfig(method="naive")
        alone: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
        settings = {**self.settings, **alone, **changes}
        return Engine(EngineConfig(speculative_config=naive, **settings))

    def vocab_of(self, engine: Engine) -> int:
        """Return the number of tokens of random texts."""
        if self.heads:
            return small_heads.VOCAB
        return VOCAB if self.name != "bundled" else engine.tokenizer.vocab_size

    def random_engine(
        self, draw: random.Random, count: int
    ) -> tuple[Engine, dict[str, Any], list[dict[str, Any]]]:
        """Return an engine with random limits, these limits, and methods of `count` requests."""
        limits = random_limits(draw, self.longest + self.max_tokens + 1)
        speculations = [random_speculation(draw, self.weights) for _ in range(count)]
        own = random_speculation(draw, self.weights)
        if self.heads:  # the engine's own number limits P-EAGLE's drafts
            own = {"method": "ngram", "num_speculative_tokens": MOST_DRAFTS}
            own["adaptive_verification"] = draw.random() < 0.3
        if self.name in HAVE_STATES:
            own = {"method": "ngram", "num_speculative_tokens": MOST_DRAFTS}
            model = Path(self.settings["model"])
            states = load_model(model, load_format="dummy").kv_bytes_per_slot(0)
            if self.heads:  # the draft model needs the same state memory again
                states *= 2
            limits["state_cache_bytes"] = draw.choice([1, 2, 4, 30]) * states
        options = {
            method: {"model": str(directory)} for method, (_, directory, _) in self.heads.items()
        }
        default = SpeculativeConfig.from_dict({**own, **random_budgets(draw), "options": options})
        if not default.selects_drafts:  # otherwise the engine has not measured its steps
            speculations = [{**one, "adaptive_verification": False} for one in speculations]
        config = EngineConfig(
            speculative_config=default, methods=tuple(self.weights), **limits, **self.settings
        )
        return Engine(config), limits, speculations


def run_round(
    draw: random.Random,
    name: str,
    folder: Path,
    found: Counter[str],
    drafted: Counter[tuple[str, int]],
    accepted: Counter[tuple[str, int]],
    quantization: str | None = None,
) -> None:
    """Run one model and one set of requests on some engines.

    Args:
        draw, name, folder, quantization: as for `Model.drawn`.
        found: counts of the round's events; updated.
        drafted, accepted: drafts by method, or kind of head, and num_model_steps.
    """
    model = Model.drawn(draw, name, folder, quantization)
    plain = model.plain_engine()
    vocab = model.vocab_of(plain)
    prompts = random_prompts(draw, vocab, model.longest)
    params = [random_params(draw, vocab, draw.randint(1, model.max_tokens)) for _ in prompts]
    plain_outputs = plain.generate(prompts, params, speculative_config={"method": "naive"})
    expected_bits = [bits(one) for one in plain_outputs]
    for _ in range(ENGINES):
        engine, limits, speculations = model.random_engine(draw, len(prompts))
        got = run_at_random(engine, draw, prompts, params, speculations)
        for index, (one, expected) in enumerate(zip(got, expected_bits, strict=True)):
            found["outputs"] += 1
            found["tokens"] += len(one.token_ids)
            if bits(one) != expected:
                found["differ"] += 1
                print(
                    f"\nrequest {index} of {name} differs: {model.isa}, {model.settings}, {limits}"
                )
                print(f"  {speculations[index]}\n  {params[index]}\n  prompt {prompts[index]}")
                print(f"  expected {expected[0]}\n  got      {one.token_ids}", flush=True)
        for speculation, one in zip(speculations, got, strict=True):
            method = speculation["method"].partition("+")[0]
            if method in model.weights and speculation["method"] in (method, "mtp"):
                kind = model.heads[method][0] if method in model.heads else method
                key = kind, speculation["num_model_steps"]
                drafted[key] += one.stats.num_draft_tokens
                accepted[key] += one.stats.num_accepted_tokens
        stats = engine.stats
        found["drafts accepted"] += stats.speculative.num_accepted_tokens
        found["drafts rejected"] += (
            stats.speculative.num_draft_tokens - stats.speculative.num_accepted_tokens
        )
        found["preemptions"] += stats.num_preemptions


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    names = [*FAMILIES, *HEAD_FAMILIES]
    parser.add_argument(
        "--family", choices=names, help="family of all rounds (default: each in turn)"
    )
    parser.add_argument("--quantization", help="quantization of all rounds (default: random)")
    options = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    drafted: Counter[tuple[str, int]] = Counter()
    accepted: Counter[tuple[str, int]] = Counter()
    end, number = time.monotonic() + 60 * options.minutes, 0
    names_in_turn = [options.family] if options.family else [*names, "bundled"]
    with tempfile.TemporaryDirectory() as folder:
        while number < options.rounds if options.rounds else time.monotonic() < end:
            draw = random.Random(f"{options.seed}-{number}")
            name = names_in_turn[number % len(names_in_turn)]
            run_round(draw, name, Path(folder), found, drafted, accepted, options.quantization)
            number += 1
            counts = ", ".join(f"{found[one]:,} {one}" for one in found if one != "differ")
            print(f"{number} rounds: {counts}, {found['differ']} differ", flush=True)
    print("| drafter | drafts a step | drafts | accepted |\n| --- | --- | --- | --- |")
    for (kind, count), drafts in sorted(drafted.items()):
        print(f"| {kind} | {count} | {drafts} | {accepted[kind, count]} |")
    return int(found["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
