// Selection on the device against the host's, which is tested against brute force: equal to the last integer.
#include "cuda/selection/device_selection.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "flash_dmattn/executor.h"
#include "rounds.h"
#include "selection/rank.h"
#include "selection/select_keys.h"

namespace flash_dmattn::internal {
namespace {

#define CUDA_OK(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

// Bytes on the device that start as a copy of the host's.
class DeviceBytes {
 public:
  DeviceBytes(const void* bytes, std::size_t count) : count_(count) {
    if (count > 0 && cudaMalloc(&data_, count) == cudaSuccess) update(bytes);
  }
  explicit DeviceBytes(std::size_t count) : count_(count) {
    if (count > 0) cudaMalloc(&data_, count);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void update(const void* bytes) { cudaMemcpy(data_, bytes, count_, cudaMemcpyHostToDevice); }
  void poison() const {
    constexpr int kGarbage = 0xa5;
    if (count_ > 0) cudaMemset(data_, kGarbage, count_);
  }
  void* get() const { return data_; }
  std::vector<std::int32_t> integers() const {
    std::vector<std::int32_t> values(count_ / sizeof(std::int32_t));
    cudaMemcpy(values.data(), data_, count_, cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_ = 0;
};

enum class Scores { kTies, kSpecial, kRandom, kRising, kFalling, kMixed };

struct Case {
  std::int64_t batch = 1, heads = 1, keys = 1, rows = 1, window = 1;
  bool causal = true;
  DType dtype = DType::kFloat32;
  Scores scores = Scores::kTies;
  bool masked = false, with_lengths = false, odd_strides = false;
  std::int64_t documents = 0;  // 0: not packed
  bool wild_bounds = false;    // of documents: anything, in any order
};

std::string describe(const Case& c) {
  return "batch " + std::to_string(c.batch) + " heads " + std::to_string(c.heads) + " keys " + std::to_string(c.keys) +
         " rows " + std::to_string(c.rows) + " window " + std::to_string(c.window) + " causal " +
         std::to_string(c.causal) + " dtype " + std::to_string(static_cast<int>(c.dtype)) + " scores " +
         std::to_string(static_cast<int>(c.scores)) + " masked " + std::to_string(c.masked) + " lengths " +
         std::to_string(c.with_lengths) + " strides " + std::to_string(c.odd_strides) + " documents " +
         std::to_string(c.documents) + " wild " + std::to_string(c.wild_bounds);
}

struct FloatBits {
  std::uint64_t sign, infinity;
  int mantissa;
};
FloatBits format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {Float16Format::kSign, Float16Format::kInfinity, 10};
    case DType::kBFloat16:
      return {BFloat16Format::kSign, BFloat16Format::kInfinity, 7};
    case DType::kFloat32:
      return {Float32Format::kSign, Float32Format::kInfinity, 23};
    default:
      return {Float64Format::kSign, Float64Format::kInfinity, 52};
  }
}

// The bits of one score. Positive floats are ordered as their bits are.
std::uint64_t score_bits(const Case& c, std::int64_t key, std::mt19937_64& rng) {
  const FloatBits format = format_of(c.dtype);
  const std::uint64_t special[] = {0,
                                   format.sign,                          // -0
                                   format.infinity,                      // inf
                                   format.infinity | format.sign,        // -inf
                                   format.infinity + 1,                  // NaN
                                   (format.sign << 1) - 1,               // NaN with the sign bit
                                   format.infinity - 1,                  // highest
                                   (format.infinity - 1) | format.sign,  // lowest
                                   1,                                    // denormal
                                   1 | format.sign};
  const std::uint64_t position = static_cast<std::uint64_t>(key) * format.infinity / static_cast<std::uint64_t>(c.keys);
  const std::uint64_t any = rng();
  switch (c.scores) {
    case Scores::kTies:
      return (any % 5 << format.mantissa) | (any >> 40 & 1 ? format.sign : 0);
    case Scores::kSpecial:
      return special[any % 10];
    case Scores::kRandom:
      return any & (format.sign | (format.sign - 1));
    case Scores::kRising:
      return position;
    case Scores::kFalling:
      return format.infinity - 1 - position;
    default:
      return any % 7 == 0 ? special[(any >> 8) % 10] : position + (any >> 32) % (format.infinity / 4);
  }
}

struct Inputs {
  std::vector<std::uint8_t> scores, mask;
  std::vector<std::int32_t> seqlens, row_bounds, key_bounds;
  SelectionProblem problem;  // without pointers
};

Inputs make_inputs(const Case& c, std::mt19937_64& rng) {
  Inputs in;
  SelectionProblem& p = in.problem;
  p = {.batch = c.batch, .heads = c.heads, .keys = c.keys, .rows = c.rows, .window = c.window, .causal = c.causal};
  p.dtype = c.dtype;
  const std::int64_t key_stride = c.odd_strides ? 3 : 1;
  p.score_strides[2] = key_stride;
  p.score_strides[1] = c.odd_strides ? key_stride * c.keys + 1 : c.keys;
  p.score_strides[0] = c.odd_strides && rng() % 2 == 0 ? 0 : p.score_strides[1] * c.heads;
  const std::size_t size = size_of(c.dtype);
  in.scores.resize(static_cast<std::size_t>(c.batch * c.heads * (key_stride * c.keys + 1)) * size);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(in.scores.size() / size); ++i) {
    const std::int64_t key = c.odd_strides ? i / key_stride % c.keys : i % c.keys;
    const std::uint64_t bits = score_bits(c, key, rng);
    std::memcpy(in.scores.data() + static_cast<std::size_t>(i) * size, &bits, size);
  }
  if (c.masked) {
    p.mask_strides[2] = c.odd_strides ? 2 : 1;
    p.mask_strides[1] = rng() % 2 == 0 ? 0 : p.mask_strides[2] * c.keys;
    p.mask_strides[0] = rng() % 2 == 0 ? 0 : p.mask_strides[2] * c.keys * c.heads;
    in.mask.resize(static_cast<std::size_t>(c.batch * c.heads * c.keys * p.mask_strides[2]));
    const std::uint64_t one_in = 1 + rng() % 6;
    for (std::uint8_t& visible : in.mask) visible = rng() % 7 < one_in;
  }
  if (c.with_lengths) {
    p.seqlens_stride = c.odd_strides ? 2 : 1;
    in.seqlens.resize(static_cast<std::size_t>(c.batch * p.seqlens_stride));
    for (std::int32_t& length : in.seqlens) {
      length = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(c.keys + 4)) - 2;
    }
  }
  if (c.documents > 0) {
    p.documents = c.documents;
    const bool shared = rng() % 2 == 0;
    const std::int64_t stride = c.odd_strides ? 2 : 1, own = (c.documents + 1) * stride;
    const auto make = [&](std::int64_t length, std::vector<std::int32_t>& bounds, DocumentBounds* view) {
      view->stride = stride, view->batch_stride = shared ? 0 : own;
      bounds.resize(static_cast<std::size_t>(own * (shared ? 1 : c.batch)));
      for (std::int32_t& bound : bounds) {
        bound = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(length + 9)) - 4;
      }
      if (c.wild_bounds) return;
      for (std::size_t first = 0; first < bounds.size(); first += static_cast<std::size_t>(own)) {
        const auto begin = bounds.begin() + static_cast<std::ptrdiff_t>(first);
        std::sort(begin, begin + own);
        if (rng() % 2 == 0) *begin = 0, *(begin + (own - stride)) = static_cast<std::int32_t>(length);
      }
    };
    make(c.rows, in.row_bounds, &p.row_bounds);
    make(c.keys, in.key_bounds, &p.key_bounds);
    // Often the same, as where queries and keys are those of the same tokens.
    if (c.rows == c.keys && rng() % 2 == 0) in.row_bounds = in.key_bounds;
  }
  return in;
}

