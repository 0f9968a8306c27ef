// Putting tokens into records and reading them back as dense rows.
#include <atomic>
#include <cstring>

#include "encode.h"
#include "pieces.h"
#include "quantized.h"
#include "rotation.h"

namespace paged {
namespace {

// Below this the work is done before other threads have woken up.
constexpr std::int64_t kParallelBytes = 32 * 1024;

// Elements as floats, in memory order. `out` has room for `dim` rounded up to pairs.
template <class Row>
void widen_row(const typename Row::Element* row, std::int64_t dim, float* out) {
  for (std::int64_t i = 0; i < dim; ++i) out[i] = Row::to_float(row[i]);
}

template <class Row>
void narrow_row(float* x, std::int64_t dim, typename Row::Element* out) {
  for (std::int64_t i = 0; i < dim; i += kPair) {
    const Pair v = Row::lanes_of(x + i);
    if (dim - i >= kPair) {
      Row::store(out + i, v);
    } else {
      typename Row::Element padded[kPair];
      Row::store(padded, v);
      std::memcpy(out + i, padded, static_cast<std::size_t>(dim - i) * sizeof(padded[0]));
    }
  }
}

// Whether all are finite and small enough. NaN fails every comparison.
template <class Row>
bool storable(const typename Row::Element* row, std::int64_t dim) {
  IVec good = ~IVec{};
  const auto look = [&](Vec v) { good &= (v <= kLargestHalf) & (v >= -kLargestHalf); };
  for (std::int64_t i = 0; i < dim; i += kPair) {
    const Pair v =
        dim - i >= kPair ? Row::load(row + i) : Row::load_first(row + i, static_cast<int>(dim - i));
    look(v.a);
    look(v.b);
  }
  std::int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= good[i];
  return all != 0;
}

// A thread's room for one half of a record: rows of floats, one row of codes, parameters of a block.
struct Room {
  std::int64_t stride;  // floats between rows
  float* rows;
  float* params;
  std::uint8_t* codes;

  static Room of(Scratch& scratch, std::int64_t dim, std::int64_t rows) {
    const std::int64_t stride = round_up(dim, kPair);
    // One vector more, because the last row may be read past its end.
    const std::int64_t floats = rows * stride + kPair + round_up(2 * stride, 16);
    char* memory = scratch.reserve(floats * 4 + code_row_bytes(dim));
    float* first = reinterpret_cast<float*>(memory);
    return {stride, first, first + rows * stride + kPair, reinterpret_cast<std::uint8_t*>(first + floats)};
  }
};

// One row of a record's half, or of the block that it will be when all are there. `row` is a token as it
// came.
__attribute__((noinline)) void encode_row(const Stored& s, std::int64_t slot, float* row, const Room& room) {
  if (is_rotated(s.codec)) rotate(row, s.dim);
  if (is_per_token(s.codec)) encode_token(s, slot, row, room.codes);
}

__attribute__((noinline)) void decode_row(const Stored& s, std::int64_t slot, const Room& room) {
  decode_token(s, slot, room.params, room.rows);
  if (is_rotated(s.codec)) unrotate(room.rows, s.dim);
}

__attribute__((noinline)) void encode_rows_together(const Stored& s, const Room& room) {
  encode_block(s, room.rows, room.stride, room.params, room.codes);
}

// Tokens [slot, slot + tokens) of one half of a record, from rows `token_stride` elements apart.
template <class Row>
int encode_rows(const Stored& s, std::int64_t slot, std::int64_t tokens, const typename Row::Element* from,
                std::int64_t token_stride) {
  static thread_local Scratch scratch;
  const bool whole = !is_per_token(s.codec);
  const Room room = Room::of(scratch, s.dim, whole ? tokens : 1);
  if (room.rows == nullptr) return kOutOfMemory;
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* row = room.rows + (whole ? t * room.stride : 0);
    for (std::int64_t i = room.stride - kPair; i < room.stride; i += kLanes) store(row + i, Vec{});
    widen_row<Row>(from + t * token_stride, s.dim, row);
    encode_row(s, slot + t, row, room);
  }
  if (whole) encode_rows_together(s, room);
  return kOk;
}

// The way back; the rows are not rotated any more.
template <class Row>
int decode_rows(const Stored& s, std::int64_t slot, std::int64_t tokens, typename Row::Element* to,
                std::int64_t token_stride) {
  static thread_local Scratch scratch;
  const Room room = Room::of(scratch, s.dim, 1);
  if (room.rows == nullptr) return kOutOfMemory;
  widen_block_params(s, room.params);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = room.stride - kPair; i < room.stride; i += kLanes) store(room.rows + i, Vec{});
    decode_row(s, slot + t, room);
    narrow_row<Row>(room.rows, s.dim, to + t * token_stride);
  }
  return kOk;
}

bool lies_in(const Piece& p, const Blocks& blocks) {
  return p.entry >= kNullBlock ? p.entry < blocks.records.num_records
                               : dense_slot(static_cast<std::int32_t>(p.entry)) < blocks.num_blocks;
}

template <class Row>
class Writer {
  using Element = typename Row::Element;

