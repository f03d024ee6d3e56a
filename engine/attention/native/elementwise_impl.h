// The embedding, RMS norm with the residual sum, rotary embedding with the write to the block pool, and the
// largest logit. All compute in float32 and round once, at the end. The residual is never rounded: it is float32
// in every dtype.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

// Calls function(offset, number of lanes that count) for each vector of `size` elements.
template <class Function>
BATON_INLINE void for_each_vector(int size, Function function) {
  int at = 0;
  for (; at + W <= size; at += W) function(at, W);
  if (at < size) function(at, size - at);
}

template <class T>
static void embed_rows(const BatonEmbed& args, const BatonStep& step, int32_t begin, int32_t end) {
  for (int32_t row = begin; row < end; ++row) {
    const T* source = static_cast<const T*>(args.table) + step.ids[row] * args.size;
    float* target = args.residual + (size_t)row * args.size;
    for_each_vector(args.size, [=](int at, int n) __attribute__((always_inline)) {
      store_up_to(target + at, load_up_to(source + at, n) * args.scale, n);
    });
  }
}

static void embed(const BatonEmbed& args, const BatonStep& step, int32_t begin, int32_t end) {
  if (args.dtype == BATON_BFLOAT16) {
    embed_rows<bf16>(args, step, begin, end);
  } else {
    embed_rows<float>(args, step, begin, end);
  }
}

template <class T>
BATON_INLINE float inverse_rms(const T* x, int size, float eps) {
  vf squares = zero();
  for_each_vector(size, [&](int at, int n) __attribute__((always_inline)) {
    const vf value = load_up_to(x + at, n);
    squares += value * value;
  });
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) / size + eps);
}

template <class T>
static void add_norm_rows(const BatonAddNorm& args, int32_t begin, int32_t end) {
  const int size = args.size;
  for (int32_t row = begin; row < end; ++row) {
    float* residual = args.residual + (size_t)row * size;
    const T* x = args.x ? static_cast<const T*>(args.x) + (size_t)row * size : nullptr;
    T* out = static_cast<T*>(args.out) + (size_t)row * size;
    const float x_inverse = args.x_norm ? inverse_rms(x, size, args.eps) : 1.0f;
    vf squares = zero();
    for_each_vector(size, [&](int at, int n) __attribute__((always_inline)) {
      vf value = load_up_to(residual + at, n);
      if (x) {
        const vf added = load_up_to(x + at, n);
        value += args.x_norm ? added * x_inverse * load_up_to(args.x_norm + at, n) : added;
        store_up_to(residual + at, value, n);
      }
      squares += value * value;
    });
    const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(squares) / size + args.eps);
    for_each_vector(size, [&](int at, int n) __attribute__((always_inline)) {
      store_up_to(out + at, load_up_to(residual + at, n) * inverse * load_up_to(args.norm + at, n), n);
    });
  }
}

static void add_norm(const BatonAddNorm& args, int32_t begin, int32_t end) {
  if (args.dtype == BATON_BFLOAT16) {
    add_norm_rows<bf16>(args, begin, end);
  } else {
    add_norm_rows<float>(args, begin, end);
  }
}

// Normalises one head, where there is a norm, and rotates its pairs (i, i + D/2), where there are cosines: the "half"
// layout of Hugging Face checkpoints. source may be target.
template <class T>
BATON_INLINE void transform_head(const T* source, T* target, int dim, const float* norm, float eps,
                                 const float* cosines) {
  const float inverse = norm ? inverse_rms(source, dim, eps) : 1.0f;
  auto normed = [=](int at, int n) __attribute__((always_inline)) {
    const vf value = load_up_to(source + at, n);
    return norm ? value * inverse * load_up_to(norm + at, n) : value;
  };
  if (!cosines) {
    if (norm || source != target)
      for_each_vector(dim, [=](int at, int n) __attribute__((always_inline)) {
        store_up_to(target + at, normed(at, n), n);
      });
    return;
  }
  const int half = dim / 2;
  for_each_vector(half, [=](int at, int n) __attribute__((always_inline)) {
    const vf cosine = load_up_to(cosines + at, n);
    const vf sine = load_up_to(cosines + half + at, n);
    const vf low = normed(at, n);
    const vf high = normed(half + at, n);
    store_up_to(target + at, low * cosine - high * sine, n);
    store_up_to(target + half + at, high * cosine + low * sine, n);
  });
}

template <class T>
static void rotary_write_tokens(const BatonRotaryWrite& args, const BatonStep& step, int32_t begin, int32_t end) {
  const BatonKVLayer& kv = args.kv;
  const int dim = kv.head_dim;
  for (int32_t token = begin; token < end; ++token) {
    T* q = static_cast<T*>(args.qkv) + token * args.token_stride;
    const T* k = q + (size_t)args.num_heads * dim;
    const T* v = k + (size_t)kv.num_kv_heads * dim;
    const float* cosines = args.cos_sin ? args.cos_sin + step.positions[token] * dim : nullptr;
    const int64_t slot = step.slots[token];
    T* key = static_cast<T*>(kv.data) + slot / kv.block_size * kv.block_stride + slot % kv.block_size * kv.slot_stride;
    for (int head = 0; head < args.num_heads; ++head, q += dim)
      transform_head(q, q, dim, args.q_norm, args.eps, cosines);
    for (int head = 0; head < kv.num_kv_heads; ++head, k += dim, v += dim, key += kv.head_stride) {
      transform_head(k, key, dim, args.k_norm, args.eps, cosines);
      __builtin_memcpy(key + kv.kv_stride, v, dim * sizeof(T));
    }
  }
}

static void rotary_write(const BatonRotaryWrite& args, const BatonStep& step, int32_t begin, int32_t end) {
  if (args.kv.dtype == BATON_BFLOAT16) {
    rotary_write_tokens<bf16>(args, step, begin, end);
  } else {
    rotary_write_tokens<float>(args, step, begin, end);
  }
}

// Looks for the largest value piece by piece, and then for its place in the first piece that had it.
constexpr int ARGMAX_PIECE = 1024;

BATON_INLINE float piece_max(const float* values, int size, bool* has_nan) {
  vf top = splat(-__builtin_inff());
  vi nan = {};
  int at = 0;
  for (; at + W <= size; at += W) {
    const vf value = load(values + at);
    nan |= value != value;
    top = max(top, value);
  }
  float most = max_lanes(top);
  for (; at < size; ++at) {
    if (values[at] != values[at]) *has_nan = true;
    if (values[at] > most) most = values[at];
  }
  for (int lane = 0; lane < W; ++lane)
    if (nan[lane]) *has_nan = true;
  return most;
}

static void argmax(const BatonArgmax& args, int32_t begin, int32_t end) {
  for (int32_t row = begin; row < end; ++row) {
    const float* values = args.logits + (size_t)row * args.size;
    float most = -__builtin_inff();
    int best = 0;
    bool has_nan = false;
    for (int first = 0; first < args.size && !has_nan; first += ARGMAX_PIECE) {
      const int size = args.size - first < ARGMAX_PIECE ? args.size - first : ARGMAX_PIECE;
      const float top = piece_max(values + first, size, &has_nan);
      if (has_nan || top > most) {
        best = first;
        most = top;
      }
    }
    while (has_nan ? values[best] == values[best] : values[best] < most) ++best;
    args.ids[row] = best;
    args.values[row] = values[best];
  }
}
