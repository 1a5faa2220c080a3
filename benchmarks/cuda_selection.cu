// Times dynamic selection on the device: a replayed graph, plain launches, graphs one behind another. One line of JSON
// a shape, with lower quartiles, medians and upper quartiles; gpu_selection.py makes a report of them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cuda/selection/device_selection.h"

namespace {

using flash_dmattn::DType;
using flash_dmattn::internal::SelectionProblem;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

enum class Order { kRandom, kRising };

struct Shape {
  const char* name;
  std::int64_t keys, heads, window;
  DType dtype;
  Order order = Order::kRandom;
};

struct Quartiles {
  float low, median, high;
};

// Microseconds of `repeats` runs, each between two events of its own.
template <typename Run>
Quartiles quartiles_us(cudaStream_t stream, int repeats, Run run) {
  constexpr int kWarmUps = 20;
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + repeats; ++i) {
    check(cudaEventRecord(start, stream));
    run();
    check(cudaEventRecord(stop, stream));
    check(cudaEventSynchronize(stop));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= kWarmUps) times.push_back(milliseconds * 1000);
  }
  std::sort(times.begin(), times.end());
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  return {times[times.size() / 4], times[times.size() / 2], times[times.size() * 3 / 4]};
}

void print(const char* name, const Quartiles& us, int calls, int samples) {
  std::printf(", \"%s\": {\"us\": [%.2f, %.2f, %.2f], \"samples\": %d}", name, us.low / calls, us.median / calls,
              us.high / calls, samples);
}

void measure(const Shape& shape) {
  std::mt19937_64 rng(1);
  const std::int64_t count = shape.keys * shape.heads;
  const std::size_t size = size_of(shape.dtype);
  std::vector<std::uint8_t> scores(static_cast<std::size_t>(count) * size);
  for (std::int64_t i = 0; i < count; ++i) {
    // Positive floats are ordered as their bits; the sign bit and the highest exponents stay 0.
    const std::uint64_t random = rng() >> 2;
    const std::uint64_t rising = static_cast<std::uint64_t>(i % shape.keys) << 38;
    const std::uint64_t bits = (shape.order == Order::kRising ? rising : random) >> (64 - 8 * size);
    std::copy_n(reinterpret_cast<const std::uint8_t*>(&bits), size, &scores[static_cast<std::size_t>(i) * size]);
  }
  SelectionProblem p{.batch = 1, .heads = shape.heads, .keys = shape.keys, .rows = shape.keys, .window = shape.window};
  p.dtype = shape.dtype;
  p.score_strides[1] = shape.keys;
  p.score_strides[2] = 1;
  void *device_scores, *workspace;
  const std::size_t workspace_bytes = flash_dmattn::internal::cuda::selection_workspace(p);
  check(cudaMalloc(&device_scores, scores.size()));
  check(cudaMalloc(&p.begin, static_cast<std::size_t>(count) * 4));
  check(cudaMalloc(&p.end, static_cast<std::size_t>(count) * 4));
  check(cudaMalloc(&workspace, workspace_bytes));
  check(cudaMemcpy(device_scores, scores.data(), scores.size(), cudaMemcpyHostToDevice));
  p.scores = device_scores;

  cudaStream_t stream;
  cudaGraph_t captured;
  cudaGraphExec_t replay;
  const auto select = [&] { check(flash_dmattn::internal::cuda::select_keys(p, workspace, stream)); };
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  select();
  check(cudaStreamEndCapture(stream, &captured));
  check(cudaGraphInstantiate(&replay, captured, 0));
  constexpr int kRepeats = 300;
  const Quartiles graph = quartiles_us(stream, kRepeats, [&] { check(cudaGraphLaunch(replay, stream)); });
  const Quartiles plain = quartiles_us(stream, kRepeats, select);
  // Back to back, so that the events' own time and the first launch's latency are shared out.
  constexpr int kChained = 20;
  const Quartiles chained = quartiles_us(stream, kRepeats / kChained, [&] {
    for (int i = 0; i < kChained; ++i) check(cudaGraphLaunch(replay, stream));
  });
  std::printf("{\"shape\": \"%s\", \"keys\": %lld, \"heads\": %lld, \"window\": %lld, \"workspace_mb\": %.1f",
              shape.name, static_cast<long long>(shape.keys), static_cast<long long>(shape.heads),
              static_cast<long long>(shape.window), static_cast<double>(workspace_bytes) / 1e6);
  print("replayed graph", graph, 1, kRepeats);
  print("launches", plain, 1, kRepeats);
  print("chained graphs", chained, kChained, kRepeats / kChained);
  std::printf("}\n");
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(captured));
  check(cudaStreamDestroy(stream));
  for (void* memory : {device_scores, static_cast<void*>(p.begin), static_cast<void*>(p.end), workspace}) {
    check(cudaFree(memory));
  }
}

}  // namespace

int main() {
  const Shape shapes[] = {
      {"16k x 8 bf16", 16384, 8, 2048, DType::kBFloat16},
      {"16k x 8 fp32", 16384, 8, 2048, DType::kFloat32},
      {"16k x 8 fp32 rising", 16384, 8, 2048, DType::kFloat32, Order::kRising},
      {"16k x 8 fp64", 16384, 8, 2048, DType::kFloat64},
      {"32k x 8 bf16", 32768, 8, 2048, DType::kBFloat16},
      {"32k x 8 fp32 rising", 32768, 8, 2048, DType::kFloat32, Order::kRising},
      {"16k x 1 bf16", 16384, 1, 1024, DType::kBFloat16},
      {"64 x 4096 bf16", 64, 4096, 16, DType::kBFloat16},
      {"1k x 1 bf16", 1024, 1, 256, DType::kBFloat16},
      {"128k x 8 bf16", 131072, 8, 2048, DType::kBFloat16},
      {"1M x 1 bf16", 1 << 20, 1, 2048, DType::kBFloat16},
      {"1M x 1 fp32", 1 << 20, 1, 2048, DType::kFloat32},
      {"1M x 1 fp32 rising", 1 << 20, 1, 2048, DType::kFloat32, Order::kRising},
      {"1M x 1 fp32 w 65536", 1 << 20, 1, 65536, DType::kFloat32},
      {"1M x 1 fp32 w 128", 1 << 20, 1, 128, DType::kFloat32},
      {"1M x 1 fp32 nothing evicted", 1 << 20, 1, 1 << 20, DType::kFloat32},
  };
  for (const Shape& shape : shapes) measure(shape);
  return 0;
}
