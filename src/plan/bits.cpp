#include "plan/bits.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flash_dmattn::internal {
namespace {

// Eight bools in the bytes of `bytes` to eight bits, first byte lowest.
std::uint64_t pack_eight(std::uint64_t bytes) {
  // Any nonzero byte becomes 0x01: 0x7f carries into the top bit unless the low seven are zero.
  constexpr std::uint64_t kLow7 = 0x7f7f7f7f7f7f7f7fu;
  const std::uint64_t top = ((bytes & kLow7) + kLow7) | bytes;
  // The product moves the bit of byte i to bit 56 + i, without carries between them.
  return (((top >> 7) & 0x0101010101010101u) * 0x0102040810204080u) >> 56;
}

std::uint64_t pack_portable(const std::uint8_t* bools) {
  std::uint64_t lanes[8];
  std::memcpy(lanes, bools, sizeof lanes);
  if ((lanes[0] | lanes[1] | lanes[2] | lanes[3] | lanes[4] | lanes[5] | lanes[6] | lanes[7]) == 0) return 0;
  std::uint64_t word = 0;
  for (int lane = 0; lane < 8; ++lane) word |= pack_eight(lanes[lane]) << (8 * lane);
  return word;
}

// `pack` makes a word of 64 neighbouring bools.
template <typename Pack>
inline __attribute__((always_inline)) void pack_with(Pack pack, const std::uint8_t* bools, std::int64_t count,
                                                     std::uint64_t* words) {
  for (; count >= kWordBits; count -= kWordBits, bools += kWordBits) *words++ = pack(bools);
  if (count > 0) {
    std::uint8_t tail[kWordBits] = {};
    std::memcpy(tail, bools, static_cast<std::size_t>(count));
    *words = pack(tail);
  }
}

std::uint64_t extract_portable(std::uint64_t word, std::uint64_t keep) {
  std::uint64_t result = 0;
  for (int position = 0; keep != 0; keep &= keep - 1, ++position) {
    result |= ((word >> std::countr_zero(keep)) & 1) << position;
  }
  return result;
}

// `extract` gathers the bits of its first argument that its second selects into the low bits.
template <typename Extract>
inline __attribute__((always_inline)) void compact_with(Extract extract, const std::uint64_t* keep, std::int64_t count,
                                                        std::uint64_t* words) {
  std::uint64_t pending = 0;  // bits of the next output word
  int filled = 0;
  std::int64_t out = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (keep[i] == 0) continue;
    const std::uint64_t bits = extract(words[i], keep[i]);
    const int added = std::popcount(keep[i]);
    pending |= bits << filled;
    if (filled + added >= kWordBits) {
      words[out++] = pending;
      pending = filled == 0 ? 0 : bits >> (kWordBits - filled);
    }
    filled = (filled + added) % kWordBits;
  }
  if (filled != 0) words[out] = pending;
}

#if defined(__x86_64__)
struct PackAvx2 {
  __attribute__((target("avx2"))) std::uint64_t operator()(const std::uint8_t* bools) const {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bools));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bools + 32));
    const auto low_zeros = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, zero)));
    const auto high_zeros = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, zero)));
    return ~(static_cast<std::uint64_t>(high_zeros) << 32 | low_zeros);
  }
};

struct ExtractBmi2 {
  __attribute__((target("bmi2"))) std::uint64_t operator()(std::uint64_t word, std::uint64_t keep) const {
    return _pext_u64(word, keep);
  }
};

// pack_with and compact_with are inlined here, so that all of them may use the instructions named.
__attribute__((target("avx2"))) void pack_avx2(const std::uint8_t* bools, std::int64_t count, std::uint64_t* words) {
  pack_with(PackAvx2{}, bools, count, words);
}

__attribute__((target("bmi2,popcnt"))) void compact_bmi2(const std::uint64_t* keep, std::int64_t count,
                                                         std::uint64_t* words) {
  compact_with(ExtractBmi2{}, keep, count, words);
}
#endif

}  // namespace

void pack_bools(const std::uint8_t* bools, std::int64_t stride, std::int64_t count, std::uint64_t* words) {
  if (stride == 1) {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) return pack_avx2(bools, count, words);
#endif
    return pack_with(pack_portable, bools, count, words);
  }
  for (std::int64_t first = 0; first < count; first += kWordBits) {
    std::uint64_t word = 0;
    const std::int64_t end = count - first < kWordBits ? count - first : kWordBits;
    for (std::int64_t k = 0; k < end; ++k) word |= std::uint64_t{bools[(first + k) * stride] != 0} << k;
    *words++ = word;
  }
}

void compact_bits(const std::uint64_t* keep, std::int64_t count, std::uint64_t* words) {
#if defined(__x86_64__)
  static const bool has_bmi2 = __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  if (has_bmi2) return compact_bmi2(keep, count, words);
#endif
  compact_with(extract_portable, keep, count, words);
}

std::int64_t list_bits(const std::uint64_t* words, std::int64_t count, std::int64_t base, std::int32_t* positions) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::uint64_t word = words[i]; word != 0; word &= word - 1) {
      positions[found++] = static_cast<std::int32_t>(base + i * kWordBits + std::countr_zero(word));
    }
  }
  return found;
}

}  // namespace flash_dmattn::internal
