/* Vectors, element types and exp for the CPU kernels, in GCC/Clang vector extensions: one source for AVX-512, AVX2 and
 * NEON. A vector is as wide as the machine's registers (compilers keep wider ones in memory) unless a file that needs
 * another width defines LANES. Counts are in elements unless they say bytes; all row lengths handed to the kernels are
 * multiples of 16.
 */
#ifndef TIERLINE_CPU_COMMON_H
#define TIERLINE_CPU_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* For code that is large and shared by many specialised copies of its callers. */
#define NOT_INLINE static __attribute__((noinline))

/* Keeps a vector that several operations use in a register: compilers would read it from memory for each. */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__) || defined(__i386__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v)
#endif

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

/* Element types, as the Python side numbers them. Constant at every call, so that branches on them vanish. */
enum { F32 = 0, BF16 = 1 };

INLINE long element_bytes(int type) { return type == BF16 ? 2 : 4; }

INLINE f32v splat(float value) { return value - (f32v){0}; }

INLINE f32v load(const void *base, long index, int type) {
    f32v out;
    if (type == BF16) {
        u16v half;
        memcpy(&half, (const uint16_t *)base + index, sizeof half);
        u32v wide = __builtin_convertvector(half, u32v) << 16;
        memcpy(&out, &wide, sizeof out);
    } else {
        memcpy(&out, (const float *)base + index, sizeof out);
    }
    return out;
}

/* bfloat16 by round to nearest even; a NaN stays one (rounding its bits up could turn it into a number). */
INLINE void store(void *base, long index, f32v value, int type) {
    if (type == BF16) {
        u32v bits;
        memcpy(&bits, &value, sizeof bits);
        u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        u32v is_nan = (u32v)((bits & 0x7fffffff) > 0x7f800000);
        rounded = (is_nan & 0x7fc0) | (~is_nan & rounded);
        u16v half = __builtin_convertvector(rounded, u16v);
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

INLINE float sum_lanes(f32v v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* yes[i] in the lanes where take[i] is -1, no[i] where it is 0. */
INLINE f32v select_lanes(i32v take, f32v yes, f32v no) {
    i32v bits, other;
    memcpy(&bits, &yes, sizeof bits);
    memcpy(&other, &no, sizeof other);
    bits = (take & bits) | (~take & other);
    memcpy(&yes, &bits, sizeof yes);
    return yes;
}

/* The larger of each pair of lanes; a NaN on either side wins, so that a row with one becomes NaN, as it must. */
INLINE f32v max_lanes(f32v best, f32v v) { return select_lanes((v > best) | (v != v), v, best); }

/* Adding 1.5 * 2^23 to a number below 2^22 in magnitude rounds it to an integer, to nearest even. */
#define ROUNDING 12582912.0f

INLINE i32v to_nearest(f32v v) { return __builtin_convertvector((v + ROUNDING) - ROUNDING, i32v); }

/* exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2 and a degree-6 Taylor polynomial (error < 2e-7).
 * x below -87 gives 0 or a subnormal, above 88 infinity; NaN stays NaN. */
INLINE f32v exp_lanes(f32v x) {
    f32v clamped = select_lanes(x < -104.0f, splat(-104.0f), x);
    clamped = select_lanes(x > 88.72f, splat(88.72f), clamped);
    clamped = select_lanes(x != x, splat(0), clamped);
    f32v n = (clamped * 1.44269504088896f + ROUNDING) - ROUNDING;
    f32v r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    f32v p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    /* 2^n in two factors, so that neither leaves the exponent's range. */
    i32v exponent = __builtin_convertvector(n, i32v);
    i32v first = exponent >> 1, second = exponent - first;
    i32v scale_bits = (first + 127) << 23;
    f32v scale;
    memcpy(&scale, &scale_bits, sizeof scale);
    p *= scale;
    scale_bits = (second + 127) << 23;
    memcpy(&scale, &scale_bits, sizeof scale);
    p *= scale;
    p = select_lanes(x > 88.72f, splat(INFINITY), p);
    return select_lanes(x != x, x, p);
}

#endif
