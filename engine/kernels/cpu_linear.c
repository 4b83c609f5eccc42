/* y = x W^T with four- or eight-bit weights, for any number of rows of x.
 *
 * Weights: w = scale * u + minimum, u unsigned, one scale and minimum per block of 32 columns. Layout, in tiles of 16 rows
 * of W so that the lanes of a vector are outputs and no sum across lanes is needed; a vector of 64 bytes holds four columns
 * of each row, [16 rows][4 columns]:
 *   four bits:  [tiles][blocks][4 vectors], vector j has columns 4j..4j+3 low, 4j+16..4j+19 high
 *   eight bits: [tiles][blocks][8 vectors], vector j has columns 4j..4j+3
 *   scales:     [tiles][blocks][32] float16: 16 scales, 16 minima
 *
 * x is quantised per block of 32 to 16-bit integers, x = step * (256 h + l) with h and l signed bytes: finer than the
 * bfloat16 it may come from, and 32-bit sums of byte products are exact. Then, per block,
 *   y += scale * step * (256 sum(u h) + sum(u l)) + minimum * sum(x),
 * block after block, whatever the number of rows: a row's result does not depend on the others. Without the instruction
 * for byte products, AVX2's for pairs of 16-bit integers multiplies the whole x; elsewhere floats do. All give the same.
 */
#define LANES 16 /* the rows of a tile */
#include "cpu_common.h"
#include "cpu_kernels.h"
#include "cpu_pool.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__F16C__) && !defined(TIERLINE_PORTABLE)
#define USE_VNNI 1
#else
#define USE_VNNI 0
#endif
#if !USE_VNNI && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(TIERLINE_PORTABLE)
#define USE_AVX2 1
#else
#define USE_AVX2 0
#endif
#if USE_VNNI || USE_AVX2
#include <immintrin.h>
#endif

#define BLOCK 32
/* Rows of x that share a block of unpacked weights: as many as the vector registers hold sums for. */
#define GROUP (USE_VNNI ? 8 : USE_AVX2 ? 6 : 4)
#define BLOCKS_AHEAD 8
/* Weights that stay in the second-level cache while all rows of x pass over them. */
#define CACHED_BYTES (128 << 10)
#define UNROLL _Pragma("GCC unroll 16")

typedef int8_t i8v __attribute__((vector_size(LANES)));

/* One block of a row of x, and what turns sums of products back into floats. */
typedef struct {
#if USE_VNNI
    int8_t high[BLOCK], low[BLOCK];
#elif USE_AVX2
    int16_t values[BLOCK]; /* of each four columns, the second and the third change places */
#else
    float values[BLOCK]; /* integers */
#endif
    float step, sum;
} x_block;

/* The bits of the largest magnitude in the block at `at`: magnitudes order as integers do, infinity and then NaN last.
 * And the block in integers, written to `out`; returns their sum. */
