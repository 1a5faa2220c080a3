#include "cpu/kernels-inl.h"
#include "cpu/products_amx-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr Kernels make_amx_kernels() {
  Kernels kernels = make_kernels<AmxProducts, Bf16>();
  kernels.enter = configure_tiles;
  kernels.leave = release_tiles;
  return kernels;
}

}  // namespace

const KernelSet kAmxKernels = {"amx", {}, {}, make_amx_kernels()};

}  // namespace flash_dmattn::internal::cpu
