// The operators as torch sees them: checks of the inputs, choice of the instruction set, threads.
//
// Of torch only the stable interface of 2.11 is used: C functions, which every later version keeps, and headers alone. So
// one library is for all of these versions.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "layers.h"

namespace c10 {
struct BFloat16;
}
// oneDNN's products are outside the stable interface: the addresses of weak symbols are null where torch has them no more
namespace at::native::cpublas {
[[gnu::weak]] void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*, float*,
                          bool);
[[gnu::weak]] void brgemm(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const c10::BFloat16*,
                          const c10::BFloat16*, float*, bool);
[[gnu::weak]] void brgemm_release(bool);
}  // namespace at::native::cpublas

namespace txl {
namespace blas = at::native::cpublas;

Product<float> float_product = nullptr;
Product<bf16> bfloat16_product = nullptr;

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

void require(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(message);
}

// Whether a product of small integers is what it must be
template <class X>
bool multiplies(Product<X> product) {
  constexpr int64_t n = 32, pair = sizeof(X) == 2 ? 2 : 1;
  const auto number = [](int64_t i) {
    const float x = static_cast<float>(i);
    if constexpr (pair == 1) return x;
    else return bf16{static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16)};
  };
  if (!product || !blas::brgemm_release) return false;
  std::vector<X> a(n * n), b(n * n);
  std::vector<float> c(n * n, 1.f);
  for (int64_t m = 0; m < n; m++)
    for (int64_t k = 0; k < n; k++) {
      a[m * n + k] = number((m + 3 * k) % 7);
      b[(k / pair * n + m) * pair + k % pair] = number((5 * k + m) % 11);
    }
  try {
    product(n, n, n, n, n, n, true, a.data(), b.data(), c.data(), pair == 2);
    blas::brgemm_release(pair == 2);
  } catch (const std::exception&) {  // torch's or oneDNN's own: limited by ONEDNN_MAX_CPU_ISA, or oneDNN is switched off
    return false;
  }
  for (int64_t i = 0; i < n * n; i++) {
    int64_t sum = 1;
    for (int64_t k = 0; k < n; k++) sum += (i / n + 3 * k) % 7 * ((5 * k + i % n) % 11);
    if (c[i] != static_cast<float>(sum)) return false;
  }
  return true;
}

const Kernels* kernels = nullptr;

// Choose the instructions, and torch's functions if `onednn`; returns what was chosen. Before it, nothing is computed.
std::string prepare(bool avx512, bool onednn) {
  __builtin_cpu_init();
  float_product = onednn ? static_cast<Product<float>>(blas::brgemm) : nullptr;
  using Brgemm = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const c10::BFloat16*,
                          const c10::BFloat16*, float*, bool);
  // whether oneDNN multiplies bfloat16 here in hardware
  const bool has_bfloat16 = onednn && avx512 && __builtin_cpu_supports("avx512bf16");
  bfloat16_product = has_bfloat16 ? reinterpret_cast<Product<bf16>>(static_cast<Brgemm>(blas::brgemm)) : nullptr;
  if (!multiplies(float_product)) float_product = nullptr;
  if (!multiplies(bfloat16_product)) bfloat16_product = nullptr;
  kernels = avx512 ? &avx512_kernels : &avx2_kernels;
  return std::string(avx512 ? "AVX512" : "AVX2") + (float_product ? "" : ", without oneDNN") +
         (bfloat16_product ? ", bfloat16 products" : ", bfloat16 products in float32");
}

const Format& format_of(ScalarType type) {
  require(kernels, "the native operators are not prepared");
  switch (type) {
    case ScalarType::Float: return kernels->float32;
    case ScalarType::Double: return kernels->float64;
    case ScalarType::BFloat16: return bfloat16_product ? kernels->bfloat16 : kernels->bfloat16_widened;
    default: throw std::runtime_error("no native operator for this dtype");
  }
}

Tensor empty(Sizes sizes, ScalarType type) { return torch::stable::empty(sizes, type); }
Tensor made_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Call a task with each number below `count`, in parallel. With tiles, oneDNN's products of bfloat16 may hold the
// processor's tiles, which are given back.
template <class Task>
void for_all(int64_t count, int64_t grain, bool has_tiles, const Task& task) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) task(i);
    if (has_tiles) blas::brgemm_release(true);
  });
}

uint64_t number_of(const OptionalTensor& seed) {
  require(seed && seed->scalar_type() == ScalarType::Long && seed->numel() == 1, "dropout needs a seed");
  return static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
}

