// Packs weight matrices into tiles (packed_gemm.h draws the layout). Packing runs at memory speed, so no file stores
// packed weights.
#include <cstring>

#include "kernels.h"

namespace retain {

// A row writes 4 of the 64 bytes of a cache line, so a tile is packed in parts that stay in the L1 cache.
constexpr int PART = 256;

// Packs numbers begin .. end - 1 of a row.
static void pack_numbers(const UnpackedWeight& unpacked, const PackedWeight& w, int64_t row, int begin, int end,
                         char* tile, int lane) {
  const int64_t first = row * w.in + begin;
  const int n = end - begin;
  if (w.format == WeightFormat::float32) {
    const float* x = static_cast<const float*>(unpacked.numbers) + first;
    float* to = reinterpret_cast<float*>(tile) + begin * TILE_OUT + lane;
    for (int i = 0; i < n; ++i) to[i * TILE_OUT] = x[i];
    return;
  }
  if (w.format == WeightFormat::bfloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(unpacked.numbers) + first;
    uint32_t* to = reinterpret_cast<uint32_t*>(tile) + begin / 2 * TILE_OUT + lane;
    for (int i = 0; i < n / 2; ++i) memcpy(to + i * TILE_OUT, x + 2 * i, 4);
    if (n % 2) to[n / 2 * TILE_OUT] = x[n - 1];
    return;
  }
  const uint8_t* q = static_cast<const uint8_t*>(unpacked.numbers) + first;
  for (int g = begin / QUANT_GROUP; g < end / QUANT_GROUP; ++g, q += QUANT_GROUP) {
    const int64_t group = row * w.num_groups() + g;
    store_group(w.format, q, unpacked.scale + group * scales_per_group(w.format),
                has_shift(w.format) ? unpacked.shift[group] : 0, tile + g * group_bytes(w.format), lane);
  }
}

static void pack_tile(const UnpackedWeight& unpacked, const PackedWeight& w, int t) {
  char* tile = const_cast<char*>(w.data) + t * w.tile_bytes();
  const int rows = std::min(TILE_OUT, w.out - t * TILE_OUT);
  if (rows < TILE_OUT) memset(tile, 0, w.tile_bytes());
  for (int begin = 0; begin < w.in; begin += PART)
    for (int o = 0; o < rows; ++o)
      pack_numbers(unpacked, w, int64_t(t) * TILE_OUT + o, begin, std::min(w.in, begin + PART), tile, o);
}

void pack(const UnpackedWeight& unpacked, const PackedWeight& packed) {
  ThreadTeam::run(false, [&](ThreadTeam::Member& member) {
    member.parallel_for(packed.num_tiles(), [&](int begin, int end) {
      for (int t = begin; t < end; ++t) pack_tile(unpacked, packed, t);
    });
  });
}

bool pack_blocks(const BlockRows& blocks, int rows, int first, const PackedWeight& packed) {
  const int end = first + rows, first_tile = first / TILE_OUT, end_tile = (end + TILE_OUT - 1) / TILE_OUT;
  const auto pack_rows = selected_isa().pack_blocks;
  std::atomic<bool> finite{true};
  ThreadTeam::run(false, [&](ThreadTeam::Member& member) {
    member.parallel_for(end_tile - first_tile, [&](int from, int to) {
      for (int t = first_tile + from; t < first_tile + to; ++t) {
        char* tile = const_cast<char*>(packed.data) + t * packed.tile_bytes();
        const int top = std::max(first, t * TILE_OUT), bottom = std::min(end, (t + 1) * TILE_OUT);
        if (!pack_rows(blocks, top - first, bottom - first, packed, tile, top - t * TILE_OUT)) finite = false;
      }
    });
  });
  return finite;
}

void row_energies(const BlockRows& blocks, int rows, int in, const float* factors, float* energies) {
  const auto pack_rows = selected_isa().pack_blocks;
  ThreadTeam::run(false, [&](ThreadTeam::Member& member) {
    AlignedVector<float> tile(size_t(in) * TILE_OUT);
    char* const data = reinterpret_cast<char*>(tile.data());
    const PackedWeight w = {data, TILE_OUT, in, WeightFormat::float32};
    member.parallel_for((rows + TILE_OUT - 1) / TILE_OUT, [&](int from, int to) {
      for (int begin = from * TILE_OUT; begin < std::min(rows, to * TILE_OUT); begin += TILE_OUT) {
        const int end = std::min(rows, begin + TILE_OUT);
        pack_rows(blocks, begin, end, w, data, 0);
        float sums[TILE_OUT] = {};
        for (int i = 0; i < in; ++i)
          for (int o = 0; o < TILE_OUT; ++o) sums[o] += factors[i] * tile[i * TILE_OUT + o] * tile[i * TILE_OUT + o];
        std::copy(sums, sums + end - begin, energies + begin);
      }
    });
  });
}

}  // namespace retain
