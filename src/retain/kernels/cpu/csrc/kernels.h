// What the outer rooms of this backend say to each other: checks, plans, threads. See inner.h for the structs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "types.h"
#include "thread_team.h"

namespace retain {

const std::vector<Isa>& isas();  // those that run here, best first
const Isa& isa();                // the one in use
void set_isa(const std::string& name);

// How attend's work is cut (plan.cpp). Kept from call to call, so that its memory is.
struct Job {
  int tile;
  int begin, end;  // spans
};
struct Plan {
  std::vector<Tile> tiles;
  std::vector<char> cut;         // whether a tile's spans are shared out
  std::vector<int64_t> records;  // of each tile: where its spans' records begin among the partial ones, if it is cut
  std::vector<Job> jobs, parts;
  int64_t partial_floats = 0;
  double work = 0;  // multiply-adds

  void make(const Attend&, int threads);
};
void check(const Attend&);
void check(const Write&);

// What observed tiles leave on the slots of their requests (observe.cpp).
class Watch {
 public:
  void make(const Attend&, const Plan&, int threads);
  bool watches(int tile) const { return !parts_.empty() && parts_[tile] >= 0; }
  // Where `look` keeps what it saw of a tile: memory of the thread, or, where the tile is cut, of the tile.
  Seen seen(const Attend&, const Plan&, int tile, int thread);
  // All spans of a tile are seen. With its last tile, a head's masses are brought up to date.
  void finish(const Attend&, const Plan&, int tile, const Seen&);

 private:
  std::vector<int64_t> parts_;  // of each tile: where its sums begin; -1 for one that is not observed
  std::vector<int> first_, next_;  // tile of each request and head; of the same, -1 after the last
  std::vector<int64_t> kept_;   // of each cut tile: where what was seen of it begins
  std::vector<float> sums_;
  std::vector<char> memory_;
  int64_t own_ = 0;  // bytes of a thread; those of cut tiles come after all threads'
  std::unique_ptr<std::atomic<int>[]> left_;  // tiles, of each request and head
  int heads_ = 0;
};

// The memory that attend needs besides.
struct Work {
  Plan plan;
  Watch watch;
  std::vector<float> partial;
  std::unique_ptr<std::atomic<int>[]> done;  // spans, of each tile
  size_t tiles = 0;

  void make(const Attend&, int threads);
};
void attend(const Attend&, Work&, Team::Member&);  // together, after `make` and a barrier

void attend(const Attend&);
void write(const Write&);
void copy(const Pool&, const int64_t* src, const int64_t* dst, int64_t n);
void move(const Pool&, const int32_t* src, const int32_t* dst, int64_t lists, int64_t n);

// Lists of S slots, of each of which the first `used` are asked which n go first (lowest.cpp).
struct Lists {
  const float* priority;  // [N, S]
  const int32_t *pos, *used;
  int64_t N, S;
  int32_t sinks, after;  // positions before and behind which everybody stays
};
void lowest(const Lists&, int n, int64_t* places);

// Matrices as a file has them, to be packed (pack.cpp). For dense ones `numbers` is [out, in]; else uint8 quanta with
// float16 scales, and for int4 shifts, [out, in / 32].
struct Loose {
  const void* numbers;
  const uint16_t *scale, *shift;
};
void pack(const Loose&, const Packed& into);

// y (+)= x W^T + bias for rows of x [rows, in], together; done after a barrier. `prepared` has room for
// rows * w.row_bytes().
void linear(const Packed&, const float* x, int64_t ldx, int rows, char* prepared, const Into&, Team::Member&);

}  // namespace retain
