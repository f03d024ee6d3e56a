// Copies lists of byte ranges and sums them in the same pass. Plain C interface, called through ctypes
// (kv_transfer/native_library.py). The sum is defined in kv_transfer/checksum.py.
//
// A KV block is a few hundred KiB. The C library copies such pieces through the cache (it turns to streaming stores
// only far above that size), which reads every target line before it overwrites it. Streaming stores avoid that. How
// they keep memory busy differs from processor to processor: some hold one straight line of them up at every page, so
// that four pages walked at once are faster; others (Zen 4) are a third faster in a straight line. Prefetches past the
// caches help some, and make others (Emerald Rapids) slower by two fifths. So the ways are measured where the library is
// loaded. None gains from wider vectors: memory is what is waited for. The sum costs little in the same pass, and more
// in one of its own, even over what is still in the cache.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kKeyStep = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kKeyStart = 0xD1B54A32D192ED03ull;
constexpr uint64_t kLengthFactor = 0xC2B2AE3D27D4EB4Full;
constexpr size_t kPage = 4096;
constexpr size_t kLine = 64;

uint64_t key_of(uint64_t word_index) { return kKeyStart + word_index * kKeyStep; }

uint64_t mix(uint64_t word, uint64_t key) {
  const uint64_t value = word ^ key;
  return value + (value & 0xFFFFFFFFull) * (value >> 32);
}

uint64_t finish(uint64_t sum, uint64_t size_bytes) {
  sum ^= size_bytes * kLengthFactor;
  sum = (sum ^ (sum >> 33)) * 0xFF51AFD7ED558CCDull;
  sum = (sum ^ (sum >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return sum ^ (sum >> 33);
}

// Words [first_word, ...) of a range whose bytes from there on are source[0, size_bytes).
uint64_t sum_words(const uint8_t* source, size_t size_bytes, uint64_t first_word) {
  uint64_t sum = 0;
  uint64_t key = key_of(first_word);
  size_t at = 0;
  for (; at + 8 <= size_bytes; at += 8, key += kKeyStep) {
    uint64_t word;
    std::memcpy(&word, source + at, 8);
    sum += mix(word, key);
  }
  if (at < size_bytes) {
    uint64_t word = 0;
    std::memcpy(&word, source + at, size_bytes - at);
    sum += mix(word, key);
  }
  return sum;
}

// How memory is walked; kv_transfer/native_library.py has the same numbers.
enum Walk : int64_t { kPlain = 0, kStraight = 1, kInterleaved = 2, kPrefetched = 3 };

#if defined(__x86_64__)

bool can_walk(int64_t walk) {
  __builtin_cpu_init();
  return walk == kPlain || (kStraight <= walk && walk <= kPrefetched && __builtin_cpu_supports("avx2"));
}

int64_t current_walk = kPlain;

__attribute__((target("avx2"))) inline __m256i add_mixed(__m256i sum, __m256i words, __m256i keys) {
  const __m256i value = _mm256_xor_si256(words, keys);
  const __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
  return _mm256_add_epi64(sum, _mm256_add_epi64(value, product));
}

__attribute__((target("avx2"))) inline __m256i keys_from(uint64_t word_index) {
  return _mm256_setr_epi64x(static_cast<long long>(key_of(word_index)), static_cast<long long>(key_of(word_index + 1)),
                            static_cast<long long>(key_of(word_index + 2)),
                            static_cast<long long>(key_of(word_index + 3)));
}

__attribute__((target("avx2"))) inline uint64_t total(__m256i lanes) {
  alignas(32) uint64_t lane[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lane), lanes);
  return lane[0] + lane[1] + lane[2] + lane[3];
}

template <bool kPrefetch>
__attribute__((target("avx2"))) uint64_t sum_words_avx2(const uint8_t* source, size_t size_bytes) {
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(4 * kKeyStep));
  __m256i sum0 = _mm256_setzero_si256(), sum1 = sum0;
  __m256i keys = keys_from(0);
  const size_t whole = size_bytes / kLine * kLine;
  for (size_t at = 0; at < whole; at += kLine) {
    if (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(source + at + 2048), _MM_HINT_T0);
    sum0 = add_mixed(sum0, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at)), keys);
    keys = _mm256_add_epi64(keys, step);
    sum1 = add_mixed(sum1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + 32)), keys);
    keys = _mm256_add_epi64(keys, step);
  }
  return total(_mm256_add_epi64(sum0, sum1)) + sum_words(source + whole, size_bytes - whole, whole / 8);
}

