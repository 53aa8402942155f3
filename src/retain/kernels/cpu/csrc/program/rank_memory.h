// Memory that all ranks of a model map, and by which they exchange rows: see kernels/ranks.py. Each writes its rows and
// then its counter, and waits for the counters of the others.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace retain {

class RankMemory {
 public:
  RankMemory(void* memory, int rank, int size, int64_t chunk_bytes)
      : memory_(static_cast<char*>(memory)), rank_(rank), size_(size), chunk_bytes_(chunk_bytes) {}

  // Calls use(rank, first row, rows, their numbers) for the rows of each rank in turn, a part of the rows at a time. All
  // ranks give as many rows [rows, width]. Returns false where a rank has gone.
  template <class F>
  bool exchange(const float* x, int rows, int width, const F& use) const {
    const int64_t row_bytes = int64_t(width) * 4;
    const int step = int(chunk_bytes_ / row_bytes);
    for (int first = 0; first < rows; first += step) {
      const int n = std::min(step, rows - first);
      std::atomic<uint64_t>& own = counter(memory_, rank_);
      // A part is written again two exchanges later: then all ranks have given to the next one, so they have read it.
      const uint64_t number = own.load(std::memory_order_relaxed) + 1;
      memcpy(part(rank_, number), x + int64_t(first) * width, n * row_bytes);
      own.store(number, std::memory_order_release);
      for (int r = 0; r < size_; ++r) {
        if (!wait(r, number)) return false;
        use(r, first, n, reinterpret_cast<const float*>(part(r, number)));
      }
    }
    return true;
  }

 private:
  static constexpr int64_t LINE = 64;    // bytes: a counter has a cache line of its own
  static constexpr uint64_t SPINS = 1 << 12;  // before a thread lets others run

  static std::atomic<uint64_t>& line(char* memory, int i) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(memory + LINE * i);
  }
  static std::atomic<uint64_t>& counter(char* memory, int rank) { return line(memory, 1 + rank); }
  char* part(int rank, uint64_t number) const {
    return memory_ + LINE * (1 + size_) + (2 * rank + int64_t(number % 2)) * chunk_bytes_;
  }
  bool wait(int rank, uint64_t number) const {
    for (uint64_t i = 0; counter(memory_, rank).load(std::memory_order_acquire) < number; ++i) {
      if (i < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        continue;
      }
      if (line(memory_, 0).load(std::memory_order_relaxed)) return false;
      sched_yield();
    }
    return true;
  }

  char* memory_;
  int rank_, size_;
  int64_t chunk_bytes_;
};

}  // namespace retain
