// Calls the functions of the table TXL_KERNELS of kernels.cpp with one thread and with several, and compares their
// results bit by bit.
//
//     kernels_in_threads FUNCTION...    drop, norm, attention (both passes), decode, layer
//
// It is linked with kernels.cpp, as operators.cpp is, but its threads are plain ones and its products loops, so that a
// sanitizer sees all of them. Each tensor is an allocation of its own. `make sanitize` runs it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"
#include "layers.h"

namespace txl {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "kernels_in_threads: %s\n", what);
  std::exit(1);
}
float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }

template <class X>
void multiply(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const X* A, const X* B,
              float* C, bool packed) {
  const int64_t pair = sizeof(X) == 2 ? 2 : 1;
  require(K % pair == 0, "a product ends in the middle of a pair");
  require(packed == (pair == 2), "a product is packed in another way");
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      float sum = add ? C[m * ldc + n] : 0;
      for (int64_t k = 0; k < K; k++) sum += widen(A[m * lda + k]) * widen(B[(k / pair * ldb + n) * pair + k % pair]);
      C[m * ldc + n] = sum;
    }
}

}  // namespace

Product<float> float_product = multiply<float>;
Product<bf16> bfloat16_product = multiply<bf16>;

namespace {

constexpr int kThreads[] = {1, 2, 3, 8};  // the first gives what the others are compared with
int64_t num_calls = 0;                    // of an operator, with all numbers of threads

// Neighbouring tasks are of different threads, unlike at::parallel_for's, so more of them meet
template <class Task>
void parallel(int threads, int64_t count, const Task& task) {
  std::vector<std::thread> started;
  for (int t = 0; t < threads; t++)
    started.emplace_back([=, &task] {
      for (int64_t i = t; i < count; i += threads) task(i);
    });
  for (std::thread& one : started) one.join();
}

template <class X>
X number(double x) {
  if constexpr (std::is_same_v<X, bf16>) {
    return bf16{static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(x)) >> 16)};
  } else {
    return static_cast<X>(x);
  }
}

template <class X>
std::vector<X> random(int64_t count, double most = 1) {
  static uint64_t state = 7;
  std::vector<X> result(count);
  for (X& one : result) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    one = number<X>(most * (static_cast<double>(state >> 40) / (1 << 23) - 1));
  }
  return result;
}

// Results of one operator: before each call other bytes, so that what is not written is seen
class Results {
 public:
  template <class X>
  X* add(std::vector<X>& tensor) {
    X* const data = tensor.data();
    places_.push_back({reinterpret_cast<char*>(data), tensor.size() * sizeof(X), [data, size = tensor.size()] {
                         return std::all_of(data, data + size, [](X x) { return std::isfinite(widen(x)); });
                       }});
    return data;
  }
  template <class Call>
  void compare(const Call& call) {
    std::vector<std::string> expected;
    for (const int threads : kThreads) {
      for (const Place& place : places_) std::memset(place.data, 0x40 + threads, place.bytes);
      call(threads);
      num_calls++;
      for (size_t i = 0; i < places_.size(); i++) {
        const std::string bytes(places_[i].data, places_[i].bytes);
        if (threads == kThreads[0]) expected.push_back(bytes);
        require(bytes == expected[i], "results depend on the number of threads");
        require(places_[i].is_finite(), "results depend on numbers that were never written");  // those are NaN
      }
    }
  }

 private:
  struct Place {
    char* data;
    size_t bytes;
    std::function<bool()> is_finite;
  };
  std::vector<Place> places_;
};

