# SPDX-License-Identifier: Apache-2.0
"""MTP modules in every naming convention: loading, the forward pass and refused checkpoints."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import (
    BASES,
    GLM,
    NAMES,
    SlowModules,
    Tiny,
    make_mtp_checkpoint,
    save_checkpoint,
)
from rounding import assert_error_at_most, distance, rounding_errors
from safetensors.torch import save_file
from shared_fixtures import every_isa
from specops import batching
from specops.api.errors import ModelError
from specops.batching import OutputMode
from specops.engine.models import (
    CONVENTIONS,
    KvCache,
    LayerBatch,
    MtpBatch,
    MtpModules,
    StepBatch,
    Transformer,
    load_model,
    load_mtp,
)
from test_models import random_ids
from torch import Tensor

PAGE_SIZE = 16
CASES: list[tuple[str, tuple[str, dict[str, Any]], bool]] = [
    *[(naming, base, False) for naming, base in BASES.items()],
    ("ernie4_5", BASES["ernie4_5"], True),
    ("deepseek_v3", GLM, False),
]


def step_of(token_ids: list[int], begin: int) -> StepBatch:
    """Return a step with rows of one request, from position `begin` on.

    The tokens before `begin` are in the cache already. The request's pages are 3, 4, ...
    """
    rows, end = len(token_ids), begin + len(token_ids)
    kv_lens = torch.tensor([end], dtype=torch.int32)
    kv_indices = torch.arange(3, 3 - -end // PAGE_SIZE, dtype=torch.int32)
    kv_indptr = torch.tensor([0, len(kv_indices)], dtype=torch.int32)
    indices = batching.prepare_batch(
        torch.tensor([rows], dtype=torch.int32),
        kv_lens,
        torch.tensor([OutputMode.ALL], dtype=torch.int32),
        kv_indptr,
        kv_indices,
        page_size=PAGE_SIZE,
    )
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=indices.positions,
        cache_slots=indices.cache_slots,
        qo_indptr=indices.qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_lens=kv_lens,
        slots=torch.zeros(1, dtype=torch.int32),
    )


def pass_of(text: list[int], drafts: list[int], begin: int, end: int) -> MtpBatch:
    """Return one request's rows `begin` to `end` of a module; tokens behind the text are drafts."""
    step = step_of([0] * (end - begin), begin)
    return MtpBatch(
        **{one.name: getattr(step, one.name) for one in dataclasses.fields(LayerBatch)},
        row_to_request=torch.zeros(end - begin, dtype=torch.int32),
        source_rows=torch.arange(end - begin, dtype=torch.int32),
        token_ids=torch.tensor([text], dtype=torch.int32),
        lens=torch.tensor([len(text)], dtype=torch.int32),
        draft_token_ids=torch.tensor([drafts or [-1]], dtype=torch.int32),
    )


def poisoned(cache: KvCache) -> KvCache:
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


def target_states(model: Transformer, token_ids: list[int]) -> Tensor:
    cache = poisoned(model.new_kv_cache(20, PAGE_SIZE))
    return model.forward(step_of(token_ids, 0), cache).clone()


