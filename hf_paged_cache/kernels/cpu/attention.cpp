// Paged attention for a few query tokens: every stored key and value is read once, straight from its block.
//
// The work is cut into tasks of (batch row, run of blocks). A task walks its blocks in order and, inside a
// block, the kv heads, whose tiles lie next to each other in memory; all query heads of a kv head share each
// read. Long rows are cut into several tasks so that every thread has work, and their results are merged by
// log-sum-exp (flash-decoding: Dao et al., 2023; paged blocks: Kwon et al., "PagedAttention", 2023).
#include <algorithm>
#include <utility>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "scratch.h"
#include "tile.h"

namespace paged {
namespace {

constexpr std::int64_t kMinTokensPerSplit = 256;
constexpr std::int64_t kTasksPerThread = 4;  // enough that a thread that is held up does not hold up the call

int worker_id() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

struct VisibleBlock {
  std::int32_t id;
  bool masked;
  std::int64_t first;  // position of the first token to read
  int tokens;
};

// What a task leaves behind: for each query row of the batch row, kv head by kv head, unnormalised sums and
// softmax.
struct Partial {
  float* sums;
  Softmax* softmax;
};

template <class Row>
class Attention {
  using Element = typename Row::Element;

 public:
  Attention(const Blocks& blocks, const Call& call) : blocks_(blocks), call_(call), tiles_(blocks, call) {
#if defined(_OPENMP)
    threads_ = std::max<std::int64_t>(1, call.threads);
#else
    threads_ = 1;
#endif
    rows_ = call.q_heads * call.q_tokens;
    first_token_ = call.start;
    if (call.window != 0) first_token_ = std::max(call.start, call.first_query - call.window + 1);
    first_token_ = std::min(first_token_, call.end);
    first_block_ = first_token_ / blocks.block_size;
    num_blocks_ = (call.end + blocks.block_size - 1) / blocks.block_size - first_block_;
    splits_ =
        std::max<std::int64_t>(1, std::min({(kTasksPerThread * threads_ + blocks.batch - 1) / blocks.batch,
                                            (call.end - first_token_) / kMinTokensPerSplit, num_blocks_}));
    sums_stride_ = round_up(blocks.v_head_dim, kPair);
    query_floats_ = round_up(rows_ * prepared_query_floats<Row>(blocks.head_dim), kLanes);
  }

  int run(Scratch& scratch) {
    const std::int64_t tasks = blocks_.batch * splits_;
    const std::int64_t partials = splits_ > 1 ? tasks : threads_;
    sums_floats_ = rows_ * sums_stride_;
    partial_bytes_ = round_up(sums_floats_ * 4 + rows_ * static_cast<std::int64_t>(sizeof(Softmax)), 64);
    worker_bytes_ =
        round_up(query_floats_ * 4 + num_blocks_ * static_cast<std::int64_t>(sizeof(VisibleBlock)), 64);
    memory_ = scratch.reserve(partials * partial_bytes_ + threads_ * worker_bytes_);
    if (memory_ == nullptr) return kOutOfMemory;
    workers_ = memory_ + partials * partial_bytes_;

    // Always one thread or all of them: a team of another size would make OpenMP end threads and start them
    // again.
    [[maybe_unused]] const bool parallel = threads_ > 1 && tasks > 1;
#pragma omp parallel num_threads(static_cast<int>(threads_)) if (parallel)
    {
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t task = 0; task < tasks; ++task) run_task(task);
      if (splits_ > 1) {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < blocks_.batch * rows_; ++i)
          finish(i / rows_, i % rows_, (i / rows_) * splits_, splits_);
      }
    }
    return status_.load();
  }

 private:
  Partial partial(std::int64_t slot) const {
    char* at = memory_ + slot * partial_bytes_;
    return {reinterpret_cast<float*>(at), reinterpret_cast<Softmax*>(at + sums_floats_ * 4)};
  }

