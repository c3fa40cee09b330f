// Relative attention and products of few rows, for one instruction set; TXL_KERNELS is the name of their table.
//
// The scores of a block of queries are computed, shifted, normalized, dropped and used while they are in cache. No mask
// is made: the keys that a query attends to are one stretch of its row. Position scores are written to a buffer whose
// row a, read from column I - 1 - a on, has the keys in order (the relative shift, as in kernels/cpu.py); products with
// keys are added there. Dropout comes from a counter, so both passes draw the same mask.
//
// In code: T type of the tensors, P type of what is multiplied, A type of sums. In comments: I queries of a block, J
// keys of a block, L distances, the farthest first. A packed matrix is what `product` wants as its second operand.
#include "kernels.h"

#include <immintrin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

namespace txl {
namespace {

constexpr int64_t kUnit = 64;    // numbers of keys are rounded up to this, so that few shapes of products occur
constexpr int64_t kChunk = 256;  // columns of one product
constexpr int64_t kRows = 16;    // numbers of queries are rounded up to this
constexpr int64_t kSpare = 16;   // unused columns: rows that begin at the same place in a page would share a cache set

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

inline float widen(bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
template <class T, class A>
inline T narrow(A x) {
  if constexpr (std::is_same_v<T, bf16>) {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);  // to the nearest, ties to even
    return bf16{static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
  } else {
    return static_cast<T>(x);
  }
}

inline double exponential(double x) { return std::exp(x); }
inline float exponential(float x) {  // of x <= 0, as in Cephes: relative error 2e-7
  const float y = x < -87.f ? -87.f : x;
  const float t = y * 1.44269504f + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
  const float n = t - 12582912.f;
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const float power = __builtin_bit_cast(float, (__builtin_bit_cast(int32_t, t) - 0x4b400000 + 127) << 23);
  return x < -87.f ? 0.f : p * power;
}

// The score of a head that has no key, -inf where there is none
template <class A>
A sink_of(const Attention& z, int64_t n) {
  return z.sinks ? static_cast<const A*>(z.sinks)[n] : -std::numeric_limits<A>::infinity();
}
template <class A>
A larger_of(A score, A sink) { return score < sink ? sink : score; }  // a number that is none stays one

// Which probabilities of a query are kept: a hash of the seed, the query and the key against a threshold.
struct Draws {
  uint32_t low = 0, high = 0, threshold = 0;
  double scale = 1;
  Draws(const Attention& z, int64_t query) : Draws(z.dropout, z.seed, query) {}
  Draws(double dropout, uint64_t seed, int64_t query) {
    if (!dropout) return;
    uint64_t x = seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(query + 1);  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    low = static_cast<uint32_t>(x), high = static_cast<uint32_t>(x >> 32);
    threshold = static_cast<uint32_t>(dropout * 4294967296.0);
    scale = 1 / (1 - dropout);
  }
  bool keep(int64_t key) const {
    uint32_t x = low + static_cast<uint32_t>(key) * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du + high;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return (x ^ (x >> 16)) >= threshold;
  }
};

template <class T, class A>
void drop(const Dropout& z, int64_t task) {
  const int64_t first = task * z.kUnit, count = smaller(z.kUnit, z.count - first);
  const T* const x = static_cast<const T*>(z.x) + first;
  T* const to = static_cast<T*>(z.result) + first;
  const Draws draws(z.p, z.seed, task);
  const A scale = static_cast<A>(draws.scale);
  if (z.kept) {
    const T* const kept = static_cast<const T*>(z.kept) + first;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(widen(kept[i]) > 0 ? widen(x[i]) * scale : A(0));
    return;
  }
  const A least = z.relu ? A(0) : -std::numeric_limits<A>::infinity();  // a number that is none stays one
#pragma omp simd
  for (int64_t i = 0; i < count; i++) {
    const A value = widen(x[i]);
    to[i] = narrow<T>(draws.keep(i) ? (value < least ? least : value) * scale : A(0));
  }
}

template <class T, class A>
void rms_norm(const RmsNorm& z, int64_t task) {
  const A *const weight = static_cast<const A*>(z.weight), width = static_cast<A>(z.width);
  A *const factors = static_cast<A*>(z.factor), *const dweight = z.dout ? static_cast<A*>(z.dweight) + task * z.width : nullptr;
  for (int64_t h = 0; h < z.width && dweight; h++) dweight[h] = 0;
  for (int64_t row = task * z.kUnit; row < smaller((task + 1) * z.kUnit, z.rows); row++) {
    const T* const x = static_cast<const T*>(z.x) + row * z.width;
    T* const to = static_cast<T*>(z.result) + row * z.width;
    A sum = 0;
    if (!z.dout) {
#pragma omp simd reduction(+ : sum)
      for (int64_t h = 0; h < z.width; h++) sum += widen(x[h]) * widen(x[h]);
      const A factor = factors[row] = 1 / std::sqrt(sum / width + static_cast<A>(z.eps));
#pragma omp simd
      for (int64_t h = 0; h < z.width; h++) to[h] = narrow<T>(widen(x[h]) * factor * weight[h]);
      continue;
    }
    const T* const dout = static_cast<const T*>(z.dout) + row * z.width;
    const A factor = factors[row];
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < z.width; h++) {
      const A gradient = widen(dout[h]), normalized = widen(x[h]) * factor;
      dweight[h] += gradient * normalized;
      sum += gradient * weight[h] * normalized;
    }
    const A mean = sum / width;
#pragma omp simd
    for (int64_t h = 0; h < z.width; h++)
      to[h] = narrow<T>((widen(dout[h]) * weight[h] - widen(x[h]) * factor * mean) * factor);
  }
}

enum Slot { kQc, kQp, kKeys, kKeyRows, kValues, kDistances, kDistanceRows, kWide, kP, kOut, kGrad, kGradT, kQcT, kQpT,
            kDp, kDs, kPacked, kDkT, kDvT, kDrT, kDqc, kDqp, kInverse, kArranged, kSlots };

// Buffers of a thread, kept for later calls: allocating them anew would take longer than filling them
struct Buffers {
  void* data[kSlots] = {};
  int64_t bytes[kSlots] = {};
  ~Buffers() {
    for (void* one : data) std::free(one);
  }
};
template <class X>
X* buffer(Slot slot, int64_t count) {
  static thread_local Buffers buffers;
  const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(X)) + 64, 4096);
  if (buffers.bytes[slot] < bytes) {
    std::free(buffers.data[slot]);
    buffers.bytes[slot] = 0;
    buffers.data[slot] = std::aligned_alloc(4096, static_cast<size_t>(bytes));
    if (!buffers.data[slot]) throw std::bad_alloc();
    buffers.bytes[slot] = bytes;
  }
  return static_cast<X*>(buffers.data[slot]);
}