// `kept` makes it the backward pass of dropout with ReLU, see Dropout
Tensor dropout(const Tensor& x, const OptionalTensor& seed, double p, bool relu, const OptionalTensor& kept) {
  const Tensor input = made_contiguous(x), other = kept ? made_contiguous(*kept) : input;
  require(p > 0 && p < 1, "dropout needs p inside 0 and 1");
  require(other.sizes().equals(x.sizes()) && other.scalar_type() == x.scalar_type(), "wrong result of dropout");
  const Tensor result = empty(x.sizes(), x.scalar_type());
  const Dropout z{input.const_data_ptr(), kept ? other.const_data_ptr() : nullptr, result.data_ptr(), x.numel(), p,
                  kept ? 0 : number_of(seed), relu};
  const Format& format = format_of(x.scalar_type());
  for_all((z.count + z.kUnit - 1) / z.kUnit, 2, false, [&](int64_t task) { format.drop(z, task); });
  return result;
}

std::tuple<Tensor, Tensor> rms_norm_of(const Tensor& x, const Tensor& weight, const OptionalTensor& dout,
                                       const OptionalTensor& factor, double eps) {
  const ScalarType type = x.scalar_type(), sums = type == ScalarType::Double ? type : ScalarType::Float;
  const Tensor input = made_contiguous(x), scale = made_contiguous(weight), gradient = dout ? made_contiguous(*dout) : input;
  RmsNorm z{};
  z.width = weight.numel();
  require(x.dim() && weight.dim() == 1 && z.width && x.size(x.dim() - 1) == z.width && weight.scalar_type() == sums,
          "wrong weight of RMSNorm");
  z.rows = x.numel() / z.width, z.eps = eps;
  require(gradient.sizes().equals(x.sizes()) && gradient.scalar_type() == type, "wrong gradient of RMSNorm");
  require(!dout || (factor && factor->numel() == z.rows && factor->scalar_type() == sums && factor->is_contiguous()),
          "wrong factors of RMSNorm");
  const Tensor result = empty(x.sizes(), type), factors = dout ? *factor : empty({z.rows}, sums);
  const Tensor dweight = empty({dout ? z.tasks() : 0, z.width}, sums);
  z.x = input.const_data_ptr(), z.weight = scale.const_data_ptr(), z.dout = dout ? gradient.const_data_ptr() : nullptr;
  z.result = result.data_ptr(), z.factor = factors.data_ptr(), z.dweight = dweight.data_ptr();
  const Format& format = format_of(type);
  for_all(z.tasks(), 2, false, [&](int64_t task) { format.rms_norm(z, task); });
  const int64_t first = 0;
  return {result, dout ? torch::stable::sum(dweight, Sizes(&first, 1)) : factors};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return rms_norm_of(x, weight, {}, {}, eps);
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                             const Tensor& factor) {
  return rms_norm_of(x, weight, dout, factor, 0);
}

// Of ids (B, S), the rows of tables for the n-grams that end at the last tokens, (B, T, N * E)
Tensor ngram_rows(const Tensor& ids, int64_t num_new, const Tensors& tables, double scale) {
  const int64_t N = static_cast<int64_t>(tables.size());
  require(N && ids.dim() == 2 && ids.scalar_type() == ScalarType::Long && num_new > 0 && ids.size(1) >= num_new + N,
          "wrong ids of n-grams");
  const Tensor rows = made_contiguous(ids);
  const int64_t B = ids.size(0), E = tables[0].size(1);
  const ScalarType type = tables[0].scalar_type();
  std::vector<int64_t> buckets;
  std::vector<const void*> pointers;
  for (const Tensor& table : tables) {
    require(table.dim() == 2 && table.size(0) && table.size(1) == E && table.scalar_type() == type &&
                table.is_contiguous() && type != ScalarType::BFloat16, "wrong tables of n-grams");
    buckets.push_back(table.size(0)), pointers.push_back(table.const_data_ptr());
  }
  const Tensor result = empty({B, num_new, N * E}, type);
  const Ngrams z{static_cast<const int64_t*>(rows.const_data_ptr()), rows.size(1), num_new, E, N, buckets.data(),
                 pointers.data(), scale, result.data_ptr()};
  const Format& format = format_of(type);
  for_all(B * num_new, 256, false, [&](int64_t token) { format.look_up(z, token); });
  return result;
}