 public:
  Writer(const Blocks& blocks, const NewTokens& fresh) : blocks_(blocks), fresh_(fresh) {
    end_ = fresh.start + fresh.tokens;
    pieces_ = Piece::count(blocks, fresh.start, end_);
  }

  // Nothing is written unless everything can be.
  int run() {
    const std::int64_t bytes = blocks_.batch * fresh_.tokens * blocks_.kv_heads *
                               (blocks_.head_dim + blocks_.v_head_dim) *
                               static_cast<std::int64_t>(sizeof(Element));
    [[maybe_unused]] const bool parallel = fresh_.threads > 1 && bytes >= kParallelBytes;
#pragma omp parallel num_threads(static_cast<int>(fresh_.threads)) if (parallel)
    {
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < pieces_; ++i) check(piece(i));
      if (status() == kOk) {
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < pieces_; ++i) write(piece(i));
      }
    }
    return out_of_memory_ ? kOutOfMemory : status();
  }

 private:
  Piece piece(std::int64_t i) const { return Piece(blocks_, i, fresh_.start, end_); }

  int status() const {
    if (out_of_range_) return kBlockOutOfRange;
    if (partial_) return kPartOfABlock;
    if (bad_keys_) return kUnstorableKeys;
    return bad_values_ ? kUnstorableValues : kOk;
  }

  const Element* keys(const Piece& p, std::int64_t token) const {
    return reinterpret_cast<const Element*>(fresh_.keys) + p.b * fresh_.key_batch_stride +
           p.h * fresh_.key_head_stride + token * fresh_.key_token_stride;
  }

  const Element* values(const Piece& p, std::int64_t token) const {
    return reinterpret_cast<const Element*>(fresh_.values) + p.b * fresh_.value_batch_stride +
           p.h * fresh_.value_head_stride + token * fresh_.value_token_stride;
  }

  void check(const Piece& p) {
    const Records& records = blocks_.records;
    if (!lies_in(p, blocks_)) out_of_range_ = true;
    if (p.entry >= 0 && p.to - p.from != blocks_.block_size &&
        !(is_per_token(records.keys.codec) && is_per_token(records.values.codec))) {
      partial_ = true;
    }
    for (std::int64_t t = p.from - fresh_.start; t < p.to - fresh_.start; ++t) {
      if (!storable<Row>(keys(p, t), blocks_.head_dim)) bad_keys_ = true;
      if (!storable<Row>(values(p, t), blocks_.v_head_dim)) bad_values_ = true;
    }
  }

  void write(const Piece& p) {
    if (p.entry == kNullBlock) return;
    const std::int64_t slot = p.slot, tokens = p.to - p.from;
    const Element* new_keys = keys(p, p.from - fresh_.start);
    const Element* new_values = values(p, p.from - fresh_.start);
    if (p.entry >= 0) {
      std::uint8_t* record = record_at(blocks_, p.entry, p.h);
      if (encode_rows<Row>(stored_keys(blocks_, record), slot, tokens, new_keys, fresh_.key_token_stride) !=
              kOk ||
          encode_rows<Row>(stored_values(blocks_, record), slot, tokens, new_values,
                           fresh_.value_token_stride) != kOk) {
        out_of_memory_ = true;
      }
      return;
    }
    const std::int64_t dense = dense_slot(static_cast<std::int32_t>(p.entry));
    copy_rows(reinterpret_cast<Element*>(blocks_.keys) + dense * blocks_.key_block_stride +
                  p.h * blocks_.key_head_stride + slot * blocks_.key_token_stride,
              blocks_.key_token_stride, new_keys, fresh_.key_token_stride, tokens, blocks_.head_dim);
    copy_rows(reinterpret_cast<Element*>(blocks_.values) + dense * blocks_.value_block_stride +
                  p.h * blocks_.value_head_stride + slot * blocks_.value_token_stride,
              blocks_.value_token_stride, new_values, fresh_.value_token_stride, tokens, blocks_.v_head_dim);
  }

  const Blocks& blocks_;
  const NewTokens& fresh_;
  std::int64_t pieces_, end_;
  std::atomic<bool> out_of_range_{false}, partial_{false}, bad_keys_{false}, bad_values_{false};
  std::atomic<bool> out_of_memory_{false};
};

}  // namespace

int write_records(const Blocks& blocks, const NewTokens& fresh) {
  return with_element_type(blocks.element_type,
                           [&](auto row) { return Writer<decltype(row)>(blocks, fresh).run(); });
}

// Dense tokens [start, end) of every row, contiguous: [batch, kv_heads, end - start, dim].
struct Gather {
  char* keys;
  char* values;
  std::int64_t start, end, threads;
};