typedef uint32_t __attribute__((may_alias)) Word;

template <class P>
constexpr int64_t kPair = std::is_same_v<P, bf16> ? 2 : 1;

// Pack the matrix (rows, columns) with these strides; of an odd last row, the other half of the pair is zeros.
template <class P, class T>
void pack(P* to, int64_t ld, const T* from, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  const bool by_rows = column_stride == 1;  // else a cache line of the packed rows at a time
  const int64_t step = by_rows ? columns : 16;
  for (int64_t j0 = 0; j0 < columns; j0 += step) {
    const int64_t j1 = smaller(j0 + step, columns);
    if constexpr (kPair<P> == 1) {
      for (int64_t i = 0; i < rows; i++) {
        const T* a = from + i * row_stride;
        if (by_rows)
          for (int64_t j = j0; j < j1; j++) to[i * ld + j] = narrow<P>(widen(a[j]));
        else
#pragma omp simd
          for (int64_t j = j0; j < j1; j++) to[i * ld + j] = narrow<P>(widen(a[j * column_stride]));
      }
    } else {
      static_assert(std::is_same_v<P, T>);
      for (int64_t i = 0; i < rows; i += 2) {
        uint32_t* words = reinterpret_cast<uint32_t*>(to) + i / 2 * ld;
        const T *a = from + i * row_stride, *b = a + row_stride;
        if (i + 1 == rows)
          for (int64_t j = j0; j < j1; j++) words[j] = a[j * column_stride].bits;
        else if (by_rows)
          for (int64_t j = j0; j < j1; j++) words[j] = a[j].bits | static_cast<uint32_t>(b[j].bits) << 16;
        else if (row_stride == 1 && column_stride % 2 == 0 && reinterpret_cast<uintptr_t>(a) % 4 == 0)
#pragma omp simd
          for (int64_t j = j0; j < j1; j++) words[j] = reinterpret_cast<const Word*>(a)[j * (column_stride / 2)];
        else
          for (int64_t j = j0; j < j1; j++)
            words[j] = a[j * column_stride].bits | static_cast<uint32_t>(b[j * column_stride].bits) << 16;
      }
    }
  }
}

// Pack the matrix into rows from `offset` on, which may begin in the middle of a pair.
template <class P, class T>
void pack_rows(P* to, int64_t offset, const T* from, int64_t rows, int64_t columns, int64_t ld, int64_t row_stride,
               int64_t stride) {
  for (int64_t i = 0; i < rows; i++) {
    P* row = to + (offset + i) / kPair<P> * ld * kPair<P> + (offset + i) % kPair<P>;
    for (int64_t j = 0; j < columns; j++) row[j * kPair<P>] = narrow<P>(widen(from[i * row_stride + j * stride]));
  }
}

// For float64, which oneDNN does not have, and for float32 where torch does not have oneDNN's product. Each sum is in the
// order of K; those of a tile are in registers.
template <int64_t rows, class X>
void tile_product(int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const X* A, const X* B, X* C) {
  constexpr int64_t kWidth = 128 / sizeof(X);
  for (int64_t n = 0; n < N; n += kWidth) {
    const int64_t width = smaller(kWidth, N - n);
    X sums[rows][kWidth] = {};
    if (add)
      for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < width; j++) sums[m][j] = C[m * ldc + n + j];
    const auto accumulate = [&](int64_t columns) {
      for (int64_t k = 0; k < K; k++)
        for (int64_t m = 0; m < rows; m++)
#pragma omp simd
          for (int64_t j = 0; j < columns; j++) sums[m][j] += A[m * lda + k] * B[k * ldb + n + j];
    };
    width == kWidth ? accumulate(kWidth) : accumulate(width);
    for (int64_t m = 0; m < rows; m++)
      for (int64_t j = 0; j < width; j++) C[m * ldc + n + j] = sums[m][j];
  }
}
template <class X>
void product_by_loops(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const X* A,
                      const X* B, X* C) {
  int64_t m = 0;
  for (; m + 4 <= M; m += 4) tile_product<4>(N, K, lda, ldb, ldc, add, A + m * lda, B, C + m * ldc);
  for (; m < M; m++) tile_product<1>(N, K, lda, ldb, ldc, add, A + m * lda, B, C + m * ldc);
}
template <class X, class A>
void product(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const X* a, const X* b,
             A* c) {
  if constexpr (std::is_same_v<X, bf16>)
    bfloat16_product(M, N, K, lda, ldb, ldc, add, a, b, c, true);
  else if (std::is_same_v<X, double> || !float_product)
    product_by_loops(M, N, K, lda, ldb, ldc, add, a, b, c);
  else if constexpr (std::is_same_v<X, float>)
    float_product(M, N, K, lda, ldb, ldc, add, a, b, c, false);
}

// Products whose second operand has many columns, and products that sum over many; in chunks, so that shapes are few
template <class P, class A>
void wide_product(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const P* a,
                  const P* b, A* c) {
  for (int64_t j = 0; j < N; j += kChunk)
    product(M, smaller(kChunk, N - j), K, lda, ldb, ldc, add, a, b + j * kPair<P>, c + j);
}
template <class P, class A>
void long_product(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, const P* a, const P* b,
                  A* c) {
  for (int64_t j = 0; j < K; j += kChunk)
    product(M, N, smaller(kChunk, K - j), lda, ldb, ldc, j > 0, a + j, b + j * ldb, c);
}

// First and last key that a query attends to; the last is before the first where there is none, as for padding
struct Stretch {
  int64_t first, last;
  Stretch(const Attention& z, int64_t b, int64_t query) {
    const int64_t memory = z.S - z.T, empty = z.valid ? memory - z.valid[b] : 0;
    const int64_t place = memory + z.later + query;  // of the key at the least distance
    last = smaller(place, z.S - 1);
    first = larger(larger(0, empty), place - (z.P + z.clamped) + 1);
    if (query >= z.T) return;  // padding of a block
    if (z.first_key) first = larger(first, z.first_key[b * z.T + query]);
    if (z.stop_key) last = smaller(last, z.stop_key[b * z.T + query] - 1);
  }
  int64_t count() const { return larger(0, last - first + 1); }
};

