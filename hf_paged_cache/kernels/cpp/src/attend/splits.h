// Paged attention for a few query tokens: every stored key and value is read once, straight from its block.
//
// The work is cut into tasks of (batch row, run of blocks). A task walks its blocks in order and, inside a
// block, the kv heads, whose tiles lie next to each other in memory; all query heads of a kv head share each
// read. Long rows are cut into several tasks so that every thread has work, and their results are merged by
// log-sum-exp (flash-decoding: Dao et al., 2023; paged blocks: Kwon et al., "PagedAttention", 2023).
//
// What a block's tiles are made of is the business of a `Layer`: elements of the model's dtype, or records.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../base/scratch.h"
#include "tile.h"

namespace paged {

constexpr int64_t kMinTokensPerSplit = 256;
constexpr int64_t kTasksPerThread = 4;  // enough that a thread that is held up does not hold up the call

inline int worker_id() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

struct VisibleBlock {
  int32_t entry;  // of the table
  bool masked;
  int64_t first;  // column of the first token to read
  int64_t slot;   // of it, in the block
  int tokens;
};

// What a task leaves behind: for each query of the batch row, kv head by kv head, unnormalised sums and
// softmax.
struct Partial {
  float* sums;
  Softmax* softmax;
};

// A query is one query head of one token. They go by kv head, then token, then query head of the group.
inline std::pair<int64_t, int64_t> head_and_token(const Call& call, int64_t query, int64_t group) {
  const int64_t queries_per_head = group * call.q_tokens;
  const int64_t within = query % queries_per_head;
  return {query / queries_per_head * group + within % group, within / group};
}

// clang-format off
// A Layer has
//
//   kPartials                            partial results of a query, one for each kind of tile
//   worker_bytes()                       working memory that a thread needs for it
//   prepare(b, worker)                   what is done once for a row of the batch
//   attend(b, block, next, worker, into) a block, all heads; `next` is null or the block after it
//   store(sums, stride, factor, out)     a row of the output, from the merged sums of its partials
// clang-format on
template <class Layer>
class Attention {
  using Type = typename Layer::Type;

 public:
  Attention(const Blocks& blocks, const Call& call) : blocks_(blocks), call_(call), layer_(blocks, call) {
#if defined(_OPENMP)
    threads_ = std::max<int64_t>(1, call.threads);
#else
    threads_ = 1;
#endif
    queries_ = call.q_heads * call.q_tokens;
    first_token_ = call.start;
    if (call.window != 0) first_token_ = std::max(call.start, call.first_query - call.window + 1);
    first_token_ = std::min(first_token_, call.end);
    splits_ = std::max<int64_t>(1, std::min((kTasksPerThread * threads_ + blocks.batch - 1) / blocks.batch,
                                            (call.end - first_token_) / kMinTokensPerSplit));
    sums_stride_ = round_up(blocks.values.dim, kPair);
  }

