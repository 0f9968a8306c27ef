// A run of tokens cut into pieces that each lie in one block, and how rows are copied.
#pragma once

#include <algorithm>
#include <cstring>

#include "abi.h"

namespace paged {

// The part of one column of the table, and of one head, that tokens [start, end) cover.
struct Piece {
  std::int64_t b, h, column, entry, from, to;

  Piece(const Blocks& blocks, std::int64_t index, std::int64_t start, std::int64_t end) {
    const std::int64_t columns = columns_of(blocks, start, end);
    h = index % blocks.kv_heads;
    column = start / blocks.block_size + index / blocks.kv_heads % columns;
    b = index / blocks.kv_heads / columns;
    entry = blocks.table[b * blocks.max_blocks + column];
    from = std::max(start, column * blocks.block_size);
    to = std::min(end, (column + 1) * blocks.block_size);
  }

  static std::int64_t count(const Blocks& blocks, std::int64_t start, std::int64_t end) {
    return blocks.batch * columns_of(blocks, start, end) * blocks.kv_heads;
  }

 private:
  static std::int64_t columns_of(const Blocks& blocks, std::int64_t start, std::int64_t end) {
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
