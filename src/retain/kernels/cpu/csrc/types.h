// What the inner loops are told: plain structs of addresses, no Python and no torch.
//
// This header is compiled for several instruction sets. A function that the linker may share between object files
// could come out in its widest version and trap on an older machine, so everything here with code in it is forced
// inline, and no header of the C++ library with code in it is included.
//
// Letters: B requests, T fresh tokens, G kv heads, R query heads per kv head, S slots of a page, D head dim.
#pragma once

#include <cstddef>
#include <cstdint>

#define INLINE inline __attribute__((always_inline))

namespace retain {

enum class Type : int { float32, bfloat16 };

INLINE int bytes(Type t) { return t == Type::float32 ? 4 : 2; }

constexpr int MAX_HEAD_DIM = 256, MAX_PAGE_SIZE = 512;  // what scratch memory is sized for

// Slots that are looked at together, or a page if that is larger. A row's sum runs slot by slot inside a span and
// span by span over the table, however the work is cut and shared out; so its bits depend neither on the company of
// its request nor on the size of its chunk.
constexpr int SPAN = 512;

constexpr float NOTHING = -__builtin_inff();  // the maximum of no scores

// The memory of a pool. A page of K is [D, S] (one load takes many slots of one dimension), a page of V is [S, D]; in
// bfloat16 pairs lie together: K [D / 2, S, 2], V [S / 2, D, 2].
struct Pool {
  void* k;
  void* v;
  int32_t* pos;  // [P, S]; -1 is a hole
  float* mass;   // [P, columns, S]
  int64_t n_pages;
  int S, D, columns;
  Type type;

  INLINE const void* key_page(int64_t page) const { return static_cast<const char*>(k) + page * S * D * bytes(type); }
  INLINE const void* value_page(int64_t page) const { return static_cast<const char*>(v) + page * S * D * bytes(type); }
  INLINE float* mass_page(int64_t page) const { return mass + page * columns * S; }
};

// Fresh rows [T, heads, D] as torch holds them: the last dimension is contiguous, the other two may have any stride.
struct Rows {
  const void* data;
  int64_t token, head;  // strides, in numbers
  Type type;
};

// How a weight matrix [out, in] is packed (linear.h says where each number lies).
enum class Kind : int { float32, bfloat16, int8, int4 };
constexpr int TILE_OUT = 16, GROUP = 32;  // outputs of a tile; inputs that share a scale

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Bytes that a group takes in a tile: its numbers, and with the scales behind them.
INLINE constexpr int number_bytes(Kind k) { return GROUP * TILE_OUT / (k == Kind::int4 ? 2 : 1); }
INLINE constexpr int group_bytes(Kind k) { return number_bytes(k) + TILE_OUT * (k == Kind::int4 ? 4 : 2); }

struct Packed {
  const char* data;  // on a cache line
  int out, in;
  Kind kind;

  INLINE int tiles() const { return (out + TILE_OUT - 1) / TILE_OUT; }
  INLINE int groups() const { return in / GROUP; }
  INLINE int64_t tile_bytes() const {
    if (kind == Kind::float32) return int64_t(in) * TILE_OUT * 4;
    if (kind == Kind::bfloat16) return round_up(in, 2) * TILE_OUT * 2;
    return int64_t(groups()) * group_bytes(kind);
  }
  // Of one row of activations, prepared for the product with this matrix.
  INLINE int64_t row_bytes() const {
    if (kind == Kind::float32) return round_up(int64_t(in) * 4, 64);
    if (kind == Kind::bfloat16) return round_up(int64_t(in) * 2 + 2, 64);
    return round_up(in + int64_t(groups()) * 12, 64);
  }
};

// What is known of a group of 32 prepared activations: they are scale * q.
struct GroupFacts {
  float scale, sum;  // of the activations
  int32_t offset;    // -128 * the sum of q: int8 weights are kept 128 too high
};

struct Norm {
  const float* weight;  // [n]
  const float* bias;    // [n] or null
  float eps;
  bool centred;  // a layer norm; else by the root of the mean square
};

enum class Activation : int { silu, relu, gelu, gelu_tanh };

// What one product does with its result: y (+)= x W^T + bias.
struct Into {
  float* y;
  int64_t ldy;  // from row to row
  const float* bias;
  bool add;
};

struct Write {
  Pool kv;
  Rows k, v;
  const int32_t* slots;  // [G, T]
  int64_t slot_head, slot_token;
  const int32_t* pos;  // [T]
  int T, G;
};

struct Tables {
  const int32_t* pages;  // [N, G, n]
  int64_t page_row, page_head;
  const int32_t* counts;  // [N, G]
  int64_t count_row, count_head;
  const int32_t* windows;  // [N]
  int64_t window_row;
  const int32_t* sinks;  // [N]
  int64_t sink_row;
  const int32_t* rows;    // [B]
  const int32_t* starts;  // [B + 1]
  int B, G;
  int64_t N, n;

