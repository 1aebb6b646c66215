// W7A8: weights of 7 bits, each in a byte, times inputs of 8 bits, for bounds on exact products (`OutputBounds` in
// gemm.h). For AVX2 alone, which multiplies twice as many of them in a cycle as float32 numbers.
//
// A panel is the first 8 outputs, then the others: (2, I / 32 blocks, block). A block has 8 float16 scales, then
// for each 4 inputs the codes of the 8 outputs, -63 to 63: (8, 8, 4) int8. Inputs are in the order of
// `RoundedInputs`.
#pragma once

#include <algorithm>
#include <cmath>

#include "w4a8.h"

namespace {

constexpr float kMinSquares = 1e-30f;  // smaller sums of squares may have lost terms to underflow

// Euclidean norms of `count` inputs, and of what rounding changes in them, at most.
struct InputNorms { float inputs, rounding; };

inline InputNorms norms_of(const bf16* x, int64_t count) {
  float squares = 0, rounding = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    const Floats numbers[2] = {load(x + i), load(x + i + kLanes)};
    squares += reduce_sum(multiply_add(numbers[0], numbers[0], numbers[1] * numbers[1]));
    const float most = reduce_max(maximum(absolute(numbers[0]), absolute(numbers[1])));
    const float off = most > kMinMagnitude ? most / 253 : most;  // half a step, and a little more
    rounding += kBlock * off * off;
  }
  if (!(squares > kMinSquares)) return {INFINITY, INFINITY};  // no bound
  return {std::sqrt(squares), std::sqrt(rounding)};
}

// The format of W7A8 weights.
struct W7A8Weights {
  using Input = RoundedInputs;
  static constexpr bool kUnpacks = false;
  static constexpr int kInputs = kBlock;
  static constexpr int kMaxRows = 6;
  static constexpr int kHalf = kLanes / 2;
  static constexpr int kBytes = 2 * kHalf + kBlock * kHalf;
  static constexpr int max_panels(int) { return 1; }
  static int64_t panels_at_once(int64_t) { return 1; }
  static int64_t panel_bytes(int64_t inputs) { return 2 * (inputs / kBlock) * kBytes; }

  template <int M, int V>
  static void tile(const Input* x, int64_t stride, const uint8_t* panel, int64_t,
                   const uint8_t* next, int64_t inputs, Tile& out) {
    static_assert(V == 1);
    const int64_t blocks = inputs / kBlock;
    for (int half = 0; half < 2; half++) {
      __m256 sums[M];
      unrolled<M>([&](auto m) { sums[m] = _mm256_setzero_ps(); });
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t step = half * blocks + b;
        prefetch(step_address(panel, next, step + kPrefetchBlocks, 2 * blocks, kBytes), kBytes);
        add<M>(x + b, stride, panel + step * kBytes, sums);
      }
      unrolled<M>([&](auto m) { out.sums[m][0].part[half] = sums[m]; });
    }
  }

 private:
  // Accumulates one block.
  template <int M>
  [[gnu::always_inline]] static void add(const Input* x, int64_t stride, const uint8_t* block,
                                         __m256 (&sums)[M]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i dots[M];
    unrolled<M>([&](auto m) { dots[m] = _mm256_setzero_si256(); });
    unrolled<4>([&](auto group) {
      const __m256i first = bytes(block + 2 * kHalf + group * 2 * sizeof(Bytes));
      const __m256i second = bytes(block + 2 * kHalf + (group * 2 + 1) * sizeof(Bytes));
      unrolled<M>([&](auto m) {
        const int8_t* codes = x[m * stride].codes[group];
        // An int16 holds four products of at most 63 * 127.
        const __m256i four = _mm256_add_epi16(products(first, codes), products(second, codes + 4));
        dots[m] = _mm256_add_epi32(dots[m], _mm256_madd_epi16(four, ones));
      });
    });
    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
    unrolled<M>([&](auto m) {
      const __m256 steps = _mm256_mul_ps(scale, _mm256_set1_ps(x[m * stride].scale));
      sums[m] = _mm256_fmadd_ps(steps, _mm256_cvtepi32_ps(dots[m]), sums[m]);
    });
  }

  // Sums of two products each, int16, of codes and four inputs.
  static __m256i products(__m256i codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(_mm256_set1_epi32(four), codes));
  }
};

}  // namespace

extern "C" {

// Rounds a weight, (outputs, inputs), to panels. `outputs` is a multiple of 16, `inputs` of 32. Each output gets the
// Euclidean norms of its rounded weights and of their rounding errors.
void moaspec_round_to_7_bits(const bf16* weight, int64_t outputs, int64_t inputs, uint8_t* panels, float* norms,
                             float* errors, int32_t threads) {
  const int64_t blocks = inputs / kBlock;
#pragma omp parallel for num_threads(threads)
  for (int64_t output = 0; output < outputs; output++) {
    const int64_t lane = output % W7A8Weights::kHalf;
    Floats squares = broadcast(0.0f), error_squares = broadcast(0.0f);
    for (int64_t b = 0; b < blocks; b++) {
      uint8_t* const block = panels + (output / W7A8Weights::kHalf * blocks + b) * W7A8Weights::kBytes;
      const bf16* const from = weight + output * inputs + b * kBlock;
      const Floats numbers[2] = {load(from), load(from + kLanes)};
      const float most = reduce_max(maximum(absolute(numbers[0]), absolute(numbers[1])));
      const __m128 step = _mm_set_ss(std::max(most / 63, 0x1p-14f));  // at least float16's smallest normal number
      const __m128i half = _mm_cvtps_ph(step, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const Floats scale = broadcast(_mm_cvtss_f32(_mm_cvtph_ps(half)));
      int8_t codes[kBlock];
      for (int i = 0; i < 2; i++) {
        const Floats steps = nearest_integer(numbers[i] / scale), rounded = steps * scale;
        store_int8(codes + i * kLanes, steps);
        squares = multiply_add(rounded, rounded, squares);
        error_squares = multiply_add(rounded - numbers[i], rounded - numbers[i], error_squares);
      }
      const auto bits = static_cast<uint16_t>(_mm_extract_epi16(half, 0));
      std::memcpy(block + 2 * lane, &bits, sizeof(bits));
      for (int64_t i = 0; i < kBlock; i += 4)
        std::memcpy(block + 2 * W7A8Weights::kHalf + i * W7A8Weights::kHalf + 4 * lane, codes + i, 4);
    }
    norms[output] = std::sqrt(reduce_sum(squares));
    errors[output] = std::sqrt(reduce_sum(error_squares));
  }
}

}  // extern "C"