#if USE_AVX2 /* eight at a time: compilers go through vectors of sixteen one by one */
INLINE __m256 load_eight(const void *x, long at, int type) {
    if (type != BF16) return _mm256_loadu_ps((const float *)x + at);
    __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

INLINE uint32_t largest_magnitude(const void *x, long at, int type) {
    __m256i largest = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7fffffff);
    UNROLL for (int i = 0; i < BLOCK; i += 8)
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(load_eight(x, at + i, type)), magnitude));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE int32_t put_integers(const void *x, long at, int type, float inverse, x_block *out) {
    __m256i sum = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < BLOCK; i += 16) {
        __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(load_eight(x, at + i, type), _mm256_set1_ps(inverse)));
        __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(load_eight(x, at + i + 8, type), _mm256_set1_ps(inverse)));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
        __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
        memcpy(out->values + i, &words, sizeof words);
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
#else
#if USE_VNNI
INLINE uint32_t largest_lane(u32v v) { return _mm512_reduce_max_epu32((__m512i)v); }
INLINE int32_t add_lanes(i32v v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
INLINE uint32_t largest_lane(u32v v) {
    uint32_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}
INLINE int32_t add_lanes(i32v v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
#endif

INLINE uint32_t largest_magnitude(const void *x, long at, int type) {
    f32v values[2] = {load(x, at, type), load(x, at + LANES, type)};
    u32v bits[2];
    memcpy(bits, values, sizeof bits);
    bits[0] &= 0x7fffffff;
    bits[1] &= 0x7fffffff;
    u32v take = (u32v)(bits[0] > bits[1]);
    return largest_lane((take & bits[0]) | (~take & bits[1]));
}

INLINE int32_t put_integers(const void *x, long at, int type, float inverse, x_block *out) {
    i32v sum = {0};
    for (int half = 0; half < 2; half++) {
        i32v value = to_nearest(load(x, at + LANES * half, type) * inverse);
#if USE_VNNI
        i32v high = (value + 128) >> 8;
        i8v high8 = __builtin_convertvector(high, i8v), low8 = __builtin_convertvector(value - high * 256, i8v);
        memcpy(out->high + LANES * half, &high8, sizeof high8);
        memcpy(out->low + LANES * half, &low8, sizeof low8);
#else
        store(out->values, LANES * half, __builtin_convertvector(value, f32v), F32);
#endif
        sum += value;
    }
    return add_lanes(sum);
}
#endif

INLINE void quantise(const void *x, long at, x_block *out, int type) {
    uint32_t bits = largest_magnitude(x, at, type);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    if (bits >= 0x7f800000) { /* integers cannot carry infinity or NaN: let the block's step do so */
        memset(out, 0, sizeof *out);
        out->step = out->sum = NAN;
        return;
    }
    float step = largest / 32512.0f, inverse = largest > 1e-30f ? 1.0f / step : 0.0f;
    out->step = step;
    out->sum = (float)put_integers(x, at, type, inverse, out) * step; /* of the rounded values: y is exactly w times them */
}

/* The sums of 16 outputs for `rows` rows of x, whose blocks lie side by side: [blocks][rows]. */
#if USE_VNNI
INLINE __m512i four_columns(const int8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

INLINE void tile_sums(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, int rows, int bits,
                      f32v *sums) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[GROUP];
    UNROLL for (int m = 0; m < rows; m++) acc[m] = _mm512_setzero_ps();
    for (long b = 0; b < blocks; b++, w += 64 * bits, scales += 32, x += rows) {
        if (rows == 1) { /* as fast as memory: ask for weights before they are needed */
            UNROLL for (int j = 0; j < bits; j++) __builtin_prefetch(w + 64 * (bits * BLOCKS_AHEAD + j));
            __builtin_prefetch(scales + 32 * BLOCKS_AHEAD);
        }
        __m512i u[8];
        UNROLL for (int j = 0; j < 4; j++) {
            u[j] = _mm512_loadu_si512(w + 64 * j);
            if (bits == 4) {
                u[j + 4] = _mm512_and_si512(_mm512_srli_epi16(u[j], 4), nibble);
                u[j] = _mm512_and_si512(u[j], nibble);
            } else {
                u[j + 4] = _mm512_loadu_si512(w + 64 * (j + 4));
            }
        }
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
        __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + 16)));
        /* Rows in the inner loop: a sum is a chain of products, and the processor does not look far enough ahead to find
         * the next row's behind it. */
        __m512i high[GROUP], low[GROUP];
        UNROLL for (int m = 0; m < rows; m++) high[m] = low[m] = _mm512_setzero_si512();
        UNROLL for (int j = 0; j < 8; j++) {
            UNROLL for (int m = 0; m < rows; m++) {
                high[m] = _mm512_dpbusd_epi32(high[m], u[j], four_columns(x[m].high + 4 * j));
                low[m] = _mm512_dpbusd_epi32(low[m], u[j], four_columns(x[m].low + 4 * j));
            }
        }
        UNROLL for (int m = 0; m < rows; m++) {
            __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]));
            acc[m] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(x[m].step)), acc[m]);
            acc[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[m].sum), acc[m]);
        }
    }
    UNROLL for (int m = 0; m < rows; m++) _mm512_storeu_ps((float *)(sums + m), acc[m]);
}
#elif USE_AVX2
INLINE __m256i two_columns(const int16_t *x) {
    int32_t words;
    memcpy(&words, x, sizeof words);
    return _mm256_set1_epi32(words);
}