namespace {

template <class Row>
int gather(const Blocks& blocks, const Gather& wanted) {
  using Element = typename Row::Element;
  const std::int64_t tokens = wanted.end - wanted.start;
  if (tokens == 0) return kOk;  // tensors of nothing lie nowhere
  const std::int64_t pieces = Piece::count(blocks, wanted.start, wanted.end);
  [[maybe_unused]] const bool parallel =
      wanted.threads > 1 && pieces > 1 &&
      blocks.batch * blocks.kv_heads * tokens * (blocks.head_dim + blocks.v_head_dim) >= kParallelBytes;
  std::atomic<int> status{kOk};
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(wanted.threads)) if (parallel)
  for (std::int64_t i = 0; i < pieces; ++i) {
    const Piece p(blocks, i, wanted.start, wanted.end);
    const std::int64_t slot = p.slot, count = p.to - p.from;
    const std::int64_t row = (p.b * blocks.kv_heads + p.h) * tokens + p.from - wanted.start;
    Element* keys = reinterpret_cast<Element*>(wanted.keys) + row * blocks.head_dim;
    Element* values = reinterpret_cast<Element*>(wanted.values) + row * blocks.v_head_dim;
    if (!lies_in(p, blocks)) {
      status = kBlockOutOfRange;
    } else if (p.entry == kNullBlock) {
      std::memset(keys, 0, static_cast<std::size_t>(count * blocks.head_dim) * sizeof(Element));
      std::memset(values, 0, static_cast<std::size_t>(count * blocks.v_head_dim) * sizeof(Element));
    } else if (p.entry < kNullBlock) {
      const std::int64_t dense = dense_slot(static_cast<std::int32_t>(p.entry));
      copy_rows(keys, blocks.head_dim,
                reinterpret_cast<const Element*>(blocks.keys) + dense * blocks.key_block_stride +
                    p.h * blocks.key_head_stride + slot * blocks.key_token_stride,
                blocks.key_token_stride, count, blocks.head_dim);
      copy_rows(values, blocks.v_head_dim,
                reinterpret_cast<const Element*>(blocks.values) + dense * blocks.value_block_stride +
                    p.h * blocks.value_head_stride + slot * blocks.value_token_stride,
                blocks.value_token_stride, count, blocks.v_head_dim);
    } else {
      std::uint8_t* record = record_at(blocks, p.entry, p.h);
      if (decode_rows<Row>(stored_keys(blocks, record), slot, count, keys, blocks.head_dim) != kOk ||
          decode_rows<Row>(stored_values(blocks, record), slot, count, values, blocks.v_head_dim) != kOk) {
        status = kOutOfMemory;
      }
    }
  }
  return status.load();
}

// Slots to records, or back: slots[i] and ids[i] belong together.
template <class Row, bool kEncodes>
int convert(const Blocks& blocks, const std::int64_t* slots, const std::int64_t* ids, std::int64_t count,
            std::int64_t threads) {
  using Element = typename Row::Element;
  const std::int64_t pieces = count * blocks.kv_heads;
  [[maybe_unused]] const bool parallel =
      threads > 1 && pieces * blocks.block_size * (blocks.head_dim + blocks.v_head_dim) >= kParallelBytes;
  std::atomic<int> status{kOk};
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (parallel)
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t h = i % blocks.kv_heads, slot = slots[i / blocks.kv_heads];
    std::uint8_t* record = record_at(blocks, ids[i / blocks.kv_heads], h);
    Element* keys =
        reinterpret_cast<Element*>(blocks.keys) + slot * blocks.key_block_stride + h * blocks.key_head_stride;
    Element* values = reinterpret_cast<Element*>(blocks.values) + slot * blocks.value_block_stride +
                      h * blocks.value_head_stride;
    const Stored k = stored_keys(blocks, record), v = stored_values(blocks, record);
    int done;
    if constexpr (kEncodes) {
      done = encode_rows<Row>(k, 0, blocks.block_size, keys, blocks.key_token_stride);
      if (done == kOk) done = encode_rows<Row>(v, 0, blocks.block_size, values, blocks.value_token_stride);
    } else {
      done = decode_rows<Row>(k, 0, blocks.block_size, keys, blocks.key_token_stride);
      if (done == kOk) done = decode_rows<Row>(v, 0, blocks.block_size, values, blocks.value_token_stride);
    }
    if (done != kOk) status = done;
  }
  return status.load();
}

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) int paged_gather(const paged::Blocks* blocks,
                                                                   const paged::Gather* wanted) {
  return paged::with_element_type(blocks->element_type,
                                  [&](auto row) { return paged::gather<decltype(row)>(*blocks, *wanted); });
}

extern "C" __attribute__((visibility("default"))) int paged_encode_blocks(const paged::Blocks* blocks,
                                                                          const std::int64_t* slots,
                                                                          const std::int64_t* ids,
                                                                          std::int64_t count,
                                                                          std::int64_t threads) {
  return paged::with_element_type(blocks->element_type, [&](auto row) {
    return paged::convert<decltype(row), true>(*blocks, slots, ids, count, threads);
  });
}

extern "C" __attribute__((visibility("default"))) int paged_decode_blocks(const paged::Blocks* blocks,
                                                                          const std::int64_t* slots,
                                                                          const std::int64_t* ids,
                                                                          std::int64_t count,
                                                                          std::int64_t threads) {
  return paged::with_element_type(blocks->element_type, [&](auto row) {
    return paged::convert<decltype(row), false>(*blocks, slots, ids, count, threads);
  });
}
