// The ranks of one host meet in memory that they share.
//
// Every rank counts its own arrivals and waits until the others have counted as many. A waiting rank spins, then yields
// its core, then sleeps, because ranks may outnumber cores, and a peer may be stopped. A sleeping rank asks from time
// to time whether it should go on, so that a dead peer or a signal ends the wait.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "../machine/team.h"

namespace penstock {

struct GivenUp {};  // ends a wait; the function that was asked knows why

struct RankGroup {  // as RankGroupStruct in group.py; one rank's view of its group
  char* memory;  // shared: a `Seat` for each rank, one for sleepers, then parts; null: ranks of several hosts
  int (*ask)();  // with shared memory: may a sleeper go on waiting? Else: sums `numbers` over the ranks. 0: no
  int32_t rank, num_ranks, part_bytes;
  int32_t missed;  // the rank that a sleeper waits for
  double waited;   // how many seconds it has waited so far
  float* numbers;
  int64_t num_numbers;
  uint32_t num_arrivals, num_exchanges;  // this rank's counts so far
};

struct alignas(128) Seat {  // 128 bytes, because neighbouring cache lines are fetched in pairs
  std::atomic<uint32_t> count;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

constexpr size_t kPartsBegin = 4096;  // of the memory

inline Seat& seat(const RankGroup& group, int number) { return reinterpret_cast<Seat*>(group.memory)[number]; }

// The data of rank `rank` for the current exchange. Exchanges alternate between two buffers: before a rank fills one
// again, it has met the others since they last read it.
template <typename T>
T* part_of_rank(const RankGroup& group, int rank) {
  const size_t number = group.num_exchanges % 2 * group.num_ranks + rank;
  return reinterpret_cast<T*>(group.memory + kPartsBegin + number * group.part_bytes);
}

inline void sleep_while(const std::atomic<uint32_t>& count, uint32_t seen) {
  constexpr timespec kAtMost{0, 50'000'000};  // between two calls of `ask`
  syscall(SYS_futex, &count, FUTEX_WAIT, seen, &kAtMost, nullptr, 0);
}

inline void sleep_for(RankGroup& group, int rank) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  std::atomic<uint32_t>& sleepers = seat(group, group.num_ranks).count;
  const std::atomic<uint32_t>& count = seat(group, rank).count;
  for (;;) {
    sleepers.fetch_add(1);  // before checking the count: the other rank counts before it checks for sleepers
    const uint32_t seen = count.load();
    const bool is_there = int32_t(seen - group.num_arrivals) >= 0;
    if (!is_there) sleep_while(count, seen);
    sleepers.fetch_sub(1);
    if (is_there) return;
    if (int32_t(count.load() - group.num_arrivals) >= 0) return;
    group.missed = rank;
    group.waited = std::chrono::duration<double>(Clock::now() - began).count();
    if (!group.ask()) throw GivenUp();
  }
}

// Waits until all ranks have come here; afterwards this rank sees what they wrote before. While it waits it calls
// `idle`, which does a little useful work and returns whether there was any.
template <typename Idle>
void meet(RankGroup& group, Idle idle) {
  constexpr int kSpins = 1000, kYields = 3000;
  const uint32_t number = ++group.num_arrivals;
  seat(group, group.rank).count.store(number);
  if (seat(group, group.num_ranks).count.load())
    syscall(SYS_futex, &seat(group, group.rank).count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  for (int rank = 0; rank < group.num_ranks; rank++) {
    const std::atomic<uint32_t>& count = seat(group, rank).count;
    for (int i = 0; int32_t(count.load(std::memory_order_acquire) - number) < 0; i++) {
      if (i == kSpins + kYields) {
        team->rest([&] { sleep_for(group, rank); });
        break;
      }
      if (idle()) continue;
      if (i < kSpins)
        relax();
      else
        sched_yield();
    }
  }
}

}  // namespace penstock