struct Case {
  int64_t B, T, M, N, H, window, clamped;
  bool padded, episodes;
  double dropout;
  int64_t later = 0;
  bool stops = false;
};
constexpr Case kCases[] = {
    {1, 1, 0, 1, 1, 0, 0, false, false, 0},       {2, 5, 7, 3, 5, 0, 0, true, false, 0.3},
    {3, 17, 31, 2, 8, 20, 3, false, true, 0},     {2, 70, 90, 2, 7, 0, 40, true, true, 0.1},
    {34, 3, 2, 1, 18, 0, 0, true, false, 0.9},    {1, 131, 257, 1, 33, 101, 0, false, false, 0},
    {1, 33, 2100, 1, 4, 2000, 500, true, false, 0.2}, {2, 4, 0, 5, 2, 1, 0, false, false, 0},
    {1, 1, 0, 2, 3, 0, 0, false, false, 0, 0, true}, {2, 5, 7, 3, 5, 0, 0, true, false, 0.3, 4, true},
    {1, 131, 257, 1, 33, 0, 0, false, false, 0, 130}, {3, 131, 31, 1, 8, 20, 0, false, true, 0.1, 7, true},
    {1, 33, 2100, 1, 4, 0, 500, true, false, 0, 32, true}, {1, 70, 0, 2, 6, 3, 0, false, false, 0, 69},
};

// (b, x, n, h) as (b, n, h, x) if `columns`
View view(void* data, int64_t x, int64_t n, int64_t h, bool columns = false) {
  return columns ? View{data, n * h * x, 1, h * x, x} : View{data, x * n * h, n * h, h, 1};
}

template <class T>
struct Inputs {
  std::vector<T> q, k, v, r, u, w;
  std::vector<int64_t> valid, first_key, stop_key;
  Attention z{};
  Inputs(const Case& c, bool columns) {
    z.B = c.B, z.T = c.T, z.S = c.T + c.M, z.N = c.N, z.H = c.H, z.clamped = c.clamped, z.later = c.later;
    z.P = (c.window ? std::min(c.window, z.S + c.later) : z.S + c.later) - c.clamped;
    const int64_t width = z.N * z.H, per_head = (32 + z.N - 1) / z.N;
    z.groups = z.B < per_head ? z.B : per_head;
    q = random<T>(z.B * z.T * width), k = random<T>(z.B * z.S * width), v = random<T>(z.B * z.S * width);
    r = random<T>(z.P * width), u = random<T>(width), w = random<T>(width);
    z.q = view(q.data(), z.T, z.N, z.H), z.k = view(k.data(), z.S, z.N, z.H, columns);
    z.v = view(v.data(), z.S, z.N, z.H), z.r = view(r.data(), z.P, z.N, z.H, columns);
    z.r.b = 0, z.u = View{u.data(), 0, 0, z.H, 1}, z.w = View{w.data(), 0, 0, z.H, 1};
    for (int64_t b = 0; c.padded && b < z.B; b++) valid.push_back(c.M - b * (c.M + c.T + 1) / 2);  // negative: padding
    for (int64_t i = 0; c.episodes && i < z.B * z.T; i++) first_key.push_back(i % z.T < z.T / 2 ? 0 : c.M + z.T / 2);
    for (int64_t i = 0; c.stops && i < z.B * z.T; i++)  // chunks; every third row has none but one, every third one key
      stop_key.push_back(i / z.T % 3 == 1 ? i % z.T == 3 : i / z.T % 3 == 2 ? 1 : c.M + (i % z.T / 50 + 1) * 50);
    z.stop_key = c.stops ? stop_key.data() : nullptr;
    z.valid = c.padded ? valid.data() : nullptr, z.first_key = c.episodes ? first_key.data() : nullptr;
  }
};

template <class T, class A>
void attention(const Format& format, const Case& c, bool columns) {
  Inputs<T> inputs(c, columns);
  Attention z = inputs.z;
  const std::vector<A> sinks = random<A>(z.N);
  z.dropout = c.dropout, z.seed = 5, z.sinks = columns ? sinks.data() : nullptr;
  const int64_t width = z.N * z.H, queries = z.B * z.T * width, keys = z.B * z.S * width;
  std::vector<T> out(queries), dq(queries), dk(keys), dv(keys), dout = random<T>(queries);
  std::vector<A> lse(z.B * z.N * z.T), dr(z.groups * z.P * width), du(z.groups * width), dw(z.groups * width);
  Results forward, backward;
  z.out = view(forward.add(out), z.T, z.N, z.H), z.dout = view(dout.data(), z.T, z.N, z.H);
  z.dq = view(backward.add(dq), z.T, z.N, z.H), z.dk = view(backward.add(dk), z.S, z.N, z.H);
  z.dv = view(backward.add(dv), z.S, z.N, z.H), z.lse = lse.data();  // that of padding is not written
  z.dr = backward.add(dr), z.du = backward.add(du), z.dw = backward.add(dw);
  forward.compare([&](int threads) { parallel(threads, z.N * z.groups, [&](int64_t i) { format.forward(z, i); }); });
  backward.compare([&](int threads) { parallel(threads, z.N * z.groups, [&](int64_t i) { format.backward(z, i); }); });
}

