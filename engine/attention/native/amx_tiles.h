// The instructions of AMX that linear_amx.h is made of, as inline assembly: so the compiler neither keeps stores to
// memory behind a tile's load, which its own intrinsics allow, nor needs to know of AMX. All eight tiles are 16 rows of
// 64 bytes. With BATON_AMX_EMULATED they are plain C++, to the letter of Intel's manual, for machines that have none.
#ifndef BATON_AMX_TILES_H
#define BATON_AMX_TILES_H

#include <cstddef>
#include <cstdint>

namespace baton {

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16;
constexpr int TILE_ROW_BYTES = 64;

}  // namespace baton

#ifndef BATON_AMX_EMULATED

namespace baton {

// Of the calling thread, until tiles_end. In between no other code may run that uses tiles.
inline __attribute__((always_inline)) void tiles_begin() {
  struct {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof config == 64, "the layout that the processor reads");
  for (int tile = 0; tile < NUM_TILES; ++tile) {
    config.row_bytes[tile] = TILE_ROW_BYTES;
    config.rows[tile] = TILE_ROWS;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline __attribute__((always_inline)) void tiles_end() { asm volatile("tilerelease"); }

}  // namespace baton

// Numbers of tiles are literals.
#define BATON_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define BATON_TILE_LOAD(tile, data, stride_bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(data)), "r"((size_t)(stride_bytes)) : "memory")
#define BATON_TILE_STORE(tile, data, stride_bytes) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(data)), "r"((size_t)(stride_bytes)) : "memory")
// sums += a b, for rows of bfloat16 pairs: sums[m][n] += a[m][k] . b[k][n].
#define BATON_TILE_MULTIPLY(sums, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

#else

namespace baton {

struct EmulatedTiles {
  static constexpr int COLUMNS = TILE_ROW_BYTES / 4;
  uint32_t words[NUM_TILES][TILE_ROWS][COLUMNS];

  static EmulatedTiles& of_thread() {
    static thread_local EmulatedTiles tiles;
    return tiles;
  }

  static float to_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
  static uint32_t to_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }
  // Subnormal numbers count as zero, as operands and as results.
  static float flushed(float value) {
    const uint32_t bits = to_bits(value);
    return bits & 0x7f800000u ? value : to_float(bits & 0x80000000u);
  }
  static float multiply_add(float sum, uint32_t a_bits, uint32_t b_bits) {
    return flushed(__builtin_fmaf(flushed(to_float(a_bits)), flushed(to_float(b_bits)), flushed(sum)));
  }

  void zero(int tile) { __builtin_memset(words[tile], 0, sizeof words[tile]); }
  void load(int tile, const void* data, size_t stride_bytes) {
    for (int row = 0; row < TILE_ROWS; ++row)
      __builtin_memcpy(words[tile][row], static_cast<const char*>(data) + row * stride_bytes, TILE_ROW_BYTES);
  }
  void store(int tile, void* data, size_t stride_bytes) const {
    for (int row = 0; row < TILE_ROWS; ++row)
      __builtin_memcpy(static_cast<char*>(data) + row * stride_bytes, words[tile][row], TILE_ROW_BYTES);
  }
  // The first and the second elements of the pairs are summed apart, and only their total is added to what there was.
  void multiply(int sums, int a, int b) {
    for (int m = 0; m < TILE_ROWS; ++m) {
      for (int n = 0; n < COLUMNS; ++n) {
        float first = 0, second = 0;
        for (int k = 0; k < COLUMNS; ++k) {
          const uint32_t a_pair = words[a][m][k], b_pair = words[b][k][n];
          first = multiply_add(first, a_pair << 16, b_pair << 16);
          second = multiply_add(second, a_pair & 0xffff0000u, b_pair & 0xffff0000u);
        }
        const float total = flushed(first + second);
        words[sums][m][n] = to_bits(flushed(flushed(to_float(words[sums][m][n])) + total));
      }
    }
  }
};

inline void tiles_begin() {
  for (int tile = 0; tile < NUM_TILES; ++tile) EmulatedTiles::of_thread().zero(tile);
}
inline void tiles_end() {}

}  // namespace baton

#define BATON_TILE_ZERO(tile) EmulatedTiles::of_thread().zero(tile)
#define BATON_TILE_LOAD(tile, data, stride_bytes) EmulatedTiles::of_thread().load(tile, data, stride_bytes)
#define BATON_TILE_STORE(tile, data, stride_bytes) EmulatedTiles::of_thread().store(tile, data, stride_bytes)
#define BATON_TILE_MULTIPLY(sums, a, b) EmulatedTiles::of_thread().multiply(sums, a, b)

#endif

#endif