// A tensor (B, X, N, H), (X, N, H) or (N, H) as the kernels read it
struct Strided {
  View view;
  ScalarType type;
  int64_t dim, B, X, N, H;
};
Strided strided(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  const int64_t dim = static_cast<int64_t>(sizes.size());
  require(dim >= 2 && dim <= 4, "wrong number of dimensions");
  const auto at = [dim](Sizes of, int64_t i) { return i < 4 - dim ? 0 : of[i - 4 + dim]; };
  return {{const_cast<void*>(x.const_data_ptr()), at(strides, 0), at(strides, 1), at(strides, 2), at(strides, 3)},
          x.scalar_type(), dim, at(sizes, 0), at(sizes, 1), at(sizes, 2), at(sizes, 3)};
}
View view(const Tensor& x) { return strided(x).view; }

// `inputs` are the tensors of AttentionInputs, in that order
using Inputs = std::array<Strided, 6>;
Inputs strided(const Tensors& inputs) {
  require(inputs.size() == 6, "attention has six inputs");
  return {strided(inputs[0]), strided(inputs[1]), strided(inputs[2]),
          strided(inputs[3]), strided(inputs[4]), strided(inputs[5])};
}

Attention checked(const Inputs& inputs, const OptionalTensor& valid, const OptionalTensor& first_key,
                  const OptionalTensor& stop_key, const OptionalTensor& seed, double dropout, int64_t clamped,
                  int64_t later) {
  const auto &[q, k, v, r, u, w] = inputs;
  Attention z{};
  z.B = q.B, z.T = q.X, z.N = q.N, z.H = q.H, z.S = k.X, z.P = r.X;
  for (const Strided& x : inputs)
    require(x.type == q.type && x.H == z.H && x.N == z.N, "inputs of attention differ in dtype or heads");
  require(q.dim == 4 && k.dim == 4 && v.dim == 4 && r.dim == 3 && u.dim == 2 && w.dim == 2, "wrong number of dimensions");
  require(v.X == z.S && v.B == z.B && k.B == z.B && z.S >= z.T, "wrong shapes of keys or values");
  require(z.P >= 1 && clamped >= 0 && later >= 0 && z.P + clamped <= z.S + later, "wrong number of distances");
  z.clamped = clamped, z.later = later, z.dropout = dropout;
  const auto numbers = [](const OptionalTensor& x, int64_t count) -> const int64_t* {
    if (!x) return nullptr;
    require(x->scalar_type() == ScalarType::Long && x->is_contiguous() && x->numel() == count, "wrong mask of attention");
    return static_cast<const int64_t*>(x->const_data_ptr());
  };
  z.valid = numbers(valid, z.B), z.first_key = numbers(first_key, z.B * z.T), z.stop_key = numbers(stop_key, z.B * z.T);
  if (dropout > 0) {
    require(dropout < 1, "dropout needs a rate below 1");
    z.seed = number_of(seed);
  }
  z.groups = std::min<int64_t>(z.B, (32 + z.N - 1) / z.N);  // enough tasks for many threads, few sums to add up
  z.q = q.view, z.k = k.view, z.v = v.view, z.r = r.view, z.u = u.view, z.w = w.view;
  return z;
}

void require_stored_in_order(const View& k, const View& v, const View& r) {
  require((k.h == 1 || k.x == 1) && (r.h == 1 || r.x == 1), "keys must be stored by rows or by columns");
  require(v.h == 1, "values must be stored by rows");
}

void run(const Attention& z, ScalarType type, void (*task)(const Attention&, int64_t), int64_t count) {
  for_all(count, 1, type == ScalarType::BFloat16 && bfloat16_product, [&](int64_t i) { task(z, i); });
}

ScalarType type_of_sums(ScalarType type) { return type == ScalarType::Double ? type : ScalarType::Float; }

const void* checked_sinks(const Tensor& sinks, const Attention& z, ScalarType type) {
  require(sinks.scalar_type() == type_of_sums(type) && sinks.is_contiguous() && sinks.numel() == z.N, "wrong sinks");
  return sinks.const_data_ptr();
}

std::tuple<Tensor, Tensor> attention(const Tensors& inputs, const OptionalTensor& sinks, const OptionalTensor& valid,
                                     const OptionalTensor& first_key, const OptionalTensor& stop_key,
                                     const OptionalTensor& seed, double dropout, int64_t clamped, int64_t later) {
  Attention z = checked(strided(inputs), valid, first_key, stop_key, seed, dropout, clamped, later);
  const ScalarType type = inputs[0].scalar_type();
  if (sinks) z.sinks = checked_sinks(*sinks, z, type);
  const Tensor out = empty(inputs[0].sizes(), type);
  const Tensor lse = empty({z.B, z.N, z.T}, type_of_sums(type));
  z.out = view(out), z.lse = lse.data_ptr();
  run(z, type, format_of(type).forward, z.N * z.groups);
  return {out, lse};
}

