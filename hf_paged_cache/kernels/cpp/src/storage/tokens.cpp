// Tokens on their way into blocks and out of them: written, gathered, sealed as records and unsealed.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>

#include "../base/scratch.h"
#include "encoding.h"
#include "hadamard.h"

namespace paged {
namespace {

// Below these the work is done before other threads have woken up.
constexpr int64_t kParallelCopyBytes = 128 * 1024, kParallelCodes = 32 * 1024;

// What one entry of the table, of one head, has of columns [start, end) of the batch: columns [from, to), the
// first of them in slot `slot`. Null and without tokens where a row has fewer of them.
struct Piece {
  int64_t b, h, entry, from, to, slot;

  Piece(const Blocks& blocks, int64_t index, int64_t start, int64_t end) {
    const int64_t entries = entries_of(blocks, start, end);
    h = index % blocks.kv_heads;
    b = index / blocks.kv_heads / entries;
    const int64_t offset = offset_of(blocks, b);
    const int64_t first = std::max<int64_t>(start - offset, 0) / blocks.block_size;
    const int64_t column = first + index / blocks.kv_heads % entries;
    const int64_t begin = column * blocks.block_size + offset;
    from = std::max(start, begin);
    to = std::max(from, std::min(end, begin + blocks.block_size));
    slot = from - begin;
    entry = kNullBlock;
    if (from < to) {
      entry = column < blocks.max_blocks ? blocks.table[b * blocks.max_blocks + column] : kOutside;
    }
  }

  int64_t tokens() const { return to - from; }

  static int64_t count(const Blocks& blocks, int64_t start, int64_t end) {
    return blocks.batch * entries_of(blocks, start, end) * blocks.kv_heads;
  }

 private:
  static constexpr int64_t kOutside = std::numeric_limits<int32_t>::max();  // of every pool

  static int64_t entries_of(const Blocks& blocks, int64_t start, int64_t end) {
    // Where rows begin anyhow, their tokens may touch one block more than they fill.
    if (blocks.offsets != nullptr) return (end - start + blocks.block_size - 1) / blocks.block_size + 1;
    return (end + blocks.block_size - 1) / blocks.block_size - start / blocks.block_size;
  }
};

// The least status of all threads that is no success.
class Outcome {
 public:
  void add(int status) {
    int known = status_.load();
    while (status != kOk && (known == kOk || status < known)) {
      if (status_.compare_exchange_weak(known, status)) return;
    }
  }
  int status() const { return status_.load(); }