struct Intervals {
  std::vector<std::int32_t> begin, end;
};

Intervals on_host(const Inputs& in) {
  SelectionProblem p = in.problem;
  const auto count = static_cast<std::size_t>(p.batch * p.heads * p.keys);
  Intervals result{std::vector<std::int32_t>(count, -7), std::vector<std::int32_t>(count, -7)};
  p.scores = in.scores.data();
  p.key_mask = in.mask.empty() ? nullptr : in.mask.data();
  p.seqlens = in.seqlens.empty() ? nullptr : in.seqlens.data();
  p.row_bounds.data = in.row_bounds.empty() ? nullptr : in.row_bounds.data();
  p.key_bounds.data = in.key_bounds.empty() ? nullptr : in.key_bounds.data();
  p.begin = result.begin.data();
  p.end = result.end.data();
  Executor& executor = default_executor();
  std::vector<std::uint64_t> workspace(selection_workspace(p, executor) / 8 + 8);
  void* aligned = workspace.data();
  std::size_t space = workspace.size() * 8;
  select_on_host(p, std::align(64, 1, aligned, space), executor);
  return result;
}

void expect_same(const Intervals& expected, const DeviceBytes& begin, const DeviceBytes& end, const std::string& what) {
  const std::vector<std::int32_t> device_begin = begin.integers(), device_end = end.integers();
  for (std::size_t i = 0; i < expected.begin.size(); ++i) {
    ASSERT_TRUE(device_begin[i] == expected.begin[i] && device_end[i] == expected.end[i])
        << what << ": key " << i << " has [" << device_begin[i] << ", " << device_end[i] << "), expected ["
        << expected.begin[i] << ", " << expected.end[i] << ")";
  }
}

