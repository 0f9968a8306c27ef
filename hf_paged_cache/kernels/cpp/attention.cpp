// Attention over blocks in the model's dtype, and the entry point for both kinds of layers.
#include "dense.h"
#include "quantized.h"

namespace paged {

template <class Row>
void attend_dense_tile(const TileAttention& tiles, const Blocks& blocks, const Call& call, std::int64_t b,
                       std::int64_t h, Tile<Row> tile, const float* queries, const Partial& result) {
  const std::int64_t rows_per_head = call.q_heads / blocks.kv_heads * call.q_tokens;
  const std::int64_t sums_stride = round_up(blocks.v_head_dim, kPair);
  by_passes(rows_per_head, [&](std::int64_t first, auto count) {
    const std::int64_t row = h * rows_per_head + first;
    const Rows rows = {b,
                       h,
                       first,
                       queries + row * prepared_query_floats<Row>(blocks.head_dim),
                       result.sums + row * sums_stride,
                       result.softmax + row};
    tiles.template attend<Row, decltype(count)::value>(tile, rows);
    tile.key_prefetch_bytes = tile.value_prefetch_bytes = 0;  // the first pass has asked for the next tile
  });
}

template void attend_dense_tile<Float32>(const TileAttention&, const Blocks&, const Call&, std::int64_t,
                                         std::int64_t, Tile<Float32>, const float*, const Partial&);
template void attend_dense_tile<BFloat16>(const TileAttention&, const Blocks&, const Call&, std::int64_t,
                                          std::int64_t, Tile<BFloat16>, const float*, const Partial&);
template void attend_dense_tile<Float16>(const TileAttention&, const Blocks&, const Call&, std::int64_t,
                                         std::int64_t, Tile<Float16>, const float*, const Partial&);

namespace {

template <class Row>
class DenseLayer {
 public:
  using Element = typename Row::Element;
  static constexpr int kParts = 1;

  DenseLayer(const Blocks& blocks, const Call& call) : blocks_(blocks), call_(call), tiles_(blocks, call) {}

  std::int64_t worker_bytes() const { return dense_query_bytes<Row>(blocks_, call_); }

  bool holds(std::int32_t entry) const { return entry >= 0 && entry < blocks_.num_blocks; }

  void prepare(std::int64_t b, char* worker) const {
    prepare_dense_queries<Row>(blocks_, call_, b, reinterpret_cast<float*>(worker));
  }

  void attend(std::int64_t b, const VisibleBlock& block, const VisibleBlock* next, const char* worker,
              const Partial& result) const {
    for (std::int64_t h = 0; h < blocks_.kv_heads; ++h) {
      Tile<Row> tile = dense_tile<Row>(blocks_, block.entry, block, h);
      const bool last_head = h + 1 == blocks_.kv_heads;
      if (!last_head || next != nullptr) {
        const Tile<Row> after = last_head ? dense_tile<Row>(blocks_, next->entry, *next, 0)
                                          : dense_tile<Row>(blocks_, block.entry, block, h + 1);
        tile.key_prefetch_bytes = bytes_between(tile.keys, after.keys);
        tile.value_prefetch_bytes = bytes_between(tile.values, after.values);
      }
      attend_dense_tile<Row>(tiles_, blocks_, call_, b, h, tile, reinterpret_cast<const float*>(worker),
                             result);
    }
  }

  void store(const float* sums, std::int64_t, float factor, Element* out) const {
    store_values<Row>(sums, factor, static_cast<int>(blocks_.v_head_dim), out);
  }

 private:
  const Blocks& blocks_;
  const Call& call_;
  TileAttention tiles_;
};

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) int paged_decode(const paged::Blocks* blocks,
                                                                   const paged::Call* call) {
  static thread_local paged::Scratch scratch;
  if (paged::has_records(*blocks)) return paged::decode_records(*blocks, *call, scratch);
  return paged::with_element_type(blocks->element_type, [&](auto row) {
    return paged::Attention<paged::DenseLayer<decltype(row)>>(*blocks, *call).run(scratch);
  });
}

extern "C" __attribute__((visibility("default"))) std::int64_t paged_scratch_bytes() {
  return paged::scratch_total_bytes().load();
}
