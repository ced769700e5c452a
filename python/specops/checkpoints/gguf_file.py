# SPDX-License-Identifier: Apache-2.0
"""Reader of GGUF headers: metadata, and the location of tensors.

The format is that of ggml/docs/gguf.md in github.com/ggml-org/ggml, versions 2 and 3: all numbers
are little-endian, and the data begin at a multiple of `general.alignment` after the header.
"""

import mmap
import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specops.checkpoints.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# GGUF's number of each numeric value type -> struct's format letter.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # length of a string, in bytes
_TOKENIZER = "tokenizer."  # beginning of the keys of a tokenizer
_MOST_SIZES = 4  # maximum number of dimensions
_ALIGNMENT = 32  # default alignment
_PART = re.compile(r"(.+)(-\d{5}-of-(\d{5}))\.gguf")  # name of a file that holds a part of a model
# Tensor types: name, elements per block, bytes per block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's type, shape and location.

    Attributes:
        path: path of the file.
        type: type of the elements, a name in `TYPES`.
        shape: sizes of the dimensions, outermost first: a matrix is [outputs, inputs].
        offset: offset of the first byte in the file.
        num_bytes: size in bytes.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """Header of a GGUF file; of a model in several files, the header of the first.

    Attributes:
        path: path of the file.
        metadata: numbers, strings, and lists of either, by key; `read_gguf` may leave out some.
        tensors: tensors of all files by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def floats(self, name: str) -> list[float]:
        """Read a tensor of type F32.

        Raises:
            ModelError: the tensor is of another type.
        """
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise ModelError(f"{tensor.path}: tensor {name} must be of type F32, got {tensor.type}")
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset)
            return array("f", file.read(tensor.num_bytes)).tolist()


def numbers_of(path: Path) -> str:
    """Return the part of a file's name that counts a model's files; "" for a model's only file."""
    match = _PART.fullmatch(path.name)
    return "" if match is None else match[2]


def parts_of(path: Path) -> list[Path]:
    """Return the paths of a model's files, in order: those that NAME-00002-of-00003.gguf counts.

    A path without such numbers is the model's only file.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def read_gguf(path: Path, *, with_tokenizer: bool = True) -> GgufFile:
    """Read the headers of a model's files.

    Args:
        path: path of the file, or of any of several; see `parts_of`.
        with_tokenizer: whether to read the tokenizer's lists, such as its hundreds of thousands of
            tokens.

    Raises:
        ModelError: a file is missing, no GGUF file, truncated, does not belong to the others, or
            has a tensor of unknown type.
    """
    paths = parts_of(path)
    for one in paths:
        if not one.is_file():
            raise ModelError(f"{one}: no such file")
    first, *others = (_read(one, with_tokenizer and one == paths[0]) for one in paths)
    count = first.metadata.get("split.count", 0)
    if count != len(paths) and (len(paths) > 1 or count not in (0, 1)):
        raise ModelError(
            f"{first.path}: split.count must be the number of files, {len(paths)}, got {count}; "
            "names of a model's files end with -00001-of-00002.gguf and so on"
        )
    tensors = dict(first.tensors)
    for number, other in enumerate(others, 1):
        if other.metadata.get("split.no") != number:
            raise ModelError(
                f"{other.path}: split.no must be {number}, got {other.metadata.get('split.no')}"
            )
        for name in tensors.keys() & other.tensors.keys():
            raise ModelError(f"{other.path}: tensor {name} is in another file, too")
        tensors |= other.tensors
    return replace(first, tensors=tensors)


def _read(path: Path, with_tokenizer: bool) -> GgufFile:
    """Read the header of one file; see `read_gguf`."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data, with_tokenizer).read()
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read: {error}") from error


class _Header:
    """Parser of a header: the bytes of a file, and the current position."""

    def __init__(self, path: Path, data: mmap.mmap, with_tokenizer: bool) -> None:
        self._path, self._data, self._at = path, data, 0
        self._with_tokenizer = with_tokenizer

    def read(self) -> GgufFile:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file: it begins with {self._data[:4]!r}")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version must be 2 or 3, got {version}")
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text()
            kind = self._number("I")
            if kind == _ARRAY and key.startswith(_TOKENIZER) and not self._with_tokenizer:
                self._skip_array(key)
            else:
                metadata[key] = self._value(kind, key)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._path}: general.alignment must be at least 1, got {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {one[0]: self._placed(*one, start) for one in found}
        if len(tensors) != num_tensors:
            raise ModelError(f"{self._path}: two tensors have the same name")
        return GgufFile(self._path, metadata, tensors)

    def _truncated(self) -> ModelError:
        return ModelError(f"{self._path}: the file is truncated within its header")

    def _advance(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise self._truncated()
        self._at += count

    def _bytes(self, count: int) -> bytes:
        self._advance(count)
        return self._data[self._at - count : self._at]

    def _number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize("<" + letter)))[0]

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ModelError(f"{self._path}: {key} has a value of unknown type {kind}")
        kind, count = self._array(key)
        if kind in _NUMBERS:
            size = struct.calcsize("<" + _NUMBERS[kind])
            letter = "B" if _NUMBERS[kind] == "?" else _NUMBERS[kind]
            return array(letter, self._bytes(count * size)).tolist()
        ranges = self._text_ranges(count)
        return [self._data[begin:end].decode("utf-8") for begin, end in ranges]

    def _array(self, key: str) -> tuple[int, int]:
        """Read the type and the number of an array's elements."""
        kind, count = self._number("I"), self._number("Q")
        if kind not in _NUMBERS and kind != _TEXT:
            raise ModelError(f"{self._path}: {key} is an array of unknown type {kind}")
        return kind, count

    def _text_ranges(self, count: int) -> Iterator[tuple[int, int]]:
        """Pass over consecutive strings, and yield where the bytes of each begin and end."""
        data, end, size = self._data, self._at, len(self._data)
        for _ in range(count):
            begin = end + _LENGTH.size
            if begin > size:
                raise self._truncated()
            end = begin + _LENGTH.unpack_from(data, end)[0]
            if end > size:
                raise self._truncated()
            yield begin, end
        self._at = end

    def _skip_array(self, key: str) -> None:
        kind, count = self._array(key)
        if kind in _NUMBERS:
            self._advance(count * struct.calcsize("<" + _NUMBERS[kind]))
            return
        for _ in self._text_ranges(count):
            pass

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        num_sizes = self._number("I")
        if num_sizes > _MOST_SIZES:
            raise ModelError(
                f"{self._path}: tensor {name} must have at most 4 dimensions, got {num_sizes}"
            )
        sizes = [self._number("Q") for _ in range(num_sizes)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> GgufTensor:
        if kind not in TYPES:
            raise ModelError(f"{self._path}: tensor {name} is of unknown type {kind}")
        type_name, numbers, size = TYPES[kind]
        if not shape or 0 in shape or shape[-1] % numbers:
            raise ModelError(
                f"{self._path}: tensor {name} of type {type_name} must have rows of a multiple of "
                f"{numbers} elements, got {list(shape)}"
            )
        count = size * (shape[-1] // numbers)
        for one in shape[:-1]:
            count *= one
        if start + offset + count > len(self._data):
            raise ModelError(f"{self._path}: the file is truncated within tensor {name}")
        return GgufTensor(self._path, type_name, shape, start + offset, count)
