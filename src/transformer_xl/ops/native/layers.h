// All layers for few new tokens, by threads that are started once; for operators.cpp and the program of the sanitizers.
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "kernels.h"

namespace txl {

inline void pause() {  // leaves the units of the core to the thread that shares it
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

constexpr int kPhases = 3 + 2 * DecodedLayer::kSteps;  // of a layer

// How far the threads have got with the tasks of a phase.
struct alignas(64) Phase {
  std::atomic<int64_t> taken{0}, done{0};
};

// One of the threads that compute layers together. Each takes the next tasks of a phase, and none begins a phase before
// the last one is done; so threads are woken once for all layers, and none is waited for but for a task that it has taken.
// `enough` multiplications are taken at once.
inline void take_part(const std::vector<DecodedLayer>& layers, const Format& format, Phase* phase,
                      int64_t enough = int64_t{1} << 16) {
  const auto share = [&](int64_t count, int64_t multiplications, const auto& task) {
    const int64_t chunk = std::max<int64_t>({1, enough / multiplications, count / 32});
    for (int64_t first; (first = phase->taken.fetch_add(chunk, std::memory_order_relaxed)) < count;) {
      const int64_t end = std::min(first + chunk, count);
      for (int64_t i = first; i < end; i++) task(i);
      phase->done.fetch_add(end - first, std::memory_order_release);
    }
    for (int tries = 0; phase->done.load(std::memory_order_acquire) < count; tries++)
      tries < 1000 ? pause() : std::this_thread::yield();  // for a thread that a busy computer has stopped
    phase++;
  };
  for (const DecodedLayer& z : layers) {
    const Attention& a = z.attention;
    const int64_t rows = z.rows(), blocks = (rows + z.kPadding - 1) / z.kPadding;
    const auto prepare = [&](int step) {
      share(blocks, 8 * z.kPadding * z.D, [&](int64_t block) { format.prepare(z, step, block); });
    };
    for (int step = 0; step < z.kSteps; step++) {
      prepare(step);
      share(z.units(step), z.kUnit * z.inputs(step) * rows, [&](int64_t unit) { format.multiply(z, step, unit); });
      if (step) continue;
      share(rows, 8 * z.inner(), [&](int64_t row) { format.split(z, row); });
      share(a.B * a.N, 16 * a.T * a.S * a.H, [&](int64_t task) { format.decode(a, task); });  // keys are read from RAM
    }
    prepare(z.kSteps);
  }
}

}  // namespace txl
