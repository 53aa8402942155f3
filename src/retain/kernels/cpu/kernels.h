// What the outer rooms of this backend say to each other: checks, plans, threads. See inner.h for the structs.
#pragma once

#include <string>
#include <vector>

#include "inner.h"

namespace retain {

const std::vector<Isa>& isas();  // those that run here, best first
const Isa& isa();                // the one in use
void set_isa(const std::string& name);

// How attend's work is cut (plan.cpp).
struct Job {
  int tile;
  int begin, end;  // spans
};
struct Plan {
  std::vector<Tile> tiles;
  std::vector<int64_t> records;  // of each tile: where its spans' records begin among the partial ones, if it is cut
  std::vector<Job> jobs;
  int64_t partial_floats = 0;
  bool alone = false;  // too little work to wake other threads for
};
void check(const Attend&);
Plan plan(const Attend&, int threads);

void write(const Write&);
void attend(const Attend&);
void copy(const Pool&, const int64_t* src, const int64_t* dst, int64_t n);

}  // namespace retain
