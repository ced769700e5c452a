# SPDX-License-Identifier: Apache-2.0
"""The CUDA interpreter: results of its instructions, and detection of planted bugs."""

import math
import os
import subprocess
import sys
from fractions import Fraction
from types import ModuleType

import pytest
import simt
import torch
from torch import Tensor

SCHEDULE_NAMES = ["in_order", "reverse", "warp_at_a_time", "last_warp_first", "random"]


@pytest.fixture
def machine() -> ModuleType:
    """Return the module of tests/simt_kernels with default settings."""
    module = simt.load("_simt_test")
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    module.set_accumulation("fma")
    module.set_fuzz(0)
    return module


# Fragments: the layouts of the PTX manual, as formulas of the lane


def pack_fragments(a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the registers of 32 lanes for a [16, k], b [k, 8], d [16, 8] per the PTX manual."""
    per_word = 4 // a.element_size()
    half = a.shape[1] // 2
    a_regs = torch.zeros(32, 4, per_word, dtype=a.dtype)
    b_regs = torch.zeros(32, 2, per_word, dtype=b.dtype)
    d_regs = torch.zeros(32, 4)
    for lane in range(32):
        group, quad = lane >> 2, lane & 3
        for i in range(4 * per_word):
            word, part = divmod(i, per_word)
            row = group if word in (0, 2) else group + 8
            col = quad * per_word + part + (half if word >= 2 else 0)
            a_regs[lane, word, part] = a[row, col]
        for i in range(2 * per_word):
            word, part = divmod(i, per_word)
            b_regs[lane, word, part] = b[quad * per_word + part + half * word, group]
        for i in range(4):
            d_regs[lane, i] = d[group + 8 * (i >= 2), quad * 2 + (i & 1)]
    return a_regs, b_regs, d_regs


def unpack_sums(d_regs: Tensor) -> Tensor:
    d = torch.zeros(16, 8)
    for lane in range(32):
        for i in range(4):
            d[(lane >> 2) + 8 * (i >= 2), (lane & 3) * 2 + (i & 1)] = d_regs[lane, i]
    return d


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "e4m3": torch.float8_e4m3fn}


def run_mma(machine: ModuleType, dtype: str, a: Tensor, b: Tensor, d: Tensor) -> Tensor:
    # fp8 tensors are moved as bytes
    as_bits = torch.uint8 if dtype == "e4m3" else torch.int16
    a_regs, b_regs, d_regs = pack_fragments(a.view(as_bits), b.view(as_bits), d)
    machine.mma(dtype, a_regs.data_ptr(), b_regs.data_ptr(), d_regs.data_ptr())
    return unpack_sums(d_regs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", simt.ACCUMULATIONS)
def test_mma_follows_the_documented_layout(machine: ModuleType, dtype: str, model: str) -> None:
    """Small integers are exact under every rounding rule and differ in every position."""
    k = 32 if dtype == "e4m3" else 16
    a = torch.randint(-8, 9, (16, k)).to(DTYPES[dtype])
    b = torch.randint(-8, 9, (k, 8)).to(DTYPES[dtype])
    d = torch.randint(-99, 100, (16, 8)).float()
    machine.set_accumulation(model)
    assert torch.equal(run_mma(machine, dtype, a, b, d), d + a.float() @ b.float())


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integer_mma_is_exact(machine: ModuleType, dtype: str) -> None:
    """`a` is signed, and sums are int32."""
    a = torch.randint(-128, 128, (16, 32)).to(torch.int8)
    b = torch.randint(0, 256, (32, 8)).to(torch.uint8).view(getattr(torch, dtype))
    d = torch.randint(-(2**25), 2**25, (16, 8), dtype=torch.int32)
    regs = pack_fragments(a, b, d.view(torch.float32))
    machine.mma(dtype, *(one.data_ptr() for one in regs))
    want = d + (a.double() @ b.double()).int()
    assert torch.equal(unpack_sums(regs[2]).view(torch.int32), want)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_follows_the_documented_layout(
    machine: ModuleType, tiles: int, trans: bool
) -> None:
    rows = torch.arange(32 * 8, dtype=torch.int16).view(32, 8)
    out = torch.zeros(32, tiles, 2, dtype=torch.int16)
    machine.ldmatrix(tiles, trans, rows.data_ptr(), out.data_ptr())
    for lane in range(32):
        for tile in range(tiles):
            matrix = rows[8 * tile : 8 * tile + 8]
            matrix = matrix.T if trans else matrix
            first = 2 * (lane % 4)
            assert torch.equal(out[lane, tile], matrix[lane // 4, first : first + 2])


# Rounding rules of mma, in exact rational arithmetic


def floor_to(x: Fraction, unit: Fraction) -> Fraction:
    """Truncate toward zero to a multiple of `unit`."""
    return (abs(x) // unit) * unit * (-1 if x < 0 else 1)


def exponent(x: Fraction) -> int:
    """Return e with 2^e <= |x| < 2^(e + 1)."""
    guess = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    return guess if abs(x) >= Fraction(2) ** guess else guess - 1


def nearest_float(x: Fraction) -> Fraction:
    if x == 0:
        return x
    unit = Fraction(2) ** max(exponent(x) - 23, -149)
    return round(x / unit) * unit  # ties to even


def fma_rule(c: Fraction, products: list[tuple[Fraction, Fraction]]) -> Fraction:
    for x, y in products:
        c = nearest_float(c + x * y)
    return c


def truncating_rule(
    c: Fraction, products: list[tuple[Fraction, Fraction]], bits: int, step: int
) -> Fraction:
    """Return the sum of terms truncated `bits` below the largest exponent, truncated to fp32.

    The exponent of a product is the sum of the exponents of its factors.
    """
    for start in range(0, len(products), step):
        terms = [
            (x * y, exponent(x) + exponent(y)) for x, y in products[start : start + step] if x * y
        ]
        terms += [(c, exponent(c))] if c else []
        if not terms:
            continue
        unit = Fraction(2) ** (max(e for _, e in terms) - bits)
        c = sum((floor_to(x, unit) for x, _ in terms), Fraction(0))
        if c:
            c = floor_to(c, Fraction(2) ** max(exponent(c) - 23, -149))
    return c


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", simt.ACCUMULATIONS)
@pytest.mark.parametrize("spread", [0, 12])
def test_accumulation_follows_its_rounding_rule(
    machine: ModuleType, dtype: str, model: str, spread: int
) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape) * torch.exp2(torch.randint(-spread, spread + 1, shape) / 2)

    a, b, d = draw(16, 16).to(DTYPES[dtype]), draw(16, 8).to(DTYPES[dtype]), draw(16, 8)
    machine.set_accumulation(model)
    got = run_mma(machine, dtype, a, b, d)
    for row in range(16):
        for col in range(8):
            factors = [
                (Fraction(x), Fraction(y))
                for x, y in zip(a[row].tolist(), b[:, col].tolist(), strict=True)
            ]
            c = Fraction(d[row, col].item())
            if model == "fma":
                want = fma_rule(c, factors)
            elif model == "hopper":
                want = truncating_rule(c, factors, 25, 16)
            else:
                want = truncating_rule(c, factors, 24, 8)
            assert Fraction(got[row, col].item()) == want


def test_accumulation_models_differ(machine: ModuleType) -> None:
    a, b, d = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16, 8)
    results = []
    for model in simt.ACCUMULATIONS:
        machine.set_accumulation(model)
        results.append(run_mma(machine, "bfloat16", a, b, d))
        assert (results[-1] - (d + a.float() @ b.float())).abs().max() < 1e-4
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


@pytest.mark.parametrize("model", simt.ACCUMULATIONS)
def test_mma_propagates_infinities_and_nan(machine: ModuleType, model: str) -> None:
    """A zero row of A returns the addend."""
    a, b, d = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16, 8)
    a[3] = 0.0
    a[4, 2] = float("inf")
    a[5, 9] = float("nan")
    d[6] = float("-inf")
    machine.set_accumulation(model)
    got = run_mma(machine, "bfloat16", a, b, d)
    assert torch.equal(got[3], d[3])
    assert got[4].isinf().all() and got[5].isnan().all()
    assert torch.equal(got[6], d[6])
    assert got[:3].isfinite().all()


# Warp collectives, atomics, approximate functions


@pytest.mark.parametrize("kind", ["index", "xor", "up", "down"])
@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffles_read_the_right_lanes(machine: ModuleType, kind: str, width: int) -> None:
    values = torch.randint(0, 1000, (32,), dtype=torch.int32)
    count = {"index": 32, "xor": width, "up": width, "down": width}[kind]
    amounts = torch.randint(0, count, (32,), dtype=torch.int32)
    given, out = torch.stack([values, amounts]), torch.zeros(32, dtype=torch.int32)
    machine.shuffle(kind, width, given.data_ptr(), out.data_ptr())
    for lane in range(32):
        first, amount = lane - lane % width, int(amounts[lane])
        source = {
            "index": first + amount % width,
            "xor": lane ^ amount,
            "up": lane - amount if lane - amount >= first else lane,
            "down": lane + amount if lane + amount < first + width else lane,
        }[kind]
        assert out[lane] == values[source]


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_votes_and_reductions_cover_their_lanes(machine: ModuleType, schedule: str) -> None:
    machine.set_schedule(schedule, 3)
    values = torch.randint(-5, 6, (64,), dtype=torch.int32)
    out = torch.zeros(8, 64, dtype=torch.int32)
    machine.votes(values.data_ptr(), out.data_ptr())

    def bits(lanes: list[int]) -> int:
        word = sum(1 << lane for lane in lanes)
        return word - (1 << 32) if word >> 31 else word

    for thread in range(64):
        lanes = [lane for lane in range(32) if lane % 2 == thread % 2]
        of_lane = {lane: int(values[thread // 32 * 32 + lane]) for lane in lanes}
        own = of_lane[thread % 32]
        assert out[:, thread].tolist() == [
            bits([lane for lane in lanes if of_lane[lane] > 0]),
            any(x > 4 for x in of_lane.values()),
            all(x > -4 for x in of_lane.values()),
            sum(of_lane.values()),
            min(of_lane.values()),
            bits([lane for lane in lanes if of_lane[lane] == own]),
            int((values > 0).sum()),
            int((values > 4).any()) + 2 * int((values > -4).all()),
        ]


def test_atomics_apply_every_operation(machine: ModuleType) -> None:
    out = torch.tensor([0, 0, 0, 0, -1, 0], dtype=torch.int32)
    machine.atomics(out.data_ptr(), 4)
    assert out.tolist() == [127 * 64, 127, -127, 2**31 - 1, 7, 128 % 10]


@pytest.mark.parametrize("kind", ["exp2", "log2", "rcp"])
def test_approximate_functions_stay_within_their_error(machine: ModuleType, kind: str) -> None:
    given = torch.cat([torch.rand(900) * 60 + 0.01, -torch.rand(100) * 60])
    if kind == "log2":
        given = given.abs()
    truth = {"exp2": torch.exp2, "log2": torch.log2, "rcp": torch.reciprocal}[kind](given.double())
    exact, fuzzed, again = (torch.zeros(1000) for _ in range(3))
    machine.approximate(kind, given.data_ptr(), exact.data_ptr(), 1000)
    machine.set_fuzz(7)
    machine.approximate(kind, given.data_ptr(), fuzzed.data_ptr(), 1000)
    machine.approximate(kind, given.data_ptr(), again.data_ptr(), 1000)
    unit = truth.abs() * 2.0**-23 + 1e-12
    assert ((exact - truth).abs() <= unit).all()
    assert ((fuzzed - truth).abs() <= 3 * unit).all()
    assert not torch.equal(exact, fuzzed) and torch.equal(fuzzed, again)


def test_approximate_functions_are_exact_at_special_values(machine: ModuleType) -> None:
    machine.set_fuzz(1)
    inf = math.inf
    for kind, given, want in [
        ("exp2", [0.0, -inf, inf, -200.0], [1.0, 0.0, inf, 0.0]),
        ("log2", [1.0, 0.0, inf, 1e-45], [0.0, -inf, inf, -inf]),
        ("rcp", [1.0, inf, 0.0, -inf], [1.0, 0.0, inf, -0.0]),
    ]:
        x, out = torch.tensor(given), torch.zeros(4)
        machine.approximate(kind, x.data_ptr(), out.data_ptr(), 4)
        assert out.tolist() == want


# Schedules


def test_schedules_differ_and_repeat_themselves(machine: ModuleType) -> None:
    orders = []
    for schedule, seed in [*((name, 1) for name in SCHEDULE_NAMES), ("random", 2)]:
        machine.set_schedule(schedule, seed)
        out = torch.zeros(1 + 2 * 3 * 64, dtype=torch.int32)
        machine.order(out.data_ptr(), 3)
        assert out[0] == 2 * 3 * 64
        before, after = out[1:].view(3, 2, 64).unbind(1)
        assert torch.equal(before.sort().values, after.sort().values), "a barrier was crossed"
        orders.append(tuple(out.tolist()))
        again = torch.zeros_like(out)
        machine.order(again.data_ptr(), 3)
        assert torch.equal(out, again), "a schedule must repeat itself"
    assert len(set(orders)) == len(orders)


# Planted bugs. Every kernel has a variant without the bug, on which every build must be silent.

BUILDS = ["asan"] if simt.BUILD == "asan" else ["plain", "race"]

# Report of each build, or None. "differs": the schedules disagree on the result. "poison": the
# result is the pattern that fills shared memory.
PLANTED: dict[str, dict[str, str | None]] = {
    "missing_barrier": {"plain": "differs", "race": "no thread of the block has written"},
    "missing_second_barrier": {"plain": "differs", "race": "race: .* with no barrier between"},
    "missing_syncwarp": {"plain": "differs", "race": "no thread of the block has written"},
    "missing_wait": {"plain": "poison", "race": "own cp.async .* has not waited for"},
    "missing_commit": {"plain": "poison", "race": "own cp.async .* has not waited for"},
    "wrong_wait_count": {"plain": "poison", "race": "own cp.async .* has not waited for"},
    "wait_without_barrier": {"plain": "differs", "race": "no thread of the block has written"},
    "uninitialised": {"plain": "poison", "race": "no thread of the block has written"},
    "out_of_bounds": {"plain": "byte 128[03] of a shared memory of 1280 bytes"},
    "small_overrun": {
        "plain": None,
        "race": "byte 1300 of a shared memory of 1300 bytes",
        "asan": "use-after-poison",
    },
    "global_out_of_bounds": {"plain": None, "race": "outside every tensor", "asan": "overflow"},
    "missing_lane": {"plain": "waits for it in __shfl_xor_sync with mask 0xffffffff"},
    "outside_lane": {"plain": "which is outside the mask|leaves its own lane 31 out"},
    "shuffle_from_outside": {"plain": "which is outside the mask"},
    "exited_lane": {"plain": "has returned, while lane 0 of its warp waits"},
    "different_collectives": {"plain": "__shfl_up_sync .* meets lane 0 in __shfl_xor_sync"},
    "divergent_barrier": {"plain": "meets threads that wait at another __syncthreads"},
    "early_return": {"plain": "has returned, while 5 threads wait for it at __syncthreads"},
    "misaligned_copy": {"plain": "the target of a cp.async must be aligned to 16 bytes"},
    "misaligned_ldmatrix": {"plain": "a row of ldmatrix must be aligned to 16 bytes"},
    "misaligned_vector": {"plain": "pointer to .*int4.* must be aligned to 16 bytes"},
    "named_deadlock": {"plain": "deadlock: threads 0-31 returned; threads 32-63 wait at barrier 2"},
    "named_count": {"plain": "barrier 3 of 32 threads meets threads that wait for 64"},
    "null_pointer": {"plain": "a null pointer to"},
    "register_array": {"plain": r"index 4 of an array 'int \[4\]'"},
    "blocks_write": {"plain": "differs", "race": "race: .* by another block"},
    "last_block": {"plain": None, "race": "race: .* written by another block .* no fence"},
}
# Kernels with undefined behavior, which AddressSanitizer does not check.
UNDEFINED = ("misaligned_vector", "null_pointer", "register_array")
POISON = 0x7FA17FA1


def run_planted(module: ModuleType, name: str, fixed: bool) -> Tensor:
    out = torch.zeros(64 + 512, dtype=torch.int32)
    if name not in ("last_block", "register_array"):
        out[64:] = torch.arange(512)
    module.set_regions([(out.data_ptr(), out.data_ptr() + 4 * out.numel())])
    try:
        module.planted(name, fixed, out.data_ptr())
    finally:
        module.set_regions([])  # memory of other tests is outside these regions
    return out[:64].clone()


def run_under_schedules(module: ModuleType, name: str, fixed: bool) -> list[Tensor]:
    results = []
    for schedule, seed, landing in simt.SCHEDULES:
        module.set_schedule(schedule, seed)
        module.set_landing(landing)
        results.append(run_planted(module, name, fixed))
    return results


@pytest.mark.parametrize(
    ("name", "build"),
    [(name, b) for name in PLANTED for b in BUILDS if b != "asan" or name not in UNDEFINED],
)
def test_planted_bugs_are_reported(name: str, build: str) -> None:
    module = simt.load("_simt_test", build)
    module.set_accumulation("fma")
    for schedule in SCHEDULE_NAMES:
        for landing in ("late", "early", "random"):
            module.set_schedule(schedule, 5)
            module.set_landing(landing)
            run_planted(module, name, fixed=True)
    good = run_under_schedules(module, name, fixed=True)
    assert all(torch.equal(good[0], one) for one in good)

    says = PLANTED[name].get(build, PLANTED[name]["plain"])
    if says in ("differs", "poison", None):
        results = run_under_schedules(module, name, fixed=False)
        if says == "differs":
            assert any(not torch.equal(results[0], one) for one in results)
        if says == "poison":
            assert (results[0] == POISON).any() and not (good[0] == POISON).any()
        return
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    with pytest.raises(RuntimeError, match=says) as raised:
        run_planted(module, name, fixed=False)
    if build != "asan":
        assert str(raised.value).startswith("kernel(int*), block (")
    run_planted(module, name, fixed=True)  # an error leaves no state behind


@pytest.mark.ci
def test_address_sanitizer_reports_planted_bugs() -> None:
    """The sanitizer's library must be loaded first, so this needs a process of its own."""
    env = {**os.environ, "SPECOPS_SIMT_BUILD": "asan", **simt.asan_environment()}
    command = [sys.executable, "-m", "pytest", "-rp", "-k", "planted_bugs and asan", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("PASSED") == len(PLANTED) - len(UNDEFINED)


def test_bank_conflicts_are_counted_on_request(machine: ModuleType) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    for stride, passes in [(16, 1), (144, 1), (128, 8), (64, 4), (32, 2)]:
        machine.reset_counters()
        machine.set_bank_conflicts(True)
        machine.strided_ldmatrix(stride, out.data_ptr())
        machine.set_bank_conflicts(False)
        counters = machine.counters()
        assert counters["bank_conflict"] == passes, stride
        assert "kernels.cu:" in counters["bank_conflict_site"]


def test_counters_count_instructions_and_bytes(machine: ModuleType) -> None:
    machine.reset_counters()
    out = torch.zeros(64, dtype=torch.int32)
    machine.cost("mma", 64, 3, out.data_ptr())
    machine.cost("barrier", 64, 5, out.data_ptr())
    counters = machine.counters()
    assert (counters["launches"], counters["blocks"]) == (2, 2)
    assert (counters["mmas"], counters["barriers"]) == (6, 5)
    assert counters["copied_bytes"] == 0
    run_planted(machine, "wrong_wait_count", fixed=True)
    threads, copies = 64, 2
    assert machine.counters()["copied_bytes"] == 16 * threads * copies


def test_invalid_settings_are_refused(machine: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"schedule must be one of in_order, .* got 'fifo'"):
        machine.set_schedule("fifo", 0)
    with pytest.raises(ValueError, match="landing must be one of late, early, random"):
        machine.set_landing("never")
    with pytest.raises(ValueError, match="accumulation must be one of fma, hopper, ampere"):
        machine.set_accumulation("exact")
    with pytest.raises(RuntimeError, match="a block must have 1 to 1024 threads"):
        machine.cost("nothing", 2048, 1, torch.zeros(2048, dtype=torch.int32).data_ptr())
