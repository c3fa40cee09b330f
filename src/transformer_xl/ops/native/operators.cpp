// The operators as torch sees them: checks of the inputs, choice of the instruction set, threads.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels.h"

namespace txl {
namespace blas = at::native::cpublas;

void product(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const float* A,
             const float* B, float* C) {
  blas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, false);
}
void product(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const bf16* A,
             const bf16* B, float* C) {
  blas::brgemm(M, N, K, lda, ldb, ldc, add, reinterpret_cast<const at::BFloat16*>(A),
               reinterpret_cast<const at::BFloat16*>(B), C, true);
}

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const Kernels& kernels() {  // torch's choice, which ATEN_CPU_CAPABILITY limits
  static const bool wide = at::get_cpu_capability() == "AVX512";
  return wide ? avx512_kernels : avx2_kernels;
}

// Whether oneDNN multiplies bfloat16 here in hardware
bool multiplies_bfloat16() {
  static const bool result = [] {
    __builtin_cpu_init();
    if (at::get_cpu_capability() != "AVX512" || !__builtin_cpu_supports("avx512bf16")) return false;
    std::vector<bf16> ones(32 * 32, bf16{0x3f80});
    std::vector<float> out(32 * 32);
    try {
      product(32, 32, 32, 32, 32, 32, false, ones.data(), ones.data(), out.data());
    } catch (const std::exception&) {  // torch's or oneDNN's own: limited by ONEDNN_MAX_CPU_ISA, or oneDNN is switched off
      return false;
    }
    blas::brgemm_release(true);
    return out[0] == 32;
  }();
  return result;
}
std::string description() {
  return at::get_cpu_capability() + (multiplies_bfloat16() ? ", bfloat16 products" : ", bfloat16 products in float32");
}

const Format& format_of(const Tensor& q) {
  switch (q.scalar_type()) {
    case at::kFloat: return kernels().float32;
    case at::kDouble: return kernels().float64;
    case at::kBFloat16: return multiplies_bfloat16() ? kernels().bfloat16 : kernels().bfloat16_widened;
    default: TORCH_CHECK(false, "no native operator for ", q.scalar_type());
  }
}

// `kept` makes it the backward pass of dropout with ReLU, see Dropout
Tensor dropout(const Tensor& x, const OptionalTensor& seed, double p, bool relu, const OptionalTensor& kept) {
  const Tensor input = x.contiguous();
  const Tensor other = kept ? kept->contiguous() : Tensor();
  TORCH_CHECK(p > 0 && p < 1 && (kept || (seed && seed->scalar_type() == at::kLong)), "dropout needs a seed, and p inside 0 and 1");
  TORCH_CHECK(!kept || (other.sizes() == x.sizes() && other.scalar_type() == x.scalar_type()), "wrong result of dropout");
  Tensor result = at::empty(x.sizes(), x.options());
  const Dropout z{input.const_data_ptr(), kept ? other.const_data_ptr() : nullptr, result.data_ptr(), x.numel(), p,
                  kept ? 0 : static_cast<uint64_t>(seed->item<int64_t>()), relu};
  const Format& format = format_of(x);
  at::parallel_for(0, (z.count + z.kUnit - 1) / z.kUnit, 2, [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++) format.drop(z, task);
  });
  return result;
}

View view(const Tensor& x) {
  const auto s = x.strides();
  void* data = const_cast<void*>(x.const_data_ptr());
  if (x.dim() == 4) return {data, s[0], s[1], s[2], s[3]};
  return x.dim() == 3 ? View{data, 0, s[0], s[1], s[2]} : View{data, 0, 0, s[0], s[1]};
}

