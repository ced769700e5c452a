# SPDX-License-Identifier: Apache-2.0
"""Single operations of ggml on one of its backends, through its C API."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "llamacpp" / "libggml-specops.so"
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "I32": 26, "I64": 27, "BF16": 30,
}  # fmt: skip
_NUMPY = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}

Tensor = ctypes.c_void_p
Build = Callable[..., Tensor]


class Ggml:
    """ggml's library, with specops' backend loaded."""

    def __init__(self) -> None:
        folders = sorted(ROOT.glob(".venv-llamacpp/lib/python*/site-packages/llama_cpp/lib"))
        if not LIBRARY.exists() or not folders:
            pytest.skip("libggml-specops.so is not built: make -C tools llamacpp")
        for name in ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"):
            self._lib = ctypes.CDLL(str(folders[0] / name), mode=ctypes.RTLD_GLOBAL)
        if not self.call("ggml_backend_load", str(LIBRARY).encode()):
            raise RuntimeError(f"ggml does not load {LIBRARY}")

    def call(self, name: str, *args: Any, returns: Any = Tensor) -> Any:
        """Call a function of ggml; floats are passed as float32, integers as 64 bits."""
        function = getattr(self._lib, name)
        function.restype = returns

        def converted(arg: Any) -> Any:
            if isinstance(arg, float):
                return ctypes.c_float(arg)
            return ctypes.c_int64(arg) if isinstance(arg, int) else arg

        return function(*map(converted, args))

    def quantize(self, kind: str, weight: np.ndarray) -> np.ndarray:
        """Return the bytes of a float32 matrix in a type of ggml, [rows, bytes of a row]."""
        if kind == "F32":
            return np.ascontiguousarray(weight, np.float32)
        rows, width = weight.shape
        size = self.call("ggml_row_size", TYPES[kind], width, returns=ctypes.c_size_t)
        out = np.zeros((rows, size), np.uint8)
        source = np.ascontiguousarray(weight, np.float32)
        self.call(
            "ggml_quantize_chunk", TYPES[kind], source.ctypes, out.ctypes, 0, rows, width, None
        )
        return out

    def numbers(self, kind: str, data: np.ndarray, width: int) -> np.ndarray:
        """Return the float32 numbers of a matrix in a type of ggml, [rows, width]."""
        rows = len(data)
        inputs = [(kind, (width, rows), data), ("I32", (rows,), np.arange(rows))]
        out = self.compute("CPU", lambda *args: self.call("ggml_get_rows", *args), inputs)
        return out.reshape(rows, width)

    def compute(
        self,
        backend: str,
        build: Build,
        inputs: Sequence[tuple[str, Sequence[int], np.ndarray]],
        *,
        packed: int | None = None,
        threads: int = 2,
    ) -> np.ndarray:
        """Return the float32 result of one operation.

        Args:
            backend: "CPU" or "specops".
            build: makes the operation from the inputs' tensors: build(context, *tensors).
            inputs: type, shape in ggml's order (the innermost dimension first) and data of each.
            packed: index of the input that lies in specops' buffer of packed weights.
            threads: number of threads.
        """

        class Init(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("data", Tensor), ("no_alloc", ctypes.c_bool)]

        contexts = [Tensor(self.call("ggml_init", Init(1 << 20, None, True))) for _ in range(2)]
        tensors = []
        for i, (kind, shape, _) in enumerate(inputs):
            sizes = [*shape, 1, 1, 1][:4]
            context = contexts[int(i == packed)]
            tensors.append(Tensor(self.call("ggml_new_tensor_4d", context, TYPES[kind], *sizes)))
        result = Tensor(build(contexts[0], *tensors))
        graph = Tensor(self.call("ggml_new_graph", contexts[0]))
        self.call("ggml_build_forward_expand", graph, result)
        device = Tensor(self.call("ggml_backend_dev_by_name", backend.encode()))
        own = Tensor(self.call("ggml_backend_dev_init", device, None))
        register = Tensor(self.call("ggml_backend_dev_backend_reg", device))
        name = b"ggml_backend_set_n_threads"
        address = self.call("ggml_backend_reg_get_proc_address", register, name)
        ctypes.CFUNCTYPE(None, Tensor, ctypes.c_int)(address)(own, threads)
        buffers = [Tensor(self.call("ggml_backend_alloc_ctx_tensors", contexts[0], own))]
        if packed is not None:
            device = Tensor(self.call("ggml_backend_dev_by_name", b"specops-weights"))
            kind = Tensor(self.call("ggml_backend_dev_buffer_type", device))
            allocate = "ggml_backend_alloc_ctx_tensors_from_buft"
            buffers.append(Tensor(self.call(allocate, contexts[1], kind)))
        assert self.call("ggml_backend_supports_op", own, result, returns=ctypes.c_bool)
        for tensor, (kind, _, data) in zip(tensors, inputs, strict=True):
            own_bytes = data.dtype == np.uint8  # from quantize
            data = np.ascontiguousarray(data, data.dtype if own_bytes else _NUMPY[kind])
            self.call("ggml_backend_tensor_set", tensor, data.ctypes, 0, data.nbytes)
        status = self.call("ggml_backend_graph_compute", own, graph, returns=ctypes.c_int)
        assert status == 0
        out = np.zeros(self.call("ggml_nelements", result, returns=ctypes.c_int64), np.float32)
        self.call("ggml_backend_tensor_get", result, out.ctypes, 0, out.nbytes)
        self.call("ggml_backend_free", own)
        for buffer in buffers:
            self.call("ggml_backend_buffer_free", buffer)
        for context in contexts:
            self.call("ggml_free", context)
        return out
