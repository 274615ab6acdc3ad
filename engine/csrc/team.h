// The threads of one parallel region, as kernels see them: who am I, what is my share, wait for the others.
// A kernel takes a `Team` and does its share of the work, so kernels compose inside one region without new ones.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace quire {

struct Range {
  int64_t begin, end;
};

struct Team {
  int rank, size;

  // This member's part of `count` equal pieces of work: contiguous, sizes differ by one at most.
  Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }

  // Returns when every member has come here.
  void wait() const {
    if (size > 1) {
#pragma omp barrier
    }
  }
};

// Calls body(Team) on `num_threads` threads of the process's OpenMP pool, or on one if that is enough.
template <typename Body>
void run_team(int num_threads, Body&& body) {
  if (num_threads <= 1) {
    body(Team{0, 1});
    return;
  }
#pragma omp parallel num_threads(num_threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace quire
