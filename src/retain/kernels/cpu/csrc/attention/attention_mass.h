// Mass weights of a scored tile, from tempered and noised scores, and their sums over the tile's rows.
#pragma once

#include "isa/simd.h"

namespace retain::RETAIN_ISA {

using U = Lanes<WIDTH>::u;

// The inverse error function in single precision (Giles, "Approximating the erfinv function").
INLINE F erfinv(F x) {
  const F w = -log<float>((1.0f - x) * (1.0f + x));
  const F a = w - 2.5f;
  F p = a * 2.81022636e-08f + 3.43273939e-07f;
  p = p * a - 3.5233877e-06f;
  p = p * a - 4.39150654e-06f;
  p = p * a + 0.00021858087f;
  p = p * a - 0.00125372503f;
  p = p * a - 0.00417768164f;
  p = p * a + 0.246640727f;
  p = p * a + 1.50140941f;
  F b = w;
  for (int l = 0; l < WIDTH; ++l) b[l] = __builtin_sqrtf(w[l]);
  b -= 3.0f;
  F q = b * -0.000200214257f + 0.000100950558f;
  q = q * b + 0.00134934322f;
  q = q * b - 0.00367342844f;
  q = q * b + 0.00573950773f;
  q = q * b - 0.0076224613f;
  q = q * b + 0.00943887047f;
  q = q * b + 1.00167406f;
  q = q * b + 2.83297682f;
  return (w < 5.0f ? p : q) * x;
}

// Hashes positions to uniform numbers between 0 and 1, neither included: 23 bits plus half a step.
INLINE F uniform(uint32_t key, I pos) {
  const U h = mix(key + GOLDEN_RATIO * (U)pos);
  return (__builtin_convertvector((I)(h >> 9), F) + 0.5f) * 0x1p-23f;
}

// How a mass weight follows from d, a score minus its row's maximum in the block, at temperature tau:
//   unchanged e^d,  tempered e^(d / tau),  noised e^(d + noise),  tempered_noised e^((d + noise) / tau)
// `noised` is the case tau = 1. The maximum is taken before noise is added: a constant cancels in the softmax.
enum class ScoreKind { none, unchanged, tempered, noised, tempered_noised };

struct ScoreTransform {
  ScoreKind kind;
  float inv_temperature;
};

// `w` is e^d; `noise` points at e^(noise / tau).
template <class T, ScoreKind KIND>
INLINE F mass_weight(const ScoreTransform& transform, F d, F w, const float* noise) {
  if constexpr (KIND == ScoreKind::unchanged) return w;
  if constexpr (KIND == ScoreKind::tempered) return exp<T>(d * transform.inv_temperature);
  return (KIND == ScoreKind::noised ? w : exp<T>(d * transform.inv_temperature)) * load<WIDTH>(noise);
}

INLINE ScoreTransform score_transform(const AttentionArgs& args, const QueryTile& tile, int token) {
  const AttentionScoring& scoring = args.scoring;
  if (scoring.weights[token] == 0) return {ScoreKind::none, 1};
  const NoiseKind kind = NoiseKind(scoring.noise[tile.b]);
  const bool one = scoring.temperature[token] == 1.0f;
  const bool noised = kind == NoiseKind::gumbel || kind == NoiseKind::gaussian;
  return {noised ? (one ? ScoreKind::noised : ScoreKind::tempered_noised)
                 : (one ? ScoreKind::unchanged : ScoreKind::tempered),
          1 / scoring.temperature[token]};
}

// Computes e^(noise / tau) for all slots of n pages. Query heads of one kv head share the noise.
template <class T>
void draw_noise(const AttentionArgs& args, const QueryTile& tile, int token, float inv_temperature, int n,
                const int32_t* const* pos, float* out) {
  const AttentionScoring& scoring = args.scoring;
  const uint32_t key = noise_key(scoring.seed[tile.b], scoring.layer, args.params.first_head + tile.g,
                                 scoring.noise_draw(tile.b, args.q_pos[token]));
  const int S = args.kv.S;
  for (int j = 0; j < n; ++j)
    for (int s = 0; s < S; s += WIDTH) {
      const F u = uniform(key, load_ints(pos[j] + s));
      F y;
      if (NoiseKind(scoring.noise[tile.b]) == NoiseKind::gaussian) {
        y = exp<T>((0.5772157f + 1.2825498f * 1.41421356f * erfinv(2.0f * u - 1.0f)) * inv_temperature);
      } else {
        const F e = -log<T>(u);  // e^noise = 1 / e
        y = inv_temperature == 1.0f ? reciprocal<T>(e) : exp<T>(-log<T>(e) * inv_temperature);
      }
      store<WIDTH>(out + j * S + s, y);
    }
}

// Multiplies the masses of a tile's pages by `decay`, and adds factor * weight of each row, one row after the other. A
// row whose factor is 0 has no valid weights in that block.
template <class T>
void reduce_mass_impl(const AttentionArgs& args, const QueryTile& tile, const MassBuffers& mass, const float* factors,
                      float decay) {
  const int columns = args.kv.mass_columns, rows = tile.num_rows(), S = args.kv.S;
  const int per_block = pages_per_block(args.kv);
  const int32_t* table = args.tables.page_table(tile.b, tile.g);
  const int pages = args.tables.num_pages(tile.b, tile.g);
  for (int c = 0; c < columns; ++c)
    for (int block = 0; block < num_blocks(args.kv, args.tables, tile); ++block) {
      float factor[MAX_TILE_ROWS];
      const T* row[MAX_TILE_ROWS];
      int n = 0;
      for (int r = 0; r < rows; ++r) {
        if (columns > 1 && (tile.begin + r) % args.R != c) continue;
        factor[n] = factors[r * mass.num_blocks + block];
        row[n] = reinterpret_cast<const T*>(mass.weights) + r * mass.num_slots;
        n += factor[n] != 0;
      }
      const int end = (block + 1) * per_block < pages ? (block + 1) * per_block : pages;
      for (int i = block * per_block; i < end; ++i) {
        const int64_t offset = int64_t(i) * S;
        float* slot_mass = args.kv.mass_page(table[i]) + c * S;
        for (int s = 0; s < S; s += WIDTH) {
          F sum = load<WIDTH>(slot_mass + s) * decay;
          for (int r = 0; r < n; ++r) sum += factor[r] * load<WIDTH>(row[r] + offset + s);
          store<WIDTH>(slot_mass + s, sum);
        }
      }
    }
}

}  // namespace retain::RETAIN_ISA