/* Weights as 16-bit words: a mask and shifts leave columns 0 and 2 of four in one vector, 1 and 3 in the next. */
INLINE void tile_sums(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, int rows, int bits,
                      f32v *sums) {
    const __m256i mask = _mm256_set1_epi16(bits == 4 ? 15 : 255);
    __m256 acc[GROUP][2];
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (long b = 0; b < blocks; b++, w += 64 * bits, scales += 32, x += rows) {
        if (rows == 1) { /* as fast as memory: ask for weights before they are needed */
            UNROLL for (int j = 0; j < bits; j++) __builtin_prefetch(w + 64 * (bits * BLOCKS_AHEAD + j));
            __builtin_prefetch(scales + 32 * BLOCKS_AHEAD);
        }
        __m256i dots[GROUP][2]; /* 8 rows of W each */
        UNROLL for (int m = 0; m < rows; m++) dots[m][0] = dots[m][1] = _mm256_setzero_si256();
        UNROLL for (int j = 0; j < bits; j++) {
            __m256i bytes[2];
            UNROLL for (int half = 0; half < 2; half++)
                bytes[half] = _mm256_loadu_si256((const __m256i *)(w + 64 * j + 32 * half));
            UNROLL for (int shift = 0; shift < 16; shift += bits) {
                int at = 4 * j + shift / 8 * 2 + shift % 8 * 4; /* where x has these columns */
                __m256i u[2];
                UNROLL for (int half = 0; half < 2; half++)
                    u[half] = _mm256_and_si256(_mm256_srli_epi16(bytes[half], shift), mask);
                UNROLL for (int m = 0; m < rows; m++) {
                    __m256i pair = two_columns(x[m].values + at);
                    UNROLL for (int half = 0; half < 2; half++) {
                        dots[m][half] = _mm256_add_epi32(dots[m][half], _mm256_madd_epi16(u[half], pair));
                        /* Compilers like to add many products later, and run out of registers. */
                        __asm__("" : "+x"(dots[m][half]));
                    }
                }
            }
        }
        UNROLL for (int half = 0; half < 2; half++) {
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 8 * half)));
            __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 16 + 8 * half)));
            UNROLL for (int m = 0; m < rows; m++) {
                __m256 step = _mm256_mul_ps(scale, _mm256_set1_ps(x[m].step));
                acc[m][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[m][half]), step, acc[m][half]);
                acc[m][half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x[m].sum), acc[m][half]);
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) memcpy(sums + m, acc[m], sizeof acc[m]);
}
#else
/* float16 to float32: the exponent is moved by a product, which is exact for subnormals too. */
INLINE f32v from_halves(const uint16_t *halves) {
    u16v h;
    memcpy(&h, halves, sizeof h);
    u32v wide = __builtin_convertvector(h, u32v), bits = (wide & 0x7fff) << 13;
    f32v value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    u32v special = (u32v)((wide & 0x7c00) == 0x7c00); /* infinity and NaN keep the largest exponent */
    bits |= (special & 0x7f800000) | (wide & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Vectors as wide as the machine's: in registers, where compilers keep wider ones in memory. */
#ifdef __AVX__
#define PART 8
#else
#define PART 4
#endif
#define PARTS (LANES / PART)
typedef float part __attribute__((vector_size(4 * PART)));
typedef int32_t int_part __attribute__((vector_size(4 * PART)));
typedef uint32_t uint_part __attribute__((vector_size(4 * PART)));

/* The same sums without the byte-product instruction, on floats that hold integers: exact up to 2^24, which four-bit
 * weights stay below; eight-bit ones round as any float32 sum does. */
INLINE void tile_sums(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, int rows, int bits,
                      f32v *sums) {
    for (int m = 0; m < rows; m++) sums[m] = (f32v){0};
    for (long b = 0; b < blocks; b++, w += 64 * bits, scales += 32, x += rows) {
        part u[BLOCK][PARTS];
        for (int j = 0; j < bits; j++) {
            UNROLL for (int p = 0; p < PARTS; p++) {
                uint_part columns; /* lane r: four columns of row r, the first in the lowest byte */
                memcpy(&columns, w + 64 * j + 4 * PART * p, sizeof columns);
                UNROLL for (int c = 0; c < 4; c++) {
                    uint_part byte = columns >> (8 * c);
                    u[4 * j + c][p] = __builtin_convertvector((int_part)(byte & (bits == 4 ? 15 : 255)), part);
                    if (bits == 4) u[4 * j + c + 16][p] = __builtin_convertvector((int_part)(byte >> 4 & 15), part);
                }
            }
        }
        part dots[GROUP][PARTS];
        UNROLL for (int m = 0; m < rows; m++) {
            UNROLL for (int p = 0; p < PARTS; p++) dots[m][p] = (part){0};
        }
        for (int i = 0; i < BLOCK; i++) {
            UNROLL for (int m = 0; m < rows; m++) {
                UNROLL for (int p = 0; p < PARTS; p++) dots[m][p] += u[i][p] * x[m].values[i];
            }
        }
        f32v scale = from_halves(scales), minimum = from_halves(scales + 16);
        for (int m = 0; m < rows; m++) {
            f32v dot;
            memcpy(&dot, dots[m], sizeof dot);
            sums[m] += dot * (scale * x[m].step) + minimum * x[m].sum;
        }
    }
}
#endif

#define SUMS(rows, bits)                                                                                               \
    static void sums_##bits##_##rows(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks,          \
                                     f32v *sums) {                                                                   \
        tile_sums(w, scales, x, blocks, rows, bits, sums);                                                             \
    }
#define FOUR_ROWS(make, bits) make(1, bits) make(2, bits) make(3, bits) make(4, bits)
#if USE_VNNI
#define FOR_ALL_ROWS(make, bits) FOUR_ROWS(make, bits) make(5, bits) make(6, bits) make(7, bits) make(8, bits)
#elif USE_AVX2
#define FOR_ALL_ROWS(make, bits) FOUR_ROWS(make, bits) make(5, bits) make(6, bits)
#else
#define FOR_ALL_ROWS(make, bits) FOUR_ROWS(make, bits)
#endif
FOR_ALL_ROWS(SUMS, 4)
FOR_ALL_ROWS(SUMS, 8)

typedef void (*sums_function)(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, f32v *sums);
#define NAME(rows, bits) sums_##bits##_##rows,
static const sums_function SUMS_OF[2][GROUP] = {{FOR_ALL_ROWS(NAME, 4)}, {FOR_ALL_ROWS(NAME, 8)}};

typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    const void *x;
    const float *bias; /* may be null */
    x_block *scratch;  /* groups of rows one after the other, each [blocks][rows] */
    void *y;
    long m, n, blocks;
    int bits, y_type;
} linear_args;

