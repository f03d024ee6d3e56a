// Gated activations, of the sums of a product before they are rounded.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

// 1 / (1 + e^-x). exp2 takes arguments up to 127: sigmoid(-88) is 6e-39 and rounds to zero for all that is added to it.
BATON_INLINE vf sigmoid(vf x) {
  const vf exponent = x * -1.44269504f;
  return reciprocal(1.0f + exp2(exponent > splat(127.0f) ? splat(127.0f) : exponent));
}

BATON_INLINE vf silu(vf x) { return x * sigmoid(x); }

// x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), where (1 + tanh(u)) / 2 = sigmoid(2u).
BATON_INLINE vf gelu_tanh(vf x) {
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}

template <class Function>
BATON_INLINE void gate_with(float* gates, const float* ups, int num_vectors, Function activation) {
  for (int at = 0; at < num_vectors * W; at += W) store(gates + at, activation(load(gates + at)) * load(ups + at));
}

// gates = activation(gates) * ups, vector by vector. Never inlined: a value must not get other bits where the compiler
// contracts the same arithmetic in another way.
static __attribute__((noinline)) void gate(int32_t activation, float* gates, const float* ups, int num_vectors) {
  if (activation == BATON_GELU_TANH) {
    gate_with(gates, ups, num_vectors, [](vf x) __attribute__((always_inline)) { return gelu_tanh(x); });
  } else {
    gate_with(gates, ups, num_vectors, [](vf x) __attribute__((always_inline)) { return silu(x); });
  }
}
