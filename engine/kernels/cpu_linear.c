/* y = x W^T with four- or eight-bit weights, for few rows of x.
 *
 * Weights: w = scale * u + minimum, u unsigned, one scale and minimum per block of 32 columns. Layout, four rows of W
 * (a quad) side by side so that one 64-byte vector serves four outputs:
 *   four bits:  [quads][blocks][4 rows][16 bytes], byte i = column i low, column i + 16 high
 *   eight bits: [quads][blocks][2 halves][4 rows][16 bytes]
 *   scales:     [quads][blocks][8] float16: four scales, four minima
 *
 * x is quantised per block of 32 to 16-bit integers, x = step * (256 h + l) with h and l signed bytes: finer than the
 * bfloat16 it usually comes from, and 32-bit sums of byte products are exact. Then, per block,
 *   y += scale * step * (256 sum(u h) + sum(u l)) + minimum * sum(x).
 */
#include "cpu_common.h"
#include "cpu_pool.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__F16C__) && !defined(TIERLINE_PORTABLE)
#define USE_VNNI 1
#include <immintrin.h>
#else
#define USE_VNNI 0
#endif

#define BLOCK 32
#define MAX_TILE 8

/* One block of x: the bytes h and l of 32 values, and what turns sums of products back into floats. */
typedef struct {
    int8_t high[BLOCK], low[BLOCK];
    float step, quarter_sum; /* a quarter of the block's sum: each of an output's four lanes adds one */
} x_block;

INLINE void quantise(const void *x, long at, x_block *out, int type) {
    f32x16 values[2] = {load(x, at, type), load(x, at + LANES, type)};
    float largest = 0, magnitudes[LANES];
    i32x16 sum = {0};
    f32x16 bounds = max_lanes(magnitude(values[0]), magnitude(values[1]));
    memcpy(magnitudes, &bounds, sizeof magnitudes);
    for (int i = 0; i < LANES; i++) largest = magnitudes[i] > largest || magnitudes[i] != magnitudes[i] ? magnitudes[i] : largest;
    if (!(largest <= 3.4028235e38f)) { /* integers cannot carry infinity or NaN: let the block's step do so */
        memset(out->high, 1, BLOCK);
        memset(out->low, 0, BLOCK);
        out->step = out->quarter_sum = NAN;
        return;
    }
    float step = largest / 32512.0f, inverse = largest > 1e-30f ? 1.0f / step : 0.0f;
    for (int half = 0; half < 2; half++) {
        i32x16 value = to_nearest(values[half] * inverse), high = (value + 128) >> 8;
        i8x16 high8 = __builtin_convertvector(high, i8x16), low8 = __builtin_convertvector(value - high * 256, i8x16);
        memcpy(out->high + LANES * half, &high8, sizeof high8);
        memcpy(out->low + LANES * half, &low8, sizeof low8);
        sum += value;
    }
    int total = 0; /* of the rounded values: y is then exactly w times them */
    for (int i = 0; i < LANES; i++) total += sum[i];
    out->step = step;
    out->quarter_sum = (float)total * step * 0.25f;
}

#if USE_VNNI
typedef __m512 quad_sum;

/* Sums of u times one half (16 columns) of x, added to the high and low sums. */
#define DOT_HALF(u, half)                                                                                              \
    do {                                                                                                               \
        __m512i h = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(xb->high + 16 * (half))));               \
        __m512i l = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(xb->low + 16 * (half))));                \
        high = _mm512_dpbusd_epi32(high, u, h);                                                                        \
        low = _mm512_dpbusd_epi32(low, u, l);                                                                          \
    } while (0)