  int run(Scratch& scratch) {
    const int64_t tasks = blocks_.batch * splits_;
    const int64_t partials = splits_ > 1 ? tasks : threads_;
    const int64_t results = Layer::kPartials * queries_;
    sums_floats_ = results * sums_stride_;
    partial_bytes_ = round_up(sums_floats_ * 4 + results * static_cast<int64_t>(sizeof(Softmax)), 64);
    // Tokens that lie anyhow touch one block more than they fill.
    const int64_t most_blocks = (call_.end - first_token_) / blocks_.block_size + 2;
    visible_bytes_ = round_up(most_blocks * static_cast<int64_t>(sizeof(VisibleBlock)), 64);
    worker_bytes_ = round_up(layer_.worker_bytes(), 64) + visible_bytes_;
    memory_ = scratch.reserve(partials * partial_bytes_ + threads_ * worker_bytes_);
    if (memory_ == nullptr) return kOutOfMemory;
    workers_ = memory_ + partials * partial_bytes_;

    // Always one thread or all of them: a team of another size would make OpenMP end threads and start them
    // again.
    [[maybe_unused]] const bool parallel = threads_ > 1 && tasks > 1;
#pragma omp parallel num_threads(static_cast<int>(threads_)) if (parallel)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < tasks; ++task) run_task(task);
      if (splits_ > 1) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks_.batch * queries_; ++i)
          finish(i / queries_, i % queries_, (i / queries_) * splits_, splits_);
      }
    }
    return status_.load();
  }

 private:
  Partial partial(int64_t index) const {
    char* at = memory_ + index * partial_bytes_;
    return {reinterpret_cast<float*>(at), reinterpret_cast<Softmax*>(at + sums_floats_ * 4)};
  }

  void run_task(int64_t task) {
    const int64_t b = task / splits_, split = task % splits_;
    const int64_t index = splits_ > 1 ? task : worker_id();
    char* visible_at = workers_ + worker_id() * worker_bytes_;
    VisibleBlock* visible = reinterpret_cast<VisibleBlock*>(visible_at);
    char* worker = visible_at + visible_bytes_;

    const Partial result = partial(index);
    std::memset(result.sums, 0, static_cast<std::size_t>(sums_floats_) * 4);
    std::fill(result.softmax, result.softmax + Layer::kPartials * queries_, Softmax());

    // Blocks are counted from the row's own first token.
    const int64_t size = blocks_.block_size, offset = offset_of(blocks_, b);
    const int64_t first = std::max<int64_t>(first_token_ - offset, 0) / size;
    const int64_t end = std::max<int64_t>(call_.end - offset, 0);
    const int64_t blocks = std::max<int64_t>((end + size - 1) / size - first, 0);
    const int64_t count = find_visible(b, offset, first + blocks * split / splits_,
                                       first + blocks * (split + 1) / splits_, visible);
    if (count > 0) layer_.prepare(b, worker);
    for (int64_t j = 0; j < count; ++j) {
      layer_.attend(b, visible[j], j + 1 < count ? visible + j + 1 : nullptr, worker, result);
    }
    if (splits_ == 1) {
      for (int64_t query = 0; query < queries_; ++query) finish(b, query, index, 1);
    }
  }

  // The blocks among [from, to) of row b that are stored and not wholly masked.
  int64_t find_visible(int64_t b, int64_t offset, int64_t from, int64_t to, VisibleBlock* visible) {
    int64_t count = 0;
    if (to > blocks_.max_blocks) {
      status_ = kBlockOutOfRange;
      return 0;
    }
    for (int64_t j = from; j < to; ++j) {
      const int32_t entry = blocks_.table[b * blocks_.max_blocks + j];
      if (entry == kNullBlock) continue;
      if (!is_held(blocks_, entry)) {
        status_ = kBlockOutOfRange;
        continue;
      }
      const int64_t start = j * blocks_.block_size + offset;
      const int64_t first = std::max(first_token_, start);
      const int tokens = static_cast<int>(std::min(call_.end, start + blocks_.block_size) - first);
      const Visible visibility = visible_to_row(call_, b, first - call_.start, tokens);
      if (visibility == Visible::kNone) continue;
      visible[count++] = {entry, visibility == Visible::kSome, first, first - start, tokens};
    }
    return count;
  }

  // Merges `count` partials of one query, adds the sink, normalises, and writes the row of the output.
  void finish(int64_t b, int64_t query, int64_t first, int64_t count) const {
    const auto [head, token] = head_and_token(call_, query, call_.q_heads / blocks_.kv_heads);
    float top = call_.sinks != nullptr ? call_.sinks[head] : -kInfinity;
    for (int64_t s = 0; s < count; ++s) {
      for (int kind = 0; kind < Layer::kPartials; ++kind) {
        top = std::max(top, partial(first + s).softmax[kind * queries_ + query].top);
      }
    }
    const float base = base_of(top);
    float total = call_.sinks != nullptr ? std::exp(call_.sinks[head] - base) : 0.0f;
    for (int kind = 0; kind < Layer::kPartials; ++kind) {
      total += merge(first, count, kind * queries_ + query, base);
    }
    Type* out = reinterpret_cast<Type*>(call_.out) +
                ((b * call_.q_tokens + token) * call_.q_heads + head) * blocks_.values.dim;
    layer_.store(partial(first).sums + query * sums_stride_, queries_ * sums_stride_,
                 total == 0.0f ? 0.0f : 1.0f / total, out);
    if (call_.lse != nullptr) {
      call_.lse[(b * call_.q_heads + head) * call_.q_tokens + token] = base + std::log(total);
    }
  }

  // Adds one result of `count` partials up in the first of them, measured from `base`. Returns the sum of
  // their totals.
  float merge(int64_t first, int64_t count, int64_t result, float base) const {
    float total = 0.0f;
    float* merged = partial(first).sums + result * sums_stride_;
    for (int64_t s = 0; s < count; ++s) {
      const Partial other = partial(first + s);
      if (s > 0 && other.softmax[result].top == -kInfinity) continue;  // it saw nothing
      const float factor = std::exp(other.softmax[result].top - base);
      total += other.softmax[result].total * factor;
      const float* sums = other.sums + result * sums_stride_;
      for (int64_t i = 0; i < sums_stride_; i += kLanes) {
        const Vec scaled = load(sums + i) * factor;
        store(merged + i, s == 0 ? scaled : load(merged + i) + scaled);
      }
    }
    return total;
  }

  const Blocks& blocks_;
  const Call& call_;
  const Layer layer_;
  int64_t threads_, queries_, splits_;
  int64_t first_token_;
  int64_t sums_stride_, sums_floats_ = 0, partial_bytes_ = 0, visible_bytes_ = 0, worker_bytes_ = 0;
  char* memory_ = nullptr;
  char* workers_ = nullptr;
  std::atomic<int> status_{kOk};
};

int decode_records(const Blocks& blocks, const Call& call, Scratch& scratch);  // record_layer.cpp

}  // namespace paged