template <class A>
A maximum(const A* x, int64_t count) {
  constexpr int64_t kLanes = 16;
  A most[kLanes];
  int64_t j = 0;
  for (A& one : most) one = x[0];
  for (; j + kLanes <= count; j += kLanes)
    for (int64_t l = 0; l < kLanes; l++) most[l] = x[j + l] > most[l] ? x[j + l] : most[l];
  for (; j < count; j++) most[0] = x[j] > most[0] ? x[j] : most[0];
  A result = most[0];
  for (A one : most) result = one > result ? one : result;
  return result;
}

// p = exp(s - most) without those that are dropped; returns the sum with them.
template <bool kDrop, class P, class A>
A exponentials(P* p, const A* s, int64_t count, A most, const Draws& draws, int64_t first_key) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; j++) {
    const A e = exponential(s[j] - most);
    sum += e;
    p[j] = narrow<P>(kDrop && !draws.keep(first_key + j) ? A(0) : e);
  }
  return sum;
}

// Of one query: probabilities after dropout, and gradients of scores, from scores and gradients of probabilities, both
// of which it overwrites.
template <bool kDrop, class P, class A>
void softmax_gradients(P* p, P* ds, A* s, A* dp, int64_t count, A lse, const Draws& draws, int64_t first_key) {
  const A scale = static_cast<A>(draws.scale);
  A inner = 0;
#pragma omp simd reduction(+ : inner)
  for (int64_t j = 0; j < count; j++) {
    const A x = exponential(s[j] - lse), kept = !kDrop ? A(1) : draws.keep(first_key + j) ? scale : A(0);
    const A d = dp[j] * kept;
    inner += x * d;
    p[j] = narrow<P>(x * kept);
    s[j] = x, dp[j] = d;
  }
#pragma omp simd
  for (int64_t j = 0; j < count; j++) ds[j] = narrow<P>(s[j] * (dp[j] - inner));
}

// A block of queries, and the keys that one of them attends to, in whole units
struct Block {
  int64_t start, valid, rows;  // rows: with those that fill up the last block
  int64_t key = 0, keys = 0;   // first key, and their number; 0 if no query attends to any
  int64_t distance = 0;        // index of the position key of the first column of scores; negative: clamped
  Block(const Attention& z, int64_t b, int64_t first, int64_t size)
      : start(first), valid(smaller(size, z.T - first)), rows(round_up(valid, kRows)) {
    int64_t begin = z.S, end = 0;
    for (int64_t a = 0; a < valid; a++) {
      const Stretch s(z, b, start + a);
      begin = smaller(begin, s.first), end = larger(end, s.last + 1);
    }
    if (begin >= end) return;
    key = begin / kUnit * kUnit, keys = round_up(end - key, kUnit);
    distance = key + z.P - (z.S - z.T) - z.later - start - rows;
  }
};

// The passes of one head and one group of batch rows
template <class T, class P, class A>
struct Head {
  const Attention& z;
  const int64_t n, group, first_row = group * z.B / z.groups, end_row = (group + 1) * z.B / z.groups;
  const int64_t width = round_up(z.H, kPair<P>);
  const int64_t block = smaller(z.S > 2048 ? 32 : 64, round_up(z.T, kRows));
  const int64_t keys = round_up(z.S, kUnit) + kSpare;
  const int64_t wide = keys + block + 2 * kUnit;  // columns of scores
  // columns before distance P - 1; products with rows of distances begin with a whole pair
  const int64_t front = z.clamped + block + kUnit + ((z.P - z.S + z.T - z.later + z.clamped) & 1);
  const int64_t distances = round_up(front + z.P + block + 2 * kUnit, kUnit) + kSpare;
  const A scale = 1 / std::sqrt(static_cast<A>(z.H));
  P* const by_distance = buffer<P>(kDistances, distances * width);  // packed (H, L)
  P* const by_key = buffer<P>(kKeys, keys * width);                 // packed (H, J)
  P* const values = buffer<P>(kValues, keys * width);               // packed (J, H), or (H, J) in the backward pass
  P* const content = buffer<P>(kQc, block * width);                 // (I, H)
  P* const position = buffer<P>(kQp, block * width);                // (I, H)
  A* const scores = buffer<A>(kWide, block * wide + kUnit);         // (I, J + I - 1)

  Head(const Attention& call, int64_t task) : z(call), n(task / call.groups), group(task % call.groups) {
    std::memset(by_distance, 0, distances * width * sizeof(P));
    const T* r = z.r.at<T>(0, 0, n);
    P* const nearest_clamped = by_distance + (front - z.clamped) * kPair<P>;
    pack(nearest_clamped, distances, r, z.H, z.clamped, z.r.h, 0);
    pack(by_distance + front * kPair<P>, distances, r, z.H, z.P, z.r.h, z.r.x);
    std::memset(by_key, 0, keys * width * sizeof(P)), std::memset(values, 0, keys * width * sizeof(P));
    std::memset(content, 0, block * width * sizeof(P)), std::memset(position, 0, block * width * sizeof(P));
  }
  void pack_keys(P* to, const View& x, int64_t b) const { pack(to, keys, x.at<T>(b, 0, n), z.H, z.S, x.h, x.x); }

  // Queries of a block with their biases, scaled
  void add_biases(const Block& c, int64_t b) const {
    const T *u = z.u.at<T>(0, 0, n), *w = z.w.at<T>(0, 0, n);
    for (int64_t a = 0; a < c.rows; a++) {
      const T* q = z.q.at<T>(b, c.start + smaller(a, c.valid - 1), n);
      for (int64_t h = 0; h < z.H; h++) {
        content[a * width + h] = narrow<P>((widen(q[h * z.q.h]) + widen(u[h * z.u.h])) * scale);
        position[a * width + h] = narrow<P>((widen(q[h * z.q.h]) + widen(w[h * z.w.h])) * scale);
      }
    }
  }