// What outputs and workspace hold before: a pattern, or nothing that initcheck would take for a value.
enum class Garbage { kPoison, kUninitialised };

void check(const Case& c, std::mt19937_64& rng, Garbage garbage = Garbage::kPoison) {
  const Inputs in = make_inputs(c, rng);
  const DeviceBytes scores(in.scores.data(), in.scores.size()), mask(in.mask.data(), in.mask.size()),
      seqlens(in.seqlens.data(), in.seqlens.size() * 4), row_bounds(in.row_bounds.data(), in.row_bounds.size() * 4),
      key_bounds(in.key_bounds.data(), in.key_bounds.size() * 4);
  SelectionProblem p = in.problem;
  p.row_bounds.data = static_cast<const std::int32_t*>(row_bounds.get());
  p.key_bounds.data = static_cast<const std::int32_t*>(key_bounds.get());
  const auto bytes = static_cast<std::size_t>(p.batch * p.heads * p.keys) * 4;
  const DeviceBytes begin(bytes), end(bytes), workspace(cuda::selection_workspace(p));
  if (garbage == Garbage::kPoison) {
    for (const DeviceBytes* written : {&begin, &end, &workspace}) written->poison();
  }
  p.scores = scores.get();
  p.key_mask = static_cast<const std::uint8_t*>(mask.get());
  p.seqlens = static_cast<const std::int32_t*>(seqlens.get());
  p.begin = static_cast<std::int32_t*>(begin.get());
  p.end = static_cast<std::int32_t*>(end.get());
  CUDA_OK(cuda::select_keys(p, workspace.get(), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  expect_same(on_host(in), begin, end, describe(c));
}

Case random_case(std::mt19937_64& rng, std::int64_t most_keys) {
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  const auto any = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(high - low + 1));
  };
  Case c;
  c.batch = any(1, 3);
  c.heads = any(1, 3);
  c.keys = rng() % 4 == 0 ? 512 * any(1, 1 + most_keys / 1024) + any(0, 2) - 1 : any(1, most_keys);
  c.rows = rng() % 3 == 0 ? c.keys : any(0, 2 * c.keys);
  const std::int64_t windows[] = {any(1, 4), any(1, c.keys), any(1, 1 + c.keys / 8), any(0, c.keys + 2), 512, 1024};
  c.window = windows[rng() % 6];
  c.causal = rng() % 4 != 0;
  c.dtype = dtypes[rng() % 4];
  c.scores = static_cast<Scores>(rng() % 6);
  c.masked = rng() % 3 == 0;
  c.with_lengths = rng() % 3 == 0;
  c.odd_strides = rng() % 3 == 0;
  return c;
}

Case random_packed_case(std::mt19937_64& rng, std::int64_t most_keys) {
  Case c = random_case(rng, most_keys);
  c.with_lengths = false;
  const std::int64_t documents[] = {1, 2, 5, 1 + c.keys / 300, 1 + c.keys, 3000};
  c.documents = documents[rng() % 6];
  c.wild_bounds = rng() % 4 == 0;
  return c;
}

// Few cases that together run every kernel and every way through it: for the sanitizers.
TEST(SelectionCuda, EveryPathOnce) {
  std::mt19937_64 rng(8);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const std::int64_t keys : {700, 15000, 30000, 70000}) {
      for (const std::int64_t window : {300, 2500}) {
        check({.keys = keys,
               .rows = keys,
               .window = window,
               .dtype = dtype,
               .scores = Scores::kMixed,
               .masked = true,
               .with_lengths = keys == 700},
              rng, Garbage::kUninitialised);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(SelectionCuda, SmallCases) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < rounds(1200) && !HasFatalFailure(); ++round) check(random_case(rng, 60), rng);
}

