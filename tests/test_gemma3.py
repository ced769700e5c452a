# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: config files, and the engine on it. test_models.py checks the logits."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BASE, lasting_directory, make_checkpoint, write_tokenizer
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.api.structured import StructuredOutput
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import load_model
from specops.engine.models.dry_run import dry_run
from specops.engine.models.families import read_model_config
from test_models import Runner, random_ids
from tokenizers import Tokenizer as HfTokenizer

# One of three layers has full attention; the window is not a multiple of the page size.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 20,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 50,
}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Write a tiny model and return its config.json."""
    make_checkpoint(tmp_path, "Gemma3", **SIZES)
    found: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    return found


def save_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_old_and_new_config_keys_are_equivalent(tmp_path: Path, config: dict[str, Any]) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    new = read_model_config(save_config(tmp_path, {**config, "rope_parameters": ropes}))
    assert [one.attention.sliding_window for one in new.layers] == [20, 20, None]
    assert [one.attention.rope.theta for one in new.layers] == [500.0, 500.0, 1e5]
    older = {name: config[name] for name in config if name not in ("layer_types", "dtype")}
    older |= {
        "rope_parameters": None,
        "rope_theta": 1e5,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
        "torch_dtype": "float32",
    }
    assert read_model_config(save_config(tmp_path, older)) == new


def test_missing_config_keys_default_as_in_transformers(tmp_path: Path) -> None:
    """The text config of a multimodal model often has only sizes."""
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 7}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**text, "model_type": "gemma3_text"},
        "torch_dtype": "bfloat16",
    }
    ours = read_model_config(save_config(tmp_path, whole))
    theirs = transformers.Gemma3TextConfig(**text)
    assert (ours.vocab_size, ours.max_model_len) == (theirs.vocab_size, 131_072)
    assert ours.tie_word_embeddings and ours.dtype == "bfloat16"
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        one = layer.attention
        sizes = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
        assert (one.num_qo_heads, one.num_kv_heads, one.head_dim) == sizes
        is_full = kind == "full_attention"
        assert one.sliding_window == (None if is_full else theirs.sliding_window)
        assert one.rope.theta == theirs.rope_parameters[kind]["rope_theta"]
        assert one.sm_scale == theirs.query_pre_attn_scalar**-0.5


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_checkpoint_loads_as_its_text_model(
    tmp_path: Path, config: dict[str, Any], prefix: str
) -> None:
    ids = random_ids(40)
    alone = Runner(load_model(tmp_path)).run([ids], [[40]])[0]
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {name: config[name] for name in config if name != "architectures"},
    }
    file = save_config(tmp_path, whole) / "model.safetensors"
    tensors = load_file(file)
    renamed = {prefix + name.removeprefix("model."): one for name, one in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.zeros(3)}, file)
    assert torch.equal(Runner(load_model(tmp_path)).run([ids], [[40]])[0], alone)


def test_embeddings_are_scaled_as_in_transformers(tmp_path: Path) -> None:
    """The factor is the root of the width, rounded to the model's dtype before the product."""
    theirs = make_checkpoint(tmp_path, "Gemma3", **SIZES, hidden_size=112).bfloat16()
    ours = load_model(tmp_path, dtype="bfloat16")
    with torch.no_grad():
        want = theirs.model.embed_tokens(torch.arange(160))
    assert torch.equal(ours.embedding, want)
    plain = theirs.model.embed_tokens.weight.detach() * 112**0.5
    assert not torch.equal(ours.embedding, plain)  # rounding the factor matters


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None, got 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None, got 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be False, got"),
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh, got silu"),
        ({"head_dim": 80}, "head_dim must be 64, 96, 128 or 256, got 80 (append_attention)"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, got 0"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    save_config(tmp_path, {**config, **changes})
    with pytest.raises(ModelError) as refusal:
        load_model(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


# ---- through the engine ----

PERIOD = [5, 9, 23, 77, 101, 5, 9, 44]


@lru_cache
def model() -> tuple[Path, Any]:
    directory = lasting_directory()
    theirs = make_checkpoint(directory, "Gemma3", **SIZES, max_position_embeddings=512)
    write_tokenizer(directory)
    return directory, theirs


def completions(method: str, **options: Any) -> list[Completion]:
    """Complete repetitive prompts, two of which share three pages."""
    drafts = None if method == "naive" else 4
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts)
    config = EngineConfig(
        model=str(model()[0]),
        speculative_config=speculative,
        num_pages=200,
        max_num_batched_tokens=64,
        **options,
    )
    prompts = [PERIOD * 9, PERIOD * 6 + [3, 3, 7] * 5, [3, 3, 7] * 8, [11]]
    params = [
        SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=50, temperature=0.8, seed=7, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=2),
    ]
    engine = Engine(config)
    engine.generate(prompts[:1], params[:1])  # the other prompts reuse its pages
    results = engine.generate(prompts, params)
    if options.get("enable_prefix_caching", True):
        assert engine.stats.prefix_cache_hits >= 64
    if method != "naive":
        assert engine.stats.speculative.num_accepted_tokens > 10
    return results


