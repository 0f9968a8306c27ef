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

// Calls f(i), which returns a status, for i < count, by several threads if that is worth it. Alike pieces are
// shared out, others given one by one. Returns the least status that is no success.
template <class F>
int for_each(int64_t count, bool alike, int64_t threads, [[maybe_unused]] bool is_much, F f) {
  std::atomic<int> worst{kOk};
  [[maybe_unused]] const bool parallel = is_much && threads > 1 && count > 1;
  // In one piece where one thread has them all: OpenMP hands out pieces even then.
  [[maybe_unused]] const int64_t share = parallel ? (count + threads - 1) / threads : std::max<int64_t>(count, 1);
  [[maybe_unused]] const int64_t chunk = alike ? share : 1;
#pragma omp parallel for schedule(dynamic, chunk) num_threads(static_cast<int>(threads)) if (parallel)
  for (int64_t i = 0; i < count; ++i) {
    const int status = f(i);
    int known = worst.load();
    while (status != kOk && (known == kOk || status < known)) {
      if (worst.compare_exchange_weak(known, status)) break;
    }
  }
  return worst.load();
}

// Numbers in so many tokens of all heads.
int64_t values_of(const Blocks& blocks, int64_t tokens) {
  return tokens * blocks.kv_heads * (blocks.keys.dim + blocks.values.dim);
}

// K or V of a layer, and the tokens of it that are not in blocks.
struct BothPlaces {
  const Side& side;
  const Strided& outside;
  Status unstorable;
};

std::array<BothPlaces, 2> sides_of(const Blocks& blocks, const Tokens& tokens) {
  return {{{blocks.keys, tokens.keys, kUnstorableKeys}, {blocks.values, tokens.values, kUnstorableValues}}};
}

