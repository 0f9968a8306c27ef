// What the entry points hand on for layers with records.
#pragma once

#include "abi.h"
#include "scratch.h"

namespace paged {

int decode_records(const Blocks& blocks, const Call& call, Scratch& scratch);  // quantized.cpp
int write_records(const Blocks& blocks, const NewTokens& fresh);               // records.cpp

}  // namespace paged
