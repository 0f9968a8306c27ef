// Attention over blocks in the model's dtype, and the entry point for both kinds of layers.
#include "dense_tiles.h"

namespace paged {

template <class Element>
void DenseTiles<Element>::attend(int64_t b, int64_t h, Tile<Element> tile, const float* prepared,
                                 const Partial& into) const {
  const int64_t per_head = queries_ / blocks_.kv_heads;
  const int64_t sums_stride = round_up(blocks_.values.dim, kPair);
  by_passes(per_head, [&](int64_t first, auto count) {
    const int64_t query = h * per_head + first;
    const Queries queries = {b,
                             h,
                             first,
                             {prepared + query * query_stride_, query_stride_},
                             {into.sums + query * sums_stride, sums_stride},
                             into.softmax + query};
    tiles_.template attend<Element, decltype(count)::value>(tile, queries);
    tile.key_prefetch_bytes = tile.value_prefetch_bytes = 0;  // the first pass has asked for the next tile
  });
}

template class DenseTiles<Float32>;
template class DenseTiles<BFloat16>;
template class DenseTiles<Float16>;

namespace {

template <class Element>
class DenseLayer {
 public:
  using Type = typename Element::Type;
  static constexpr int kPartials = 1;

  DenseLayer(const Blocks& blocks, const Call& call) : blocks_(blocks), tiles_(blocks, call) {}

  int64_t worker_bytes() const { return tiles_.query_bytes(); }

  void prepare(int64_t b, char* worker) const { tiles_.prepare(b, reinterpret_cast<float*>(worker)); }

  void attend(int64_t b, const VisibleBlock& block, const VisibleBlock* next, const char* worker,
              const Partial& into) const {
    for (int64_t h = 0; h < blocks_.kv_heads; ++h) {
      Tile<Element> tile = tiles_.tile(block.entry, block, h);
      const bool last_head = h + 1 == blocks_.kv_heads;
      if (!last_head || next != nullptr) {
        const Tile<Element> after =
            last_head ? tiles_.tile(next->entry, *next, 0) : tiles_.tile(block.entry, block, h + 1);
        tile.key_prefetch_bytes = bytes_between(tile.keys.first, after.keys.first);
        tile.value_prefetch_bytes = bytes_between(tile.values.first, after.values.first);
      }
      tiles_.attend(b, h, tile, reinterpret_cast<const float*>(worker), into);
    }
  }

  void store(const float* sums, int64_t, float factor, Type* out) const {
    store_values<Element>(sums, factor, static_cast<int>(blocks_.values.dim), out);
  }

 private:
  const Blocks& blocks_;
  DenseTiles<Element> tiles_;
};

}  // namespace

PAGED_EXPORT int paged_decode(const Blocks* blocks, const Call* call) {
  static thread_local Scratch scratch;
  if (has_records(*blocks)) return decode_records(*blocks, *call, scratch);
  return with_element_type(blocks->element_type, [&](auto element) {
    return Attention<DenseLayer<decltype(element)>>(*blocks, *call).run(scratch);
  });
}

PAGED_EXPORT int64_t paged_scratch_bytes() { return scratch_total_bytes().load(); }

PAGED_EXPORT int64_t paged_bytes_of_blocks() { return sizeof(Blocks); }
PAGED_EXPORT int64_t paged_bytes_of_call() { return sizeof(Call); }
PAGED_EXPORT int64_t paged_bytes_of_tokens() { return sizeof(Tokens); }

}  // namespace paged