  // Scores of a block: query a's keys stand from `row(scores, c, a)` on
  void score(const Block& c) const {
    const int64_t columns = round_up(c.keys + c.rows - 1, kUnit);
    // columns of clamped distances alone, which share a position key
    const int64_t clamped = smaller(larger(0, -c.distance) / kUnit * kUnit, columns);
    for (int64_t a = 0; a < c.rows && clamped; a++) {
      A sum = 0;
      const P* const r = by_distance + front * kPair<P>;
      for (int64_t h = 0; h < width; h++)
        sum += widen(position[a * width + h]) * widen(r[h / kPair<P> * distances * kPair<P> + h % kPair<P>]);
      for (int64_t j = 0; j < clamped; j++) scores[a * wide + j] = sum;
    }
    wide_product(c.rows, columns - clamped, width, width, distances, wide, false, position,
                 by_distance + (front + c.distance + clamped) * kPair<P>, scores + clamped);
    wide_product(c.rows, c.keys, width, width, keys, wide - 1, true, content, by_key + c.key * kPair<P>,
                 scores + c.rows - 1);
  }
  template <class X>
  X* row(X* scores_of_block, const Block& c, int64_t a) const { return scores_of_block + a * wide + c.rows - 1 - a; }

  // Zeros on both sides of a query's stretch of keys in a row of the block; returns where the stretch begins
  template <class X>
  X* stretch_in(X* to, const Block& c, const Stretch& s, int64_t count) const {
    const int64_t before = count ? s.first - c.key : c.keys;
    std::memset(to, 0, before * sizeof(X));
    std::memset(to + before + count, 0, (c.keys - before - count) * sizeof(X));
    return to + before;
  }

  template <bool kDrop>
  void forward() const {
    P* const p = buffer<P>(kP, block * keys);  // (I, J)
    A* const o = buffer<A>(kOut, block * width);
    A* const factor = buffer<A>(kInverse, block);
    const A sink = sink_of<A>(z, n);
    for (int64_t b = first_row; b < end_row; b++) {
      pack_keys(by_key, z.k, b);
      pack(values, width, z.v.at<T>(b, 0, n), z.S, z.H, z.v.x, z.v.h);
      for (int64_t start = 0; start < z.T; start += block) {
        const Block c(z, b, start, block);
        add_biases(c, b);
        if (c.keys) score(c);
        for (int64_t a = 0; a < c.rows; a++) {
          const Stretch s(z, b, start + a);
          const int64_t count = a < c.valid ? s.count() : 0, query = (b * z.N + n) * z.T + start + a;
          P* const to = stretch_in(p + a * keys, c, s, count);
          factor[a] = 0;
          A* const lse = static_cast<A*>(z.lse) + query;
          if (a < c.valid) *lse = sink;
          if (!count) continue;
          const Draws draws(z, query);
          const A* x = row(scores, c, a) + (s.first - c.key);
          const A most = larger_of(maximum(x, count), sink);
          const A sum = exponentials<kDrop>(to, x, count, most, draws, s.first) + exponential(sink - most);
          *lse = most + std::log(sum);
          factor[a] = static_cast<A>(draws.scale) / sum;
        }
        if (c.keys) long_product(c.rows, width, c.keys, keys, width, width, p, values + c.key * width, o);
        for (int64_t a = 0; a < c.valid; a++) {
          T* out = z.out.at<T>(b, start + a, n);
          for (int64_t h = 0; h < z.H; h++) out[h] = narrow<T>(factor[a] ? o[a * width + h] * factor[a] : A(0));
        }
      }
    }
  }

  // Products are of transposes, (H, I) times (I, J): only the score gradients are packed for them
  template <bool kDrop>
  void backward() const {
    P* const key_rows = buffer<P>(kKeyRows, keys * width);                 // packed (J, H)
    P* const distance_rows = buffer<P>(kDistanceRows, distances * width);  // packed (L, H)
    std::memset(key_rows, 0, keys * width * sizeof(P)), std::memset(distance_rows, 0, distances * width * sizeof(P));
    const T* r = z.r.at<T>(0, 0, n);
    pack_rows(distance_rows, front - z.clamped, r, z.clamped, z.H, width, 0, z.r.h);
    pack_rows(distance_rows, front, r, z.P, z.H, width, z.r.x, z.r.h);
    P *const gradient = buffer<P>(kGrad, block * width), *const gradient_t = buffer<P>(kGradT, block * width);
    P *const content_t = buffer<P>(kQcT, block * width), *const position_t = buffer<P>(kQpT, block * width);
    A *const dcontent = buffer<A>(kDqc, block * width), *const dposition = buffer<A>(kDqp, block * width);
    P *const p = buffer<P>(kP, block * keys), *const packed = buffer<P>(kPacked, block * wide);
    A* const dp = buffer<A>(kDp, block * keys);
    P* const ds = buffer<P>(kDs, block * wide + kUnit);
    A *const dk_t = buffer<A>(kDkT, keys * width), *const dv_t = buffer<A>(kDvT, keys * width);
    A* const dr_t = buffer<A>(kDrT, distances * width);
    const int64_t head = group * z.N + n;
    A *const du = static_cast<A*>(z.du) + head * z.H, *const dw = static_cast<A*>(z.dw) + head * z.H;
    std::memset(du, 0, z.H * sizeof(A)), std::memset(dw, 0, z.H * sizeof(A));
    std::memset(dr_t, 0, distances * width * sizeof(A)), std::memset(gradient, 0, block * width * sizeof(P));
    for (int64_t b = first_row; b < end_row; b++) {
      pack_keys(by_key, z.k, b), pack_keys(values, z.v, b);
      pack(key_rows, width, z.k.at<T>(b, 0, n), z.S, z.H, z.k.x, z.k.h);
      std::memset(dk_t, 0, keys * width * sizeof(A)), std::memset(dv_t, 0, keys * width * sizeof(A));
      for (int64_t start = 0; start < z.T; start += block) {
        const Block c(z, b, start, block);
        if (!c.keys) {
          for (int64_t a = 0; a < c.valid; a++) std::memset(z.dq.at<T>(b, start + a, n), 0, z.H * sizeof(T));
          continue;
        }
        add_biases(c, b);
        for (int64_t a = 0; a < c.rows; a++) {
          const T* g = z.dout.at<T>(b, start + smaller(a, c.valid - 1), n);
          for (int64_t h = 0; h < z.H; h++) gradient[a * width + h] = narrow<P>(widen(g[h * z.dout.h]));
        }
        transpose(gradient_t, gradient, c), transpose(content_t, content, c), transpose(position_t, position, c);
        score(c);
        wide_product(c.rows, c.keys, width, width, keys, keys, false, gradient, values + c.key * kPair<P>, dp);
        const int64_t columns = round_up(c.keys + c.rows - 1, kUnit);
        for (int64_t a = 0; a < c.rows; a++) {
          const Stretch s(z, b, start + a);
          const int64_t count = a < c.valid ? s.count() : 0, query = (b * z.N + n) * z.T + start + a;
          P *const to = stretch_in(p + a * keys, c, s, count), *const by_distances = ds + a * wide;
          std::memset(by_distances, 0, (c.rows - 1 - a) * sizeof(P));
          P* const gradients = stretch_in(row(ds, c, a), c, s, count);
          std::memset(row(ds, c, a) + c.keys, 0, (columns - c.keys - (c.rows - 1 - a)) * sizeof(P));
          const int64_t skipped = s.first - c.key;
          if (count)
            softmax_gradients<kDrop>(to, gradients, row(scores, c, a) + skipped, dp + a * keys + skipped, count,
                                   static_cast<A*>(z.lse)[query], Draws(z, query), s.first);
        }
        transposed_product(c, c.keys, p, keys, packed, gradient_t, keys, dv_t + c.key);
        transposed_product(c, c.keys, ds + c.rows - 1, wide - 1, packed, content_t, keys, dk_t + c.key);
        transposed_product(c, columns, ds, wide, packed, position_t, distances, dr_t + front + c.distance);
        const P *const k = key_rows + c.key * width, *const r = distance_rows + (front + c.distance) * width;
        long_product(c.rows, width, c.keys, wide - 1, width, width, ds + c.rows - 1, k, dcontent);
        long_product(c.rows, width, columns, wide, width, width, ds, r, dposition);
        for (int64_t a = 0; a < c.valid; a++) {
          T* const dq = z.dq.at<T>(b, start + a, n);
          for (int64_t h = 0; h < z.H; h++) {
            const A x = dcontent[a * width + h] * scale, y = dposition[a * width + h] * scale;
            dq[h] = narrow<T>(x + y), du[h] += x, dw[h] += y;
          }
        }
      }
      unpack(z.dk, b, dk_t), unpack(z.dv, b, dv_t);
    }
    A* const dr = static_cast<A*>(z.dr) + head * z.P * z.H;
    for (int64_t x = -z.clamped; x < z.P; x++)
      for (int64_t h = 0; h < z.H; h++) {
        const A d = dr_t[h * distances + front + x];
        if (x == -z.clamped) dr[h] = d;
        else if (x <= 0) dr[h] += d;
        else dr[x * z.H + h] = d;
      }
  }

