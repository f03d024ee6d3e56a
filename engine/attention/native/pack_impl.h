// Keys and values from the blocks of the pool to what the vector unit multiplies: a tile of KEY_TILE keys at a time.
//
// Included inside `namespace baton::BATON_ISA_NAMESPACE { namespace {`, after multiply_impl.h.

constexpr int KEY_TILE = 64;
constexpr int CACHE_LINE_BYTES = 64;

template <int N>
struct Constant {
  static constexpr int value = N;
};

// The keys of one sequence and head, through its block table. A value lies kv.kv_stride after its key.
template <class T>
struct KeySource {
  const BatonKVLayer& kv;
  const T* head;
  const int32_t* table;
  int end;  // positions from here on do not exist

  // The key at `position`, and how many follow it, itself included, kv.slot_stride apart.
  BATON_INLINE const T* find(const KeySource& source, int position, int* run) {
    const BatonKVLayer& kv = source.kv;
    const int slot = position % kv.block_size;
    const int left = source.end - position;
    *run = kv.block_size - slot < left ? kv.block_size - slot : left;
    return source.head + source.table[position / kv.block_size] * kv.block_stride + slot * kv.slot_stride;
  }
};

// W keys as rows `stride` apart, and their values.
template <class T>
struct KeyGroup {
  const T* keys;
  const T* values;
  int64_t stride;
};

// The W keys from `position` on: where they lie if they lie together, else copied to `staging` (2 x W rows of head_dim
// elements), with zeros for those that do not exist.
template <class T>
static KeyGroup<T> find_group(const KeySource<T>& source, int position, T* staging) {
  const int dim = source.kv.head_dim;
  int run;
  const T* key = KeySource<T>::find(source, position, &run);
  if (run >= W) return {key, key + source.kv.kv_stride, source.kv.slot_stride};
  T* values = staging + W * dim;
  int row = 0;
  while (row < W && position < source.end) {
    key = KeySource<T>::find(source, position, &run);
    for (int i = 0; i < run && row < W; ++i, ++row, ++position, key += source.kv.slot_stride) {
      __builtin_memcpy(staging + row * dim, key, dim * sizeof(T));
      __builtin_memcpy(values + row * dim, key + source.kv.kv_stride, dim * sizeof(T));
    }
  }
  const size_t rest_bytes = (size_t)(W - row) * dim * sizeof(T);
  __builtin_memset(static_cast<void*>(staging + row * dim), 0, rest_bytes);
  __builtin_memset(static_cast<void*>(values + row * dim), 0, rest_bytes);
  return {staging, values, dim};
}

// W consecutive words of a row of T: floats (widened from T), or pairs of bfloat16 as they lie.
template <class Words, class T>
BATON_INLINE vf load_words(const T* row, int num_elements) {
  if constexpr (Words::PER_WORD == 1) {
    return load_up_to(row, num_elements);
  } else {
    return load_up_to(reinterpret_cast<const float*>(row), num_elements / 2);
  }
}

// keys [head_dim words, KEY_TILE]: W columns of it. DIM is the head dimension and stride where both are the same common
// number, known to the compiler; else 0.
template <class Words, int DIM, class T>
BATON_INLINE void pack_keys(const KeyGroup<T>& group, int dim, float* keys) {
  if (DIM) dim = DIM;
  const int64_t stride = DIM ? DIM : group.stride;
  const int words = dim / Words::PER_WORD;
  for (int at = 0; at < words; at += W) {
    vf square[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      square[i] = load_words<Words>(group.keys + i * stride + at * Words::PER_WORD, dim - at * Words::PER_WORD);
    transpose(square);
    if (words - at >= W) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(keys + (size_t)(at + i) * KEY_TILE, square[i]);
    } else {
      for (int i = 0; i < words - at; ++i) store(keys + (size_t)(at + i) * KEY_TILE, square[i]);
    }
  }
}

// 2 W elements of two rows of bfloat16 as words: row 0 in the lower halves, row 1 in the upper ones.
BATON_INLINE void interleave(const bf16* row0, const bf16* row1, vf* words, vf* next_words) {
  typedef uint16_t pairs __attribute__((vector_size(4 * W)));
  pairs low, high;
#pragma GCC unroll 32
  for (int i = 0; i < 2 * W; ++i) {
    low[i] = i / 2 + i % 2 * 2 * W;
    high[i] = W + i / 2 + i % 2 * 2 * W;
  }
  const pairs a = bit_cast<pairs>(load(reinterpret_cast<const float*>(row0)));
  const pairs b = bit_cast<pairs>(load(reinterpret_cast<const float*>(row1)));
  *words = bit_cast<vf>(__builtin_shuffle(a, b, low));
  *next_words = bit_cast<vf>(__builtin_shuffle(a, b, high));
}

