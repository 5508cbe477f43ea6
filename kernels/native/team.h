// A leader and its helpers work through one forward pass together, phase by phase.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace penstock {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The thread that calls `run` is the leader. It alone runs the pass, and opens a phase with `each`: units that whoever
// is free takes. It waits for units that were taken, never for a helper: one that has not woken yet, or whose core
// another process has, delays nobody.
//
// Between two passes the helpers sleep. Within a pass they spin, for phases are microseconds long, and give the core
// away when a phase takes longer than that: then somebody else wants the core that they spin on.
class Team {
 public:
  // From so many multiplications on a pass is worth waking the helpers for.
  Team(int size, double worth_waking) : size_(size), worth_waking_(worth_waking) {
    for (int i = 1; i < size; i++) std::thread([this] { serve(); }).detach();
  }

  int size() const { return size_; }
  double worth_waking() const { return worth_waking_; }

  // Run a pass of about so many multiplications; the helpers are woken if that is worth it. What a unit throws ends
  // the pass, and is thrown here.
  template <typename Work>
  void run(double multiplications, Work work) {
    struct Closing {
      std::atomic<bool>& is_open;
      ~Closing() { is_open.store(false, std::memory_order_release); }
    } closing{is_open_};
    is_open_.store(size_ > 1 && multiplications >= worth_waking_, std::memory_order_release);
    if (is_open()) {
      generation_.fetch_add(1, std::memory_order_release);
      generation_.notify_all();
    }
    work();
  }

  // Within `run`: units 0..n-1, in no order. They are taken `together` at a time: what is quickly done is not worth
  // the way between two cores.
  template <typename Unit>
  void each(int n, int together, Unit unit) {
    if (!is_open() || n <= together) {
      for (int i = 0; i < n; i++) unit(i);
      return;
    }
    unit_ = &unit;
    call_ = [](void* unit, int begin, int end) {
      for (int i = begin; i < end; i++) (*static_cast<Unit*>(unit))(i);
    };
    num_units_ = n;
    together_ = together;
    const uint32_t parts = (n + together - 1) / together;
    num_done_.store(0, std::memory_order_relaxed);
    phase_.store(uint64_t(parts) << 32, std::memory_order_release);
    take_part();
    for (int spins = 0; num_done_.load(std::memory_order_acquire) != parts;) wait(spins);
    if (has_failed_.load(std::memory_order_relaxed)) {
      has_failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

 private:
  static constexpr int kSpins = 4000;

  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  static void wait(int& spins) {
    if (++spins < kSpins)
      relax();
    else
      sched_yield();
  }

  // Do parts of the present phase while there are some; whether there were any. What describes the phase is read
  // once a part is taken: until that is done, the leader opens no other.
  bool take_part() {
    bool has_taken = false;
    for (uint64_t seen = phase_.load(std::memory_order_acquire); uint32_t(seen) < seen >> 32;) {
      seen = phase_.fetch_add(1, std::memory_order_acq_rel);
      if (uint32_t(seen) >= seen >> 32) break;
      const int begin = int(uint32_t(seen)) * together_;
      try {
        call_(unit_, begin, std::min(begin + together_, num_units_));
      } catch (...) {  // the leader throws it again, when nobody works on the phase any more
        if (!has_failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
      }
      num_done_.fetch_add(1, std::memory_order_release);
      has_taken = true;
    }
    return has_taken;
  }

  void serve() {
    for (uint32_t seen = 0;;) {
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      for (int spins = 0; is_open();) {
        if (take_part()) spins = 0;
        wait(spins);
      }
    }
  }

  const int size_;
  const double worth_waking_;
  void* unit_ = nullptr;
  void (*call_)(void*, int, int) = nullptr;
  int num_units_ = 0, together_ = 1;
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<bool> is_open_{false};
  alignas(64) std::atomic<uint64_t> phase_{0};  // parts in the upper half, how many of them are taken in the lower
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;  // of the part that failed first; its `num_done_` publishes it
};

static std::unique_ptr<Team> team;  // of this library

constexpr double kLargeWork = 1e12;  // multiplications that are worth all threads

}  // namespace penstock
