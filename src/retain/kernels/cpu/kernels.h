// What the outer rooms of this backend say to each other: checks, plans, threads. See inner.h for the structs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "inner.h"
#include "team.h"

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
  std::vector<int64_t> records;  // of each tile: where its spans' records begin among the partial ones, if it is cut
  std::vector<Job> jobs, parts;
  int64_t partial_floats = 0;
  double work = 0;  // multiply-adds

  void make(const Attend&, int threads);
};
void check(const Attend&);
void check(const Write&);

// The memory that attend needs besides.
struct Work {
  Plan plan;
  std::vector<float> partial;
  std::unique_ptr<std::atomic<int>[]> done;  // spans, of each tile
  size_t tiles = 0;

  void make(const Attend&, int threads);
};
void attend(const Attend&, Work&, Team::Member&);  // together, after `make` and a barrier

void attend(const Attend&);
void write(const Write&);
void copy(const Pool&, const int64_t* src, const int64_t* dst, int64_t n);

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
