# SPDX-License-Identifier: Apache-2.0
"""Every op is tested on every device, and invalid data on a device is reported once."""

import re
from collections import defaultdict
from pathlib import Path

import exercised
import pytest
import specops
import torch
from exercised import Recorded, missing, whole_files
from specops import (
    _C,
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    runtime,
    sampling,
)
from test_errors import TENSOR_OPS, ints

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# The file in which the ops of a module are tested.
TESTS_OF = {
    attention: "test_attention.py",
    batching: "test_batching.py",
    dense: "test_dense.py",
    linear_attention: "test_linear_attention.py",
    moe: "test_moe.py",
    runtime: "test_devices.py",
    sampling: "test_sampling.py",
    ngram: "test_ngram.py",
}
# Ops that are tested in a separate file.
OWN_TESTS = {
    "prepare_draft_batch": "test_draft_batch.py",
    "advance_draft_batch": "test_draft_batch.py",
    "keep_hidden_rows": "test_draft_batch.py",
    "mtp_input": "test_draft_batch.py",
    "copy_kv": "test_trees.py",
    "find_shared_prefixes": "test_prefixes.py",
    "rope_append_latent": "test_attention_latent.py",
    "tree_chains": "test_trees.py",
    "commit": "test_commit.py",
    "verify": "test_verify.py",
}


def file_of(op: str) -> str:
    """Return the file that tests an op."""
    (file,) = [OWN_TESTS.get(op, file) for module, file in TESTS_OF.items() if hasattr(module, op)]
    return file


def lacking() -> list[str]:
    """Return the failures of `test_every_op_is_tested_on_every_device` for a controller."""
    return [
        f"{file_of(op)} does not call {op} on {', '.join(missing(op, file_of(op)))}"
        for op in sorted(TENSOR_OPS)
        if file_of(op) in whole_files and missing(op, file_of(op))
    ]


@pytest.mark.at_the_end
@pytest.mark.parametrize("op", sorted(TENSOR_OPS))
def test_every_op_is_tested_on_every_device(op: str) -> None:
    """The calls of this run's tests are checked."""
    if exercised.in_worker:
        pytest.skip("the controller checks the calls of all workers")
    file = file_of(op)
    if file not in whole_files:
        pytest.skip("this session runs only a part of the op's file")
    assert missing(op, file) == [], f"{file} does not call {op} there"


def test_workers_report_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercised, "DEVICES", ("cpu", "simt"))
    monkeypatch.setattr(exercised, "calls", {("test_x.py", "cpu"): {"works"}})
    monkeypatch.setattr(exercised, "whole_files", {"test_x.py"})
    reported = exercised.packed()
    monkeypatch.setattr(exercised, "calls", defaultdict(set, {("test_x.py", "simt"): {"works"}}))
    monkeypatch.setattr(exercised, "whole_files", set())
    exercised.merge(reported)
    assert exercised.calls["test_x.py", "cpu"] == {"works"}
    assert exercised.whole_files == {"test_x.py"}
    assert missing("works", "test_x.py") == []
    assert missing("another", "test_x.py") == ["cpu", "simt"]


def test_untested_op_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def works(self) -> None: ...
        def raises(self) -> None:
            raise ValueError

    monkeypatch.setattr(exercised, "DEVICES", ("cpu", "simt", "cuda"))
    monkeypatch.setattr(exercised, "calls", defaultdict(set))
    assert missing("works", "test_x.py") == ["cpu", "simt", "cuda"]
    Recorded(Module(), "test_x.py", "cpu").works()
    assert missing("works", "test_x.py") == ["simt", "cuda"]
    with pytest.raises(ValueError):
        Recorded(Module(), "test_x.py", "simt").raises()
    assert missing("raises", "test_x.py") == ["cpu", "simt", "cuda"]
    Recorded(Module(), "test_x.py", "simt").works()
    assert missing("works", "test_x.py") == ["cuda"]


def test_take_error_returns_the_first_fault_once(device: str, on_cuda: bool) -> None:
    """The fault stays until a call takes it, in stream order."""
    code = ints(7).to(device)
    assert runtime.take_error(code) is code and code.item() == 0
    if not on_cuda:
        return
    hidden = torch.zeros(2, 8, device=device)
    batching.gather_output_rows(hidden, ints(0, 2).to(device))
    batching.prepare_batch(
        *(ints(*values).to(device) for values in ([-1], [1], [1], [0, 1], [0])),
        page_size=16,
        total_rows=1,
        num_output_rows=1,
    )
    sentence = specops.error_sentence(int(runtime.take_error(code).item()))
    assert sentence is not None and sentence.startswith("gather_output_rows: output_rows must be ")
    assert runtime.take_error(code).item() == 0
    specops.check_errors()


def test_every_error_code_has_a_sentence() -> None:
    """The compiler rejects duplicate codes of one family; this test finds any others in csrc."""
    names: dict[int, str] = {}
    for path in CSRC.rglob("*.h"):
        for code, name in re.findall(r"^SPECOPS_FAULT\((\d+),\s+(k\w+)\)", path.read_text(), re.M):
            assert names.setdefault(int(code), name) == name
    assert len(names) == len(set(names.values())) > 5
    header = (CSRC / "sampling" / "row" / "value_rule.h").read_text()
    (body,) = re.findall(r"enum class SamplingOp : int32_t \{(.*?)\};", header)
    ops = {op: int(first) for op, first in re.findall(r"k(\w+) = (\d+)", body)}
    shared = {code for code in names if code < 1000}
    assert len(ops) == 3 and len(shared) > 5
    known = names.keys() - shared | {first + code for first in ops.values() for code in shared}
    assert {code for code in range(10_000) if _C.error_sentence(code) is not None} == known
    for code in known:
        sentence = _C.error_sentence(code)
        assert not set("{#}") & set(sentence), sentence  # places of limits, which a code lacks
        # TENSOR_OPS lists the fields of named tuples, but not those of weights
        found = re.match(r"(\w+): (?:(weight)\.\w+|([\w.]+)) must .*, got \S", sentence)
        assert found is not None, sentence
        op, argument = found[1], found[2] or found[3]
        # `verify` has all fields that it shares with these ops.
        owner = "verify" if op in ("sample", "top_logprobs") else op
        assert op in TENSOR_OPS and argument in TENSOR_OPS[owner], sentence
