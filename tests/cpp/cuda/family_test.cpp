// The table of kernel families. No GPU is needed: families are chosen from shapes, strides and what is said of the GPU.
#include "cuda/kernel_family.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace flash_dmattn::internal::cuda {
namespace {

AttentionProblem problem_of(std::int64_t rows, std::int64_t keys) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 1, problem.rows = rows, problem.keys = keys;
  problem.heads = problem.key_heads = 2, problem.head_dim = 64;
  return problem;
}

std::string chosen(std::int64_t rows, std::int64_t keys, Pass pass) {
  return family_of(problem_of(rows, keys), Gpu(), pass).name;
}

TEST(KernelFamilies, FewRowsOverManyKeysAreDecoded) {
  EXPECT_EQ(chosen(1, 4096, Pass::kForward), "decode");
  EXPECT_EQ(chosen(1, 16, Pass::kForward), "sm80");
  EXPECT_EQ(chosen(512, 4096, Pass::kForward), "sm80");
  EXPECT_EQ(chosen(1, 4096, Pass::kBackward), "sm80");
}

TEST(KernelFamilies, TheLastTakesEveryProblem) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_TRUE(kernel_families().back()->takes(problem_of(3, 5), Gpu(), pass));
  }
}

// All that a family needs to be asked: this one logs and declines (docs/development.md, "A kernel family").
bool logs_and_declines(const AttentionProblem& problem, const Gpu& gpu, Pass) {
  std::fprintf(stderr, "dummy: %lld rows on sm_%d\n", static_cast<long long>(problem.rows), gpu.capability);
  return false;
}
constexpr KernelFamily kDummyFamily = {"dummy", logs_and_declines, nullptr, nullptr, nullptr, nullptr};

TEST(KernelFamilies, OneThatDeclinesIsAskedAndPassedOver) {
  const KernelFamily* families[] = {&kDummyFamily, &kSm80Family};
  testing::internal::CaptureStderr();
  EXPECT_EQ(choose_family(families, problem_of(512, 512), Gpu(), Pass::kForward), &kSm80Family);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "dummy: 512 rows on sm_80\n");
  const KernelFamily* only[] = {&kDummyFamily};
  EXPECT_EQ(choose_family(only, problem_of(512, 512), Gpu(), Pass::kForward), nullptr);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
