# SPDX-License-Identifier: Apache-2.0
"""Tokens to text, exactly: streaming gives the text of a single decode, however text is split."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specops.api.tokenizer import TextStream, Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "naïve café 🙂🙂 日本語 ünïcödé",
    "stop STOP </s> ab abab",
]
TEXTS = st.text(alphabet="abST op\n<>/é日🙂\ufffd", max_size=30)
STOPS = st.lists(st.text(alphabet="abé日🙂\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


def byte_level() -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[
            AddedToken("<|end|>", special=True),
            AddedToken("<|im_end|>", special=True),
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("plain é x", special=False)])
    return tokenizer


def byte_fallback() -> HfTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "é", "日", "ab", "▁a", "▁ab"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    tokenizer = HfTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = byte_level()
TOKENIZERS = {"byte level": Tokenizer(BYTE_LEVEL), "byte fallback": Tokenizer(byte_fallback())}
EACH = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
IDS = st.lists(st.integers(0, 300), max_size=40)


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str], takes: Sequence[bool] = ()
) -> tuple[str, int]:
    """Return the text taken piece by piece, and the number of tokens used until a stop."""
    text_stream = TextStream(tokenizer, tuple(stop))
    pieces, used = [], len(token_ids)
    for i, token in enumerate(token_ids):
        stopped = text_stream.push(token)
        if stopped or not takes or takes[i % len(takes)]:
            pieces.append(text_stream.take())
        if stopped:
            used = i + 1
            break
    pieces.append(text_stream.finish())
    assert text_stream.text == "".join(pieces)
    assert text_stream.take() == "" == text_stream.finish(), "text remained after the end"
    return text_stream.text, used


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the stop string that ends first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        matched = [s for s in stop if text[:end].endswith(s)]
        if matched:
            return text[: end - max(map(len, matched))]
    return text


@EACH
@settings(max_examples=200, deadline=None)
@given(token_ids=IDS, stop=STOPS, takes=st.lists(st.booleans(), min_size=1, max_size=5))
def test_stream_equals_one_decode(
    tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...], takes: list[bool]
) -> None:
    whole = tokenizer.decode(token_ids)
    assert stream(tokenizer, token_ids, (), takes)[0] == whole
    assert stream(tokenizer, token_ids, stop, takes)[0] == before_stop(whole, stop)


@EACH
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, stop=STOPS, data=st.data())
def test_any_split_gives_the_same_text(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    # Two splits of one text: single bytes, and the tokenizer's own tokens.
    own = tokenizer.encode(text, add_special_tokens=False)
    spelt = b"".join(map(tokenizer.token_bytes, own))
    of_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    single = [of_byte[bytes([byte])] for byte in spelt]
    assert single == [] or stream(tokenizer, single, stop)[0] == stream(tokenizer, own, stop)[0]
    # Text after a stop does not affect the stop.
    cut_at = data.draw(st.integers(0, len(single)))
    _, used = stream(tokenizer, single, stop)
    if cut_at >= used:
        assert stream(tokenizer, single[:cut_at], stop)[1] == min(used, cut_at)


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 322), max_size=40))
def test_decode_equals_the_library(token_ids: list[int]) -> None:
    ours = TOKENIZERS["byte level"]
    assert ours.vocab_size == BYTE_LEVEL.get_vocab_size()
    for skip in (True, False):
        theirs = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
        assert ours.decode(token_ids, skip_special_tokens=skip) == theirs


@EACH
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_encoding_and_decoding_round_trip(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    prefix = " " if tokenizer is TOKENIZERS["byte fallback"] and text else ""
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == prefix + text


def test_incomplete_characters_are_held_back() -> None:
    tokenizer = TOKENIZERS["byte level"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    smile = [of_byte[bytes([byte])] for byte in "🙂".encode()]
    text_stream = TextStream(tokenizer, ())
    released = []
    for token in smile:
        text_stream.push(token)
        released.append(text_stream.take())
    assert released == ["", "", "", "🙂"]
    text_stream.push(smile[0])
    assert text_stream.take() == ""
    assert text_stream.finish() == "\ufffd", "half a character at the end must be shown as broken"


def characters(text: str) -> list[int]:
    tokenizer = TOKENIZERS["byte level"]
    return [token for char in text for token in tokenizer.encode(char, add_special_tokens=False)]


@pytest.mark.parametrize(
    "stop,text,expected",
    [
        (("STOP",), "a STOP b", "a "),
        (("STOP",), "a STO b", "a STO b"),
        (("abab",), "aababab", "a"),  # an overlapping restart
        (("bc", "abcd"), "xabcd", "xa"),  # complete first
        (("b", "ab"), "xab", "x"),  # complete together: the longest
        (("ab", "b"), "xab", "x"),  # in any order
        (("x",), "x", ""),
        (("é",), "café au", "caf"),
    ],
)
def test_text_ends_before_a_stop_string(stop: tuple[str, ...], text: str, expected: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    for token_ids in (characters(text), tokenizer.encode(text)):
        assert stream(tokenizer, token_ids, stop)[0] == expected == before_stop(text, stop)


def test_possible_stop_is_held_back_until_it_is_decided() -> None:
    tokenizer = TOKENIZERS["byte level"]
    text_stream = TextStream(tokenizer, ("STOP",))
    taken = []
    for token in characters("aSTSTOa"):
        assert not text_stream.push(token)
        taken.append(text_stream.take())
    assert taken == ["a", "", "", "ST", "", "", "STOa"]
    text_stream = TextStream(tokenizer, ("STOP",))
    for token in characters("aSTO"):
        text_stream.push(token)
    assert text_stream.take() == "a"
    assert text_stream.finish() == "STO"


@pytest.mark.parametrize(
    "text,stop,first,expected,by",
    [
        ("abcabc", ("bc",), 0, "a", "bc"),
        ("abcabc", ("bc",), 3, "abca", "bc"),
        ("abcabc", ("bc",), 6, "abcabc", None),
        ("aaaaaa", ("aa",), 3, "aa", "aa"),  # a stop may begin earlier
        ("ababab", ("abab", "b"), 4, "ab", "abab"),
        ("xababx", ("bab", "ab"), 4, "xa", "bab"),
    ],
)
def test_stops_count_only_from_a_given_token_on(
    text: str, stop: tuple[str, ...], first: int, expected: str, by: str | None
) -> None:
    text_stream = TextStream(TOKENIZERS["byte level"], stop)
    for index, token in enumerate(characters(text)):
        if text_stream.push(token, may_stop=index >= first):
            break
    text_stream.finish()
    assert (text_stream.text, text_stream.stopped_by) == (expected, by)


def test_special_tokens_have_bytes_but_no_text() -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = tokenizer.encode("ab<|im_end|>ab")
    assert tokenizer.decode(token_ids) == "abab"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "ab<|im_end|>ab"
    assert stream(tokenizer, token_ids, ("<|im_end|>",))[0] == "abab"
    assert tokenizer.token_bytes(1) == b"<|im_end|>"
    assert tokenizer.is_special(1) and not tokenizer.is_special(2)
    assert tokenizer.token_bytes(10**6) == b"" == tokenizer.token_bytes(-1)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="text is not valid Unicode"):
        TOKENIZERS["byte level"].encode("a\ud800")


@EACH
def test_long_texts_are_encoded_as_by_the_library(tokenizer: Tokenizer) -> None:
    text = "ab 日é " * 1000
    assert tokenizer.encode(text) == tokenizer._tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)).removeprefix(" ") == text
    assert tokenizer.longest_token() >= 3


def test_long_prompts_are_not_truncated() -> None:
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=8)
    tokenizer = Tokenizer(library)
    assert len(tokenizer.encode("a b a b a b a b a b")) > 8
    assert len(tokenizer.encode("a")) == 1


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., Path]:
    def make(**files: Any) -> Path:
        byte_level().save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return make


def test_special_tokens_are_read_from_the_directory(model_dir: Callable[..., Path]) -> None:
    path = model_dir(
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": None,
            "pad_token": "<|end|>",
        },
        generation_config={"eos_token_id": None},
        config={"eos_token_id": [0], "bos_token_id": 0},
    )
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.eos_token_ids == {0, 1}
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|end|>"}


def test_special_tokens_may_be_in_a_map_of_their_own(model_dir: Callable[..., Path]) -> None:
    tokens = {"eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>", "unk_token": None}
    path = model_dir(special_tokens_map=tokens, tokenizer_config={"pad_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "file,sentence",
    [
        ("tokenizer.model", "only tokenizer.model, which is not read: make a tokenizer.json with"),
        ("tekken.json", "only tekken.json, which is not read: make a tokenizer.json with"),
        ("tiktoken.model", "only tiktoken.model, which is not read: take a tokenizer.json from"),
    ],
)
def test_unsupported_formats_are_named(tmp_path: Path, file: str, sentence: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ValueError) as refusal:
        Tokenizer.from_dir(tmp_path)
    assert f"no tokenizer: {tmp_path}/tokenizer.json does not exist, {sentence}" in str(
        refusal.value
    )


@pytest.mark.parametrize("value", ["<|end|>", [0, "a"], True, {"id": 0}, 1.5])
def test_invalid_token_ids_are_refused(model_dir: Callable[..., Path], value: Any) -> None:
    path = model_dir(generation_config={"eos_token_id": value})
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id must be a token id"
    ):
        Tokenizer.from_dir(path)


def test_generation_config_overrides_config(model_dir: Callable[..., Path]) -> None:
    path = model_dir(generation_config={"eos_token_id": 1}, config={"eos_token_id": 0})
    assert Tokenizer.from_dir(path).eos_token_ids == {1}


def test_invalid_tokenizers_are_refused(tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    path = model_dir()
    (path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        Tokenizer.from_dir(path)
    (path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not valid JSON"):
        Tokenizer.from_dir(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.from_dir(path)
    (path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a git-lfs pointer, .*git lfs pull"):
        Tokenizer.from_dir(path)
    library = byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="got WordPiece"):
        Tokenizer(library)
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(TOKENIZERS["byte level"], ("",))
