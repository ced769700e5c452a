# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' models, and copies of them in each peer's format (bench/work/).

Every copy holds the same bf16 weights. Copies are made once, and again when the source changes.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.common import BENCH, PEER_PYTHON, ROOT, WORK
from tools.train.mixture import write_mixture

BUNDLED = ROOT / "python" / "specops" / "assets"
QWEN06: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
QWEN8 = {
    **QWEN06,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
# Two layers of Qwen3-30B-A3B, and a vocabulary too small to affect their time.
QWEN30 = {
    **QWEN06,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Checkpoint:
    """A benchmark's model: directory for specops, and location of the peers' copies."""

    name: str
    path: Path

    @property
    def config(self) -> dict[str, int]:
        """Contents of the model's config.json."""
        config: dict[str, int] = json.loads((self.path / "config.json").read_text())
        return config

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: without the MTP layer; a tied head once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights().values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of bf16 KV per position."""
        config = self.config
        heads = config["num_key_value_heads"] * config["head_dim"]
        return 2 * 2 * config["num_hidden_layers"] * heads

    def for_peer(self, peer: str, kind: str = "bf16") -> Path:
        """Return the copy that `peer` loads; raise CalledProcessError if it cannot be made.

        kind: weight format: "bf16"; for llama.cpp and OpenVINO also "int8" or "int4".
        """
        scripts, plain = BENCH / "peers", self.path
        if "num_nextn_predict_layers" in self.config:
            plain = self._copy("plain", self._write_plain)
        if peer == "llama_cpp_peer":
            name = "model.gguf" if kind == "bf16" else f"model-{kind}.gguf"
            return self._copy(name, lambda out: _run(scripts / "write_gguf.py", plain, out, kind))
        if peer == "openvino_peer":
            export = scripts / "openvino_export.py"
            exported = self._copy("openvino", lambda out: _run(export, plain, out))
            if kind == "bf16":
                return exported
            compress = scripts / "openvino_compress.py"
            return self._copy(f"openvino-{kind}", lambda out: _run(compress, exported, out, kind))
        return plain

    def _weights(self) -> dict[str, torch.Tensor]:
        last = self.config["num_hidden_layers"]
        with safe_open(self.path / "model.safetensors", framework="pt") as file:
            names = [name for name in file.keys() if f"layers.{last}." not in name]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}

    def _write_plain(self, out: Path) -> None:
        """Write the checkpoint without its MTP layer, which no peer reads."""
        out.mkdir()
        config = {k: v for k, v in self.config.items() if k != "num_nextn_predict_layers"}
        (out / "config.json").write_text(json.dumps(config, indent=1))
        save_file(self._weights(), out / "model.safetensors", metadata={"format": "pt"})

    def _copy(self, name: str, make: Callable[[Path], None]) -> Path:
        source = min(self.path.glob("*.safetensors")).stat()
        key = hashlib.sha256(f"{source.st_size} {source.st_mtime_ns}".encode()).hexdigest()[:12]
        folder = WORK / f"{self.name}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / name
        if not done.exists():
            unfinished = folder / f"unfinished-{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.unlink(missing_ok=True)
            make(unfinished)
            unfinished.rename(done)
        return done


def bundled() -> Checkpoint:
    """Return the model in the package."""
    return Checkpoint("bundled", BUNDLED)


def mixture() -> Checkpoint:
    """Return the bundled model as a mixture of experts."""
    write_mixture(path := WORK / "mixture")
    return Checkpoint("mixture", path)


def qwen06() -> Checkpoint:
    """Return random weights in the shape of Qwen3-0.6B: speeds do not depend on values."""
    return _random_checkpoint("qwen06", QWEN06)


def qwen06_quarter() -> Checkpoint:
    """Return random weights in the shape of a quarter of Qwen3-0.6B's layers, for long prompts."""
    layers = max(1, QWEN06["num_hidden_layers"] // 4)
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": 40960}
    return _random_checkpoint("qwen06_quarter", {**QWEN06, **sizes})


def qwen30() -> Checkpoint:
    """Return random weights in the shape of two layers of Qwen3-30B-A3B, 2.4 GB in one file."""
    return _random_checkpoint("qwen30", QWEN30)


def _random_checkpoint(name: str, config: dict[str, Any]) -> Checkpoint:
    path = WORK / name
    if not (path / "config.json").exists():  # written last
        path.mkdir(parents=True, exist_ok=True)
        save_file(_random_weights(config), path / "model.safetensors", metadata={"format": "pt"})
        # The engine requires a tokenizer; prompts are token ids, and texts are not used.
        shutil.copy(BUNDLED / "tokenizer.json", path)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return Checkpoint(name, path)


def llama3() -> Checkpoint:
    """Return random weights in the shape of Llama 3.2 3B, 6.4 GB in several files."""
    path = WORK / "llama3"
    if not (path / "config.json").exists():  # written last
        path.mkdir(parents=True, exist_ok=True)
        where: dict[str, str] = {}
        for number, weights in enumerate(_random_parts(LLAMA3)):
            where |= dict.fromkeys(weights, name := f"model-{number:05d}.safetensors")
            save_file(weights, path / name, metadata={"format": "pt"})
        index = json.dumps({"weight_map": where})
        (path / "model.safetensors.index.json").write_text(index)
        shutil.copy(BUNDLED / "tokenizer.json", path)
        (path / "config.json").write_text(json.dumps(LLAMA3, indent=1))
    return Checkpoint("llama3", path)


def without_weights(name: str, config: dict[str, object]) -> Checkpoint:
    """Return a checkpoint for load_format="dummy": only config.json and a tokenizer."""
    path = WORK / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(BUNDLED / "tokenizer.json", path)
    return Checkpoint(name, path)


def decode_bytes(config: dict[str, Any], *, batch: int, kv_len: float) -> float:
    """Return the bytes of bf16 weights and KV that one decode step of a dense model reads."""
    width, head_dim = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * width * heads * head_dim + 3 * width * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * width
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return 2.0 * (weights + batch * kv_len * kv)


def _random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for part in _random_parts(config) for name, one in part.items()}


def _random_parts(config: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights outside the layers, then each layer; q_norm and k_norm only if present."""
    generator = torch.Generator().manual_seed(0)
    num_experts = config.get("num_experts", 0)

    def matrix(rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).bfloat16()

    width, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = (
        head_dim * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    yield {
        # Large enough that attention's outputs do not dominate, which would give rows equal
        # experts.
        "model.embed_tokens.weight": matrix(
            config["vocab_size"], width, 1.0 if num_experts else 0.02
        ),
        "model.norm.weight": torch.ones(width).bfloat16(),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            **_mlp_shapes(config),
        }
        norms = {
            "input_layernorm": width,
            "post_attention_layernorm": width,
        }
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        prefix = f"model.layers.{layer}"
        weights = {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name, size in norms.items():
            weights[f"{prefix}.{name}.weight"] = torch.ones(size).bfloat16()
        yield weights


def _mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's MLP matrices, or of its router and experts."""
    width, num_experts = config["hidden_size"], config.get("num_experts", 0)
    wide = config["moe_intermediate_size" if num_experts else "intermediate_size"]
    parts = {"gate_proj": (wide, width), "up_proj": (wide, width), "down_proj": (width, wide)}
    if not num_experts:
        return {f"mlp.{name}": shape for name, shape in parts.items()}
    experts = {
        f"mlp.experts.{expert}.{name}": shape
        for expert in range(num_experts)
        for name, shape in parts.items()
    }
    return {"mlp.gate": (num_experts, width), **experts}


def _run(script: Path, source: Path, out: Path, *arguments: str) -> None:
    is_export = script.name == "openvino_export.py"
    path = str(PEER_PYTHON.parents[1] / "export") if is_export else ""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [str(PEER_PYTHON), str(script), str(source), str(out), *arguments]
    subprocess.run(command, env=environment, check=True, capture_output=True)
