# SPDX-License-Identifier: Apache-2.0
"""Sources of suffix decoding: a corpus read at engine start, and a file of saved responses."""

import codecs
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specops.api.config import EngineConfig
from specops.api.methods.suffix import SuffixOptions
from specops.api.tokenizer import Tokenizer
from specops.engine.drafters.suffix_answers import EarlierAnswers
from specops.suffix_tree import SuffixCache

logger = logging.getLogger(__name__)

# Longer texts are split at line ends into several responses, because tokenizing takes memory.
_PIECE_CHARACTERS = 1 << 20
_READ_BYTES = 1 << 20
_CORPUS = "corpus-"  # prefix of the names of corpus texts
_MAX_LOGGED_NAMES = 3  # names of skipped files in the log


class SuffixStore:
    """An engine's suffix cache, its corpus and its file.

    Args:
        config: the engine's configuration: budgets, corpus and file.
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary size.

    Attributes:
        cache: the suffix cache. Its scopes are cache salts; the corpus belongs to all scopes.
        answers: earlier answers by prompt; they are not saved to the file.

    Raises:
        ValueError: the corpus or the file cannot be used.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        options = config.speculative_config.options_of(SuffixOptions)
        self.cache = SuffixCache(
            max_tree_depth=options.suffix_decoding_max_tree_depth,
            max_cached_requests=options.suffix_decoding_max_cached_requests,
            max_spec_factor=options.suffix_decoding_max_spec_factor,
            min_token_prob=options.suffix_decoding_min_token_prob,
            max_cached_tokens=options.suffix_decoding_max_cached_tokens,
            max_cached_bytes=options.suffix_decoding_max_cached_bytes,
            read_on=options.suffix_decoding_read_on,
        )
        self._has_tree = 0 not in (
            options.suffix_decoding_max_cached_requests,
            options.suffix_decoding_max_cached_tokens,
            options.suffix_decoding_max_cached_bytes,
        )
        self.answers = EarlierAnswers(options)
        self._path: Path | None = None
        self._vocabulary = ""
        self._saved: tuple[int, int] | None = None  # size of the cache when the file was written
        # A file of specops 0.x mixes the corpus with the responses of requests without a salt.
        self._mixes_corpus = False
        # Name of each loaded response if it is a corpus text, else None; oldest first.
        self._loaded: list[str | None] = []
        if config.suffix_cache is not None:
            self._path = Path(config.suffix_cache)
            self._vocabulary = f"{tokenizer.fingerprint()} of {vocab_size} tokens"
            self._load(self._path)
        if config.suffix_corpus is not None:
            self._add_corpus(Path(config.suffix_corpus), tokenizer, vocab_size)

    def learn(self, prompt: bytes, answer: NDArray[np.int32], scope: str) -> None:
        """Add an answer to a prompt with this digest, as if a request of this engine had got it.

        If a file is configured, it keeps the shared tree, to which nothing is added then.
        """
        if self._path is None and self._has_tree:
            self.cache.add(answer, scope=scope)
        self.answers.add_by_digest(prompt, answer, scope)

    def forget(self) -> None:
        """Evict all responses from the suffix cache, and drop the stored answers by prompt."""
        self.answers.forget()
        for response in self.cache.cached_requests:
            self.cache.evict(response)
        self.cache.reclaim()

    @property
    def has_common_text(self) -> bool:
        """True if requests may get drafts from a corpus."""
        return self._mixes_corpus or self.cache.num_common_requests > 0

    @property
    def is_unsaved(self) -> bool:
        """True if a file is configured and is not up to date."""
        return self._path is not None and self._saved != self._size()

    def save(self) -> None:
        """Write the responses seen so far to the file.

        Raises:
            ValueError: no file is configured, or it cannot be written; it then keeps its content.
        """
        if self._path is None:
            raise ValueError("suffix_cache must name a file to be saved to, got None")
        try:
            self.cache.save(str(self._path), label=self._label())
        except (OSError, ValueError) as error:
            raise ValueError(f"suffix_cache could not be saved: {error}") from None
        self._saved = self._size()
        logger.info("suffix cache saved: %s in %s", self._summary(), self._path)

    def _load(self, path: Path) -> None:
        """Read the file if it exists; reject a file that could not be replaced later.

        A damaged file must not prevent the start: it is renamed, and the cache starts empty.
        """
        folder = path.parent
        if not folder.is_dir():
            raise ValueError(f"suffix_cache: the folder {folder} does not exist")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"suffix_cache: files in {folder} cannot be written")
        if not os.path.lexists(path):
            logger.info("suffix cache %s will be written: it is not there yet", path)
            return
        if not path.is_file():
            raise ValueError(f"suffix_cache must be a file, and {path} is none")
        try:
            names = self._read_label(path)
            self.cache.load(str(path))
        except (OSError, ValueError) as error:
            if _is_damaged(path, error):
                aside = path.with_name(f"{path.name}.damaged")
                path.replace(aside)
                aside.chmod(0o600)
                logger.warning("suffix cache begins empty, %s is kept: %s", aside, error)
                return
            raise ValueError(
                f"suffix_cache cannot be read: {error}; name another file, or move this one away"
            ) from None
        # If the file exceeds a budget, its oldest responses were not loaded.
        self._loaded = names[len(names) - self.cache.num_cached_requests :]
        self._saved = self._size()
        logger.info("suffix cache loaded: %s from %s", self._summary(), path)

    def _add_corpus(self, path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Add the text of a file, or of all files below a folder."""
        files = _texts_below(path)
        cached = {name for name in self._names() if name is not None}
        num_tokens = num_known = 0
        for file in files:
            for text in _pieces(file):
                ids = tokenizer.encode(text, add_special_tokens=False)
                tokenizer.check_ids(f"suffix_corpus: {file}", ids, vocab_size)
                token_ids = np.array(ids, np.int32)
                num_tokens += len(token_ids)
                # Name texts by content: those that the loaded file holds already are not added
                # again.
                name = _CORPUS + hashlib.sha256(token_ids.tobytes()).hexdigest()[:32]
                if name in cached:
                    num_known += 1
                else:
                    self.cache.add(token_ids, request_id=name, scope=None)
                    cached.add(name)
        if not num_tokens:
            raise ValueError(f"suffix_corpus: {path} has no text")
        logger.info(
            "suffix corpus %s: %d file%s of %d tokens%s",
            path,
            len(files),
            "" if len(files) == 1 else "s",
            num_tokens,
            f", {num_known} of them known already" if num_known else "",
        )

    def _names(self) -> list[str | None]:
        """Return the name of each response if it is a corpus text, else None; oldest first."""
        names = [
            name if isinstance(name, str) and name.startswith(_CORPUS) else None
            for name in self.cache.cached_requests
        ]
        # The cache does not know the names of loaded responses, which are evicted oldest first.
        num_gone = len(self._loaded) - self._num_loaded()
        names[: len(self._loaded) - num_gone] = self._loaded[num_gone:]
        return names

    def _num_loaded(self) -> int:
        """Return how many of the loaded responses are still in the cache."""
        for index, name in enumerate(self.cache.cached_requests[: len(self._loaded)]):
            if name is not None:
                return index
        return min(len(self._loaded), self.cache.num_cached_requests)

    def _label(self) -> str:
        """Return the label to write to the file: vocabulary and names of the responses."""
        names = self._names()
        corpus = {index: name for index, name in enumerate(names) if name is not None}
        return json.dumps(
            {"vocabulary": self._vocabulary, "responses": len(names), "common": corpus}
        )

    def _read_label(self, path: Path) -> list[str | None]:
        """Return the names of the responses from a file's label.

        Raises:
            ValueError: the label is not from an engine, or is for another vocabulary.
        """
        label = SuffixCache.read_label(str(path))
        try:
            values = json.loads(label)
            vocabulary = values["vocabulary"]
            names: list[str | None] = [None] * values["responses"]
            if "common" in values:
                for index, name in values["common"].items():
                    names[int(index)] = name
            else:  # older format without names: the corpus is added again
                self._mixes_corpus = bool(values["corpus"])
        except (ValueError, TypeError, KeyError, IndexError):
            raise ValueError(
                f"{path} was not written by an engine: its label is {label!r}"
            ) from None
        if vocabulary != self._vocabulary:
            raise ValueError(
                f"{path} belongs to another tokenizer: its vocabulary is {vocabulary}, this "
                f"model's {self._vocabulary}"
            )
        return names

    def _size(self) -> tuple[int, int]:
        return self.cache.num_cached_requests, self.cache.num_cached_tokens

    def _summary(self) -> str:
        responses, tokens = self._size()
        return f"{responses} responses of {tokens} tokens"