INLINE void quad_rows(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, int rows, int bits,
                      float sums[MAX_TILE][4]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i first4 = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i last4 = _mm512_add_epi32(first4, _mm512_set1_epi32(4));
    __m512 acc[MAX_TILE], acc_min[MAX_TILE];
    for (int m = 0; m < rows; m++) acc[m] = acc_min[m] = _mm512_setzero_ps();
    for (long b = 0; b < blocks; b++) {
        __m512i first, second;
        if (bits == 4) {
            __m512i packed = _mm512_loadu_si512(w + b * 64);
            first = _mm512_and_si512(packed, nibble);
            second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
        } else {
            first = _mm512_loadu_si512(w + b * 128);
            second = _mm512_loadu_si512(w + b * 128 + 64);
        }
        __m512 both = _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + b * 8))));
        __m512 scale = _mm512_permutexvar_ps(first4, both), minimum = _mm512_permutexvar_ps(last4, both);
        for (int m = 0; m < rows; m++) {
            const x_block *xb = x + m * blocks + b;
            __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
            DOT_HALF(first, 0);
            DOT_HALF(second, 1);
            __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            acc[m] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(xb->step)), acc[m]);
            acc_min[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(xb->quarter_sum), acc_min[m]);
        }
    }
    for (int m = 0; m < rows; m++) {
        float lanes[16];
        _mm512_storeu_ps(lanes, _mm512_add_ps(acc[m], acc_min[m]));
        for (int r = 0; r < 4; r++)
            sums[m][r] = (lanes[4 * r] + lanes[4 * r + 1]) + (lanes[4 * r + 2] + lanes[4 * r + 3]);
    }
}
#else
INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    float out;
    if (exponent == 0) {
        out = ldexpf((float)fraction, -24);
        return sign ? -out : out;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* The same sums without the byte-product instruction, in loops that compilers vectorise. */
INLINE void quad_rows(const uint8_t *w, const uint16_t *scales, const x_block *x, long blocks, int rows, int bits,
                      float sums[MAX_TILE][4]) {
    for (int m = 0; m < rows; m++)
        for (int r = 0; r < 4; r++) sums[m][r] = 0;
    for (long b = 0; b < blocks; b++) {
        for (int r = 0; r < 4; r++) {
            int16_t u[BLOCK];
            for (int i = 0; i < 16; i++) {
                if (bits == 4) {
                    uint8_t packed = w[b * 64 + r * 16 + i];
                    u[i] = packed & 15;
                    u[i + 16] = packed >> 4;
                } else {
                    u[i] = w[b * 128 + r * 16 + i];
                    u[i + 16] = w[b * 128 + 64 + r * 16 + i];
                }
            }
            float scale = half_to_float(scales[b * 8 + r]), minimum = half_to_float(scales[b * 8 + 4 + r]);
            for (int m = 0; m < rows; m++) {
                const x_block *xb = x + m * blocks + b;
                int32_t high = 0, low = 0;
                for (int i = 0; i < BLOCK; i++) high += u[i] * (int16_t)xb->high[i];
                for (int i = 0; i < BLOCK; i++) low += u[i] * (int16_t)xb->low[i];
                sums[m][r] += (float)(high * 256 + low) * (scale * xb->step) + minimum * (4 * xb->quarter_sum);
            }
        }
    }
}
#endif

typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    const void *x;
    const float *bias; /* may be null */
    x_block *scratch;
    void *y;
    long m, n, blocks;
} linear_args;

INLINE void quantise_blocks(const linear_args *a, long first, long last, int type) {
    for (long b = first; b < last; b++) quantise(a->x, b * BLOCK, a->scratch + b, type);
}

INLINE void quads(const linear_args *a, long first, long last, int rows, long first_row, int bits, int y_type) {
    long quad_bytes = a->blocks * (bits == 4 ? 64 : 128);
    for (long quad = first; quad < last; quad++) {
        float sums[MAX_TILE][4];
        quad_rows(a->w + quad * quad_bytes, a->scales + quad * a->blocks * 8, a->scratch + first_row * a->blocks,
                  a->blocks, rows, bits, sums);
        for (int m = 0; m < rows; m++)
            for (int r = 0; r < 4; r++)
                store_one(a->y, (first_row + m) * a->n + quad * 4 + r,
                          sums[m][r] + (a->bias ? a->bias[quad * 4 + r] : 0), y_type);
    }
}

/* All rows of x for the quads first..last-1: tiles of 8 rows, then what is left in one piece. */
INLINE void multiply(const linear_args *a, long first, long last, int bits, int y_type) {
    for (long row = 0; row < a->m; row += MAX_TILE) {
        long left = a->m - row;
#define TILE(size) case size: quads(a, first, last, size, row, bits, y_type); break
        switch (left < MAX_TILE ? left : MAX_TILE) {
            TILE(1); TILE(2); TILE(3); TILE(4); TILE(5); TILE(6); TILE(7); TILE(8);
        }
    }
}

static void quantise_f32(const void *a, long first, long last) { quantise_blocks(a, first, last, F32); }
static void quantise_bf16(const void *a, long first, long last) { quantise_blocks(a, first, last, BF16); }
static void multiply4_f32(const void *a, long first, long last) { multiply(a, first, last, 4, F32); }
static void multiply4_bf16(const void *a, long first, long last) { multiply(a, first, last, 4, BF16); }
static void multiply8_f32(const void *a, long first, long last) { multiply(a, first, last, 8, F32); }
static void multiply8_bf16(const void *a, long first, long last) { multiply(a, first, last, 8, BF16); }

/* x: [m, k] contiguous; y: [m, n]; bias: float [n] or null; scratch: m * k / 32 blocks of tl_x_block_bytes(). n is a
 * multiple of 4, k of 32. */
void tl_packed_linear(const uint8_t *w, const uint16_t *scales, const void *x, const float *bias, void *scratch, void *y,
                      long m, long n, long k, int bits, int x_type, int y_type) {
    static const tl_task tasks[2][2] = {{multiply4_f32, multiply4_bf16}, {multiply8_f32, multiply8_bf16}};
    linear_args a = {w, scales, x, bias, scratch, y, m, n, k / BLOCK};
    tl_parallel(m * a.blocks, 128, x_type == BF16 ? quantise_bf16 : quantise_f32, &a);
    tl_parallel(n / 4, 1 + 512 / a.blocks, tasks[bits == 8][y_type == BF16], &a);
}

long tl_x_block_bytes(void) { return sizeof(x_block); }
