// Compares the kernels of every instruction set of a machine with the plain ones, without Python: tools/isa_check.py
// builds this for another machine and runs it under an emulator.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace retain;

static std::mt19937 rng(1);
static float normal() { return std::normal_distribution<float>()(rng); }
static int num_failures = 0;

static void expect(bool ok, const char* isa, const char* what, double error) {
  if (ok) return;
  ++num_failures;
  std::printf("FAILED %s: %s, error %g\n", isa, what, error);
}

// The largest difference, relative to the largest number.
static double relative_error(const std::vector<float>& x, const std::vector<float>& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    error = std::fmax(error, std::fabs(double(x[i]) - expected[i]));
    size = std::fmax(size, std::fabs(expected[i]));
  }
  return error / size;
}

struct Linear {
  std::vector<char> numbers, memory;
  std::vector<uint16_t> scale, shift;
  PackedWeight packed;

  Linear(WeightFormat format, Products products, int out, int in) : packed{nullptr, out, in, format, products} {
    const int bytes = format == WeightFormat::float32 ? 4 : format == WeightFormat::bfloat16 ? 2 : 1;
    numbers.resize(size_t(out) * in * bytes);
    for (int64_t i = 0; i < int64_t(out) * in; ++i) {
      const float x = normal();
      const uint16_t half = float_to_bf16(x);
      if (bytes == 4) memcpy(numbers.data() + 4 * i, &x, 4);
      if (bytes == 2) memcpy(numbers.data() + 2 * i, &half, 2);
      if (bytes == 1) numbers[i] = char(format == WeightFormat::int4 ? rng() % 16 : rng() % 255 - 127);
    }
    for (int i = 0; i < out * in / QUANT_GROUP; ++i) {  // float16 numbers between 2^-8 and 2^-6, and their negatives
      scale.push_back(uint16_t(0x1c00 + rng() % 0x800));
      shift.push_back(uint16_t(0x9c00 + rng() % 0x800));
    }
    memory.resize(packed.num_tiles() * packed.tile_bytes() + 64);
    packed.data = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
    pack({numbers.data(), scale.data(), shift.data()}, packed);
  }

  std::vector<float> multiply(const std::vector<float>& x) const {
    const int rows = int(x.size()) / packed.in;
    std::vector<float> y(size_t(rows) * packed.out);
    AlignedVector<char> prepared(max_activation_bytes(packed) * round_up(rows, MAX_PADDED_ROWS));
    ThreadTeam::run(true, [&](ThreadTeam::Member& member) {
      packed_gemm(packed, x.data(), packed.in, {{packed.products, 0, rows}}, prepared.data(), 0,
                  {y.data(), packed.out, nullptr, false}, member);
    });
    return y;
  }
};

static void check_linear(const char* isa, WeightFormat format, Products products, int in, int rows) {
  const Linear linear(format, products, 40, in);
  std::vector<float> x(size_t(rows) * in);
  for (float& v : x) v = normal();
  select_isa("plain");
  const std::vector<float> expected = linear.multiply(x);
  select_isa(isa);
  const std::vector<float> y = linear.multiply(x);
  const double error = relative_error(y, expected);
  // A fused multiply-add may round a number between two of 8 bits the other way.
  const double limit = linear.packed.is_quantized() && products == Products::integers ? 5e-3 : 1e-5;
  expect(error < limit, isa, "a linear layer differs from the plain one", error);
  const std::vector<float> last = linear.multiply({x.end() - in, x.end()});
  expect(!memcmp(last.data(), &y[y.size() - 40], 160), isa, "other rows change the bits of a linear layer", 0);
}

static void check_linear(const char* isa) {
  for (WeightFormat format :
       {WeightFormat::float32, WeightFormat::bfloat16, WeightFormat::int8, WeightFormat::int4})
    for (Products products : {Products::integers, Products::bfloat16})
      for (int in : {32, 96, 576})
        for (int rows : {1, 3, 4, 13, 40})
          if (products == Products::integers || format >= WeightFormat::int8)
            check_linear(isa, format, products, in, rows);
}

constexpr DType DTYPES[] = {DType::float32, DType::bfloat16, DType::int8, DType::k8v4, DType::int4};

// A pool and its memory.
struct Pages {
  std::vector<char> k, v;
  std::vector<int32_t> pos;
  std::vector<float> mass;
  Pool pool;

  Pages(DType dtype, int64_t num_pages, int S, int D) : pos(num_pages * S, -1), mass(num_pages * S) {
    pool = {nullptr, nullptr, pos.data(), mass.data(), num_pages, S, D, D, 1, dtype, 0, 0, nullptr, 0, nullptr};
    pool.key_stride = pool.key_bytes(), pool.value_stride = pool.value_bytes();
    k.resize(num_pages * pool.key_stride + 64), v.resize(num_pages * pool.value_stride + 64);
    pool.k = k.data(), pool.v = v.data();
  }
  bool operator==(const Pages& x) const { return k == x.k && v == x.v && pos == x.pos && mass == x.mass; }
};

