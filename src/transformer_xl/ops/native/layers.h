// All layers for few new tokens, by threads that are started once; for operators.cpp and the program of the sanitizers.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.h"

namespace txl {

constexpr int kPhases = 3 + 2 * DecodedLayer::kSteps;  // of a layer

// How far the threads have got with the tasks of a phase.
struct Phase {
  alignas(64) std::atomic<int64_t> taken{0};
  alignas(64) std::atomic<int64_t> done{0};
};

// Layers that threads compute together: each calls `take_part`, and after all have returned, one calls `finish`. A thread
// takes the next tasks of a phase, and none begins a phase before the last one is done; so threads are woken once for all
// layers, and nobody waits in a phase for one that has not come yet. `enough` multiplications are taken at once.
class Together {
 public:
  Together(const std::vector<DecodedLayer>& layers, const Format& format, int64_t num_threads,
           int64_t enough = int64_t{1} << 16)
      : layers_(layers), format_(format), parts_(16 * num_threads), enough_(enough),
        phases_(new Phase[kPhases * layers.size()]) {}

  void take_part() {
    Phase* phase = phases_.get();
    for (const DecodedLayer& z : layers_) {
      const Attention& a = z.attention;
      const int64_t rows = z.rows(), blocks = (rows + z.kPadding - 1) / z.kPadding;
      const auto share = [&](int64_t count, int64_t multiplications, const auto& task) {
        share_tasks(*phase++, count, multiplications, task);
      };
      const auto prepare = [&](int step) {
        share(blocks, 8 * z.kPadding * z.D, [&](int64_t block) { format_.prepare(z, step, block); });
      };
      for (int step = 0; step < z.kSteps; step++) {
        prepare(step);
        share(z.units(step), z.kUnit * z.inputs(step) * rows, [&](int64_t unit) { format_.multiply(z, step, unit); });
        if (step) continue;
        share(rows, 8 * z.inner(), [&](int64_t row) { format_.split(z, row); });
        share(a.B * a.N, 16 * a.T * a.S * a.H, [&](int64_t task) { format_.decode(a, task); });  // keys come from RAM
      }
      prepare(z.kSteps);
    }
  }

  // Throws what the first task threw that did.
  void finish() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  template <class Task>
  void share_tasks(Phase& phase, int64_t count, int64_t multiplications, const Task& task) {
    const int64_t chunk = std::max<int64_t>({1, enough_ / std::max<int64_t>(1, multiplications), count / parts_});
    for (int64_t first; (first = phase.taken.fetch_add(chunk, std::memory_order_relaxed)) < count;) {
      const int64_t end = std::min(first + chunk, count);
      try {
        for (int64_t i = first; i < end; i++) task(i);
      } catch (...) {  // others wait until the tasks are done
        if (!has_failed_.test_and_set()) error_ = std::current_exception();
      }
      phase.done.fetch_add(end - first, std::memory_order_release);
    }
    for (int64_t tries = 0; phase.done.load(std::memory_order_acquire) < count; tries++) {
      if (tries < 1000)
        pause();
      else if (tries < 2000)  // a busy computer has stopped the thread that is waited for
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  static void pause() {  // leaves the units of the core to the thread that shares it
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }

  const std::vector<DecodedLayer>& layers_;
  const Format& format_;
  const int64_t parts_, enough_;
  const std::unique_ptr<Phase[]> phases_;
  std::atomic_flag has_failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
};

}  // namespace txl
