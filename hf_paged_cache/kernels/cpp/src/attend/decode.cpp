// Paged attention for a few query tokens: every stored key and value is read once, straight from its block.
//
// The work is cut into tasks of (batch row, run of blocks). A task walks its blocks in order and, inside a
// block, the kv heads, whose tiles lie next to each other in memory; all query heads of a kv head share each
// read. Long rows are cut into several tasks so that every thread has work, and their results are merged by
// log-sum-exp (flash-decoding: Dao et al., 2023; paged blocks: Kwon et al., "PagedAttention", 2023).
#include <algorithm>
#include <atomic>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../base/scratch.h"
#include "layer_tiles.h"

namespace paged {
namespace {

constexpr int64_t kMinTokensPerSplit = 256;
constexpr int64_t kTasksPerThread = 4;  // enough that a thread that is held up does not hold up the call

#if defined(_OPENMP)
int worker_id() { return omp_get_thread_num(); }
int64_t threads_for(const Call& call) { return call.threads; }
#else
int worker_id() { return 0; }
int64_t threads_for(const Call&) { return 1; }
#endif

template <class Element>
class Attention {
 public:
  Attention(const Blocks& blocks, const Call& call)
      : blocks_(blocks),
        call_(call),
        layer_(blocks, call),
        threads_(threads_for(call)),
        queries_(call.q_heads * call.q_tokens),
        results_(layer_.kinds() * queries_),
        sums_stride_(round_up(blocks.values.dim, kPair)) {
    first_token_ = call.start;
    if (call.window != 0) first_token_ = std::max(call.start, call.first_query - call.window + 1);
    first_token_ = std::min(first_token_, call.end);
    splits_ = std::max<int64_t>(1, std::min((kTasksPerThread * threads_ + blocks.batch - 1) / blocks.batch,
                                            (call.end - first_token_) / kMinTokensPerSplit));
  }

  int run(Scratch& scratch) {
    const int64_t tasks = blocks_.batch * splits_;
    const int64_t partials = splits_ > 1 ? tasks : threads_;
    partial_bytes_ = round_up(results_ * (sums_stride_ * 4 + static_cast<int64_t>(sizeof(Softmax))), 64);
    // Tokens that lie anyhow touch one block more than they fill.
    const int64_t most_blocks = (call_.end - first_token_) / blocks_.block_size + 2;
    visible_bytes_ = round_up(most_blocks * static_cast<int64_t>(sizeof(VisibleBlock)), 64);
    worker_bytes_ = round_up(layer_.worker_bytes(), 64) + visible_bytes_;
    memory_ = scratch.reserve(partials * partial_bytes_ + threads_ * worker_bytes_);
    if (memory_ == nullptr) return kOutOfMemory;
    workers_ = memory_ + partials * partial_bytes_;

    // One thread or all of them: for a team of another size OpenMP would end threads and start them again.
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
    float* sums = reinterpret_cast<float*>(memory_ + index * partial_bytes_);
    return {{sums, sums_stride_}, reinterpret_cast<Softmax*>(sums + results_ * sums_stride_)};
  }

  void run_task(int64_t task) {
    const int64_t b = task / splits_, split = task % splits_;
    const int64_t index = splits_ > 1 ? task : worker_id();
    char* visible_at = workers_ + worker_id() * worker_bytes_;
    VisibleBlock* visible = reinterpret_cast<VisibleBlock*>(visible_at);
    char* worker = visible_at + visible_bytes_;

    const Partial result = partial(index);
    std::fill(result.sums[0], result.sums[results_], 0.0f);
    std::fill(result.softmax, result.softmax + results_, Softmax());

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
    const float sink = call_.sinks != nullptr ? call_.sinks[head] : -kInfinity;
    float top = sink;
    for (int64_t i = query; i < results_; i += queries_) {
      for (int64_t s = 0; s < count; ++s) top = std::max(top, partial(first + s).softmax[i].top);
    }
    const float base = base_of(top);
    float total = std::exp(sink - base);
    for (int64_t i = query; i < results_; i += queries_) total += merge(first, count, i, base);
    auto* out = reinterpret_cast<typename Element::Type*>(call_.out) +
                ((b * call_.q_tokens + token) * call_.q_heads + head) * blocks_.values.dim;
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    layer_.store(partial(first).sums[query], queries_ * sums_stride_, factor, out);
    if (call_.lse != nullptr) {
      call_.lse[(b * call_.q_heads + head) * call_.q_tokens + token] = base + std::log(total);
    }
  }

  // Adds one result of `count` partials up in the first, measured from `base`. Returns the sum of totals.
  float merge(int64_t first, int64_t count, int64_t result, float base) const {
    float total = 0.0f;
    float* merged = partial(first).sums[result];
    for (int64_t s = 0; s < count; ++s) {
      const Partial other = partial(first + s);
      if (s > 0 && other.softmax[result].top == -kInfinity) continue;  // it saw nothing
      const float factor = std::exp(other.softmax[result].top - base);
      total += other.softmax[result].total * factor;
      const float* sums = other.sums[result];
      for (int64_t i = 0; i < sums_stride_; i += kLanes) {
        const Vec scaled = load(sums + i) * factor;
        store(merged + i, s == 0 ? scaled : load(merged + i) + scaled);
      }
    }
    return total;
  }

  const Blocks& blocks_;
  const Call& call_;
  const Layer<Element> layer_;
  const int64_t threads_, queries_;
  const int64_t results_;  // of a partial: of each query, those of all kinds of tiles
  const int64_t sums_stride_;
  int64_t first_token_, splits_;
  int64_t partial_bytes_ = 0, visible_bytes_ = 0, worker_bytes_ = 0;
  char* memory_ = nullptr;
  char* workers_ = nullptr;
  std::atomic<int> status_{kOk};
};

}  // namespace

PAGED_EXPORT int paged_decode(const Blocks* blocks, const Call* call) {
  static thread_local Scratch scratch;
  return with_element_type(blocks->element_type, [&](auto element) {
    return Attention<decltype(element)>(*blocks, *call).run(scratch);
  });
}

PAGED_EXPORT int64_t paged_scratch_bytes() { return scratch_total_bytes().load(); }

PAGED_EXPORT int64_t paged_bytes_of_blocks() { return sizeof(Blocks); }
PAGED_EXPORT int64_t paged_bytes_of_call() { return sizeof(Call); }
PAGED_EXPORT int64_t paged_bytes_of_tokens() { return sizeof(Tokens); }

}  // namespace paged
