// The records that Python hands over: every field is 8 bytes wide, in this order, in native byte order.
// `__init__.py` packs them with `struct`; its format strings must be changed together with these.
#pragma once

#include <cstdint>

namespace paged {

enum Codec : std::int64_t {
  kNoCodec = 0,
  kInt8Token = 1,
  kFp8Token = 2,
  kInt4Token = 3,
  kInt4Channel = 4,
  kInt8Block = 5,
  kInt4Group = 6
};

// How K, or V, lie in a record. Offsets are bytes from where the record begins.
struct Part {
  std::int64_t codec, codes, params;
  std::int64_t group_size;  // channels, of kInt4Group
};

// The records of one layer; of a layer without records, zeros.
struct Records {
  std::uint8_t* data;  // [num_records, kv_heads, bytes]
  std::int64_t num_records;
  std::int64_t block_stride, head_stride;  // bytes
  std::int64_t bytes;                      // of one
  Part keys, values;
};

// One layer's blocks. Strides count elements, not bytes.
struct Blocks {
  char* keys;                 // [num_blocks, kv_heads, block_size, head_dim]
  char* values;               // [num_blocks, kv_heads, block_size, v_head_dim]
  const std::int32_t* table;  // [batch, max_blocks]
  std::int64_t num_blocks;
  std::int64_t key_block_stride, key_head_stride, key_token_stride;
  std::int64_t value_block_stride, value_head_stride, value_token_stride;
  std::int64_t batch, max_blocks, kv_heads, block_size, head_dim, v_head_dim;
  std::int64_t element_type;
  Records records;
  const std::int32_t* offsets;  // null, or [batch]: columns before the first that is stored
};

inline std::int64_t offset_of(const Blocks& blocks, std::int64_t b) {
  return blocks.offsets == nullptr ? 0 : blocks.offsets[b];
}

constexpr std::int32_t kNullBlock = -1;

// In the table of a layer with records, entries below kNullBlock name a slot of `keys` and `values`.
inline std::int64_t dense_slot(std::int32_t entry) { return -2 - static_cast<std::int64_t>(entry); }
inline bool has_records(const Blocks& blocks) { return blocks.records.keys.codec != kNoCodec; }

enum MaskType : std::int64_t {
  kNoMask = 0,
  kBoolMask = 1,
  kFloat32Mask = 2,
  kBFloat16Mask = 3,
  kFloat16Mask = 4
};

// One attention call over columns [start, end).
struct Call {
  const char* query;  // [batch, q_heads, q_tokens, head_dim]
  std::int64_t query_batch_stride, query_head_stride, query_token_stride;
  std::int64_t q_heads, q_tokens;
  char* out;   // [batch, q_tokens, q_heads, v_head_dim], contiguous
  float* lse;  // null, or [batch, q_heads, q_tokens], contiguous
  std::int64_t start, end;
  double scale;
  double softcap;            // 0: none
  const float* sinks;        // null, or [q_heads]
  std::int64_t window;       // 0: none
  std::int64_t causal;       // 0 or 1
  std::int64_t first_query;  // column of query 0
  const char* mask;          // [batch, q_heads, q_tokens, end - start] by strides, which may be 0
  std::int64_t mask_type;
  std::int64_t mask_batch_stride, mask_head_stride, mask_query_stride, mask_token_stride;
  std::int64_t threads;
};

// New tokens: [batch, kv_heads, tokens, head_dim] by strides (in elements), last dimension contiguous.
struct NewTokens {
  const char* keys;
  const char* values;
  std::int64_t key_batch_stride, key_head_stride, key_token_stride;
  std::int64_t value_batch_stride, value_head_stride, value_token_stride;
  std::int64_t tokens, start, threads;
};

// What the entry points return: 0, or one of these.
enum Status : int {
  kOk = 0,
  kBlockOutOfRange = 1,
  kOutOfMemory = 2,
  kUnstorableKeys = 3,
  kUnstorableValues = 4,
  kPartOfABlock = 5
};

}  // namespace paged
