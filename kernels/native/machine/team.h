// A leader and its helpers compute one forward pass together, phase by phase.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

namespace penstock {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The thread that calls `run` is the leader. It alone runs the pass, and opens each phase with `each`: a number of
// units of work, which any free thread takes. The leader waits for units that have been taken, but never for a helper
// as such. So a helper that has not woken up yet, or whose core runs another process, delays nothing.
//
// Helpers sleep between passes. Within a pass they spin, because phases take microseconds. If a phase takes longer,
// they yield their core, because some other process needs it.
class Team {
 public:
  // Helpers are woken for passes of at least `worth_waking` multiplications.
  Team(int size, double worth_waking) : size_(size), worth_waking_(worth_waking) {
    for (int i = 1; i < size; i++) std::thread([this] { serve(); }).detach();
  }

  int size() const { return size_; }
  double worth_waking() const { return worth_waking_; }

  // Runs a pass of about this many multiplications; wakes the helpers if that pays. If a unit throws, the pass ends and
  // the exception is rethrown here.
  template <typename Work>
  void run(double multiplications, Work work) {
    struct Closing {
      std::atomic<bool>& is_open;
      ~Closing() { is_open.store(false, std::memory_order_release); }
    } closing{is_open_};
    if (size_ > 1 && multiplications >= worth_waking_) open();
    work();
  }

  // Within `run`, between phases: lets helpers sleep while the leader waits for something that may take long.
  template <typename Wait>
  void rest(Wait wait) {
    const bool was_open = is_open_.exchange(false, std::memory_order_acq_rel);
    wait();
    if (was_open) open();
  }

  // Within `run`: computes units 0..n-1 in any order. Threads take `together` of them at a time, since handing over
  // very short work costs more than doing it.
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

  void open() {
    is_open_.store(true, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

  static void wait(int& spins) {
    if (++spins < kSpins)
      relax();
    else
      sched_yield();
  }

  // Does parts of the current phase while there are any; returns whether there were. The phase's description is read
  // only after a part was taken, because until that part is done the leader does not open another phase.
  bool take_part() {
    bool has_taken = false;
    for (uint64_t seen = phase_.load(std::memory_order_acquire); uint32_t(seen) < seen >> 32;) {
      seen = phase_.fetch_add(1, std::memory_order_acq_rel);
      if (uint32_t(seen) >= seen >> 32) break;
      const int begin = int(uint32_t(seen)) * together_;
      try {
        call_(unit_, begin, std::min(begin + together_, num_units_));
      } catch (...) {  // the leader rethrows it once no thread works on the phase
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
  alignas(64) std::atomic<uint64_t> phase_{0};  // upper half: number of parts; lower half: how many of them are taken
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;  // of the part that failed first; published by the update of `num_done_`
};

static Team* team = nullptr;  // never deleted: its helpers sleep in it until the process ends

constexpr double kLargeWork = 1e12;  // multiplications; more than any `worth_waking`

}  // namespace penstock