def test_speculation_changes_no_bit() -> None:
    """Prefix caching, the page size and cascade attention do not change a bit either."""
    plain = completions("naive", enable_prefix_caching=False)
    for changes in ({}, {"page_size": 64}, {"enable_cascade_attention": False}):
        for method in ("ngram", "suffix") if not changes else ("ngram",):
            for one, other in zip(plain, completions(method, **changes), strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprobs == other.logprobs


def test_greedy_tokens_equal_those_of_transformers() -> None:
    greedy = completions("ngram")[0].token_ids
    theirs = model()[1]
    with torch.no_grad():
        want = theirs.generate(
            torch.tensor([PERIOD * 9]), max_new_tokens=50, do_sample=False, eos_token_id=None
        )
    assert greedy == want[0, 72:].tolist()


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3"])
def test_tokens_without_an_embedding_are_never_sampled_and_refused_in_prompts(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The shared Gemma 3 tokenizer has an image token, and text-only models have no row for it."""
    make_checkpoint(tmp_path, family, **{**BASE, **(SIZES if family == "Gemma3" else {})})
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = HfTokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(file))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a <image_soft_token>")
    config = EngineConfig(model=str(tmp_path), max_num_seqs=2, max_model_len=128)
    engine = Engine(config)
    assert (engine.tokenizer.vocab_size, engine.vocab_size) == (161, 160)
    assert "the tokenizer has 161 tokens, the model 160" in caplog.text
    constrained = StructuredOutput(regex="[a-d]{8}")
    for params in (
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=100, temperature=5.0, seed=1),
        SamplingParams(max_tokens=8, structured_output=constrained),
    ):
        (done,) = engine.generate([[1, 2, 3]], params)
        assert done.token_ids and max(done.token_ids) < 160
    text, named = "a <image_soft_token> b", "token id 160 .* of 160; '<image_soft_token>'"
    for unknown in (-1, 161, 10**30):
        with pytest.raises(ValueError, match=f"prompt: token id {unknown} is outside .* of 160$"):
            engine.add_request([1, unknown], SamplingParams(max_tokens=2))
    for prompt, changes, field in (
        (text, {}, "prompt"),
        ([1, 160], {}, "prompt"),
        ("a", {"bad_words": (text,)}, "bad_words"),
        ("a", {"prediction": text}, "prediction"),
    ):
        with pytest.raises(ValueError, match=f"{field}: {named}"):
            engine.add_request(prompt, SamplingParams(max_tokens=2, **changes))
    with pytest.raises(ValueError, match=f"suffix_corpus: .*corpus.txt: {named}"):
        suffix = SpeculativeConfig(method="suffix")
        Engine(replace(config, suffix_corpus=str(corpus), speculative_config=suffix))


def test_every_device_computes_the_model(tmp_path: Path, device: str) -> None:
    theirs = make_checkpoint(tmp_path, "Gemma3", **SIZES)
    with torch.no_grad():
        expected = theirs(torch.tensor([[0]])).logits[0]
    assert expected.std().item() > 0.5
    got = dry_run(load_model(tmp_path, device=device))
    assert (got - expected).abs().max().item() <= 1e-4
    assert dry_run(load_model(tmp_path, dtype="bfloat16", device=device)).isfinite().all()
