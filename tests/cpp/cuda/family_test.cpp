// The table of kernel families. No GPU is needed: families are chosen from shapes, strides and what is said of the GPU.
#include "cuda/kernel_family.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace flash_dmattn::internal::cuda {
namespace {

BackwardProblem problem_of(std::int64_t rows, std::int64_t keys) {
  BackwardProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 1, problem.rows = rows, problem.keys = keys;
  problem.heads = problem.key_heads = 2, problem.head_dim = 64;
  return problem;
}

std::string forward_name(std::int64_t rows, std::int64_t keys) {
  return forward_family(problem_of(rows, keys), Gpu()).name;
}

TEST(KernelFamilies, FewRowsOverManyKeysAreDecoded) {
  EXPECT_EQ(forward_name(1, 4096), "decode");
  EXPECT_EQ(forward_name(1, 16), "sm80");
  EXPECT_EQ(forward_name(512, 4096), "sm80");
  EXPECT_STREQ(backward_family(problem_of(1, 4096), Gpu()).name, "sm80");
}

TEST(KernelFamilies, TheLastTakesEveryProblem) {
  const KernelFamily& last = *kernel_families().back();
  EXPECT_TRUE(last.takes_forward(problem_of(3, 5), Gpu()));
  EXPECT_TRUE(last.takes_backward(problem_of(3, 5), Gpu()));
}

// All that a family needs to be asked: this one logs and declines (docs/development.md, "A kernel family").
bool logs_and_declines(const AttentionProblem& problem, const Gpu& gpu) {
  std::fprintf(stderr, "dummy: %lld rows on sm_%d\n", static_cast<long long>(problem.rows), gpu.capability);
  return false;
}
constexpr KernelFamily kDummyFamily = {"dummy", logs_and_declines, nullptr, nullptr, nullptr, nullptr, nullptr};

TEST(KernelFamilies, OneThatDeclinesIsAskedAndPassedOver) {
  const KernelFamily* families[] = {&kDummyFamily, &kSm80Family};
  testing::internal::CaptureStderr();
  EXPECT_EQ(choose_forward(families, problem_of(512, 512), Gpu()), &kSm80Family);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "dummy: 512 rows on sm_80\n");
  const KernelFamily* only[] = {&kDummyFamily};
  EXPECT_EQ(choose_forward(only, problem_of(512, 512), Gpu()), nullptr);
}

TEST(KernelFamilies, OneWithoutABackwardIsPassedOver) {
  const KernelFamily* families[] = {&kDummyFamily, &kSm80Family};
  EXPECT_EQ(choose_backward(families, problem_of(512, 512), Gpu()), &kSm80Family);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