  // Write the transpose of (H, J); a cache line of its rows serves several j
  void unpack(const View& to, int64_t b, const A* from) const {
    for (int64_t j = 0; j < z.S; j++) {
      T* const row = to.at<T>(b, j, n);
      const A* const column = from + j;
#pragma omp simd
      for (int64_t h = 0; h < z.H; h++) row[h] = narrow<T>(column[h * keys]);
    }
  }

  void transpose(P* to, const P* from, const Block& c) const {  // (I, H) to (H, I); c.rows is a multiple of 16
    for (int64_t h = 0; h < width; h++)
      for (int64_t a = 0; a < c.rows; a++) to[h * c.rows + a] = from[a * width + h];
  }

  // to (H, columns) += left (H, I) times right (I, columns)
  void transposed_product(const Block& c, int64_t columns, const P* right, int64_t ld, P* packed, const P* left,
                          int64_t ld_to, A* to) const {
    if constexpr (kPair<P> == 2) {
      pack(packed, wide, right, c.rows, columns, ld, 1);
      wide_product(width, columns, c.rows, c.rows, wide, ld_to, true, left, packed, to);
    } else {
      wide_product(width, columns, c.rows, c.rows, ld, ld_to, true, left, right, to);
    }
  }
};

template <class A>
void look_up(const Ngrams& z, int64_t token) {
  const int64_t* const newest = z.ids + token / z.T * z.S + z.S - z.T + token % z.T;
  A* to = static_cast<A*>(z.result) + token * z.N * z.E;
  int64_t hash = *newest;
  for (int64_t n = 0; n < z.N; n++, to += z.E) {
    hash = (hash * z.kMultiplier + newest[-1 - n]) % z.kModulus;
    if (hash < 0) hash += z.kModulus;  // as torch's remainder
    const A* const from = static_cast<const A*>(z.tables[n]) + hash % z.buckets[n] * z.E;
    for (int64_t e = 0; e < z.E; e++) to[e] = from[e] * static_cast<A>(z.scale);
  }
}

// Few queries without gradient, as in decoding token by token: keys and values are read once, where they are.

// Sixteen numbers, in one register or two
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <class V>
V load(const void* from) {
  V x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline float sum_of(Floats x) {
  float sums[16];
  std::memcpy(sums, &x, sizeof(x));
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  return sums[0];
}

// How `dots` wants its vector: for bfloat16, of each 32 numbers those of even index come first, because a word has two
template <class T, class A>
void arrange(A* to, const A* from, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const bool paired = std::is_same_v<T, bf16> && i - i % 32 + 32 <= count;
    to[paired ? i - i % 32 + i % 32 / 2 + i % 2 * 16 : i] = from[i];
  }
}

