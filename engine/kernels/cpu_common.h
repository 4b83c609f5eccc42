/* Vectors, element types and exp for the CPU kernels, in GCC/Clang vector extensions: one source for AVX-512, AVX2 and
 * NEON, the compiler splits a 16-wide vector where the machine's are narrower. Counts are in elements unless they say
 * bytes; all row lengths handed to the kernels are multiples of 16.
 */
#ifndef TIERLINE_CPU_COMMON_H
#define TIERLINE_CPU_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* For code that is large and shared by many specialised copies of its callers. */
#define NOT_INLINE static __attribute__((noinline))
#define LANES 16

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

/* Element types, as the Python side numbers them. Constant at every call, so that branches on them vanish. */
enum { F32 = 0, BF16 = 1 };

INLINE long element_bytes(int type) { return type == BF16 ? 2 : 4; }

INLINE f32x16 splat(float value) { return value - (f32x16){0}; }

INLINE f32x16 load(const void *base, long index, int type) {
    f32x16 out;
    if (type == BF16) {
        u16x16 half;
        memcpy(&half, (const uint16_t *)base + index, sizeof half);
        u32x16 wide = __builtin_convertvector(half, u32x16) << 16;
        memcpy(&out, &wide, sizeof out);
    } else {
        memcpy(&out, (const float *)base + index, sizeof out);
    }
    return out;
}

/* bfloat16 by round to nearest even; a NaN stays one (rounding its bits up could turn it into a number). */
INLINE void store(void *base, long index, f32x16 value, int type) {
    if (type == BF16) {
        u32x16 bits;
        memcpy(&bits, &value, sizeof bits);
        u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        u32x16 is_nan = (u32x16)((bits & 0x7fffffff) > 0x7f800000);
        rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
        u16x16 half = __builtin_convertvector(rounded, u16x16);
        memcpy((uint16_t *)base + index, &half, sizeof half);
    } else {
        memcpy((float *)base + index, &value, sizeof value);
    }
}

INLINE void store_one(void *base, long index, float value, int type) {
    if (type == BF16) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        ((uint16_t *)base)[index] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
    } else {
        ((float *)base)[index] = value;
    }
}

INLINE float sum_lanes(f32x16 v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The larger of each pair of lanes; a NaN on either side wins, so that a row with one becomes NaN, as it must. */
INLINE f32x16 max_lanes(f32x16 best, f32x16 v) {
    i32x16 take = (v > best) | (v != v), bits, other;
    memcpy(&bits, &v, sizeof bits);
    memcpy(&other, &best, sizeof other);
    bits = (take & bits) | (~take & other);
    memcpy(&v, &bits, sizeof v);
    return v;
}

INLINE f32x16 magnitude(f32x16 v) {
    u32x16 bits;
    memcpy(&bits, &v, sizeof bits);
    bits &= 0x7fffffff;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Adding 1.5 * 2^23 to a number below 2^22 in magnitude rounds it to an integer, to nearest even. */
#define ROUNDING 12582912.0f

INLINE i32x16 to_nearest(f32x16 v) { return __builtin_convertvector((v + ROUNDING) - ROUNDING, i32x16); }

/* exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2 and a degree-6 Taylor polynomial (error < 2e-7).
 * x below -87 gives 0 or a subnormal, above 88 infinity; NaN stays NaN. */
INLINE f32x16 exp16(f32x16 x) {
    i32x16 is_nan = x != x;
    i32x16 low = x < -104.0f, high = x > 88.72f;
    f32x16 clamped = x;
    i32x16 bits, fixed;
    memcpy(&bits, &clamped, sizeof bits);
    f32x16 lo = splat(-104.0f), hi = splat(88.72f);
    memcpy(&fixed, &lo, sizeof fixed);
    bits = (low & fixed) | (~low & bits);
    memcpy(&fixed, &hi, sizeof fixed);
    bits = (high & fixed) | (~high & bits);
    bits = ~is_nan & bits;
    memcpy(&clamped, &bits, sizeof clamped);
    f32x16 n = (clamped * 1.44269504088896f + ROUNDING) - ROUNDING;
    f32x16 r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    /* 2^n in two factors, so that neither leaves the exponent's range. */
    i32x16 exponent = __builtin_convertvector(n, i32x16);
    i32x16 first = exponent >> 1, second = exponent - first;
    i32x16 scale_bits = (first + 127) << 23;
    f32x16 scale;
    memcpy(&scale, &scale_bits, sizeof scale);
    p *= scale;
    scale_bits = (second + 127) << 23;
    memcpy(&scale, &scale_bits, sizeof scale);
    p *= scale;
    memcpy(&bits, &p, sizeof bits);
    i32x16 nan_bits, inf_bits;
    memcpy(&nan_bits, &x, sizeof nan_bits);
    f32x16 infinity = splat(INFINITY);
    memcpy(&inf_bits, &infinity, sizeof inf_bits);
    bits = (high & inf_bits) | (~high & bits);
    bits = (is_nan & nan_bits) | (~is_nan & bits);
    memcpy(&p, &bits, sizeof p);
    return p;
}

#endif