template <class T>
void decode(const Format& format, const Case& c, bool columns) {
  Inputs<T> inputs(c, columns);
  Attention z = inputs.z;
  std::vector<T> out(z.B * z.T * z.N * z.H);
  Results results;
  z.out = view(results.add(out), z.T, z.N, z.H);
  results.compare([&](int threads) { parallel(threads, z.B * z.N, [&](int64_t i) { format.decode(z, i); }); });
}

template <class T, class A, class Weight>
void layer(const Format& format, const Case& c, int64_t num_new, int64_t D, int64_t F, bool norm_first, bool qk_norm) {
  Inputs<T> inputs({c.B, num_new, c.M, c.N, c.H, c.window, 0, c.padded, false, 0}, norm_first);
  DecodedLayer z{};
  Attention& a = z.attention = inputs.z;
  const int64_t R = z.rows(), I = a.N * a.H, most = std::max({D, 3 * I, F});
  std::vector<T> keys = random<T>(a.B * (a.S + 1) * a.N * a.H);  // a row more, for a key of which half is known
  a.k = view(keys.data(), a.S + 1, a.N, a.H, norm_first), z.key_offset = norm_first;
  const std::vector<T> k = keys, v = inputs.v;
  const std::vector<A> x_before = random<A>(R * D);
  const int64_t rows[] = {I, I, I, D, F, D}, columns[] = {D, D, D, I, D, F};
  std::vector<Weight> matrix[6];
  std::vector<float> scale[6], input_scale(R);
  std::vector<A> up_bias = random<A>(F), down_bias = random<A>(D), weight[4], bias[2], x(R * D), result(R * most);
  std::vector<A> input((R + DecodedLayer::kPadding) * std::max({D, I, F}));
  std::vector<T> attended(R * I);
  Results results;
  for (int i = 0; i < 6; i++) {
    matrix[i] = random<Weight>(rows[i] * columns[i], sizeof(Weight) == 1 ? 127 : 1), z.matrix[i] = matrix[i].data();
    scale[i] = random<float>(rows[i], 0.01), z.scale[i] = sizeof(Weight) == 1 ? scale[i].data() : nullptr;
  }
  for (int i = 0; i < 4; i++) {
    weight[i] = random<A>(i < 2 ? D : a.H), z.eps[i] = 1e-5;
    z.weight[i] = i < 2 || qk_norm ? weight[i].data() : nullptr;
    if (i < 2) bias[i] = random<A>(D), z.bias[i] = bias[i].data();
  }
  z.D = D, z.F = F, z.norm_first = norm_first, z.up_bias = up_bias.data(), z.down_bias = down_bias.data();
  a.out = view(attended.data(), num_new, a.N, a.H), z.input = input.data(), z.result = result.data();
  z.input_scale = input_scale.data(), z.x = results.add(x), results.add(keys), results.add(inputs.v);
  z.from = x_before.data();
  const std::vector<A> added = random<A>(R * I), gate = random<A>(a.N * std::min<int64_t>(D, 12));
  z.added = added.data(), z.gate = gate.data(), z.gates = std::min<int64_t>(D, 12);
  const std::vector<A> sinks = random<A>(a.N);
  a.sinks = norm_first ? sinks.data() : nullptr;
  std::vector<A> x_after(R * D);
  DecodedLayer second = z;  // after the first
  second.from = x.data(), second.x = results.add(x_after), second.added = nullptr;
  const std::vector<DecodedLayer> layers{z, second};
  results.compare([&](int threads) {
    std::copy(k.begin(), k.end(), keys.begin()), std::copy(v.begin(), v.end(), inputs.v.begin());
    Together together(layers, format, threads, 1);
    parallel(threads, threads, [&](int64_t) { together.take_part(); });
    together.finish();
  });
}

