// Times dynamic selection on the device: medians of a replayed graph and of plain launches. One line of JSON a shape.
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

// Microseconds; the median of `repeats` runs, each between two events of its own.
template <typename Run>
float median_us(cudaStream_t stream, int repeats, Run run) {
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
  return times[times.size() / 2];
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
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  const auto select = [&] { check(flash_dmattn::internal::cuda::select_keys(p, workspace, stream)); };
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  select();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  constexpr int kRepeats = 300;
  const float graph_us = median_us(stream, kRepeats, [&] { check(cudaGraphLaunch(replay, stream)); });
  const float plain_us = median_us(stream, kRepeats, select);
  // Back to back, so that the events' own time and the first launch's latency are shared out.
  constexpr int kChained = 20;
  const float chained_us = median_us(stream, kRepeats / kChained,
                                     [&] {
                                       for (int i = 0; i < kChained; ++i) check(cudaGraphLaunch(replay, stream));
                                     }) /
                           kChained;
  std::printf(
      "{\"shape\": \"%s\", \"keys\": %lld, \"heads\": %lld, \"window\": %lld, \"graph_us\": %.1f, "
      "\"launches_us\": %.1f, \"chained_graph_us\": %.1f, \"workspace_mb\": %.1f}\n",
      shape.name, static_cast<long long>(shape.keys), static_cast<long long>(shape.heads),
      static_cast<long long>(shape.window), graph_us, plain_us, chained_us, static_cast<double>(workspace_bytes) / 1e6);
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
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
