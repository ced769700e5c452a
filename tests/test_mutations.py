# SPDX-License-Identifier: Apache-2.0
"""Mutation tests: bugs are planted in the real kernels one by one, and tests must notice them.

The tests run in the interpreter. Bugs in the rules of verification are planted in the CPU kernels,
for the tests of the exact distribution. A mutation that no longer applies fails: plant a
similar bug in the new code instead. build/mutations lists the test and tier that noticed each.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
import simt

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "all")
TABLE = simt.ROOT / "build" / "mutations" / f"{WORKER}.md"
Run = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # path below csrc
    old: str  # occurs in the file once
    new: str
    tests: str  # file of tests, and a pytest -k expression
    # Build that shows the bug: "plain" (compiled fast, without checks), "race" (with all checks),
    # "asan", "scripted" (exact distributions) or "program".
    build: str = "plain"


LINEAR = "test_dense.py linear and not wide_output"
LINEAR_RACE = "test_dense.py test_linear_rows_keep_their_bits or test_linear_kernels_keep"
CODES = "test_quantized.py bits or extreme"
TILED_CODES = "test_quantized.py rounding_many_rows_once"
FP8 = "test_quantized.py fp8"
RMS_NORM = "test_dense.py rms_norm"
DRAFT_ROWS = "test_draft_batch.py prepare or advance or keep"
MTP_INPUT = "test_draft_batch.py input or halves"
PREPARE = "test_batching.py prepare or rows or each_other"
INPUT_IDS = "test_batching.py input_ids and not reports"
ROPE = "test_attention.py rope"
ATTENTION = "test_attention.py append_attention"
ATTENTION_RACE = "test_attention.py does_not_depend_on_the_workspace"
BYTES = "test_attention_8bit.py reference or head_shape or decode_rows"
LATENT = "test_attention_latent.py reference or decode_rows or rope_append_latent"
WIDE = "test_attention_latent.py do_not_depend_on_the_tile"
SINKS = "test_attention_sinks.py reference or formula or sms"
NONCAUSAL = "test_attention_noncausal.py reference"
MASK = "test_attention_mask.py reference or tree or chunks"
COMMIT = "test_commit.py test"
SAMPLE = "test_sampling.py sample or row_identity"
SAMPLE_RACE = "test_sampling.py row_identity"
DRAFT_PROB_ROWS = "test_verify.py rows_of_draft_probs"
TOP_LOGPROBS = "test_sampling.py top_logprobs"
PROCESSORS = "test_logits_processors.py edits or ends_of_words or retains_the_smallest or reference"
TREES = "test_trees.py copy_kv or node_is_a_row or compaction or states_of"
OVERLAYS = "test_logits_processors.py in_the_workspace"
CONV = "test_linear_attention.py conv"
STATES = "test_linear_attention.py delta or states"
GATE = "test_dense.py output_gate"
ROUTE = "test_moe.py route or lowest or router"
TILED_EXPERTS = "test_moe.py rounding_rows_of_experts or beyond_a_warp"
EXPERTS = "test_moe.py sort or combine or alone or many_rows or out_of_range"
TYPICAL = "test_logits_processors.py typical and not large and not nearest"
TYPICAL_TIES = "test_logits_processors.py nearest and simt"
TYPICAL_RACE = "test_logits_processors.py retains_the_smallest"
NGRAM = "test_ngram.py not distance and not invalid"

MUTATIONS = [
    Mutation(
        "of equal experts the last one is chosen",
        "moe/moe_route.cuh",
        "(other_key == key && other < id)",
        "(other_key == key && other > id)",
        ROUTE,
    ),
    Mutation(
        "an expert may be chosen twice",
        "moe/moe_route.cuh",
        "if (best.id % kWarpSize == lane) chosen |=",
        "if (best.id % kWarpSize == 0) chosen |=",
        ROUTE,
    ),
    Mutation(
        "a group counts by its best expert alone",
        "moe/moe_route.cuh",
        "choice_key(__fadd_rn(best, second))",
        "choice_key(best)",
        ROUTE,
    ),
    Mutation(
        "weights are made of biased scores",
        "moe/moe_route.cuh",
        "float weight = row.scores[first + lane];",
        "float weight = row.keys[first + lane];",
        ROUTE,
    ),
    Mutation(
        "the pairs of a warp's lanes change places",
        "moe/moe_sort.cuh",
        "int place = begin + __popc(lanes & ((1u << lane) - 1u));",
        "int place = begin + __popc(lanes >> lane) - 1;",
        EXPERTS,
    ),
    Mutation(
        "a warp's pairs take the places of the one before it",
        "moe/moe_sort.cuh",
        "if (other < warp) place += sums[other];",
        "if (other + 1 < warp) place += sums[other];",
        EXPERTS,
    ),
    Mutation(
        "a tile goes on into the rows of the next expert",
        "gemm/expert_rows.cuh",
        "int rows = min(__shfl_sync(kFullMask, end, owner) - at, kTileRows);",
        "int rows = min(static_cast<int>(params.rows) - at, kTileRows);",
        EXPERTS,
    ),
    Mutation(
        "a row that does not exist is read",
        "gemm/tile.cuh",
        "x_ends[i] = start == nullptr ? 0 : x_ends[0];",
        "x_ends[i] = x_ends[0];",
        EXPERTS,
    ),
    Mutation(
        "an expert's scales are those of the first",
        "gemm/experts.h",
        "weight.scales += e * params.scales;",
        "weight.scales += 0 * params.scales;",
        EXPERTS,
    ),
    Mutation(
        "the shared expert is left out",
        "moe/moe_combine.cuh",
        "if (params.shared != nullptr) total =",
        "if (params.rows < 0) total =",
        EXPERTS,
    ),
    Mutation(
        "a convolution looks at what the step has kept already",
        "linear_attention/causal_conv1d.cuh",
        "back >= 0 ? x + back * params.x_stride : kept",
        "back > 0 ? x + back * params.x_stride : kept",
        CONV,
    ),
    Mutation(
        "what a slot keeps begins with the step, not with the text",
        "linear_attention/causal_conv1d.cuh",
        "kept[(range.begin + i) % window * channels] =",
        "kept[i % window * channels] =",
        CONV,
    ),
    Mutation(
        "a text that begins takes over the state of its slot",
        "linear_attention/gated_delta_rule.cuh",
        "if (range.begin > 0 && has_column) {",
        "if (has_column) {",
        STATES,
    ),
    Mutation(
        "a step goes on behind the drafts that were rejected",
        "linear_attention/gated_delta_rule.cuh",
        "const float* from = state_of(range.begin - 1);",
        "const float* from = state_of(range.begin);",
        STATES,
    ),
    Mutation(
        "only the state behind the last row is kept",
        "linear_attention/gated_delta_rule.cuh",
        "if (row + window < range.end) continue;",
        "if (row + 1 < range.end) continue;",
        STATES,
    ),
    Mutation(
        "a correction is made before the state decays",
        "linear_attention/gated_delta_rule.cuh",
        "state[i] = __fmul_rn(decay, state[i]);",
        "state[i] = __fmul_rn(range.begin < 0 ? decay : 1.0f, state[i]);",
        STATES,
    ),
    Mutation(
        "a key channel has the decay of another one",
        "linear_attention/gated_delta_rule.cuh",
        "decay = shared.decay[i * kStateLanes + lane];",
        "decay = shared.decay[i * kStateLanes];",
        STATES,
    ),
    Mutation(
        "a head has the decays of the first head",
        "linear_attention/gated_delta_rule.cuh",
        "kHasChannels ? head * dim + thread : head;",
        "kHasChannels ? thread : head;",
        STATES,
    ),
    Mutation(
        "an input is added before the state decays",
        "linear_attention/selective_state_update.cuh",
        "__fmaf_rn(shared.b[place], scaled, __fmul_rn(decay, state[i]));",
        "__fmul_rn(decay, __fmaf_rn(shared.b[place], scaled, state[i]));",
        STATES,
    ),
    Mutation(
        "all heads read the first group",
        "linear_attention/selective_state_update.cuh",
        "int64_t group = head / (heads / params.num_groups) * dim;",
        "int64_t group = head / heads * dim;",
        STATES,
    ),
    Mutation(
        "a head is gated by the one before it",
        "dense/output_gate.cuh",
        "row * params.gate_stride + head * params.gate_dim;",
        "row * params.gate_stride + max(head - 1, int64_t{0}) * params.gate_dim;",
        GATE,
    ),
    Mutation(
        "values are copied from keys",
        "attention/copy_kv/copy_kv.cuh",
        "part < pieces ? params.k_cache : params.v_cache",
        "params.k_cache",
        TREES,
    ),
    Mutation(
        "values of an accepted path stay where they are",
        "attention/compact_kv/compact_kv.h",
        "return params.v_cache == nullptr ? 1 : 2;",
        "return 1;",
        TREES,
    ),
    Mutation(
        "a chain has its own pages from the end of its path on",
        "batching/tree_chains.cpp",
        "(root_ + 1 + static_cast<int64_t>(in_place)) / params_.page_size",
        "(root_ + static_cast<int64_t>(path_.size())) / params_.page_size",
        TREES,
    ),
    Mutation(
        "a path's keys are taken from where the first chain's lie",
        "batching/tree_chains.cpp",
        "root_ + 1 + path_[token - root_ - 1]",
        "token",
        TREES,
    ),
    Mutation(
        "the row of a rejected draft is run",
        "batching/prepare_draft_batch.h",
        ".end = len - 1}",
        ".end = len}",
        DRAFT_ROWS,
    ),
    Mutation(
        "a module reads the token at its row, not the one after it",
        "dense/mtp_input.h",
        "int64_t index = position + params.ahead;",
        "int64_t index = position + params.ahead - 1;",
        MTP_INPUT,
    ),
    Mutation(
        "no barrier between the rows of one tile of requests and the sums of the next",
        "batching/advance_draft_batch.cuh",
        "    }\n    __syncthreads();\n  }\n  if (!has_rows) return;",
        "    }\n  }\n  if (!has_rows) return;",
        DRAFT_ROWS,
        "race",
    ),
    Mutation(
        "the oldest of the kept states is one too old",
        "batching/keep_hidden_rows.cuh",
        "if (position < begin) return;",
        "if (position <= begin) return;",
        DRAFT_ROWS,
    ),
    Mutation(
        "the wait allows one group more than the ring holds",
        "gemm/stream.cuh",
        "ptx::cp_async_wait<kDepth - 2>();",
        "ptx::cp_async_wait<kDepth - 1>();",
        LINEAR,
    ),
    Mutation(
        "the same in the tiled kernel",
        "gemm/tile.cuh",
        "ptx::cp_async_wait<Shape::kStages - 2>();",
        "ptx::cp_async_wait<Shape::kStages - 1>();",
        LINEAR,
    ),
    Mutation(
        "no barrier between a stage's arrival and its use",
        "gemm/tile.cuh",
        "ptx::cp_async_wait<Shape::kStages - 2>();\n        __syncthreads();",
        "ptx::cp_async_wait<Shape::kStages - 2>();",
        LINEAR,
    ),
    Mutation(
        "two rows of the A fragment exchanged",
        "gemm/fragments.cuh",
        "{w.x, w.y, w.z, w.w}",
        "{w.y, w.x, w.z, w.w}",
        LINEAR,
    ),
    Mutation(
        "two inputs of the packed A fragment exchanged",
        "dense/linear.cuh",
        "make_uint4(low.x, high.x, low.y, high.y)",
        "make_uint4(low.y, high.x, low.x, high.y)",
        LINEAR,
    ),
    Mutation(
        "the halves of the B fragment exchanged",
        "gemm/fragments.cuh",
        "make_uint2(x.z, x.w)",
        "make_uint2(x.w, x.z)",
        LINEAR,
    ),
    Mutation(
        "leaves folded in another order by one of the schedules",
        "gemm/tile.cuh",
        "const float4& more = leaves[i][leaf];",
        "const float4& more = leaves[i][plan.leaves - leaf];",
        LINEAR,
    ),
    Mutation(
        "the counter of a split tile is not reset",
        "common/device.cuh",
        "if (is_last) *counter = 0;",
        "",
        LINEAR,
    ),
    Mutation(
        "a leaf is counted before every warp has stored its part",
        "gemm/tile.cuh",
        "  __threadfence();\n  __syncthreads();\n  bool is_last",
        "  __threadfence();\n  bool is_last",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "no barrier before the leaves are added",
        "gemm/stream.cuh",
        "  __syncthreads();\n  if (unit >= units) return;",
        "  if (unit >= units) return;",
        LINEAR,
    ),
    Mutation(
        "the ring is overwritten while other lanes read it",
        "gemm/stream.cuh",
        "  ptx::cp_async_wait<0>();\n  __syncwarp(kFullMask);",
        "  ptx::cp_async_wait<0>();",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "a row past the last is read (and its result dropped)",
        "gemm/stream.cuh",
        "rows[c] = row < params.rows ?",
        "rows[c] = row <= params.rows ?",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "the same in the tiled kernel",
        "gemm/tile.cuh",
        "min(x_row + i * kRowsApart, place.rows_left - 1);",
        "min(x_row + i * kRowsApart, place.rows_left);",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "a tile of weights past the last is read",
        "gemm/tile.cuh",
        "weight_groups(params.weight.num_outputs) * 2 - 1);",
        "weight_groups(params.weight.num_outputs) * 2);",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "inputs past the last are read by chunks",
        "gemm/tile.cuh",
        "x_ends[0] = min(end_input, num_inputs) - x_chunk * 8;",
        "x_ends[0] = end_input - x_chunk * 8;",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "a row too many is written",
        "gemm/stream.cuh",
        "if (row >= params.rows || output >= params.weight.num_outputs) continue;",
        "if (row > params.rows || output >= params.weight.num_outputs) continue;",
        LINEAR_RACE,
        "race",
    ),
    Mutation(
        "a gate and its up exchanged",
        "gemm/stream.cuh",
        "finish_gated<T>(params, output / 2, sum_of(item), sum_of(item + 1));",
        "finish_gated<T>(params, output / 2, sum_of(item + 1), sum_of(item));",
        LINEAR,
    ),
    Mutation(
        "gates are not rounded before they are multiplied",
        "gemm/finish.cuh",
        "    gate = rounded.x;\n",
        "",
        LINEAR,
    ),
    Mutation(
        "every up has the bias of a gate",
        "gemm/finish.cuh",
        "gates[params.weight.num_outputs / 2 + column]",
        "gates[column]",
        LINEAR,
    ),
    Mutation(
        "a group's largest input is that of half of it",
        "gemm/code_rows.cuh",
        "peak = ptx::max_nan(peak, __shfl_xor_sync(kFullMask, peak, 2));",
        "",
        CODES,
    ),
    Mutation(
        "inputs past the last are read as integers",
        "gemm/code_rows.cuh",
        "load_chunk(row + at, last - at, aligned)",
        "load_chunk(row + at, kChunk<T>, aligned)",
        CODES,
    ),
    Mutation(
        "an integer of 2^15 wraps",
        "gemm/code_rows.cuh",
        "if constexpr (kIsWide) codes[i] = min(codes[i], kWholeBits + 32767u);",
        "",
        CODES,
    ),
    Mutation(
        "inputs are taken in their own order",
        "gemm/code_rows.cuh",
        "if (params.weight.input_order != nullptr) {",
        "if (params.rows < 0) {",
        CODES,
    ),
    Mutation(
        "what is left of a float32 is rounded away",
        "gemm/code_rows.cuh",
        "value = is_finite ? __fsub_rn(value, __uint_as_float(top)) : 0.0f;",
        "value = 0.0f;",
        FP8,
    ),
    Mutation(
        "a table's values are those of other codes",
        "gemm/codes.cuh",
        "weight.code_values[i ^ 8]",
        "weight.code_values[i]",
        CODES,
    ),
    Mutation(
        "codes of fp8 are half as large beside bfloat16",
        "gemm/codes.cuh",
        "kUnit = 0x7b807b80u",
        "kUnit = 0x7b007b00u",
        FP8,
    ),
    Mutation(
        "both halves of a step are in its first piece",
        "gemm/code_product.cuh",
        "if (Shape::kHalves && lane % 4 / 2 != half) b = make_uint2(0, 0);",
        "",
        CODES,
    ),
    Mutation(
        "all pieces of a stage have the scale of the first",
        "gemm/code_product.cuh",
        "(plan.lines == 1 ? 0 : piece) * kWeightGroup",
        "0 * piece * kWeightGroup",
        CODES,
    ),
    Mutation(
        "pieces of a tile that share a scale have those of later groups",
        "gemm/code_tile.cuh",
        "plan.lines == 1 ? 0u : static_cast<uint32_t>(2 * line)",
        "static_cast<uint32_t>(2 * line)",
        TILED_CODES,
    ),
    Mutation(
        "a warp of a tile reads rows before others have copied them",
        "gemm/code_tile.cuh",
        "__syncthreads();\n    unsigned char* later",
        "unsigned char* later",
        TILED_CODES,
    ),
    Mutation(
        "offsets are multiplied by the sums of a piece's first step",
        "gemm/code_tile.cuh",
        "i < kPieceSteps; ++i) {\n        float more[4];",
        "i < 1; ++i) {\n        float more[4];",
        TILED_CODES,
    ),
    Mutation(
        "experts have no incomplete tiles of rounded rows",
        "gemm/code_tiles.cu",
        "params.expert_indptr == nullptr",
        "params.rows > 0",
        TILED_EXPERTS,
    ),
    Mutation(
        "rounded rows are those of another tile",
        "gemm/code_tiles.cuh",
        "rounded_tile(params, index / stages)",
        "rounded_tile(params, index / stages / 2)",
        TILED_EXPERTS,
    ),
    Mutation(
        "the last group's scale is read past its end",
        "gemm/code_product.cuh",
        "min(input / plan.group, scale_groups - 1)",
        "input / plan.group",
        CODES,
        "asan",
    ),
    Mutation(
        "offsets count for the first piece alone",
        "gemm/code_product.cuh",
        "sum += of.sums(piece * halves + i)[row];",
        "sum += of.sums(i)[row];",
        CODES,
    ),
    Mutation(
        "warps' stages are added in another order",
        "gemm/code_product.cuh",
        "if (first + other < ring.stages) add_stage(totals, first + other, other, slot);",
        "int mine = (other + warp) % kSplits;\n"
        "        if (first + mine < ring.stages) add_stage(totals, first + mine, mine, slot);",
        CODES,
    ),
    Mutation(
        "no barrier between the warps' sums and their total",
        "gemm/code_product.cuh",
        "      if (first + split < ring.stages) multiply(slot, end);\n      __syncthreads();",
        "      if (first + split < ring.stages) multiply(slot, end);",
        CODES,
    ),
    Mutation(
        "outputs side by side have the scales of the first",
        "gemm/code_product.cuh",
        "int of_warp = other * Shape::kSides + side;",
        "int of_warp = other * Shape::kSides;",
        CODES,
    ),
    Mutation(
        "every up has the scale of a gate",
        "gemm/code_product.cuh",
        "output / 2 + output % 2 * half",
        "output / 2",
        CODES,
    ),
    Mutation(
        "no barrier between the warps' sums and their total",
        "dense/norm_row.cuh",
        "= squares;\n  __syncthreads();",
        "= squares;",
        RMS_NORM,
    ),
    Mutation(
        "the last step of the warp's sum is left out",
        "dense/norm_row.cuh",
        "for (int lanes = kWarpSize / 2; lanes > 0;",
        "for (int lanes = kWarpSize / 2; lanes > 1;",
        RMS_NORM,
    ),
    Mutation(
        "the tail of a row is read as a whole chunk",
        "dense/norm_row.cuh",
        "held[i] = load_chunk(x + col, count(col), aligned);",
        "held[i] = load_chunk(x + col, kChunk<T>, aligned);",
        RMS_NORM,
    ),
    Mutation(
        "no barrier between a tile and the rows that read it",
        "batching/prepare_batch.cuh",
        "    __syncthreads();\n\n    // The rows of the slice",
        "\n    // The rows of the slice",
        PREPARE,
    ),
    Mutation(
        "no barrier between the scan and its use",
        "batching/prepare_batch.cuh",
        "    __syncthreads();\n    int64_t tile_rows = rows;",
        "    int64_t tile_rows = rows;",
        PREPARE,
    ),
    Mutation(
        "the scan skips the lane at the step's distance",
        "batching/prepare_batch.cuh",
        "if (lane >= distance) {",
        "if (lane > distance) {",
        PREPARE,
    ),
    Mutation(
        "a row takes another request's pages",
        "batching/prepare_batch.cuh",
        "params.kv_indices[tile.first_page[i] + int64_t{page}]",
        "params.kv_indices[tile.first_page[0] + int64_t{page}]",
        PREPARE,
    ),
    Mutation(
        "a position at a page's end belongs to the page before",
        "batching/prepare_batch.cuh",
        "static_cast<uint32_t>(position) / page_size;",
        "static_cast<uint32_t>(position > 0 ? position - 1 : 0) / page_size;",
        PREPARE,
    ),
    Mutation(
        "the first draft is read behind the text",
        "common/token_at.h",
        "if (position < len) return",
        "if (position <= len) return",
        INPUT_IDS,
    ),
    Mutation(
        "a lane writes q while others still read it",
        "attention/rope_append_kv/rope_append_kv.cuh",
        "          __syncwarp(mask);"
        "  // q_out may alias q: all lanes must read before any writes\n",
        "",
        ROPE,
    ),
    Mutation(
        "the mask of a group is one lane short",
        "attention/rope_append_kv/rope_append_kv.cuh",
        "((1u << grid.lanes) - 1) << first_lane",
        "((1u << (grid.lanes - 1)) - 1) << first_lane",
        ROPE,
    ),
    Mutation(
        "a slot one past the cache is taken",
        "attention/rope_append_kv/rope_append_kv.h",
        "slot >= params.num_slots",
        "slot > params.num_slots",
        ROPE,
        "race",
    ),
    Mutation(
        "the partner element is a chunk off",
        "attention/rope_append_kv/rope_append_kv.cuh",
        "first_half ? half / kChunk : -half",
        "first_half ? half / kChunk - 1 : -half",
        ROPE,
    ),
    Mutation(
        "a lane of 16 elements loads the angles of its first four pairs only",
        "attention/rope_append_kv/rope_append_kv.cuh",
        "interleaved && j >= kChunk / 2",
        "interleaved && j > 0",
        ROPE,
    ),
    Mutation(
        "a phase's time counts for the next one, too",
        "common/stamps.cuh",
        "    last = now;\n",
        "",
        ATTENTION,
    ),
    Mutation(
        "two matrices of K exchanged",
        "attention/append_attention/cuda/tile.cuh",
        "b_place(token, lane / 8 % 2);\n    // A",
        "b_place(token, 1 - lane / 8 % 2);\n    // A",
        ATTENTION,
    ),
    Mutation(
        "V is not transposed",
        "attention/append_attention/cuda/tile.cuh",
        "ptx::ldmatrix_x4_trans(b[n / 2], place);",
        "ptx::ldmatrix_x4(b[n / 2], place);",
        ATTENTION,
    ),
    Mutation(
        "a row sees one token too many",
        "attention/append_attention/cuda/tile.cuh",
        "token >= seen.y ||",
        "token > seen.y ||",
        ATTENTION,
    ),
    Mutation(
        "the window begins one token late",
        "attention/append_attention/cuda/tile.cuh",
        "token < seen.x ||",
        "token <= seen.x ||",
        ATTENTION,
    ),
    Mutation(
        "the page table of the chunk before",
        "attention/append_attention/cuda/tile.cuh",
        "kBlocks % (2 * kChunkBlocks);\n  int begin",
        "kBlocks % kChunkBlocks;\n  int begin",
        ATTENTION,
    ),
    Mutation(
        "the wait allows one group too many",
        "attention/append_attention/cuda/walk.cuh",
        "ptx::cp_async_wait<Shape::kAhead - 1>();",
        "ptx::cp_async_wait<Shape::kAhead>();",
        ATTENTION,
    ),
    Mutation(
        "the next keys in three slots are not waited for",
        "attention/append_attention/cuda/walk.cuh",
        "ptx::cp_async_wait<Shape::kThreeSlots ? 1 : 0>();",
        "ptx::cp_async_wait<Shape::kThreeSlots ? 2 : 0>();",
        ATTENTION,
    ),
    Mutation(
        "in three slots values are copied over the keys that come next",
        "attention/append_attention/cuda/block.cuh",
        "(2u * tile + 1) % 3",
        "(2u * tile + 2) % 3",
        ATTENTION,
    ),
    Mutation(
        "in one slot keys are copied over values that warps still read",
        "attention/append_attention/cuda/walk.cuh",
        "        __syncthreads();  // all warps are done with V, whose slot K takes\n",
        "",
        ATTENTION,
    ),
    Mutation(
        "the second row of a lane has the query of the first",
        "attention/append_attention/cuda/tile.cuh",
        "query_of_row(block, lane / 4 + 8)",
        "query_of_row(block, lane / 4)",
        ATTENTION,
    ),
    Mutation(
        "no barrier between weights and their use",
        "attention/append_attention/cuda/walk.cuh",
        "      __syncthreads();  // weights, this tile's V and the next tile's K have arrived\n",
        "",
        ATTENTION,
    ),
    Mutation(
        "the second half of a page block is read where the first lies",
        "attention/append_attention/cuda/tile.cuh",
        "bool is_second = pass * kRowsAtOnce % kPageBlock != 0;",
        "bool is_second = false;",
        ATTENTION,
    ),
    Mutation(
        "a chunk is folded without its last leaf",
        "attention/append_attention/cuda/results.cuh",
        "if (leaf > (item.high - 1) / kLeafTokens) return false;",
        "if (leaf >= (item.high - 1) / kLeafTokens) return false;",
        ATTENTION,
    ),
    Mutation(
        "leaves that the first split of a chunk has folded are folded again",
        "attention/append_attention/cuda/results.cuh",
        "(leaf > first && leaf / split_leaves != first / split_leaves)",
        "(leaf > first && split_leaves > 0)",
        ATTENTION,
    ),
    Mutation(
        "the last but one to arrive folds",
        "common/device.cuh",
        "bool is_last = before == arrivals - 1;",
        "bool is_last = before == arrivals - 2;",
        ATTENTION,
    ),
    Mutation(
        "an arrival publishes nothing",
        "common/device.cuh",
        "int before = ptx::add_acq_rel(counter, 1);",
        "int before = atomicAdd(counter, 1);",
        ATTENTION_RACE,
        "race",
    ),
    Mutation(
        "too many arrivals are not told",
        "common/device.cuh",
        "if (before < 0 || before >= arrivals) report_error(flag, code);",
        "",
        ATTENTION,
    ),
    Mutation(
        "splits that meet once fold one leaf of each chunk",
        "attention/append_attention/cuda/results.cuh",
        "return {is_cut ? kChunkLeaves : 1, is_cut, is_cut};",
        "return {1, is_cut, is_cut};",
        ATTENTION,
    ),
    Mutation(
        "no barrier between the factors of a fold and their use",
        "attention/append_attention/cuda/results.cuh",
        "find_scales(as_one);\n        __syncthreads();",
        "find_scales(as_one);",
        ATTENTION,
    ),
    Mutation(
        "the sink of a head of the first KV head",
        "attention/append_attention/cuda/results.cuh",
        "int head = block.item.head * block.group() + (",
        "int head = (",
        SINKS,
    ),
    Mutation(
        "outputs do not know of a sink above all scores",
        "attention/append_attention/cuda/results.cuh",
        "return __fmul_rn(fold.a_scale, inverse(l));",
        "return inverse(l);",
        SINKS,
    ),
    Mutation(
        "rows that see all are loaded as far as their own position",
        "attention/append_attention/cuda/plan.cuh",
        "return params.is_causal ? position + 1 : kv_len;",
        "return position + 1;",
        NONCAUSAL,
    ),
    Mutation(
        "bits of the mask are those of the row before",
        "attention/append_attention/cuda/tile.cuh",
        "min(row, item.rows - 1);\n  int query",
        "min(row, item.rows - 1) - block.group();\n  packed = max(packed, 0);\n  int query",
        MASK,
    ),
    Mutation(
        "tiles in which a mask begins are taken to be seen",
        "attention/append_attention/cuda/plan.cuh",
        "if (params.mask == nullptr) return end;",
        "return end;",
        MASK,
    ),
    Mutation(
        "a group's chunk is taken for its first leaf",
        "attention/append_attention/cuda/results.cuh",
        "group.holds_chunk(chunk) ? group.slot_of_chunk(chunk) : group.slot_of_leaf(leaf);",
        "chunk < 0 ? group.slot_of_chunk(chunk) : group.slot_of_leaf(leaf);",
        ATTENTION,
    ),
    Mutation(
        "even and odd columns of 8-bit caches exchanged",
        "attention/append_attention/cuda/tile.cuh",
        "return {two(word), two(word >> 8)};",
        "return {two(word >> 8), two(word)};",
        BYTES,
    ),
    Mutation(
        "negative bytes lose their sign",
        "attention/append_attention/cuda/tile.cuh",
        "origin = ptx::merge_bits(bytes, kBase, 0x00800080u);",
        "origin = kBase;",
        BYTES,
    ),
    Mutation(
        "V has the scales of K",
        "attention/append_attention/cuda/tile.cuh",
        "16 * which + 8 * n + 2 * (lane % 4) + e",
        "8 * n + 2 * (lane % 4) + e + 0 * which",
        BYTES,
    ),
    Mutation(
        "the next tile of latents is not waited for",
        "attention/append_attention/cuda/walk.cuh",
        "ptx::cp_async_wait<Shape::kThreeSlots ? 1 : 0>();",
        "if (Shape::kThreeSlots) ptx::cp_async_wait<1>();",
        LATENT,
    ),
    Mutation(
        "latents are copied over the tile that is multiplied",
        "attention/append_attention/cuda/block.cuh",
        "if constexpr (Shape::kIsLatent) slot = static_cast<unsigned>(tile) % Shape::kSlots;",
        "",
        LATENT,
    ),
    Mutation(
        "64 rows of latents are rescaled as other rows",
        "attention/append_attention/cuda/wide.cuh",
        "rescales[16 * i + 8 * (e / 2)]",
        "rescales[16 * i]",
        WIDE,
    ),
    Mutation(
        "the last third of a key of latents is left out for 64 rows",
        "attention/append_attention/cuda/wide.cuh",
        "scores.add(2 * kWideStepsAtOnce, k, s);",
        "scores.add(kWideStepsAtOnce, k, s);",
        WIDE,
    ),
    Mutation(
        "the second of a warp's sums of weights goes on with the first",
        "attention/append_attention/cuda/tile.cuh",
        "if (n % kTilesOfPart == 0) sum = 0.0f;",
        "if (n == 0) sum = 0.0f;",
        WIDE,
    ),
    Mutation(
        "a chunk in memory begins with what the one before has left",
        "attention/append_attention/cuda/walk.cuh",
        "number % kChunkLeaves == 0",
        "number < 0",
        WIDE,
    ),
    Mutation(
        "the halves of a latent's key are one element off",
        "attention/rope_append_latent/rope_append_latent.cuh",
        "first + 1 : first + kWarpSize;",
        "first + 1 : first + kWarpSize - 1;",
        LATENT,
    ),
    Mutation(
        "scales of a tile before",
        "attention/append_attention/cuda/walk.cuh",
        "next_scale = load_scale(block, tile + 2);",
        "next_scale = load_scale(block, tile + 1);",
        BYTES,
    ),
    Mutation(
        "a warp that begins with odd columns takes the even ones",
        "attention/append_attention/cuda/tile.cuh",
        "bool begins_odd = kOutTiles % 2 != 0 && warp % 2 != 0;",
        "bool begins_odd = kOutTiles % 2 != 0 && warp % 2 != 1;",
        BYTES,
    ),
    Mutation(
        "the counts are stored while other threads read the row",
        "sampling/commit/commit.cuh",
        "      if (!__syncthreads_or(distance > 0)) break;"
        "  // then all earlier entries stay in place, too\n",
        "",
        COMMIT,
    ),
    Mutation(
        "the next tokens are counted before the row is whole",
        "sampling/commit/commit.cuh",
        "    __syncthreads();  // the row is consistent again\n",
        "",
        COMMIT,
    ),
    Mutation(
        "the room left in a row is one token too much",
        "sampling/commit/commit.h",
        "len + count <= params.max_len",
        "len + count <= params.max_len + 1",
        COMMIT,
    ),
    Mutation(
        "a stop sequence reaches into the prompt",
        "sampling/commit/commit_walk.h",
        "if (length == 0 || length > num_output_tokens) continue;",
        "if (length == 0 || length > num_output_tokens + 1) continue;",
        COMMIT,
    ),
    Mutation(
        "what follows an injected token is kept",
        "sampling/commit/commit_walk.h",
        "    if (walk.is_injected) break;  // the next tokens were drafted after another token\n",
        "",
        COMMIT,
    ),
    Mutation(
        "no barrier between the warps' values and their fold",
        "sampling/row/cuda/block_reduce.cuh",
        "scratch[fresh_warp_id()] = value;\n  __syncthreads();\n  value = scratch[0];",
        "scratch[fresh_warp_id()] = value;\n  value = scratch[0];",
        SAMPLE,
    ),
    Mutation(
        "the scan skips the lane at the step's distance",
        "sampling/row/cuda/block_reduce.cuh",
        "if (lane_id() >= offset) value += before;",
        "if (lane_id() > offset) value += before;",
        SAMPLE,
    ),
    Mutation(
        "a scan waits for one leaf too few",
        "sampling/row/cuda/scan.cuh",
        "ptx::cp_async_wait<kMostDepth - 1>();",
        "ptx::cp_async_wait<kMostDepth>();",
        SAMPLE,
    ),
    Mutation(
        "the last block reads what no fence published",
        "sampling/row/cuda/row_plan.cuh",
        "ptx::increment_acq_rel(reinterpret_cast<unsigned*>(counter), limit) == limit;",
        "atomicInc(reinterpret_cast<unsigned*>(counter), limit) == limit;",
        SAMPLE_RACE,
        "race",
    ),
    Mutation(
        "the counter of the blocks is left as it is",
        "sampling/row/cuda/row_plan.cuh",
        "ptx::increment_acq_rel(reinterpret_cast<unsigned*>(counter), limit) == limit;",
        "ptx::increment_acq_rel(reinterpret_cast<unsigned*>(counter), ~0u) == limit;",
        "test_sampling.py workspace",
    ),
    Mutation(
        "equal logits take the same place",
        "sampling/top_logprobs/top_logprobs.cuh",
        "rank_key(shared.list_x[i], shared.list_id[i]) > key",
        "rank_key(shared.list_x[i], 0) > key",
        TOP_LOGPROBS,
    ),
    Mutation(
        "no barrier between clearing the overlay's bits and setting them",
        "sampling/row/cuda/overlay.cuh",
        "    part.bits[word] = {0u, ~allowed};\n  }\n  __syncthreads();",
        "    part.bits[word] = {0u, ~allowed};\n  }",
        PROCESSORS,
    ),
    Mutation(
        "a table's stretch ends a token early",
        "sampling/row/cuda/overlay.cuh",
        "min(max(begins[stretch + 1], 0), size)",
        "min(max(begins[stretch + 1] - 1, 0), size)",
        PROCESSORS,
    ),
    Mutation(
        "a block's part of an overlay in the workspace ends a leaf early",
        "sampling/row/cuda/row_plan.cuh",
        "plan.end_leaf(all) * leaf_words",
        "(plan.end_leaf(all) - 1) * leaf_words",
        OVERLAYS,
    ),
    Mutation(
        "two rows have one overlay in the workspace",
        "sampling/row/cuda/row_plan.cuh",
        "unsigned char* row = workspace_end - plan.row_bytes() * (item + 1);",
        "unsigned char* row = workspace_end - plan.row_bytes() * (item / 2 + 1);",
        OVERLAYS,
    ),
    Mutation(
        "one read of a logit does not see the overlay",
        "sampling/row/cuda/row_logits.cuh",
        "      forbid(words, bits.forbidden);\n",
        "",
        PROCESSORS,
    ),
    Mutation(
        "raw logprobs of processed logits",
        "sampling/row/cuda/leaf.cuh",
        "leaf_sum(x, stats.raw_max, kLog2e);\n    x.forget_derived();\n    x.process(leaf);",
        "leaf_sum(x, stats.raw_max, kLog2e);\n    x.process(leaf);\n"
        "    stats.raw_max = leaf_max(x);",
        PROCESSORS,
    ),
    Mutation(
        "of the last typical token's leaf every equally distant one is weighed",
        "sampling/row/cuda/typical.cuh",
        "bool kept = row.keeps(value, divided",
        "bool kept = row.shared.kept.keeps(value, divided",
        PROCESSORS,
    ),
    Mutation(
        "what is equally distant is weighed behind the last typical token, not before it",
        "sampling/row/cuda/typical.cuh",
        "leaf < divided ? sums.raw : sums.warm",
        "leaf > divided ? sums.raw : sums.warm",
        TYPICAL_TIES,
    ),
    Mutation(
        "no barrier between emptying the bins of surprises and filling them",
        "sampling/row/cuda/typical_passes.cuh",
        "row.shared.sums[row.thread()] = 0;\n  __syncthreads();\n#pragma unroll 1\n"
        "  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {\n    if",
        "row.shared.sums[row.thread()] = 0;\n#pragma unroll 1\n"
        "  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {\n    if",
        TYPICAL_RACE,
        "race",
    ),
    Mutation(
        "equal logits count for the rank",
        "sampling/row/cuda/row.cuh",
        "number += clean(x[i]) > value;",
        "number += clean(x[i]) >= value;",
        PROCESSORS,
    ),
    Mutation(
        "equally typical tokens: the higher ids stay",
        "sampling/row/cuda/row.cuh",
        "own == cut.distance && id <= cut.last_id",
        "own == cut.distance && id >= cut.last_id",
        PROCESSORS,
    ),
    Mutation(
        "no barrier between the warps' matches and the longest",
        "suffix_tree/ngram_propose.cuh",
        "= best;\n  __syncthreads();",
        "= best;",
        NGRAM,
    ),
    Mutation(
        "a match that begins with the row is cut short",
        "suffix_tree/ngram_index.h",
        "size <= end &&",
        "size < end &&",
        NGRAM,
    ),
    Mutation(
        "what another drafter gave is not looked at",
        "suffix_tree/ngram_index.h",
        "return request.len + request.num_given;",
        "return request.len;",
        NGRAM,
    ),
    Mutation(
        "n-grams with one hash are taken for one",
        "suffix_tree/ngram_index.h",
        "if (tokens[a - i] != tokens[b - i]) return false;",
        "if (i > size && tokens[a - i] != tokens[b - i]) return false;",
        NGRAM,
    ),
    Mutation(
        "an entry is believed whatever the text says",
        "suffix_tree/ngram_propose.cuh",
        "match_size(request, end, size) == size;",
        "size > 0;",
        NGRAM,
    ),
    Mutation(
        "an older end takes the place of a younger one",
        "suffix_tree/ngram_propose.cuh",
        "end < other : end > other;",
        "end < other : end != other;",
        NGRAM,
    ),
    Mutation(
        "lanes write one entry at once",
        "suffix_tree/ngram_propose.cuh",
        "if (is_writing && writer == lane) {",
        "if (is_writing) {",
        NGRAM,
    ),
    Mutation(
        "what found no room counts as known",
        "suffix_tree/ngram_propose.cuh",
        "if (refused != 0) return",
        "if (refused == kFullMask) return",
        NGRAM,
    ),
    Mutation(
        "the table of another text is not cleared",
        "suffix_tree/ngram_propose.cuh",
        "if (plan.num_new > 0 && plan.num_indexed == 0) {",
        "if (plan.num_new > 0 && plan.num_indexed < 0) {",
        NGRAM,
    ),
    Mutation(
        "no barrier between a table's clearing and its use",
        "suffix_tree/ngram_propose.cuh",
        "  __syncthreads();  // the state has been read and the table is cleared\n",
        "",
        NGRAM,
    ),
    Mutation(
        "all that were cut get one more",
        "suffix_tree/ngram_propose.cuh",
        "(wants && before < rest ? 1 : 0)",
        "(wants ? 1 : 0)",
        NGRAM,
    ),
    Mutation(
        "the cap cuts given drafts",
        "suffix_tree/ngram_share.h",
        "return share.num_given > cap ? share.num_given : cap;",
        "return cap;",
        NGRAM,
    ),
]

LAWS = [
    Mutation(
        "the draft's own coin accepts it",
        "sampling/row/cpu/drafted_row.h",
        "uniform(Purpose::kAccept, i)",
        "uniform(Purpose::kDraft, i)",
        "test_distribution.py rejection and dense",
        "scripted",
    ),
    Mutation(
        "siblings share a coin",
        "sampling/row/cpu/drafted_row.h",
        "uniform(Purpose::kAccept, i)",
        "uniform(Purpose::kAccept, 0)",
        "test_distribution.py tree and rejection",
        "scripted",
    ),
    Mutation(
        "<= for <",
        "sampling/row/row_rule.h",
        "return uniform * draft_prob * residual.mass < left;",
        "return uniform * draft_prob * residual.mass <= left;",
        "test_distribution.py edges",
        "scripted",
    ),
    Mutation(
        "the residual is not normalized",
        "sampling/row/row_rule.h",
        "return uniform * draft_prob * residual.mass < left;",
        "return uniform * draft_prob < left;",
        "test_distribution.py tree and rejection",
        "scripted",
    ),
    Mutation(
        "the residual is the target",
        "sampling/row/row_rule.h",
        "return {1.0, residual.taken + residual.mass, 0.0};",
        "return {1.0, residual.taken, 0.0};",
        "test_distribution.py rejection and dense",
        "scripted",
    ),
    Mutation(
        "no bonus token",
        "sampling/verify/accept_walk.h",
        "for (int32_t i = num_rows > 0 ? depth + 1 : 0; i < capacity; ++i) {",
        "for (int32_t i = num_rows > 0 ? depth + (depth + 1 < num_rows) : 0; i < capacity; ++i) {",
        "test_distribution.py rejection or target_match",
        "scripted",
    ),
    Mutation(
        "the residual is of the row after",
        "sampling/verify/verify_cpu.cpp",
        "TargetRow<T> row = target_row(request, accepted);",
        "TargetRow<T> row = target_row(request, accepted + 1);",
        "test_distribution.py block and dense",
        "scripted",
    ),
    Mutation(
        "every row has the first row's draft distribution",
        "sampling/verify/verify.h",
        "(source * params.draft_probs.max_drafts + row) * params.draft_probs.width;",
        "(source * params.draft_probs.max_drafts + 0 * row) * params.draft_probs.width;",
        "test_distribution.py rejection and dense",
        "scripted",
    ),
    Mutation(
        "every request has its own row of draft_probs",
        "sampling/verify/verify.h",
        "params.draft_probs.rows ? params.draft_probs.rows[batch_idx] : batch_idx;",
        "batch_idx;",
        "test_distribution.py rejection and rows",
        "scripted",
    ),
    Mutation(
        "a draft without a distribution is held to have been drawn",
        "sampling/verify/verify.h",
        "row >= params.draft_probs.max_drafts) return -1;",
        "row > params.draft_probs.max_drafts) return -1;",
        DRAFT_PROB_ROWS,
    ),
    Mutation(
        "rows of draft_probs are not held against their number",
        "sampling/verify/verify.h",
        "values.draft_prob_row >= params.draft_probs.num_rows",
        "values.draft_prob_row > params.draft_probs.num_rows",
        "test_verify.py refuses_values",
    ),
    Mutation(
        "rows of probs are written without gaps",
        "sampling/sample/sample.cuh",
        "write_target_probs(block, params.outputs.probs + idx * params.outputs.probs_stride);",
        "write_target_probs(block, params.outputs.probs + idx * params.vocab_size);",
        "test_sampling.py probs",
    ),
    Mutation(
        "penalties do not see the drafts in flight",
        "sampling/row/logits_processors.h",
        "outputs += row.path.draft_token_ids[node] == id;",
        "outputs += 0 * (row.path.draft_token_ids[node] == id);",
        "test_distribution.py processors",
        "scripted",
    ),
    Mutation(
        "a row has the next position's coins",
        "sampling/verify/verify_cpu.cpp",
        "start + row_depth(drafts, row), anchor)",
        "start + 1 + row_depth(drafts, row), anchor)",
        "test_distribution.py sample and equality",
        "scripted",
    ),
    Mutation(
        "every row has the first position's coins",
        "sampling/verify/verify_cpu.cpp",
        "start + row_depth(drafts, row), anchor)",
        "start + 0 * row_depth(drafts, row), anchor)",
        "test_distribution.py rejection and dense",
        "scripted",
    ),
    Mutation(
        "ties go to the highest id",
        "sampling/row/cpu/row.h",
        "      while (logit(id) != max) ++id;\n      return id;",
        "      id = vocab_size - 1 < id + kLeaf ? vocab_size - 1 : id + kLeaf - 1;\n"
        "      while (logit(id) != max) --id;\n      return id;",
        "test_distribution.py ties",
        "scripted",
    ),
    Mutation(
        "block verification without its anchor",
        "sampling/row/row_rule.h",
        "return static_cast<uint32_t>(first_position) + 1u;",
        "return 0u * static_cast<uint32_t>(first_position);",
        "test_distribution.py two and steps",
        "scripted",
    ),
    Mutation(
        "block verification with the products alone",
        "sampling/verify/accept_walk.h",
        "return all > 0.0 ? mass / all : 1.0;",
        "return all > 0.0 ? weight : 1.0;",
        "test_distribution.py block and dense",
        "scripted",
    ),
    Mutation(
        "a draft outside the nucleus is taken",
        "sampling/row/cpu/drafted_row.h",
        "weight_of(row, drafts.token_ids[child]) > 0.0) {",
        "weight_of(row, drafts.token_ids[child]) >= 0.0) {",
        "test_distribution.py topp",
        "scripted",
    ),
]
# The suffix tree is no kernel: its fuzzing program must notice these bugs.
PROGRAM = "test_suffix_programs.py test_fuzz"
SUFFIX = [
    Mutation(
        "a leaf that another sequence catches up with stays out of the active list",
        "suffix_tree/suffix_tree.cpp",
        "if (owner.is_live && owner.length - text.index(start) == parent.depth) {",
        "if (false) {",
        PROGRAM,
        "program",
    ),
    Mutation(
        "of equally frequent continuations the first stays the best",
        "suffix_tree/suffix_tree.cpp",
        "(child_count == parent.best_count && is_younger(ref(child), ref(parent.best)))",
        "false",
        PROGRAM,
        "program",
    ),
    Mutation(
        "the bound of the other children does not follow them",
        "suffix_tree/suffix_tree.cpp",
        "  } else {\n    parent.second = std::max(parent.second, child_count);\n  }\n}",
        "  }\n}",
        PROGRAM,
        "program",
    ),
    Mutation(
        "the best child that fell to the bound is not looked at again",
        "suffix_tree/suffix_tree.cpp",
        "if (parent.best_count <= parent.second) {",
        "if (parent.best_count < parent.second) {",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a suffix of the full depth stays at the front of the active list",
        "suffix_tree/suffix_tree.cpp",
        "    sequence.first_active = text.advance(sequence.first_active, 1);\n"
        "    --sequence.num_active;\n  }\n  ++seq",
        "    --sequence.num_active;\n  }\n  ++seq",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a suffix that occurs nowhere else any more stays active",
        "suffix_tree/suffix_tree.cpp",
        "if (owner.is_live && owner.num_active > 0 && owner.first_active == start) {",
        "if (false) {",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a split takes the last occurrence to arrive for the youngest",
        "suffix_tree/suffix_tree.cpp",
        "made.ref = is_younger(start, other) ? start : other;",
        "made.ref = start;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a sequence that is not the oldest leaves with its references left behind",
        "suffix_tree/suffix_tree.cpp",
        "  repoint(handle);\n",
        "\n",
        PROGRAM,
        "program",
    ),
    Mutation(
        "what was taken out is given back from the youngest sequence on",
        "suffix_tree/suffix_tree.cpp",
        "    const int32_t handle = oldest;",
        "    const int32_t handle = youngest;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a tree draft takes the last found of equals",
        "suffix_tree/suffix_draft.cpp",
        "a.order > b.order",
        "a.order < b.order",
        PROGRAM,
        "program",
    ),
    Mutation(
        "reading on ends with the window",
        "suffix_tree/suffix_draft.cpp",
        "return options_.read_on ? state_.num_following(~child)",
        "return options_.read_on ? state_.window_length(~child)",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a draft is given up although it may be the best",
        "suffix_tree/suffix_draft.cpp",
        "return most * (1.0 + 2e-7 * (num_tokens + 16)) <= above;",
        "return most * (1.0 - 1e-3 * (num_tokens + 16)) <= above;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "of equal scores the shorter match wins",
        "suffix_tree/suffix_draft.cpp",
        "match_len >= shortest_equal ? std::nextafter(best_score, -1.0f) : best_score;",
        "match_len < shortest_equal ? std::nextafter(best_score, -1.0f) : best_score;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "of equal scores the match that was looked at first wins",
        "suffix_tree/suffix_draft.cpp",
        "bound == best_score && match_len >= shortest_equal",
        "false",
        PROGRAM,
        "program",
    ),
    Mutation(
        "the shared tree wins where scores are equal",
        "suffix_tree/suffix_cache.cpp",
        "    draft_options.above_score = draft.score;",
        "    draft_options.above_score = draft.score * 0.999999f;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "more is given back than two tokens for one",
        "suffix_tree/suffix_cache.cpp",
        "reclaim(kReclaimPerToken * appended)",
        "reclaim(kReclaimPerToken * appended + 1)",
        PROGRAM,
        "program",
    ),
    Mutation(
        "the drafts given are not part of the context",
        "suffix_tree/suffix_cache.cpp",
        "context.insert(context.end(), given, given + row.given);",
        "context.insert(context.begin(), given, given + row.given);",
        PROGRAM,
        "program",
    ),
    Mutation(
        "parents are places behind the given drafts",
        "suffix_tree/suffix_cache.cpp",
        "parents[i] += row.given;",
        "parents[i] += 0;",
        PROGRAM,
        "program",
    ),
    Mutation(
        "what is written during the building of a prompt is lost",
        "suffix_tree/suffix_cache.cpp",
        "      std::swap(tokens, build.queued);",
        "      build.queued.clear();",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a stopped request's tree comes back with its text",
        "suffix_tree/suffix_cache.cpp",
        "      own->tree.clear();\n",
        "\n",
        PROGRAM,
        "program",
    ),
    Mutation(
        "one request more than the budget",
        "suffix_tree/suffix_cache.cpp",
        "cached.size >= options.max_cached_requests",
        "cached.size > options.max_cached_requests",
        PROGRAM,
        "program",
    ),
    Mutation(
        "one token more than the budget",
        "suffix_tree/suffix_cache.cpp",
        "num_tokens > options.max_cached_tokens",
        "num_tokens > options.max_cached_tokens + 1",
        PROGRAM,
        "program",
    ),
    Mutation(
        "a section's checksum leaves out its last bytes",
        "suffix_tree/suffix_file.cpp",
        "  if (at < num_bytes) std::memcpy(last, bytes + at, num_bytes - at);",
        "  if (at < num_bytes) std::memcpy(last, bytes + at, num_bytes - at - 1);",
        PROGRAM,
        "program",
    ),
]
MUTATIONS += LAWS + SUFFIX

SELECTIONS = sorted({(mutation.tests, mutation.build) for mutation in MUTATIONS})


def on_one_worker(build: str, of_plain: str) -> pytest.MarkDecorator:
    """Return the mark that keeps the tests of a build on one worker, which compiles it once.

    The plain build is compiled by each worker; its tests are grouped by `of_plain`.
    """
    return pytest.mark.xdist_group(of_plain if build == "plain" else build)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources of the interpreter and its tests, and configure a build."""
    root = tmp_path_factory.mktemp("mutations")
    skip = shutil.ignore_patterns("__pycache__", "assets", "*.egg-info")
    for name in ("csrc", "tests", "python", "tools"):
        if (simt.ROOT / name).is_dir():
            shutil.copytree(simt.ROOT / name, root / name, ignore=skip)
    for name in ("CMakeLists.txt", "conftest.py", "pyproject.toml", "setup.py", "README.md"):
        if (simt.ROOT / name).is_file():
            shutil.copy(simt.ROOT / name, root / name)
    pybind11 = run([sys.executable, "-m", "pybind11", "--cmakedir"], root).stdout.strip()
    options = [
        "-DSPECOPS_WERROR=OFF",
        "-DSPECOPS_ISAS=portable",
        "-DSPECOPS_SIMT_FLAGS_plain=-O0",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11}",
    ]
    done = run(["cmake", "-G", "Ninja", "-B", "build/cmake", *options, "."], root)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def table() -> Iterator[TextIO]:
    """Open the table; a row is written at once, so that a run that is stopped keeps its rows."""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with TABLE.open("w", buffering=1) as file:
        file.write("| kernel file | mutation | tier | noticed by | how |\n" + "| --- " * 5 + "|\n")
        yield file


