#include "cuda/kernel_family.h"

namespace flash_dmattn::internal::cuda {

std::span<const KernelFamily* const> kernel_families() {
  static constexpr const KernelFamily* kFamilies[] = {&kDecodeFamily,
#ifdef FLASH_DMATTN_SM90
                                                      &kSm90Family,
#endif
                                                      &kSm80Family};
  return kFamilies;
}

const KernelFamily* choose_family(std::span<const KernelFamily* const> families, const AttentionProblem& problem,
                                  const Gpu& gpu, Pass pass) {
  for (const KernelFamily* family : families) {
    if (family->takes(problem, gpu, pass)) return family;
  }
  return nullptr;
}

const KernelFamily& family_of(const AttentionProblem& problem, const Gpu& gpu, Pass pass) {
  return *choose_family(kernel_families(), problem, gpu, pass);
}

}  // namespace flash_dmattn::internal::cuda
