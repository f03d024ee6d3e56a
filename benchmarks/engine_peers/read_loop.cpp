// Two plain loops: what memory gives to a program that does nothing but read it once from front to back, and what the
// vector unit gives to one that does nothing but multiply.

#include <sys/mman.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

typedef uint64_t Vector __attribute__((vector_size(64)));

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kStride = 4 * sizeof(Vector);
constexpr size_t kPrefetchAhead = 2048;

#if defined(__AVX512F__)
typedef __m512 Floats;
constexpr int kFloatSums = 16;
Floats fill(float value) { return _mm512_set1_ps(value); }
Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__FMA__)
typedef __m256 Floats;
constexpr int kFloatSums = 12;  // of sixteen registers
Floats fill(float value) { return _mm256_set1_ps(value); }
Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif

}  // namespace

extern "C" {

// Memory of `size_bytes` (a multiple of 256), on huge pages where the system has them, and present. Null if there is not
// enough.
void* read_loop_allocate(size_t size_bytes) {
  const size_t mapped = size_bytes + kHugePage + kPrefetchAhead;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) & ~(kHugePage - 1);
  void* data = reinterpret_cast<void*>(aligned);
  madvise(data, size_bytes, MADV_HUGEPAGE);
  memset(data, 1, size_bytes);
  return data;
}

// Reads `size_bytes` (a multiple of 256) and returns a checksum, so that nothing can be left out.
uint64_t read_loop_run(const void* data, size_t size_bytes) {
  const char* bytes = static_cast<const char*>(data);
  Vector sums[4] = {};
  for (size_t offset = 0; offset < size_bytes; offset += kStride) {
    for (size_t part = 0; part < 4; ++part) {
      const char* here = bytes + offset + part * sizeof(Vector);
      __builtin_prefetch(here + kPrefetchAhead);
      sums[part] ^= *reinterpret_cast<const Vector*>(here);
    }
  }
  const Vector sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  uint64_t result = 0;
  for (int lane = 0; lane < 8; ++lane) result ^= sum[lane];
  return result;
}

// Both loops below multiply and add in registers, `num_rounds` times on each of enough sums to wait for none, and return
// the products made; 0 where the machine has something faster than either. Which of them is the faster differs: some
// processors take twice as long for a dot product of bfloat16 pairs as for a multiplication of floats.

uint64_t multiply_pairs_run(uint64_t num_rounds) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  constexpr int kSums = 16;
  __m512 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(float(i));
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
    asm volatile("" : "+v"(a), "+v"(b));  // neither known beforehand nor the same for the compiler
  }
  for (int i = 0; i < kSums; ++i) asm volatile("" : : "v"(sums[i]));
  return num_rounds * kSums * 32;
#else
  (void)num_rounds;
  return 0;
#endif
}

uint64_t multiply_floats_run(uint64_t num_rounds) {
#if defined(__FMA__) && !defined(__AMX_BF16__)
  Floats sums[kFloatSums];
  for (int i = 0; i < kFloatSums; ++i) sums[i] = fill(float(i));
  Floats a = fill(1), b = a;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    for (int i = 0; i < kFloatSums; ++i) sums[i] = multiply_add(a, b, sums[i]);
    asm volatile("" : "+v"(a), "+v"(b));
  }
  for (int i = 0; i < kFloatSums; ++i) asm volatile("" : : "v"(sums[i]));
  return num_rounds * kFloatSums * (sizeof(Floats) / sizeof(float));
#else
  (void)num_rounds;
  return 0;
#endif
}

}  // extern "C"
