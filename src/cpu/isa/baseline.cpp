// What every supported CPU has: SSSE3 on x86-64, NEON on aarch64.
#include "cpu/kernels-inl.h"
#include "cpu/products_vector-inl.h"

namespace flash_dmattn::internal::cpu {

const KernelSet kBaselineKernels = {
    "baseline",
    make_kernels<Fp32Products, float>(),
    make_kernels<Fp32Products, Fp16>(),
    make_kernels<Fp32Products, Bf16>(),
};

}  // namespace flash_dmattn::internal::cpu
