// The two records that Python hands over: every field is 8 bytes wide, in this order, in native byte order.
// `__init__.py` packs them with `struct`; its format strings must be changed together with these.
#pragma once

#include <cstdint>

namespace paged {

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
};

enum MaskType : std::int64_t {
  kNoMask = 0,
  kBoolMask = 1,
  kFloat32Mask = 2,
  kBFloat16Mask = 3,
  kFloat16Mask = 4
};

// One attention call over stored tokens [start, end).
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
  std::int64_t first_query;  // stored position of query 0
  const char* mask;          // [batch, q_heads, q_tokens, end - start] by strides, which may be 0
  std::int64_t mask_type;
  std::int64_t mask_batch_stride, mask_head_stride, mask_query_stride, mask_token_stride;
  std::int64_t threads;
};

// What the entry points return: 0, or one of these.
enum Status : int { kOk = 0, kBlockOutOfRange = 1, kOutOfMemory = 2 };

}  // namespace paged
