// The threads of one parallel region, as kernels see them: who am I, what is my share, wait for the others.
// A kernel takes a `Team` and does its share of the work, so kernels compose inside one region without new ones.
#pragma once
#include <omp.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace quire {

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

// Where threads wait for each other, again and again. They spin for up to some tens of microseconds, about as long as a
// sleeper takes to wake up, and then sleep. Each spin in vain makes the next ones shorter: where threads outnumber free
// cores, the one that is waited for may need this very core.
class Barrier {
 public:
  void wait(int size) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1);
      if (sleepers_.load() > 0) wake();
      return;
    }
    const int spins = spins_.load(std::memory_order_relaxed);
    for (int i = 0; i < spins; ++i) {
      if (round_.load(std::memory_order_acquire) != round) {
        if (spins < kMaxSpins) spins_.store(2 * spins, std::memory_order_relaxed);
        return;
      }
      pause();
    }
    spins_.store(std::max(spins / 4, kMinSpins), std::memory_order_relaxed);
    sleepers_.fetch_add(1);  // before it looks again: whoever ends the round then sees the sleeper, or it the new round
    while (round_.load() == round) sleep(round);
    sleepers_.fetch_sub(1);
  }

 private:
  static constexpr int kMinSpins = 32, kMaxSpins = 2048;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
#if defined(__linux__)
  void sleep(uint32_t round) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake() {}
#endif

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> sleepers_{0}, spins_{kMaxSpins};
};

struct Team {
  int rank, size;
  Barrier* barrier;

  // One that works by itself.
  static Team alone() { return {0, 1, nullptr}; }

  // This member's part of `count` equal pieces of work: contiguous, sizes differ by one at most.
  Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }

  // Returns when every member has come here.
  void wait() const {
    if (size > 1) barrier->wait(size);
  }
};

// Calls body(Team) on `num_threads` threads of the process's OpenMP pool, or on one if that is enough.
template <typename Body>
void run_team(int num_threads, Body&& body) {
  if (num_threads <= 1) {
    body(Team::alone());
    return;
  }
  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

}  // namespace quire
