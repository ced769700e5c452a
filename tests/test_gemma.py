# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 and 4: config files, and the engine. test_models.py also checks the logits."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    BASE,
    EXPERTS_BESIDE_MLP,
    KEYS_AS_VALUES,
    SHARED_KV,
    lasting_directory,
    make_checkpoint,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.api.structured import StructuredOutput
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import KvCache, Transformer, load_model
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.experts_beside_mlp import ExpertsBesideMlpConfig
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.blocks.per_layer import PerLayerEmbeddings
from specops.engine.models.config import ModelConfig
from specops.engine.models.dry_run import dry_run
from specops.engine.models.families import read_model_config
from specops.engine.models.loader import build
from specops.engine.models.weights import WeightSettings
from test_models import Runner, random_ids
from tokenizers import Tokenizer as HfTokenizer
from torch import Tensor

# One of three layers has full attention; the window is not a multiple of the page size.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 20,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 50,
}
# Class of transformers, and changes of the tiny checkpoint.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", SIZES),
    "gemma4": ("Gemma4", SHARED_KV),
    # Heads of the published sizes.
    "gemma4 large heads": ("Gemma4", {**SHARED_KV, "head_dim": 256, "global_head_dim": 512}),
    "gemma4 keys as values": ("Gemma4", KEYS_AS_VALUES),
    "gemma4 experts": ("Gemma4", EXPERTS_BESIDE_MLP),
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


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_checkpoint_loads_as_its_text_model(
    tmp_path: Path, name: str, prefix: str
) -> None:
    family, changes = MODELS[name]
    make_checkpoint(tmp_path, family, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = random_ids(40)
    alone = Runner(load_model(tmp_path)).run([ids], [[40]])[0]
    whole = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": name,
        "text_config": {name: config[name] for name in config if name != "architectures"},
    }
    file = save_config(tmp_path, whole) / "model.safetensors"
    tensors = load_file(file)
    renamed = {prefix + name.removeprefix("model."): one for name, one in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.zeros(3)}, file)
    assert torch.equal(Runner(load_model(tmp_path)).run([ids], [[40]])[0], alone)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_embeddings_are_scaled_as_in_transformers(tmp_path: Path, name: str) -> None:
    """The factor is the root of the width, rounded to the model's dtype before the product."""
    family, changes = MODELS[name]
    theirs = make_checkpoint(tmp_path, family, **changes, hidden_size=112).bfloat16()
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
        ({"head_dim": 80}, "head_dim must be 64, 96, 128, 256 or 512, got 80 (append_"),
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


# ---- Gemma 4 ----


