// Slots of a file that stay in memory: finds, reads and evicts them.
#include "slots/resident_slots.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace retain {

constexpr int NUM_SHARDS = 256;  // threads wait for each other only at pages of one shard

template <class T>
ResidentSlots::Memory<T> ResidentSlots::allocate(int64_t n) {
  void* p = std::calloc(std::max<int64_t>(n, 1), sizeof(T));
  if (!p) throw std::bad_alloc();
  return {static_cast<T*>(p), &std::free};
}

ResidentSlots::ResidentSlots(int64_t num_slots, int64_t num_records, int64_t record_bytes)
    : record_bytes_(record_bytes),
      places_(allocate<std::atomic<int32_t>>(num_slots)),
      owners_(allocate<int32_t>(num_records)),
      is_used_(allocate<char>(num_records)),
      records_(allocate<char>(num_records * record_bytes)),
      shards_(std::clamp<int64_t>(num_records / NUM_SHARDS, 1, NUM_SHARDS)) {
  const int64_t n = shards_.size();
  for (int64_t i = 0; i < n; ++i) {
    shards_[i].begin = shards_[i].hand = num_records * i / n;
    shards_[i].end = num_records * (i + 1) / n;
  }
}

// Returns the record of a shard that was not used for longest, about: one that the hand passed since (CLOCK).
int64_t ResidentSlots::claim(Shard& shard) {
  while (true) {
    const int64_t i = shard.hand++;
    if (shard.hand == shard.end) shard.hand = shard.begin;
    if (!is_used_[i]) return i;
    is_used_[i] = 0;
  }
}

// Copies a slot out of its page. P slots of V are interleaved, whose numbers are of type T.
template <class T, int P>
static void read_slot(const Pool& kv, int64_t page, int offset, char* to) {
  const int S = kv.S, width = kv.value_width(), key_bytes = 4 * kv.key_words();
  memcpy(to, static_cast<const char*>(kv.key_page(page)) + offset * key_bytes, key_bytes);
  T* const to_v = reinterpret_cast<T*>(to + key_bytes);
  const T* const v = static_cast<const T*>(kv.value_page(page)) + offset / P * P * width + offset % P;
  for (int d = 0; d < width; ++d) to_v[d] = v[P * d];
  if (!kv.is_quantized()) return;
  uint16_t* scales = reinterpret_cast<uint16_t*>(to_v + width);
  for (int g = 0; g < kv.num_key_scales(); ++g) *scales++ = kv.key_scales(page)[g * S + offset];
  for (int g = 0; g < kv.num_value_scales(); ++g) *scales++ = kv.value_scales(page)[g * S + offset];
}

void ResidentSlots::read(const Pool& kv, const int32_t* table, const int32_t* places, int64_t n, char* records) {
  int64_t num_loaded = 0;
  for (int64_t i = 0; i < n;) {
    const int32_t in_table = places[i] / kv.S;
    const int64_t page = table[in_table];
    Shard& shard = shard_of(page);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    for (; i < n && places[i] / kv.S == in_table; ++i) {
      const int offset = places[i] % kv.S;
      const int64_t slot = page * kv.S + offset;
      int64_t r = places_[slot].load(std::memory_order_relaxed) - 1;
      if (r < 0) {
        r = claim(shard);
        std::atomic<int32_t>& last_place = places_[owners_[r]];
        if (last_place.load(std::memory_order_relaxed) == r + 1) last_place.store(0, std::memory_order_relaxed);
        switch (kv.dtype) {
          case DType::float32: read_slot<float, 1>(kv, page, offset, record(r)); break;
          case DType::bfloat16: read_slot<uint16_t, 2>(kv, page, offset, record(r)); break;
          default: read_slot<uint8_t, 4>(kv, page, offset, record(r)); break;
        }
        owners_[r] = int32_t(slot);
        places_[slot].store(int32_t(r + 1), std::memory_order_relaxed);
        ++num_loaded;
      }
      is_used_[r] = 1;
      memcpy(records + i * record_bytes_, record(r), record_bytes_);
    }
  }
  num_read_ += n, num_loaded_ += num_loaded;
}

// Bytes of the file to read. Ranges with a small gap are one: a disk reads it faster than it begins anew.
class FileRange {
 public:
  ~FileRange() { request(); }
  void add(const void* from, int64_t size) {
    constexpr uintptr_t MAX_GAP = 3 << 12;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
    if (begin < begin_ || begin > end_ + MAX_GAP) {
      request();
      begin_ = begin, end_ = begin;
    }
    end_ = std::max<uintptr_t>(end_, begin + size);
  }

 private:
  void request() const {
    const uintptr_t page = sysconf(_SC_PAGESIZE), begin = begin_ / page * page;
    if (end_ > begin) madvise(reinterpret_cast<void*>(begin), end_ - begin, MADV_WILLNEED);
  }
  uintptr_t begin_ = 0, end_ = 0;
};

void ResidentSlots::prefetch(const Pool& kv, const int32_t* table, const int32_t* places, int64_t n) const {
  const int key_bytes = 4 * kv.key_words(), value_bytes = kv.value_width() * element_size(kv.dtype);
  const int interleaved = 4 / element_size(kv.dtype);
  FileRange range;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t page = table[places[i] / kv.S];
    const int offset = places[i] % kv.S;
    if (places_[page * kv.S + offset].load(std::memory_order_relaxed)) continue;
    range.add(static_cast<char*>(kv.key_page(page)) + offset * key_bytes, key_bytes);
    if (kv.is_quantized()) range.add(kv.key_scales(page), 2 * kv.S * kv.num_key_scales());
    range.add(static_cast<char*>(kv.value_page(page)) + offset / interleaved * interleaved * value_bytes,
              interleaved * value_bytes);
    if (kv.is_quantized()) range.add(kv.value_scales(page), 2 * kv.S * kv.num_value_scales());
  }
}

}  // namespace retain
