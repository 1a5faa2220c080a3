// What the CUDA compiler knows without a header: words, indices and functions of device code. Included in front of
// every file that is emulated (cuda_runtime_api.h says what that is).
#pragma once

#include <math.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cuda_runtime_api.h"
#include "vector_types.h"

#define CUDA_EMULATION
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, and its memory is not that of one before: it may hold anything, as on a GPU. Not for
// clusters, whose blocks would share it.
#define __shared__ static

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_emulation {

constexpr int kWarpLanes = 32;

// Waits until all lanes of the warp call the function named `what`, and gives what each of them gave. Good until the
// next call.
const std::uint64_t* exchange(const char* what, std::uint64_t value);
// The same for several values of each: those at [i] are all lanes' number i.
constexpr int kMostExchanged = 3;
const std::uint64_t (*exchange(const char* what, const std::uint64_t* values, int count))[kWarpLanes];
void* dynamic_shared_memory();
std::size_t dynamic_shared_bytes();
// Of a cluster: another block's, the running one's number, a barrier of all threads.
void* dynamic_shared_memory_of(int rank);
int block_rank();
void sync_cluster();
// A thread's copies in groups, as cp.async has them. after_copies: once all that it has begun are done.
void copy_in_background(std::function<void()> copy);
void commit_copies();
void wait_copies(int pending);
void after_copies(std::function<void()> then);
// The copy engine's: to shared memory at any time, from there in groups of the thread.
void copy_in_bulk(std::function<void()> copy);
void store_in_bulk(std::function<void()> store);
void commit_stores();
void wait_stores(int pending);
// The tensor cores', in groups of the warp; by one of its lanes.
void begin_product(std::function<void()> product);
void commit_products();
void wait_products(int pending);
// Others run meanwhile. give_way: for loops that read what others write.
void wait_until(const char* what, std::function<bool()> may_go_on);
void give_way();
// Gives whether `value` held in all threads, if it waits.
bool arrive_at_named_barrier(int id, int threads, bool value, bool waits);
[[noreturn]] void fail(const char* format, ...);

inline int lane() { return static_cast<int>(threadIdx.x % kWarpLanes); }

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// All lanes have to be there: the kernels use no smaller groups.
template <typename T>
const std::uint64_t* exchange_all(const char* what, unsigned lanes, T value) {
  if (lanes != ~0u) fail("%s by some lanes only (%08x)", what, lanes);
  return exchange(what, to_bits(value));
}

template <typename T>
T shuffle(const char* what, unsigned lanes, T value, int source) {
  const std::uint64_t* values = exchange_all(what, lanes, value);
  return source < 0 || source >= kWarpLanes ? value : from_bits<T>(values[source]);
}

template <typename T, typename Join>
T reduce(const char* what, unsigned lanes, T value, Join join) {
  const std::uint64_t* values = exchange_all(what, lanes, value);
  T result = from_bits<T>(values[0]);
  for (int i = 1; i < kWarpLanes; ++i) result = join(result, from_bits<T>(values[i]));
  return result;
}

inline unsigned ballot(const char* what, unsigned lanes, bool predicate) {
  const std::uint64_t* values = exchange_all(what, lanes, predicate);
  unsigned bits = 0;
  for (int i = 0; i < kWarpLanes; ++i) bits |= static_cast<unsigned>(values[i]) << i;
  return bits;
}

}  // namespace cuda_emulation

void __syncthreads();
inline void __threadfence() {}  // threads run one after another
inline int __syncthreads_or(int value) {
  static int any;
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  any |= value;
  __syncthreads();
  return any;
}

inline void __syncwarp(unsigned lanes = ~0u) { cuda_emulation::exchange_all("__syncwarp", lanes, 0); }

template <typename T>
T __shfl_sync(unsigned lanes, T value, int source) {
  return cuda_emulation::shuffle("__shfl_sync", lanes, value, source & (cuda_emulation::kWarpLanes - 1));
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T value, int distance) {
  return cuda_emulation::shuffle("__shfl_up_sync", lanes, value, cuda_emulation::lane() - distance);
}
template <typename T>
T __shfl_down_sync(unsigned lanes, T value, int distance) {
  return cuda_emulation::shuffle("__shfl_down_sync", lanes, value, cuda_emulation::lane() + distance);
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  return cuda_emulation::shuffle("__shfl_xor_sync", lanes, value, cuda_emulation::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned lanes, bool predicate) {
  return cuda_emulation::ballot("__ballot_sync", lanes, predicate);
}
inline bool __any_sync(unsigned lanes, bool predicate) {
  return cuda_emulation::ballot("__any_sync", lanes, predicate) != 0;
}
inline bool __all_sync(unsigned lanes, bool predicate) {
  return cuda_emulation::ballot("__all_sync", lanes, predicate) == ~0u;
}
template <typename T>
unsigned __match_any_sync(unsigned lanes, T value) {
  const std::uint64_t* values = cuda_emulation::exchange_all("__match_any_sync", lanes, value);
  unsigned same = 0;
  for (int i = 0; i < cuda_emulation::kWarpLanes; ++i) {
    same |= unsigned{values[i] == cuda_emulation::to_bits(value)} << i;
  }
  return same;
}
template <typename T>
T __reduce_add_sync(unsigned lanes, T value) {
  return cuda_emulation::reduce("__reduce_add_sync", lanes, value, [](T a, T b) { return a + b; });
}
template <typename T>
T __reduce_min_sync(unsigned lanes, T value) {
  return cuda_emulation::reduce("__reduce_min_sync", lanes, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_max_sync(unsigned lanes, T value) {
  return cuda_emulation::reduce("__reduce_max_sync", lanes, value, [](T a, T b) { return a < b ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned lanes, unsigned value) {
  return cuda_emulation::reduce("__reduce_or_sync", lanes, value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned lanes, unsigned value) {
  return cuda_emulation::reduce("__reduce_and_sync", lanes, value, [](unsigned a, unsigned b) { return a & b; });
}

// Fibers switch nowhere in between.
template <typename T, typename U>
T atomicAdd(T* to, U value) {
  const T before = *to;
  *to = before + static_cast<T>(value);
  return before;
}
template <typename T>
T atomicMin(T* to, T value) {
  const T before = *to;
  if (value < before) *to = value;
  return before;
}
template <typename T>
T atomicMax(T* to, T value) {
  const T before = *to;
  if (value > before) *to = value;
  return before;
}
template <typename T>
T atomicOr(T* to, T value) {
  const T before = *to;
  *to = before | value;
  return before;
}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(unsigned value) { return std::countl_zero(value); }
inline int __ffs(unsigned value) { return value == 0 ? 0 : std::countr_zero(value) + 1; }
// Byte i of the result is byte number (nibble i of `selector`) of the eight of `low` and `high`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
// Bytes of 1 where those of `a` are greater.
inline unsigned __vsetgtu4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 8) result |= unsigned{(a >> i & 0xff) > (b >> i & 0xff)} << i;
  return result;
}

template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
using std::isfinite;
