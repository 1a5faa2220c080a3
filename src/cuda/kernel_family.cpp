#include "cuda/kernel_family.h"

namespace flash_dmattn::internal::cuda {
namespace {

// `takes`: the member that says whether a family does.
template <typename Problem, typename Takes>
const KernelFamily* first_that(Takes takes, std::span<const KernelFamily* const> families, const Problem& problem,
                               const Gpu& gpu) {
  for (const KernelFamily* family : families) {
    if (family->*takes != nullptr && (family->*takes)(problem, gpu)) return family;
  }
  return nullptr;
}

}  // namespace

std::span<const KernelFamily* const> kernel_families() {
  static constexpr const KernelFamily* kFamilies[] = {&kDecodeFamily,
#ifdef FLASH_DMATTN_SM90
                                                      &kSm90Family,
#endif
                                                      &kSm80Family};
  return kFamilies;
}

const KernelFamily* choose_forward(std::span<const KernelFamily* const> families, const AttentionProblem& problem,
                                   const Gpu& gpu) {
  return first_that(&KernelFamily::takes_forward, families, problem, gpu);
}

const KernelFamily* choose_backward(std::span<const KernelFamily* const> families, const BackwardProblem& problem,
                                    const Gpu& gpu) {
  return first_that(&KernelFamily::takes_backward, families, problem, gpu);
}

const KernelFamily& forward_family(const AttentionProblem& problem, const Gpu& gpu) {
  return *choose_forward(kernel_families(), problem, gpu);
}

const KernelFamily& backward_family(const BackwardProblem& problem, const Gpu& gpu) {
  return *choose_backward(kernel_families(), problem, gpu);
}

}  // namespace flash_dmattn::internal::cuda