Tensors attention_backward(const Tensor& dout, const Tensor& lse, const Tensors& inputs, const OptionalTensor& valid,
                           const OptionalTensor& first_key, const OptionalTensor& stop_key, const OptionalTensor& seed,
                           double dropout, int64_t clamped, int64_t later) {
  Attention z = checked(strided(inputs), valid, first_key, stop_key, seed, dropout, clamped, later);
  const Tensor &q = inputs[0], &k = inputs[1];
  const ScalarType type = q.scalar_type(), sums = lse.scalar_type();
  require(dout.sizes().equals(q.sizes()) && dout.scalar_type() == type, "wrong gradient of the output");
  require(lse.numel() == z.B * z.N * z.T && lse.is_contiguous() && (sums == ScalarType::Double) == (type == ScalarType::Double),
          "wrong sums of the forward pass");
  const Tensor dq = empty(q.sizes(), type), dk = empty(k.sizes(), type), dv = empty(k.sizes(), type);
  const Tensor dr = empty({z.groups, z.N, z.P, z.H}, sums);
  const Tensor du = empty({z.groups, z.N, z.H}, sums), dw = empty({z.groups, z.N, z.H}, sums);
  z.lse = lse.data_ptr(), z.dout = view(dout), z.dq = view(dq), z.dk = view(dk), z.dv = view(dv);
  z.dr = dr.data_ptr(), z.du = du.data_ptr(), z.dw = dw.data_ptr();
  run(z, type, format_of(type).backward, z.N * z.groups);
  const int64_t first = 0;
  const auto total = [&](const Tensor& x) { return torch::stable::to(torch::stable::sum(x, Sizes(&first, 1)), type); };
  return {dq, dk, dv, made_contiguous(torch::stable::transpose(total(dr), 0, 1)), total(du), total(dw)};
}

Tensor attention_decode(const Tensors& inputs, const OptionalTensor& sinks, const OptionalTensor& valid,
                        const OptionalTensor& first_key, int64_t clamped) {
  Attention z = checked(strided(inputs), valid, first_key, {}, {}, 0, clamped, 0);
  require_stored_in_order(z.k, z.v, z.r);
  const ScalarType type = inputs[0].scalar_type();
  if (sinks) z.sinks = checked_sinks(*sinks, z, type);
  const Tensor out = empty(inputs[0].sizes(), type);
  z.out = view(out);
  run(z, type, format_of(type).decode, z.B * z.N);
  return out;
}

void compute(const std::vector<DecodedLayer>& layers, const Format& format, bool has_tiles) {
  static const char* const policy = std::getenv("OMP_WAIT_POLICY");
  // where threads wait without spinning, as in a server, waking one takes as long as millions of multiplications
  static const int64_t per_thread = policy && (*policy == 'p' || *policy == 'P') ? int64_t{1} << 22 : int64_t{1} << 18;
  int64_t multiplications = 0;
  for (const DecodedLayer& z : layers)
    multiplications += z.rows() * z.inner() * (4 * z.D + 16 * z.attention.S) + 2 * z.rows() * z.D * z.F;
  const int64_t num_threads = std::clamp<int64_t>(multiplications / per_thread, 1, torch::stable::get_num_threads());
  Together together(layers, format, num_threads);
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    together.take_part();
    if (has_tiles) blas::brgemm_release(true);
  });
  together.finish();
}

