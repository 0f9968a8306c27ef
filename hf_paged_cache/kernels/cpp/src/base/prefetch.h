// Fetching the next tile while this one is being computed.
#pragma once

#include <cstdint>

namespace paged {

constexpr int kLineBytes = 64;

// Asks for the cache lines that begin within `bytes` bytes from `p`, which may point anywhere: prefetching
// never faults.
inline void prefetch_lines(const void* p, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(p) + offset, 0, 2);
  }
}

// The same of the `piece`-th of many pieces, of which those smaller than a line ask once a line.
inline void prefetch_piece(const void* p, int bytes, int piece) {
  if (bytes >= kLineBytes || (piece * bytes) % kLineBytes == 0) prefetch_lines(p, bytes);
}

template <class T>
inline const T* moved(const T* p, int64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<std::intptr_t>(p) + bytes);
}

inline int64_t bytes_between(const void* from, const void* to) {
  return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
}

}  // namespace paged