def _is_damaged(path: Path, error: Exception) -> bool:
    """Return whether a file that failed to load is empty, or a damaged suffix cache."""
    fault = str(error).partition(f"{path}' ")[2]
    return fault.startswith(("is damaged", "is cut short")) or not path.stat().st_size


def _texts_below(path: Path) -> list[Path]:
    """Return the text files of a corpus, sorted.

    Raises:
        ValueError: there is no text file, `path` is not text, or a file cannot be read.
    """
    try:
        if not path.is_dir():
            if not path.exists():
                raise ValueError(f"suffix_corpus: {path} does not exist")
            problem = _problem(path)
            if problem is not None:
                raise ValueError(f"suffix_corpus: {path} {problem}")
            return [path]
        texts: list[Path] = []
        left_out: list[Path] = []
        for file in _files_below(path):
            (texts if _problem(file) is None else left_out).append(file)
    except OSError as error:
        raise ValueError(
            f"suffix_corpus: {error.filename or path} cannot be read: {error.strerror}"
        ) from None
    if not texts:
        raise ValueError(f"suffix_corpus: there is no text file below {path}")
    if left_out:
        names = ", ".join(str(file.relative_to(path)) for file in left_out[:_MAX_LOGGED_NAMES])
        more = ", ..." if len(left_out) > _MAX_LOGGED_NAMES else ""
        logger.warning(
            "suffix corpus %s: %d of %d files are empty or no text and are left out: %s%s",
            path,
            len(left_out),
            len(left_out) + len(texts),
            names,
            more,
        )
    return texts


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder in the order of their names, except hidden ones."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name)