def test_missing_sizes_of_full_attention_default_as_in_transformers(tmp_path: Path) -> None:
    """Published files have global_head_dim; transformers 5 writes per_layer_config."""
    transformers = pytest.importorskip("transformers")
    text = {
        "num_hidden_layers": 7,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
    }
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    published = read_model_config(save_config(tmp_path, whole))
    theirs = transformers.Gemma4TextConfig(**text).to_dict()
    assert "per_layer_config" in theirs and "global_head_dim" not in theirs
    saved = read_model_config(save_config(tmp_path, {**whole, "text_config": theirs}))
    assert saved.layers == published.layers
    sizes = [(one.attention.head_dim, one.attention.num_kv_heads) for one in saved.layers]
    assert sizes == [(256, 4)] * 5 + [(512, 2)] * 2  # the last layer has full attention
    for layer, kind in zip(saved.layers, theirs["layer_types"], strict=True):
        rope = theirs["rope_parameters"][kind]
        assert layer.attention.rope.theta == rope["rope_theta"]
        assert (layer.attention.rope.scaling or {}).get("partial_rotary_factor") == rope.get(
            "partial_rotary_factor"
        )


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"enable_moe_block": True}, "'num_experts' is missing"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be None, got a"),
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh, got silu"),
        ({"final_logit_softcapping": 1e9}, "final_logit_softcapping must be from 1 to 100, got 1"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must leave a layer with keys and valu"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers must leave a layer with keys and valu"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input must be at least vocab_si"),
        ({"per_layer_config": {"0": {"skip": []}}}, "per_layer_config must set head_dim and num_"),
        ({"per_layer_config": {"8": {"head_dim": 64}}}, "per_layer_config must set head_dim and "),
        (
            {"per_layer_config": {str(layer): {"head_dim": 514} for layer in (2, 4, 7)}},
            "head_dim * partial_rotary_factor must be even and at most 512, got 514 (rope_cos_sin)",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor must be None, got 0.5",
        ),
    ],
)
def test_unsupported_settings_of_gemma4_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make_checkpoint(tmp_path, "Gemma4", **SHARED_KV)
    config = json.loads((tmp_path / "config.json").read_text())
    save_config(tmp_path, {**config, **changes})
    with pytest.raises(ModelError) as refusal:
        load_model(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


def test_tensors_of_shared_keys_are_ignored_and_others_refused(tmp_path: Path) -> None:
    """Published checkpoints have keys and values for layers that read those of other layers."""
    make_checkpoint(tmp_path, "Gemma4", **SHARED_KV)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    own = "model.layers.7.self_attn."
    assert not any(name.startswith((f"{own}k_", f"{own}v_")) for name in tensors)
    unused = {f"{own}{part}.weight": torch.zeros(3) for part in ("k_proj", "v_proj", "k_norm")}
    save_file({**tensors, **unused}, file)
    load_model(tmp_path)
    save_file({**tensors, "model.layers.7.router.scale": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.7\.router\.scale is not used"):
        load_model(tmp_path)


def test_cache_holds_keys_and_values_of_some_layers_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Gemma4", **SHARED_KV)
    model = load_model(tmp_path)
    cache = model.new_kv_cache(5, 16)
    places = [[one is other for other in cache.layers].index(True) for one in cache.layers]
    assert places == [0, 1, 2, 3, 4, 3, 3, 4]
    per_token = 2 * 4 * (3 * 64 + 2 * 128)
    assert model.kv_bytes_per_token() == per_token
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * 16 * per_token
    assert len(cache.pairs) == 5 and len(cache.page_shards) == 10
    assert model.bytes_of_whole_layers() == 2 * 4 * 3 * 128  # those that a step reads


def attention_of(config: ModelConfig, **changes: Any) -> ModelConfig:
    return of_layers(
        config, lambda layer: replace(layer, attention=replace(layer.attention, **changes))
    )


def of_layers(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    return replace(config, layers=tuple(map(change, config.layers)))


def swapped_ropes(config: ModelConfig) -> ModelConfig:
    def change(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, AttentionConfig)
        rope = layer.attention.rope
        rope = replace(rope, theta={1e4: 1e6, 1e6: 1e4}[rope.theta])
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return of_layers(config, change)


def wide_windows(config: ModelConfig) -> ModelConfig:
    def change(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, AttentionConfig)
        window = layer.attention.sliding_window
        window = None if window is None else window + 1
        return replace(layer, attention=replace(layer.attention, sliding_window=window))

    return of_layers(config, change)


def whole_rotation(config: ModelConfig) -> ModelConfig:
    def change(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, AttentionConfig)
        rope = replace(layer.attention.rope, scaling=None)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return of_layers(config, change)


def without_scales(config: ModelConfig) -> ModelConfig:
    return of_layers(config, lambda layer: replace(layer, names=replace(layer.names, scale=None)))


Fault = Callable[[ModelConfig], ModelConfig]
# Wrong readings of a configuration.
FAULTS: dict[str, Fault] = {
    "RoPE bases of the other kind": swapped_ropes,
    "all pairs rotated": whole_rotation,
    "window too wide by one": wide_windows,
    "scores divided by the root of the head size": lambda one: attention_of(one, sm_scale=0.125),
    "no norm of values": lambda one: attention_of(one, v_norm=False),
    "no norm of queries and keys": lambda one: attention_of(one, qk_norm=False),
    "no scales of layers": without_scales,
    "no cap on logits": lambda one: replace(one, logit_cap=None),
    "embeddings not scaled": lambda one: replace(one, embedding_scale=1.0),
}


def beside(change: Callable[[ExpertsBesideMlpConfig], ExpertsBesideMlpConfig]) -> Fault:
    def changed(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.mlp, ExpertsBesideMlpConfig)
        return replace(layer, mlp=change(layer.mlp))

    return lambda config: of_layers(config, changed)


def routed(**changes: Any) -> Fault:
    def change(both: ExpertsBesideMlpConfig) -> ExpertsBesideMlpConfig:
        routing = replace(both.experts.routing, **changes)
        return replace(both, experts=replace(both.experts, routing=routing))

    return beside(change)


FAULTS_OF_EXPERTS: dict[str, Fault] = {
    "inputs of the router not normed": routed(norm=None),
    "no factors on experts": routed(factors=None),
    "one expert too few": routed(top_k=2),
    "scores of experts not softmax": routed(scoring="sigmoid"),
    "norm of the MLP before experts": beside(
        lambda both: replace(both, experts_input_norm="pre_feedforward_layernorm")
    ),
    "norms of outputs swapped": beside(
        lambda both: replace(
            both, mlp_norm=both.experts_output_norm, experts_output_norm=both.mlp_norm
        )
    ),
}


def built(directory: Path, fault: str | None) -> Transformer:
    config = read_model_config(directory)
    settings = WeightSettings(dtype=torch.float32, device=torch.device("cpu"))
    config = config if fault is None else (FAULTS | FAULTS_OF_EXPERTS)[fault](config)
    return build(config, settings.open(directory), torch.float32, 256)


@lru_cache
def exact_logits(name: str) -> tuple[list[int], Tensor]:
    """Return token ids, and the logits of transformers in float64."""
    ids = random_ids(100)
    model(name)[1].set_experts_implementation("eager")  # others do not compute in float64
    with torch.no_grad():
        exact = model(name)[1].double()(torch.tensor([ids])).logits[0]
        model(name)[1].float()
    assert exact.std().item() > 0.5
    return ids, exact


def error_of(name: str, ours: Transformer) -> float:
    ids, exact = exact_logits(name)
    found = Runner(ours).run([ids], [[60], [1], [39]])[0]
    return (found - exact).abs().max().item()


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma4")])
def test_logits_equal_transformers_and_every_fault_is_noticed(name: str) -> None:
    directory = model(name)[0]
    assert error_of(name, built(directory, None)) <= 2e-5
    has_experts = name == "gemma4 experts"
    for fault in [*FAULTS, *(FAULTS_OF_EXPERTS if has_experts else ())]:
        assert error_of(name, built(directory, fault)) > 1e-3, fault


@pytest.mark.parametrize("layer,wrong", [(5, 1), (6, 0), (7, 2)])
def test_wrong_sharing_of_keys_is_noticed(layer: int, wrong: int) -> None:
    ours = built(model("gemma4")[0], None)
    make = ours.new_kv_cache

    def shared_wrongly(*sizes: int) -> KvCache:
        cache = make(*sizes)
        cache.layers[layer] = cache.layers[wrong]
        return cache

    ours.new_kv_cache = shared_wrongly  # type: ignore[method-assign]
    assert error_of("gemma4", ours) > 1e-3


def test_embeddings_of_another_layer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PerLayerEmbeddings.run
    monkeypatch.setattr(PerLayerEmbeddings, "run", lambda *args: run(*args).roll(1, dims=1))
    assert error_of("gemma4", built(model("gemma4")[0], None)) > 1e-3


# ---- through the engine ----

PERIOD = [5, 9, 23, 77, 101, 5, 9, 44]


@lru_cache
def model(name: str) -> tuple[Path, Any]:
    family, changes = MODELS[name]
    directory = lasting_directory()
    theirs = make_checkpoint(directory, family, **changes, max_position_embeddings=512)
    write_tokenizer(directory)
    return directory, theirs


def completions(name: str, method: str, **options: Any) -> list[Completion]:
    """Complete repetitive prompts, two of which share three pages."""
    drafts = None if method == "naive" else 4
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts)
    config = EngineConfig(
        model=str(model(name)[0]),
        speculative_config=speculative,
        **{"num_pages": 200, "max_num_batched_tokens": 64, **options},
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
    if options.get("num_pages"):
        assert engine.stats.num_preemptions > 0
    return results


@pytest.mark.parametrize("name", MODELS)
def test_speculation_changes_no_bit(name: str) -> None:
    """Prefix caching, the page size, cascade attention and preemption change no bit either."""
    plain = completions(name, "naive", enable_prefix_caching=False)
    few_pages = {"num_pages": 14, "max_model_len": 128, "enable_prefix_caching": False}
    for changes in ({}, {"page_size": 64}, {"enable_cascade_attention": False}, few_pages):
        for method in ("ngram", "suffix") if not changes else ("ngram",):
            for one, other in zip(plain, completions(name, method, **changes), strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprobs == other.logprobs


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    greedy = completions(name, "ngram")[0].token_ids
    theirs = model(name)[1]
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


@pytest.mark.parametrize("name", MODELS)
def test_every_device_computes_the_model(tmp_path: Path, name: str, device: str) -> None:
    family, changes = MODELS[name]
    theirs = make_checkpoint(tmp_path, family, **changes)
    with torch.no_grad():
        expected = theirs(torch.tensor([[0]])).logits[0]
    assert expected.std().item() > 0.5
    got = dry_run(load_model(tmp_path, device=device))
    assert (got - expected).abs().max().item() <= 1e-4
    assert dry_run(load_model(tmp_path, dtype="bfloat16", device=device)).isfinite().all()
