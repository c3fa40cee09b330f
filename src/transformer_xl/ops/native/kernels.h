// What the C++ files of this folder share: the inputs and results of the operators, and the table of their functions.
//
// kernels.cpp is compiled once for each instruction set and includes no header of torch: a function that the compiler
// does not inline exists once in the library, and must not be the copy with instructions that a processor lacks.
//
// Letters are those of the Python code: B batch size, T queries, S = M + T keys (M memory slots), P position keys, N
// heads, H head width.
#pragma once
#include <cstdint>

namespace txl {

struct bf16 {
  uint16_t bits;
};

// A tensor (B, X, N, H) as it is stored; strides are counted in elements.
struct View {
  void* data = nullptr;
  int64_t b = 0, x = 0, n = 0, h = 0;
  template <class T>
  T* at(int64_t row, int64_t position, int64_t head) const {
    return static_cast<T*>(data) + row * b + position * x + head * n;
  }
};

// One call of attention. Its tasks are pairs of a head and a group of batch rows, so that the sums over batch rows have
// an order that does not depend on the number of threads.
struct Attention {
  int64_t B, T, S, P, N, H;
  int64_t clamped, later;    // num_clamped and num_later of the mask
  const int64_t* valid;      // valid_B of the mask, or null
  const int64_t* first_key;  // first_key_BT of the mask, or null
  const int64_t* stop_key;   // stop_key_BT of the mask, or null
  double dropout;
  uint64_t seed;
  int64_t groups;
  View q, k, v, r, u, w;
  View out;   // of the forward pass
  void* lse;  // (B, N, T): logarithm of each query's sum of exponentials; float32, or float64 for float64
  const void* sinks;  // (N) in the type of lse, or null: a score of each head whose value is 0
  View dout, dq, dk, dv;
  void *dr, *du, *dw;  // sums of each group in the type of lse: (groups, N, P, H) and (groups, N, H)
};

// One layer for few new tokens. Its sums are of the type of `x`; keys, values, queries and matrices may be bfloat16 then.
// A matrix (O, I) is read row by row, as it is stored: in the type of keys, or in 8 bits with a scale
// for each row.
struct DecodedLayer {
  Attention attention;  // the new keys and values are written to the last places of k and v
  int64_t D, F;
  bool norm_first, key_offset;
  double eps[4];  // of the norms, as below
  const void* matrix[6];                   // q, k, v, o, up, down
  const float* scale[6];                   // (O) of each matrix of 8 bits, else null
  const void *up_bias, *down_bias;         // (F), (D)
  const void *weight[4], *bias[4];         // LayerNorm of attention and of feed-forward; RMSNorm of q and k, or null
  const void* from;          // (R, D), which becomes x
  const void *added, *gate;  // (R, I) to new values, and (N, gates) that opens it by the input's first columns; or null
  int64_t gates;             // columns of `gate`
  void *x, *input, *result;  // (R, D); what the matrices of a step multiply, (R, I) or (I, R); what they give, (R, O)
  float* input_scale;        // (R) of an input of 16 bits, which matrices of 8 bits multiply
  static constexpr int64_t kUnit = 16;     // rows of a matrix that one task multiplies
  static constexpr int64_t kPadding = 16;  // of R is a multiple in (I, R)
  static constexpr int kSteps = 4;         // q with k and v; o; up; down
  int64_t rows() const { return attention.B * attention.T; }  // R
  int64_t inner() const { return attention.N * attention.H; }
  int64_t outputs(int step) const { return step == 0 ? inner() : step == 2 ? F : D; }
  int64_t inputs(int step) const { return step == 1 ? inner() : step == 3 ? F : D; }
  int64_t units(int step) const { return (step == 0 ? 3 : 1) * ((outputs(step) + kUnit - 1) / kUnit); }
};

// Dropout of a tensor as it is stored, with ReLU before it if `relu`. With `kept`, the result of a forward pass with ReLU,
// it is the backward pass, and nothing is drawn: where the result is 0, so is the gradient.
struct Dropout {
  const void *x, *kept;
  void* result;
  int64_t count;
  double p;
  uint64_t seed;
  bool relu;
  static constexpr int64_t kUnit = 16384;  // elements of a task
};

// RMSNorm of rows as they are stored. With `dout` it is the backward pass, of which each task sums up its rows for dweight.
struct RmsNorm {
  const void *x, *weight, *dout;  // weight in the type of sums
  void* result;                   // normalized x, or the gradient of x
  void* factor;                   // (rows) of sums: what the forward pass multiplied each row with
  void* dweight;                  // (tasks, width) of sums
  int64_t rows, width;
  double eps;
  static constexpr int64_t kUnit = 256;  // rows of a task
  int64_t tasks() const { return (rows + kUnit - 1) / kUnit; }
};

// Rows of tables for the n-grams that end at each of the last T tokens, of 2 tokens and more, chosen by a hash of their
// ids. Ids are 0 where there is no token.
struct Ngrams {
  const int64_t* ids;       // (B, S), oldest first
  int64_t S, T, E, N;       // N tables (buckets, E)
  const int64_t* buckets;   // (N)
  const void* const* tables;
  double scale;
  void* result;  // (B, T, N, E): rows times the scale
  static constexpr int64_t kMultiplier = 1000003, kModulus = 2147483647;
};

struct Format {
  void (*look_up)(const Ngrams&, int64_t token);
  void (*drop)(const Dropout&, int64_t task);
  void (*rms_norm)(const RmsNorm&, int64_t task);
  void (*forward)(const Attention&, int64_t task);
  void (*backward)(const Attention&, int64_t task);
  void (*decode)(const Attention&, int64_t task);  // a task is a batch row and head; no dropout, nothing is packed
  // makes the input of a step's products from a block of kPadding rows, or, after the last step, ends
  void (*prepare)(const DecodedLayer&, int step, int64_t block);
  void (*split)(const DecodedLayer&, int64_t row);  // the result of step 0 into queries, keys and values of heads
  void (*multiply)(const DecodedLayer&, int step, int64_t unit);
};

struct Kernels {
  Format float32, float64, bfloat16, bfloat16_widened;  // widened: products of bfloat16 inputs in float32
};
extern const Kernels avx2_kernels, avx512_kernels;

// C (M, N) = A (M, K) B (K, N), or added to C, by oneDNN through torch; null where it is not to be had. B of bfloat16 is
// packed: rows in pairs, whose numbers alternate.
template <class X>
using Product = void (*)(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const X* A,
                         const X* B, float* C, bool packed);
extern Product<float> float_product;
extern Product<bf16> bfloat16_product;

}  // namespace txl
