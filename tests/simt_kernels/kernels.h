// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels in kernels.cu.
#pragma once

#include <cstdint>
#include <string>

namespace specops {

void run_mma(const std::string& type, const void* a, const void* b, float* d);
void run_ldmatrix(int tiles, bool trans, const void* rows, void* out);
void run_strided_ldmatrix(int stride, int* out);
void run_shuffle(const std::string& kind, int width, const int* in, int* out);
void run_votes(const int* in, unsigned* out);
void run_atomics(int* out, int blocks);
void run_order(int* out, int blocks);
void run_approximate(const std::string& kind, const float* in, float* out, int count);
void run_planted(const std::string& name, bool fixed, int* out);
void run_cost(const std::string& what, int threads, int repeats, int* out);

}  // namespace specops