template <class T>
void drop(const Format& format, int64_t count, bool relu) {
  const std::vector<T> x = random<T>(count), gradient = random<T>(count);
  std::vector<T> out(count), dx(count);
  Results forward, backward;
  const int64_t tasks = (count + Dropout::kUnit - 1) / Dropout::kUnit;
  const Dropout z{x.data(), nullptr, forward.add(out), count, 0.3, 5, relu};
  const Dropout dz{gradient.data(), out.data(), backward.add(dx), count, 0.3, 0, true};
  forward.compare([&](int threads) { parallel(threads, tasks, [&](int64_t task) { format.drop(z, task); }); });
  backward.compare([&](int threads) { parallel(threads, tasks, [&](int64_t task) { format.drop(dz, task); }); });
}

template <class T, class A>
void rms_norm(const Format& format, int64_t rows, int64_t width) {
  const std::vector<T> x = random<T>(rows * width), gradient = random<T>(rows * width);
  const std::vector<A> weight = random<A>(width);
  std::vector<T> out(rows * width), dx(rows * width);
  std::vector<A> factors(rows);
  RmsNorm z{x.data(), weight.data(), nullptr, nullptr, factors.data(), nullptr, rows, width, 1e-5};
  std::vector<A> dweight(z.tasks() * width);
  Results forward, backward;
  forward.add(factors), z.result = forward.add(out);
  RmsNorm dz = z;
  dz.dout = gradient.data(), dz.result = backward.add(dx), dz.dweight = backward.add(dweight);
  forward.compare([&](int threads) { parallel(threads, z.tasks(), [&](int64_t task) { format.rms_norm(z, task); }); });
  backward.compare([&](int threads) { parallel(threads, z.tasks(), [&](int64_t task) { format.rms_norm(dz, task); }); });
}

template <class T, class A>
void run(const std::string& function, const Format& format, bool has_layer = true) {
  if (function == "drop")
    for (const int64_t count : {1, 7, 16384, 3 * 16384 + 5})
      for (const bool relu : {false, true}) drop<T>(format, count, relu);
  if (function == "norm")
    for (const int64_t rows : {1, 256, 3 * 256 + 5})
      for (const int64_t width : {1, 22, 64}) rms_norm<T, A>(format, rows, width);
  for (const Case& c : kCases)
    for (const bool columns : {false, true}) {
      if (function == "attention") attention<T, A>(format, c, columns);
      if (function == "decode" && c.T < 20 && !c.later && !c.stops) decode<T>(format, c, columns);
    }
  if (function != "layer" || !has_layer) return;
  for (const Case& c : {kCases[0], kCases[1], kCases[5]})
    for (const int64_t num_new : {1, 3, 16})
      for (const bool norm_first : {false, true}) {
        layer<T, A, T>(format, c, num_new, 22, 37, norm_first, !norm_first);
        layer<T, A, T>(format, c, num_new, 72, 530, norm_first, norm_first);
        if constexpr (!std::is_same_v<A, double>) layer<T, A, int8_t>(format, c, num_new, 33, 530, norm_first, norm_first);
      }
}

}  // namespace
}  // namespace txl

#define TXL_NAME(x) #x
#define TXL_NAME_OF(x) TXL_NAME(x)

int main(int count, char** functions) {
  using txl::bf16;
  __builtin_cpu_init();
  // the other table traps, and so does a processor without the instruction
  const bool is_wide = std::string_view(TXL_NAME_OF(TXL_KERNELS)) == "avx512_kernels";
  const bool has_rows = is_wide && __builtin_cpu_supports("avx512bf16");
  for (int i = 1; i < count; i++) {
    const std::string function = functions[i];
    txl::run<float, float>(function, txl::TXL_KERNELS.float32);
    txl::run<double, double>(function, txl::TXL_KERNELS.float64);
    txl::run<bf16, float>(function, txl::TXL_KERNELS.bfloat16, has_rows);
    txl::run<bf16, float>(function, txl::TXL_KERNELS.bfloat16_widened);
  }
  std::printf("%ld calls with 1, 2, 3 or 8 threads\n", static_cast<long>(txl::num_calls));
}
