// A run of tokens cut into pieces that each lie in one block, and how rows are copied.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "abi.h"

namespace paged {

// The part of one entry of the table, and of one head, that columns [start, end) of the batch cover: columns
// [from, to), of which the first lies in slot `slot`. Null and without tokens where a row has fewer of them.
struct Piece {
  std::int64_t b, h, entry, from, to, slot;

  Piece(const Blocks& blocks, std::int64_t index, std::int64_t start, std::int64_t end) {
    const std::int64_t entries = entries_of(blocks, start, end);
    h = index % blocks.kv_heads;
    b = index / blocks.kv_heads / entries;
    const std::int64_t offset = offset_of(blocks, b);
    const std::int64_t first = std::max<std::int64_t>(start - offset, 0) / blocks.block_size;
    const std::int64_t place = first + index / blocks.kv_heads % entries;
    const std::int64_t begin = place * blocks.block_size + offset;
    from = std::max(start, begin);
    to = std::max(from, std::min(end, begin + blocks.block_size));
    slot = from - begin;
    entry = kNullBlock;
    if (from < to) entry = place < blocks.max_blocks ? blocks.table[b * blocks.max_blocks + place] : kOutside;
  }

  static std::int64_t count(const Blocks& blocks, std::int64_t start, std::int64_t end) {
    return blocks.batch * entries_of(blocks, start, end) * blocks.kv_heads;
  }

 private:
  static constexpr std::int64_t kOutside = std::numeric_limits<std::int32_t>::max();  // of every pool

  static std::int64_t entries_of(const Blocks& blocks, std::int64_t start, std::int64_t end) {
    // Where rows begin anyhow, their tokens may touch one block more than they fill.
    if (blocks.offsets != nullptr) return (end - start + blocks.block_size - 1) / blocks.block_size + 1;
    return (end + blocks.block_size - 1) / blocks.block_size - start / blocks.block_size;
  }
};

// Strides and rows in bytes.
inline void copy_bytes(char* to, std::int64_t to_stride, const char* from, std::int64_t from_stride,
                       std::int64_t rows, std::int64_t row_bytes) {
  if (to_stride == row_bytes && from_stride == row_bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(rows * row_bytes));
    return;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<std::size_t>(row_bytes));
  }
}

// Strides and rows in elements.
template <class Element>
void copy_rows(Element* to, std::int64_t to_stride, const Element* from, std::int64_t from_stride,
               std::int64_t rows, std::int64_t dim) {
  constexpr std::int64_t kBytes = sizeof(Element);
  copy_bytes(reinterpret_cast<char*>(to), to_stride * kBytes, reinterpret_cast<const char*>(from),
             from_stride * kBytes, rows, dim * kBytes);
}

}  // namespace paged