INLINE long smaller(long a, long b) { return a < b ? a : b; }

INLINE void quantise_blocks(const linear_args *a, long first, long last, int type) {
    for (long i = first; i < last; i++) {
        long row = i / a->blocks, b = i % a->blocks, start = row / GROUP * GROUP;
        quantise(a->x, i * BLOCK, a->scratch + start * a->blocks + b * smaller(GROUP, a->m - start) + row - start, type);
    }
}

/* 16 outputs, or what is left of them, for the rows of x from `first` on. */
static void multiply_tile(const linear_args *a, long tile, long first) {
    long rows = smaller(GROUP, a->m - first), outputs = smaller(LANES, a->n - tile * LANES);
    f32v sums[GROUP], bias = {0};
    SUMS_OF[a->bits == 8][rows - 1](a->w + tile * a->blocks * 64 * a->bits, a->scales + tile * a->blocks * 32,
                                    a->scratch + first * a->blocks, a->blocks, sums);
    if (a->bias) memcpy(&bias, a->bias + tile * LANES, outputs * sizeof(float));
    for (long m = 0; m < rows; m++) {
        long at = (first + m) * a->n + tile * LANES;
        if (outputs == LANES)
            store(a->y, at, sums[m] + bias, a->y_type);
        else
            for (long i = 0; i < outputs; i++) store_one(a->y, at + i, (sums[m] + bias)[i], a->y_type);
    }
}

/* All rows of x for the tiles first..last-1: a group of rows stays in the first-level cache while as many weights as the
 * second level holds pass by. */
static void multiply(const void *context, long first, long last) {
    const linear_args *a = context;
    long cached = 1 + CACHED_BYTES / (a->blocks * 64 * (a->bits + 1));
    for (long start = first; start < last; start += cached)
        for (long row = 0; row < a->m; row += GROUP)
            for (long tile = start; tile < smaller(last, start + cached); tile++) multiply_tile(a, tile, row);
}

static void quantise_f32(const void *a, long first, long last) { quantise_blocks(a, first, last, F32); }
static void quantise_bf16(const void *a, long first, long last) { quantise_blocks(a, first, last, BF16); }

void tl_packed_linear(const uint8_t *w, const uint16_t *scales, const void *x, const float *bias, void *scratch, void *y,
                      long m, long n, long k, int bits, int x_type, int y_type) {
    linear_args a = {w, scales, x, bias, scratch, y, m, n, k / BLOCK, bits, y_type};
    tl_parallel(m * a.blocks, 128, x_type == BF16 ? quantise_bf16 : quantise_f32, &a);
    tl_parallel((n + LANES - 1) / LANES, 1 + 128 / (a.blocks * m + 1), multiply, &a);
}

long tl_x_block_bytes(void) { return sizeof(x_block); }
