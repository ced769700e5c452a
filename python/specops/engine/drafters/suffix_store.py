# SPDX-License-Identifier: Apache-2.0
"""Sources of suffix decoding: the corpus read at the start, and the file of saved responses."""

import codecs
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specops.api.config import EngineConfig
from specops.api.methods.suffix import SuffixOptions
from specops.api.tokenizer import Tokenizer
from specops.engine.drafters.suffix_answers import EarlierAnswers
from specops.suffix_tree import SuffixCache

logger = logging.getLogger(__name__)

# A longer text becomes several responses, cut at line ends, because tokenizing takes memory.
_PIECE_CHARACTERS = 1 << 20
_READ_BYTES = 1 << 20
_CORPUS = "corpus-"  # prefix of the names of corpus texts
_NAMES_TOLD = 3  # names of skipped files in the log


class SuffixStore:
    """An engine's suffix cache with its corpus and file.

    Args:
        config: its budgets, corpus and file.
        tokenizer: of the model.
        vocab_size: of the model.

    Attributes:
        cache: requests with the same cache salt share a scope, and the corpus is in all scopes.
        answers: earlier answers by prompt, which are not saved in the file.

    Raises:
        ValueError: the corpus or the file cannot be used.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        own = config.speculative_config.options_of(SuffixOptions)
        self.cache = SuffixCache(
            max_tree_depth=own.suffix_decoding_max_tree_depth,
            max_cached_requests=own.suffix_decoding_max_cached_requests,
            max_spec_factor=own.suffix_decoding_max_spec_factor,
            min_token_prob=own.suffix_decoding_min_token_prob,
            max_cached_tokens=own.suffix_decoding_max_cached_tokens,
            max_cached_bytes=own.suffix_decoding_max_cached_bytes,
            read_on=own.suffix_decoding_read_on,
        )
        self.answers = EarlierAnswers(own)
        self._path: Path | None = None
        self._vocabulary = ""
        self._saved: tuple[int, int] | None = None  # size of the file's cache
        # A file of specops 0.x mixes the corpus with the responses of requests without a salt.
        self._mixes_corpus = False
        # Of each loaded response, oldest first, its name if it is a corpus text.
        self._loaded: list[str | None] = []
        if config.suffix_cache is not None:
            self._path = Path(config.suffix_cache)
            self._vocabulary = f"{tokenizer.fingerprint()} of {vocab_size} tokens"
            self._load(self._path)
        if config.suffix_corpus is not None:
            self._add_corpus(Path(config.suffix_corpus), tokenizer, vocab_size)

    def forget(self) -> None:
        """Evict all responses from the cache, and drop the answers to prompts."""
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
        """True if there is a file that is not up to date."""
        return self._path is not None and self._saved != self._size()

    def save(self) -> None:
        """Write the responses seen so far to the file.

        Raises:
            ValueError: no file is configured, or it cannot be written; then its old content stays.
        """
        if self._path is None:
            raise ValueError("suffix_cache must name a file to be saved to, got None")
        try:
            self.cache.save(str(self._path), label=self._label())
        except (OSError, ValueError) as error:
            raise ValueError(f"suffix_cache could not be saved: {error}") from None
        self._saved = self._size()
        logger.info("suffix cache saved: %s in %s", self._told(), self._path)

    def _load(self, path: Path) -> None:
        """Read the file if it exists; reject one that could not be replaced later.

        A damaged file is useless but no reason not to start: it is renamed, and the cache begins
        empty.
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
        logger.info("suffix cache loaded: %s from %s", self._told(), path)

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
                # Named by content, so that texts in the saved cache of an earlier run are not added
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
        """Return for each response, oldest first, its name if it is a corpus text, or None."""
        names = [
            name if isinstance(name, str) and name.startswith(_CORPUS) else None
            for name in self.cache.cached_requests
        ]
        # Loaded responses have lost their names. They are the oldest, and are evicted in order.
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
        """Return the label that is written into the file with the responses."""
        names = self._names()
        corpus = {index: name for index, name in enumerate(names) if name is not None}
        return json.dumps(
            {"vocabulary": self._vocabulary, "responses": len(names), "common": corpus}
        )

    def _read_label(self, path: Path) -> list[str | None]:
        """Return the names in a file's label.

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
            else:  # format 1: the corpus is added again
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

    def _told(self) -> str:
        responses, tokens = self._size()
        return f"{responses} responses of {tokens} tokens"


def _is_damaged(path: Path, error: Exception) -> bool:
    """Return whether an unloadable file is a damaged or truncated suffix cache, or empty."""
    fault = str(error).partition(f"{path}' ")[2]
    return fault.startswith(("is damaged", "is cut short")) or not path.stat().st_size


def _texts_below(path: Path) -> list[Path]:
    """Return the text files of a corpus, sorted.

    Raises:
        ValueError: there are none, the named file is not text, or a file cannot be read.
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
        names = ", ".join(str(file.relative_to(path)) for file in left_out[:_NAMES_TOLD])
        more = ", ..." if len(left_out) > _NAMES_TOLD else ""
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
    """Return why a file is no text; None if it is.

    Raises:
        OSError: it cannot be read.
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
    """Yield the text of a file in pieces, which end at line ends unless lines are too long."""
    rest = ""
    try:
        # Keep line ends unchanged, as a model would write them.
        with file.open(encoding="utf-8", newline="") as opened:
            while text := opened.read(_PIECE_CHARACTERS - len(rest)):
                text, rest = rest + text, ""
                if len(text) < _PIECE_CHARACTERS:
                    rest = text  # the end of the file, or near it
                    continue
                end = text.rfind("\n", _PIECE_CHARACTERS // 2) + 1 or len(text)
                rest = text[end:]
                yield text[:end]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"suffix_corpus: {file} cannot be read: {error}") from None
    if rest:
        yield rest