// `inputs` are the tensors of AttentionInputs, in that order
Attention checked(at::TensorList inputs, const OptionalTensor& valid, const OptionalTensor& first_key,
                  const OptionalTensor& seed, double dropout, int64_t clamped) {
  TORCH_CHECK(inputs.size() == 6, "attention has six inputs");
  const Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2], &r = inputs[3];
  Attention z{};
  z.B = q.size(0), z.T = q.size(1), z.N = q.size(2), z.H = q.size(3), z.S = k.size(1), z.P = r.size(0);
  for (const Tensor& x : inputs)
    TORCH_CHECK(x.scalar_type() == q.scalar_type() && x.size(-1) == z.H && x.size(-2) == z.N,
                "inputs of attention differ in dtype or heads");
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == z.B && z.S >= z.T, "wrong shapes of keys or values");
  TORCH_CHECK(z.P >= 1 && z.P + clamped <= z.S, "wrong number of distances");
  z.clamped = clamped, z.dropout = dropout;
  const auto numbers = [](const OptionalTensor& x, int64_t count) -> const int64_t* {
    if (!x) return nullptr;
    TORCH_CHECK(x->scalar_type() == at::kLong && x->is_contiguous() && x->numel() == count, "wrong mask of attention");
    return x->const_data_ptr<int64_t>();
  };
  z.valid = numbers(valid, z.B), z.first_key = numbers(first_key, z.B * z.T);
  if (dropout > 0) {
    TORCH_CHECK(seed && dropout < 1, "dropout needs a seed, and a rate below 1");
    z.seed = static_cast<uint64_t>(seed->item<int64_t>());
  }
  z.groups = std::min<int64_t>(z.B, (32 + z.N - 1) / z.N);  // enough tasks for many threads, few sums to add up
  z.q = view(q), z.k = view(k), z.v = view(v), z.r = view(r), z.u = view(inputs[4]), z.w = view(inputs[5]);
  return z;
}

void run(const Attention& z, const Tensor& q, void (*task)(const Attention&, int64_t), int64_t count) {
  const bool has_tiles = q.scalar_type() == at::kBFloat16 && multiplies_bfloat16();
  at::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) task(z, i);
    if (has_tiles) blas::brgemm_release(true);
  });
}

std::tuple<Tensor, Tensor> attention(at::TensorList inputs, const OptionalTensor& valid,
                                     const OptionalTensor& first_key, const OptionalTensor& seed, double dropout,
                                     int64_t clamped) {
  Attention z = checked(inputs, valid, first_key, seed, dropout, clamped);
  const Tensor& q = inputs[0];
  const auto sums = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  Tensor out = at::empty(q.sizes(), q.options()), lse = at::empty({z.B, z.N, z.T}, sums);
  z.out = view(out), z.lse = lse.data_ptr();
  run(z, q, format_of(q).forward, z.N * z.groups);
  return {out, lse};
}

std::vector<Tensor> attention_backward(const Tensor& dout, const Tensor& lse, at::TensorList inputs,
                                       const OptionalTensor& valid, const OptionalTensor& first_key,
                                       const OptionalTensor& seed, double dropout, int64_t clamped) {
  Attention z = checked(inputs, valid, first_key, seed, dropout, clamped);
  const Tensor &q = inputs[0], &k = inputs[1];
  TORCH_CHECK(dout.sizes() == q.sizes() && dout.scalar_type() == q.scalar_type(), "wrong gradient of the output");
  Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), q.options()), dv = at::empty_like(dk);
  Tensor dr = at::empty({z.groups, z.N, z.P, z.H}, lse.options());
  Tensor du = at::empty({z.groups, z.N, z.H}, lse.options()), dw = at::empty_like(du);
  z.lse = lse.data_ptr(), z.dout = view(dout), z.dq = view(dq), z.dk = view(dk), z.dv = view(dv);
  z.dr = dr.data_ptr(), z.du = du.data_ptr(), z.dw = dw.data_ptr();
  run(z, q, format_of(q).backward, z.N * z.groups);
  const auto total = [&](const Tensor& x) { return x.sum(0).to(q.scalar_type()); };
  return {dq, dk, dv, total(dr).transpose(0, 1).contiguous(), total(du), total(dw)};
}