static void check_slots(const char* isa) {
  constexpr int S = 32, PAGES = 5, T = 3 * S;
  for (DType dtype : DTYPES)
    for (int D : {8, 64, 80, 256}) {
      std::vector<float> keys(T * D), values(T * D);
      for (std::vector<float>* x : {&keys, &values})
        for (float& y : *x) y = normal();
      std::vector<int32_t> slots(T), positions(T);
      for (int i = 0; i < T; ++i) slots[i] = S + i * 5 % T, positions[i] = i;
      const std::vector<int64_t> from(slots.begin(), slots.end()), to(from.rbegin(), from.rend());
      Pages written[2] = {{dtype, PAGES, S, D}, {dtype, PAGES, S, D}};
      Pages copies[2] = {{DType::int4, PAGES, S, D}, {DType::int4, PAGES, S, D}};
      std::vector<float> read[2];
      for (int i = 0; i < 2; ++i) {
        const Pool& pool = written[i].pool;
        select_isa(i ? isa : "plain");
        write({pool, {keys.data(), D, D, DType::float32}, {values.data(), D, D, DType::float32}, slots.data(), T, 1,
               positions.data(), T, 1});
        requantize({pool, copies[i].pool, from.data(), to.data(), positions.data(), T});
        read[i].resize(4 * T * D);
        read_slots(pool, from.data(), T, &read[i][0], &read[i][T * D]);
        read_slots(copies[i].pool, to.data(), T, &read[i][2 * T * D], &read[i][3 * T * D]);
      }
      expect(written[0] == written[1], isa, "written slots differ from the plain ones", int(dtype));
      expect(copies[0] == copies[1], isa, "requantized slots differ from the plain ones", int(dtype));
      expect(read[0] == read[1], isa, "slots are read as other numbers", int(dtype));
    }
}

static void check_attention(const char* isa) {
  constexpr int S = 32, G = 2, R = 3, PAGES = 12, T = 21;
  for (DType dtype : DTYPES)
    for (int D : {8, 64, 80}) {
      const Pages pages(dtype, int64_t(PAGES) * G + 1, S, D);
      const Pool& pool = pages.pool;
      std::vector<int32_t> slots(G * PAGES * S), written(PAGES * S), tables(G * PAGES);
      std::vector<float> q(T * G * R * D), keys(PAGES * S * G * D), values(keys.size());
      for (std::vector<float>* x : {&q, &keys, &values})
        for (float& y : *x) y = normal();
      for (int i = 0; i < PAGES * S; ++i) written[i] = i;
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < PAGES * S; ++i) slots[g * PAGES * S + i] = (1 + g * PAGES) * S + i;
      for (int i = 0; i < G * PAGES; ++i) tables[i] = 1 + i;
      write({pool, {keys.data(), G * D, D, DType::float32}, {values.data(), G * D, D, DType::float32}, slots.data(),
             PAGES * S, 1, written.data(), PAGES * S, G});
      std::vector<int32_t> counts(G, PAGES), window(1, 300), rows(1, 0), start = {0, T}, q_pos;
      for (int i = 0; i < T; ++i) q_pos.push_back(PAGES * S - T + i);
      auto run = [&](int first, int count) {
        std::vector<float> o(size_t(count) * G * R * D);
        start = {0, count};
        const PageTables t = {tables.data(), G * PAGES, PAGES, counts.data(), G, 1, window.data(), 1, rows.data(),
                              start.data(), 1, G, 1, PAGES, 0, 0, 0, nullptr};
        const StridedRows queries = {q.data() + first * G * R * D, G * R * D, D, DType::float32};
        const AttentionParams params = {0.125f, nullptr, nullptr, 0, nullptr, 0};
        attend({pool, t, {}, {}, queries, o.data(), q_pos.data() + first, count, R, params, {}});
        return o;
      };
      select_isa("plain");
      const std::vector<float> expected = run(0, T);
      select_isa(isa);
      const std::vector<float> o = run(0, T), last = run(T - 1, 1);
      const double error = relative_error(o, expected);
      expect(error < (dtype == DType::float32 ? 1e-5 : 2e-2), isa, "attention differs from the plain one", error);
      expect(!memcmp(last.data(), &o[o.size() - last.size()], 4 * last.size()), isa,
             "other rows change the bits of attention", 0);
    }
}

// Blocks of random bits, in which every 16 bits that may be a scale are a float16 below 4.
static void check_blocks(const char* isa) {
  struct {
    GgmlType type;
    int numbers, bytes;
  } const types[] = {{GgmlType::Q4_0, 32, 18},  {GgmlType::Q4_1, 32, 20},  {GgmlType::Q5_0, 32, 22},
                     {GgmlType::Q5_1, 32, 24},  {GgmlType::Q8_0, 32, 34},  {GgmlType::Q2_K, 256, 84},
                     {GgmlType::Q3_K, 256, 110}, {GgmlType::Q4_K, 256, 144}, {GgmlType::Q5_K, 256, 176},
                     {GgmlType::Q6_K, 256, 210}};
  const int rows = 37, in = 512;
  for (const auto& type : types) {
    const int64_t row_bytes = in / type.numbers * type.bytes;
    std::vector<uint8_t> raw(rows * row_bytes);
    for (uint8_t& x : raw) x = uint8_t(rng() & 0xbf);  // no float16 has a large exponent
    for (int f = 0; f < 4; ++f) {
      PackedWeight w{nullptr, rows, in, WeightFormat(f)};
      std::vector<char> packed[2];
      bool finite[2];
      for (int i = 0; i < 2; ++i) {
        packed[i].resize(w.num_tiles() * w.tile_bytes());
        w.data = packed[i].data();
        select_isa(i ? "plain" : isa);
        finite[i] = pack_blocks({raw.data(), row_bytes, type.type}, rows, 0, w);
      }
      expect(finite[0] == finite[1] && packed[0] == packed[1], isa, "blocks", int(type.type) * 10 + f);
    }
  }
}

int main() {
  for (const IsaKernels& isa : supported_isas()) {
    std::printf("%s\n", isa.name);
    check_linear(isa.name);
    check_slots(isa.name);
    check_attention(isa.name);
    check_blocks(isa.name);
  }
  std::printf(num_failures ? "%d checks failed\n" : "all checks passed\n", num_failures);
  return num_failures != 0;
}
