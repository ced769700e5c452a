# SPDX-License-Identifier: Apache-2.0
"""Lossless speculation in llama-cpp-python, by a library that ggml loads.

    from specops.integrations import llamacpp

    llamacpp.register()
    llama = Llama(path, draft_model=LlamaPromptLookupDecoding(), logits_all=True)

`register` loads libggml-specops.so, a backend of ggml: matrix products and attention give a row
the same bits among any number of rows. Call it before a model is loaded. `make -C tools llamacpp`
builds the library. llama.cpp's programs load it by a variable: GGML_BACKEND_PATH=... llama-server.
"""

import ctypes
import importlib
import os
from pathlib import Path

_BUILT = Path(__file__).resolve().parents[3] / "build" / "llamacpp" / "libggml-specops.so"


def library() -> Path:
    """Return the path of libggml-specops.so.

    Raises:
        ImportError: it is not built.
    """
    if not _BUILT.is_file():
        raise ImportError(
            f"specops.integrations.llamacpp: {_BUILT} does not exist; "
            "build it with: make -C tools llamacpp"
        )
    return _BUILT


def register() -> None:
    """Load the library into the ggml of llama-cpp-python.

    Raises:
        ImportError: it is not built, or was built for another version of ggml.
    """
    path = library()
    importlib.import_module("llama_cpp")  # loads ggml
    try:  # the copy of ggml that is loaded: a wheel has several files of it
        ggml, base = (
            ctypes.CDLL(f"lib{name}.so.0", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            for name in ("ggml", "ggml-base")
        )
    except OSError as error:
        raise ImportError(
            "specops.integrations.llamacpp: llama_cpp must use shared libraries of ggml, "
            f"libggml.so.0 and libggml-base.so.0, got: {error}"
        ) from error
    built_for, own = ctypes.CDLL(str(path)).specops_ggml_version, base.ggml_version
    built_for.restype = own.restype = ctypes.c_char_p
    if built_for() != own():
        raise ImportError(
            f"specops.integrations.llamacpp: {path} was built for ggml {built_for().decode()}, but "
            f"llama_cpp has ggml {own().decode()}; install llama-cpp-python as "
            "bench/peers/constraints.txt pins it"
        )
    # A ggml that loads its backends at run time reads the variable when llama_cpp starts it; one
    # that is linked with a CPU backend does not.
    os.environ["GGML_BACKEND_PATH"] = str(path)
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    if ggml.ggml_backend_reg_count() and not ggml.ggml_backend_load(str(path).encode()):
        raise ImportError(f"specops.integrations.llamacpp: ggml does not load {path}: see its log")
