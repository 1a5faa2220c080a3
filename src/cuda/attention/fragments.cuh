// Walking over a warp's fragment of a product: kMTiles x kNTiles accumulators of 16 rows and 8 columns each
// (ptx/mma.cuh), of which float [kMTiles][kNTiles][4] is what one thread holds.
//
// A thread has parts of 2 * kMTiles rows, 8 rows apart, and of each of them kNTiles pairs of neighbouring columns, 8
// columns apart. Its row i, pair n and column `pair` (0 or 1) of that are element [i / 2][n][2 * (i % 2) + pair].
#pragma once

namespace flash_dmattn::internal::cuda {

// Row and column of the thread's first element within the block's tile; its others follow from there.
struct FragmentOrigin {
  int row, column;

  __device__ int row_of(int i) const { return row + i * 8; }
  __device__ int column_of(int n) const { return column + n * 8; }
};

// The two neighbouring elements of the thread's row i in column tile n.
template <typename Float, int kMTiles, int kNTiles>
__device__ inline Float* pair_at(Float (&fragment)[kMTiles][kNTiles][4], int i, int n) {
  return &fragment[i / 2][n][2 * (i % 2)];
}

// visit(n, pair, element) for the thread's row i.
template <typename Float, int kMTiles, int kNTiles, typename Visit>
__device__ inline void for_each_in_row(Float (&fragment)[kMTiles][kNTiles][4], int i, Visit visit) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) visit(n, pair, fragment[i / 2][n][2 * (i % 2) + pair]);
}

// visit(i, element) for one of the thread's columns.
template <typename Float, int kMTiles, int kNTiles, typename Visit>
__device__ inline void for_each_in_column(Float (&fragment)[kMTiles][kNTiles][4], int n, int pair, Visit visit) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) visit(i, fragment[i / 2][n][2 * (i % 2) + pair]);
}

// visit(i, n, pair, element), row by row.
template <typename Float, int kMTiles, int kNTiles, typename Visit>
__device__ inline void for_each_element(Float (&fragment)[kMTiles][kNTiles][4], Visit visit) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    for_each_in_row(fragment, i, [&](int n, int pair, Float& element) { visit(i, n, pair, element); });
  }
}

// visit(i, n, pair), row by row; `pair` points to two neighbouring elements.
template <typename Float, int kMTiles, int kNTiles, typename Visit>
__device__ inline void for_each_pair(Float (&fragment)[kMTiles][kNTiles][4], Visit visit) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) visit(i, n, pair_at(fragment, i, n));
}

template <int kMTiles, int kNTiles>
__device__ inline void clear(float (&fragment)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[m][n][i] = 0;
}

}  // namespace flash_dmattn::internal::cuda
