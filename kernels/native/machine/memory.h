// Large memory.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace penstock {

inline void advise_huge_pages(void* begin, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  madvise(begin, num_bytes, MADV_HUGEPAGE);
#endif
}

// Memory that only grows, on huge pages if there are any: consecutive rows are on different small pages.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  float* of(size_t num_floats) {
    if (num_floats > size_) {
      std::free(data_);
      const size_t bytes = (num_floats * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
      data_ = static_cast<float*>(std::aligned_alloc(kHugePage, bytes));
      size_ = data_ ? num_floats : 0;
      if (!data_) throw std::bad_alloc();
      advise_huge_pages(data_, bytes);
    }
    return data_;
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;
  float* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace penstock