 private:
  std::atomic<int> status_{kOk};
};

// K or V of a layer, and the tokens of it that are not in blocks.
struct BothPlaces {
  const Side& side;
  const Strided& outside;
  Status unstorable;
};

std::array<BothPlaces, 2> sides_of(const Blocks& blocks, const Tokens& tokens) {
  return {{{blocks.keys, tokens.keys, kUnstorableKeys}, {blocks.values, tokens.values, kUnstorableValues}}};
}

// Some tokens of one head, strides in elements.
template <class Type>
void copy_tokens(Type* to, int64_t to_stride, const Type* from, int64_t from_stride, int64_t tokens,
                 int64_t dim) {
  const std::size_t bytes = static_cast<std::size_t>(dim) * sizeof(Type);
  if (to_stride == dim && from_stride == dim) {
    std::memcpy(to, from, static_cast<std::size_t>(tokens) * bytes);
    return;
  }
  for (int64_t i = 0; i < tokens; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
}

// Whether all are finite and small enough. NaN fails every comparison.
template <class Element>
bool is_storable(const typename Element::Type* x, int64_t dim) {
  IVec good = ~IVec{};
  for (int64_t i = 0; i < dim; i += kPair) {
    const Pair v = load_up_to<Element>(x + i, dim - i);
    good &= (v.a <= kLargestHalf) & (v.a >= -kLargestHalf);
    good &= (v.b <= kLargestHalf) & (v.b >= -kLargestHalf);
  }
  int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= good[i];
  return all != 0;
}

// A thread's room for one side of a record: tokens as floats, codes of one, parameters of a block.
struct Room {
  int64_t stride;  // floats between tokens
  float* tokens;
  float* params;
  uint8_t* codes;

  static Room of(Scratch& scratch, int64_t dim, int64_t tokens) {
    const int64_t stride = round_up(dim, kPair);
    // One vector more, because the last token may be read past its end.
    const int64_t floats = tokens * stride + kPair + round_up(2 * stride, 16);
    char* memory = scratch.reserve(floats * 4 + round_up(dim, 64));
    float* first = reinterpret_cast<float*>(memory);
    return {stride, first, first + tokens * stride + kPair, reinterpret_cast<uint8_t*>(first + floats)};
  }

  // Token `t`, with zeros where it may be read past its end.
  float* padded(int64_t t) const {
    float* x = tokens + t * stride;
    for (int64_t i = stride - kPair; i < stride; i += kLanes) store(x + i, Vec{});
    return x;
  }
};

// The next three are compiled once for all element types.

// One token of a record, or of the block that it will be when all are there.
__attribute__((noinline)) void encode_one(const Stored& s, int64_t slot, float* x, const Room& room) {
  if (is_rotated(s.codec)) rotate(x, s.dim);
  if (is_per_token(s.codec)) encode_token(s, slot, x, room.codes);
}

__attribute__((noinline)) void encode_together(const Stored& s, const Room& room) {
  encode_block(s, room.tokens, room.stride, room.params, room.codes);
}

__attribute__((noinline)) void decode_one(const Stored& s, int64_t slot, const Room& room) {
  decode_token(s, slot, room.params, room.tokens);
  if (is_rotated(s.codec)) unrotate(room.tokens, s.dim);
}

// Tokens [slot, slot + tokens) of one side of a record, from tokens `stride` elements apart.
template <class Element>
int encode(const Stored& s, int64_t slot, int64_t tokens, const typename Element::Type* from,
           int64_t stride) {
  static thread_local Scratch scratch;
  const bool whole = !is_per_token(s.codec);
  const Room room = Room::of(scratch, s.dim, whole ? tokens : 1);
  if (room.tokens == nullptr) return kOutOfMemory;
  for (int64_t t = 0; t < tokens; ++t) {
    float* x = room.padded(whole ? t : 0);
    for (int64_t i = 0; i < s.dim; ++i) x[i] = Element::to_float(from[t * stride + i]);
    encode_one(s, slot + t, x, room);
  }
  if (whole) encode_together(s, room);
  return kOk;
}

// The way back; what comes out is not rotated.
template <class Element>
int decode(const Stored& s, int64_t slot, int64_t tokens, typename Element::Type* to, int64_t stride) {
  static thread_local Scratch scratch;
  const Room room = Room::of(scratch, s.dim, 1);
  if (room.tokens == nullptr) return kOutOfMemory;
  widen_block_params(s, room.params);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* x = room.padded(0);
    decode_one(s, slot + t, room);
    for (int64_t i = 0; i < s.dim; i += kPair) {
      store_up_to<Element>(to + t * stride + i, Element::lanes_of(x + i), s.dim - i);
    }
  }
  return kOk;
}

template <class Element>
int why_not_written(const Blocks& blocks, const Tokens& fresh, const Piece& p) {
  using Type = typename Element::Type;
  if (!is_held(blocks, p.entry)) return kBlockOutOfRange;
  const bool per_token = is_per_token(blocks.keys.codec) && is_per_token(blocks.values.codec);
  if (p.entry >= 0 && p.tokens() != blocks.block_size && !per_token) return kPartOfABlock;
  for (const auto& [side, outside, unstorable] : sides_of(blocks, fresh)) {
    const Type* x = at<const Type>(outside, p.b, p.h, p.from - fresh.start);
    for (int64_t t = 0; t < p.tokens(); ++t) {
      if (!is_storable<Element>(x + t * outside.token_stride, side.dim)) return unstorable;
    }
  }
  return kOk;
}

template <class Element>
int write_piece(const Blocks& blocks, const Tokens& fresh, const Piece& p) {
  using Type = typename Element::Type;
  if (p.entry == kNullBlock) return kOk;
  const bool encodes = has_records(blocks) && p.entry >= 0;
  const int64_t block = has_records(blocks) ? residual_block(p.entry) : p.entry;
  for (const auto& [side, outside, _] : sides_of(blocks, fresh)) {
    const Type* from = at<const Type>(outside, p.b, p.h, p.from - fresh.start);
    const int64_t stride = side.pool.token_stride;
    if (!encodes) {
      copy_tokens(at<Type>(side.pool, block, p.h, p.slot), stride, from, outside.token_stride, p.tokens(),
                  side.dim);
    } else if (const int status = encode<Element>(stored_in(blocks, side, record_at(blocks, p.entry, p.h)),
                                                  p.slot, p.tokens(), from, outside.token_stride)) {
      return status;
    }
  }
  return kOk;
}

// To records nothing is written unless everything can be.
template <class Element>
int write(const Blocks& blocks, const Tokens& fresh) {
  const int64_t end = fresh.start + fresh.tokens, pieces = Piece::count(blocks, fresh.start, end);
  const int64_t bytes = blocks.batch * fresh.tokens * blocks.kv_heads *
                        (blocks.keys.dim + blocks.values.dim) *
                        static_cast<int64_t>(sizeof(typename Element::Type));
  const bool checks = has_records(blocks);
  [[maybe_unused]] const bool parallel =
      fresh.threads > 1 && bytes >= (checks ? kParallelCodes : kParallelCopyBytes);
  const auto piece = [&](int64_t i) { return Piece(blocks, i, fresh.start, end); };
  Outcome checked, written;
  if (!checks) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(fresh.threads)) if (parallel)
    for (int64_t i = 0; i < pieces; ++i) {
      const Piece p = piece(i);
      const bool is_fine = p.entry == kNullBlock || is_held(blocks, p.entry);
      written.add(is_fine ? write_piece<Element>(blocks, fresh, p) : kBlockOutOfRange);
    }
    return written.status();
  }
#pragma omp parallel num_threads(static_cast<int>(fresh.threads)) if (parallel)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pieces; ++i) checked.add(why_not_written<Element>(blocks, fresh, piece(i)));
    if (checked.status() == kOk) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < pieces; ++i) written.add(write_piece<Element>(blocks, fresh, piece(i)));
    }
  }
  return checked.status() == kOk ? written.status() : checked.status();
}

