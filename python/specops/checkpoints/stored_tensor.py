# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, located once and then read one by one."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specops.checkpoints.errors import ModelError

# torch's name of each of safetensors' dtypes.
TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
_COPIED_BYTES = 1 << 20  # smaller tensors are copied, so that no file stays mapped for them


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a safetensors file.

    `safe_open` would parse the file's whole header for each tensor, or map all tensors until the
    last one is released. A checkpoint of experts has thousands of tensors in a file.

    Attributes:
        path: the file.
        name: name of the tensor.
        dtype: safetensors' name of the dtype.
        shape: sizes of the dimensions.
        begin: position of the first byte in the file.
        end: position after the last byte.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self, index: int | None = None) -> Tensor:
        """Read the tensor, or one index of its first dimension.

        A large tensor is mapped by itself: it takes memory only for the parts that are used, and
        releases it at its end.

        Raises:
            ModelError: torch has no such dtype, or the file has become shorter.
        """
        dtype = getattr(torch, TORCH_DTYPES.get(self.dtype, ""), None)
        if dtype is None:
            raise ModelError(f"{self.path}: tensor {self.name} is {self.dtype}, which is not read")
        if self.path.stat().st_size < self.end:
            raise ModelError(f"{self.path}: the file has become shorter")
        begin, end, shape = self.begin, self.end, self.shape
        if index is not None:
            size = (end - begin) // shape[0]
            begin, end, shape = begin + index * size, begin + (index + 1) * size, shape[1:]
        if end - begin > _COPIED_BYTES:
            file = torch.UntypedStorage.from_file(str(self.path), False, end)
            data = torch.asarray(file[begin:end], dtype=torch.uint8)
        else:
            data = torch.empty(end - begin, dtype=torch.uint8)
            with self.path.open("rb") as opened:
                opened.seek(begin)
                opened.readinto(data.numpy().data)
        return data.view(dtype).view(shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the location of each tensor of a safetensors file.

    Raises:
        Exception: safetensors refuses the file.
    """
    with safe_open(path, framework="pt"):  # checks the header
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    base = 8 + size
    return {
        name: StoredTensor(path, name, one["dtype"], tuple(one["shape"]), base + begin, base + end)
        for name, one in header.items()
        for begin, end in [one["data_offsets"]]
    }
