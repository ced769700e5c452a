# SPDX-License-Identifier: Apache-2.0
"""Linear attention, KDA and Mamba-2 in the engine: states need no rollback, drafts change no bit.

Drafts are rejected at every position, steps without drafts follow partly accepted ones, requests
lose their slots, and prompts come in chunks. Each bug that these cases could hide is planted.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import write_config
from draft_lengths import Lengths, RandomLengths
from mtp_checkpoints import make_mtp_checkpoint, save_checkpoint
from safetensors.torch import load_file
from specops import linear_attention
from specops.api.errors import ModelError
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.machine import capacity_of
from specops.engine.models import KvBytes, load_model
from specops.engine.models.kv import CacheCapacity, KvCache, StateSpec
from test_experts import FAMILIES, engine_directory, make_experts
from test_lossless import bits
from test_models import Runner, random_ids
from test_scheduler import check_entries
from torch import Tensor

DRAFTS, TOKENS = 4, 24


QWEN, OTHERS = "Qwen3Next", ("granite", "nemotron_h", "falcon_h1", "kimi_linear")
NEMOTRON_MTP = ("nemotron_h", "mtp")


@cache
def directory(family: str = QWEN) -> str:
    """Return the directory of a tiny model with a tokenizer and, of some families, MTP."""
    return engine_directory(family)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "qwen3_next_dense",
        "qwen3_5",
        "qwen3_5_experts",
        "granite",
        "granite_dense",
        "nemotron_h",
        "falcon_h1",
        "falcon_h1_norm",
        "kimi_linear",
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    """For 150 rows, transformers computes in chunks of 64. test_experts.py compares row by row."""
    theirs, ids = make_experts(tmp_path, family), random_ids(150)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    ours = Runner(load_model(tmp_path)).run([ids], [[90], [60]])[0]
    assert (ours - expected).abs().max().item() < 2e-5 * expected.abs().max().item()
    assert expected.std().item() > 0.5


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_experts"])
def test_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path: Path, family: str) -> None:
    make_experts(tmp_path, family)
    ids = random_ids(20)
    alone = Runner(load_model(tmp_path)).run([ids], [[20]])[0]
    config = json.loads((tmp_path / "config.json").read_text())
    (name,) = config.pop("architectures")
    around = {"architectures": [name.replace("CausalLM", "ConditionalGeneration")]}
    around["text_config"] = config
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {key.replace("model.", "model.language_model.", 1): t for key, t in tensors.items()}
    assert len(moved) > 40
    save_checkpoint(tmp_path, around, {**moved, "model.visual.some.weight": torch.zeros(2)})
    assert torch.equal(Runner(load_model(tmp_path)).run([ids], [[20]])[0], alone)


def texts(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return repetitive prompts and their parameters."""
    rng = random.Random(7)
    prompts = []
    for _ in range(count):
        period = [rng.randrange(1, 257) for _ in range(rng.randrange(1, 9))]
        prompts.append((period * 20)[: rng.randrange(1, 50)])
    params = [
        SamplingParams(
            max_tokens=TOKENS,
            temperature=0.7 * (index % 2),
            seed=index,
            ignore_eos=True,
            logprobs=1,
        )
        for index in range(count)
    ]
    return prompts, params


def make(method: str, family: str = QWEN, **options: Any) -> Engine:
    drafts = {"num_speculative_tokens": DRAFTS, "min_ngram_size": 1} if method != "naive" else {}
    speculative = SpeculativeConfig.from_dict(
        {"method": method, "adaptive_verification": False, **drafts}
    )
    return Engine(
        EngineConfig(
            model=directory(family),
            speculative_config=speculative,
            **{"num_pages": 100, "max_num_seqs": 8, "max_model_len": 128, **options},
        )
    )


@cache
def alone(family: str = QWEN) -> Engine:
    """Return an engine for one request at a time, without drafts or prefix cache."""
    return make("naive", family, max_num_seqs=1, enable_prefix_caching=False)


@cache
def plain(count: int, family: str = QWEN) -> list[Completion]:
    """Return the completions of plain decoding."""
    return alone(family).generate(*texts(count))


