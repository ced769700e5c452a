# SPDX-License-Identifier: Apache-2.0
"""The one table of what kernels may take, and what an SM has.

A kernel is judged by the first row whose pattern fits its name; none may spill, keep a stack frame
or own static shared memory. A kernel that keeps enough threads resident needs no row of its own.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Budget:
    """A row: what the kernels of one pattern may take.

    Attributes:
        kernel: pattern of the name, without namespaces: `silu_mul_kernel<*`.
        registers: a thread's most.
        threads: of a block, as the launch bounds say; None: whatever they say.
        smem_bytes: the most dynamic shared memory that a launch asks for.
        blocks_per_sm: how many blocks must fit an SM at once, on each architecture below.
        launched_on: architectures with the shared memory for it; its launcher asks the device.
    """

    kernel: str
    registers: int
    threads: int | None = None
    smem_bytes: int = 0
    blocks_per_sm: int = 1
    launched_on: tuple[str, ...] = ("80", "90a")


@dataclass(frozen=True)
class Limits:
    """What a streaming multiprocessor has (CUDA C++ Programming Guide, compute capabilities)."""

    smem_bytes: int
    block_smem_bytes: int
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536


LIMITS = {
    "80": Limits(smem_bytes=164 << 10, block_smem_bytes=163 << 10),
    "90a": Limits(smem_bytes=228 << 10, block_smem_bytes=227 << 10),
}

# Of the shared memory, the system keeps this much of every block.
RESERVED_SMEM_BYTES = 1 << 10

BUDGETS = (
    # common
    # batching
    Budget("gather_output_rows_kernel<*", registers=32, threads=128, blocks_per_sm=16),
    Budget("prepare_batch_kernel", registers=48, threads=256, smem_bytes=5248, blocks_per_sm=5),
    Budget("prepare_draft_batch_kernel", 40, threads=256, smem_bytes=6208, blocks_per_sm=6),
    # attention
    # By occupancy: what is in flight hides the latency of memory.
    Budget("rope_append_kv_kernel<*float16, true>", registers=64, threads=128, blocks_per_sm=8),
    Budget("rope_append_kv_kernel<float, true>", registers=80, threads=128, blocks_per_sm=6),
    Budget("rope_append_kv_kernel<*", registers=128, threads=128, blocks_per_sm=4),
    # A tile of rows lives in registers; two blocks of it fill an SM of 90a, one an SM of 80.
    Budget("append_attention_kernel<*", registers=255, threads=128, smem_bytes=112 << 10),
    # dense
    Budget("linear_stream_kernel<*", 128, threads=128, smem_bytes=80 << 10, blocks_per_sm=2),
    # A wide tile lives in registers: one block of it, with 64 KiB and more in flight, fills an SM.
    Budget("linear_tile_kernel<*, 2, 64>", registers=255, threads=128, smem_bytes=96 << 10),
    Budget("linear_tile_kernel<*, 2, 128>", registers=255, threads=256, smem_bytes=96 << 10),
    Budget(
        "linear_tile_kernel<*, 4, 128>",
        registers=255,
        threads=256,
        smem_bytes=224 << 10,
        launched_on=("90a",),
    ),
    Budget("linear_float_kernel<*", 160, threads=128, smem_bytes=4 << 10, blocks_per_sm=3),
    Budget("rms_norm_kernel<*", registers=64, threads=1024, smem_bytes=128),
    Budget("mtp_input_kernel<*", registers=64, threads=1024, smem_bytes=128),
    Budget("silu_mul_kernel<*", registers=32, threads=256, blocks_per_sm=8),
    # sampling: 256 threads a block where rows are many, two such blocks to an SM. Under processors
    # (true) a block holds two bits of every token of the largest vocabulary, 448 * 1024.
    Budget("sample_kernel<*, false>", registers=128, threads=512, smem_bytes=41 << 10),
    Budget("verify_kernel<*, false, *>", registers=128, threads=512, smem_bytes=41 << 10),
    Budget("top_logprobs_kernel<*, false>", registers=128, threads=512, smem_bytes=41 << 10),
    Budget("sample_kernel<*, true>", registers=128, threads=512, smem_bytes=162 << 10),
    Budget("verify_kernel<*, true, true>", registers=128, threads=512, smem_bytes=162 << 10),
    Budget("top_logprobs_kernel<*, true>", registers=128, threads=512, smem_bytes=162 << 10),
    # suffix_tree
    Budget("ngram_propose_kernel", registers=64, threads=512, smem_bytes=320, blocks_per_sm=2),
    Budget("ngram_share_kernel", registers=64, threads=512, smem_bytes=128),
    # Everything else: 512 threads of it fit the registers of an SM.
    Budget("*", registers=128),
)


def budget_of(kernel: str, budgets: tuple[Budget, ...] = BUDGETS) -> Budget:
    """The first row whose pattern fits."""
    return next(row for row in budgets if fnmatchcase(kernel, row.kernel))


def blocks_per_sm(limits: Limits, registers: int, threads: int, smem_bytes: int) -> int:
    """How many blocks an SM holds: what the occupancy calculator says.

    Registers are given to a warp in units of 256, within its quarter of the SM.
    """
    warps = -(-threads // 32)
    of_a_warp = -(-registers // 8) * 8 * 32
    quarter = limits.registers // 4
    by_registers = quarter // of_a_warp * 4 // warps
    by_smem = limits.smem_bytes // (smem_bytes + RESERVED_SMEM_BYTES)
    return min(limits.blocks, limits.threads // (warps * 32), by_registers, by_smem)
