// A team of threads that works through one forward pass together: short phases with a barrier after each.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

namespace penstock {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Between two passes the helpers sleep. Within a pass they spin, for phases are microseconds long, and give the core
// away when a phase takes longer than that: then somebody else wants the core that they spin on.
class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; i++) std::thread([this] { serve(); }).detach();
  }

  int size() const { return size_; }

  // Run `work` on all threads; returns when all have come to its end.
  void run(const std::function<void()>& work) {
    if (size_ == 1) return work();
    work_ = &work;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work();
    barrier();
  }

  // Within `run`: units 0..n-1, each done by whichever thread is free, then a barrier.
  template <typename Unit>
  void each(int n, Unit unit) {
    if (size_ == 1) {
      for (int i = 0; i < n; i++) unit(i);
      return;
    }
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n;) unit(i);
    barrier();
  }

 private:
  static constexpr int kSpins = 4000;

  void barrier() {
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;) {
      if (++spins < kSpins)
        relax();
      else
        sched_yield();
    }
  }

  void serve() {
    for (uint32_t seen = 0;;) {
      generation_.wait(seen, std::memory_order_acquire);
      seen++;
      (*work_)();
      barrier();
    }
  }

  const int size_;
  const std::function<void()>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace penstock