def expected_texts(count: int, family: str = QWEN) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return the texts; most have predictions that are wrong at a token every now and then.

    Random models hardly repeat more than one token. Predictions make drafts accepted, and rejected
    at any position.
    """
    prompts, params = texts(count)
    for index, (one, done) in enumerate(zip(params, plain(count, family), strict=True)):
        predicted = [
            (token + (place % (index % 6 + 2) == index % 3)) % 257
            for place, token in enumerate(done.token_ids)
        ]
        if index % 4:
            params[index] = replace(one, prediction=tuple(predicted))
    return prompts, params


class Steps:
    """Record of the drafts in an engine's steps.

    Attributes:
        rejected_at: number of steps by the index of their first rejected draft.
        num_bare: number of steps without drafts right after a partly accepted one.
    """

    def __init__(self, engine: Engine) -> None:
        self.rejected_at: Counter[int] = Counter()
        self.num_bare = 0
        self._was_cut: dict[str, bool] = {}
        collect = engine._runner.collect

        def collecting(plan: Any) -> Any:
            done = collect(plan)
            for part, one in zip(plan.parts, done, strict=True):
                accepted, drafts = one.num_accepted, part.num_drafts
                self.num_bare += drafts == 0 and self._was_cut.get(part.request.request_id, False)
                self._was_cut[part.request.request_id] = 0 < accepted < drafts
                if accepted < drafts:
                    self.rejected_at[accepted] += 1
            return done

        engine._runner.collect = collecting  # type: ignore[method-assign]


LIMITS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_pages": 9, "max_num_seqs": 6},
}


def check_speculation(method: str, limits: str, count: int, family: str = QWEN) -> Steps:
    engine = RandomLengths().decide_for(make(method, family, **LIMITS[limits]))
    steps = Steps(engine)
    done = engine.generate(*expected_texts(count, family))
    assert [bits(one) for one in done] == [bits(one) for one in plain(count, family)]
    spec = engine.stats.speculative
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens
    assert steps.num_bare > 0
    assert (engine.stats.num_preemptions > 0) == (limits == "preempted")
    assert engine.num_free_pages == engine.num_pages
    return steps


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp", "mtp+ngram"])
@pytest.mark.fast("ngram-chunks", "suffix-together", "mtp-preempted")
def test_speculation_changes_no_bit(method: str, limits: str) -> None:
    check_speculation(method, limits, 20)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("family,method", [*product(OTHERS, ("ngram", "suffix")), NEMOTRON_MTP])
@pytest.mark.fast(
    "granite-ngram-preempted",
    "falcon_h1-suffix-chunks",
    "kimi_linear-ngram-preempted",
    "nemotron_h-mtp-preempted",
)
def test_speculation_changes_no_bit_of_other_states(family: str, method: str, limits: str) -> None:
    check_speculation(method, limits, 20, family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,method",
    [
        *product((QWEN,), ("ngram", "suffix", "mtp")),
        *product(OTHERS, ("ngram", "suffix")),
        NEMOTRON_MTP,
    ],
)
def test_speculation_changes_no_bit_of_300_requests(family: str, method: str) -> None:
    check_speculation(method, "preempted", 300, family)


def test_drafts_are_rejected_at_every_position() -> None:
    """Some rejections come right before a step without drafts."""
    rejected_at: set[int] = set()
    for lengths in (Lengths, RandomLengths):
        engine = lengths().decide_for(make("ngram"))
        steps = Steps(engine)
        done = engine.generate(*expected_texts(20))
        assert [bits(one) for one in done] == [bits(one) for one in plain(20)]
        rejected_at |= set(steps.rejected_at)
    assert rejected_at == set(range(DRAFTS)) and steps.num_bare > 5


def with_last_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a step without drafts continues from the last row before, accepted or not."""
    ends = dict[tuple[int, int], int]()

    def wrong(real: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
        *_, states, slots, qo_indptr, kv_lens = args
        lens = qo_indptr.diff().tolist()
        for slot, count, end in zip(slots.tolist(), lens, kv_lens.tolist(), strict=True):
            last = ends.get((states.data_ptr(), slot), 0)
            window = states.shape[1]
            if count == 1 and end > 1 and last >= end:
                states[slot, (end - 2) % window] = states[slot, (last - 1) % window]
            ends[states.data_ptr(), slot] = end
        return real(*args, **options)

    for op in ("gated_delta_rule", "selective_state_update"):
        monkeypatch.setattr(linear_attention, op, partial(wrong, getattr(linear_attention, op)))


def with_small_windows(part: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that plants a bug: slots keep too few states (1) or inputs (0)."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = StateSpec._shapes

        def wrong(self: StateSpec, capacity: CacheCapacity) -> Any:
            shapes = [list(one) for one in real(self, capacity)]
            shapes[part][1] -= capacity.num_drafts > 0
            return tuple(map(tuple, shapes))

        monkeypatch.setattr(StateSpec, "_shapes", wrong)

    return plant


def with_old_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: keep the convolution inputs of a step's last rows, as if all were accepted."""
    real = linear_attention.causal_conv1d

    def wrong(x: Tensor, weight: Tensor, states: Tensor, *requests: Tensor, **options: Any) -> Any:
        out = real(x, weight, states, *requests, **options)
        slots, qo_indptr, kv_lens = requests
        for b, slot in enumerate(slots.tolist()):
            first, end = int(qo_indptr[b]), int(qo_indptr[b + 1])
            begin = int(kv_lens[b]) - (end - first)
            if begin == 0 or end - first > DRAFTS + 1:
                continue  # a prompt
            for back in range(1, min(end - first, len(weight))):
                states[slot, (begin + back - 1) % states.shape[1]] = x[end - back]
        return out

    monkeypatch.setattr(linear_attention, "causal_conv1d", wrong)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a step without drafts reads the last state": with_last_states,
    "too few states": with_small_windows(1),
    "too few inputs": with_small_windows(0),
    "inputs of rejected rows": with_old_inputs,
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("family", [QWEN, *OTHERS])
@pytest.mark.fast("Qwen3Next-*", "kimi_linear-*", ci=("*",))
def test_planted_bugs_are_noticed(family: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [bits(one) for one in plain(20, family)]
    BUGS[bug](monkeypatch)
    engine = RandomLengths().decide_for(make("ngram", family))
    assert [bits(one) for one in engine.generate(*expected_texts(20, family))] != expected


def follow_up(prompt: list[int], done: Completion) -> list[int]:
    """Return the prompt of a conversation's next turn."""
    return [*prompt, *done.token_ids, 3, 1, 4, 1, 5]


def test_request_continues_from_the_states_of_a_cached_prefix() -> None:
    """Send the same prompt twice, prompts that begin alike, and a conversation's next turn."""
    system, (params,) = list(range(1, 41)), texts(1)[1]
    prompts = [[*system, *[100 + index] * 13] for index in range(3)]
    prompts = [prompts[0], prompts[0], *prompts[1:]]
    prompts.append(follow_up(prompts[0], alone().generate(prompts[:1], params)[0]))
    for method in ("naive", "ngram", "mtp"):
        engine, cached = make(method), []
        for prompt in prompts:
            (done,), (want,) = engine.generate([prompt], params), alone().generate([prompt], params)
            assert bits(done) == bits(want)
            cached.append(done.num_cached_tokens)
        # Prompts have 53 tokens, 40 of them in common, and the first answer has 24. Pages hold 16.
        assert cached == [0, 48, 0, 32, 64]
        assert engine.stats.prefix_cache_hits == sum(cached)
        assert engine.stats.prefix_cache_queries == sum(map(len, prompts))


def test_loading_states_of_another_prefix_changes_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, (params,) = list(range(1, 60)), texts(1)[1]
    engine = make("naive")
    first, _ = engine.generate([prompt, [7] * 50], params)
    load = KvCache.load_states
    monkeypatch.setattr(
        KvCache, "load_states", lambda kv, entry, *place: load(kv, (entry + 1) % 2, *place)
    )
    again = engine.generate([prompt], params)[0]
    assert again.num_cached_tokens == 48 and bits(again) != bits(first)


def test_disabled_prefix_cache_is_not_queried() -> None:
    prompt, params = list(range(1, 60)), texts(1)[1]
    engine = make("naive", enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate([prompt], params)[0].num_cached_tokens == 0
    assert (
        engine.stats.prefix_cache_queries == 0
        and not engine._runner.parts.cache.capacity.num_prefix_states
    )


class Conversations(NamedTuple):
    """Requests that begin alike, with the completion of each alone."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    done: list[Completion]


@cache
def conversations(count: int, family: str = QWEN) -> Conversations:
    """Make requests that are new, continue an earlier one or share only its first tokens."""
    rng = random.Random(11)
    made = Conversations([], [], [])
    for index in range(count):
        period = [rng.randrange(1, 257) for _ in range(rng.randrange(1, 9))]
        prompt = (period * 20)[: rng.randrange(1, 60)]
        if index and rng.random() < 0.8:
            before = rng.randrange(max(index - 12, 0), index)
            whole = follow_up(made.prompts[before], made.done[before])
            prompt = whole[: rng.randrange(1, len(whole) + 1)] + prompt[:8]
        prompt = prompt[: 127 - TOKENS]
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=0.7 * (index % 2),
            seed=index,
            ignore_eos=True,
            logprobs=1,
        )
        (done,) = alone(family).generate([prompt], params)
        predicted = [
            (token + (place % (index % 6 + 2) == index % 3)) % 257
            for place, token in enumerate(done.token_ids)
        ]
        if index % 4:
            params = replace(params, prediction=tuple(predicted))
        made.prompts.append(prompt)
        made.params.append(params)
        made.done.append(done)
    return made


def run_all(engine: Engine, talk: Conversations) -> list[Completion]:
    """Run all requests, a few at a time. Abort some and submit them again."""
    rng, count = random.Random(3), len(talk.prompts)
    coming, names, done = list(range(count))[::-1], dict[str, int](), dict[int, Completion]()
    while len(done) < count:
        while coming and len(names) < 8:
            index = coming.pop()
            names[engine.add_request(talk.prompts[index], talk.params[index])] = index
        if rng.random() < 0.05:
            name = rng.choice(list(names))
            assert engine.abort(name)
            coming.append(names.pop(name))
            continue
        for output in engine.step():
            if output.finish_reason is not None:
                done[names.pop(output.request_id)] = engine.completion(output.request_id)
    return [done[index] for index in range(count)]


CACHES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "few kept": {"num_prefix_states": 3, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    "few pages": {"num_prefix_states": 12, "num_pages": 12, "max_num_seqs": 6},
}


def check_conversations(method: str, cache: str, count: int, family: str = QWEN) -> None:
    options = dict(CACHES[cache])
    num_prefix_states = options.pop("num_prefix_states", 100)
    each = load_model(directory(family)).kv_bytes_per_slot(0)
    options["state_cache_bytes"] = num_prefix_states * each
    engine, talk = make(method, family, **options), conversations(count, family)
    assert engine._runner.parts.cache.capacity.num_prefix_states == num_prefix_states
    if method != "naive":
        engine = RandomLengths().decide_for(engine)
    else:
        talk = talk._replace(params=[replace(one, prediction=()) for one in talk.params])
    done = run_all(engine, talk)
    assert list(map(bits, done)) == list(map(bits, talk.done))
    stats, states = engine.stats, engine._scheduler.states
    assert stats.prefix_cache_hits > 0.05 * stats.prefix_cache_queries > 0
    assert (stats.num_preemptions > 0) == (cache == "few pages")
    assert engine.num_free_pages == engine.num_pages
    check_entries(states, num_prefix_states)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["naive", "ngram", "suffix", "mtp"])
@pytest.mark.fast("naive-few kept", "ngram-few pages", "mtp-all kept", "mtp-few kept")
def test_cached_prefixes_change_no_bit(method: str, cache: str) -> None:
    """Runs include drafts across page boundaries, evictions, preemptions and aborts."""
    check_conversations(method, cache, 30)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["naive", "ngram"])
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.fast("falcon_h1-ngram-few kept")
def test_cached_prefixes_change_no_bit_of_other_states(
    family: str, method: str, cache: str
) -> None:
    check_conversations(method, cache, 30, family)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "family,method",
    [
        *product((QWEN,), ("naive", "ngram", "suffix", "mtp")),
        *product(OTHERS, ("ngram", "suffix")),
        NEMOTRON_MTP,
    ],
)
def test_cached_prefixes_change_no_bit_of_300_requests(
    family: str, method: str, cache: str
) -> None:
    check_conversations(method, cache, 300, family)


def test_new_request_ignores_the_old_contents_of_its_slot() -> None:
    """Memory starts as NaN, and an aborted request used the slot."""
    engine = make("ngram", max_num_seqs=1)
    for tensor in engine._runner.parts.cache.tensors:
        tensor.fill_(torch.nan)
    prompts, params = texts(3)
    aborted = engine.add_request(prompts[2], params[2])
    for _ in range(3):
        engine.step()
    assert engine.abort(aborted)
    assert list(map(bits, engine.generate(prompts, params))) == list(map(bits, plain(20)[:3]))


def test_trees_and_too_many_drafts_are_refused(tmp_path: Path) -> None:
    engine = make("ngram")
    prompts, params = texts(1)
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at most 4, .*; got 5"):
        engine.add_request(prompts[0], params[0], speculative_config={"num_speculative_tokens": 5})


def test_prediction_without_state_memory_is_dropped() -> None:
    engine = make("naive")
    prompts, each = texts(2)
    predicting = [replace(one, prediction=tuple(prompts[0])) for one in each]
    done = engine.generate(prompts, predicting)
    assert list(map(bits, done)) == list(map(bits, engine.generate(prompts, each)))
    assert engine.runnable_methods == ("naive",)
    with pytest.raises(ValueError, match=r'"prediction" cannot run .* have room for the drafts'):
        engine.add_request([1], predicting[0], speculative_config={"method": "prediction"})


@pytest.mark.parametrize(
    "layers", [{"layer_types": ["linear_attention"] * 2}, {"full_attention_interval": 3}]
)
def test_model_without_full_attention_is_refused(tmp_path: Path, layers: dict[str, Any]) -> None:
    changes = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2, **layers}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    heads |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    write_config(tmp_path, **changes, **heads)
    with pytest.raises(ModelError, match=r"must make at least one layer .* got .* for all 2"):
        load_model(tmp_path, load_format="dummy")


def test_memory_is_reserved_for_states_before_pages() -> None:
    model = load_model(directory(), max_model_len=128)
    each = model.kv_bytes_per_slot(DRAFTS)
    cache = model.new_kv_cache(10, 16, 3, DRAFTS)
    on_pages = 10 * 16 * model.kv_bytes_per_token()
    assert sum(one.nbytes for one in cache.tensors) == on_pages + 3 * each
    # Each of two layers has 4 value heads of 32 by 16, and 192 channels of 4 + 3 inputs.
    assert each == 2 * 4 * ((DRAFTS + 1) * 4 * 32 * 16 + (DRAFTS + 3) * 192)
    config = replace(make("ngram").config, num_pages=None)

    def capacity(free: int, **options: Any) -> CacheCapacity:
        device: Any = SimpleNamespace(device=torch.device("cpu"), free_bytes=lambda: free)
        return capacity_of(replace(config, **options), device, model, KvBytes())

    page, kept = 16 * model.kv_bytes_per_token(), model.kv_bytes_per_slot(0)
    assert capacity(8 * each + 20 * page, enable_prefix_caching=False) == (20, 16, 8, DRAFTS, 0)
    assert capacity(8 * each + 4 * kept + 20 * page, state_cache_bytes=4 * kept)[::4] == (20, 4)
    # The state cache gets a quarter of the cache or of free memory, and at most one entry per page.
    assert capacity(1 << 30, kv_cache_bytes=40 * kept) == (30 * kept // page, 16, 8, DRAFTS, 10)
    assert capacity(1 << 30, num_pages=9).num_prefix_states == 9
    cache = model.new_kv_cache(*capacity(1 << 30, num_pages=9))
    assert sum(one.nbytes for one in cache.tensors) == 9 * page + 8 * each + 9 * kept
    for free, options, words in [
        (8 * each - 1, {}, "max_num_seqs must fit the memory of cpu: states of 8 requests"),
        (1 << 30, {"state_cache_bytes": kept - 1}, f"state_cache_bytes must be at least {kept}"),
        (
            8 * each + kept,
            {"state_cache_bytes": 2 * kept},
            f"at most {kept}, the bytes of",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            capacity(free, **options)


def test_unknown_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    naming, base = "qwen3_next", FAMILIES["qwen3_next"]
    tiny = make_mtp_checkpoint(tmp_path, naming, base=base)
    name = "model.layers.1.linear_attn.in_proj_z.weight"
    save_checkpoint(tiny.directory, tiny.config, {**tiny.tensors, name: torch.zeros(64, 64)})
    with pytest.raises(ModelError, match=f"tensor {name} is not used by the model"):
        load_model(tiny.directory)
    left = {
        key: one for key, one in tiny.tensors.items() if "layers.1.linear_attn.A_log" not in key
    }
    save_checkpoint(tiny.directory, tiny.config, left)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.linear_attn\.A_log is missing"):
        load_model(tiny.directory)