// The product of a row with an arranged vector, in two sums. Rows that follow each other are best read one by one: that
// is what processors expect, and more streams at once read RAM a quarter slower.
template <class T>
float dot(const T* row, const float* vector, int64_t count) {
  constexpr int64_t kStep = std::is_same_v<T, bf16> ? 32 : 16;
  Floats sums[2] = {};
  int64_t i = 0;
  const auto add = [&](Floats& sum, int64_t at) {
    if constexpr (std::is_same_v<T, bf16>) {
      const Words pair = load<Words>(row + at);
      sum += reinterpret_cast<Floats>(pair << 16) * load<Floats>(vector + at);
      sum += reinterpret_cast<Floats>(pair & 0xffff0000u) * load<Floats>(vector + at + 16);
    } else {
      sum += load<Floats>(row + at) * load<Floats>(vector + at);
    }
  };
  for (; i + 2 * kStep <= count; i += 2 * kStep) add(sums[0], i), add(sums[1], i + kStep);
  if (i + kStep <= count) add(sums[0], i), i += kStep;
  float sum = sum_of(sums[0] + sums[1]);
  for (; i < count; i++) sum += widen(row[i]) * vector[i];
  return sum;
}
inline double dot(const double* row, const double* vector, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += row[i] * vector[i];
  return sum;
}
// Compilers know instructions for sums of 16-bit products, which 512 products of 8 and 16 bits do not exceed
inline float dot(const int8_t* row, const int16_t* vector, int64_t count) {
  float total = 0;
  for (int64_t from = 0; from < count; from += 512) {
    const int64_t end = smaller(from + 512, count);
    int32_t sum = 0;
    for (int64_t i = from; i < end; i++) {
      const int16_t weight = row[i];
      sum += int32_t{weight} * int32_t{vector[i]};
    }
    total += static_cast<float>(sum);
  }
  return total;
}
// to = x / scale in 16 bits, as what is lost then is below what 8-bit weights lose; returns the scale, NaN for x that is
// not finite
template <class A>
float quantize(int16_t* to, const A* x, int64_t count) {
  A most = 0, zero = 0;
  for (int64_t i = 0; i < count; i++) most = std::abs(x[i]) > most ? std::abs(x[i]) : most, zero += x[i] * 0;
  const A scale = most / 32767 + zero, inverse = most > 0 ? 32767 / most : A(0);
  for (int64_t i = 0; i < count; i++) to[i] = static_cast<int16_t>(std::lrint(x[i] * inverse));
  return static_cast<float>(scale);
}
#ifdef __AVX512F__
// Of two bfloat16 vectors in order, where the processor has an instruction for it
__attribute__((target("avx512bf16"))) float dot(const bf16* row, const bf16* vector, int64_t count) {
  const auto pairs = [](const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); };
  __m512 sums[2] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int64_t j = 0; j < 2; j++) sums[j] = _mm512_dpbf16_ps(sums[j], pairs(row + i + 32 * j), pairs(vector + i + 32 * j));
  float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
  for (; i < count; i++) sum += widen(row[i]) * widen(vector[i]);
  return sum;
}
#else
float dot(const bf16*, const bf16*, int64_t) { __builtin_trap(); }  // AVX2 multiplies bfloat16 in float32 only
#endif

// Products of some rows with an arranged vector; their sums do not wait for each other
template <int kCount, class T>
void dots(float* to, const T* rows, int64_t stride, const float* vector, int64_t count) {
  constexpr int64_t kStep = std::is_same_v<T, bf16> ? 32 : 16;
  Floats sums[kCount] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const Floats x = load<Floats>(vector + i);
    for (int row = 0; row < kCount; row++) {
      if constexpr (std::is_same_v<T, bf16>) {
        const Words pair = load<Words>(rows + row * stride + i);
        sums[row] += reinterpret_cast<Floats>(pair << 16) * x;
        sums[row] += reinterpret_cast<Floats>(pair & 0xffff0000u) * load<Floats>(vector + i + 16);
      } else {
        sums[row] += load<Floats>(rows + row * stride + i) * x;
      }
    }
  }
  for (int row = 0; row < kCount; row++) {
    to[row] = sum_of(sums[row]);
    for (int64_t j = i; j < count; j++) to[row] += widen(rows[row * stride + j]) * vector[j];
  }
}
template <int kCount>
void dots(double* to, const double* rows, int64_t stride, const double* vector, int64_t count) {
  for (int row = 0; row < kCount; row++) {
    double sum = 0;
    for (int64_t j = 0; j < count; j++) sum += rows[row * stride + j] * vector[j];
    to[row] = sum;
  }
}

// Let the processor begin to read numbers that are wanted soon.
template <class T>
void fetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i);
}

// s += q (H) times keys (count, H), stored by rows or by columns; meanwhile the first of `soon` begin to be read
template <class T, class A>
void add_scores(A* s, const A* query, const T* keys, int64_t count, int64_t H, int64_t stride, int64_t stride_h,
                const T* soon, int64_t num_soon) {
  if (stride_h == 1) {
    A sums[4], *const q = buffer<A>(kArranged, H);
    arrange<T>(q, query, H);
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      dots<4>(sums, keys + j * stride, stride, q, H);
      for (int row = 0; row < 4; row++) s[j + row] += sums[row];
    }
    for (; j < count; j++) dots<1>(sums, keys + j * stride, stride, q, H), s[j] += sums[0];
    return;
  }
  const A* const q = query;
  constexpr int64_t kColumns = 2048, kTogether = 4;  // scores that stay in the first cache; rows read together
  for (int64_t j0 = 0; j0 < count; j0 += kColumns) {
    const int64_t size = smaller(kColumns, count - j0);
    A* const to = s + j0;
    int64_t h = 0;
    for (; h + kTogether <= H; h += kTogether) {
      const T *a = keys + h * stride_h + j0, *b = a + stride_h, *c = b + stride_h, *d = c + stride_h;
      fetch(soon + h * num_soon / H, num_soon * kTogether / H);
#pragma omp simd
      for (int64_t j = 0; j < size; j++)
        to[j] += widen(a[j]) * q[h] + widen(b[j]) * q[h + 1] + (widen(c[j]) * q[h + 2] + widen(d[j]) * q[h + 3]);
    }
    for (; h < H; h++)
#pragma omp simd
      for (int64_t j = 0; j < size; j++) to[j] += widen(keys[h * stride_h + j0 + j]) * q[h];
  }
}

