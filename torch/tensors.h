// What the operators do with torch's tensors, through its stable ABI: views, dtypes, devices, scratch memory, errors.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn::operators {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Arrives in Python as a ValueError, what is no argument's fault as a RuntimeError.
inline void check(const Status& status) {
  if (status.is_failure()) throw std::runtime_error(status.message());
  if (!status.ok()) throw std::invalid_argument(status.message());
}

// Work runs on torch's own threads, so that no second pool competes with them.
class TorchExecutor final : public Executor {
 public:
  int concurrency() const override { return concurrency_; }

  void run(int workers, const std::function<void(int worker)>& task) override {
    if (workers == 1) return task(0);
    torch::stable::parallel_for(0, workers, 1, [&task](std::int64_t begin, std::int64_t end) {
      for (std::int64_t worker = begin; worker < end; ++worker) task(static_cast<int>(worker));
    });
  }

 private:
  // Read once: the workspace is sized for it.
  const int concurrency_ = std::max(1, static_cast<int>(torch::stable::get_num_threads()));
};

struct TorchDType {
  std::int32_t code;  // of torch's C interface
  const char* name;
  std::optional<DType> dtype;  // none: attention takes no such tensor
};

// Not through ScalarType, whose conversion throws an unrelated error for the dtypes that it does not know.
inline TorchDType dtype_of(const Tensor& tensor) {
  static const TorchDType kKnown[] = {
      {aoti_torch_dtype_float32(), "float32", DType::kFloat32},
      {aoti_torch_dtype_bfloat16(), "bfloat16", DType::kBFloat16},
      {aoti_torch_dtype_float16(), "float16", DType::kFloat16},
      {aoti_torch_dtype_float64(), "float64", DType::kFloat64},
      {aoti_torch_dtype_bool(), "bool", DType::kBool},
      {aoti_torch_dtype_int32(), "int32", DType::kInt32},
      {aoti_torch_dtype_int64(), "int64", {}},
      {aoti_torch_dtype_int16(), "int16", {}},
      {aoti_torch_dtype_int8(), "int8", {}},
      {aoti_torch_dtype_uint8(), "uint8", {}},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn", {}},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2", {}},
      {aoti_torch_dtype_complex64(), "complex64", {}},
      {aoti_torch_dtype_complex128(), "complex128", {}},
  };
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  for (const TorchDType& known : kKnown) {
    if (known.code == code) return known;
  }
  return {code, "another dtype", {}};
}

// `dtype_rule` is what to say of a dtype that no view can have; the rest is checked by the library.
inline TensorView view_of(const char* name, const Tensor& tensor, const char* dtype_rule) {
  if (!tensor.defined()) check(Status::invalid(name, "must be a tensor", "none"));  // None passes for a Tensor
  const TorchDType dtype = dtype_of(tensor);
  if (!dtype.dtype) check(Status::invalid(name, dtype_rule, std::string(name) + " " + dtype.name));
  const std::int64_t rank = tensor.dim();
  // Rank 0 would read as "no tensor" and a rank above the largest has no place for its sizes.
  if (rank < 1 || rank > TensorView::kMaxRank) {
    check(Status::invalid(name, "must have 1 to 4 dimensions",
                          std::string(name) + " with " + std::to_string(rank) + " dimensions"));
  }
  TensorView view;
  view.data = tensor.data_ptr();
  view.dtype = *dtype.dtype;
  view.rank = static_cast<int>(rank);
  std::copy_n(tensor.sizes().data(), rank, view.shape.begin());
  std::copy_n(tensor.strides().data(), rank, view.strides.begin());
  return view;
}

inline TensorView view_of(const char* name, const std::optional<Tensor>& tensor, const char* dtype_rule) {
  return tensor ? view_of(name, *tensor, dtype_rule) : TensorView{};
}

inline std::string name_of(const torch::stable::Device& device) {
  if (device.type() != torch::headeronly::DeviceType::CUDA) return "cpu";
  return "cuda:" + std::to_string(device.index());
}

