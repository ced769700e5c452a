# SPDX-License-Identifier: Apache-2.0
"""Program that calls every op with invalid values for every argument.

`python tests/fuzzed_arguments.py MODULE CALLS [EVERY]` calls the ops that _C.pyi lists, with the
valid calls of test_errors.py as a basis. MODULE is `cpu`, or `simt` for the interpreter of the CUDA
kernels; CALLS is `compiled` for the functions of the compiled module, `public` for the documented
ones. Every EVERYth case is tried. A call may succeed, or raise a ValueError that names the op and
the argument, says what the argument must be and what it is; anything else is printed, and the exit
code is 1. A crash ends the program, so tensors are placed right before an inaccessible page.
"""

import ctypes
import faulthandler
import math
import mmap
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import simt
import specops
import torch
from fake_gpu import OP_MODULES
from specops import _C, attention, batching, dense, ngram, sampling
from test_errors import GOOD_CALLS, OPS, WHOLE_CALLS, call, public_call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor that ends right before an inaccessible page."""
    if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.is_quantized:
        return tensor
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-num_bytes // PAGE) * PAGE
    pages = mmap.mmap(-1, size + PAGE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + size
    assert LIBC.mprotect(ctypes.c_void_p(end), PAGE, NO_ACCESS) == 0
    memory = memoryview(pages)[size - num_bytes : size]
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Indexed:
    """An object that claims to be an int, but raises when converted."""

    def __index__(self) -> int:
        raise RuntimeError("an op must not pass this on")


class Subclass(Tensor):
    """A subclass of Tensor."""


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


# Values that no argument of any op accepts; the message must name the argument.
ALWAYS_INVALID: dict[str, Any] = {
    "str": "rejection",
    "empty str": "",
    "surrogate": "\udc00",
    "bytes": b"12",
    "dict": {"a": 1},
    "set": {1, 2},
    "object": object(),
    "class": int,
    "function": print,
    "range": range(3),
    "complex": 1j,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "indexed": Indexed(),
    "array": np.zeros((3, 2), np.float32),
    "scalar array": np.array(1),
    "nested": [[1], "x"],
}

# Values that some argument may accept.
NUMBERS: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus one": -1,
    "negative": -(2**31) - 1,
    "2**31": 2**31,
    "2**32": 2**32,
    "2**63": 2**63,
    "-2**63": -(2**63),
    "2**70": 2**70,
    "10**5000": 10**5000,
    "half": 0.5,
    "minus half": -0.5,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e300": 1e300,
    "numpy int": np.int64(1),
    "numpy float": np.float32(0.5),
    "numpy bool": np.True_,
    "list": [],
    "tuple": (),
    "tuple of two": (1, 2),
    "tuple of fifteen": (3,) * 15,
}

# Ways to change a valid tensor.
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda t: torch.zeros((), dtype=t.dtype),
    "rank": lambda t: t.unsqueeze(-1),
    "flat": lambda t: t.flatten(),
    "longer": lambda t: torch.cat([t, t]),
    "wider": lambda t: torch.cat([t, t], -1),
    "shorter": lambda t: t[1:],
    "narrower": lambda t: t[..., 1:],
    "empty": lambda t: t[:0],
    "empty last": lambda t: t[..., :0],
    "all empty": lambda t: torch.empty([0] * t.dim(), dtype=t.dtype),
    "endless and empty": lambda t: torch.empty(2**40, 0, dtype=t.dtype),
    "float64": lambda t: t.double(),
    "float32": lambda t: t.float(),
    "float16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "int32": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "strides": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "vast": lambda t: torch.zeros(1, dtype=t.dtype).expand([2**30, *t.shape[1:]]),
    "far apart": lambda t: torch.zeros((), dtype=t.dtype).as_strided((1, 1), (2**40, 2**50)),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.quint8),
    "of tensors": lambda t: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "fake": fake,
    "subclass": lambda t: t.as_subclass(Subclass),
    "parameter": lambda t: torch.nn.Parameter(t.float()),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "minus ones": lambda t: torch.full_like(t, -1),
    "least": lambda t: torch.full_like(t, torch.finfo(t.dtype).min if is_real(t) else -(2**31)),
    "most": lambda t: torch.full_like(t, torch.finfo(t.dtype).max if is_real(t) else 2**31 - 1),
    "nan": lambda t: torch.full_like(t, math.nan if is_real(t) else 12345),
}


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def changed(
    values: dict[str, Callable[[Tensor], Any]], tensor: Tensor
) -> Iterator[tuple[str, Any]]:
    for name, change in values.items():
        # Torch itself cannot make some of these tensors.
        with suppress(IndexError, OverflowError, RuntimeError, TypeError):
            yield name, change(tensor)


def fuzzed_arguments(good: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield names and values for an argument, and whether no argument may accept the value."""
    yield from ((name, value, True) for name, value in ALWAYS_INVALID.items())
    yield from ((name, value, False) for name, value in NUMBERS.items())
    if isinstance(good, Tensor):
        yield from ((name, value, False) for name, value in changed(TENSORS, good))
    else:
        some = torch.zeros(2, 3)
        yield from (
            (name, value, False) for name, value in (("tensor", some), ("one", some[:1, 0]))
        )


