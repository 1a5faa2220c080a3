// Runs the tests where there is a GPU. Where there is none they are skipped, and can still be listed.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  if (!GTEST_FLAG_GET(list_tests) && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
    std::puts("[  SKIPPED ] no GPU");  // what gtest_discover_tests takes for a skipped test
    return 0;
  }
  return RUN_ALL_TESTS();
}
