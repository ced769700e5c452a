// SPDX-License-Identifier: Apache-2.0
// The walk over the rows of a request with one state per head, in both ops with such states.
#pragma once

#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "linear_attention/slot_rows.h"

namespace specops::SPECOPS_ISA {
namespace {

// Number of rows that are computed for some columns before the next columns. The columns and the
// inputs of these rows stay in L1.
constexpr int64_t kRows = 8;
constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kLanes;

template <typename T>
const T* of_row(const void* data, int64_t stride, int64_t row) {
  return static_cast<const T*>(data) + row * stride;
}

// A state before or after a row: `dim` rows of columns, `stride` floats apart.
template <typename Float>
struct Columns {
  Float* data;
  int64_t stride;

  F32x16 at(int64_t i, int c) const { return load(data + i * stride + c * kLanes); }
  void set(int64_t i, int c, F32x16 value) const { store(data + i * stride + c * kLanes, value); }
};

// The states of all heads in all slots, and how many columns and rows a state has.
struct HeadStates {
  float* data;  // [num_slots, window, heads, dim, columns]
  int64_t heads;
  int64_t dim;
  int64_t columns;
};

// Computes one head of a request that has a slot, a few rows at a time. `load_row(row, input)`
// reads what all columns of a row need. `step<kCount>(input, from, to, row, col)` computes kCount
// * 16 columns of the state after a row from those before it, and the row's outputs of these
// columns; `from` and `to` may be the same memory. A slot stores only the last `window` states;
// earlier states of this step go to the buffer `passing`.
template <int kMostDim, int kMostColumns, typename RowInput, typename LoadRow, typename Step>
void walk_head(const HeadStates& states,
               int64_t window,
               SlotRange range,
               int64_t head,
               LoadRow load_row,
               Step step) {
  static const float zeros[kMostColumns] = {};
  float passing[kMostDim * kColumns];
  RowInput inputs[kRows];
  auto state_of = [&](int64_t row) {  // row -1: the state before the first row
    int64_t place = range.slot * window + (range.begin + row) % window;
    return states.data + (place * states.heads + head) * states.dim * states.columns;
  };
  int64_t rows = range.end - range.first;
  // If the slot stores all states, each state is written completely before the next one.
  int64_t most = rows > window ? kRows : 1;
  for (int64_t begin = 0; begin < rows; begin += most) {
    int64_t end = begin + most < rows ? begin + most : rows;
    for (int64_t i = begin; i < end; ++i) load_row(range.first + i, inputs[i - begin]);
    bool is_text = begin == 0 && range.begin == 0;
    const float* before = is_text ? zeros : state_of(begin - 1);
    auto walk = [&]<int kCount>(int64_t col) {
      Columns<const float> from{before + col, is_text ? 0 : states.columns};
      for (int64_t i = begin; i < end; ++i) {
        bool is_kept = i + 1 == end || i + window >= rows;
        Columns<float> to{is_kept ? state_of(i) + col : passing,
                          is_kept ? states.columns : kColumns};
        step.template operator()<kCount>(inputs[i - begin], from, to, range.first + i, col);
        from = {to.data, to.stride};
      }
    };
    int64_t col = 0;
    for (; col + kColumns <= states.columns; col += kColumns) {
      walk.template operator()<kVectors>(col);
    }
    for (; col < states.columns; col += kLanes) walk.template operator()<1>(col);
  }
}

// Calls run_head(range, head) for each head of each request with a slot, and sets the outputs of
// all other rows to zero.
// Threads: one item per head of a request.
template <typename T, typename RunHead>
void walk_heads(const SlotRows& of, const HeadStates& states, void* out, RunHead run_head) {
  int64_t heads = states.heads, columns = states.columns;
  parallel_for((of.batch + 1) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      SlotRange range = range_of(of, item / heads);
      int64_t head = item % heads;
      if (range.slot >= 0) {
        run_head(range, head);
        continue;
      }
      for (int64_t row = range.first; row < range.end; ++row) {
        T* own = static_cast<T*>(out) + (row * heads + head) * columns;
        std::memset(static_cast<void*>(own), 0, columns * sizeof(T));
      }
    }
  });
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