def pieces(rows: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for size in sizes:
        end = min(begin + size, rows)
        if end > begin:
            yield begin, end
        begin = end


def text_states(
    modules: MtpModules, hidden: Tensor, token_ids: list[int], sizes: list[int]
) -> list[Tensor]:
    """Return each module's LM head inputs along a text, computed in pieces of `sizes` rows."""
    cache = poisoned(modules.new_kv_cache(20, PAGE_SIZE))
    target = previous = hidden
    states = []
    for index in range(modules.num_modules):
        source = previous if modules.convention.chained else target
        outputs = []
        for begin, end in pieces(len(token_ids) - index - 1, sizes):
            step = pass_of(token_ids, [], begin, end)
            out = modules.forward(index, step, source[begin:end].clone(), cache)
            outputs.append((out.hidden.clone(), out.recycled.clone()))
        states.append(torch.cat([one for one, _ in outputs]))
        previous = torch.cat([one for _, one in outputs])
    return states


def drafts(
    model: Transformer, modules: MtpModules, prefix: list[int], count: int
) -> tuple[list[int], list[Tensor]]:
    """Return greedy drafts of the first module; every step appends its rows to the cache."""
    cache = poisoned(modules.new_kv_cache(20, PAGE_SIZE))
    rows = len(prefix) - 1
    hidden = target_states(model, prefix)[:rows]
    out = modules.forward(0, pass_of(prefix, [], 0, rows), hidden, cache)
    tokens: list[int] = []
    logits: list[Tensor] = []
    while True:
        logits.append(modules.logits(out.hidden[-1:])[0].clone())
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count:
            return tokens, logits
        recycled = out.recycled[-1:]  # in the buffers that the call writes
        begin = rows + len(tokens) - 1
        out = modules.forward(0, pass_of(prefix, tokens, begin, begin + 1), recycled, cache)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("naming,base,bias", CASES)
def test_states_equal_the_slow_reference(
    tmp_path: Path, naming: str, base: tuple[str, dict[str, Any]], bias: bool, count: int
) -> None:
    tiny = make_mtp_checkpoint(tmp_path, naming, count, base=base, projection_bias=bias)
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    assert modules.convention is CONVENTIONS[naming]
    assert modules.num_modules == count
    ids = random_ids(60)
    slow, float32 = SlowModules(tiny), SlowModules(tiny, dtype=torch.float32)
    exact = [slow.logits(states) for states in slow.text(ids, count)]
    allowed = rounding_errors(
        lambda: [float32.logits(states) for states in float32.text(ids, count)], exact
    )
    for _ in every_isa():
        hidden = target_states(model, ids)
        whole = text_states(modules, hidden, ids, [60])
        for ours, truth, error in zip(whole, exact, allowed, strict=True):
            assert_error_at_most(distance(modules.logits(ours), truth), error)
            assert truth.std().item() > 0.5  # the logits are not all alike
        chunked = text_states(modules, hidden, ids, [17, 1, 1, 5, 36])
        assert all(torch.equal(one, other) for one, other in zip(whole, chunked, strict=True))


@pytest.mark.parametrize("naming,base,bias", CASES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.fast("True-mimo-*", "False-qwen3_next-*")
def test_recycled_drafts_equal_the_slow_reference(
    tmp_path: Path, naming: str, base: tuple[str, dict[str, Any]], bias: bool, normed: bool
) -> None:
    tiny = make_mtp_checkpoint(tmp_path, naming, base=base, projection_bias=bias)
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    modules.convention = dataclasses.replace(modules.convention, recycle_normed=normed)
    prefix = random_ids(30)
    exact_ids, exact = SlowModules(tiny, recycle_normed=normed).drafts(prefix, 5)
    float32 = SlowModules(tiny, recycle_normed=normed, dtype=torch.float32)

    def rounded() -> list[Tensor]:
        token_ids, logits = float32.drafts(prefix, 5)
        assert token_ids == exact_ids  # rounding changes no draft
        return logits

    allowed = rounding_errors(rounded, exact)
    for _ in every_isa():
        ours, logits = drafts(model, modules, prefix, 5)
        assert ours == exact_ids
        for got, truth, error in zip(logits, exact, allowed, strict=True):
            assert_error_at_most(distance(got, truth), error)


@pytest.mark.parametrize("change", ["masks_position_0", "unchained"])
def test_other_conventions_equal_the_slow_reference(tmp_path: Path, change: str) -> None:
    tiny = make_mtp_checkpoint(tmp_path, "mimo", 3)
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    fields = {"masks_position_0": True} if change == "masks_position_0" else {"chained": False}
    ids = random_ids(20)
    plain = text_states(modules, target_states(model, ids), ids, [20])
    modules.convention = dataclasses.replace(modules.convention, **fields)
    exact = SlowModules(tiny, **fields).text(ids, 3)
    float32 = SlowModules(tiny, **fields, dtype=torch.float32)
    allowed = rounding_errors(lambda: float32.text(ids, 3), exact)
    for _ in every_isa():
        changed = text_states(modules, target_states(model, ids), ids, [20])
        for got, truth, error in zip(changed, exact, allowed, strict=True):
            assert_error_at_most(distance(got, truth), error)
        assert not torch.equal(plain[1], changed[1])


class Faulty(SlowModules):
    """The slow reference in float32 with one fault."""

    def __init__(self, tiny: Tiny, fault: str) -> None:
        super().__init__(tiny, dtype=torch.float32)
        self.fault = fault
        self.rotated = 0
        name = NAMES[tiny.naming]["projection"]
        name = name.format(i=0, l=tiny.config["num_hidden_layers"])
        if fault == "swapped_halves":
            self.tensors[name] = torch.cat(self.tensors[name].chunk(2, 1)[::-1], 1)
        if fault == "lost_input":
            self.tensors[name] = self.tensors[name].clone()
            self.tensors[name][:, -1] = 0

    def module(self, index: int, token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.fault == "shifted_text":
            token_ids = [token_ids[0], *token_ids[:-1]]
        if self.fault == "shifted_states":
            hidden = hidden.roll(1, 0)
        state, recycled = super().module(index, token_ids, hidden)
        return (state.bfloat16().float() if self.fault == "bfloat16_state" else state), recycled

    def _norm(self, x: Tensor, name: str, offset: float | None = None) -> Tensor:
        if self.fault in NORMS and name == NAMES[self.tiny.naming][self.fault].format(
            i=0, l=self.tiny.config["num_hidden_layers"]
        ):
            return x
        return super()._norm(x, name, offset)

    def _rotate(self, x: Tensor) -> Tensor:
        self.rotated += 1
        if self.rotated % 2 == 0:  # keys stay right, because a common shift changes nothing
            return super()._rotate(x)
        if self.fault == "query_one_ahead":
            return super()._rotate(torch.cat((x[:1], x)))[1:]
        return super()._rotate(x) * (1.001 if self.fault == "wrong_scale" else 1.0)


NORMS = ("embed_norm", "hidden_norm", "head_norm")
FAULTS = (
    "shifted_text",
    "shifted_states",
    "swapped_halves",
    "lost_input",
    "bfloat16_state",
    "query_one_ahead",
    "wrong_scale",
    *NORMS,
)


@pytest.mark.parametrize("naming,base,bias", CASES)
@pytest.mark.slow
def test_comparison_notices_planted_faults(
    tmp_path: Path, naming: str, base: tuple[str, dict[str, Any]], bias: bool
) -> None:
    """The error allowed for rounding is far below that of a planted fault."""
    tiny = make_mtp_checkpoint(tmp_path, naming, base=base, projection_bias=bias)
    ids = random_ids(40)
    exact, float32 = SlowModules(tiny).text(ids, 1), SlowModules(tiny, dtype=torch.float32)
    (allowed,) = rounding_errors(lambda: float32.text(ids, 1), exact)
    assert_error_at_most(distance(float32.text(ids, 1)[0], exact[0]), allowed)
    for fault in FAULTS:
        (faulty,) = Faulty(tiny, fault).text(ids, 1)
        with pytest.raises(AssertionError, match="max error"):
            assert_error_at_most(distance(faulty, exact[0]), allowed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_however_it_is_computed(
    tmp_path: Path, isa: str, dtype: str
) -> None:
    import specops

    make_mtp_checkpoint(tmp_path, "deepseek_v3", 2)
    model = load_model(tmp_path, dtype=dtype)
    modules = load_mtp(model, tmp_path)
    ids = random_ids(100)
    hidden = target_states(model, ids)
    whole = text_states(modules, hidden, ids, [100])
    for sizes in ([1] * 100, [50, 5, 5, 40], [33] * 4):
        again = text_states(modules, hidden, ids, sizes)
        assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    for threads in (1, 2):
        specops.set_num_threads(threads)
        again = text_states(modules, hidden, ids, [37, 63])
        assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_deepseek_naming_equals_transformers(tmp_path: Path) -> None:
    """The module of transformers runs around the decoder layer of the tiny checkpoint's base."""
    pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpLayer

    tiny = make_mtp_checkpoint(tmp_path, "deepseek_v3")
    base = tiny.base.model
    theirs = MtpLayer(base.config, type(base.layers[0]), type(base.norm), 0).eval()
    prefix = f"model.layers.{base.config.num_hidden_layers}."
    renamed = {}
    for name, tensor in tiny.tensors.items():
        part = name.removeprefix(prefix)
        if part != name:
            own = part.startswith(("enorm", "hnorm", "eh_proj"))
            part = part.replace("shared_head.norm", "post_norm")
            renamed[part if own or part.startswith("post_norm") else f"mtp_block.{part}"] = tensor
    theirs.load_state_dict(renamed)
    ids = random_ids(50)
    positions = torch.arange(49)[None]
    base.set_attn_implementation("eager")  # uses ops that `RandomRounding` intercepts

    def logits(dtype: torch.dtype) -> Tensor:
        model, layer, head = (
            copy.deepcopy(part).to(dtype) for part in (base, theirs, tiny.base.lm_head)
        )
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[:, :-1]
            embedded = model.embed_tokens(torch.tensor([ids[1:]]))
            mask = torch.full((49, 49), -torch.inf, dtype=dtype).triu(1)[None, None]
            rope = model.rotary_emb(embedded, positions)
            states = layer(embedded, hidden, rope, mask, positions, None)
            return head(states)[0]

    exact = logits(torch.float64)
    (allowed,) = rounding_errors(lambda: [logits(torch.float32)], [exact])
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    for _ in every_isa():
        states = text_states(modules, target_states(model, ids), ids, [49])[0]
        assert_error_at_most(distance(modules.logits(states), exact), allowed)
    assert exact.std().item() > 0.5


def test_glm_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MtpModel`, which `generate(use_mtp=True)` uses, runs on a GLM-4.5 of dense layers only."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    make_mtp_checkpoint(tmp_path, "deepseek_v3", 2, base=GLM)
    kind = transformers.Glm4MoeForCausalLM
    # The class knows the layer numbers of the released checkpoints only.
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34]\."])
    config_kind = transformers.Glm4MoeConfig
    original = config_kind.get_mtp_config

    def all_dense(self: Any) -> Any:
        config = original(self)
        config.first_k_dense_replace = 9  # the family's own modules are mixtures of experts
        return config

    monkeypatch.setattr(config_kind, "get_mtp_config", all_dense)
    ids = random_ids(50)

    def load(dtype: torch.dtype) -> tuple[Any, Any]:
        target = kind.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
        return target, MtpModel.from_pretrained(target).eval()

    def logits(target: Any, theirs: Any) -> list[Tensor]:
        results = []
        with torch.no_grad():
            hidden = target.model(torch.tensor([ids])).last_hidden_state
            for index in range(2):
                rows = len(ids) - 1 - index
                hidden = theirs.forward_layer(
                    index,
                    hidden[:, :rows],
                    torch.arange(1 + index, len(ids))[None],
                    None,
                    input_ids=torch.tensor([ids[index + 1 :]]),
                )
                results.append(target.lm_head(hidden)[0])
        return results

    exact, float32 = logits(*load(torch.float64)), load(torch.float32)
    allowed = rounding_errors(lambda: logits(*float32), exact)
    model = load_model(tmp_path)
    modules = load_mtp(model, tmp_path)
    for _ in every_isa():
        states = text_states(modules, target_states(model, ids), ids, [49])
        for ours, truth, error in zip(states, exact, allowed, strict=True):
            assert_error_at_most(distance(modules.logits(ours), truth), error)
            assert truth.std().item() > 0.5


def test_modules_load_from_a_draft_directory(tmp_path: Path) -> None:
    """The directory has the modules alone, numbered behind the target's layers or from 0."""
    tiny = make_mtp_checkpoint(tmp_path / "whole", "deepseek_v3", 2)
    model = load_model(tmp_path / "whole")
    ids = random_ids(20)
    hidden = target_states(model, ids)
    expected = text_states(load_mtp(model, tmp_path / "whole"), hidden, ids, [20])
    layers = tiny.config["num_hidden_layers"]
    for first in (layers, 0):
        alone = {}
        for name, tensor in tiny.tensors.items():
            for index in range(2):
                prefix = f"model.layers.{layers + index}."
                if name.startswith(prefix):
                    part = name.removeprefix(prefix)
                    alone[f"model.layers.{first + index}.{part}"] = tensor
        # Copies, as released checkpoints have them; they are not read.
        alone[f"model.layers.{first}.embed_tokens.weight"] = torch.full((160, 64), torch.nan)
        alone[f"model.layers.{first}.shared_head.head.weight"] = torch.full((160, 64), torch.nan)
        where = tmp_path / f"from_{first}"
        where.mkdir()
        save_checkpoint(where, tiny.config, alone)
        modules = load_mtp(model, tmp_path / "whole", draft_directory=where)
        states = text_states(modules, hidden, ids, [20])
        assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


@pytest.mark.parametrize("naming", ["deepseek_v3", "mimo"])  # tied and untied heads
def test_reduced_draft_vocabulary(tmp_path: Path, naming: str) -> None:
    make_mtp_checkpoint(tmp_path, naming)
    model = load_model(tmp_path)
    retained = torch.tensor([0, 1, 5, 17, 40, 41, 42, 99, 120, 159])
    path = tmp_path / "draft_vocab.safetensors"
    save_file({"d2t": retained - torch.arange(len(retained))}, path)
    whole = load_mtp(model, tmp_path)
    modules = load_mtp(model, tmp_path, draft_vocab=path)
    assert whole.token_map is None
    assert modules.token_map is not None and modules.token_map.dtype == torch.int32
    assert modules.token_map.tolist() == retained.tolist()
    ids = random_ids(20)
    state = text_states(modules, target_states(model, ids), ids, [20])[0]
    assert torch.equal(modules.logits(state), whole.logits(state)[:, retained])
    assert modules.sums_size(8, 8) <= whole.sums_size(8, 8)
    for wrong, words in [
        (retained, "ascending token ids"),  # token ids where offsets are meant
        (retained.flip(0) - torch.arange(len(retained)), "ascending token ids"),
        (retained.int(), "int64"),
    ]:
        save_file({"d2t": wrong}, path)
        with pytest.raises(ModelError, match=words):
            load_mtp(model, tmp_path, draft_vocab=path)
    save_file({"t2d": retained}, path)
    with pytest.raises(ModelError, match=r"draft_vocab\.safetensors: tensor d2t is missing"):
        load_mtp(model, tmp_path, draft_vocab=path)
    path.write_bytes(b"not a map")
    with pytest.raises(ModelError, match=r"draft_vocab\.safetensors: not a safetensors file"):
        load_mtp(model, tmp_path, draft_vocab=path)
    with pytest.raises(ModelError, match="no such file"):
        load_mtp(model, tmp_path, draft_vocab=tmp_path / "nowhere.safetensors")


def test_bundled_module_equals_the_training_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import specops

    root = Path(__file__).resolve().parents[1]
    assets = Path(specops.__file__).with_name("assets")
    monkeypatch.syspath_prepend(str(root))
    from tools.train.export import load_model as load_training_model
    from tools.train.model import rope_cos_sin

    theirs, _, _ = load_training_model(assets)
    model = load_model(assets, dtype="float32")
    modules = load_mtp(model, assets)
    assert modules.num_modules == 1 and modules.convention is CONVENTIONS["deepseek_v3"]
    ids = torch.randint(1, 4096, (80,)).tolist()
    ours = modules.logits(text_states(modules, target_states(model, ids), ids, [40, 39])[0])
    tokens = torch.tensor([ids])
    cos, sin = rope_cos_sin(80, theirs.config, tokens.device)
    with torch.no_grad():
        hidden = theirs.hidden(tokens, cos, sin)[:, :-1]
        embedded = theirs.model.embed_tokens(tokens[:, 1:])
        expected = theirs.logits(theirs.mtp().draft(embedded, hidden, cos[:79], sin[:79]))[0]
    assert (ours - expected).abs().max().item() <= 2e-3
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean().item() > 0.98


def test_random_weights_require_only_the_configuration(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "deepseek_v3", 2)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, load_format="dummy")
    assert load_mtp(model, tmp_path).num_modules == 2


def test_random_weights_depend_on_their_name_only(tmp_path: Path) -> None:
    """A reduced head, which is read separately, has rows of the target's head."""
    make_mtp_checkpoint(tmp_path, "mimo")  # its head is not its embedding
    (tmp_path / "model.safetensors").unlink()
    retained = torch.tensor([0, 1, 5, 17, 99])
    path = tmp_path / "draft_vocab.safetensors"
    save_file({"d2t": retained - torch.arange(len(retained))}, path)
    model = load_model(tmp_path, load_format="dummy")
    modules = load_mtp(model, tmp_path, draft_vocab=path)
    states = torch.randn(3, 64)
    assert torch.equal(modules.logits(states), model.logits(states)[:, retained])
    first, other = model.layers[0].mlp.weights[0], modules.layers[0].mlp.weights[0]
    assert not torch.equal(first.data, other.data)  # a module has other weights than its target


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """Return a checkpoint with two modules with DeepSeek-V3's names, for a test to damage."""
    return make_mtp_checkpoint(tmp_path, "deepseek_v3", 2)


def check_refused(tiny: Tiny, model: Transformer, match: str) -> None:
    save_checkpoint(tiny.directory, tiny.config, tiny.tensors)
    with pytest.raises(ModelError, match=match):
        load_mtp(model, tiny.directory)


def test_a_checkpoint_without_modules_is_refused(tiny: Tiny) -> None:
    model = load_model(tiny.directory)
    layers = tiny.config["num_hidden_layers"]
    tiny.tensors = {
        name: tensor
        for name, tensor in tiny.tensors.items()
        if not name.startswith((f"model.layers.{layers}.", f"model.layers.{layers + 1}."))
    }
    check_refused(tiny, model, "holds no MTP weights, though num_nextn_predict_layers is 2")
    del tiny.config["num_nextn_predict_layers"]
    check_refused(tiny, model, r"holds no MTP weights; looked for .*mtp\.fc\.weight")
    with pytest.raises(ModelError, match="no such directory"):
        load_mtp(model, tiny.directory, draft_directory=tiny.directory / "nowhere")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_modules_is_refused(tiny: Tiny, count: int) -> None:
    model = load_model(tiny.directory)
    tiny.config["num_nextn_predict_layers"] = count
    check_refused(
        tiny,
        model,
        rf"config\.json: num_nextn_predict_layers is {count}, but .* of 2 MTP modules",
    )


def test_number_of_modules_defaults_to_that_of_the_tensors(tiny: Tiny) -> None:
    model = load_model(tiny.directory)
    del tiny.config["num_nextn_predict_layers"]
    save_checkpoint(tiny.directory, tiny.config, tiny.tensors)
    assert load_mtp(model, tiny.directory).num_modules == 2


def test_tensors_that_do_not_fit_are_refused(tiny: Tiny) -> None:
    model = load_model(tiny.directory)
    where = str(tiny.directory)
    eh_proj = tiny.tensors["model.layers.3.eh_proj.weight"]
    tiny.tensors["model.layers.3.eh_proj.weight"] = eh_proj[:, :64]
    check_refused(
        tiny, model, rf"{where}: tensor .*3\.eh_proj\.weight must be \[64, 128\], got \[64, 64"
    )
    tiny.tensors["model.layers.3.eh_proj.weight"] = eh_proj
    norm = tiny.tensors.pop("model.layers.4.enorm.weight")
    check_refused(tiny, model, rf"{where}: tensor model\.layers\.4\.enorm\.weight is missing")
    tiny.tensors["model.layers.4.enorm.weight"] = norm
    tiny.tensors["model.layers.4.mlp.up_proj.bias"] = norm
    check_refused(tiny, model, r"4\.mlp\.up_proj\.bias is not used by the MTP module")
    tiny.tensors["model.layers.4.mlp.experts.0.up_proj.weight"] = norm
    check_refused(tiny, model, r"is a mixture of experts \(tensor .*mlp\.experts\.0")
    tiny.tensors["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] = norm
    check_refused(tiny, model, "is multi-head latent attention")


def test_modules_for_another_target_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(tiny.directory)
    for field, value in (("hidden_size", 128), ("vocab_size", 200)):
        changed = Tiny(tiny.directory, tiny.naming, {**tiny.config, field: value}, tiny.tensors, 0)
        check_refused(
            changed, model, rf"config\.json: {field} is {value}, but the target in .* has "
        )
    tiny.config["num_hidden_layers"] = 2
    check_refused(tiny, model, r"num_hidden_layers is 2, but the first MTP module.*layer 3")
    tiny.config["num_hidden_layers"] = 3
    moved = {
        name.replace("model.layers.4.", "model.layers.5."): tensor
        for name, tensor in tiny.tensors.items()
    }
    check_refused(
        Tiny(tiny.directory, "", tiny.config, moved, 0), model, r"without gaps, got \[3, 5\]"
    )


def test_tiny_checkpoints_cover_every_convention() -> None:
    assert set(CONVENTIONS) == set(NAMES)
    for one in CONVENTIONS.values():
        assert one.recycle_normed and one.chained and not one.masks_position_0


def test_docs_list_the_conventions() -> None:
    document = (Path(__file__).resolve().parents[1] / "docs" / "mtp.md").read_text()
    rows = {}
    for line in document.splitlines():
        if line.startswith("|"):
            title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(title, cells)
    for column, (naming, one) in enumerate(CONVENTIONS.items()):
        listed = {
            title: cells[column] for title, cells in rows.items() if len(cells) == len(CONVENTIONS)
        }
        assert listed[""] == f"`{naming}`"
        assert listed["families"] == ", ".join(one.families)
        assert all(f"`{field}`" in listed["number of modules"] for field in one.count_fields)
        for title, name in (
            ("embedding's norm", one.embed_norm),
            ("hidden state's norm", one.hidden_norm),
            ("projection", one.projection),
            ("decoder layer", one.block),
        ):
            assert listed[title].startswith(f"`{name}`")
        assert listed["head's norm"] == (
            f"`{one.head_norm}`" if one.head_norm else "the target's final norm"
        )
        assert (
            listed["halves of the projection"].strip("*").startswith("hidden") == one.hidden_first
        )
        assert listed["norm weights"].strip("*") == ("1 + w" if one.norm_offset else "w")