def run(command: list[str], root: Path, **env: str) -> Run:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    whole = {**os.environ, "PATH": path, "PYTHONPATH": str(root / "python"), **env}
    # A fuzzer stops at the first fault, so a long limit costs time only if a rare fault is missed.
    whole["FUZZ_SECONDS"] = "120"
    return subprocess.run(
        command, cwd=root, env=whole, capture_output=True, text=True, timeout=7200
    )


def build_and_test(root: Path, tests: str, build: str) -> dict[str, Run]:
    if build == "program":  # the test builds the program
        return run_tests(root, *tests.split(" ", 1), "plain")
    target = {"plain": "_simt", "scripted": "_scripted"}.get(build, f"_simt_{build}")
    where = "_scripted-" if build == "scripted" else "simt"
    build = "plain" if build == "scripted" else build
    done = run(["cmake", "--build", "build/cmake", "--target", target], root)
    assert done.returncode == 0, done.stdout[-3000:]
    file, select = tests.split(" ", 1)
    return run_tests(root, file, f"{where} and ({select})", build)


PASSED = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
# The commands that run tests, in this order, each with the mark expression of its tests.
TIERS = {"make test": "not slow and not ci", ".ci/run": "ci and not slow"}


def run_tests(root: Path, file: str, select: str, build: str) -> dict[str, Run]:
    """Run the tests of each tier, up to the first tier that does not pass, and return the runs."""
    env = simt.asan_environment() if build == "asan" else {}
    runs = {}
    for tier, marks in TIERS.items():
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=short"]
        command += ["-p", "no:cacheprovider", "-m", marks, "-k", select, f"tests/{file}"]
        runs[tier] = run(command, root, SPECOPS_SIMT_BUILD=build, COLUMNS="400", **env)
        if runs[tier].returncode not in PASSED:
            break
    return runs


