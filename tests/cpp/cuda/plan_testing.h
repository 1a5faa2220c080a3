// Problems with any combination of what hides keys, on the host and on the device, for the tests of plans.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/plan/make_plan.h"
#include "cuda/plan/pack_mask.h"

namespace flash_dmattn::internal::cuda {

using Rng = std::mt19937;

inline int uniform(Rng& rng, int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

inline void expect_success(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// Device memory of exactly the bytes asked for, filled with garbage and followed by bytes that must stay. Under
// initcheck set FLASH_DMATTN_TEST_POISON=0: memory that was filled counts as initialised.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    const char* poison = std::getenv("FLASH_DMATTN_TEST_POISON");
    guard_ = poison == nullptr || std::string(poison) != "0" ? 64 : 0;
    expect_success(cudaMalloc(&data_, std::max<std::size_t>(bytes + guard_, 1)));
    if (guard_ != 0) expect_success(cudaMemset(data_, kGarbage, bytes + guard_));
  }
  // A copy of host memory, with nothing around it.
  template <typename T>
  explicit DeviceMemory(const std::vector<T>& values) : bytes_(values.size() * sizeof(T)) {
    expect_success(cudaMalloc(&data_, std::max<std::size_t>(bytes_, 1)));
    expect_success(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~DeviceMemory() {
    std::vector<std::uint8_t> guard(guard_);
    expect_success(cudaMemcpy(guard.data(), data_ + bytes_, guard_, cudaMemcpyDeviceToHost));
    for (const std::uint8_t byte : guard) EXPECT_EQ(byte, kGarbage) << "written behind the end";
    cudaFree(data_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* get() const { return data_; }

 private:
  static constexpr int kGarbage = 0xa5;
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_, guard_ = 0;
};

template <typename T>
std::vector<T> to_host(const T* device, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  expect_success(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

enum class Layout { kContiguous, kPaddedRows, kTransposed, kAnyOrder };

// A (batch, head, row, key) tensor on both sides.
template <typename T>
struct Tensor {
  BroadcastView view;  // of device memory
  std::vector<T> host;
  std::int64_t first = 0;  // element
  std::unique_ptr<DeviceMemory> device;

  bool defined() const { return view.defined(); }
  // `view` broadcasts.
  T& at(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t key) {
    return host[static_cast<std::size_t>(first + view.offset(b, h) + row * view.row_stride + key * view.key_stride)];
  }
  void upload() {
    device = std::make_unique<DeviceMemory>(host);
    view.data = static_cast<T*>(device->get()) + first;
  }
};

struct Sizes {
  std::int64_t batch = 1, heads = 1, key_heads = 1, rows = 1, keys = 1;
};

// `form`: which dimensions (batch, heads, rows, keys) are 1 (0), full (1), expanded to their full size (2); heads of
// form 3 are those of keys.
template <typename T>
Tensor<T> make_tensor(Rng& rng, const Sizes& sizes, std::array<int, 4> form, Layout layout) {
  const std::array<std::int64_t, 4> full = {sizes.batch, form[1] == 3 ? sizes.key_heads : sizes.heads, sizes.rows,
                                            sizes.keys};
  std::array<std::int64_t, 4> shape, strides = {};
  std::array<int, 4> order = {3, 2, 1, 0};  // from the densest dimension
  if (layout == Layout::kTransposed) std::swap(order[0], order[1]);
  if (layout == Layout::kAnyOrder) std::shuffle(order.begin(), order.end(), rng);
  Tensor<T> tensor;
  std::int64_t stride = layout == Layout::kAnyOrder ? uniform(rng, 1, 2) : 1;
  for (const int dim : order) {
    shape[dim] = form[dim] == 0 ? 1 : full[dim];
    if (form[dim] == 0 || form[dim] == 2) continue;
    strides[dim] = stride;
    stride *= shape[dim];
    if (layout == Layout::kAnyOrder || (layout == Layout::kTransposed && dim == 2)) stride += uniform(rng, 0, 3);
    if (layout == Layout::kPaddedRows && dim == 3) stride = (stride + 15) / 16 * 16 + (uniform(rng, 0, 1) ? 4 : 0);
  }
  tensor.first = layout == Layout::kContiguous ? 0 : layout == Layout::kPaddedRows ? 4 : uniform(rng, 0, 5);
  std::int64_t last = tensor.first;
  bool empty = false;
  for (int dim = 0; dim < 4; ++dim) {
    if (shape[dim] == 0) empty = true;
    last += strides[dim] * std::max<std::int64_t>(shape[dim] - 1, 0);
  }
  tensor.host.resize(static_cast<std::size_t>(empty ? 0 : last + 1));
  BroadcastView& view = tensor.view;
  view.batches = shape[0], view.heads = shape[1], view.rows = shape[2], view.keys = shape[3];
  view.batch_stride = strides[0], view.head_stride = strides[1];
  view.row_stride = strides[2], view.key_stride = strides[3];
  view.head_divisor = std::max<std::int64_t>(1, sizes.heads / std::max<std::int64_t>(1, view.heads));
  return tensor;
}

inline Tensor<std::uint8_t> make_mask(Rng& rng, const Sizes& sizes, std::array<int, 4> form, Layout layout,
                                      int percent) {
  auto mask = make_tensor<std::uint8_t>(rng, sizes, form, layout);
  mask.view.dtype = DType::kBool;
  // Any nonzero byte counts as true.
  constexpr std::uint8_t kTrue[4] = {1, 0x80, 0xff, 2};
  for (auto& value : mask.host) value = uniform(rng, 0, 99) < percent ? kTrue[rng() % 4] : 0;
  mask.upload();
  return mask;
}

struct Problem {
  Sizes sizes;
  bool causal = false;
  std::vector<std::int32_t> seqlens;
  Tensor<std::int32_t> begin, end;
  Tensor<std::uint8_t> key_mask, mask;
  std::int64_t list_limit = 0;
  ListOrder order = ListOrder::kFirstUnit;
  int part_units = kChunkUnits;

  std::unique_ptr<DeviceMemory> device_seqlens, packed_memory;
  Visibility visibility;

  std::int64_t existing(std::int64_t b) const {
    if (seqlens.empty()) return sizes.keys;
    return std::clamp<std::int64_t>(seqlens[static_cast<std::size_t>(b)], 0, sizes.keys);
  }
  // Everything but the mask that differs by row.
  bool rules_show(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t key) {
    if (key >= existing(b) || (causal && key > row + existing(b) - sizes.rows)) return false;
    if (begin.defined() && (row < begin.at(b, h, 0, key) || row >= end.at(b, h, 0, key))) return false;
    return !key_mask.defined() || key_mask.at(b, h, 0, key) != 0;
  }
  bool mask_shows(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t key) {
    return !mask.defined() || mask.at(b, h, row, key) != 0;
  }

  void upload() {
    visibility.rows = static_cast<std::int32_t>(sizes.rows);
    visibility.keys = static_cast<std::int32_t>(sizes.keys);
    visibility.is_causal = causal;
    if (!seqlens.empty()) {
      device_seqlens = std::make_unique<DeviceMemory>(seqlens);
      visibility.seqlens = static_cast<const std::int32_t*>(device_seqlens->get());
      visibility.seqlens_stride = 1;
    }
    visibility.begin = begin.view;
    visibility.end = end.view;
    visibility.key_mask = key_mask.view;
    if (mask.defined()) {
      packed_memory = std::make_unique<DeviceMemory>(packed_mask_bytes(mask.view, sizes.rows, sizes.keys));
      expect_success(pack_mask(mask.view, sizes.rows, sizes.keys, packed_memory->get(), &visibility.packed, nullptr));
    }
  }
};

enum class Intervals { kNone, kRandom, kWindow, kDocuments, kTop, kCount };

// Intervals that keep the `width` highest of random scores.
inline void keep_top(Rng& rng, Problem& problem, std::int64_t b, std::int64_t h, int width) {
  const std::int64_t n = problem.existing(b), shift = n - problem.sizes.rows;
  using Entry = std::pair<unsigned, std::int64_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> live;
  for (std::int64_t key = 0; key < problem.sizes.keys; ++key) {
    const auto born = static_cast<std::int32_t>(std::max<std::int64_t>(0, key - shift));
    problem.begin.at(b, h, 0, key) = born;
    problem.end.at(b, h, 0, key) = static_cast<std::int32_t>(problem.sizes.rows);
    live.emplace(rng(), key);
    if (static_cast<int>(live.size()) > width) {
      problem.end.at(b, h, 0, live.top().second) = born;
      live.pop();
    }
  }
}

inline void make_intervals(Rng& rng, Problem& problem, Intervals kind, std::array<int, 4> form, Layout layout,
                           int width) {
  const Sizes& sizes = problem.sizes;
  problem.begin = make_tensor<std::int32_t>(rng, sizes, form, layout);
  problem.end = make_tensor<std::int32_t>(rng, sizes, form, layout);
  problem.begin.view.data = problem.end.view.data = problem.begin.host.data();  // defined, while they are filled
  const auto rows = static_cast<std::int32_t>(sizes.rows);
  for (std::int64_t b = 0; b < problem.begin.view.batches; ++b) {
    for (std::int64_t h = 0; h < problem.begin.view.heads; ++h) {
      const std::int64_t head = h * problem.begin.view.head_divisor;
      if (kind == Intervals::kTop) {
        keep_top(rng, problem, b, head, width);
        continue;
      }
      const std::int64_t shift = problem.existing(b) - sizes.rows;
      for (std::int64_t key = 0; key < sizes.keys; ++key) {
        std::int32_t from = uniform(rng, -50, rows + 50), to = uniform(rng, -50, rows + 50);
        if (kind == Intervals::kRandom && uniform(rng, 0, 2) != 0) to = from + uniform(rng, 0, width);  // short
        if (kind == Intervals::kRandom && uniform(rng, 0, 99) == 0) from = uniform(rng, 0, 1) ? INT_MIN : INT_MAX;
        if (kind == Intervals::kRandom && uniform(rng, 0, 99) == 0) to = uniform(rng, 0, 1) ? INT_MIN : INT_MAX;
        if (kind == Intervals::kWindow) from = static_cast<std::int32_t>(key - shift), to = from + width;
        if (kind == Intervals::kDocuments) from = static_cast<std::int32_t>(key) / width * width, to = from + width;
        problem.begin.at(b, head, 0, key) = from;
        problem.end.at(b, head, 0, key) = to;
      }
    }
  }
  problem.begin.upload();
  problem.end.upload();
}

inline int random_heads_form(Rng& rng) { return uniform(rng, 0, 3); }
inline Layout random_layout(Rng& rng) { return static_cast<Layout>(uniform(rng, 0, 3)); }

// Any combination of what hides keys, of sizes up to `rows` and `keys`.
inline Problem random_problem(Rng& rng, int rows, int keys) {
  Problem problem;
  Sizes& sizes = problem.sizes;
  sizes.batch = uniform(rng, 1, 2);
  sizes.key_heads = uniform(rng, 1, 2);
  sizes.heads = sizes.key_heads * uniform(rng, 1, 2);
  sizes.rows = uniform(rng, 1, rows);
  sizes.keys = uniform(rng, 1, keys);
  if (uniform(rng, 0, 2) == 0) sizes.keys = (sizes.keys + 15) / 16 * 16;
  if (uniform(rng, 0, 3) == 0) sizes.rows = sizes.keys;
  problem.causal = uniform(rng, 0, 1);
  if (uniform(rng, 0, 3) == 0) {
    for (int b = 0; b < sizes.batch; ++b) problem.seqlens.push_back(uniform(rng, -2, static_cast<int>(sizes.keys) + 2));
  }
  const auto kind = static_cast<Intervals>(uniform(rng, 0, static_cast<int>(Intervals::kCount) - 1));
  if (kind != Intervals::kNone) {
    // Selected keys depend on the lengths.
    const int per_batch = kind == Intervals::kTop && !problem.seqlens.empty() ? 1 : uniform(rng, 0, 2);
    make_intervals(rng, problem, kind, {per_batch, random_heads_form(rng), 0, 1}, random_layout(rng),
                   uniform(rng, 1, 300));
  }
  if (uniform(rng, 0, 3) == 0) {
    problem.key_mask = make_mask(rng, sizes, {uniform(rng, 0, 2), random_heads_form(rng), 0, 1}, random_layout(rng),
                                 uniform(rng, 0, 100));
  }
  if (uniform(rng, 0, 3) == 0) {
    problem.mask = make_mask(rng, sizes, {uniform(rng, 0, 2), random_heads_form(rng), 1, uniform(rng, 0, 2)},
                             random_layout(rng), uniform(rng, 0, 3) == 0 ? 100 : uniform(rng, 0, 1));
  }
  if (uniform(rng, 0, 2) == 0) problem.list_limit = uniform(rng, 1, 1500);
  if (uniform(rng, 0, 1) == 0) {
    problem.order = ListOrder::kUnits;
    problem.part_units = 2 << uniform(rng, 0, 3);
  }
  return problem;
}

}  // namespace flash_dmattn::internal::cuda