template <class Element>
int gather_piece(const Blocks& blocks, const Tokens& wanted, const Piece& p) {
  using Type = typename Element::Type;
  if (!is_held(blocks, p.entry)) return kBlockOutOfRange;
  for (const auto& [side, outside, _] : sides_of(blocks, wanted)) {
    Type* to = at<Type>(outside, p.b, p.h, p.from - wanted.start);
    if (p.entry == kNullBlock) {
      std::memset(to, 0, static_cast<std::size_t>(p.tokens() * side.dim) * sizeof(Type));
    } else if (p.entry < kNullBlock) {
      copy_tokens(to, side.dim, at<const Type>(side.pool, residual_block(p.entry), p.h, p.slot),
                  side.pool.token_stride, p.tokens(), side.dim);
    } else if (const int status = decode<Element>(stored_in(blocks, side, record_at(blocks, p.entry, p.h)),
                                                  p.slot, p.tokens(), to, side.dim)) {
      return status;
    }
  }
  return kOk;
}

// Into contiguous rows.
template <class Element>
int gather(const Blocks& blocks, const Tokens& wanted) {
  if (wanted.tokens == 0) return kOk;  // tensors of nothing lie nowhere
  const int64_t end = wanted.start + wanted.tokens, pieces = Piece::count(blocks, wanted.start, end);
  [[maybe_unused]] const bool parallel =
      wanted.threads > 1 && pieces > 1 &&
      blocks.batch * blocks.kv_heads * wanted.tokens * (blocks.keys.dim + blocks.values.dim) >=
          kParallelCodes;
  Outcome outcome;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(wanted.threads)) if (parallel)
  for (int64_t i = 0; i < pieces; ++i) {
    outcome.add(gather_piece<Element>(blocks, wanted, Piece(blocks, i, wanted.start, end)));
  }
  return outcome.status();
}

// Residual blocks to records, or back: residual[i] and ids[i] belong together.
template <class Element, bool kSeals>
int convert(const Blocks& blocks, const int64_t* residual, const int64_t* ids, int64_t count,
            int64_t threads) {
  using Type = typename Element::Type;
  const int64_t pieces = count * blocks.kv_heads, size = blocks.block_size;
  [[maybe_unused]] const bool parallel =
      threads > 1 && pieces * size * (blocks.keys.dim + blocks.values.dim) >= kParallelCodes;
  Outcome outcome;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (parallel)
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t h = i % blocks.kv_heads;
    for (const Side& side : {blocks.keys, blocks.values}) {
      Type* x = at<Type>(side.pool, residual[i / blocks.kv_heads], h, 0);
      const Stored s = stored_in(blocks, side, record_at(blocks, ids[i / blocks.kv_heads], h));
      if constexpr (kSeals) {
        outcome.add(encode<Element>(s, 0, size, x, side.pool.token_stride));
      } else {
        outcome.add(decode<Element>(s, 0, size, x, side.pool.token_stride));
      }
    }
  }
  return outcome.status();
}

}  // namespace

PAGED_EXPORT int paged_write(const Blocks* blocks, const Tokens* fresh) {
  return with_element_type(blocks->element_type,
                           [&](auto element) { return write<decltype(element)>(*blocks, *fresh); });
}

PAGED_EXPORT int paged_gather(const Blocks* blocks, const Tokens* wanted) {
  return with_element_type(blocks->element_type,
                           [&](auto element) { return gather<decltype(element)>(*blocks, *wanted); });
}

PAGED_EXPORT int paged_encode_blocks(const Blocks* blocks, const int64_t* residual, const int64_t* ids,
                                     int64_t count, int64_t threads) {
  return with_element_type(blocks->element_type, [&](auto element) {
    return convert<decltype(element), true>(*blocks, residual, ids, count, threads);
  });
}

PAGED_EXPORT int paged_decode_blocks(const Blocks* blocks, const int64_t* residual, const int64_t* ids,
                                     int64_t count, int64_t threads) {
  return with_element_type(blocks->element_type, [&](auto element) {
    return convert<decltype(element), false>(*blocks, residual, ids, count, threads);
  });
}

// Copies blocks source[i] to target[i] of a pool whose blocks are `block_bytes` long. No target is also a
// source.
PAGED_EXPORT void paged_copy_blocks(char* pool, int64_t block_bytes, const int64_t* source,
                                    const int64_t* target, int64_t count, int64_t threads) {
  [[maybe_unused]] const bool parallel = threads > 1 && count * block_bytes >= kParallelCopyBytes;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (parallel)
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(pool + target[i] * block_bytes, pool + source[i] * block_bytes,
                static_cast<std::size_t>(block_bytes));
  }
}

}  // namespace paged