TEST(SelectionCuda, SomeChunks) {
  std::mt19937_64 rng(2);
  for (int round = 0; round < rounds(400) && !HasFatalFailure(); ++round) check(random_case(rng, 9000), rng);
}

TEST(SelectionCuda, PackedDocuments) {
  std::mt19937_64 rng(9);
  for (int round = 0; round < rounds(600) && !HasFatalFailure(); ++round) check(random_packed_case(rng, 60), rng);
  for (int round = 0; round < rounds(200) && !HasFatalFailure(); ++round) check(random_packed_case(rng, 9000), rng);
}

// More chunks than one block merges: lists of lists, windows below and above a chunk.
TEST(SelectionCuda, ManyChunks) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < rounds(60) && !HasFatalFailure(); ++round) {
    Case c = random_case(rng, 120000);
    c.keys += 15000;
    c.batch = 1;
    c.heads = 1 + round % 2;
    check(c, rng);
  }
}

TEST(SelectionCuda, AllDTypesPatternsAndWindows) {
  std::mt19937_64 rng(4);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (int pattern = 0; pattern < 6; ++pattern) {
      for (const std::int64_t window : {0, 1, 2, 511, 513, 1024, 2048, 3000, 4999, 5000, 9000}) {
        check({.batch = 2,
               .heads = 2,
               .keys = 5000,
               .rows = 4321,
               .window = window,
               .dtype = dtype,
               .scores = static_cast<Scores>(pattern),
               .with_lengths = window % 2 == 1},
              rng);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(SelectionCuda, MillionsOfKeys) {
  std::mt19937_64 rng(5);
  for (const std::int64_t window : {100, 2048, 70000}) {
    for (const Scores scores : {Scores::kRandom, Scores::kRising, Scores::kMixed}) {
      check({.heads = 1, .keys = 3000001, .rows = 3000001, .window = window, .scores = scores}, rng);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SelectionCuda, MoreHeadsThanAGridIsHigh) {
  std::mt19937_64 rng(6);
  check({.batch = 35, .heads = 2000, .keys = 5, .rows = 4, .window = 2, .masked = true, .with_lengths = true}, rng);
}

TEST(SelectionCuda, NothingToSelectFrom) {
  SelectionProblem p{.batch = 2, .heads = 0, .keys = 3, .rows = 4, .window = 2};
  EXPECT_EQ(cuda::select_keys(p, nullptr, nullptr), cudaSuccess);
  p.heads = 2, p.keys = 0;
  EXPECT_EQ(cuda::selection_workspace(p), 0U);
  EXPECT_EQ(cuda::select_keys(p, nullptr, nullptr), cudaSuccess);
}

// Lengths and scores are read when the graph runs, not when it is captured.
TEST(SelectionCuda, CapturedOnceAndReplayedOnOtherInputs) {
  std::mt19937_64 rng(7);
  const Case c{.batch = 2, .heads = 2, .keys = 40000, .rows = 40000, .window = 700, .with_lengths = true};
  Inputs in = make_inputs(c, rng);
  DeviceBytes scores(in.scores.data(), in.scores.size()), seqlens(in.seqlens.data(), in.seqlens.size() * 4);
  const auto bytes = static_cast<std::size_t>(c.batch * c.heads * c.keys) * 4;
  const DeviceBytes begin(bytes), end(bytes), workspace(cuda::selection_workspace(in.problem));
  for (const DeviceBytes* written : {&begin, &end, &workspace}) written->poison();
  SelectionProblem p = in.problem;
  p.scores = scores.get();
  p.seqlens = static_cast<const std::int32_t*>(seqlens.get());
  p.begin = static_cast<std::int32_t*>(begin.get());
  p.end = static_cast<std::int32_t*>(end.get());
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  CUDA_OK(cudaStreamCreate(&stream));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CUDA_OK(cuda::select_keys(p, workspace.get(), stream));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (int round = 0; round < 3; ++round) {
    in = make_inputs(c, rng);
    in.problem.score_strides[0] = p.score_strides[0];
    scores.update(in.scores.data());
    seqlens.update(in.seqlens.data());
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    expect_same(on_host(in), begin, end, "replay " + std::to_string(round));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace flash_dmattn::internal