template <class Type>
void copy_tokens(Vectors<Type> to, Vectors<Type> from, int64_t tokens, int64_t dim) {
  const std::size_t bytes = static_cast<std::size_t>(dim) * sizeof(Type);
  if (to.stride == dim && from.stride == dim) {
    std::memcpy(to.first, from.first, static_cast<std::size_t>(tokens) * bytes);
    return;
  }
  for (int64_t t = 0; t < tokens; ++t) std::memcpy(to[t], from[t], bytes);
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

// Tokens [slot, slot + tokens) of one side of a record become what `x` holds.
template <class Element>
int encode(const Stored& s, int64_t slot, int64_t tokens, Vectors<typename Element::Type> x) {
  static thread_local Scratch scratch;
  const bool whole = !is_per_token(s.codec);
  const Room room = Room::of(scratch, s.dim, whole ? tokens : 1);
  if (room.tokens == nullptr) return kOutOfMemory;
  for (int64_t t = 0; t < tokens; ++t) {
    float* wide = room.padded(whole ? t : 0);
    for (int64_t i = 0; i < s.dim; ++i) wide[i] = Element::to_float(x[t][i]);
    if (is_rotated(s.codec)) rotate(wide, s.dim);
    if (!whole) encode_token(s, slot + t, wide, room.codes);
  }
  if (whole) encode_block(s, room.tokens, room.stride, room.params, room.codes);
  return kOk;
}

// The way back; what comes out is not rotated.
template <class Element>
int decode(const Stored& s, int64_t slot, int64_t tokens, Vectors<typename Element::Type> x) {
  static thread_local Scratch scratch;
  const Room room = Room::of(scratch, s.dim, 1);
  if (room.tokens == nullptr) return kOutOfMemory;
  widen_block_params(s, room.params);
  for (int64_t t = 0; t < tokens; ++t) {
    float* wide = room.padded(0);
    decode_token(s, slot + t, room.params, wide);
    if (is_rotated(s.codec)) unrotate(wide, s.dim);
    for (int64_t i = 0; i < s.dim; i += kPair) {
      store_up_to<Element>(x[t] + i, Element::lanes_of(wide + i), s.dim - i);
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

// One piece into blocks, or out of them; what is not stored is read as zeros.
template <class Element, bool kWrites>
int move_piece(const Blocks& blocks, const Tokens& outside, const Piece& p) {
  using Type = typename Element::Type;
  if (kWrites && p.entry == kNullBlock) return kOk;
  if (!is_held(blocks, p.entry)) return kBlockOutOfRange;
  const bool in_record = has_records(blocks) && p.entry >= 0;
  const int64_t block = has_records(blocks) ? residual_block(p.entry) : p.entry;
  for (const auto& [side, tokens, _] : sides_of(blocks, outside)) {
    const Vectors<Type> x = {at<Type>(tokens, p.b, p.h, p.from - outside.start), tokens.token_stride};
    if (p.entry == kNullBlock) {
      std::memset(x.first, 0, static_cast<std::size_t>(p.tokens() * side.dim) * sizeof(Type));
    } else if (in_record) {
      const Stored s = stored_in(blocks, side, record_at(blocks, p.entry, p.h));
      const auto convert = kWrites ? encode<Element> : decode<Element>;
      if (const int status = convert(s, p.slot, p.tokens(), x)) return status;
    } else {
      const Vectors<Type> inside = {at<Type>(side.pool, block, p.h, p.slot), side.pool.token_stride};
      copy_tokens(kWrites ? inside : x, kWrites ? x : inside, p.tokens(), side.dim);
    }
  }
  return kOk;
}

// To records nothing is written unless everything can be.
template <class Element>
int write(const Blocks& blocks, const Tokens& fresh) {
  const int64_t end = fresh.start + fresh.tokens, pieces = Piece::count(blocks, fresh.start, end);
  const int64_t bytes =
      values_of(blocks, blocks.batch * fresh.tokens) * static_cast<int64_t>(sizeof(typename Element::Type));
  const auto check = [&](int64_t i) {
    return why_not_written<Element>(blocks, fresh, Piece(blocks, i, fresh.start, end));
  };
  const auto move = [&](int64_t i) {
    return move_piece<Element, true>(blocks, fresh, Piece(blocks, i, fresh.start, end));
  };
  if (!has_records(blocks)) return for_each(pieces, true, fresh.threads, bytes >= kParallelCopyBytes, move);
  const int fault = for_each(pieces, true, fresh.threads, bytes >= kParallelCodes, check);
  return fault != kOk ? fault : for_each(pieces, false, fresh.threads, bytes >= kParallelCodes, move);
}

// To contiguous tensors.
template <class Element>
int gather(const Blocks& blocks, const Tokens& wanted) {
  if (wanted.tokens == 0) return kOk;  // tensors of nothing lie nowhere
  const int64_t end = wanted.start + wanted.tokens;
  const bool is_much = values_of(blocks, blocks.batch * wanted.tokens) >= kParallelCodes;
  return for_each(Piece::count(blocks, wanted.start, end), false, wanted.threads, is_much, [&](int64_t i) {
    return move_piece<Element, false>(blocks, wanted, Piece(blocks, i, wanted.start, end));
  });
}

// Residual blocks to records, or back: residual[i] and ids[i] belong together.
template <class Element>
int convert(const Blocks& blocks, const int64_t* residual, const int64_t* ids, int64_t count, int64_t threads,
            bool seals) {
  const auto convert_side = seals ? encode<Element> : decode<Element>;
  const bool is_much = values_of(blocks, count * blocks.block_size) >= kParallelCodes;
  return for_each(count * blocks.kv_heads, false, threads, is_much, [&](int64_t i) {
    const int64_t h = i % blocks.kv_heads, which = i / blocks.kv_heads;
    int status = kOk;
    for (const Side* side : {&blocks.keys, &blocks.values}) {
      const Stored s = stored_in(blocks, *side, record_at(blocks, ids[which], h));
      auto* first = at<typename Element::Type>(side->pool, residual[which], h, 0);
      if (status == kOk) status = convert_side(s, 0, blocks.block_size, {first, side->pool.token_stride});
    }
    return status;
  });
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

PAGED_EXPORT int paged_convert_blocks(const Blocks* blocks, const int64_t* residual, const int64_t* ids,
                                      int64_t count, int64_t threads, int64_t seals) {
  return with_element_type(blocks->element_type, [&](auto element) {
    return convert<decltype(element)>(*blocks, residual, ids, count, threads, seals != 0);
  });
}

// Copies blocks source[i] to target[i] of a pool whose blocks are `block_bytes` long. No target is a source.
PAGED_EXPORT void paged_copy_blocks(char* pool, int64_t block_bytes, const int64_t* source,
                                    const int64_t* target, int64_t count, int64_t threads) {
  for_each(count, true, threads, count * block_bytes >= kParallelCopyBytes, [&](int64_t i) {
    std::memcpy(pool + target[i] * block_bytes, pool + source[i] * block_bytes,
                static_cast<std::size_t>(block_bytes));
    return static_cast<int>(kOk);
  });
}

}  // namespace paged