def test_every_mutation_applies() -> None:
    """The mutation runs take half an hour; this test fails at once if a kernel has changed."""
    for mutation in MUTATIONS:
        text = (simt.ROOT / "csrc" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.name}"


@cache
def names_in(file: str) -> str:
    """Return the names of the functions of a file of tests, and its strings without spaces."""
    nodes = [*ast.walk(ast.parse((simt.ROOT / "tests" / file).read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join([*names, *(one for one in texts if isinstance(one, str) and " " not in one)])


def test_selections_name_tests() -> None:
    """Every word of a selection occurs in the name or a parameter of a test of its file."""
    for tests, _ in SELECTIONS:
        file, expression = tests.split(" ", 1)
        words = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
        assert not {word for word in words if word not in names_in(file)}, tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param((tests, build), marks=on_one_worker(build, tests), id=f"{tests}-{build}")
        for tests, build in SELECTIONS
    ],
)
def test_unchanged_kernels_pass(scratch: Path, tests: tuple[str, str]) -> None:
    runs = build_and_test(scratch, *tests).values()
    assert {pytest.ExitCode.OK} <= {one.returncode for one in runs} <= PASSED, [*runs][-1].stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, marks=on_one_worker(mutation.build, mutation.file), id=mutation.name)
        for mutation in MUTATIONS
    ],
)
def test_mutations_are_noticed(scratch: Path, table: TextIO, mutation: Mutation) -> None:
    file = scratch / "csrc" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, "the mutation does not apply any more"
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        tier, done = build_and_test(scratch, mutation.tests, mutation.build).popitem()
    finally:
        file.write_text(text)
    assert done.returncode == 1, done.stdout[-3000:]
    found = re.search(r"^FAILED \S+?::(.*?) - (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-3000:]
    test, why = found.groups()
    why = re.sub(r"^\w+Error: |kernel\(.*?\), block .*?, thread \(.*?\): ", "", why)
    table.write(f"| {mutation.file} | {mutation.name} | {tier} | `{test}` | {why[:160]} |\n")
