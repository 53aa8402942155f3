// Slots that are in memory, too, where K and V of the pool lie in a file.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "types.h"

namespace retain {

// Holds the slots of a pool that looks read last. The system reads a file in pages of 4 kB, which have 16 slots or more,
// and looks read single ones: so the system alone would keep nearly all slots to have the few that are read.
//
// A resident slot has a record: K, V and their scales, one behind the other. Which slots are resident changes no result.
class ResidentSlots {
 public:
  // Raises std::bad_alloc.
  ResidentSlots(int64_t num_slots, int64_t num_records, int64_t record_bytes);

  // Copies n slots, by their places in a page table, to `records` [n, record_bytes]. Slots of one page are neighbours.
  void read(const Pool&, const int32_t* table, const int32_t* places, int64_t n, char* records);
  // Asks the system to read those of n slots from the file that are not resident. It does not wait.
  void prefetch(const Pool&, const int32_t* table, const int32_t* places, int64_t n) const;
  // Drops a slot whose K and V change in the file.
  void forget(int64_t slot) { places_[slot].store(0, std::memory_order_relaxed); }
  // Drops all slots of a page, which has S of them.
  void forget_page(int64_t page, int S) {
    for (int64_t slot = page * S; slot < (page + 1) * S; ++slot) forget(slot);
  }

  int64_t record_bytes() const { return record_bytes_; }
  int64_t num_read() const { return num_read_; }
  int64_t num_loaded() const { return num_loaded_; }  // of those that were read, from the file

 private:
  struct Shard {  // records begin .. end - 1, for the pages that the hash of their number sends here
    std::mutex mutex;
    int64_t begin, end, hand;
  };
  Shard& shard_of(int64_t page) { return shards_[(uint64_t(page) * 0x9e3779b97f4a7c15u >> 32) % shards_.size()]; }
  int64_t claim(Shard&);
  char* record(int64_t i) const { return records_.get() + i * record_bytes_; }

  template <class T>
  using Memory = std::unique_ptr<T[], decltype(&std::free)>;  // zeros, which the system provides at the first write
  template <class T>
  static Memory<T> allocate(int64_t n);

  const int64_t record_bytes_;
  Memory<std::atomic<int32_t>> places_;  // [num_slots]: 1 + the number of a slot's record, 0: it has none
  Memory<int32_t> owners_;               // [num_records]: the slot that a record was made for
  Memory<char> is_used_, records_;       // [num_records], [num_records, record_bytes]
  std::vector<Shard> shards_;
  std::atomic<int64_t> num_read_{0}, num_loaded_{0};
};

}  // namespace retain