// Two whole rows of them.
BATON_INLINE void pair_rows(const bf16* row0, const bf16* row1, int dim, int padded_dim, float* words) {
  int at = 0;
  for (; at + 2 * W <= dim; at += 2 * W) {
    vf low, high;
    interleave(row0 + at, row1 + at, &low, &high);
    store(words + at, low);
    store(words + at + W, high);
  }
  for (; at < padded_dim; at += W) {
    const vu a = bit_cast<vu>(load_up_to(row0 + at, dim - at)) >> 16;
    const vu b = bit_cast<vu>(load_up_to(row1 + at, dim - at));
    store(words + at, bit_cast<vf>(a | b));
  }
}

// values [W keys, padded_dim], where a row of words holds one key's value, or those of two keys.
template <class Words, int DIM, class T>
BATON_INLINE void pack_values(const KeyGroup<T>& group, int dim, int padded_dim, float* values) {
  if (DIM) dim = padded_dim = DIM;
  const int64_t stride = DIM ? DIM : group.stride;
  const T* row = group.values;
#pragma GCC unroll 16
  for (int key = 0; key < W; key += Words::PER_WORD, row += Words::PER_WORD * stride, values += padded_dim) {
    if constexpr (Words::PER_WORD == 1) {
      for (int at = 0; at < padded_dim; at += W) store(values + at, load_up_to(row + at, dim - at));
    } else {
      pair_rows(row, row + stride, dim, padded_dim, values);
    }
  }
}

// Where the keys and values of one tile lie, in groups of W.
template <class T>
struct KeyTile {
  int num_groups;
  KeyGroup<T> groups[KEY_TILE / W];
};

template <class Function>
BATON_INLINE void with_dim(int dim, int64_t stride, Function function) {
  if (dim == 64 && stride == 64) {
    function(Constant<64>());
  } else if (dim == 128 && stride == 128) {
    function(Constant<128>());
  } else {
    function(Constant<0>());
  }
}

// Finds the keys of positions first .. first + KEY_TILE - 1, as far as they exist.
template <class T>
static void find_key_tile(const KeySource<T>& source, int first, T* staging, KeyTile<T>* tile) {
  tile->num_groups = 0;
  for (int at = 0; at < KEY_TILE && first + at < source.end; at += W, staging += 2 * W * source.kv.head_dim)
    tile->groups[tile->num_groups++] = find_group(source, first + at, staging);
}

template <class Words, class T>
static void pack_key_tile(const KeyTile<T>& tile, int dim, float* keys) {
  for (int i = 0; i < tile.num_groups; ++i)
    with_dim(dim, tile.groups[i].stride, [&](auto constant) __attribute__((always_inline)) {
      pack_keys<Words, constant.value>(tile.groups[i], dim, keys + i * W);
    });
}

template <class Words, class T>
static void pack_value_tile(const KeyTile<T>& tile, int dim, int padded_dim, float* values) {
  for (int i = 0; i < tile.num_groups; ++i, values += (size_t)W / Words::PER_WORD * padded_dim)
    with_dim(dim, tile.groups[i].stride, [&](auto constant) __attribute__((always_inline)) {
      pack_values<Words, constant.value>(tile.groups[i], dim, padded_dim, values);
    });
}

// The key tile of a source that begins at a position; none if that is not before the source's end.
template <class T>
struct KeyPlace {
  const KeySource<T>* source;
  int position;
};

// Asks the cache for the keys and values of the tile after the one at hand. In decode each is read once, from another
// page, which the machine's own prefetcher does not foresee; and a core cannot wait for many lines at once, so that
// memory would idle if they were asked for in one go. So it is done a few at a time, page by page, in the loops of the
// products, and into the second-level cache, which waits for more lines at once than the first does: on Zen 4 that reads
// scattered pages twice as fast.
struct Fetcher {
  const char* next;
  const char* piece_end;
  int64_t piece_size_bytes;
  int piece;
  int num_pieces;
  const char* pieces[2 * KEY_TILE / W];

  template <class T>
  BATON_INLINE void begin(Fetcher& fetcher, const KeyPlace<T>& place) {
    const BatonKVLayer& kv = place.source->kv;
    fetcher.next = fetcher.piece_end = nullptr;
    fetcher.piece_size_bytes = W * kv.slot_stride * sizeof(T);
    fetcher.piece = fetcher.num_pieces = 0;
    int run;
    for (int at = 0; at < KEY_TILE && place.position + at < place.source->end; at += W) {
      const T* keys = KeySource<T>::find(*place.source, place.position + at, &run);
      fetcher.pieces[fetcher.num_pieces++] = reinterpret_cast<const char*>(keys);
      fetcher.pieces[fetcher.num_pieces++] = reinterpret_cast<const char*>(keys + kv.kv_stride);
    }
  }

  // Four lines; false when there are no more.
  BATON_INLINE bool step(Fetcher& fetcher) {
    if (fetcher.next >= fetcher.piece_end) {
      if (fetcher.piece == fetcher.num_pieces) return false;
      fetcher.next = fetcher.pieces[fetcher.piece++];
      fetcher.piece_end = fetcher.next + fetcher.piece_size_bytes;
    }
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, fetcher.next += CACHE_LINE_BYTES) __builtin_prefetch(fetcher.next, 0, 2);
    return true;
  }
};
