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
# Ops with a file of their own.
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
    header = (CSRC / "common" / "error_flag.h").read_text()
    families = dict(re.findall(r"constexpr int32_t (k\w+Codes) = (\d+);", header))
    enums = {
        name: {
            key: int(families.get(family, 0)) + int(rule)
            for key, family, rule in re.findall(r"(k\w+) = (?:(k\w+) \+ )?(\d+)", body)
        }
        for name, body in re.findall(r"enum class (\w+) : int32_t \{(.*?)\};", header, re.DOTALL)
    }
    codes, ops, rules = (enums[name] for name in ("ErrorCode", "SamplingOp", "SamplingRule"))
    assert len({int(first) for first in families.values()}) == len(families) == 7
    assert all(int(first) % 1000 == 0 for first in families.values())
    sampling_codes = [code for code in codes.values() if code // 1000 == ops["kSample"] // 1000]
    assert max(sampling_codes) < min(ops.values()) and max(rules.values()) < 100
    assert len(rules) == len(set(rules.values())) > 5
    for rule in rules.values():  # verify has them all
        sentence = _C.error_sentence(ops["kVerify"] + rule)
        found = re.match(r"verify: (\w+)[\w.]* must .*, got \S", sentence)
        assert found is not None and found[1] in TENSOR_OPS["verify"]
        for op, name in ((ops["kSample"], "sample"), (ops["kTopLogprobs"], "top_logprobs")):
            assert _C.error_sentence(op + rule) == sentence.replace("verify", name, 1)
    assert _C.error_sentence(99) is None and _C.error_sentence(ops["kSample"]) is None
    assert _C.error_sentence(ops["kTopLogprobs"] + 100 + rules["kTopP"]) is None
    assert codes.pop("kNone") == 0 and len(codes) == len(set(codes.values())) > 5
    assert _C.error_sentence(0) is None
    for name, code in codes.items():
        sentence = _C.error_sentence(code)
        assert sentence is not None, name
        assert not set("{#}") & set(sentence), sentence  # places of limits, which a code lacks
        # an argument may be followed by its field, or by others
        found = re.match(r"(\w+): (\w+)[\w., ]* must .*, got \S", sentence)
        assert found is not None, sentence
        op, argument = found.groups()
        assert op in TENSOR_OPS and argument in TENSOR_OPS[op], sentence
