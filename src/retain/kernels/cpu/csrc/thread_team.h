// Threads that go through a list of work together: phases of jobs that anybody may take, a barrier after each.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "types.h"

namespace retain {

INLINE int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

class Team {
 public:
  // f(member) on every thread of OpenMP's pool, or on this one alone.
  template <class F>
  static void run(bool alone, F f);

  class Member;

 private:
  explicit Team(int size) : size_(size) {}

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
  struct alignas(64) Next {
    std::atomic<int> job{0};
  };
  Next next_[4];  // of this phase, of those around it, and one that is being reset
};

class Team::Member {
 public:
  Member(Team& team, int id) : id(id), size(team.size_), team_(team) {}

  const int id, size;

  // f(begin, end) for stretches of 0 .. n - 1 until there are none left; who is held up leaves its share to the others.
  // The phase goes on until `barrier`.
  template <class F>
  void share(int n, int stretch, F f) {
    std::atomic<int>& next = team_.next_[phase_ & 3].job;
    if (size == 1) stretch = n;
    for (int i; (i = next.fetch_add(stretch, std::memory_order_relaxed)) < n;) f(i, std::min(n, i + stretch));
  }
  // In stretches long enough to stream memory, short enough to end together.
  template <class F>
  void share(int n, F f) {
    share(n, std::max(1, n / (8 * size)), f);
  }

  // Everybody is here, and what they wrote can be read.
  void barrier() {
    if (id == 0) team_.next_[(phase_ + 2) & 3].job.store(0, std::memory_order_relaxed);  // nobody is there any more
    ++phase_;
    if (size == 1) return;
    const int now = team_.generation_.load(std::memory_order_relaxed);
    if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      team_.arrived_.store(0, std::memory_order_relaxed);
      team_.generation_.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; team_.generation_.load(std::memory_order_acquire) == now; ++spins) {
      if (spins < 20000)
        pause();
      else
        std::this_thread::yield();  // somebody shares a core with another program
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Team& team_;
  int phase_ = 0;
};

template <class F>
void Team::run(bool alone, F f) {
#ifdef _OPENMP
  if (!alone && omp_get_max_threads() > 1) {
    Team* team = nullptr;
#pragma omp parallel
    {
#pragma omp single
      team = new Team(omp_get_num_threads());
      Member member(*team, omp_get_thread_num());
      f(member);
    }
    delete team;
    return;
  }
#endif
  Team team(1);
  Member member(team, 0);
  f(member);
}

}  // namespace retain
