# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files are read with the bytes that safetensors reads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from specops.api.errors import ModelError
from specops.checkpoints.stored_tensor import TORCH_DTYPES, stored_tensors
from torch import Tensor

SHAPES = [(), (0, 3), (5,), (4, 3, 5), (3, 700, 701)]  # some of the last ones are mapped


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.to(torch.uint8)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_bytes_are_those_of_safetensors(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, TORCH_DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    tensors = {"odd": torch.zeros(1, dtype=torch.uint8)}  # tensors after it may be unaligned
    for shape in SHAPES:
        size = [torch.Size(shape).numel() * kind.itemsize]
        values = torch.randint(0, 2 if dtype == "BOOL" else 256, size, generator=generator)
        tensors[f"z{shape}"] = values.to(torch.uint8).view(kind).view(shape)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = stored_tensors(path)
    with safe_open(path, framework="pt") as file:
        assert found.keys() == {*file.keys()}
        for name, tensor in found.items():
            read, expected = tensor.read(), file.get_tensor(name)
            assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
            assert torch.equal(bits(read), bits(expected)), name
            for index in range(len(expected) if expected.dim() and expected.numel() else 0):
                assert torch.equal(bits(tensor.read(index)), bits(expected[index])), (name, index)


def test_files_that_become_shorter_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8)}, path)
    tensor = stored_tensors(path)["weight"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="the file has become shorter"):
        tensor.read()


def test_unknown_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8)}, path)
    tensor = stored_tensors(path)["weight"]
    with pytest.raises(ModelError, match="tensor weight is F4, which is not read"):
        replace(tensor, dtype="F4").read()