  void run_task(std::int64_t task) {
    const std::int64_t b = task / splits_;
    const std::int64_t split = task % splits_;
    const std::int64_t slot = splits_ > 1 ? task : worker_id();
    char* worker = workers_ + worker_id() * worker_bytes_;
    float* queries = reinterpret_cast<float*>(worker);
    VisibleBlock* visible = reinterpret_cast<VisibleBlock*>(worker + query_floats_ * 4);

    const Partial result = partial(slot);
    std::memset(result.sums, 0, static_cast<std::size_t>(sums_floats_) * 4);
    std::fill(result.softmax, result.softmax + rows_, Softmax());

    const std::int64_t count = find_visible(b, first_block_ + num_blocks_ * split / splits_,
                                            first_block_ + num_blocks_ * (split + 1) / splits_, visible);
    if (count > 0) prepare_queries(b, queries);
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t h = 0; h < blocks_.kv_heads; ++h) {
        Tile<Row> tile = tile_of(visible[j], h);
        const bool last_head = h + 1 == blocks_.kv_heads;
        if (!last_head || j + 1 < count) {
          const Tile<Row> next = last_head ? tile_of(visible[j + 1], 0) : tile_of(visible[j], h + 1);
          tile.key_prefetch_bytes = bytes_between(tile.keys, next.keys);
          tile.value_prefetch_bytes = bytes_between(tile.values, next.values);
        }
        attend_tile(b, h, tile, queries, result);
      }
    }
    if (splits_ == 1) {
      for (std::int64_t row = 0; row < rows_; ++row) finish(b, row, slot, 1);
    }
  }

  // The blocks among [from, to) of row b that are stored and not wholly masked.
  std::int64_t find_visible(std::int64_t b, std::int64_t from, std::int64_t to, VisibleBlock* visible) {
    std::int64_t count = 0;
    for (std::int64_t j = from; j < to; ++j) {
      const std::int32_t id = blocks_.table[b * blocks_.max_blocks + j];
      if (id == -1) continue;
      if (id < 0 || id >= blocks_.num_blocks) {
        status_ = kBlockOutOfRange;
        continue;
      }
      const std::int64_t first = std::max(first_token_, j * blocks_.block_size);
      const int tokens = static_cast<int>(std::min(call_.end, (j + 1) * blocks_.block_size) - first);
      const Seen seen = seen_by_row(call_, b, first - call_.start, tokens);
      if (seen == Seen::kNone) continue;
      visible[count++] = {id, seen == Seen::kSome, first, tokens};
    }
    return count;
  }

  Tile<Row> tile_of(const VisibleBlock& block, std::int64_t h) const {
    const std::int64_t slot = block.first % blocks_.block_size;
    const Element* keys = reinterpret_cast<const Element*>(blocks_.keys) +
                          block.id * blocks_.key_block_stride + h * blocks_.key_head_stride +
                          slot * blocks_.key_token_stride;
    const Element* values = reinterpret_cast<const Element*>(blocks_.values) +
                            block.id * blocks_.value_block_stride + h * blocks_.value_head_stride +
                            slot * blocks_.value_token_stride;
    return {keys, values, block.first, block.tokens, block.masked, 0, 0};
  }

  static std::int64_t bytes_between(const Element* from, const Element* to) {
    return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
  }

  void prepare_queries(std::int64_t b, float* queries) const {
    const std::int64_t group = call_.q_heads / blocks_.kv_heads;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const auto [head, token] = head_and_token(row, group);
      const Element* query = reinterpret_cast<const Element*>(call_.query) + b * call_.query_batch_stride +
                             head * call_.query_head_stride + token * call_.query_token_stride;
      prepare_query<Row>(query, static_cast<int>(blocks_.head_dim),
                         queries + row * prepared_query_floats<Row>(blocks_.head_dim));
    }
  }

  // Rows go by kv head, then query token, then query head of the group.
  std::pair<std::int64_t, std::int64_t> head_and_token(std::int64_t row, std::int64_t group) const {
    const std::int64_t rows_per_head = group * call_.q_tokens;
    const std::int64_t within = row % rows_per_head;
    return {row / rows_per_head * group + within % group, within / group};
  }

  // Passes over the tile with up to kMaxRows rows each, as even as can be: 5 rows are 3 + 2, not 4 + 1.
  void attend_tile(std::int64_t b, std::int64_t h, Tile<Row> tile, const float* queries,
                   const Partial& result) const {
    const std::int64_t rows_per_head = call_.q_heads / blocks_.kv_heads * call_.q_tokens;
    std::int64_t passes = (rows_per_head + kMaxRows - 1) / kMaxRows;
    for (std::int64_t first = 0; passes > 0; --passes) {
      const std::int64_t count = (rows_per_head - first + passes - 1) / passes;
      const std::int64_t row = h * rows_per_head + first;
      const Rows rows = {b,
                         h,
                         first,
                         queries + row * prepared_query_floats<Row>(blocks_.head_dim),
                         result.sums + row * sums_stride_,
                         result.softmax + row};
      switch (count) {
        case 1:
          tiles_.template attend<Row, 1>(tile, rows);
          break;
        case 2:
          tiles_.template attend<Row, 2>(tile, rows);
          break;
        case 3:
          tiles_.template attend<Row, 3>(tile, rows);
          break;
        default:
          tiles_.template attend<Row, 4>(tile, rows);
          break;
      }
      first += count;
      tile.key_prefetch_bytes = tile.value_prefetch_bytes = 0;  // the first pass has asked for the next tile
    }
  }

  // Merges the partials of one row, adds the sink, normalises, and writes the row of the output.
  void finish(std::int64_t b, std::int64_t row, std::int64_t first_slot, std::int64_t count) const {
    const auto [head, token] = head_and_token(row, call_.q_heads / blocks_.kv_heads);
    float top = call_.sinks != nullptr ? call_.sinks[head] : -kInfinity;
    for (std::int64_t s = 0; s < count; ++s) top = std::max(top, partial(first_slot + s).softmax[row].top);
    const float base = base_of(top);
    float total = call_.sinks != nullptr ? std::exp(call_.sinks[head] - base) : 0.0f;

    float* merged = partial(first_slot).sums + row * sums_stride_;
    for (std::int64_t s = 0; s < count; ++s) {
      const Partial part = partial(first_slot + s);
      const float factor = std::exp(part.softmax[row].top - base);
      total += part.softmax[row].total * factor;
      const float* sums = part.sums + row * sums_stride_;
      for (std::int64_t i = 0; i < sums_stride_; i += kLanes) {
        const Vec scaled = load(sums + i) * factor;
        store(merged + i, s == 0 ? scaled : load(merged + i) + scaled);
      }
    }
    Element* out = reinterpret_cast<Element*>(call_.out) +
                   ((b * call_.q_tokens + token) * call_.q_heads + head) * blocks_.v_head_dim;
    store_values<Row>(merged, total == 0.0f ? 0.0f : 1.0f / total, static_cast<int>(blocks_.v_head_dim), out);
    if (call_.lse != nullptr) {
      call_.lse[(b * call_.q_heads + head) * call_.q_tokens + token] = base + std::log(total);
    }
  }

  const Blocks& blocks_;
  const Call& call_;
  TileAttention tiles_;
  std::int64_t threads_, rows_, splits_;
  std::int64_t first_token_, first_block_, num_blocks_;
  std::int64_t sums_stride_, query_floats_, sums_floats_ = 0, partial_bytes_ = 0, worker_bytes_ = 0;
  char* memory_ = nullptr;
  char* workers_ = nullptr;
  std::atomic<int> status_{kOk};
};

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) int paged_decode(const paged::Blocks* blocks,
                                                                   const paged::Call* call) {
  static thread_local paged::Scratch scratch;
  return paged::with_element_type(blocks->element_type, [&](auto row) {
    return paged::Attention<decltype(row)>(*blocks, *call).run(scratch);
  });
}

extern "C" __attribute__((visibility("default"))) std::int64_t paged_scratch_bytes() {
  return paged::scratch_total_bytes().load();
}