def _problem(file: Path) -> str | None:
    """Return why a file is not text, or None if it is.

    Raises:
        OSError: the file cannot be read.
    """
    if not file.is_file() and file.exists():
        return "is no regular file"
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_blank = True
    with file.open("rb") as opened:
        while chunk := opened.read(_READ_BYTES):
            if b"\0" in chunk:
                return "is binary, not text"
            try:
                text = decoder.decode(chunk)
            except UnicodeDecodeError:
                return "is not UTF-8 text"
            is_blank = is_blank and not text.strip()
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    return "is empty" if is_blank else None


def _pieces(file: Path) -> Iterator[str]:
    """Yield the text of a file in pieces, split at line ends unless lines are too long."""
    rest = ""
    try:
        # Keep line ends unchanged, as a model would write them.
        with file.open(encoding="utf-8", newline="") as opened:
            while text := opened.read(_PIECE_CHARACTERS - len(rest)):
                text, rest = rest + text, ""
                if len(text) < _PIECE_CHARACTERS:
                    rest = text  # the last piece of the file
                    continue
                end = text.rfind("\n", _PIECE_CHARACTERS // 2) + 1 or len(text)
                rest = text[end:]
                yield text[:end]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"suffix_corpus: {file} cannot be read: {error}") from None
    if rest:
        yield rest
