// Memory for weights, KV cache and intermediate values: aligned, zeroed, on huge pages where the system grants them.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "vec.h"

namespace takt {

constexpr size_t kHugePage = 2u << 20;

// Pages are taken when they are first written. Null when the system refuses.
inline void* map_zeroed(size_t bytes) {
  size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  // One page more, so that the start can be moved to the border of a huge one.
  char* raw = static_cast<char*>(
      mmap(nullptr, rounded + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kHugePage - 1) / kHugePage * kHugePage);
  if (start > raw) munmap(raw, start - raw);
  munmap(start + rounded, raw + kHugePage - start);
  madvise(start, rounded, MADV_HUGEPAGE);
  return start;
}

inline void unmap(void* start, size_t bytes) {
  if (start != nullptr) munmap(start, (bytes + kHugePage - 1) / kHugePage * kHugePage);
}

// A buffer that grows and keeps nothing when it does. Aligned to cache lines.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <class E>
  E* get(size_t count) {
    size_t bytes = (count * sizeof(E) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      size_ = bytes + bytes / 4 / 64 * 64;
      data_ = std::aligned_alloc(64, size_);
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return static_cast<E*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace takt
