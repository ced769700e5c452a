# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding in the engine: trees of requests, corpora, and caches saved to files."""

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, write_tokenizer
from fake_engine import FakeEngine
from serving import serving, wait_for
from specops.api.methods.suffix import SuffixOptions
from specops.cli.serve import main
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineError,
    SamplingParams,
    SpeculativeConfig,
)
from specops.engine.drafters import suffix_store
from specops.engine.drafters.suffix_answers import EarlierAnswers
from specops.suffix_tree import SuffixCache

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=2)
    write_tokenizer(directory)
    return directory


def suffix(k: int = 4, **values: Any) -> SpeculativeConfig:
    own = {f"suffix_decoding_{name}": value for name, value in values.items()}
    return SpeculativeConfig.from_dict(
        {"method": "suffix", "num_speculative_tokens": k, "adaptive_verification": False, **own}
    )


NAIVE, SUFFIX = SpeculativeConfig(method="naive"), suffix()


def make(model_dir: Path, speculative: SpeculativeConfig = SUFFIX, **config: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            device="cpu",
            speculative_config=speculative,
            **config,
        )
    )


def accepted(engine: Engine) -> int:
    return engine.stats.speculative.num_accepted_tokens


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(1, 120) for _ in range(length)] for _ in range(count)]


class CountingCache(SuffixCache):
    """A cache that counts the calls to it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: Counter[str] = Counter()

    def start(self, *args: Any, **kwargs: Any) -> int:
        self.calls["start"] += 1
        return super().start(*args, **kwargs)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self.calls["stop"] += 1
        super().stop(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["step"] += 1
        return super().step(*args, **kwargs)


@pytest.fixture
def count_cache_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_store, "SuffixCache", CountingCache)


# ---- drafts ----


@pytest.mark.parametrize("k", [1, 2, 7])
def test_every_number_of_drafts_is_supported(model_dir: Path, k: int) -> None:
    (plain,) = make(model_dir, NAIVE).generate([PROMPT], GREEDY)
    engine = make(model_dir, suffix(k))
    (done,) = engine.generate([PROMPT], GREEDY)
    assert done.token_ids == plain.token_ids
    stats = engine.stats.speculative
    assert stats.num_accepted_tokens > 0
    assert len(stats.num_accepted_tokens_per_pos) == k
    assert engine.stats.num_steps < 40


def test_cache_is_called_once_per_step(model_dir: Path, count_cache_calls: None) -> None:
    engine = make(model_dir, max_num_seqs=8)
    engine.generate(prompts(8, 20), GREEDY)
    calls = engine.drafters["suffix"].cache.calls  # type: ignore[attr-defined]
    assert calls["start"] == calls["stop"] == 8
    assert calls["step"] <= engine.stats.num_steps


def test_prompt_is_used_for_drafts_after_the_first_token(model_dir: Path) -> None:
    """The step that ends a prompt has drafts, although the tree holds only the prompt."""
    engine = make(model_dir, max_num_batched_tokens=64)
    engine.add_request(list(range(160)), GREEDY)  # the prompt has every token
    for _ in range(3):
        engine.step()
    assert engine.stats.generation_tokens == 1
    assert engine.stats.speculative.num_draft_tokens == 0
    engine.step()
    assert engine.stats.speculative.num_draft_tokens > 0


def test_other_methods_can_run_in_the_same_engine(model_dir: Path) -> None:
    engine = make(model_dir, NAIVE, max_num_seqs=6)
    own: list[dict[str, Any]] = [{}, {"method": "suffix"}, {"method": "ngram"}]
    names = [
        engine.add_request(
            PROMPT, GREEDY, speculative_config={"adaptive_verification": False, **one}
        )
        for one in own * 2
    ]
    while engine.has_unfinished():
        engine.step()
    done = [engine.completion(name) for name in names]
    assert len({tuple(one.token_ids) for one in done}) == 1
    assert [one.stats.num_accepted_tokens > 0 for one in done] == [False, True, True] * 2
    assert engine.drafters["suffix"].cache.num_cached_requests == 2
    assert engine.drafters["suffix"].cache.running_requests == []


def test_request_can_have_more_drafts_than_others(model_dir: Path) -> None:
    (plain,) = make(model_dir, NAIVE).generate([PROMPT], GREEDY)
    engine = make(model_dir, suffix(2))
    first = engine.add_request(PROMPT, GREEDY)
    for _ in range(5):
        engine.step()
    second = engine.add_request(PROMPT, GREEDY, speculative_config={"num_speculative_tokens": 11})
    while engine.has_unfinished():
        engine.step()
    assert engine.completion(first).token_ids == plain.token_ids
    done = engine.completion(second)
    assert done.token_ids == plain.token_ids
    assert len(done.stats.num_accepted_tokens_per_pos) > 2


@pytest.mark.parametrize("budget", ["requests", "tokens", "bytes"])
def test_drafts_work_without_a_shared_tree(model_dir: Path, budget: str) -> None:
    (plain,) = make(model_dir, NAIVE).generate([PROMPT], GREEDY)
    engine = make(model_dir, suffix(**{f"max_cached_{budget}": 0}))
    (done,) = engine.generate([PROMPT], GREEDY)
    assert done.token_ids == plain.token_ids
    assert accepted(engine) > 0, "the request's own tree must be used"
    assert engine.drafters["suffix"].cache.num_cached_requests == 0


def test_budgets_evict_the_oldest_responses(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    engine = make(model_dir, suffix(max_cached_requests=3))
    engine.generate(prompts(8, 10), params)
    assert engine.drafters["suffix"].cache.num_cached_requests == 3
    engine = make(model_dir, suffix(max_cached_tokens=100))
    engine.generate(prompts(8, 10), params)
    assert 0 < engine.drafters["suffix"].cache.num_cached_tokens <= 100


def test_repeated_request_is_drafted_from_the_cache(model_dir: Path) -> None:
    engine = make(model_dir, suffix(8), enable_prefix_caching=False)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=4, ignore_eos=True)
    cold, warm = [engine.generate([[9, 9]], params)[0] for _ in range(2)]
    assert warm.token_ids == cold.token_ids
    assert warm.stats.num_accepted_tokens > 2 * cold.stats.num_accepted_tokens
    assert warm.stats.num_steps < 30


# ---- earlier answers to the same prompt ----


def test_repeated_answer_is_drafted_from_its_first_token(model_dir: Path) -> None:
    """The end of the prompt matches an earlier prompt, which a shared tree does not hold."""
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=4, ignore_eos=True, logprobs=1)
    prompt = list(range(20, 60))
    (plain,) = make(model_dir, NAIVE).generate([prompt], params)
    steps = {}
    for answers in (0, 2):
        engine = make(model_dir, suffix(8, earlier_answers=answers), enable_prefix_caching=False)
        first, again = (engine.generate([prompt], params)[0] for _ in range(2))
        for done in (first, again):
            assert (done.token_ids, done.logprobs) == (plain.token_ids, plain.logprobs)
        steps[answers] = again.stats.num_steps
        # After `forget`, no tree has the answer.
        engine.drafters["suffix"].forget()
        assert engine.generate([prompt], params)[0].stats == first.stats
    assert steps[2] == 4 < steps[0]  # one token, then nine per step


def test_latest_answers_to_each_prompt_are_kept() -> None:
    """Each answer follows the end of its prompt."""
    earlier = EarlierAnswers(
        SuffixOptions(suffix_decoding_earlier_answers=2, suffix_decoding_max_tree_depth=2)
    )
    prompt, other = [1, 2, 3], [4]
    for answer in ([5, 6], [7], [], [8, 9]):
        earlier.add(prompt, answer)
    earlier.add(other, [5])
    assert list(earlier.text_of(prompt, [1, 2, 3, 10])) == [2, 3, 7, 2, 3, 8, 9, 1, 2, 3, 10]
    assert list(earlier.text_of(other, other)) == [4, 5, 4]
    assert earlier.text_of([1, 2], [1, 2]) == [1, 2]
    earlier.forget()
    assert earlier.text_of(prompt, prompt) == prompt


@pytest.mark.parametrize("budget,most", [("requests", 2), ("tokens", 5), ("bytes", 23)])
def test_earlier_answers_stay_within_the_budget(budget: str, most: int) -> None:
    """The oldest answer to the prompt that was answered longest ago is evicted first."""
    limit: dict[str, Any] = {f"suffix_decoding_max_cached_{budget}": most}
    earlier = EarlierAnswers(SuffixOptions(suffix_decoding_earlier_answers=9, **limit))
    for prompt, answer in (([1], [11, 12]), ([2], [21, 22]), ([1], [13, 14])):
        earlier.add(prompt, answer)
    assert list(earlier.text_of([1], [1])) == [1, 11, 12, 1, 13, 14, 1]
    assert earlier.text_of([2], [2]) == [2]
    earlier.add([3], [31, 32])
    assert list(earlier.text_of([1], [1])) == [1, 13, 14, 1]
    assert list(earlier.text_of([3], [3])) == [3, 31, 32, 3]


# ---- cached responses ----


def cached_tokens(done: list[Completion]) -> int:
    return sum(len(one.token_ids) for one in done)


def test_cache_holds_exactly_the_outputs(model_dir: Path) -> None:
    """This holds for texts that end at a stop string, and for every choice."""
    engine = make(model_dir, suffix(7))
    base = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    (plain,) = engine.generate([PROMPT], base)
    stop = plain.text[20:22]
    stopping = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, stop=(stop,))
    choices = SamplingParams(max_tokens=20, seed=1, n=3, ignore_eos=True)
    done = [plain, *engine.generate([PROMPT], stopping), *engine.generate([PROMPT], choices)]
    assert done[1].finish_reason == "stop" and len(done[1].token_ids) < 50
    cache = engine.drafters["suffix"].cache
    assert cache.num_cached_requests == 5
    assert cache.num_cached_tokens == cached_tokens(done)
    assert cache.running_requests == []
    for one in done:
        assert cache.count(one.token_ids[-20:]) >= 1
    # Prompts are not cached.
    assert cache.count(PROMPT) == sum(
        one.token_ids[i : i + len(PROMPT)] == PROMPT
        for one in done
        for i in range(len(one.token_ids))
    )


def test_aborts_free_all_trees(model_dir: Path, count_cache_calls: None) -> None:
    """Requests are aborted while waiting, in prefill, while decoding, and when preempted."""
    rng = random.Random(3)
    engine = make(model_dir, num_pages=20, max_model_len=128, max_num_seqs=6)
    preempted = 0
    for name in range(150):
        prompt = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 60))]
        params = SamplingParams(max_tokens=rng.randrange(1, 60), temperature=rng.choice([0, 1]))
        engine.add_request(prompt, params, request_id=str(name))
        for _ in range(rng.randrange(4)):
            engine.step()
        waiting = [r for r in engine._scheduler.waiting if r.placement.was_preempted]
        if waiting and rng.random() < 0.5:
            preempted += engine.abort(waiting[0].request_id)
        engine.abort(str(rng.randrange(name + 1)))
    assert preempted > 0
    while engine.has_unfinished():
        engine.step()
    cache: Any = engine.drafters["suffix"].cache
    assert cache.running_requests == []
    assert cache.calls["start"] == cache.calls["stop"] <= 150
    assert cache.check_integrity() == ""


def test_preempted_request_keeps_its_tree(model_dir: Path, count_cache_calls: None) -> None:
    each = prompts(5, 20)
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    expected = make(model_dir, NAIVE, max_num_seqs=1).generate(each, params)
    engine = make(model_dir, suffix(max_cached_requests=0), num_pages=14, max_model_len=96)
    names = [engine.add_request(prompt, params) for prompt in each]
    cache: Any = engine.drafters["suffix"].cache
    num_seen = 0
    while engine.has_unfinished():
        engine.step()
        for request in engine._scheduler.waiting:
            if request.placement.was_preempted:
                (key,) = (k for k in cache.running_requests if k.endswith(f"-{request.arrival}"))
                tail = request.token_ids[-30:]
                assert cache.count(tail, request_id=key) >= 1
                num_seen += 1
    assert num_seen > 0 and engine.stats.num_preemptions > 0
    assert [engine.completion(name).token_ids for name in names] == [c.token_ids for c in expected]
    assert cache.calls["start"] == cache.calls["stop"] == 5, "each tree must be built once"


def test_failed_step_leaves_the_trees_unchanged(model_dir: Path) -> None:
    engine = make(model_dir)
    name = engine.add_request(PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    tokens = engine.drafters["suffix"].cache.num_cached_tokens
    engine._requests[name].token_ids[-1] = engine.vocab_size
    with pytest.raises(EngineError, match="a step failed"):
        engine.step()
    assert engine.drafters["suffix"].cache.num_cached_tokens == tokens
    engine.abort(name)
    assert engine.drafters["suffix"].cache.running_requests == []


# ---- corpora ----


def test_corpus_is_used_for_drafts(model_dir: Path, tmp_path: Path) -> None:
    (plain,) = make(model_dir, NAIVE).generate([[9, 9]], GREEDY)
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"first line\r\n" + plain.text.encode() + b"\r\nlast line")
    for path in (file, tmp_path):
        engine = make(model_dir, suffix(8), suffix_corpus=str(path))
        text = file.read_bytes().decode()
        token_ids = engine.tokenizer.encode(text, add_special_tokens=False)
        assert engine.drafters["suffix"].cache.num_cached_requests == 1
        assert engine.drafters["suffix"].cache.num_cached_tokens == len(token_ids)
        assert engine.drafters["suffix"].cache.count(token_ids[-20:]) == 1
        (done,) = engine.generate([[9, 9]], GREEDY)
        assert done.token_ids == plain.token_ids


def test_corpus_may_be_a_folder(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("z.txt", "b/a.py", "b/c/d.md", ".hidden/e.txt", ".f"):
        (tmp_path / name).write_text(f"the text of {name}")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b" \n")
    (tmp_path / "image").write_bytes(b"\x89PNG\0")
    (tmp_path / "b" / "latin").write_bytes("für".encode("latin-1"))
    with caplog.at_level(logging.INFO):
        engine = make(model_dir, suffix_corpus=str(tmp_path))
    assert engine.drafters["suffix"].cache.num_cached_requests == 3
    tokens = engine.drafters["suffix"].cache.num_cached_tokens
    messages = [record.getMessage() for record in caplog.records if "corpus" in record.getMessage()]
    assert messages == [
        f"suffix corpus {tmp_path}: 4 of 7 files are empty or no text and are left out: "
        "blank, empty, image, ...",
        f"suffix corpus {tmp_path}: 3 files of {tokens} tokens",
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", ""])
def test_long_files_are_split_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newline: str
) -> None:
    rng = random.Random(0)
    monkeypatch.setattr(suffix_store, "_PIECE_CHARACTERS", 40)
    monkeypatch.setattr(suffix_store, "_READ_BYTES", 7)
    for size in (0, 1, 39, 40, 41, 400):
        text = "é"
        while len(text) < size:
            text += rng.choice(["word ", "ü", newline, "a much longer piece of text "])
        file = tmp_path / "file"
        file.write_text(text, newline="")
        assert suffix_store._problem(file) is None
        pieces = list(suffix_store._pieces(file))
        assert "".join(pieces) == text
        assert all(20 <= len(piece) <= 40 for piece in pieces[:-1])
        for piece in pieces[:-1]:
            assert piece.endswith("\n") or "\n" not in piece[20:]


@pytest.mark.parametrize(
    "content,message",
    [
        (None, r"corpus: .*/corpus does not exist"),
        (b"", r"corpus: .*/corpus is empty"),
        (b"\n \n", r"corpus: .*/corpus is empty"),
        (b"abc\0", r"corpus: .*/corpus is binary, not text"),
        (b"abc\xff", r"corpus: .*/corpus is not UTF-8 text"),
        (b"abc\xc3", r"corpus: .*/corpus is not UTF-8 text"),
        ({}, r"corpus: there is no text file below .*/corpus"),
        ({"a": b"", "b": b"\0"}, r"corpus: there is no text file below .*/corpus"),
    ],
    ids=str,
)
def test_invalid_corpora_are_refused(
    model_dir: Path, tmp_path: Path, content: Any, message: str
) -> None:
    path = tmp_path / "corpus"
    if isinstance(content, dict):
        path.mkdir()
        for name, data in content.items():
            (path / name).write_bytes(data)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^suffix_{message}"):
        make(model_dir, suffix_corpus=str(path))


def test_unreadable_corpus_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"corpus: .*/gone cannot be read: No such file"):
        make(model_dir, suffix_corpus=str(tmp_path))
    with pytest.raises(ValueError, match=r"suffix_corpus must be absent if .*_tokens is 0"):
        make(model_dir, suffix(max_cached_tokens=0), suffix_corpus=str(tmp_path))


# ---- across restarts ----


def test_saved_cache_is_used_by_a_second_engine(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.suffix"
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=4, ignore_eos=True)
    each = [[9, 9], [17, 3, 4], PROMPT]
    first = make(model_dir, suffix(8), suffix_cache=str(file))
    assert first.has_unsaved_drafters and not file.exists()
    cold = first.generate(each, params)
    first.save_drafters()
    assert file.is_file() and not first.has_unsaved_drafters
    assert list(tmp_path.iterdir()) == [file], "no temporary file may remain"

    second = make(model_dir, suffix(8), suffix_cache=str(file))
    assert not second.has_unsaved_drafters
    assert (
        second.drafters["suffix"].cache.num_cached_tokens
        == first.drafters["suffix"].cache.num_cached_tokens
    )
    warm = second.generate(each, params)
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
    assert accepted(second) > 2 * accepted(first)
    assert second.has_unsaved_drafters
    # The first engine has the same drafts if it continues.
    again = first.generate(each, params)
    assert [one.stats for one in again] == [one.stats for one in warm]

    second.save_drafters()
    third = make(model_dir, suffix(8), suffix_cache=str(file))
    assert third.drafters["suffix"].cache.num_cached_requests == 6


def test_corpus_is_not_added_twice(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, corpus = tmp_path / "cache.suffix", tmp_path / "texts"
    corpus.mkdir()
    (corpus / "a").write_text("the first text")
    (corpus / "b").write_text("the second text")
    (corpus / "copy of a").write_text("the first text")
    config = {"suffix_cache": str(file), "suffix_corpus": str(corpus)}
    for run in range(3):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            engine = make(model_dir, **config)
        assert engine.drafters["suffix"].cache.num_cached_requests == 2
        assert any("known already" in record.getMessage() for record in caplog.records) or not run
        engine.save_drafters()
    (corpus / "a").write_text("another text")
    assert make(model_dir, **config).drafters["suffix"].cache.num_cached_requests == 3


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def foreign(file: Path) -> None:
    file.write_text("a list of things to do")


def write_empty_file(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("change", [flip_a_bit, truncate, write_empty_file])
def test_damaged_file_is_renamed(
    model_dir: Path, tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache.suffix"
    engine = make(model_dir, suffix_cache=str(file))
    engine.generate([PROMPT], GREEDY)
    engine.save_drafters()
    change(file)
    before = file.read_bytes()
    engine = make(model_dir, suffix_cache=str(file))
    aside = tmp_path / "cache.suffix.damaged"
    assert not file.exists() and aside.read_bytes() == before
    assert f"suffix cache begins empty, {aside} is kept" in caplog.text
    assert engine.drafters["suffix"].cache.num_cached_requests == 0
    engine.generate([PROMPT], GREEDY)
    engine.save_drafters()
    again = make(model_dir, suffix_cache=str(file))
    assert again.drafters["suffix"].cache.num_cached_requests == 1


def test_foreign_file_is_refused(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.suffix"
    foreign(file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"^suffix_cache cannot be read: .*cache\.suffix"):
        make(model_dir, suffix_cache=str(file))
    assert file.read_bytes() == before, "the foreign file must not be overwritten"


def test_file_of_another_tree_or_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.suffix"
    engine = make(model_dir, suffix_cache=str(file))
    engine.generate([PROMPT], GREEDY)
    engine.save_drafters()
    with pytest.raises(ValueError, match=r"suffix_cache cannot be read: .*depth.*32"):
        make(model_dir, suffix(max_tree_depth=32), suffix_cache=str(file))
    other = tmp_path / "other"
    other.mkdir()
    make_checkpoint(other, "Qwen3", num_hidden_layers=1, vocab_size=161)
    write_tokenizer(other)
    with pytest.raises(ValueError, match=r"cannot be read: .* belongs to another .* 161 tokens"):
        make(other, suffix_cache=str(file))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[3:5]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    make_checkpoint(other, "Qwen3", num_hidden_layers=1)
    write_tokenizer(other)
    make(other, suffix_cache=str(file))  # another model with the same vocabulary
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"cannot be read: .* belongs to another tokenizer"):
        make(other, suffix_cache=str(file))


def test_unwritable_files_are_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"suffix_cache: the folder .*/gone does not exist"):
        make(model_dir, suffix_cache=str(tmp_path / "gone" / "file"))
    with pytest.raises(ValueError, match=r"suffix_cache must be a file, and .* is none"):
        make(model_dir, suffix_cache=str(tmp_path))
    with pytest.raises(ValueError, match=r"suffix_cache must be absent if .*_requests is 0"):
        make(model_dir, suffix(max_cached_requests=0), suffix_cache="file")
    with pytest.raises(ValueError, match="suffix_cache must name a file to be saved to, got None"):
        make(model_dir).drafters["suffix"].save()
    folder = tmp_path / "folder"
    folder.mkdir()
    engine = make(model_dir, suffix_cache=str(folder / "file"))
    folder.rmdir()
    with pytest.raises(ValueError, match=r"suffix_cache could not be saved: .*folder/file"):
        engine.save_drafters()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"suffix_cache: files in .* cannot be written"):
        make(model_dir, suffix_cache=str(tmp_path / "file"))


@pytest.mark.slow
def test_command_line_errors_name_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no cache")
    for arguments in (
        ["--suffix-cache", str(tmp_path / "file")],
        ["--suffix-cache", str(tmp_path)],
        ["--suffix-corpus", str(tmp_path / "nowhere")],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"specops: {arguments[0][2:].replace('-', '_')}")
        assert str(tmp_path) in error and error.count("\n") == 1


# ---- in the server ----


def test_server_saves_when_idle_and_at_its_end(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx = pytest.importorskip("httpx")
    file = tmp_path / "cache.suffix"

    def ask(url: str) -> dict[str, Any]:
        body = {"prompt": [9, 9], "max_tokens": 40, "seed": 3, "ignore_eos": True}
        answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body).json()
        return answer

    monkeypatch.setattr("specops.service.loop._SAVE_SECONDS", 3600.0)
    with serving(make(model_dir, suffix_cache=str(file))) as served:
        cold = ask(served.url)
        assert not file.exists()
    assert file.exists()
    monkeypatch.setattr("specops.service.loop._SAVE_SECONDS", 0.01)
    with serving(make(model_dir, suffix_cache=str(file))) as served:
        warm = ask(served.url)
        wait_for(lambda: not served.engine.has_unsaved_drafters)
        assert served.engine.drafters["suffix"].cache.num_cached_requests == 2
        metrics = httpx.get(f"{served.url}/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
        name = served.engine.model_name
        assert float(lines[f'specops:suffix_cache_requests{{model_name="{name}"}}']) == 2
        assert float(lines[f'specops:suffix_cache_tokens{{model_name="{name}"}}']) == 80
        assert float(lines[f'specops:suffix_cache_bytes{{model_name="{name}"}}']) > 0
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    lengths = [
        one["metrics"]["speculative_decoding"]["mean_acceptance_length"] for one in (cold, warm)
    ]
    assert lengths[1] > lengths[0]


def test_failed_save_is_logged(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with serving(make(model_dir, suffix_cache=str(folder / "file"))):
        folder.rmdir()
    assert "suffix_cache could not be saved" in caplog.text


def test_suffix_gauges_exist_without_suffix_decoding() -> None:
    metrics = pytest.importorskip("specops.server.metrics")
    client = pytest.importorskip("specops.service.thread").ThreadClient(FakeEngine())
    assert b"specops:suffix_cache_tokens" in metrics.Metrics(client).render()