// All layers for few new tokens; returns the result of each, (L, B, T, D). Of each layer, `weights` are the matrices
// q, k, v, o, up, down; biases of up and down; weight and bias of both LayerNorms; with qk_norm the weights of q and k;
// and the scales (O, 1) of matrices of 8 bits. `biases` are u and w, `eps` those of the LayerNorms and of q and k. `keys`
// and `values` are storage (B, N, C, H), whose rows before `ends` are read, `num_keys` of them, and the last T are written;
// of `positions` (N, H, X) the last `num_distances` are read. `added` (B, T, I), or nothing, is added to the new values
// through `gates` (N, X). With `key_offset` the second half of a token's key is written one row later. `sinks` (N) have
// no elements where a layer has none. Biases and positions have the dtype of keys.
Tensor decode_layers(const Tensor& x, const Tensors& weights, const Tensors& biases, const std::vector<double>& eps,
                     bool norm_first, const Tensors& keys, const Tensors& values, const std::vector<int64_t>& ends,
                     int64_t num_keys, const Tensors& positions, int64_t num_distances, const OptionalTensor& valid,
                     int64_t clamped, const Tensors& added, const Tensors& gates, const Tensors& sinks,
                     bool key_offset) {
  const size_t L = keys.size(), per_layer = L ? weights.size() / L : 0;
  const bool has_scales = L && weights[0].scalar_type() == ScalarType::Char;
  const size_t num_vectors = per_layer - (has_scales ? 12 : 6);
  require((num_vectors == 6 || num_vectors == 8) && weights.size() == L * per_layer && biases.size() == 2 * L &&
              eps.size() == 4 * L && values.size() == L && added.size() == L && gates.size() == L && sinks.size() == L &&
              ends.size() == L && positions.size() == L && x.dim() == 3 &&
              keys[0].dim() == 4, "wrong number of tensors of layers");
  const int64_t B = x.size(0), T = x.size(1), R = B * T, D = x.size(2), N = keys[0].size(1), H = keys[0].size(3), I = N * H, F = weights[4].size(0);
  const ScalarType key_type = keys[0].scalar_type();
  const ScalarType type = key_type == ScalarType::BFloat16 ? ScalarType::Float : key_type;
  const ScalarType matrix_type = has_scales ? ScalarType::Char : key_type;
  const auto check = [](const Tensor& weight, std::initializer_list<int64_t> shape, ScalarType expected) {
    require(weight.sizes().equals(shape) && weight.scalar_type() == expected && weight.is_contiguous(),
            "wrong weights of a layer");
    return weight.const_data_ptr();
  };
  require(x.scalar_type() == type, "wrong dtype of a layer's input");
  const Format& format = format_of(key_type);
  const Tensor states = empty({static_cast<int64_t>(L), B, T, D}, type), first = made_contiguous(x);
  const int64_t size = static_cast<int64_t>(x.element_size()), key_size = static_cast<int64_t>(keys[0].element_size());
  // queries and their results, and inputs and results of products, each from a cache line on
  const int64_t bytes[4] = {R * I * key_size, R * I * key_size, (R + DecodedLayer::kPadding) * std::max({D, I, F}) * size,
                            R * std::max({D, 3 * I, F}) * size};
  int64_t starts[5] = {};
  for (int i = 0; i < 4; i++) starts[i + 1] = starts[i] + (bytes[i] + 63) / 64 * 64;
  const std::unique_ptr<char, void (*)(void*)> scratch(static_cast<char*>(std::aligned_alloc(64, starts[4])), std::free);
  require(scratch.get(), "out of memory");
  std::memset(scratch.get() + starts[2], 0, bytes[2]);  // columns that fill up R stay 0
  const Strided q{{scratch.get(), T * I, I, H, 1}, key_type, 4, B, T, N, H};
  std::vector<float> input_scale(R);
  const void* previous = first.const_data_ptr();
  std::vector<DecodedLayer> layers;
  for (size_t layer = 0; layer < L; layer++) {
    const Tensor* own = &weights[layer * per_layer];
    const int64_t end = ends[layer];
    const auto newest = [&](const Tensor& rows) {
      const Strided s = strided(rows);
      require(s.dim == 4 && end + key_offset <= s.N && num_keys <= end && s.type == key_type, "wrong number of keys");
      char* const data = static_cast<char*>(s.view.data) + (end - num_keys) * s.view.n * key_size;
      return Strided{{data, s.view.b, s.view.n, s.view.x, s.view.h}, s.type, 4, s.B, num_keys, s.X, s.H};
    };
    const Strided stored = strided(positions[layer]);  // (N, H, X)
    require(stored.dim == 3 && 0 < num_distances && num_distances <= stored.H, "wrong number of keys");
    char* const data = static_cast<char*>(stored.view.data) + (stored.H - num_distances) * stored.view.h * key_size;
    const Strided r{{data, 0, stored.view.h, stored.view.x, stored.view.n}, stored.type, 3, 0, num_distances, stored.X,
                    stored.N};
    const Inputs inputs{q, newest(keys[layer]), newest(values[layer]), r, strided(biases[2 * layer]),
                        strided(biases[2 * layer + 1])};
    DecodedLayer z{};
    z.attention = checked(inputs, valid, {}, {}, {}, 0, clamped, 0);
    require_stored_in_order(z.attention.k, z.attention.v, z.attention.r);
    if (sinks[layer].numel()) z.attention.sinks = checked_sinks(sinks[layer], z.attention, key_type);
    z.attention.out = q.view, z.attention.out.data = scratch.get() + starts[1];
    z.D = D, z.F = F, z.norm_first = norm_first, z.key_offset = key_offset;
    const std::pair<int64_t, int64_t> shapes[6] = {{I, D}, {I, D}, {I, D}, {D, I}, {F, D}, {D, F}};
    for (int i = 0; i < 6; i++) {
      const auto [rows, columns] = shapes[i];
      z.matrix[i] = check(own[i], {rows, columns}, matrix_type);
      if (has_scales)
        z.scale[i] = static_cast<const float*>(check(own[6 + num_vectors + i], {rows, 1}, ScalarType::Float));
    }
    z.up_bias = check(own[6], {F}, type), z.down_bias = check(own[7], {D}, type);
    for (int i = 0; i < 2; i++) {
      z.weight[i] = check(own[8 + 2 * i], {D}, type), z.bias[i] = check(own[9 + 2 * i], {D}, type);
      if (num_vectors == 8) z.weight[2 + i] = check(own[12 + i], {H}, type);
    }
    std::copy_n(eps.begin() + 4 * layer, 4, z.eps);
    if (added[layer].numel()) {
      z.gates = gates[layer].size(-1), z.gate = check(gates[layer], {N, z.gates}, type);
      z.added = check(added[layer], {B, T, I}, type);
      require(z.gates <= D, "a gate of too many columns");
    }
    z.from = previous, z.x = static_cast<char*>(states.data_ptr()) + static_cast<int64_t>(layer) * R * D * size;
    z.input = scratch.get() + starts[2], z.result = scratch.get() + starts[3], z.input_scale = input_scale.data();
    previous = z.x;
    layers.push_back(z);
  }
  compute(layers, format, key_type == ScalarType::BFloat16 && bfloat16_product);
  return states;
}

}  // namespace
}  // namespace txl

