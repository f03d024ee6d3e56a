// Matrix products with the weights as they lie.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after simd.h.

constexpr int OUTPUTS_PER_ITEM = 64;

static int64_t linear_num_items(const BatonLinear& args) {
  return *args.num_rows == 0 ? 0 : (args.num_outputs + OUTPUTS_PER_ITEM - 1) / OUTPUTS_PER_ITEM;
}

static size_t linear_scratch_size_bytes(const BatonLinear&) { return 0; }

template <class T>
BATON_INLINE float dot(const T* a, const T* b, int size) {
  vf sum = zero();
  int at = 0;
  for (; at + W <= size; at += W) sum += load(a + at) * load(b + at);
  if (at < size) sum += load_part(a + at, size - at) * load_part(b + at, size - at);
  return sum_lanes(sum);
}

template <class T>
static void linear_outputs(const BatonLinear& args, int begin, int end) {
  for (int output = begin; output < end; ++output) {
    const T* weight = static_cast<const T*>(args.weight) + (size_t)output * args.num_inputs;
    for (int row = 0; row < *args.num_rows; ++row) {
      float sum = dot(static_cast<const T*>(args.x) + row * args.x_stride, weight, args.num_inputs);
      if (args.bias) sum += args.bias[output];
      const size_t at = row * args.out_stride + output;
      if (args.out_dtype == BATON_BFLOAT16) {
        store_part(static_cast<bf16*>(args.out) + at, splat(sum), 1);
      } else {
        static_cast<float*>(args.out)[at] = sum;
      }
    }
  }
}

static void linear_item(const BatonLinear& args, int64_t item, void*) {
  const int begin = (int)item * OUTPUTS_PER_ITEM;
  const int end = begin + OUTPUTS_PER_ITEM < args.num_outputs ? begin + OUTPUTS_PER_ITEM : args.num_outputs;
  if (args.dtype == BATON_BFLOAT16) {
    linear_outputs<bf16>(args, begin, end);
  } else {
    linear_outputs<float>(args, begin, end);
  }
}
