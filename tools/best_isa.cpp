// SPDX-License-Identifier: Apache-2.0
// Prints the instruction set that the library would choose on this machine (SPECOPS_ISAS=native).
#include <cstdio>

#include "common/isa.h"

int main() { std::fputs(specops::isa_name(specops::active_isa()), stdout); }
