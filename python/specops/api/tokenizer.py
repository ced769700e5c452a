# SPDX-License-Identifier: Apache-2.0
"""Exact conversion between text and token ids, one token at a time.

A token stands for bytes, and the text of a sequence is the concatenation of its tokens' bytes,
decoded as UTF-8. Streaming is therefore exact: `TextStream` returns the same text however the
tokens arrive.
"""

import codecs
import ctypes
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

_LONG_TEXT = 4096
_LFS = b"version https://git-lfs"  # the beginning of a git-lfs pointer file
# Tokenizer files in other formats, with advice on how to get a tokenizer.json.
_CONVERT = "make a tokenizer.json with transformers, AutoTokenizer.from_pretrained(DIR) and then "
_OTHER_FORMATS = {
    "tokenizer.model": f"{_CONVERT}save_pretrained(DIR)",
    "tekken.json": f"{_CONVERT}save_pretrained(DIR), or take it from a converted copy of the model",
    "tiktoken.model": "take a tokenizer.json from a converted copy of the model",
}
# Special tokens that must appear in the text: parsers of tool calls and reasoning look for them.
_SHOWN = re.compile(
    r"\[(?:TOOL_CALLS|ARGS|CALL_ID|/?THINK)\]|</?(?:think|response|tool_call|arg_key|arg_value)>"
    r"|<\|tool_calls?_\w+\|>|<\uff5ctool\u2581(?:call|sep)[^\uff5c]*\uff5c>|\uff5cDSML\uff5c"
)
# gpt-oss' tokens, if the first one is in the vocabulary; `<|end|>` has other meanings elsewhere.
_SHOWN_IN_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    Attributes:
        num_tokens: number of tokens.
        eos_token_ids: ids that end an output: those of the model and of its chat format.
        bos_token_id: id that starts a text, if the model has one.
        special_tokens: texts of special tokens by role, such as "eos_token".
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        # Truncation or padding would silently change the prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        specials = {i: token.content for i, token in added.items() if token.special}
        is_harmony = _SHOWN_IN_HARMONY[0] in specials.values()
        self._special_ids = frozenset(
            token_id
            for token_id, text in specials.items()
            if not _SHOWN.fullmatch(text) and not (is_harmony and text in _SHOWN_IN_HARMONY)
        )
        # Serialize only the decoder: a large vocabulary would take seconds.
        decoder = tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._token_to_bytes = _bytes_of_tokens(state)
        self._as_text: tokenizers.Tokenizer | None = (
            None  # a copy that encodes special tokens as plain text; created when first needed
        )
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = dict(special_tokens or {})
        self.num_tokens: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read tokenizer.json, and the special tokens from the other files of its directory.

        Raises:
            ValueError: tokenizer.json is missing or broken, or has an unsupported decoder.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer: {file} does not exist{_other_tokenizer(path)}")
        with open(file, "rb") as opened:
            is_pointer = opened.read(len(_LFS)) == _LFS
        if is_pointer:
            raise ValueError(
                f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` there"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a tokenizer: {error!s:.200}") from None
        _release_free_memory()

        specials = {
            name: text
            for file in ("special_tokens_map.json", "tokenizer_config.json")  # the last one wins
            for name, value in read_json_object(path / file).items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        # Up to three files list end tokens; chat models add theirs to generation_config.json.
        files = [path / name for name in ("generation_config.json", "config.json")]
        eos = _first(_ids(file, "eos_token_id") for file in files) or []
        if "eos_token" in specials:
            token = tokenizer.token_to_id(specials["eos_token"])
            eos = eos if token is None else [*eos, token]
        bos = next(iter(_first(_ids(file, "bos_token_id") for file in files) or ()), None)
        if "bos_token" in specials:
            bos = tokenizer.token_to_id(specials["bos_token"])
        options: dict[str, Any] = {"eos_token_ids": eos, "bos_token_id": bos}
        try:
            return cls(tokenizer, special_tokens=specials, **options)
        except ValueError as error:  # the message names the file without its directory
            raise ValueError(f"{path}: {error}") from None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. A large vocabulary takes a tenth of a second."""
        # Without gaps between the ids, it is the number of tokens.
        if None not in map(self._tokenizer.id_to_token, range(self.num_tokens)):
            return self.num_tokens
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text; spelled-out special tokens are encoded as special tokens.
            add_special_tokens: add the special tokens that the tokenizer puts around a text; False
                for a rendered chat.

        Raises:
            ValueError: the text holds half a surrogate pair, which no tokenizer can encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error.reason}") from None
        if len(text) < _LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Only the batch call releases the GIL while it works.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return list(encoding.ids)

    def encode_as_text(self, text: str) -> list[int]:
        """Return the token ids of a text, encoding special tokens in it as text and adding none."""
        if self._as_text is None:
            self._as_text = _copy_of(self._tokenizer)
            self._as_text.encode_special_tokens = True
        return list(self._as_text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence: its bytes as UTF-8, with U+FFFD for broken characters.

        No leading space is stripped: the result is what the tokens contribute to a longer text.
        """
        skip: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in skip)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
            known = b"" if token is None else self._token_to_bytes(token)
            self._bytes[token_id] = known
        return known

    def longest_token(self) -> int:
        """Return the number of bytes of the longest token of the vocabulary."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(token)) for token in ids), default=0)

    def check_ids(self, field: str, token_ids: Iterable[int], vocab_size: int) -> None:
        """Reject token ids outside a model's vocabulary.

        A tokenizer may know more tokens than its model: text-only checkpoints of multimodal
        families keep placeholders such as `<image_soft_token>`, which have no embedding.

        Args:
            field: name of the argument that holds the ids, for the message.
            token_ids: ids to check.
            vocab_size: number of rows of the model's embedding.

        Raises:
            ValueError: an id is outside; the message names it, and its token if there is one.
        """
        outside = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if outside is None:
            return
        message = f"{field}: token id {outside} is outside the vocabulary of {vocab_size}"
        is_known = 0 <= outside < self.vocab_size
        if is_known and (text := self.token_bytes(outside).decode("utf-8", "replace")):
            message += f"; {text!r} is a token of the tokenizer, but the model has no row for it"
        raise ValueError(message)

    def fingerprint(self) -> str:
        """Return a hash of the vocabulary; equal hashes mean the same token for every id."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        text = json.dumps(sorted((i, token) for token, i in vocabulary.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a control token that is not part of the text."""
        return token_id in self._special_ids


class TextStream:
    """The text of one request, released as its tokens arrive.

    Text that may still change is held back: an incomplete character, and a possible beginning of a
    stop string. The text ends before the stop string whose last character comes first; if several
    end at the same character, the longest counts. So neither the division of the text into tokens
    nor their arrival in bursts matters, and without a match the text is `tokenizer.decode` of all
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopMatcher(text) for text in stop]
        self._held = ""  # possible beginning of a stop string
        self._released: list[str] = []
        self._num_taken = 0  # entries of _released that take() has returned
        self._stopped = False
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add one token.

        Args:
            token_id: the next token.
            may_stop: whether a stop string that this token completes ends the text.

        Returns:
            Whether a stop string is complete: the text then ends before it and ignores more tokens.
        """
        if not self._stopped and not self._tokenizer.is_special(token_id):
            self._add(self._utf8.decode(self._tokenizer.token_bytes(token_id)), may_stop)
        return self._stopped

    def take(self) -> str:
        """Return the text released since the last `take`."""
        text = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return text

    def finish(self) -> str:
        """End the stream: release all held-back text, and return the text not yet taken."""
        if not self._stopped:
            self._add(self._utf8.decode(b"", final=True), True)
        if not self._stopped:
            self._release(self._held)
        self._held = ""
        return self.take()

    def _add(self, fresh: str, may_stop: bool) -> None:
        if not self._stops:
            self._release(fresh)
            return
        text = self._held + fresh
        for end, char in enumerate(fresh, start=len(self._held) + 1):
            matched = [stop for stop in self._stops if stop.feed(char)]
            if matched and may_stop:
                longest = max(matched, key=lambda stop: stop.length)
                self._release(text[: end - longest.length])
                self.stopped_by = longest.text
                self._held = ""
                self._stopped = True
                return
        keep = len(text) - max(stop.state for stop in self._stops)
        self._release(text[:keep])
        self._held = text[keep:]

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)


class _StopMatcher:
    """Incremental search for one string in a stream of characters (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.length = len(text)
        self.state = 0  # length of the longest prefix of `text` that the stream ends with
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            k = self._fallback[i - 1]
            while k and text[i] != text[k]:
                k = self._fallback[k - 1]
            self._fallback[i] = k + (text[i] == text[k])

    def feed(self, char: str) -> bool:
        """Add one character, and return whether the stream now ends with the string."""
        k = self.state
        while k and self.text[k] != char:
            k = self._fallback[k - 1]
        self.state = k + (self.text[k] == char)
        if self.state < self.length:
            return False
        self.state = self._fallback[-1]  # continue, since the string may occur again
        return True


def _copy_of(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes like another one and shares its vocabulary and merges."""
    copy = tokenizers.Tokenizer(tokenizer.model)
    copy.normalizer, copy.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    # In the order of ids, since a token that the model does not know gets the next free id.
    added = (token for _, token in sorted(tokenizer.get_added_tokens_decoder().items()))
    for is_special, tokens in itertools.groupby(added, key=lambda token: token.special):
        (copy.add_special_tokens if is_special else copy.add_tokens)(list(tokens))
    return copy


def _release_free_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    Parsing a large vocabulary frees hundreds of megabytes, which glibc would keep.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(ctypes.c_size_t(0))


def _bytes_of_tokens(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function that maps a token to its bytes, given tokenizer.json's decoder."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not steps or not set(kinds) <= known:
        raise ValueError(
            "tokenizer.json: the decoder must be ByteLevel, or made of "
            f"{', '.join(sorted(known))}; got {' + '.join(kinds) or 'none'}"
        )
    replacements = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ValueError(
                    "tokenizer.json: a decoder that replaces regular expressions is not supported"
                )
            replacements.append((step["pattern"]["String"], step["content"]))
    # Fuse joins tokens, and Strip trims the start of a text; neither changes a token's own bytes.
    has_byte_tokens = "ByteFallback" in kinds

    def spell(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return spell


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _byte_of_char() -> dict[str, int]:
    """Return byte-level BPE's map from characters to bytes: printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token outside the alphabet is plain text
        return token.encode("utf-8")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file does not exist.

    Raises:
        ValueError: the file holds anything but a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _other_tokenizer(directory: Path) -> str:
    """Return advice if the directory has a tokenizer in another format, else ""."""
    found = next((name for name in _OTHER_FORMATS if (directory / name).is_file()), None)
    return "" if found is None else f", only {found}, which is not read: {_OTHER_FORMATS[found]}"


def _token_text(value: object) -> str | None:
    """Return the text of a special token from a string or an object; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(file: Path, field: str) -> list[int] | None:
    """Return the token ids in a file's field, or None if the file does not have the field.

    Raises:
        ValueError: the field holds anything but a token id or a list of token ids.
    """
    value = read_json_object(file).get(field)
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ValueError(
            f"{file}: {field} must be a token id, or a list of them, got {value!r:.60}"
        )
    return ids
