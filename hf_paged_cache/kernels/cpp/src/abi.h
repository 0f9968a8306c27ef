// What Python hands to the library: structs of fields that are 8 bytes wide, in native byte order.
//
// `structs.py` has the same ones with the same names, and compares their sizes when it loads the library.
#pragma once

#include <cstdint>

#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))

namespace paged {

// `Codec.kernel_id` of formats/.
enum Codec : int64_t {
  kNoCodec = 0,
  kInt8Token = 1,
  kFp8Token = 2,
  kInt4Token = 3,
  kInt4Channel = 4,
  kInt8Block = 5,
  kInt4Group = 6
};

// Tokens in memory: [blocks or rows of the batch, heads, tokens, dim], each token's elements one after
// another. Strides count elements.
struct Strided {
  char* data;
  int64_t outer_stride, head_stride, token_stride;
};

// K, or V, of one layer, and how they lie in a record. Offsets are bytes from where the record begins.
struct Side {
  Strided pool;  // [num_blocks, kv_heads, block_size, dim]
  int64_t dim;
  int64_t codec;  // kNoCodec in a layer without records
  int64_t codes, params;
  int64_t group_size;  // channels, of kInt4Group
};

// The records of one layer; of a layer without records, zeros.
struct Records {
  uint8_t* data;  // [num_records, kv_heads, bytes]
  int64_t num_records;
  int64_t block_stride, head_stride;  // bytes
  int64_t bytes;                      // of one
};

// One layer's blocks.
struct Blocks {
  Side keys, values;
  const int32_t* table;    // [batch, max_blocks]
  const int32_t* offsets;  // null, or [batch]: columns before the first that is stored
  int64_t element_type;    // of K, V, queries and outputs; not kBool
  int64_t num_blocks, batch, max_blocks, kv_heads, block_size;
  Records records;
};

enum ElementType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kBool = 3 };

// One attention call over columns [start, end).
struct Call {
  Strided query;  // [batch, q_heads, q_tokens, head_dim]
  int64_t q_heads, q_tokens;
  char* out;   // [batch, q_tokens, q_heads, v_head_dim], contiguous
  float* lse;  // null, or [batch, q_heads, q_tokens], contiguous
  int64_t start, end;
  double scale;
  double softcap;       // 0: none
  const float* sinks;   // null, or [q_heads]
  int64_t window;       // 0: none
  int64_t causal;       // 0 or 1
  int64_t first_query;  // column of query 0
  const char* mask;     // null, or [batch, q_heads, q_tokens, end - start] by strides, which may be 0
  int64_t mask_type;
  int64_t mask_batch_stride, mask_head_stride, mask_query_stride, mask_token_stride;
  int64_t threads;
};

// Tokens of every row outside of blocks, [batch, kv_heads, tokens, dim]: those to write, or room for those
// that are gathered.
struct Tokens {
  Strided keys, values;
  int64_t tokens, start, threads;
};

// What the entry points return: 0, or one of these. Of several that occur the least is returned.
enum Status : int {
  kOk = 0,
  kOutOfMemory = 1,
  kBlockOutOfRange = 2,
  kPartOfABlock = 3,
  kUnstorableKeys = 4,
  kUnstorableValues = 5
};

constexpr int kMaxBlockSize = 256;  // `MAX_BLOCK_SIZE` of structs.py
constexpr int32_t kNullBlock = -1;

inline int64_t offset_of(const Blocks& blocks, int64_t b) {
  return blocks.offsets == nullptr ? 0 : blocks.offsets[b];
}

inline bool has_records(const Blocks& blocks) { return blocks.keys.codec != kNoCodec; }

// In the table of a layer with records, entries below kNullBlock name a residual block, one of `pool`.
inline int64_t residual_block(int64_t entry) { return -2 - entry; }

// Whether there is such a block; the null block counts where there are records.
inline bool is_held(const Blocks& blocks, int64_t entry) {
  if (!has_records(blocks)) return entry >= 0 && entry < blocks.num_blocks;
  return entry >= 0 ? entry < blocks.records.num_records : residual_block(entry) < blocks.num_blocks;
}

template <class T>
T* at(const Strided& x, int64_t outer, int64_t head, int64_t token) {
  return reinterpret_cast<T*>(x.data) + outer * x.outer_stride + head * x.head_stride +
         token * x.token_stride;
}

}  // namespace paged