// Streams as many groups of kPages pages as there are from `start` on, line by line from each page in turn. Adds their
// words to `sum` if kSum; returns where they end. `target` is a multiple of 32.
template <size_t kPages, bool kPrefetch, bool kSum>
__attribute__((target("avx2"))) size_t stream_pages(uint8_t* target, const uint8_t* source, size_t start,
                                                    size_t size_bytes, uint64_t* sum) {
  constexpr size_t kGroup = kPages * kPage;
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(4 * kKeyStep));
  const size_t end = start + (size_bytes - start) / kGroup * kGroup;
  __m256i sums[kPages], keys[kPages];
  for (size_t page = 0; page < kPages; ++page) sums[page] = _mm256_setzero_si256();
  for (size_t group = start; group < end; group += kGroup) {
    if (kSum) {
      for (size_t page = 0; page < kPages; ++page) keys[page] = keys_from((group + page * kPage) / 8);
    }
    for (size_t at = group; at < group + kPage; at += kLine) {
#pragma GCC unroll 4
      for (size_t page = 0; page < kPages; ++page) {
        const uint8_t* line = source + at + page * kPage;
        if (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(line + 512), _MM_HINT_NTA);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32));
        __m256i* out = reinterpret_cast<__m256i*>(target + at + page * kPage);
        _mm256_stream_si256(out, low);
        _mm256_stream_si256(out + 1, high);
        if (kSum) {
          sums[page] = add_mixed(sums[page], low, keys[page]);
          keys[page] = _mm256_add_epi64(keys[page], step);
          sums[page] = add_mixed(sums[page], high, keys[page]);
          keys[page] = _mm256_add_epi64(keys[page], step);
        }
      }
    }
  }
  if (kSum) {
    for (size_t page = 0; page < kPages; ++page) *sum += total(sums[page]);
  }
  return end;
}

template <bool kSum>
size_t stream(uint8_t* target, const uint8_t* source, size_t size_bytes, uint64_t* sum) {
  if (current_walk == kPlain || reinterpret_cast<uintptr_t>(target) % 32 != 0) return 0;
  size_t done = 0;
  if (current_walk == kInterleaved) done = stream_pages<4, false, kSum>(target, source, 0, size_bytes, sum);
  if (current_walk == kPrefetched) done = stream_pages<4, true, kSum>(target, source, 0, size_bytes, sum);
  return stream_pages<1, false, kSum>(target, source, done, size_bytes, sum);
}

// What was streamed is seen by others only after this.
void end_streaming() {
  if (current_walk != kPlain) _mm_sfence();
}

uint64_t sum_range(const uint8_t* source, size_t size_bytes) {
  if (current_walk == kStraight) return sum_words_avx2<false>(source, size_bytes);
  if (current_walk != kPlain) return sum_words_avx2<true>(source, size_bytes);
  return sum_words(source, size_bytes, 0);
}

#else

bool can_walk(int64_t walk) { return walk == kPlain; }

int64_t current_walk = kPlain;

template <bool kSum>
size_t stream(uint8_t*, const uint8_t*, size_t, uint64_t*) {
  return 0;
}

void end_streaming() {}

uint64_t sum_range(const uint8_t* source, size_t size_bytes) { return sum_words(source, size_bytes, 0); }

#endif

// Copies one range; returns its sum (0 unless kSum).
template <bool kSum>
uint64_t copy_range(uint8_t* target, const uint8_t* source, size_t size_bytes) {
  uint64_t sum = 0;
  const size_t done = stream<kSum>(target, source, size_bytes, &sum);
  const size_t rest = size_bytes - done;
  if (kSum) sum += done ? sum_words(source + done, rest, done / 8) : sum_range(source, rest);
  std::memcpy(target + done, source + done, rest);
  return kSum ? finish(sum, size_bytes) : 0;
}

}  // namespace

// copies: num_copies triples (source offset, target offset, size) in bytes. sums: num_copies, or null.
EXPORT void baton_copy(uint8_t* target, const uint8_t* source, const uint64_t* copies, int64_t num_copies,
                       uint64_t* sums) {
  for (int64_t i = 0; i < num_copies; ++i) {
    const uint64_t* copy = copies + 3 * i;
    if (sums) {
      sums[i] = copy_range<true>(target + copy[1], source + copy[0], copy[2]);
    } else {
      copy_range<false>(target + copy[1], source + copy[0], copy[2]);
    }
  }
  end_streaming();
}

// ranges: num_ranges pairs (offset, size) in bytes.
EXPORT void baton_checksums(const uint8_t* memory, const uint64_t* ranges, int64_t num_ranges, uint64_t* sums) {
  for (int64_t i = 0; i < num_ranges; ++i) {
    sums[i] = finish(sum_range(memory + ranges[2 * i], ranges[2 * i + 1]), ranges[2 * i + 1]);
  }
}

// From now on memory is walked this way. Returns 0, changing nothing, where it cannot be.
EXPORT int64_t baton_set_walk(int64_t walk) {
  if (!can_walk(walk)) return 0;
  current_walk = walk;
  return 1;
}

EXPORT int64_t baton_walk() { return current_walk; }