  INLINE int fresh(int b) const { return starts[b + 1] - starts[b]; }
  INLINE int count(int b, int g) const { return counts[rows[b] * count_row + g * count_head]; }
  INLINE int32_t window_of(int b) const { return windows[rows[b] * window_row]; }
  INLINE int32_t sinks_of(int b) const { return sinks[rows[b] * sink_row]; }
  INLINE const int32_t* of(int b, int g) const { return pages + rows[b] * page_row + g * page_head; }
};

// What fresh queries leave on slots (see `Observe` in kernels/__init__.py). Without weights: nothing.
enum class Noise : int { none, gumbel, gaussian, constant };

struct Observe {
  const float* weights;  // [T] or null
  const float* tau;      // [T]
  const float* decay;    // [B]
  const int32_t* noise;  // [B]
  const int32_t* seed;   // [B]
  const int32_t* anew;   // [B]
  int layer;
};

struct Attend {
  Pool kv;
  Tables tables;
  Rows q;              // [T, H, D], H = G * R
  void* o;             // [T, H, D], contiguous, of q's type
  const int32_t* q_pos;  // [T]
  int T, R;
  float scale;
  const float* slopes;  // [H] or null
  Observe observe;
};

// Rows begin : end of request b and kv head g. Row i is query head g * R + i % R of the request's fresh token i / R.
struct Tile {
  int b, g, begin, end;

  INLINE int rows() const { return end - begin; }
};
constexpr int TILE_ROWS = 48;  // at most: enough to pay for fetching and converting a page, few enough to stay in cache

INLINE float bf16_to_float(uint16_t x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t float_to_bf16(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return x == x ? uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

// What the rows of a tile took from some slots, before division: a record of D numbers, their maximum and their sum.
INLINE int record_size(int D) { return D + 16; }
constexpr int MAX_RECORD = MAX_HEAD_DIM + 16;
template <class Float>
INLINE Float& record_max(Float* record, int D) {
  return record[D];
}
template <class Float>
INLINE Float& record_sum(Float* record, int D) {
  return record[D + 1];
}

// What `look` keeps of an observed tile until all of its spans are known: for each row the weights of its table's slots,
// not yet divided, and their maximum and sum in each span. A row that leaves nothing in a span has no maximum there, and
// then no weights either.
struct Seen {
  char* weights;  // [rows, slots], of the pool's type
  float *tops, *sums;  // [rows, spans]
  int64_t slots;
  int spans;
};

// A permutation of 32 bits, as reference/noise.py says it.
constexpr uint32_t GOLDEN = 0x9e3779b9;
template <class Bits>  // a number, or a vector of them
INLINE Bits mix(Bits x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  return (x ^ (x >> 15)) * 0x846ca68b;
}
INLINE uint32_t noise_key(int32_t seed, int32_t layer, int32_t head, int32_t step) {
  uint32_t x = mix(uint32_t(seed) + GOLDEN);
  x = mix(x + GOLDEN * uint32_t(layer + 1));
  x = mix(x + GOLDEN * uint32_t(head + 1));
  return mix(x + GOLDEN * uint32_t(step + 1));
}

INLINE int pages_per_span(const Pool& kv) { return SPAN / kv.S > 0 ? SPAN / kv.S : 1; }
INLINE int spans_of(const Attend& a, const Tile& t) {
  return (a.tables.count(t.b, t.g) + pages_per_span(a.kv) - 1) / pages_per_span(a.kv);
}

// The inner loops, once for each instruction set (inner.cpp).
struct Isa {
  const char* name;
  bool (*runs)();
  // The rows of a tile look at one span of their table; returns whether they saw anything, and if so fills their
  // records. `seen`, where the tile is observed, gets the span's part.
  bool (*look)(const Attend&, const Tile&, int span, float* scratch, float* records, const Seen* seen);
  // Sums over an observed tile's rows: factors [rows, spans] times weights -> sums [columns, slots], or into the masses.
  void (*fold)(const Attend&, const Tile&, const Seen&, const float* factors, float* sums);
  // Fresh tokens begin : end of kv head g go into their slots.
  void (*write)(const Write&, int g, int begin, int end);

  // One row of activations, x [in], made ready for products with w.
  void (*prepare)(const Packed& w, const float* x, char* row);
  // Tiles begin : end of outputs for `rows` prepared rows.
  void (*multiply)(const Packed& w, int begin, int end, const char* prepared, int rows, const Into&);
  // Row `index` of a packed matrix, times a factor, or added to what is there.
  void (*lookup)(const Packed& w, int64_t index, float factor, bool add, float* out);
  // Rows of n numbers. `add`: to what `out` holds.
  void (*normalise)(const Norm&, const float* x, int n, bool add, float* out);
  void (*activate)(Activation, const float* x, const float* times, int n, float* out);
  // The n pairs of a head by their angles: cos [n], then sin [n]. Pairs are i and i + n, or neighbours.
  void (*turn)(float* x, const float* angles, int n, bool neighbours);
};

// Floats from row to row of scores: not a power of 2, for then all rows would fall into the same cache sets.
constexpr ptrdiff_t SCORES = MAX_PAGE_SIZE + 16;
constexpr int SCRATCH = TILE_ROWS * (SCORES + MAX_HEAD_DIM);  // what `look` needs, in floats

}  // namespace retain
