// The table of kernel families. No GPU is needed: families are chosen from shapes, strides and what is said of the GPU.
#include "cuda/kernel_family.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace flash_dmattn::internal::cuda {
namespace {

BackwardProblem problem_of(std::int64_t rows, std::int64_t keys) {
  BackwardProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 1, problem.rows = rows, problem.keys = keys;
  problem.heads = problem.key_heads = 2, problem.head_dim = problem.value_dim = 64;
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
  BackwardProblem listed = problem_of(16, 4096);
  listed.visibility.indices.block_size = 1;
  listed.visibility.indices.entries.keys = 2048;
  EXPECT_STREQ(forward_family(listed, Gpu()).name, "decode");
}

// On Hopper, with tensors that the copy engine can address; the memory is only pointed to.
BackwardProblem hopper_problem(std::int64_t head_dim, std::int64_t value_dim) {
  alignas(16) static std::uint16_t memory[1];
  BackwardProblem problem = problem_of(512, 512);
  problem.head_dim = head_dim, problem.value_dim = value_dim;
  const auto tokens = [&](std::int64_t columns) { return TokenView{memory, 512 * 2 * columns, 2 * columns, columns}; };
  problem.query = problem.key = tokens(head_dim);
  problem.value = problem.out = problem.dout = tokens(value_dim);
  return problem;
}
BackwardProblem hopper_problem(std::int64_t head_dim) { return hopper_problem(head_dim, head_dim); }

Gpu hopper() {
  Gpu gpu;
  gpu.capability = 90;
  return gpu;
}
std::string hopper_backward_name(const BackwardProblem& problem) { return backward_family(problem, hopper()).name; }

TEST(KernelFamilies, HopperHasBackwardsOfItsOwn) {
  if (kernel_families()[1]->name != std::string("sm90")) GTEST_SKIP() << "built without kernels for Hopper";
  for (const std::int64_t head_dim : {40, 64, 96, 128, 136, 192, 256})
    EXPECT_EQ(hopper_backward_name(hopper_problem(head_dim)), "sm90");
  for (const std::int64_t head_dim : {32, 60, 250}) {
    EXPECT_EQ(hopper_backward_name(hopper_problem(head_dim)), "sm80");
  }
  BackwardProblem problem = hopper_problem(128);
  problem.softcap = 5;
  EXPECT_EQ(hopper_backward_name(problem), "sm80");
  problem = hopper_problem(128);
  problem.bias.data = problem.query.data;
  problem.bias.rows = problem.rows;
  EXPECT_EQ(hopper_backward_name(problem), "sm80");
  problem = hopper_problem(128);
  problem.dout.head_stride = 0;  // an expanded gradient
  EXPECT_EQ(hopper_backward_name(problem), "sm80");
}

// Its consumers store 16 bytes at a time.
TEST(KernelFamilies, HopperStoresWholePiecesOfGradients) {
  if (kernel_families()[1]->name != std::string("sm90")) GTEST_SKIP() << "built without kernels for Hopper";
  for (const auto gradient : {&BackwardProblem::dkey, &BackwardProblem::dvalue}) {
    BackwardProblem problem = hopper_problem(128);
    problem.*gradient = problem.key;
    EXPECT_EQ(hopper_backward_name(problem), "sm90");
    (problem.*gradient).token_stride += 1;
    EXPECT_EQ(hopper_backward_name(problem), "sm80");
    problem.*gradient = problem.key;
    (problem.*gradient).data = static_cast<std::uint16_t*>(problem.key.data) + 1;
    EXPECT_EQ(hopper_backward_name(problem), "sm80");
  }
}

// In a process of its own, as the variable is read once.
TEST(KernelFamilies, HopperLeavesBackwardsThatItsCopyEngineMayNotStore) {
  if (kernel_families()[1]->name != std::string("sm90")) GTEST_SKIP() << "built without kernels for Hopper";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ask = [] {
    setenv("FLASH_DMATTN_BULK_STORES", "0", 1);
    for (const int head_dim : {40, 64, 96, 128, 192, 256}) {
      std::fprintf(stderr, "%d %s;", head_dim, hopper_backward_name(hopper_problem(head_dim)).c_str());
    }
    std::exit(0);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), "40 sm80;64 sm80;96 sm90;128 sm80;192 sm90;256 sm90;");
}

// The wider of the two head dims decides, and rows of both have to be whole pieces of 16 bytes.
TEST(KernelFamilies, HopperTakesValuesOfAnotherHeadDim) {
  if (kernel_families()[1]->name != std::string("sm90")) GTEST_SKIP() << "built without kernels for Hopper";
  const std::int64_t pairs[][2] = {{192, 128}, {128, 192}, {64, 8}, {8, 64}, {256, 8}};
  for (const auto& [head_dim, value_dim] : pairs) {
    const BackwardProblem problem = hopper_problem(head_dim, value_dim);
    EXPECT_STREQ(forward_family(problem, hopper()).name, "sm90");
    EXPECT_EQ(hopper_backward_name(problem), "sm90");
  }
  EXPECT_STREQ(forward_family(hopper_problem(32, 24), hopper()).name, "sm80");
  EXPECT_EQ(hopper_backward_name(hopper_problem(128, 60)), "sm80");
  EXPECT_EQ(hopper_backward_name(hopper_problem(60, 128)), "sm80");
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
