// Copies lists of byte ranges and sums them in the same pass. Plain C interface, called through ctypes
// (kv_transfer/native_library.py). The sum is defined in kv_transfer/checksum.py.
//
// A KV block is a few hundred KiB. The C library copies such pieces through the cache (it turns to streaming stores
// only far above that size), which reads every target line before it overwrites it. Streaming stores avoid that, but
// one straight line of them is held up by the page it walks; four interleaved pages keep memory busy.

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
constexpr size_t kGroup = 4 * kPage;

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

#if defined(__x86_64__)

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

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

__attribute__((target("avx2"))) uint64_t sum_words_avx2(const uint8_t* source, size_t size_bytes) {
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(4 * kKeyStep));
  __m256i sum0 = _mm256_setzero_si256(), sum1 = sum0;
  __m256i keys = keys_from(0);
  const size_t whole = size_bytes / 64 * 64;
  for (size_t at = 0; at < whole; at += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(source + at + 2048), _MM_HINT_T0);
    sum0 = add_mixed(sum0, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at)), keys);
    keys = _mm256_add_epi64(keys, step);
    sum1 = add_mixed(sum1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at + 32)), keys);
    keys = _mm256_add_epi64(keys, step);
  }
  return total(_mm256_add_epi64(sum0, sum1)) + sum_words(source + whole, size_bytes - whole, whole / 8);
}

// Whole groups of four pages; returns the sum of their words (0 unless kSum).
template <bool kSum>
__attribute__((target("avx2"))) uint64_t stream_groups(uint8_t* target, const uint8_t* source, size_t num_groups) {
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(4 * kKeyStep));
  __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (size_t group = 0; group < num_groups; ++group) {
    const uint8_t* from = source + group * kGroup;
    uint8_t* to = target + group * kGroup;
    __m256i keys[4];
    for (size_t page = 0; page < 4; ++page) keys[page] = keys_from((group * kGroup + page * kPage) / 8);
    for (size_t at = 0; at < kPage; at += 64) {
#pragma GCC unroll 4
      for (size_t page = 0; page < 4; ++page) {
        const uint8_t* line = from + page * kPage + at;
        _mm_prefetch(reinterpret_cast<const char*>(line + 512), _MM_HINT_NTA);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32));
        uint8_t* out = to + page * kPage + at;
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 32), high);
        if (kSum) {
          sums[page] = add_mixed(sums[page], low, keys[page]);
          keys[page] = _mm256_add_epi64(keys[page], step);
          sums[page] = add_mixed(sums[page], high, keys[page]);
          keys[page] = _mm256_add_epi64(keys[page], step);
        }
      }
    }
  }
  _mm_sfence();
  if (!kSum) return 0;
  return total(_mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3])));
}

#else
bool has_avx2() { return false; }
#endif

uint64_t checksum(const uint8_t* source, size_t size_bytes) {
#if defined(__x86_64__)
  if (has_avx2()) return finish(sum_words_avx2(source, size_bytes), size_bytes);
#endif
  return finish(sum_words(source, size_bytes, 0), size_bytes);
}

// Copies one range; stores its sum if `sum` is not null.
void copy_range(uint8_t* target, const uint8_t* source, size_t size_bytes, uint64_t* sum) {
#if defined(__x86_64__)
  if (has_avx2() && size_bytes >= kGroup && reinterpret_cast<uintptr_t>(target) % 32 == 0) {
    const size_t num_groups = size_bytes / kGroup;
    const size_t done = num_groups * kGroup;
    const size_t rest = size_bytes - done;
    const uint64_t streamed = sum ? stream_groups<true>(target, source, num_groups)
                                  : stream_groups<false>(target, source, num_groups);
    std::memcpy(target + done, source + done, rest);
    if (sum) *sum = finish(streamed + sum_words(source + done, rest, done / 8), size_bytes);
    return;
  }
#endif
  if (sum) *sum = checksum(source, size_bytes);
  std::memcpy(target, source, size_bytes);
}

}  // namespace

// copies: num_copies triples (source offset, target offset, size) in bytes. sums: num_copies, or null.
EXPORT void baton_copy(uint8_t* target, const uint8_t* source, const uint64_t* copies, int64_t num_copies,
                       uint64_t* sums) {
  for (int64_t i = 0; i < num_copies; ++i) {
    const uint64_t* copy = copies + 3 * i;
    copy_range(target + copy[1], source + copy[0], copy[2], sums ? sums + i : nullptr);
  }
}

// ranges: num_ranges pairs (offset, size) in bytes.
EXPORT void baton_checksums(const uint8_t* memory, const uint64_t* ranges, int64_t num_ranges, uint64_t* sums) {
  for (int64_t i = 0; i < num_ranges; ++i) sums[i] = checksum(memory + ranges[2 * i], ranges[2 * i + 1]);
}
