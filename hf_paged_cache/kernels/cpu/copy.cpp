// Writing new tokens into blocks, and copying whole blocks.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "quantised.h"

namespace paged {
namespace {

// Below this a copy is done before other threads have woken up.
constexpr std::int64_t kParallelBytes = 128 * 1024;

std::int64_t element_bytes(const Blocks& blocks) { return blocks.element_type == 0 ? 4 : 2; }

void copy_rows(char* to, std::int64_t to_stride, const char* from, std::int64_t from_stride,
               std::int64_t rows, std::int64_t row_bytes) {
  if (to_stride == row_bytes && from_stride == row_bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(rows * row_bytes));
    return;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) int paged_write(const paged::Blocks* blocks_pointer,
                                                                  const paged::NewTokens* fresh_pointer) {
  using std::int64_t;
  const paged::Blocks& blocks = *blocks_pointer;
  const paged::NewTokens& fresh = *fresh_pointer;
  if (paged::has_records(blocks)) return paged::write_records(blocks, fresh);
  const int64_t element = paged::element_bytes(blocks);
  const int64_t key_bytes = blocks.head_dim * element;
  const int64_t value_bytes = blocks.v_head_dim * element;
  const int64_t first_block = fresh.start / blocks.block_size;
  const int64_t end = fresh.start + fresh.tokens;
  const int64_t columns = (end + blocks.block_size - 1) / blocks.block_size - first_block;
  const int64_t pieces = blocks.batch * columns * blocks.kv_heads;
  [[maybe_unused]] const bool parallel =
      fresh.threads > 1 &&
      blocks.batch * fresh.tokens * blocks.kv_heads * (key_bytes + value_bytes) >= paged::kParallelBytes;
  std::atomic<int> status{paged::kOk};

#pragma omp parallel for schedule(static) num_threads(static_cast<int>(fresh.threads)) if (parallel)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t h = piece % blocks.kv_heads;
    const int64_t column = first_block + piece / blocks.kv_heads % columns;
    const int64_t b = piece / blocks.kv_heads / columns;
    const int64_t id = blocks.table[b * blocks.max_blocks + column];
    if (id == paged::kNullBlock) continue;
    if (id < 0 || id >= blocks.num_blocks) {
      status = paged::kBlockOutOfRange;
      continue;
    }
    const int64_t from = std::max(fresh.start, column * blocks.block_size);
    const int64_t to = std::min(end, (column + 1) * blocks.block_size);
    const int64_t slot = from % blocks.block_size;
    const int64_t token = from - fresh.start;
    paged::copy_rows(blocks.keys + element * (id * blocks.key_block_stride + h * blocks.key_head_stride +
                                              slot * blocks.key_token_stride),
                     element * blocks.key_token_stride,
                     fresh.keys + element * (b * fresh.key_batch_stride + h * fresh.key_head_stride +
                                             token * fresh.key_token_stride),
                     element * fresh.key_token_stride, to - from, key_bytes);
    paged::copy_rows(
        blocks.values + element * (id * blocks.value_block_stride + h * blocks.value_head_stride +
                                   slot * blocks.value_token_stride),
        element * blocks.value_token_stride,
        fresh.values + element * (b * fresh.value_batch_stride + h * fresh.value_head_stride +
                                  token * fresh.value_token_stride),
        element * fresh.value_token_stride, to - from, value_bytes);
  }
  return status.load();
}

// Copies blocks source[i] to target[i] of a pool whose blocks are `block_bytes` long. No target is also a
// source.
extern "C" __attribute__((visibility("default"))) void paged_copy_blocks(char* pool, std::int64_t block_bytes,
                                                                         const std::int64_t* source,
                                                                         const std::int64_t* target,
                                                                         std::int64_t count,
                                                                         std::int64_t threads) {
  [[maybe_unused]] const bool parallel = threads > 1 && count * block_bytes >= paged::kParallelBytes;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (parallel)
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(pool + target[i] * block_bytes, pool + source[i] * block_bytes,
                static_cast<std::size_t>(block_bytes));
  }
}
