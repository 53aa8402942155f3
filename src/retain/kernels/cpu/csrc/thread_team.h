// Threads that run the same function together. In each phase they share a range of indices; a barrier ends the phase.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "types.h"

namespace retain {

INLINE int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Waits until another thread makes `is_done` true.
template <class F>
void wait_until(F is_done) {
  for (int spins = 0; !is_done(); ++spins) {
    if (spins >= 20000) {
      std::this_thread::yield();  // the core of a late thread is probably busy with another program
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

class ThreadTeam {
 public:
  // Runs f(member) on every thread of OpenMP's pool, or only on the calling thread.
  template <class F>
  static void run(bool single_threaded, F f);

  class Member;

 private:
  explicit ThreadTeam(int size) : size_(size) {}

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
  struct alignas(64) Counter {
    std::atomic<int> next{0};
  };
  Counter counters_[4];  // of the current phase, the phases before and after it, and one that is reset
};

class ThreadTeam::Member {
 public:
  Member(ThreadTeam& team, int id) : id(id), size(team.size_), team_(team) {}

  const int id, size;

  // Calls f(begin, end) for chunks of 0 .. n - 1 until none is left. Chunks go to the first free thread, so a delayed
  // thread takes fewer. Call it at most once between two barriers.
  template <class F>
  void parallel_for(int n, int chunk, F f) {
    std::atomic<int>& next = team_.counters_[phase_ & 3].next;
    if (size == 1) chunk = n;
    for (int i; (i = next.fetch_add(chunk, std::memory_order_relaxed)) < n;) f(i, std::min(n, i + chunk));
  }
  // Uses chunks that are long enough to stream memory and short enough to balance the threads.
  template <class F>
  void parallel_for(int n, F f) {
    parallel_for(n, std::max(1, n / (8 * size)), f);
  }

  // Waits for all threads. Their earlier writes are visible afterwards.
  void barrier() {
    if (id == 0) team_.counters_[(phase_ + 2) & 3].next.store(0, std::memory_order_relaxed);  // no thread uses it now
    ++phase_;
    if (size == 1) return;
    const int now = team_.generation_.load(std::memory_order_relaxed);
    if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      team_.arrived_.store(0, std::memory_order_relaxed);
      team_.generation_.store(now + 1, std::memory_order_release);
      return;
    }
    wait_until([&] { return team_.generation_.load(std::memory_order_acquire) != now; });
  }

 private:
  ThreadTeam& team_;
  int phase_ = 0;
};

template <class F>
void ThreadTeam::run(bool single_threaded, F f) {
#ifdef _OPENMP
  if (!single_threaded && omp_get_max_threads() > 1) {
    ThreadTeam* team = nullptr;
#pragma omp parallel
    {
#pragma omp single
      team = new ThreadTeam(omp_get_num_threads());
      Member member(*team, omp_get_thread_num());
      f(member);
    }
    delete team;
    return;
  }
#endif
  ThreadTeam team(1);
  Member member(team, 0);
  f(member);
}

}  // namespace retain
