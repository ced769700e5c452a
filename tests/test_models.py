# SPDX-License-Identifier: Apache-2.0
"""Models equal those of Hugging Face, and rows keep their bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import KEYS_AS_VALUES, SHARED_KV, make_checkpoint
from rounding import assert_error_at_most, distance, rounding_errors
from safetensors.torch import load_file, save_file
from shared_fixtures import every_isa
from specops import attention, batching
from specops.api.errors import ModelError
from specops.batching import OutputMode
from specops.engine.models import KvCache, StepBatch, Transformer, load_model
from specops.engine.models.dry_run import dry_run
from specops.engine.models.families import FAMILIES as FAMILY_REGISTRY
from specops.engine.models.families import read_model_config
from torch import Tensor

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    (
        "Llama",
        {
            "head_dim": 64,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    ("Mistral", {"sliding_window": 24}),
    ("Qwen2", {}),
    (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_attention_heads": 2,
        },
    ),
    ("Qwen3", {}),
    (
        "Qwen3",
        {
            "head_dim": 128,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    ("Gemma3", {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 50}),
    (
        "Gemma3",
        {
            "head_dim": 128,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 30,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    ("Gemma4", SHARED_KV),
    ("Gemma4", KEYS_AS_VALUES),
]


class Runner:
    """A model that is fed sequences in pieces, with the logits of every row."""

    def __init__(self, model: Transformer, page_size: int = 16, shuffle: bool = False) -> None:
        self.model = model
        self.page_size = page_size
        self.pages_each = -(-model.max_model_len // page_size)
        self.shuffle = shuffle
        self.cache: KvCache | None = None

    def run(self, sequences: list[list[int]], steps: list[list[int]]) -> list[Tensor]:
        """Return the logits of each sequence; `steps[s][i]` rows of sequence i go into step s."""
        count = len(sequences)
        cache = self.model.new_kv_cache(self.pages_each * count + 3, self.page_size, count)
        for tensor in cache.tensors:
            tensor.fill_(float("nan"))
        order = torch.arange(self.pages_each * count)
        if self.shuffle:
            order = torch.randperm(self.pages_each * count)
        table = order.view(count, self.pages_each).int() + 3
        done = [0] * count
        logits: list[list[Tensor]] = [[] for _ in sequences]
        for rows in steps:
            ends = [d + r for d, r in zip(done, rows, strict=True)]
            kv_lens = torch.tensor(ends, dtype=torch.int32)
            used = [-(-end // self.page_size) for end in ends]
            kv_indptr = torch.tensor([0, *torch.tensor(used).cumsum(0).tolist()]).int()
            kv_indices = torch.cat([table[i, : used[i]] for i in range(count)])
            indices = batching.prepare_batch(
                torch.tensor(rows, dtype=torch.int32),
                kv_lens,
                torch.full((count,), OutputMode.ALL, dtype=torch.int32),
                kv_indptr,
                kv_indices,
                page_size=self.page_size,
            )
            ids = [sequences[i][done[i] : ends[i]] for i in range(count)]
            batch = StepBatch(
                token_ids=torch.tensor([one for piece in ids for one in piece], dtype=torch.int32),
                positions=indices.positions,
                cache_slots=indices.cache_slots,
                qo_indptr=indices.qo_indptr,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
                kv_lens=kv_lens,
                slots=torch.arange(count, dtype=torch.int32),
            )
            out = self.model.logits(self.model.forward(batch, cache))
            for i, piece in enumerate(out.split(rows)):
                logits[i].append(piece.clone())
            done = ends
        return [torch.cat(pieces) for pieces in logits]


def random_ids(length: int, vocab: int = 160) -> list[int]:
    return torch.randint(0, vocab, (length,)).tolist()


@pytest.mark.parametrize("family,changes", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    theirs = make_checkpoint(tmp_path, family, **changes)
    theirs.set_attn_implementation("eager")  # uses ops that `RandomRounding` intercepts
    ours = load_model(tmp_path)
    ids = random_ids(120)

    def logits(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return theirs.to(dtype)(torch.tensor([ids])).logits[0]

    allowed = rounding_errors(lambda: [logits(torch.float32)], [exact := logits(torch.float64)])[0]
    for _ in every_isa():
        for steps in ([[120]], [[50], [1], [1], [5], [63]]):
            assert_error_at_most(distance(Runner(ours).run([ids], steps)[0], exact), allowed)
    assert exact.std().item() > 0.5  # the logits are not all alike
    # Small faults are noticed: one weight of a layer, or attention that is 0.1 % too sharp.
    for fault in ("weight", "scale"):
        with torch.no_grad():
            layer = theirs.model.layers[-1]
            if fault == "weight":
                layer.mlp.down_proj.weight[0, 0].add_(0.1)
            else:
                layer.mlp.down_proj.weight[0, 0].sub_(0.1)
                layer.self_attn.scaling *= 1.001
        with pytest.raises(AssertionError, match="max error"):
            assert_error_at_most(distance(logits(torch.float32), exact), allowed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "Gemma3", "Gemma4"])
@pytest.mark.pairwise
def test_a_row_has_the_same_bits_however_it_is_computed(
    tmp_path: Path, isa: str, family: str, dtype: str
) -> None:
    import specops

    changes = {"Qwen3": {}, "Gemma4": SHARED_KV}.get(family, {"sliding_window": 24})
    make_checkpoint(tmp_path, family, **changes)
    model = load_model(tmp_path, dtype=dtype)
    ids = random_ids(100)
    alone = Runner(model).run([ids], [[90]] + [[1]] * 10)[0]
    verified = Runner(model).run([ids], [[85], [5], [5], [5]])[0]
    chunked = Runner(model, page_size=32).run([ids], [[16]] * 6 + [[4]])[0]
    assert torch.equal(alone, verified)
    assert torch.equal(alone, chunked)
    others = [random_ids(100) for _ in range(31)]
    batch = Runner(model, page_size=64, shuffle=True).run(
        [*others[:3], ids, *others[3:]], [[80, 7, 33, 60] + [20] * 28, [0, 3, 0, 40] + [5] * 28]
    )[3]
    assert torch.equal(alone, batch)
    for threads in (1, 2):
        specops.set_num_threads(threads)
        assert torch.equal(alone, Runner(model).run([ids], [[37], [63]])[0])


def rewrite_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "family,changes,sentence",
    [
        # unsupported by the ops
        (
            "Qwen3",
            {"head_dim": 80},
            "head_dim must be 64, 96, 128, 256 or 512, got 80 (append_attention)",
        ),
        (
            "Qwen3",
            {"head_dim": 514},
            "head_dim * partial_rotary_factor must be even and at most 512, got 514 (rope_cos_sin)",
        ),
        ("Qwen3", {"head_dim": None}, "head_dim must be 64, 96, 128, 256 or 512, got 16 (appen"),
        (
            "Qwen3",
            {"num_key_value_heads": 3},
            "num_attention_heads must be 1 to 64 times num_key_value_heads=3, got 4 (append_atten",
        ),
        (
            "Qwen3",
            {"num_attention_heads": 65, "num_key_value_heads": 1},
            "num_attention_heads must be 1 to 64 times num_key_value_heads=1, got 65 (append_att",
        ),
        (
            "Llama",
            {"partial_rotary_factor": 0.52},
            "head_dim * partial_rotary_factor must be even and at most 512, got 33 (rope_cos_sin)",
        ),
        (
            "Llama",
            {"partial_rotary_factor": 2},
            "partial_rotary_factor must be at most 1, got 2",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type must be one of default, linear, llama3, proportional, yarn, got 'dynamic'",
        ),
        (
            "Llama",
            {"rope_parameters": YARN},
            "rope_type 'yarn' needs the key 'original_max_position_embeddings' (rope_cos_sin)",
        ),
        # invalid for any model
        ("Qwen3", {"head_dim": "64"}, "head_dim must be an integer of at least 1, got '64'"),
        ("Qwen3", {"num_attention_heads": 0}, "num_attention_heads must be an integer of at"),
        ("Qwen3", {"num_key_value_heads": 0}, "num_key_value_heads must be an integer of at"),
        ("Qwen3", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ("Qwen3", {"architectures": 5}, "architectures must be a list of names, got 5"),
        ("Qwen3", {"dtype": [1]}, "dtype must be bfloat16 or float32, got [1]"),
        ("Qwen3", {"num_hidden_layers": 20_000}, "num_hidden_layers must be at most 16384, got 20"),
        ("Qwen3", {"num_attention_heads": 1 << 40}, "num_attention_heads must be at most 16384, "),
        ("Qwen3", {"intermediate_size": 1 << 64}, "intermediate_size must be at most 2147483647"),
        ("Qwen3", {"hidden_size": 64.5}, "hidden_size must be an integer of at least 1, got 64.5"),
        ("Qwen3", {"intermediate_size": -1}, "intermediate_size must be an integer of at least 1"),
        ("Qwen3", {"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
        ("Qwen3", {"max_position_embeddings": 0}, "max_position_embeddings must be an integer"),
        ("Mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1, got"),
        ("Qwen3", {"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number of at least 0, got -1e"),
        ("Llama", {"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a number above 0"),
        ("Llama", {"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        ("Qwen3", {"layer_types": ["full_attention"]}, "layer_types must hold num_hidden_layers=3"),
        (
            "Qwen3",
            {"layer_types": ["linear_attention"] * 3},
            "layer_types must only hold full_attention or sliding_attention, got 'linear_attent",
        ),
    ],
)
def test_unsupported_configs_are_refused_before_weights_are_read(
    tmp_path: Path, family: str, changes: dict[str, Any], sentence: str
) -> None:
    make_checkpoint(tmp_path, family)
    rewrite_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError) as refusal:
            load_model(tmp_path, load_format=load_format)
        message = str(refusal.value)
        assert message.startswith(f"{tmp_path / 'config.json'}: {sentence}"), message
        assert "\n" not in message


@pytest.mark.parametrize("head_dim,sizes", [(64, (50, 33)), (96, (96, 80)), (128, (17, 16))])
def test_models_of_any_width_run(
    tmp_path: Path, device: str, head_dim: int, sizes: tuple[int, int]
) -> None:
    """The dry run does not try widths, because kernels support all of them."""
    hidden, inner = sizes
    changes = {"head_dim": head_dim, "hidden_size": hidden, "intermediate_size": inner}
    theirs = make_checkpoint(tmp_path, "Qwen3", **changes)
    with torch.no_grad():
        expected = theirs(torch.tensor([[0]])).logits[0]
    assert expected.std().item() > 0.5
    got = dry_run(load_model(tmp_path, device=device))
    assert (got - expected).abs().max().item() <= 1e-4
    assert dry_run(load_model(tmp_path, dtype="bfloat16", device=device)).isfinite().all()


def test_dry_run_tries_every_window_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specops import attention

    make_checkpoint(
        tmp_path, "Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1
    )
    real, windows = attention.append_attention, []

    def record(*args: Any, **options: Any) -> Any:
        windows.append(options["sliding_window"])
        return real(*args, **options)

    monkeypatch.setattr(attention, "append_attention", record)
    load_model(tmp_path)
    assert windows == [None, 20]


def test_invalid_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(tmp_path)
    make_checkpoint(tmp_path, "Qwen3")
    config = json.loads((tmp_path / "config.json").read_text())

    def save(**changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))

    save(architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported"):
        load_model(tmp_path)
    save(vocab_size=161)
    with pytest.raises(ModelError, match=r"must be \[161, 64\], got \[160, 64\]"):
        load_model(tmp_path)
    save(num_hidden_layers=4, layer_types=None)
    with pytest.raises(ModelError, match=r"model\.layers\.3\..* is missing"):
        load_model(tmp_path)
    save(dtype="float16")
    with pytest.raises(ModelError, match="float16"):
        load_model(tmp_path)
    save()
    with pytest.raises(ModelError, match="at most the model's 256, got 257"):
        load_model(tmp_path, max_model_len=257)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(tmp_path)
    for broken in ("{", "[]", '{"weight_map": null}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(ModelError, match=r"must map each tensor to|1 is listed in the index"):
            load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.norm", "model.layers.0.mlp.up_proj"])
def test_integer_weights_are_refused(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, "Qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].int()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"{name}\.weight must be of floats, got torch\.int32"):
        load_model(tmp_path)


def test_positions_that_exceed_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = attention.rope_cos_sin

    def up_to_64(max_positions: int, *args: Any) -> Tensor:
        if max_positions > 64:
            raise RuntimeError("can't allocate memory")
        return made(max_positions, *args)

    make_checkpoint(tmp_path, "Qwen3")
    monkeypatch.setattr(attention, "rope_cos_sin", up_to_64)
    load_model(tmp_path, max_model_len=64)
    with pytest.raises(ModelError, match="max_model_len must be smaller: positions up to 256 do"):
        load_model(tmp_path)


def edit_config(directory: Path, **fields: Any) -> Path:
    """Change fields of config.json; None removes a field."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    return directory


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_dtype_defaults_to_that_of_the_tensors(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    edit_config(tmp_path, dtype=None)
    assert load_model(tmp_path).dtype == torch.float32
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for dtype in (torch.bfloat16, torch.float16):
        save_file({name: one.to(dtype) for name, one in tensors.items()}, file)
        if dtype == torch.bfloat16:
            assert load_model(tmp_path).dtype == dtype
            assert load_model(tmp_path, dtype="float32").dtype == torch.float32
        else:
            with pytest.raises(ModelError, match="dtype must be bfloat16 or float32, got float16"):
                load_model(tmp_path)
    assert load_model(tmp_path, load_format="dummy").dtype == torch.float32


@pytest.mark.parametrize(
    "family,changes",
    [
        *((one, {}) for one in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Ernie4_5")),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_lm_head_in_the_file_is_used_though_it_is_tied(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Transformers does the same with different numbers in the file."""
    transformers = pytest.importorskip("transformers")
    make_checkpoint(tmp_path, family, **{**changes, "tie_word_embeddings": False})
    edit_config(tmp_path, tie_word_embeddings=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(20)
    ours = Runner(load_model(tmp_path, dtype="float32")).run([ids], [[20]])[0]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (ours - expected).abs().max().item() <= 1e-3 * expected.std().item()


# ---- fields that files leave out ----

COMPUTED = ("layer_types", "mlp_layer_types", "qk_head_dim", "per_layer_config")
# Fields for which transformers distinguishes null from absence.
NULL_IS_A_VALUE = ("sliding_window", "q_lora_rank", "head_dim", "num_key_value_heads")
SMALL = {
    "vocab_size": 160,
    "hidden_size": 8192,
    "intermediate_size": 96,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
}
# Values that fields of some architectures must have.
NEEDED: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": [*["linear_attention"] * 39, "full_attention"]},
    "NemotronHForCausalLM": {"sliding_window": None},
}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 32}
CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "MiMoForCausalLM": "Qwen2Config",  # the class in the checkpoint derives from this one
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "Ernie4_5ForCausalLM": "Ernie4_5Config",
    "Ernie4_5_MoeForCausalLM": "Ernie4_5_MoeConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "GraniteMoeHybridForCausalLM": "GraniteMoeHybridConfig",
    "FalconH1ForCausalLM": "FalconH1Config",
    "NemotronHForCausalLM": "NemotronHConfig",
    "KimiLinearForCausalLM": "KimiLinearConfig",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma4ForCausalLM": "Gemma4TextConfig",
}


def test_every_architecture_is_compared() -> None:
    known = {one for family in FAMILY_REGISTRY for one in family.read}
    assert known == {*CONFIGS, *(one for one in known if "ConditionalGeneration" in one)}


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("as_null", [False, True])
@pytest.mark.fast("False-*")
def test_missing_fields_default_as_in_transformers(
    tmp_path: Path, architecture: str, as_null: bool
) -> None:
    """Each field is left out by itself. A field without a default is reported as missing."""
    transformers = pytest.importorskip("transformers")
    from huggingface_hub.errors import StrictDataclassError

    kind = getattr(transformers, CONFIGS[architecture])

    def whole(fields: dict[str, Any]) -> dict[str, Any]:
        """Return all fields, as the class fills them in."""
        found: dict[str, Any] = kind(**fields).to_dict()
        return {key: one for key, one in found.items() if key not in ("dtype", "architectures")}

    def read(fields: dict[str, Any]) -> Any:
        config = {**fields, "architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            return read_model_config(tmp_path)
        except ModelError as error:
            assert str(error).endswith((" is missing", "got None")), error
            return None

    num_compared = 0
    for more in ({}, WINDOWS, {"use_sliding_window": True}):
        fields = {**SMALL, **more}
        # Without the fields that the class computes from others.
        complete = {key: one for key, one in whole(fields).items() if key not in COMPUTED}
        complete |= {key: one for key, one in fields.items() if key in complete}
        needed = NEEDED.get(architecture, {})
        complete |= needed
        if more and "sliding_window" not in more:
            complete.pop("sliding_window", None)
        assert read(complete) is not None
        for field in (key for key in complete if key not in needed):
            left = {key: one for key, one in complete.items() if key != field}
            found = read({**left, field: None} if as_null else left)
            null = {field: None} if as_null and field in NULL_IS_A_VALUE else {}
            try:
                expected = read(whole({**left, **null}))
            except StrictDataclassError:  # transformers refuses null
                continue
            if found is not None:
                assert found == expected, field
                num_compared += 1
    assert num_compared > 30