STABLE_TORCH_LIBRARY(transformer_xl_native, m) {
  m.def(
      "attention(Tensor[] inputs, Tensor? sinks, Tensor? valid, Tensor? first_key, Tensor? stop_key, Tensor? seed, "
      "float dropout, int num_clamped, int num_later) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor dout, Tensor lse, Tensor[] inputs, Tensor? valid, Tensor? first_key, "
      "Tensor? stop_key, Tensor? seed, float dropout, int num_clamped, int num_later) -> Tensor[]");
  m.def("dropout(Tensor x, Tensor? seed, float p, bool relu, Tensor? kept) -> Tensor");
  m.def("ngram_rows(Tensor ids, int num_new, Tensor[] tables, float scale) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor dout, Tensor x, Tensor weight, Tensor factor) -> (Tensor, Tensor)");
  m.def(
      "attention_decode(Tensor[] inputs, Tensor? sinks, Tensor? valid, Tensor? first_key, int num_clamped) -> Tensor");
  m.def(
      "decode_layers(Tensor x, Tensor[] weights, Tensor[] biases, float[] eps, bool norm_first, Tensor(a!)[] keys, "
      "Tensor(b!)[] values, int[] ends, int num_keys, Tensor[] positions, int num_distances, Tensor? valid, "
      "int num_clamped, Tensor[] added, Tensor[] gates, Tensor[] sinks, bool key_offset) -> Tensor");
  m.def("prepare(bool avx512, bool onednn) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(transformer_xl_native, CompositeImplicitAutograd, m) {
  m.impl("prepare", TORCH_BOX(&txl::prepare));
}
STABLE_TORCH_LIBRARY_IMPL(transformer_xl_native, CPU, m) {
  m.impl("attention", TORCH_BOX(&txl::attention));
  m.impl("attention_backward", TORCH_BOX(&txl::attention_backward));
  m.impl("dropout", TORCH_BOX(&txl::dropout));
  m.impl("ngram_rows", TORCH_BOX(&txl::ngram_rows));
  m.impl("rms_norm", TORCH_BOX(&txl::rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&txl::rms_norm_backward));
  m.impl("attention_decode", TORCH_BOX(&txl::attention_decode));
  m.impl("decode_layers", TORCH_BOX(&txl::decode_layers));
}