template <class T, class A>
void decode(const Attention& z, int64_t task) {
  constexpr int64_t kShort = 65536;  // bytes of keys, up to which processors do not read ahead in time by themselves
  const int64_t b = task / z.N, n = task % z.N, next = smaller(task + 1, z.B * z.N - 1);
  const A scale = 1 / std::sqrt(static_cast<A>(z.H));
  A *const scores = buffer<A>(kWide, z.S), *const o = buffer<A>(kOut, z.H);
  A *const content = buffer<A>(kDqc, z.H), *const position = buffer<A>(kDqp, z.H);
  const A sink = sink_of<A>(z, n);
  for (int64_t i = 0; i < z.T; i++) {
    const Stretch s(z, b, i);
    const int64_t count = s.count(), near = smaller(count, z.P), far = count - near;
    const T *const q = z.q.at<T>(b, i, n), *const u = z.u.at<T>(0, 0, n), *const w = z.w.at<T>(0, 0, n);
    for (int64_t h = 0; h < z.H; h++) {
      content[h] = (widen(q[h * z.q.h]) + widen(u[h * z.u.h])) * scale;
      position[h] = (widen(q[h * z.q.h]) + widen(w[h * z.w.h])) * scale;
      o[h] = 0;
    }
    std::memset(scores, 0, count * sizeof(A));
    const T* const v = z.v.at<T>(b, s.first, n);
    const bool is_fetched = z.k.x == 1 && count * z.H * static_cast<int64_t>(sizeof(T)) <= kShort;
    add_scores(scores + far, position, z.r.at<T>(0, z.P - near, n), near, z.H, z.r.x, z.r.h, v, 0);
    for (int64_t j = 0; j < far; j++) scores[j] = scores[far];  // clamped distances
    add_scores(scores, content, z.k.at<T>(b, s.first, n), count, z.H, z.k.x, z.k.h, v,
               is_fetched && !i && z.v.x == z.H ? count * z.H : 0);
    const A most = larger_of(maximum(scores, count), sink);
    const A sum = exponentials<false>(scores, scores, count, most, Draws(z, 0), 0) + exponential(sink - most);
    const int64_t num_soon = is_fetched && i == z.T - 1 ? count : 0;
    const T* const soon = z.k.at<T>(next / z.N, s.first, next % z.N);
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      if (num_soon)
        for (int64_t h = j * z.H / count; h < (j + 4) * z.H / count; h++) fetch(soon + h * z.k.h, num_soon);
      const T *v0 = v + j * z.v.x, *v1 = v0 + z.v.x, *v2 = v1 + z.v.x, *v3 = v2 + z.v.x;
      const A* const p = scores + j;
#pragma omp simd
      for (int64_t h = 0; h < z.H; h++)
        o[h] += widen(v0[h]) * p[0] + widen(v1[h]) * p[1] + (widen(v2[h]) * p[2] + widen(v3[h]) * p[3]);
    }
    for (; j < count; j++)
#pragma omp simd
      for (int64_t h = 0; h < z.H; h++) o[h] += widen(v[j * z.v.x + h]) * scores[j];
    for (int64_t h = 0; h < z.H; h++) z.out.at<T>(b, i, n)[h] = narrow<T>(count ? o[h] / sum : A(0));
  }
}

// One layer for few new tokens. Numbers are rounded to T where the layer's operators, one by one, return T.
template <class T, class P, class A>
struct Decoder {
  // of the vector that a matrix is multiplied with
  using Input = std::conditional_t<std::is_same_v<P, bf16>, bf16, A>;

  static A rounded(A x) { return widen(narrow<T>(x)); }

  // to = normalized x, which may be the same rows
  static void layer_norm(A* to, const A* x, const DecodedLayer& z, int norm) {
    const A *const weight = static_cast<const A*>(z.weight[norm]), *const bias = static_cast<const A*>(z.bias[norm]);
    A sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < z.D; d++) sum += x[d];
    const A mean = sum / static_cast<A>(z.D);
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < z.D; d++) squares += (x[d] - mean) * (x[d] - mean);
    const A scale = 1 / std::sqrt(squares / static_cast<A>(z.D) + static_cast<A>(z.eps[norm]));
