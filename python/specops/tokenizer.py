# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, exactly, one token at a time.

A token stands for bytes, and the text of a sequence is the UTF-8 reading of its tokens' bytes laid
end to end. That makes streaming exact: `TextStream` gives the same text however the tokens arrive.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

_LONG_TEXT = 4096
_LFS = b"version https://git-lfs"  # the beginning of a pointer to a file
# Files of tokenizers in other formats, and how a tokenizer.json is made of each.
_CONVERT = "make a tokenizer.json with transformers, AutoTokenizer.from_pretrained(DIR) and then "
_OTHER_FORMATS = {
    "tokenizer.model": f"{_CONVERT}save_pretrained(DIR)",
    "tekken.json": f"{_CONVERT}save_pretrained(DIR), or take it from a converted copy of the model",
    "tiktoken.model": "take a tokenizer.json from a converted copy of the model",
}
# Special tokens that are text all the same: they begin calls of tools, which somebody must read.
_SHOWN = frozenset({"[TOOL_CALLS]"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    Attributes:
        vocab_size: one more than the largest token id the tokenizer knows.
        eos_token_ids: ids that end an output, of the model and of its chat format.
        bos_token_id: id that starts a text, if the model has one.
        special_tokens: the texts of special tokens by what they are for, such as "eos_token".
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
        # A truncated or padded prompt would be silently another prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(
            i for i, token in added.items() if token.special and token.content not in _SHOWN
        )
        # Of the decoder alone: all of a large vocabulary as JSON takes seconds.
        decoder = tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._token_to_bytes = _bytes_of_tokens(state)
        self._as_text: tokenizers.Tokenizer | None = (
            None  # reads no special token; made when needed
        )
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and from the files beside it the special tokens.

        Raises:
            ValueError: tokenizer.json is missing or broken, or decodes by rules not known here.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer: {file} does not exist{_other_tokenizer(path)}")
        data = file.read_bytes()
        if data.startswith(_LFS):
            raise ValueError(
                f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` there"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a tokenizer: {error!s:.200}") from None

        specials = {
            name: text
            for file in ("special_tokens_map.json", "tokenizer_config.json")  # the last one counts
            for name, value in read_json_object(path / file).items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        # What ends an output is said in up to three places; chat models add their own to the first.
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
        except ValueError as error:  # it names the file, but not where that is
            raise ValueError(f"{path}: {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: special tokens spelt out in it are read as such.
            add_special_tokens: add what the tokenizer puts around a text; not for a rendered chat.

        Raises:
            ValueError: the text holds half a surrogate pair, which no tokenizer can spell.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error.reason}") from None
        if len(text) < _LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # The batch call is the one that lets go of the interpreter while it works.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return list(encoding.ids)

    def encode_as_text(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is read as a special token, and with none added."""
        if self._as_text is None:
            self._as_text = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            self._as_text.encode_special_tokens = True
        return list(self._as_text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a sequence: its bytes read as UTF-8, every broken character as U+FFFD.

        No space is stripped from the beginning: this is how the tokens read inside a text.
        """
        skip: frozenset[int] = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in skip)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
            known = b"" if token is None else self._token_to_bytes(token)
            self._bytes[token_id] = known
        return known

    def longest_token(self) -> int:
        """Return the bytes of the longest token, of all that the vocabulary has."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(token)) for token in ids), default=0)

    def check_ids(self, field: str, token_ids: Iterable[int], vocab_size: int) -> None:
        """Refuse token ids outside a model's vocabulary.

        A tokenizer may know more tokens than its model: text-only checkpoints of multimodal
        families keep placeholders such as `<image_soft_token>`, which have no embedding.

        Args:
            field: argument that holds the ids, for the message.
            token_ids: ids to check.
            vocab_size: number of rows of the model's embedding.

        Raises:
            ValueError: an id is outside; the message names it, and the token if it is one.
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
        """Tells vocabularies apart: two are equal if every id stands for the same token in both."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        text = json.dumps(sorted((i, token) for token, i in vocabulary.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token that does not show in the text."""
        return token_id in self._special_ids


class TextStream:
    """The text of one request, released as its tokens arrive.

    What may still change is held back: the beginning of a character, and what may become a stop
    string. The text ends before the stop string that is complete first, character by character; of
    several complete at the same character, the longest counts. So neither the cut of the text into
    tokens nor their arrival in bursts matters, and without a match the text is
    `tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopMatcher(text) for text in stop]
        self._held = ""  # may become a stop string
        self._released: list[str] = []
        self._num_taken = 0  # entries of _released that take() has handed out
        self._stopped = False
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Adds one token.

        Args:
            token_id: the next one.
            may_stop: whether a stop string that it completes counts.

        Returns:
            Whether a stop string is complete: the text is cut before it and takes no more tokens.
        """
        if not self._stopped and not self._tokenizer.is_special(token_id):
            self._add(self._utf8.decode(self._tokenizer.token_bytes(token_id)), may_stop)
        return self._stopped

    def take(self) -> str:
        """The text released since the last take."""
        text = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return text

    def finish(self) -> str:
        """Releases what was held back: no more tokens will come. Returns what was not yet taken."""
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
    """Finds one string in a stream of characters (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self.length = len(text)
        self.state = 0  # length of the longest beginning of `text` that the stream ends with
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            k = self._fallback[i - 1]
            while k and text[i] != text[k]:
                k = self._fallback[k - 1]
            self._fallback[i] = k + (text[i] == text[k])

    def feed(self, char: str) -> bool:
        """Takes one character; True when the stream now ends with the string."""
        k = self.state
        while k and self.text[k] != char:
            k = self._fallback[k - 1]
        self.state = k + (self.text[k] == char)
        if self.state < self.length:
            return False
        self.state = self._fallback[-1]  # the string may come again
        return True


def _bytes_of_tokens(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How tokens are spelt, from the decoder section of tokenizer.json."""
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
                raise ValueError("tokenizer.json: the decoder replaces a regular expression")
            replacements.append((step["pattern"]["String"], step["content"]))
    # Fuse joins, and Strip trims the beginning of a whole text: neither changes what a token says.
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
    """The alphabet of byte-level BPE: printable bytes are themselves, the others follow U+00FF."""
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
    """The JSON object in a file; an empty one where there is no file.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _other_tokenizer(directory: Path) -> str:
    """Return what a message says of a tokenizer in another format; "" if there is none."""
    found = next((name for name in _OTHER_FORMATS if (directory / name).is_file()), None)
    return "" if found is None else f", only {found}, which is not read: {_OTHER_FORMATS[found]}"


def _token_text(value: object) -> str | None:
    """Return the text of a special token, given as it or as an object; None: it is neither."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(file: Path, field: str) -> list[int] | None:
    """Return the token ids of a field; None: the file does not have it.

    Raises:
        ValueError: the field holds something else.
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
