# SPDX-License-Identifier: Apache-2.0
"""Files of the bundled model: they are complete, match the model card, and load in transformers."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "python" / "specops" / "assets"
TRAIN = ROOT / "tools" / "train"

TEXT = '''"""Helpers for reading settings."""

import os
import sys


class Settings:
    """A set of named values."""

    def __init__(self, values=None):
        self._values = dict(values or {})

    def get(self, name, default=None):
        """Return the value of *name*, or *default* if it is not set."""
        try:
            return self._values[name]
        except KeyError:
            return default

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self._values)


class SettingsTest(unittest.TestCase):
    def test_get(self):
        settings = Settings({"a": 1})
        self.assertEqual(settings.get("a"), 1)
        self.assertEqual(settings.get("b"), None)
'''


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Return the model's config.json."""
    return dict(_json(ASSETS / "config.json"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the model's tokenizer."""
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_files_are_complete_and_small_enough() -> None:
    """The licenses are included, and the weights are small enough for a repository."""
    names = {path.name for path in ASSETS.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.json",
        "generation_config.json",
        "LICENSE.PSF",
        "metrics.json",
        "model.safetensors",
        "NOTICE",
        "README.md",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert os.path.getsize(ASSETS / "model.safetensors") <= 24e6
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (ASSETS / "LICENSE.PSF").read_text()
    assert "Python Software Foundation" in (ASSETS / "NOTICE").read_text()


def test_tensors_have_the_expected_names_shapes_and_dtype(config: dict[str, Any]) -> None:
    """The file has the tensors of Qwen3 and of one MTP module, and stores none twice."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    wide = config["intermediate_size"]
    block = {
        "self_attn.q_proj": [q, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, q],
        "self_attn.q_norm": [config["head_dim"]],
        "self_attn.k_norm": [config["head_dim"]],
        "mlp.gate_proj": [wide, hidden],
        "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    module = {
        "enorm": [hidden],
        "hnorm": [hidden],
        "eh_proj": [hidden, 2 * hidden],
        "shared_head.norm": [hidden],
    }
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(layers + config["num_nextn_predict_layers"]):
        parts = block if layer < layers else {**block, **module}
        expected.update(
            {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        )
    with safe_open(ASSETS / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        found = {name: file.get_slice(name).get_shape() for name in names}
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert all(file.get_tensor(name).isfinite().all() for name in names)
        assert int(file.metadata()["step"]) == _json(ASSETS / "metrics.json")["training"]["steps"]
    assert found == expected


def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """EOS is one token, and a token has at most two digits."""
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"]
    assert _json(ASSETS / "generation_config.json")["eos_token_id"] == config["eos_token_id"]
    for text in (
        TEXT,
        "x = 'grüße, 日本, 🙂'\r\n\t\tif\ty:\n\n\n  pass  \n",
        "\n",
        " ",
        "\x00\xff",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a<|endoftext|>b").ids[1] == config["eos_token_id"]
    pieces = tokenizer.encode("n = 1234567").tokens
    assert max(sum(character.isdigit() for character in piece) for piece in pieces) == 2
    assert len(TEXT) / len(tokenizer.encode(TEXT).ids) > 2.5


def test_chat_template_joins_messages() -> None:
    """The template adds no role markers, since the model only completes code."""
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(_json(ASSETS / "tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "# helpers"},
        {"role": "user", "content": "def add(a, b):"},
    ]
    assert template.render(messages=messages) == "# helpers\ndef add(a, b):"


def test_manifest_and_held_out_list_are_consistent() -> None:
    """The manifest maps paths to sha256; the held-out list is a large enough subset of it."""
    from tools.train import corpus

    manifest = _json(TRAIN / "manifest.json")
    split = _json(TRAIN / "held_out.json")
    assert manifest["python"] == corpus.PYTHON_VERSION
    files = manifest["files"]
    assert list(files) == sorted(files)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in files.values())
    assert not any(path.startswith(("/", "site-packages", "idlelib", "lib2to3")) for path in files)
    assert set(split["modules"]) | set(split["tests"]) <= set(files)
    assert all(corpus.is_test(path) for path in split["tests"])
    assert not any(corpus.is_test(path) for path in split["modules"])
    assert len(split["modules"]) >= corpus.MIN_HELD_OUT_MODULES
    metrics = _json(ASSETS / "metrics.json")["corpus"]
    assert metrics["manifest_sha256"] == corpus.manifest_sha256()
    assert metrics["files"] == len(files)
    assert metrics["held_out_files"] == len(split["modules"]) + len(split["tests"])


def test_model_card_contains_the_measured_figures() -> None:
    """The figures are those of metrics.json, which must be good enough to ship the model."""
    card = (ASSETS / "README.md").read_text(encoding="utf-8")
    metrics = _json(ASSETS / "metrics.json")
    held_out = metrics["held_out"]
    library, chains = held_out["library"], held_out["chains"]
    figures = [
        *(library[key] for key in ("nats_per_token", "bits_per_byte", "greedy_accuracy")),
        library["mtp_first_draft_acceptance"],
        held_out["tests"]["nats_per_token"],
        *(
            figure
            for when in (chains, held_out["chains_before_recycling"])
            for text in ("library", "own_continuations")
            for measure in ("kept_by_position", "mean_acceptance_length")
            for figure in when[text][measure]
        ),
    ]
    for figure in figures:
        assert f"{figure:.3f}" in card
    assert metrics["corpus"]["manifest_sha256"] in card
    assert "may repeat" in card and "not stored" in card
    assert library["nats_per_token"] < 2.6
    assert library["mtp_first_draft_acceptance"] > 0.5
    assert metrics["recycling"]["steps"] == metrics["recycle_recipe"]["steps"]


def test_recycling_lengthens_draft_chains() -> None:
    """The acceptance of the first draft may fall by at most 0.01."""
    held_out = _json(ASSETS / "metrics.json")["held_out"]
    for text in ("library", "own_continuations"):
        now = held_out["chains"][text]
        before = held_out["chains_before_recycling"][text]
        assert now["chains"] == before["chains"] and len(now["kept_by_position"]) == 5
        assert now["kept_by_position"][0] > before["kept_by_position"][0] - 0.01
        for k in (3, 4, 5):
            length = [when["mean_acceptance_length"][k - 1] for when in (before, now)]
            assert length[1] > length[0]


def test_loss_is_low_and_drafts_are_aligned(tokenizer: Tokenizer) -> None:
    """Drafts that are one position off would agree with the target only by chance."""
    from tools.train.export import load_model
    from tools.train.model import rope_cos_sin

    model, _, _ = load_model(ASSETS)
    tokens = torch.tensor([0, *tokenizer.encode(TEXT).ids])
    rows = len(tokens)
    cos, sin = rope_cos_sin(rows, model.config, tokens.device)
    with torch.no_grad():
        hidden = model.hidden(tokens[None], cos, sin)
        logits = model.logits(hidden)[0]
        embedded = model.model.embed_tokens(tokens[None, 1:])
        drafted = model.mtp().draft(embedded, hidden[:, :-1], cos[:-1], sin[:-1])
        drafts = model.logits(drafted)[0].argmax(-1)
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).item()
    greedy = logits.argmax(-1)
    accepted = (drafts == greedy[1:]).float().mean().item()
    one_early = (drafts == greedy[:-1]).float().mean().item()
    assert loss < 3.0
    assert accepted > 0.5
    assert one_early < 0.3


def test_batched_chains_equal_chains_drafted_alone() -> None:
    """The logits equal those of each chain drafted alone, as an engine drafts it."""
    from tools.train.chains import draft_chains
    from tools.train.model import Model, ModelConfig, rope_cos_sin

    config = ModelConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, intermediate_size=96)
    model = Model(config)
    model.reset(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(4))
    cos, sin = rope_cos_sin(32, config, tokens.device)
    starts = torch.tensor([0, 9, 21, 22])
    embedding = model.model.embed_tokens
    steps = list(draft_chains(model, tokens, starts, 4, cos, sin))
    with torch.no_grad():
        for text in range(2):
            for chain, start in enumerate(starts.tolist()):
                known = tokens[text : text + 1, : start + 2]
                states = model.hidden(known, cos[: start + 2], sin[: start + 2])[:, :-1]
                for step, (drafts, judged) in enumerate(steps):
                    rows = known.shape[1]
                    embedded = embedding(known[:, 1:])
                    drafted = model.mtp().draft(embedded, states, cos[: rows - 1], sin[: rows - 1])
                    target = model.logits(model.hidden(known, cos[:rows], sin[:rows])[0, -1])
                    row = start if step == 0 else chain
                    own = model.logits(drafted[0, -1])
                    torch.testing.assert_close(drafts[text, row], own, atol=1e-4, rtol=1e-4)
                    torch.testing.assert_close(judged[text, row], target, atol=1e-4, rtol=1e-4)
                    known = torch.cat((known, target.argmax()[None, None]), dim=1)
                    states = torch.cat((states, drafted[:, -1:]), dim=1)


def test_draft_vocabulary_keeps_the_most_frequent_tokens() -> None:
    """Ties go to the lower token id, and the result is in ascending order."""
    import numpy as np

    from tools.train.draft_vocab import most_frequent

    encoded = [np.array([3, 3, 7, 1], np.uint16), np.array([7, 9, 7, 5], np.uint16)]
    assert most_frequent(encoded, 10, 4).tolist() == [1, 3, 5, 7]


def test_recycling_changes_only_the_mtp_module(tmp_path: Path) -> None:
    """Training logs, saves, and resumes from a step."""
    import numpy as np

    from tools.train.model import Model, ModelConfig
    from tools.train.recycle import RecycleRecipe, train_chains

    config = ModelConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, intermediate_size=96)
    model = Model(config)
    model.reset(3)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 97, 400).astype(np.uint16) for _ in range(4)]
    recipe = RecycleRecipe(
        steps=4, batch_tokens=64, micro_batch_tokens=32, length=32, long_length=32, depth=3
    )
    probe = torch.randint(0, 97, (2, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved: list[int] = []
    for first in (0, 2):
        train_chains(
            model,
            documents,
            probe,
            recipe,
            first,
            torch.device("cpu"),
            tmp_path / "train.jsonl",
            saved.append,
            compile_model=False,
        )
    changed = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert changed and all(name.startswith("model.layers.2.") for name in changed)
    assert any(name.endswith("eh_proj.weight") for name in changed)
    rows = [json.loads(row) for row in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["recycle_start"] for row in rows if "recycle_start" in row] == [0, 2]
    assert len(rows[-1]["losses"]) == len(rows[-1]["held_out_kept"]) == 3
    assert saved == [4, 4]


def test_transformers_computes_the_same_logits(tokenizer: Tokenizer) -> None:
    """The directory loads as Qwen3ForCausalLM and agrees with the training code."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tools.train.export import load_model
    from tools.train.model import rope_cos_sin

    peer, notes = transformers.AutoModelForCausalLM.from_pretrained(
        ASSETS, dtype=torch.float32, output_loading_info=True
    )
    assert type(peer).__name__ == "Qwen3ForCausalLM"
    assert not notes["missing_keys"] and not notes["mismatched_keys"]
    layers = peer.config.num_hidden_layers
    assert all(key.startswith(f"model.layers.{layers}.") for key in notes["unexpected_keys"])
    peer_tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS)
    ids = tokenizer.encode(TEXT).ids
    assert peer_tokenizer(TEXT)["input_ids"] == ids
    assert peer_tokenizer.eos_token_id == peer.generation_config.eos_token_id == 0

    model, _, _ = load_model(ASSETS)
    # The whole context, since two RoPE implementations differ most at high positions.
    tokens = torch.tensor([[0, *(ids * 8)][: model.config.max_position_embeddings]])
    cos, sin = rope_cos_sin(tokens.shape[1], model.config, tokens.device)
    with torch.no_grad():
        mine = model.logits(model.hidden(tokens, cos, sin))
        theirs = peer(tokens).logits
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)
    assert (mine.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.998


def test_batches_are_disjoint_windows_of_the_documents() -> None:
    """Every row is a window of the packed documents; an epoch has each token at most once."""
    import numpy as np

    from tools.train.train import Batches

    documents = [np.arange(start, start + 50, dtype=np.uint16) for start in range(0, 1000, 50)]
    batches = Batches(documents, length=16, batch_tokens=64, seed=3)
    first = torch.cat([batches[k] for k in range(batches.per_epoch)])
    assert first.shape == (batches.per_epoch * 4, 18)
    inputs = first[:, :16].flatten().tolist()
    assert len(set(inputs)) == len(inputs) and len(inputs) > 900
    steps = first[:, 1:] - first[:, :-1]
    assert (steps == 1).float().mean() > 0.9  # the rest are document borders
    again = Batches(documents, length=16, batch_tokens=64, seed=3)
    assert torch.equal(again[batches.per_epoch + 1], batches[batches.per_epoch + 1])


def test_learning_rate_and_length_follow_the_schedule() -> None:
    """The rate warms up, stays constant and falls linearly; MTP weight and length change once."""
    from tools.train.train import Recipe

    recipe = Recipe(steps=1000)
    scales = [recipe.lr_scale(step) for step in range(1000)]
    assert scales[0] < 0.05 and scales[100] == scales[400] == 1.0
    assert scales[500:] == sorted(scales[500:], reverse=True) and scales[-1] < 0.03
    assert [recipe.mtp_scale(step) for step in (499, 500)] == [0.3, 0.1]
    assert [recipe.length_at(step) for step in (849, 850)] == [512, 1024]


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("x = 1\n", False),
        ("# Copyright (C) 2001 Python Software Foundation\n", False),
        ("# Copyright 2007 A. N. Other\n# Licensed to PSF under a Contributor Agreement.\n", False),
        ("# Copyright 2007 A. N. Other. All rights reserved.\n", True),
        ("# SPDX-License-Identifier: MIT\n", True),
        ("parser.add_option('--licence')\nprint('copyright')\n", False),
    ],
)
def test_files_with_other_licenses_are_excluded(text: str, foreign: bool) -> None:
    """A header of another owner excludes a file from the corpus; the bare words do not."""
    from tools.train.corpus import carries_other_license

    assert carries_other_license(text) is foreign