Tensor attention_decode(at::TensorList inputs, const OptionalTensor& valid, const OptionalTensor& first_key,
                        int64_t clamped) {
  Attention z = checked(inputs, valid, first_key, {}, 0, clamped);
  for (const Tensor& x : {inputs[1], inputs[3]})
    TORCH_CHECK(x.stride(-1) == 1 || x.stride(-3) == 1, "keys must be stored by rows or by columns");
  TORCH_CHECK(inputs[2].stride(-1) == 1, "values must be stored by rows");
  Tensor out = at::empty(inputs[0].sizes(), inputs[0].options());
  z.out = view(out);
  run(z, inputs[0], format_of(inputs[0]).decode, z.B * z.N);
  return out;
}

void compute(DecodedLayer& z, const Format& format) {
  for (int step = 0; step < z.kSteps; step++) {
    format.prepare(z, step);
    at::parallel_for(0, z.units(step), 4, [&](int64_t from, int64_t to) {
      for (int64_t unit = from; unit < to; unit++) format.multiply(z, step, unit);
    });
    if (step == 0) {
      format.split(z);
      at::parallel_for(0, z.attention.B * z.attention.N, 1, [&](int64_t from, int64_t to) {
        for (int64_t task = from; task < to; task++) format.decode(z.attention, task);
      });
    }
  }
  format.prepare(z, z.kSteps);
}

// All layers for a single new token; returns the result of each, (L, B, 1, D). Of each layer, `weights` are the matrices
// q, k, v, o, up, down; biases of up and down; weight and bias of both LayerNorms; with qk_norm the weights of q and k;
// and the scales (O, 1) of matrices of 8 bits. `biases` are u and w, `eps` those of the LayerNorms and of q and k. `keys` and `values` are storage (B, N, C, H),
// whose rows before `ends` are read, `num_keys` of them, and the last is written; of `positions` (N, H, X) the last
// `num_distances` are read.
Tensor decode_layers(const Tensor& x, at::TensorList weights, at::TensorList biases, at::ArrayRef<double> eps,
                     bool norm_first, at::TensorList keys, at::TensorList values, at::IntArrayRef ends, int64_t num_keys,
                     at::TensorList positions, int64_t num_distances, const OptionalTensor& valid, int64_t clamped) {
  const size_t L = keys.size(), per_layer = L ? weights.size() / L : 0;
  const bool has_scales = L && weights[0].scalar_type() == at::kChar;
  const size_t num_vectors = per_layer - (has_scales ? 12 : 6);
  TORCH_CHECK((num_vectors == 6 || num_vectors == 8) && weights.size() == L * per_layer && biases.size() == 2 * L &&
              eps.size() == 4 * L && values.size() == L && ends.size() == L && positions.size() == L && x.dim() == 3 &&
              x.size(1) == 1 && keys[0].dim() == 4, "wrong number of tensors of layers");
  const int64_t B = x.size(0), D = x.size(2), N = keys[0].size(1), H = keys[0].size(3), I = N * H, F = weights[4].size(0);
  const auto key_type = keys[0].scalar_type(), type = key_type == at::kBFloat16 ? at::kFloat : key_type;
  const auto matrix_type = has_scales ? at::kChar : key_type;
  const auto check = [](const Tensor& weight, at::IntArrayRef shape, at::ScalarType expected) {
    TORCH_CHECK(weight.sizes() == shape && weight.scalar_type() == expected && weight.is_contiguous(),
                "wrong weights of a layer");
    return weight.const_data_ptr();
  };
  TORCH_CHECK(x.scalar_type() == type, "wrong dtype of a layer's input");
  const Tensor states = at::empty({static_cast<int64_t>(L), B, 1, D}, x.options());
  const Tensor q = at::empty({B, 1, N, H}, keys[0].options()), attended = at::empty_like(q);
  const Tensor input = at::empty({B * std::max({D, I, F})}, x.options());
  const Tensor result = at::empty({B * std::max({D, 3 * I, F})}, x.options());
  std::vector<float> input_scale(B);
  const Format& format = format_of(q);
  Tensor previous = x;
  for (size_t layer = 0; layer < L; layer++) {
    const at::TensorList own = weights.slice(layer * per_layer, per_layer);
    const int64_t end = ends[layer];
    TORCH_CHECK(end <= keys[layer].size(2) && num_keys <= end && num_distances <= positions[layer].size(2),
                "wrong number of keys");
    const auto newest = [&](const Tensor& rows) { return rows.slice(2, end - num_keys, end).transpose(1, 2); };
    const Tensor k = newest(keys[layer]), v = newest(values[layer]);
    const Tensor r = positions[layer].slice(2, -num_distances).permute({2, 0, 1}).to(key_type);
    for (const Tensor& rows : {k, r})
      TORCH_CHECK(rows.stride(-1) == 1 || rows.stride(-3) == 1, "keys must be stored by rows or by columns");
    TORCH_CHECK(v.stride(-1) == 1, "values must be stored by rows");
    const std::vector<Tensor> inputs{q, k, v, r, biases[2 * layer].to(key_type), biases[2 * layer + 1].to(key_type)};
    DecodedLayer z{};
    z.attention = checked(inputs, valid, {}, {}, 0, clamped);
    z.attention.out = view(attended);
    z.D = D, z.F = F, z.norm_first = norm_first;
    const std::pair<int64_t, int64_t> shapes[6] = {{I, D}, {I, D}, {I, D}, {D, I}, {F, D}, {D, F}};
    for (int i = 0; i < 6; i++) {
      const auto [rows, columns] = shapes[i];
      z.matrix[i] = check(own[i], {rows, columns}, matrix_type);
      if (has_scales) z.scale[i] = static_cast<const float*>(check(own[6 + num_vectors + i], {rows, 1}, at::kFloat));
    }
    z.up_bias = check(own[6], {F}, type), z.down_bias = check(own[7], {D}, type);
    for (int i = 0; i < 2; i++) {
      z.weight[i] = check(own[8 + 2 * i], {D}, type), z.bias[i] = check(own[9 + 2 * i], {D}, type);
      if (num_vectors == 8) z.weight[2 + i] = check(own[12 + i], {H}, type);
    }
    std::copy_n(eps.begin() + 4 * layer, 4, z.eps);
    const Tensor out = states.select(0, static_cast<int64_t>(layer));
    out.copy_(previous);  // computed in place
    z.x = out.data_ptr(), z.input = input.data_ptr(), z.result = result.data_ptr();
    z.input_scale = input_scale.data();
    compute(z, format);
    previous = out;
  }
  return states;
}

}  // namespace
}  // namespace txl

