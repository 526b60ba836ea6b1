// The state of a softmax that has seen part of a row: the largest logit and the sum of exp(logit - largest).
//
// Logits are natural and float32. An empty state is (-inf, 0) with a true -inf, and is the identity of merging, also with itself:
// every difference is taken against `anchor(max)`, which is finite, so -inf - -inf never happens.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3.1.
#pragma once
#include "ptx.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// What to subtract from logits whose largest is `max`.
__device__ __forceinline__ float anchor(float max) { return max == negative_infinity() ? 0.0f : max; }

// exp(logit - anchor), exactly 1 where they are equal however large, and 0 for -inf. The difference is taken before the
// conversion to base 2: folding both into one multiply-add would leave a rounding error of the size of the logit.
__device__ __forceinline__ float exp_above(float logit, float anchor) { return exp2_approx((logit - anchor) * kLog2e); }

struct SoftmaxState {
  float max;  // -inf: nothing visible so far
  float sum;  // of exp(logit - anchor(max))

  // A sum that is no number has seen logits that were none, which no maximum tells.
  __device__ __forceinline__ bool empty() const { return max == negative_infinity() && sum == sum; }

  // The natural log of the sum of exp of the logits.
  __device__ __forceinline__ float lse() const { return empty() ? max : max + logf(sum); }

  // The factor that turns sums of exp(logit - anchor(max)) * v into an output row; a sink adds exp(sink) to the denominator.
  __device__ __forceinline__ float normalizer() const { return empty() ? 0.0f : 1.0f / sum; }
  __device__ __forceinline__ float normalizer(float sink) const {
    if (empty()) return 0.0f;
    const float top = fmaxf(max, sink);
    const float weight = exp_above(max, top);
    return weight / (sum * weight + exp_above(sink, top));
  }
};
