# SPDX-License-Identifier: Apache-2.0
"""Budgets of kernels and their hot loops, and the resources of an SM, in one table.

A kernel is judged by the first row whose pattern matches its name; none may spill, keep a stack
frame or own static shared memory. A kernel that keeps enough threads resident needs no own row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

ARCHS = ("80", "86", "89", "90a", "100a", "120")

# Architectures for which `make gates` compiles every kernel; ARCHS=all adds the others.
DEFAULT_ARCHS = ("80", "90a")

# A block has 163 KiB or more of shared memory there, 99 on the others.
LARGE = ("80", "90a", "100a")


@dataclass(frozen=True)
class Budget:
    """A row: the limits for the kernels of one pattern.

    Attributes:
        kernel: pattern of the name, without namespaces: `silu_mul_kernel<*`.
        registers: maximum per thread for an SM with 2,048 threads; scaled for others.
        threads: per block, by the launch bounds; None for any.
        smem_bytes: maximum dynamic shared memory that a launch requests.
        blocks_per_sm: how many blocks must fit an SM of 2,048 threads at once; a smaller one must
            hold one block.
        launched_on: architectures with enough shared memory.
        elsewhere: what happens on the other architectures, if any.
        spills: bytes known to be spilled on an architecture, to be fixed.
    """

    kernel: str
    registers: int
    threads: int | None = None
    smem_bytes: int = 0
    blocks_per_sm: int = 1
    launched_on: tuple[str, ...] = ARCHS
    elsewhere: str = ""
    spills: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Limits:
    """Resources of a streaming multiprocessor (CUDA C++ Programming Guide, compute capabilities).

    Attributes:
        smem_bytes: shared memory of an SM.
        block_smem_bytes: maximum that a block may request ("opt-in").
        card: the card that the meter's figures are for, with `sms` and its clock under load.
    """

    smem_bytes: int
    block_smem_bytes: int
    card: str
    sms: int
    ghz: float
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536


def _small(card: str, sms: int, ghz: float, blocks: int) -> Limits:
    return Limits(100 << 10, 99 << 10, card, sms, ghz, threads=1536, blocks=blocks)


LIMITS = {
    "80": Limits(164 << 10, 163 << 10, "A100 SXM", 108, 1.41),
    "86": _small("A10", 72, 1.695, 16),
    "89": _small("L40S", 142, 2.52, 24),
    "90a": Limits(228 << 10, 227 << 10, "H100 SXM", 132, 1.755),
    "100a": Limits(228 << 10, 227 << 10, "B200", 148, 1.85),
    "120": _small("RTX 5090", 170, 2.407, 24),
}

# The system reserves this much shared memory for every block.
RESERVED_SMEM_BYTES = 1 << 10


_FEWER_LEAVES = "its launcher asks the device, and has half as many leaves under way"
_OVERLAY = "its launcher asks the device, and puts what does not fit into the workspace"

# Shared memory of append_attention by head_dim: for tiles of 16, 32 and 64 rows. Every architecture
# has it; without a workspace, totals need more. 576 is the width of latents, whose tiles of 64 rows
# have their own budget.
_SMEM_16BIT = {
    64: (74624, 48000, 93056),
    96: (59264, 66432, 80768),
    128: (76672, 68480, 101248),
    256: (63360, 91008),
    512: (87936,),
    576: (98176,),
}
_SMEM_32BIT = {
    64: (62336, 88960),
    96: (62336, 72576),
    128: (64384, 93056),
    256: (88960,),
    512: (72576,),
}
_SMEM_8BIT = {  # half the bytes, so more tiles in flight
    64: (41856, 48000, 60288),
    96: (75648, 50048, 97152),
    128: (76672, 52096, 101248),
    256: (46976, 91008),
    512: (87936,),
}
# Spilled bytes by head_dim and tiles of 16 rows, where 168 registers are too few.
_SPILLS_16BIT = {key: {"100a": 28} for key in ((96, 2), (128, 2), (256, 1))}
_SPILLS_8BIT = {key: {"100a": 8} for key in ((96, 2), (128, 1), (128, 2))}
_SPILLS_STAMPED = {(128, 2): {"90a": 64, "100a": 28}}


def _attention_budgets(
    pattern: str,
    sizes: Mapping[int, tuple[int, ...]],
    spills: Mapping[tuple[int, int], Mapping[str, int]] | None = None,
) -> Iterator[Budget]:
    """Yield the budgets of kernels that keep a tile of rows in registers.

    An SM of sm_90a holds two blocks, or three if the tile has at most 32 rows.
    """
    for head_dim, by_rows in sizes.items():
        for tiles, smem_bytes in zip((1, 2, 4), by_rows, strict=False):
            # The outputs of 512 columns leave no registers for a third block.
            is_low = (tiles == 1 and head_dim < 512) or (
                tiles == 2 and head_dim <= 128 and "<float," not in pattern
            )
            fits_three = 3 * (smem_bytes + RESERVED_SMEM_BYTES) <= LIMITS["90a"].smem_bytes
            yield Budget(
                pattern.format(head_dim, tiles),
                registers=168 if is_low and fits_three else 255,
                threads=128,
                smem_bytes=smem_bytes,
                spills=(spills or {}).get((head_dim, tiles), {}),
            )


_NARROW_LATENTS = "its launcher asks the device, and takes tiles of 16 rows"

BUDGETS: tuple[Budget, ...] = (
    # common
    # batching
    Budget("gather_output_rows_kernel<*", registers=32, threads=128, blocks_per_sm=16),
    Budget("prepare_batch_kernel", registers=48, threads=256, smem_bytes=5248, blocks_per_sm=5),
    Budget("prepare_draft_batch_kernel", 40, threads=256, smem_bytes=6208, blocks_per_sm=6),
    # attention
    # Occupancy matters: the bytes in flight hide the latency of memory. Lanes of heads above 256
    # have 16 elements and twice the registers.
    Budget("rope_append_kv_kernel<*float16, true, 8, *", 64, threads=128, blocks_per_sm=8),
    Budget("rope_append_kv_kernel<float, true, 8, *", registers=80, threads=128, blocks_per_sm=6),
    Budget("rope_append_kv_kernel<*, false, 16, *", registers=168, threads=128, blocks_per_sm=3),
    Budget("rope_append_kv_kernel<*", registers=128, threads=128, blocks_per_sm=4),
    *_attention_budgets("append_attention_kernel<*float16, {}, {}, *", _SMEM_16BIT, _SPILLS_16BIT),
    # The state of its 64 rows fills the registers of an SM, so one block is enough.
    Budget(
        "append_attention_kernel<*float16, 576, 4, *",
        registers=255,
        threads=256,
        smem_bytes=199296,
        launched_on=("90a", "100a"),
        elsewhere=_NARROW_LATENTS,
    ),
    *_attention_budgets("append_attention_kernel<float, {}, {}, *", _SMEM_32BIT),
    *_attention_budgets("append_8bit_attention_kernel<*, {}, {}>", _SMEM_8BIT, _SPILLS_8BIT),
    # Same budgets as the kernel that it times.
    *_attention_budgets(
        "append_attention_stamped_kernel<*, {}, {}>", {128: _SMEM_16BIT[128]}, _SPILLS_STAMPED
    ),
    # One block plans for the whole batch, whose size its shared memory limits.
    Budget("plan_groups_kernel", registers=64, threads=128, smem_bytes=96 << 10),
    # dense
    Budget("linear_stream_kernel<*", 128, threads=128, smem_bytes=80 << 10, blocks_per_sm=2),
    # A wide tile lives in registers: one block of it, with 64 KiB and more in flight, fills an SM.
    Budget("linear_tile_kernel<*, 2, 64, *>", registers=255, threads=128, smem_bytes=96 << 10),
    Budget("linear_tile_kernel<*, 2, 128, *>", registers=255, threads=256, smem_bytes=96 << 10),
    Budget(
        "linear_tile_kernel<*, 4, 128, *>",
        registers=255,
        threads=256,
        smem_bytes=224 << 10,
        launched_on=("90a", "100a"),
        elsewhere="its launcher asks the device and takes tiles of 128 outputs",
    ),
    # Quantized weights: registers hold rounded rows and, for more rows, totals as well. Shared
    # memory fits two or three blocks of the first two rows, so up to 168 registers are allowed.
    # sm_100a needs 145 for fp8.
    Budget("linear_codes_kernel<Fp8Codes, *, CodeShape<4, 1, 1, *>", 152, 128, 89 << 10),
    Budget(
        "linear_codes_kernel<Int4Table, Int16Numbers, CodeShape<4, 1, 1, *>", 144, 128, 89 << 10
    ),
    Budget("linear_codes_kernel<*, CodeShape<4, 1, 1, *>", 128, threads=128, smem_bytes=89 << 10),
    Budget("linear_codes_kernel<Int4Codes, *, CodeShape<8, 1, 1, *>", 128, 256, 99 << 10),
    Budget(
        "linear_codes_kernel<*, CodeShape<8, 1, *>",
        registers=152,
        threads=256,
        smem_bytes=159 << 10,
        launched_on=("80", "90a", "100a"),
        elsewhere="its launcher asks the device and takes four warps",
    ),
    Budget("linear_codes_kernel<*", registers=255, threads=128, smem_bytes=99 << 10),
    Budget("round_rows_kernel<*", registers=64, threads=128, blocks_per_sm=8),
    # Sums of pieces and their scales, besides the totals; three blocks hide each other's latencies.
    # A smaller SM holds two, so threads may take more registers there.
    Budget("code_tile_kernel<*Int4Codes, Int8Numbers, *, false>*", 192, 128, 38 << 10, 3),
    Budget("code_tile_kernel<*Int8Numbers, *, false, false>*", 192, 128, 50 << 10, 3),
    Budget("code_tile_kernel<*", registers=255, threads=128, smem_bytes=70 << 10),
    # An expert also looks up its rows; shared memory fits two blocks of wide tiles.
    Budget("moe_codes_kernel<Fp8Codes, *, CodeShape<4, 1, 1, *>", 160, 128, 89 << 10),
    Budget("moe_codes_kernel<*, CodeShape<4, 1, 1, *>", 152, threads=128, smem_bytes=89 << 10),
    Budget("moe_codes_kernel<*", registers=176, threads=128, smem_bytes=89 << 10),
    Budget("moe_tile_kernel<*, 64>", 255, threads=128, smem_bytes=96 << 10),
    Budget("moe_tile_kernel<*, 128>", 255, threads=256, smem_bytes=96 << 10),
    Budget("moe_stream_kernel<*", 128, threads=128, smem_bytes=80 << 10, blocks_per_sm=2),
    Budget("moe_float_kernel<*", 128, threads=128, spills={"80": 8}),
    Budget("linear_float_kernel<*", 160, threads=128, smem_bytes=4 << 10, blocks_per_sm=3),
    Budget("rms_norm_kernel<*", registers=64, threads=1024, smem_bytes=128),
    Budget("mtp_input_kernel<*", registers=64, threads=1024, smem_bytes=128),
    Budget("gated_mul_kernel<*", registers=32, threads=256, blocks_per_sm=8),
    # linear_attention
    Budget("causal_conv1d_kernel<float16>", 128, threads=128, spills={"100a": 16}),
    # At most 94 elsewhere; sm_100a and sm_120 have more loads in flight, from three blocks.
    Budget("gated_delta_rule_kernel<*", registers=160, threads=128, blocks_per_sm=3),
    Budget("selective_state_update_kernel<*, 128>", registers=128, threads=128, blocks_per_sm=4),
    Budget("selective_state_update_kernel<*", registers=255, threads=128, blocks_per_sm=2),
    # sampling
    Budget("commit_kernel<*", registers=128),
    # Blocks have 256 threads when there are many rows; two such blocks fit an SM, with half of the
    # leaves in flight. With processors (true) a block holds two bits of every token, up to 121 KiB.
    *(
        Budget(kernel, 128, 512, 140704, launched_on=LARGE, elsewhere=_FEWER_LEAVES, spills=spills)
        for kernel, spills in (
            ("sample_kernel<*, false>", {}),
            ("verify_kernel<*, false, *>", {}),
            ("verify_stamped_kernel<*>", {"80": 8, "86": 44, "89": 44}),  # for measurements only
            ("top_logprobs_kernel<*, false>", {"86": 40, "89": 40}),
        )
    ),
    Budget(
        "sample_kernel<*, true>",
        registers=128,
        threads=512,
        smem_bytes=162 << 10,
        launched_on=LARGE,
        elsewhere=_OVERLAY,
    ),
    Budget(
        "verify_kernel<*, true, true>",
        registers=128,
        threads=512,
        smem_bytes=162 << 10,
        launched_on=LARGE,
        elsewhere=_OVERLAY,
    ),
    Budget(
        "top_logprobs_kernel<*, true>",
        registers=128,
        threads=512,
        smem_bytes=162 << 10,
        launched_on=LARGE,
        elsewhere=_OVERLAY,
        spills={"86": 20, "89": 20},
    ),
    # suffix_tree
    Budget("ngram_propose_kernel", registers=64, threads=512, smem_bytes=320, blocks_per_sm=2),
    Budget("ngram_share_kernel", registers=64, threads=512, smem_bytes=128),
    # Everything else: 512 threads of it fit the registers of an SM.
    Budget("*", registers=128),
)


def budget_of(kernel: str, budgets: tuple[Budget, ...] = BUDGETS) -> Budget:
    """Return the first row whose pattern matches."""
    return next(row for row in budgets if fnmatchcase(kernel, row.kernel))


def launch_problems(budgets: tuple[Budget, ...] = BUDGETS) -> Iterator[str]:
    """Yield a message for each wrong `launched_on`, and for each missing `elsewhere`."""
    for row in budgets:
        for arch, limits in LIMITS.items():
            fits = row.smem_bytes <= limits.block_smem_bytes
            if fits == (arch in row.launched_on):
                continue
            sizes = (
                f"{row.smem_bytes} bytes of shared memory, a block has {limits.block_smem_bytes}"
            )
            if fits:
                yield f"sm_{arch}: {row.kernel} has room to be launched, its row says it is not"
            else:
                yield f"sm_{arch}: {row.kernel} cannot be launched: it asks for {sizes}"
        if set(LIMITS) - set(row.launched_on) and not row.elsewhere:
            yield f"{row.kernel} is not launched everywhere, and its row does not say why"


def exceptions(budgets: tuple[Budget, ...] = BUDGETS) -> Iterator[str]:
    """Yield known cases of kernels that are not launched or that spill, with architectures."""
    for row in budgets:
        missing = [f"sm_{arch}" for arch in LIMITS if arch not in row.launched_on]
        if missing:
            yield (
                f"{row.kernel} asks for {row.smem_bytes} bytes of shared memory, too much for "
                f"{', '.join(missing)}: {row.elsewhere}"
            )
        for arch, number in row.spills.items():
            yield f"{row.kernel} spills up to {number} bytes on sm_{arch}"


def blocks_per_sm(limits: Limits, registers: int, threads: int, smem_bytes: int) -> int:
    """Return how many blocks an SM holds, as the occupancy calculator does.

    Registers are allocated to a warp in units of 256, within its quarter of the SM.
    """
    warps = -(-threads // 32)
    of_a_warp = -(-registers // 8) * 8 * 32
    quarter = limits.registers // 4
    by_registers = quarter // of_a_warp * 4 // warps
    by_smem = limits.smem_bytes // (smem_bytes + RESERVED_SMEM_BYTES)
    return min(limits.blocks, limits.threads // (warps * 32), by_registers, by_smem)


@dataclass(frozen=True)
class Way:
    """One path through a loop body, identified by the work that a warp does on it.

    Attributes:
        work: number of instructions of each kind; kinds are patterns of opcodes.
        times: how often this path occurs in one round of the loop's steady state; 0 for a rare
            path, by which the loop is told apart from similar loops.
    """

    work: Mapping[str, int]
    times: int = 1


@dataclass(frozen=True)
class Metered:
    """A hot loop and its budget.

    Attributes:
        kernel: pattern of the kernel's name.
        unit: unit of work, in words.
        ways: paths through the loop; each does one unit, or as many as the loop is unrolled by.
        instructions: maximum instructions per unit that a warp may issue, by architecture.
        warps: number of warps that work on a unit together.
        moved_bytes: memory that a unit must read; 0 if the cap is in flops.
        flops: flops of a unit.
        threads: threads of a block as launched; 0 for the launch bounds.
        smem_bytes: shared memory of a block as launched; None for the kernel's budget.
    """

    kernel: str
    unit: str
    ways: tuple[Way, ...]
    instructions: Mapping[str, int]
    warps: int
    moved_bytes: int = 0
    flops: int = 0
    threads: int = 0
    smem_bytes: int | None = None


def _per_arch(*most: int) -> dict[str, int]:
    return dict(zip(ARCHS, most, strict=True))


def _attention(
    head_dim: int,
    row_tiles: int,
    instructions: Mapping[str, int],
    cache: str = "bfloat16",
) -> Metered:
    """Return the loop over tiles of KV of append_attention for 16-bit queries."""
    tokens = 64 if head_dim <= 128 else 32
    is_latent = head_dim == 576  # values are the first 512 elements of the keys
    score_tiles, out_tiles = tokens // 32, (512 if is_latent else head_dim) // 32
    caches = 1 if is_latent else 2
    hmma = row_tiles * (head_dim // 16 * score_tiles + tokens // 16 * out_tiles)
    halves = 2 * row_tiles  # a lane holds two rows of each tile of 16
    is_8bit = cache != "bfloat16"
    # A token's row occupies a multiple of four vectors of 16 bytes.
    vectors = -(-head_dim * (1 if is_8bit else 2) // 64) * 4
    tile = {
        "HMMA*": hmma,
        "LDGSTS*": caches * tokens * vectors // 128,
        "MUFU.EX2*": halves * (2 * score_tiles + 1),
    }
    leaf_end = {**tile, "MUFU.EX2*": tile["MUFU.EX2*"] + 2 * halves}
    tiles = 256 // tokens  # per leaf
    kernel = f"append_attention_kernel<*float16, {head_dim}, {row_tiles}, true>"
    if is_8bit:
        kernel = f"append_8bit_attention_kernel<bfloat16, {cache}, {head_dim}, {row_tiles}>"
    return Metered(
        kernel,
        f"tile of {tokens} tokens, {16 * row_tiles} rows",
        (Way(tile, tiles - 1), Way(leaf_end)),
        instructions,
        warps=4,
        # An 8-bit head of a token has a scale of four bytes.
        moved_bytes=caches * tokens * (head_dim + 4 if is_8bit else 2 * head_dim),
    )


def _wide_latents(instructions: Mapping[str, int]) -> Metered:
    """Return the loop over latents for 64 rows, by eight warps.

    Each warp computes 16 rows by 16 tokens of scores and 64 rows by 64 columns of outputs. At the
    end of a leaf it reads and writes the chunk's outputs.
    """
    tile = {"HMMA*": 2 * 576 // 16 + 2 * 4 * 8, "LDGSTS*": 9, "MUFU.EX2*": 2 * (2 * 2 + 1)}
    leaf_end = {"MUFU.EX2*": tile["MUFU.EX2*"] + 2 * 8, "LDG.E.128*": 32, "STG.E.128*": 32}
    # The first iteration computes only scores, the last only outputs.
    first, last = {"HMMA*": 72, "MUFU.EX2*": 0}, {**tile, "HMMA*": 64, "LDGSTS*": 0}
    return Metered(
        "append_attention_kernel<*float16, 576, 4, true>",
        "tile of 32 tokens, 64 rows",
        (Way(tile, 7), Way({**tile, **leaf_end}), Way(first, 0), Way(last, 0)),
        instructions,
        warps=8,
        moved_bytes=32 * 1152,
    )


def _scan(kernel: str, sums: int, instructions: Mapping[str, int], most: int = 2) -> Metered:
    """Return the scan of a row of logits in leaves of 2 KiB: maxima, and `sums` sums of powers."""

    def work(number: int) -> dict[str, int]:
        return {"LDGSTS*": 4, "LDS.128": 4, "MUFU.EX2*": 32 * number}

    ways = [Way(work(sums))]
    if sums != most:
        ways.append(Way(work(most), times=0))
    return Metered(
        kernel,
        f"leaf of 2,048 bytes, {sums} sums",
        tuple(ways),
        instructions,
        warps=1,
        moved_bytes=2048,
        threads=256,
        smem_bytes=41 << 10,
    )


def _tiled(
    tiles: int,
    rows: int,
    copies: int,
    instructions: Mapping[str, int],
    *,
    aligned: bool = True,
    kernel: str = "",
) -> Metered:
    """Return the loop over stages of inputs of the kernel for many rows.

    aligned: rows of x are copied in vectors of 16 bytes.
    """
    return Metered(
        kernel
        or f"linear_tile_kernel<*float16, {tiles}, {rows}, {'true' if aligned else 'false'}>",
        f"stage of {64 if tiles == 2 else 32} inputs, {64 * tiles} x {rows}",
        (Way({"HMMA*": 64, "LDGSTS*": copies}),),
        instructions,
        warps=rows // 16,
        flops=64 * 4096 * (rows // 16),
    )


def _streamed(
    tiles: int, columns: int, instructions: Mapping[str, int], kernel: str = ""
) -> Metered:
    """Return the loop over stages of inputs of the kernel for few rows."""
    return Metered(
        kernel or f"linear_stream_kernel<*float16, {tiles}, {columns}>",
        f"stage of 64 inputs, {16 * tiles} x {8 * columns}",
        (Way({"HMMA*": 4 * tiles * columns, "LDGSTS*": 4 * tiles}),),
        instructions,
        warps=1,
        moved_bytes=2048 * tiles,
    )


# By the numbers of the rows: shared memory of a row of x in a stage, and the mma instructions that
# multiply 8 rows by 32 inputs of 16 outputs.
_NUMBERS = {
    "Int8Numbers": (144 + 48, "IMMA*", 1),
    "Int16Numbers": (2 * 144 + 48, "IMMA*", 2),
    "FloatNumbers<*float16>": (320, "HMMA*", 2),
    "FloatNumbers<float>": (3 * 320, "HMMA*", 6),
}


def _codes(
    weights: str,
    numbers: str,
    shape: tuple[int, int, int],
    instructions: Mapping[str, int],
    *,
    kernel: str = "linear_codes_kernel",
    halves: bool = False,
) -> Metered:
    """Return the loop over stages of 128 inputs of the kernel for quantized weights.

    Args:
        weights, numbers: the kernel's types of weights and of rounded rows.
        shape: splits, sides and columns of the kernel's `CodeShape`.
        instructions: maximum instructions per unit, by architecture.
        kernel: name of the kernel.
        halves: whether 16 inputs share a scale of the weight, instead of 128.
    """
    splits, sides, columns = shape
    row_bytes, mma, mmas = _NUMBERS[numbers]
    scales = 8 if halves else 1  # lines of 32 scales per stage
    copies = 4 if weights.startswith("Int4") else 8
    # A piece of a stage has its own sum, which warps share if they split the stages.
    pieces = 4 if numbers == "Int8Numbers" else 1
    rows = 8 * columns
    slot_bytes = 512 * copies + 128 * scales
    shared_sums = splits * sides * pieces * rows * 144 if splits > 1 else 0
    name = f"CodeShape<{splits}, {sides}, {columns}, {'true' if halves else 'false'}>"
    return Metered(
        f"{kernel}<{weights}, {numbers}, {name}*",
        f"stage of 128 inputs, 32 x {rows}",
        (
            Way(
                {
                    mma: (2 if halves else 1) * 8 * mmas * columns,
                    "LDGSTS*": copies + -(-scales // 4),
                }
            ),
        ),
        instructions,
        warps=1,
        moved_bytes=slot_bytes,
        smem_bytes=3 * splits * sides * slot_bytes + splits * rows * row_bytes + shared_sums,
    )


def _code_tiled(
    weights: str,
    numbers: str,
    instructions: Mapping[str, int],
    *,
    steps: int = 1,
    scaled: bool = True,
    offsets: bool = False,
) -> Metered:
    """Return the loop over stages of 128 inputs of the kernel for quantized weights and many rows.

    Args:
        weights, numbers: the kernel's types of weights and of rounded rows.
        instructions: maximum instructions per unit, by architecture.
        steps: number of 32 inputs in a piece.
        scaled: whether scales of the weight are by group of inputs.
        offsets: whether the weight has offsets.
    """
    planes = 2 if numbers == "Int16Numbers" else 1
    weight_copies = 4 if weights.startswith("Int4") else 8
    row_bytes = 8192 * planes + (2048 if offsets else 1024)
    lines = scaled + offsets  # copies of scales and of offsets
    form = ", ".join((str(steps), str(scaled).lower(), str(offsets).lower()))
    return Metered(
        f"code_tile_kernel<CodeTileShape<{weights}, {numbers}, {form}> >",
        "stage of 128 inputs, 32 x 64",
        (Way({"IMMA*": 64 * planes, "LDGSTS*": weight_copies + -(-row_bytes // 2048) + lines}),),
        instructions,
        warps=1,
        flops=2 * 128 * 32 * 64,
        smem_bytes=2 * (2048 * weight_copies + row_bytes + lines * 4 // steps * 512),
    )


def _delta_rule(instructions: Mapping[str, int]) -> Metered:
    """Return the loop over rows of gated_delta_rule, for rows whose state is not stored."""
    return Metered(
        "gated_delta_rule_kernel<*",
        "row of 128 keys, 32 columns",
        (Way({"BAR*": 3, "STG*": 1}),),
        instructions,
        warps=4,
        flops=7 * 128 * 32,  # an element of a state is scaled, read, changed and read again
    )


_MOE = "moe_codes_kernel"
_MOE_TILE = "moe_tile_kernel<*float16"

METERED: tuple[Metered, ...] = (
    _attention(64, 1, _per_arch(393, 391, 391, 433, 416, 405)),
    _attention(64, 2, _per_arch(569, 569, 569, 616, 598, 601)),
    _attention(64, 4, _per_arch(845, 846, 846, 893, 873, 903)),
    _attention(96, 1, _per_arch(409, 407, 407, 452, 439, 438)),
    _attention(96, 2, _per_arch(613, 613, 613, 662, 642, 664)),
    _attention(96, 4, _per_arch(925, 926, 926, 974, 947, 1006)),
    _attention(128, 1, _per_arch(481, 482, 482, 528, 507, 501)),
    _attention(128, 2, _per_arch(714, 714, 714, 766, 739, 765)),
    _attention(128, 4, _per_arch(1044, 1045, 1045, 1095, 1063, 1139)),
    _attention(256, 1, _per_arch(556, 552, 552, 601, 578, 579)),
    _attention(256, 2, _per_arch(688, 687, 687, 741, 714, 731)),
    _attention(512, 1, _per_arch(634, 634, 634, 708, 689, 703)),
    _attention(576, 1, _per_arch(534, 536, 536, 561, 522, 568)),
    _wide_latents(_per_arch(782, 784, 784, 811, 793, 888)),
    _attention(64, 1, _per_arch(493, 493, 493, 527, 511, 503), "KvInt8"),
    _attention(64, 2, _per_arch(734, 734, 734, 771, 769, 768), "KvInt8"),
    _attention(64, 4, _per_arch(1052, 1052, 1052, 1091, 1063, 1088), "KvInt8"),
    _attention(96, 1, _per_arch(629, 629, 629, 664, 661, 645), "KvInt8"),
    _attention(96, 2, _per_arch(881, 881, 881, 922, 937, 931), "KvInt8"),
    _attention(96, 4, _per_arch(1229, 1229, 1229, 1278, 1257, 1286), "KvInt8"),
    _attention(128, 1, _per_arch(660, 660, 660, 693, 685, 669), "KvInt8"),
    _attention(128, 2, _per_arch(924, 924, 924, 961, 975, 967), "KvInt8"),
    _attention(128, 4, _per_arch(1314, 1314, 1314, 1359, 1342, 1386), "KvInt8"),
    _attention(256, 1, _per_arch(728, 728, 728, 762, 765, 757), "KvInt8"),
    _attention(256, 2, _per_arch(890, 889, 889, 925, 929, 934), "KvInt8"),
    _attention(512, 1, _per_arch(1020, 1020, 1020, 1054, 1049, 1039), "KvInt8"),
    _attention(64, 1, _per_arch(506, 506, 506, 539, 522, 515), "KvE4M3"),
    _attention(64, 2, _per_arch(746, 747, 747, 783, 781, 778), "KvE4M3"),
    _attention(64, 4, _per_arch(1065, 1065, 1065, 1104, 1076, 1096), "KvE4M3"),
    _attention(96, 1, _per_arch(652, 652, 652, 688, 685, 669), "KvE4M3"),
    _attention(96, 2, _per_arch(905, 905, 905, 945, 961, 956), "KvE4M3"),
    _attention(96, 4, _per_arch(1254, 1254, 1254, 1305, 1281, 1309), "KvE4M3"),
    _attention(128, 1, _per_arch(687, 687, 687, 720, 713, 697), "KvE4M3"),
    _attention(128, 2, _per_arch(951, 952, 952, 990, 1002, 998), "KvE4M3"),
    _attention(128, 4, _per_arch(1343, 1343, 1343, 1388, 1371, 1425), "KvE4M3"),
    _attention(256, 1, _per_arch(758, 757, 757, 787, 791, 784), "KvE4M3"),
    _attention(256, 2, _per_arch(919, 918, 918, 953, 958, 959), "KvE4M3"),
    _attention(512, 1, _per_arch(1083, 1083, 1083, 1113, 1109, 1102), "KvE4M3"),
    _streamed(1, 1, _per_arch(53, 55, 55, 50, 51, 54)),
    _streamed(2, 1, _per_arch(71, 74, 74, 71, 65, 71)),
    _streamed(1, 2, _per_arch(65, 65, 65, 62, 60, 66)),
    _streamed(2, 2, _per_arch(85, 85, 85, 85, 85, 99)),
    _tiled(2, 64, 12, _per_arch(125, 125, 125, 125, 154, 500)),
    _tiled(2, 128, 8, _per_arch(121, 121, 121, 121, 121, 498)),
    _tiled(4, 128, 6, _per_arch(109, 109, 109, 109, 130, 457)),
    _tiled(2, 64, 8, _per_arch(160, 160, 160, 159, 177, 216), aligned=False),
    _tiled(2, 128, 4, _per_arch(156, 156, 156, 155, 151, 189), aligned=False),
    _tiled(2, 64, 12, _per_arch(125, 125, 134, 134, 163, 197), kernel=f"{_MOE_TILE}, 64>"),
    _tiled(2, 128, 8, _per_arch(121, 121, 130, 130, 131, 169), kernel=f"{_MOE_TILE}, 128>"),
    _streamed(2, 1, _per_arch(71, 71, 71, 71, 69, 75), "moe_stream_kernel<*float16>"),
    _codes("Int4Codes", "Int8Numbers", (4, 1, 1), _per_arch(429, 430, 430, 429, 411, 425)),
    _codes("Int4Codes", "Int8Numbers", (8, 1, 1), _per_arch(439, 439, 439, 439, 423, 437)),
    _codes("Int4Codes", "Int8Numbers", (8, 1, 2), _per_arch(738, 738, 738, 736, 668, 696)),
    _codes("Int4Codes", "Int8Numbers", (4, 1, 2), _per_arch(726, 726, 726, 724, 656, 684)),
    _codes("Int4Codes", "Int8Numbers", (2, 2, 2), _per_arch(471, 471, 471, 473, 462, 478)),
    _codes("Int4Codes", "Int8Numbers", (1, 4, 2), _per_arch(321, 321, 321, 280, 242, 243)),
    _codes("Int4Codes", "Int8Numbers", (1, 4, 4), _per_arch(587, 587, 587, 598, 538, 571)),
    _codes(
        "Int4Codes", "Int8Numbers", (1, 4, 4), _per_arch(982, 982, 982, 1000, 889, 938), halves=True
    ),
    _codes("Int4Codes", "Int16Numbers", (4, 1, 1), _per_arch(616, 615, 615, 626, 574, 591)),
    _codes("Int4Codes", "Int16Numbers", (4, 1, 2), _per_arch(948, 948, 948, 961, 881, 931)),
    _codes("Int4Codes", "Int16Numbers", (1, 4, 4), _per_arch(680, 680, 680, 699, 717, 782)),
    _codes(
        "Int4Codes",
        "Int16Numbers",
        (1, 4, 4),
        _per_arch(1173, 1173, 1173, 1191, 1193, 1266),
        halves=True,
    ),
    _codes("Int4Table", "Int8Numbers", (4, 1, 1), _per_arch(651, 651, 651, 650, 634, 646)),
    _codes("Int4Table", "Int8Numbers", (4, 1, 2), _per_arch(949, 949, 949, 948, 879, 903)),
    _codes("Int4Table", "Int8Numbers", (1, 4, 4), _per_arch(811, 811, 811, 822, 762, 799)),
    _codes(
        "Int4Table",
        "Int8Numbers",
        (1, 4, 4),
        _per_arch(1430, 1430, 1430, 1448, 1337, 1394),
        halves=True,
    ),
    _codes("Int4Table", "Int16Numbers", (4, 1, 1), _per_arch(831, 830, 830, 842, 789, 803)),
    _codes("Int4Table", "Int16Numbers", (4, 1, 2), _per_arch(1157, 1156, 1156, 1169, 1089, 1131)),
    _codes("Int4Table", "Int16Numbers", (1, 4, 4), _per_arch(904, 904, 904, 923, 933, 994)),
    _codes(
        "Int4Table",
        "Int16Numbers",
        (1, 4, 4),
        _per_arch(1621, 1621, 1621, 1639, 1649, 1714),
        halves=True,
    ),
    _codes("Int8Codes", "Int8Numbers", (4, 1, 1), _per_arch(392, 392, 392, 391, 372, 389)),
    _codes("Int8Codes", "Int8Numbers", (4, 1, 2), _per_arch(687, 687, 687, 686, 617, 649)),
    _codes("Int8Codes", "Int8Numbers", (1, 4, 4), _per_arch(493, 493, 493, 504, 463, 502)),
    _codes(
        "Int8Codes", "Int8Numbers", (1, 4, 4), _per_arch(790, 790, 790, 807, 727, 770), halves=True
    ),
    _codes("Int8Codes", "Int16Numbers", (4, 1, 1), _per_arch(532, 532, 532, 543, 486, 512)),
    _codes("Int8Codes", "Int16Numbers", (8, 1, 1), _per_arch(551, 550, 550, 563, 499, 523)),
    _codes("Int8Codes", "Int16Numbers", (8, 1, 2), _per_arch(884, 884, 884, 898, 799, 855)),
    _codes("Int8Codes", "Int16Numbers", (4, 1, 2), _per_arch(872, 872, 872, 886, 787, 843)),
    _codes("Int8Codes", "Int16Numbers", (2, 2, 2), _per_arch(590, 590, 590, 610, 540, 581)),
    _codes("Int8Codes", "Int16Numbers", (1, 4, 2), _per_arch(291, 291, 291, 308, 323, 345)),
    _codes("Int8Codes", "Int16Numbers", (1, 4, 4), _per_arch(606, 606, 606, 624, 632, 699)),
    _codes(
        "Int8Codes",
        "Int16Numbers",
        (1, 4, 4),
        _per_arch(987, 987, 987, 997, 999, 1082),
        halves=True,
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<*float16>", (4, 1, 1), _per_arch(626, 627, 627, 625, 610, 595)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<*float16>", (8, 1, 1), _per_arch(667, 668, 668, 665, 602, 595)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<*float16>", (8, 1, 2), _per_arch(732, 732, 732, 731, 715, 688)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<*float16>", (4, 1, 2), _per_arch(692, 692, 692, 691, 675, 660)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<*float16>", (1, 4, 4), _per_arch(643, 643, 643, 645, 630, 644)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<float>", (4, 1, 1), _per_arch(1331, 1331, 1331, 1327, 1302, 1306)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<float>", (4, 1, 2), _per_arch(2076, 2076, 2076, 2074, 2057, 2094)
    ),
    _codes(
        "Fp8Codes", "FloatNumbers<float>", (1, 4, 4), _per_arch(1454, 1454, 1454, 1457, 1443, 1555)
    ),
    _codes(
        "Int4Codes", "Int8Numbers", (4, 1, 1), _per_arch(458, 458, 458, 458, 409, 425), kernel=_MOE
    ),
    _codes(
        "Int4Codes",
        "Int8Numbers",
        (1, 4, 1),
        _per_arch(334, 336, 336, 287, 269, 265),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Int4Codes", "Int16Numbers", (4, 1, 1), _per_arch(615, 615, 615, 624, 570, 591), kernel=_MOE
    ),
    _codes(
        "Int4Codes",
        "Int16Numbers",
        (1, 4, 1),
        _per_arch(314, 315, 315, 332, 375, 380),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Int4Table", "Int8Numbers", (4, 1, 1), _per_arch(679, 679, 679, 679, 632, 646), kernel=_MOE
    ),
    _codes(
        "Int4Table",
        "Int8Numbers",
        (1, 4, 1),
        _per_arch(556, 558, 558, 509, 489, 486),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Int4Table", "Int16Numbers", (4, 1, 1), _per_arch(831, 830, 830, 841, 786, 803), kernel=_MOE
    ),
    _codes(
        "Int4Table",
        "Int16Numbers",
        (1, 4, 1),
        _per_arch(538, 538, 538, 555, 599, 599),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Int8Codes", "Int8Numbers", (4, 1, 1), _per_arch(421, 420, 420, 420, 370, 389), kernel=_MOE
    ),
    _codes(
        "Int8Codes",
        "Int8Numbers",
        (1, 4, 1),
        _per_arch(298, 297, 297, 250, 232, 228),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Int8Codes", "Int16Numbers", (4, 1, 1), _per_arch(532, 531, 531, 541, 484, 511), kernel=_MOE
    ),
    _codes(
        "Int8Codes",
        "Int16Numbers",
        (1, 4, 1),
        _per_arch(276, 276, 276, 294, 335, 345),
        kernel=_MOE,
        halves=True,
    ),
    _codes(
        "Fp8Codes",
        "FloatNumbers<*float16>",
        (4, 1, 1),
        _per_arch(625, 626, 626, 626, 609, 595),
        kernel=_MOE,
    ),
    _codes(
        "Fp8Codes",
        "FloatNumbers<float>",
        (4, 1, 1),
        _per_arch(1318, 1318, 1318, 1327, 1300, 1307),
        kernel=_MOE,
    ),
    _code_tiled("Int4Codes", "Int8Numbers", _per_arch(1170, 1200, 1200, 1015, 1020, 1021)),
    _code_tiled(
        "Int4Codes", "Int8Numbers", _per_arch(1748, 1748, 1748, 1538, 1545, 1539), offsets=True
    ),
    _code_tiled("Int4Codes", "Int16Numbers", _per_arch(705, 705, 705, 603, 612, 688), steps=4),
    _code_tiled(
        "Int4Codes", "Int16Numbers", _per_arch(899, 899, 899, 802, 810, 883), steps=4, offsets=True
    ),
    _code_tiled("Int4Table", "Int8Numbers", _per_arch(1415, 1415, 1415, 1236, 1242, 1245)),
    _code_tiled("Int4Table", "Int16Numbers", _per_arch(922, 922, 922, 827, 837, 892), steps=4),
    _code_tiled("Int8Codes", "Int8Numbers", _per_arch(854, 854, 854, 696, 692, 704), scaled=False),
    _code_tiled("Int8Codes", "Int8Numbers", _per_arch(1139, 1139, 1139, 974, 975, 980)),
    _code_tiled(
        "Int8Codes", "Int16Numbers", _per_arch(591, 591, 591, 489, 494, 580), steps=4, scaled=False
    ),
    _code_tiled("Int8Codes", "Int16Numbers", _per_arch(664, 664, 664, 567, 572, 648), steps=4),
    _code_tiled("Int8Codes", "Int16Numbers", _per_arch(1937, 1937, 1937, 1587, 1592, 1610)),
    _delta_rule(_per_arch(436, 436, 436, 440, 412, 403)),
    # Two sums are bound by powers of two: on 100a and 120 the detour through shared memory costs
    # more instructions than three-input maxima saved there. A deeper ring costs verify three more
    # on both.
    _scan("verify_kernel<bfloat16, false, false>", 0, _per_arch(86, 155, 155, 79, 72, 80)),
    _scan("verify_kernel<bfloat16, false, false>", 1, _per_arch(271, 338, 338, 267, 261, 268)),
    _scan("verify_kernel<bfloat16, false, false>", 2, _per_arch(450, 517, 517, 444, 438, 445)),
    _scan("verify_kernel<bfloat16, false, true>", 0, _per_arch(155, 155, 155, 80, 125, 142)),
    _scan("verify_kernel<bfloat16, false, true>", 2, _per_arch(515, 515, 515, 442, 438, 445)),
    _scan("sample_kernel<bfloat16, false>", 0, _per_arch(155, 155, 155, 80, 124, 141)),
    _scan("sample_kernel<bfloat16, false>", 2, _per_arch(517, 517, 517, 445, 435, 442)),
    _scan(
        "top_logprobs_kernel<bfloat16, false>", 1, _per_arch(336, 336, 336, 260, 273, 290), most=1
    ),
)


# Kernels without rows: the stamped kernel has the loops of the kernel that it times.
UNMETERED = "append_attention_stamped_kernel<*"


def metered_in(kernel: str, rows: tuple[Metered, ...] = METERED) -> Iterator[Metered]:
    """Return the loops of a kernel that have a budget."""
    return (row for row in rows if fnmatchcase(kernel, row.kernel))
