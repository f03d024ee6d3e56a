// Rotary embedding with the write to the block pool, RMS norm with the residual sum, and SiLU with the gate's product.
// All compute in float32 and round once, at the end. The residual is never rounded: it is float32 in every dtype.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

// Rotates pairs (i, i + half) of one head: the "half" layout of Hugging Face Llama checkpoints. source may be target.
template <class T>
BATON_INLINE void rotate_head(const T* source, T* target, const float* cosines, const float* sines, int half) {
  for (int at = 0; at < half; at += W) {
    const int n = half - at;
    const vf cosine = load_up_to(cosines + at, n);
    const vf sine = load_up_to(sines + at, n);
    const vf low = load_up_to(source + at, n);
    const vf high = load_up_to(source + half + at, n);
    store_up_to(target + at, low * cosine - high * sine, n);
    store_up_to(target + half + at, high * cosine + low * sine, n);
  }
}

template <class T>
static void rotary_write_tokens(const BatonRotaryWrite& args, int32_t begin, int32_t end) {
  const BatonKVLayer& kv = args.kv;
  const int dim = kv.head_dim;
  const int half = dim / 2;
  for (int32_t token = begin; token < end; ++token) {
    T* q = static_cast<T*>(args.qkv) + token * args.token_stride;
    const T* k = q + (size_t)args.num_heads * dim;
    const T* v = k + (size_t)kv.num_kv_heads * dim;
    const float* cosines = args.cos_sin + args.positions[token] * dim;
    const float* sines = cosines + half;
    const int64_t slot = args.slots[token];
    T* key = static_cast<T*>(kv.data) + slot / kv.block_size * kv.block_stride + slot % kv.block_size * kv.slot_stride;
    for (int head = 0; head < args.num_heads; ++head, q += dim) rotate_head(q, q, cosines, sines, half);
    for (int head = 0; head < kv.num_kv_heads; ++head, k += dim, v += dim, key += kv.head_stride) {
      rotate_head(k, key, cosines, sines, half);
      __builtin_memcpy(key + kv.kv_stride, v, dim * sizeof(T));
    }
  }
}

static void rotary_write(const BatonRotaryWrite& args, int32_t begin, int32_t end) {
  if (args.kv.dtype == BATON_BFLOAT16) {
    rotary_write_tokens<bf16>(args, begin, end);
  } else {
    rotary_write_tokens<float>(args, begin, end);
  }
}

template <class T>
static void rms_norm_rows(const BatonRmsNorm& args, int32_t begin, int32_t end) {
  const int size = args.size;
  const T* weight = static_cast<const T*>(args.weight);
  for (int32_t row = begin; row < end; ++row) {
    float* residual = args.residual + (size_t)row * size;
    const T* x = args.x ? static_cast<const T*>(args.x) + (size_t)row * size : nullptr;
    T* out = static_cast<T*>(args.out) + (size_t)row * size;
    vf squares = zero();
    for (int at = 0; at < size; at += W) {
      vf value = load_up_to(residual + at, size - at);
      if (x) {
        value += load_up_to(x + at, size - at);
        store_up_to(residual + at, value, size - at);
      }
      squares += value * value;
    }
    const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(squares) / size + args.eps);
    for (int at = 0; at < size; at += W)
      store_up_to(out + at, load_up_to(residual + at, size - at) * inverse * load_up_to(weight + at, size - at),
                  size - at);
  }
}

static void rms_norm(const BatonRmsNorm& args, int32_t begin, int32_t end) {
  if (args.dtype == BATON_BFLOAT16) {
    rms_norm_rows<bf16>(args, begin, end);
  } else {
    rms_norm_rows<float>(args, begin, end);
  }
}

template <class T>
static void silu_mul_rows(const BatonSiluMul& args, int32_t begin, int32_t end) {
  const int size = args.size;
  for (int32_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + (size_t)row * 2 * size;
    const T* up = gate + size;
    T* out = static_cast<T*>(args.out) + (size_t)row * size;
    for (int at = 0; at < size; at += W) {
      const vf g = load_up_to(gate + at, size - at);
      // exp2 takes arguments up to 127; sigmoid(-88) is 6e-39 and rounds to zero for all that is added to it.
      const vf exponent = -g * 1.44269504f;
      const vf sigmoid = 1.0f / (1.0f + exp2(exponent > splat(127.0f) ? splat(127.0f) : exponent));
      store_up_to(out + at, g * sigmoid * load_up_to(up + at, size - at), size - at);
    }
  }
}

static void silu_mul(const BatonSiluMul& args, int32_t begin, int32_t end) {
  if (args.dtype == BATON_BFLOAT16) {
    silu_mul_rows<bf16>(args, begin, end);
  } else {
    silu_mul_rows<float>(args, begin, end);
  }
}
