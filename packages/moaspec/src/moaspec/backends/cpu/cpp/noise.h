// Positional noise, as in `moaspec.sampling.noise`: the leading 53 bits of Philox4x32-10 (Salmon et al., SC
// 2011), of which the last is set.
#pragma once

#include <cmath>
#include <cstdint>

extern "C" {

// Seed, which of n answers, and position of a token: its noise is a function of these and the token.
struct Place {
  int64_t seed, choice, position;
};

}  // extern "C"

namespace {

constexpr int kNoiseRounds = 10;
constexpr int64_t kNoiseShare = 4096;  // tokens whose noise takes long enough for a task of a thread

// The first two of the four words that Philox gives for a token.
struct NoiseWords {
  uint32_t high, low;
};

inline NoiseWords noise_words(const Place& place, uint32_t token) {
  const uint64_t seed = static_cast<uint64_t>(place.seed);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t word0 = token, word1 = static_cast<uint32_t>(place.position);
  uint32_t word2 = static_cast<uint32_t>(place.choice), word3 = 0;
#pragma GCC unroll 10
  for (int round = 0; round < kNoiseRounds; round++) {
    const uint64_t product0 = uint64_t{word0} * 0xD2511F53u, product1 = uint64_t{word2} * 0xCD9E8D57u;
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ word1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ word3 ^ key1;
    word1 = static_cast<uint32_t>(product1);
    word3 = static_cast<uint32_t>(product0);
    word0 = next0;
    word2 = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {word0, word1};
}

// The 53 bits: 2^53 times a uniform number between 0 and 1.
inline int64_t noise_bits(const Place& place, uint32_t token) {
  const NoiseWords words = noise_words(place, token);
  return static_cast<int64_t>(uint64_t{words.high} << 21 | words.low >> 11 | 1);
}

inline double gumbel(const Place& place, uint32_t token) {
  return -std::log(-std::log(static_cast<double>(noise_bits(place, token)) * 0x1p-53));
}

}  // namespace
