// Dynamic masks on an NVIDIA GPU, without torch: every row of a sequence attends to the keys of highest score among
// those before it. Compares with the CPU backend on the same numbers.
#include <cuda_runtime_api.h>
#include <flash_dmattn/attention.h>
#include <flash_dmattn/selection.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

using flash_dmattn::DType;
using flash_dmattn::TensorView;

constexpr int kBatch = 1, kTokens = 2048, kHeads = 4, kKeyHeads = 2, kHeadDim = 64, kWindow = 256;

void check(const flash_dmattn::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Memory of the GPU, freed with the object.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) { check(cudaMalloc(&data_, bytes == 0 ? 1 : bytes)); }
  template <typename T>
  explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float to_float(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

struct Problem {
  std::vector<std::uint16_t> query, key, value;
  std::vector<float> scores;
};

Problem make_problem() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto tokens = [&](int heads) {
    std::vector<std::uint16_t> values(static_cast<std::size_t>(kBatch) * kTokens * heads * kHeadDim);
    for (std::uint16_t& value : values) value = to_bfloat16(normal(generator));
    return values;
  };
  Problem problem = {tokens(kHeads), tokens(kKeyHeads), tokens(kKeyHeads), {}};
  problem.scores.resize(static_cast<std::size_t>(kBatch) * kKeyHeads * kTokens);
  for (float& score : problem.scores) score = normal(generator);
  return problem;
}

TensorView tokens_view(const void* data, int heads) {
  return contiguous_view(data, DType::kBFloat16, kBatch, kTokens, heads, kHeadDim);
}
TensorView per_key_view(const void* data, DType dtype) {
  return contiguous_view(data, dtype, kBatch, kKeyHeads, kTokens);
}

// Where a problem and its results are.
struct Pointers {
  const void *query, *key, *value, *scores;
  void *begin, *end, *out, *lse;
};

// Selects keys by score and attends to them, with the scores added as a bias. On a GPU everything is enqueued and done
// when the stream is.
void attend(const Pointers& at, const flash_dmattn::Device& device) {
  const flash_dmattn::KeyIntervals intervals = {per_key_view(at.begin, DType::kInt32),
                                                per_key_view(at.end, DType::kInt32), kWindow};
  flash_dmattn::SelectionInputs selection;
  selection.scores = per_key_view(at.scores, DType::kFloat32);
  flash_dmattn::SelectionOptions selection_options;
  selection_options.window_size = kWindow;
  selection_options.seqlen_q = kTokens;
  flash_dmattn::SelectionContext selection_context;
  selection_context.device = device;

  flash_dmattn::AttentionInputs inputs;
  inputs.query = tokens_view(at.query, kHeads);
  inputs.key = tokens_view(at.key, kKeyHeads);
  inputs.value = tokens_view(at.value, kKeyHeads);
  inputs.bias = per_key_view(at.scores, DType::kFloat32);
  inputs.visibility.intervals = intervals;
  flash_dmattn::AttentionOptions options;
  inputs.visibility.is_causal = true;
  flash_dmattn::AttentionContext context;
  context.device = device;
  flash_dmattn::AttentionOutputs outputs;
  outputs.out = tokens_view(at.out, kHeads);
  outputs.lse = contiguous_view(at.lse, DType::kFloat32, kBatch, kHeads, kTokens);
  if (!device.is_cuda()) {
    check(select_keys(selection, selection_options, intervals));
    check(attention_forward(inputs, options, outputs));
    return;
  }
  // One workspace serves both, since the stream runs them one after the other.
  std::size_t selection_bytes = 0, attention_bytes = 0;
  check(select_keys_workspace(selection, selection_options, selection_context, &selection_bytes));
  check(attention_forward_workspace(inputs, options, context, &attention_bytes));
  const std::size_t bytes = selection_bytes > attention_bytes ? selection_bytes : attention_bytes;
  const DeviceMemory workspace(bytes);
  check(select_keys(selection, selection_options, intervals, workspace.get(), bytes, selection_context));
  check(attention_forward(inputs, options, outputs, workspace.get(), bytes, context));
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(device.stream)));
}

}  // namespace

int main() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("no NVIDIA GPU here\n");
    return 0;
  }
  const Problem problem = make_problem();
  const std::size_t keys = problem.scores.size(), rows = static_cast<std::size_t>(kBatch) * kHeads * kTokens;

  std::vector<std::int32_t> begin(keys), end(keys);
  std::vector<std::uint16_t> expected(problem.query.size());
  std::vector<float> expected_lse(rows);
  attend({problem.query.data(), problem.key.data(), problem.value.data(), problem.scores.data(), begin.data(),
          end.data(), expected.data(), expected_lse.data()},
         {});

  const DeviceMemory query(problem.query), key(problem.key), value(problem.value), scores(problem.scores);
  const DeviceMemory device_begin(keys * 4), device_end(keys * 4), device_out(expected.size() * 2),
      device_lse(rows * 4);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  attend({query.get(), key.get(), value.get(), scores.get(), device_begin.get(), device_end.get(), device_out.get(),
          device_lse.get()},
         flash_dmattn::Device::cuda(stream));
  check(cudaStreamDestroy(stream));

  std::vector<std::uint16_t> out(expected.size());
  check(cudaMemcpy(out.data(), device_out.get(), out.size() * 2, cudaMemcpyDeviceToHost));
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double truth = to_float(expected[i]), difference = to_float(out[i]) - truth;
    error += difference * difference;
    norm += truth * truth;
  }
  const double relative = std::sqrt(error / norm);
  std::printf("%d rows, each sees %d keys at most: relative difference between GPU and CPU %.1e\n", kTokens, kWindow,
              relative);
  return relative < 0.01 ? 0 : 1;
}
