// A decoder as a list of operations over buffers of float32 rows, one row a fresh token: the threads go through the
// whole list together, so that a step costs one call, no allocation and no wakened thread.
#pragma once

#include <functional>

#include "kernels.h"

namespace retain {

// What a step brings. Letters as in inner.h; N rows of logits are wanted.
struct Step {
  int T, N;
  const int64_t* ids;    // [T]
  const int32_t* pos;    // [T]
  const int64_t* wanted; // [N] tokens whose logits are wanted
  float* logits;         // [N, V]
  Pool kv;
  const int32_t* slots;  // [L, G, T]
  int64_t slot_layer, slot_head, slot_token;
  Tables tables;         // of the first layer; of the others so far on:
  int64_t page_layer, count_layer, window_layer;
  int layers;
  Observe observe;
};

// How q, k and v lie in a row: the heads of q, of k, of v.
struct Heads {
  int H, G, D;
};

class Program {
 public:
  static constexpr int LOGITS = -1;  // the buffer that the caller owns

  // A buffer of rows of `width` numbers, by number.
  int buffer(int width);
  // A table of angles for every step: `freqs` [n], kept by the caller.
  int rope(const float* freqs, int n, float gain, bool neighbours);

  // The operations. Weights and vectors are kept by the caller.
  void lookup(int out, const Packed&, bool by_position, int offset, float factor, bool add);
  void normalise(int in, int out, const Norm&, int n, int heads, bool add);
  void linear(int in, int out, const Packed&, const float* bias, bool add);
  void activate(int in, int out, Activation, int n, bool gated);
  void clip(int buffer, float at);
  void turn(int buffer, int rope, int heads, int D);
  void attend(int qkv, int out, int layer, Heads, float scale, const float* slopes);
  void pick(int in, int out);  // the rows whose logits are wanted; what follows sees only these

  // A buffer's rows as the last `run` left them; good until the next that begins at 0.
  const float* rows(int buffer) const { return at_.at(buffer); }

  // How many operations there are so far.
  int size() const { return int(ops_.size()); }

  // Those from `begin` to `end`; a step is all of them, in stretches or at once. Raises std::invalid_argument before
  // anything is touched.
  void run(const Step&, int begin, int end);

 private:
  struct Now;  // a step, and where its buffers are
  struct Lookup;
  struct Normalise;
  struct Linear;
  struct Activate;
  struct Clip;
  struct Turn;
  struct Look;
  struct Pick;
  struct Rope {
    const float* freqs;
    int n;
    float gain;
    bool neighbours;
    int buffer;
  };

  void reserve(int rows);
  void angles(const Step&, Team::Member&);
  template <class T>
  void push(const T& op);
  template <class T>
  void push_checked(const T& op);

  std::vector<int> widths_;
  std::vector<Rope> ropes_;
  std::vector<std::function<void(Now&, Team::Member&)>> ops_;
  std::vector<std::function<void(const Now&)>> checks_;
  int64_t prepared_bytes_ = 0;  // of a row, at most

  int rows_ = 0;  // that there is room for
  std::vector<float> memory_;
  std::vector<float*> at_;
  std::vector<char> prepared_;
  Work work_;
};

}  // namespace retain