def in_bfloat16(good: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the dtypes that CUDA kernels support beside 8-bit caches."""
    names = {"q", "k", "v", "out", "q_out", "q_norm_weight", "k_norm_weight"} & set(good)
    return good | {name: good[name].bfloat16() for name in names}


EIGHT_BIT_OPS = ("append_attention", "rope_append_kv")


def compiled_calls(module: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]], Any]]:
    for name, good in GOOD_CALLS.items():
        if module is not _C and name in EIGHT_BIT_OPS:
            good = lambda good=good: in_bfloat16(good())  # noqa: E731
        yield name, good, lambda args, name=name: call(name, args, module)
    sizes = dict.fromkeys(OPS["attention_workspace_size"], 16)
    memory = dict.fromkeys(OPS["sampling_workspace_bytes"], 2)
    layout = {
        "device": "cpu",
        "kind": "plain",
        "element_bytes": 2,
        "num_outputs": 5,
        "num_inputs": 4,
        "activation": None,
        "group": 0,
        "activations": "float",
    }
    for name, good in (
        ("attention_workspace_size", {**sizes, "device": -1}),
        ("sampling_workspace_bytes", {**memory, "device_index": -1}),
        ("packed_weight_layout", layout),
        ("linear_kernels", {"rows": 3}),
        ("set_linear_kernel", {"kernel": None}),
        ("set_num_threads", {"num_threads": 1}),
        ("set_isa", {"isa": specops.get_isa()}),
        ("set_kernel_overlap", {"overlap": True}),
        ("error_sentence", {"code": 0}),
    ):
        function = getattr(module, name)
        yield (
            name,
            lambda good=good: good,
            lambda args, function=function: function(*args.values()),
        )


def public_calls(module: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]], Any]]:
    for name in GOOD_CALLS:
        if name == "take_error":
            continue
        good = lambda name=name: public_arguments(name)  # noqa: E731
        if module is not _C and name in EIGHT_BIT_OPS:
            good = lambda good=good: in_bfloat16(good())  # noqa: E731
        yield name, good, lambda args, name=name: public_call(name)[0](**args)
    weight = dense.pack_weight(torch.zeros(5, 4))
    row = {
        "counted_token_ids": torch.zeros(6, dtype=torch.int32),
        "token_counts": torch.zeros(6, dtype=torch.int32),
    }
    tokens = torch.tensor([3, 4, 3], dtype=torch.int32)
    shapes = {"q_shape": (3, 4, 64), "cache_shape": (3, 16, 2, 64), "num_pages": 3, "batch": 2}
    for function, good in (
        (
            attention.rope_cos_sin,
            {"max_positions": 4, "rotary_dim": 8, "theta": 1e4, "scaling": None},
        ),
        (attention.attention_workspace_size, {**shapes, "device": "cpu"}),
        (dense.linear_workspace_size, {"num_rows": 3, "weight": weight}),
        (dense.linear_kernels, {"num_rows": 3}),
        (sampling.sampling_workspace, {"logits": torch.zeros(2, 9), "batch": 0}),
        (sampling.count_tokens, {"token_ids": tokens, "prompt_len": 1, **row}),
        (batching.pages_of_block_table, {"block_table": torch.zeros(2, 3, dtype=torch.int32)}),
    ):
        yield function.__name__, lambda good=good: good, lambda args, f=function: f(**args)


def public_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a good call of a documented function, including its numbers."""
    good = {**WHOLE_CALLS[name](), **public_call(name)[1]}
    args = public_call(name)[1]
    options = (
        "eps",
        "norm_eps",
        "sm_scale",
        "sliding_window",
        "is_causal",
        "interleaved",
        "activation",
    )
    options += ("hidden_first", "mask_first_position", "processed_logprobs", "purpose", "strategy")
    options += (
        "policy",
        "processors",
        "sampling",
        "draft_probs",
        "outputs",
        "max_total_draft_tokens",
        "page_size",
        "max_seq_len",
    )
    options += ("kv_indptr", "kv_indices")
    parameters = public_call(name)[0].__code__.co_varnames
    args |= {option: good[option] for option in options if option in good and option in parameters}
    if name in ("prepare_batch", "build_tree", "tree_chains", "find_shared_prefixes"):
        args["out"] = None
    if name in ("prepare_draft_batch", "advance_draft_batch"):
        args["out"] = None
    if name == "ngram_propose":
        args["index"] = ngram.NgramIndex.empty(2, 8)
    if name == "linear":
        args["out_dtype"] = None
    if name == "top_logprobs":
        del args["sampling"], args["processors"], args["processed_logprobs"]
    return args


SENTENCE = re.compile(r"(?s)^(\w+): (.+?) (must be .+, got .+|has no key .+)")
# Arguments that the message names by an inner argument.
ALSO_CALLED = {
    ("linear_kernels", "rows"): "num_rows",
    ("ngram_propose", "scan_tokens"): "index.scan_tokens",
    ("ngram_propose", "index_tokens"): "index.index_tokens",
    ("attention_workspace_size", "q_shape"): "rows",  # for an array of three rows
}
# Exceptions from ALWAYS_INVALID.
ACCEPTED = {
    ("packed_weight_layout", "device"): ("str", "empty str"),  # the type of any device
    ("linear", "out_dtype"): ("dtype",),
    ("attention_workspace_size", "q_shape"): ("range",),
    ("attention_workspace_size", "device"): ("device",),
    ("rope_cos_sin", "scaling"): ("dict",),  # whose error says that a key is missing
}
# The public functions would allocate impossible outputs for these.
NOT_PUBLIC = {"endless and empty", "vast"}
# The interpreter copies the outputs of an op, which are vast here.
NOT_INTERPRETED = {("prepare_draft_batch", "qo_indptr", "most")}
NOT_COUNTABLE = {"fake", "subclass"}
PUBLIC_NAME = {
    "packed_weight_layout": "pack_weight",
    "sampling_workspace_bytes": "sampling_workspace",
}


def fault_of(op: str, argument: str, call: Callable[[], Any], is_invalid: bool) -> str:
    """Describe the fault in the outcome of a call; "" if there is none."""
    try:
        call()
    except ValueError as error:
        match = SENTENCE.match(str(error))
        if match is None or match[1] != PUBLIC_NAME.get(op, op):
            return f"raises an unexpected message: {error}"
        named = {argument, ALSO_CALLED.get((op, argument), argument)}
        if is_invalid and match[2] not in named:
            return f"names another argument: {error}"
        return ""
    except RuntimeError as error:
        return "" if "has no CUDA kernels" in str(error) else f"raises RuntimeError: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return "accepts an invalid value" if is_invalid else ""


def main(device: str, calls: str, every: int = 1) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    specops.set_num_threads(1)
    module = _C if device == "cpu" else simt.load()
    for op_module in OP_MODULES:
        op_module._C = module
    tried = wrong = number = 0
    for op, good, run in compiled_calls(module) if calls == "compiled" else public_calls(module):
        for argument in good():
            for name, value, is_invalid in fuzzed_arguments(good()[argument]):
                number += 1
                if number % every or (calls == "public" and name in NOT_PUBLIC):
                    continue
                if device == "simt" and (op, argument, name) in NOT_INTERPRETED:
                    continue
                if op == "count_tokens" and name in NOT_COUNTABLE:
                    continue
                is_invalid = is_invalid and name not in ACCEPTED.get((op, argument), ())
                args = {a: guarded(g) if isinstance(g, Tensor) else g for a, g in good().items()}
                is_plain = isinstance(value, Tensor) and type(value) is Tensor
                plain = is_plain and value.layout == torch.strided and value.device.type == "cpu"
                args[argument] = guarded(value) if plain and not value.is_nested else value
                tried += 1
                fault = fault_of(op, argument, lambda args=args, run=run: run(args), is_invalid)
                if fault:
                    wrong += 1
                    print(f"{op}({argument}={name}): {fault}"[:400])
                del args
    print(f"{tried} calls, {wrong} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int((sys.argv[3:] or ["1"])[0])))