// Runs `allocate`, which makes a contiguous tensor of these sizes. Torch's stable interface tells of an error only that
// there was one; here it can be no other than that there is no memory.
template <typename Allocate>
Tensor allocated(torch::headeronly::IntHeaderOnlyArrayRef sizes, std::size_t element_size,
                 const torch::stable::Device& device, Allocate allocate) {
  try {
    return allocate();
  } catch (const std::runtime_error&) {
    auto bytes = static_cast<std::int64_t>(element_size);
    bool counted = true;
    for (const std::int64_t size : sizes) counted = counted && !__builtin_mul_overflow(bytes, size, &bytes);
    const std::string count = counted ? std::to_string(bytes) : "2^63 or more";
    throw std::runtime_error(Status::failed("allocation", count + " bytes asked for on " + name_of(device)).message());
  }
}

constexpr std::size_t size_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:  // the operators make no others: uint8, bool
      return 1;
  }
}

inline Tensor make_empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype,
                         const torch::stable::Device& device) {
  return allocated(sizes, size_of(dtype), device,
                   [&] { return torch::stable::empty(sizes, dtype, std::nullopt, device); });
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return allocated(tensor.sizes(), tensor.element_size(), tensor.device(),
                   [&] { return torch::stable::contiguous(tensor); });
}

// The one copy that the library makes of an argument: attention reads D with stride 1.
inline bool has_unit_head_dim(const Tensor& tensor) {
  const std::int64_t last = tensor.defined() ? tensor.dim() - 1 : -1;
  return last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1;
}
inline Tensor with_unit_head_dim(const Tensor& tensor) {
  return has_unit_head_dim(tensor) ? tensor : as_contiguous(tensor);
}

// An argument, which may be left out. It refers to the tensor.
struct NamedTensor {
  NamedTensor(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const std::optional<Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}

  const char* name;
  const Tensor* tensor;
};

// Where a call's tensors are, made the current device for as long as this lives; work goes to its current stream.
class CallDevice {
 public:
  // All others that are given must be where `first` is.
  CallDevice(const NamedTensor& first, std::initializer_list<NamedTensor> others,
             std::span<const NamedTensor> more_others = {})
      : device_(first.tensor->defined() ? first.tensor->device()
                                        : torch::stable::Device(torch::headeronly::DeviceType::CPU)) {
    for (const NamedTensor& other : others) check_is_here(other, first.name);
    for (const NamedTensor& other : more_others) check_is_here(other, first.name);
    if (!is_cuda()) return;
    guard_.emplace(device_.index());
    static const CurrentStream current_stream = find_current_stream();
    if (current_stream == nullptr) check(Status::failed("torch", "it has no CUDA streams"));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(current_stream(device_.index(), &stream));
    native_ = Device::cuda(stream);
  }

  bool is_cuda() const { return device_.type() == torch::headeronly::DeviceType::CUDA; }
  const Device& native() const { return native_; }

  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype) const {
    return make_empty(sizes, dtype, device_);
  }
  Tensor empty_like_shape(const Tensor& tensor) const { return empty(tensor.sizes(), tensor.scalar_type()); }

 private:
  using CurrentStream = AOTITorchError (*)(std::int32_t, void**);

  void check_is_here(const NamedTensor& other, const char* first) const {
    if (other.tensor == nullptr || !other.tensor->defined() || other.tensor->device() == device_) return;
    check(Status::invalid(
        other.name, std::string("must be on the device of ") + first,
        std::string(other.name) + " on " + name_of(other.tensor->device()) + ", " + first + " on " + name_of(device_)));
  }

  // Of the library that only CUDA builds of torch have, and have loaded by now.
  static CurrentStream find_current_stream() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    return reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }

  torch::stable::Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Device native_;
};

// Scratch memory from torch's allocator, kept until the call returns.
class Workspace {
 public:
  Workspace(const CallDevice& device, std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const std::int64_t size = static_cast<std::int64_t>(bytes);
    memory_ = device.empty({&size, 1}, ScalarType::Byte);
  }

  void* data() const { return memory_ ? memory_->data_ptr() : nullptr; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::optional<Tensor> memory_;
};

}  // namespace flash_dmattn::operators