#pragma omp simd
    for (int64_t d = 0; d < z.D; d++) to[d] = (x[d] - mean) * scale * weight[d] + bias[d];
  }

  // Of `kPadding` rows, or those that are left: where the input of products has columns, it is written in whole cache lines
  static void prepare(const DecodedLayer& z, int step, int64_t block) {
    constexpr int64_t kRows = DecodedLayer::kPadding;
    const int64_t count = step < z.kSteps ? z.inputs(step) : 0, width = larger(z.D, z.inner());
    A* const from = buffer<A>(kGrad, kRows * width);
    const A* inputs[kRows];
    const int64_t first = block * kRows, end = smaller(first + kRows, z.rows());
    for (int64_t row = first; row < end; row++) inputs[row - first] = input_of(z, step, row, from + (row - first) * width);
    if (by_columns(z) && count) {
      constexpr int64_t pair = kPair<P>;
      for (int64_t i = 0; i < count; i++) {
        P* const column = static_cast<P*>(z.input) + i / pair * padded(z.rows()) * pair + first * pair + i % pair;
        for (int64_t row = 0; row < end - first; row++) column[row * pair] = narrow<P>(inputs[row][i]);
      }
      return;
    }
    for (int64_t row = first; row < end && count; row++) {
      const A* const input = inputs[row - first];
      Input* const to = static_cast<Input*>(z.input) + row * count;
      if (z.scale[0]) {
        z.input_scale[row] = quantize(static_cast<int16_t*>(z.input) + row * count, input, count);
      } else if constexpr (std::is_same_v<P, bf16>) {
        for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(input[i]);
      } else {
        A* const whole = buffer<A>(kWide, count);
        for (int64_t i = 0; i < count; i++) whole[i] = rounded(input[i]);
        arrange<T>(to, whole, count);
      }
    }
  }

  // Ends the part before a step, and returns a row of what the step's products take, made in `from` if need be
  static const A* input_of(const DecodedLayer& z, int step, int64_t row, A* from) {
    A* const x = static_cast<A*>(z.x) + row * z.D;
    const int norm = step > 1;  // of the part that begins or ends
    const A* const result = static_cast<const A*>(z.result) + row * z.outputs(larger(step, 1) - 1);
    if (!step) std::memcpy(x, static_cast<const A*>(z.from) + row * z.D, z.D * sizeof(A));  // computed in place
    if (step == 2 || step == z.kSteps) {  // attention or feed-forward ends
      for (int64_t d = 0; d < z.D; d++) x[d] += result[d];
      if (!z.norm_first) layer_norm(x, x, z, step == z.kSteps);
    }
    if (step == 3) return result;
    if (step == 1) {
      const T* const o = z.attention.out.template at<T>(0, row, 0);
      for (int64_t i = 0; i < z.inner(); i++) from[i] = widen(o[i]);
      return from;
    }
    if (step == z.kSteps || !z.norm_first) return x;
    layer_norm(from, x, z, norm);
    return from;
  }

  // The second half goes `later` numbers further, to the row of the next token.
  static void write_head(T* to, int64_t stride, const A* from, const DecodedLayer& z, int norm, int64_t later = 0) {
    const int64_t H = z.attention.H;
    const A* const weight = norm ? static_cast<const A*>(z.weight[norm]) : nullptr;
    A squares = 0;
    for (int64_t h = 0; h < H && weight; h++) squares += from[h] * from[h];
    const A scale = weight ? 1 / std::sqrt(squares / static_cast<A>(H) + static_cast<A>(z.eps[norm])) : A(1);
    for (int64_t h = 0; h < H; h++)
      to[h * stride + (h < H - H / 2 ? 0 : later)] = narrow<T>(weight ? from[h] * scale * weight[h] : from[h]);
  }

  static void add_to_values(A* v, const DecodedLayer& z, int64_t row) {
    const int64_t H = z.attention.H;
    const A *const x = static_cast<const A*>(z.x) + row * z.D, *const added = static_cast<const A*>(z.added) + row * z.inner();
    A* const input = buffer<A>(kGrad, z.D);
    z.norm_first ? layer_norm(input, x, z, 0) : void(std::memcpy(input, x, z.D * sizeof(A)));
    for (int64_t n = 0; n < z.attention.N; n++) {
      A sum = 0;
      for (int64_t d = 0; d < z.gates; d++) sum += rounded(input[d]) * static_cast<const A*>(z.gate)[n * z.gates + d];
      const A factor = rounded(2 * rounded(1 / (1 + std::exp(-rounded(sum)))));
      for (int64_t i = n * H; i < (n + 1) * H; i++) v[i] = rounded(v[i] + rounded(factor * rounded(added[i])));
    }
  }

  static void split(const DecodedLayer& z, int64_t row) {
    const Attention& a = z.attention;
    const int64_t b = row / a.T, place = a.S - a.T + row % a.T;
    A* const from = static_cast<A*>(z.result) + row * 3 * z.inner();
    if (z.added) add_to_values(from + 2 * z.inner(), z, row);
    for (int64_t n = 0; n < a.N; n++) {
      const A *const q = from + n * a.H, *const k = q + z.inner(), *const v = k + z.inner();
      write_head(a.q.template at<T>(0, row, n), a.q.h, q, z, 2);
      write_head(a.k.template at<T>(b, place, n), a.k.h, k, z, 3, z.key_offset ? a.k.x : 0);
      write_head(a.v.template at<T>(b, place, n), a.v.h, v, z, 0);
      if (z.key_offset && place == a.S - 1)  // nothing of an earlier token is left in the row that begins
        for (int64_t h = 0; h < a.H - a.H / 2; h++) a.k.template at<T>(b, a.S, n)[h * a.k.h] = narrow<T>(A(0));
    }
  }

  template <class Row, class Vector>
  static auto dot_of(const void* matrix, const void* inputs, int64_t o, int64_t b, int64_t I) {
    return dot(static_cast<const Row*>(matrix) + o * I, static_cast<const Vector*>(inputs) + b * I, I);
  }

  // Rows of a matrix times the inputs of all tokens: the matrix is read once
  static void multiply(const DecodedLayer& z, int step, int64_t unit) {
    const int64_t outputs = z.outputs(step), I = z.inputs(step), per_matrix = (outputs + z.kUnit - 1) / z.kUnit;
    const int64_t part = unit / per_matrix, first = unit % per_matrix * z.kUnit, rows = z.rows();
    const int64_t end = smaller(first + z.kUnit, outputs), columns = step ? outputs : 3 * outputs;
    const int64_t which = step ? step + 2 : part;
    const void* const any_bias = step == 2 ? z.up_bias : step == 3 ? z.down_bias : nullptr;
    const A* const bias = static_cast<const A*>(any_bias);
    const auto write = [&](int64_t row, int64_t o, A product) {
      const A sum = rounded(bias ? product + rounded(bias[o]) : product);
      static_cast<A*>(z.result)[row * columns + part * outputs + o] = step == 2 && sum < 0 ? A(0) : sum;
    };
    if constexpr (std::is_same_v<T, P>)
      if (by_columns(z)) {
        A* const products = buffer<A>(kWide, z.kUnit * padded(rows));
        wide_product(end - first, padded(rows), I, I, padded(rows), padded(rows), false,
                     static_cast<const P*>(z.matrix[which]) + first * I, static_cast<const P*>(z.input), products);
        for (int64_t row = 0; row < rows; row++)
          for (int64_t o = first; o < end; o++) write(row, o, products[(o - first) * padded(rows) + row]);
        return;
      }
    const float* const scale = z.scale[which];
    for (int64_t o = first; o < end; o++)
      for (int64_t row = 0; row < rows; row++)
        write(row, o, scale ? static_cast<A>(dot_of<int8_t, int16_t>(z.matrix[which], z.input, o, row, I) *
                                             z.input_scale[row] * scale[o])
                            : dot_of<T, Input>(z.matrix[which], z.input, o, row, I));
  }

  // Whether there are so many tokens that `product` is faster. It wants the inputs as columns, of bfloat16 in pairs of rows.
  static bool by_columns(const DecodedLayer& z) {
    return std::is_same_v<T, P> && !z.scale[0] && z.rows() >= DecodedLayer::kPadding && (z.D | z.F | z.inner()) % kPair<P> == 0;
  }
  static int64_t padded(int64_t rows) { return round_up(rows, DecodedLayer::kPadding); }
};

template <class T, class P, class A>
constexpr Format format() {
  return {&look_up<A>, &drop<T, A>, &rms_norm<T, A>,
          [](const Attention& z, int64_t task) {
            const Head<T, P, A> head(z, task);
            z.dropout > 0 ? head.template forward<true>() : head.template forward<false>();
          },
          [](const Attention& z, int64_t task) {
            const Head<T, P, A> head(z, task);
            z.dropout > 0 ? head.template backward<true>() : head.template backward<false>();
          },
          [](const Attention& z, int64_t task) { decode<T, A>(z, task); },
          &Decoder<T, P, A>::prepare, &Decoder<T, P, A>::split, &Decoder<T, P, A>::multiply};
}

}  // namespace

const Kernels TXL_KERNELS = {format<float, float, float>(), format<double, double, double>(),
                             format<bf16, bf16, float>(), format<bf16, float, float>()};

}  // namespace txl
