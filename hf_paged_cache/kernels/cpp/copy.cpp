// Writing new tokens into blocks, and copying whole blocks.
#include <atomic>
#include <cstring>

#include "pieces.h"
#include "quantized.h"

namespace paged {
namespace {

// Below this a copy is done before other threads have woken up.
constexpr std::int64_t kParallelBytes = 128 * 1024;

std::int64_t element_bytes(const Blocks& blocks) { return blocks.element_type == 0 ? 4 : 2; }

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
  const int64_t end = fresh.start + fresh.tokens;
  const int64_t pieces = paged::Piece::count(blocks, fresh.start, end);
  [[maybe_unused]] const bool parallel =
      fresh.threads > 1 &&
      blocks.batch * fresh.tokens * blocks.kv_heads * (key_bytes + value_bytes) >= paged::kParallelBytes;
  std::atomic<int> status{paged::kOk};

#pragma omp parallel for schedule(static) num_threads(static_cast<int>(fresh.threads)) if (parallel)
  for (int64_t i = 0; i < pieces; ++i) {
    const paged::Piece p(blocks, i, fresh.start, end);
    if (p.entry == paged::kNullBlock) continue;
    if (p.entry < 0 || p.entry >= blocks.num_blocks) {
      status = paged::kBlockOutOfRange;
      continue;
    }
    const int64_t token = p.from - fresh.start;
    paged::copy_bytes(blocks.keys + element * (p.entry * blocks.key_block_stride +
                                               p.h * blocks.key_head_stride + p.slot * blocks.key_token_stride),
                      element * blocks.key_token_stride,
                      fresh.keys + element * (p.b * fresh.key_batch_stride + p.h * fresh.key_head_stride +
                                              token * fresh.key_token_stride),
                      element * fresh.key_token_stride, p.to - p.from, key_bytes);
    paged::copy_bytes(
        blocks.values + element * (p.entry * blocks.value_block_stride + p.h * blocks.value_head_stride +
                                   p.slot * blocks.value_token_stride),
        element * blocks.value_token_stride,
        fresh.values + element * (p.b * fresh.value_batch_stride + p.h * fresh.value_head_stride +
                                  token * fresh.value_token_stride),
        element * fresh.value_token_stride, p.to - p.from, value_bytes);
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