TORCH_LIBRARY(transformer_xl_native, m) {
  m.def(
      "attention(Tensor[] inputs, Tensor? valid, Tensor? first_key, Tensor? seed, float dropout, int num_clamped) "
      "-> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor dout, Tensor lse, Tensor[] inputs, Tensor? valid, Tensor? first_key, Tensor? seed, "
      "float dropout, int num_clamped) -> Tensor[]");
  m.def("dropout(Tensor x, Tensor? seed, float p, bool relu, Tensor? kept) -> Tensor");
  m.def("attention_decode(Tensor[] inputs, Tensor? valid, Tensor? first_key, int num_clamped) -> Tensor");
  m.def(
      "decode_layers(Tensor x, Tensor[] weights, Tensor[] biases, float[] eps, bool norm_first, Tensor(a!)[] keys, "
      "Tensor(b!)[] values, int[] ends, int num_keys, Tensor[] positions, int num_distances, Tensor? valid, "
      "int num_clamped) -> Tensor");
  m.def("description() -> str", &txl::description);
}
TORCH_LIBRARY_IMPL(transformer_xl_native, CPU, m) {
  m.impl("attention", &txl::attention);
  m.impl("attention_backward", &txl::attention_backward);
  m.impl("dropout", &txl::dropout);
  m.impl("attention_decode", &txl::attention_decode);
  m.impl("decode_layers", &txl::decode_layers);
}
