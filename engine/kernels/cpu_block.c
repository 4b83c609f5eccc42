/* The decoder block's small operations: RMS norm, rotary embedding, silu(gate) * up. */
#include "cpu_common.h"

INLINE void rms_norm(const void *x, void *residual, const float *weight, void *out, long rows, long n, float eps,
                     int type) {
    long row_bytes = n * element_bytes(type);
#pragma omp parallel for if (rows * n > 65536)
    for (long row = 0; row < rows; row++) {
        const char *from = (const char *)x + row * row_bytes;
        char *sum_row = residual ? (char *)residual + row * row_bytes : 0;
        char *to = (char *)out + row * row_bytes;
        f32x16 squares = {0};
        for (long i = 0; i < n; i += LANES) {
            f32x16 v = load(from, i, type);
            if (residual) {
                store(sum_row, i, v + load(sum_row, i, type), type);
                v = load(sum_row, i, type);
            }
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)n + eps);
        if (residual) from = sum_row;
        for (long i = 0; i < n; i += LANES)
            store(to, i, load(from, i, type) * scale * load(weight, i, F32), type);
    }
}

/* x, residual, out: [rows, n], contiguous. residual may be null; otherwise residual += x comes first. */
void tl_rms_norm(const void *x, void *residual, const float *weight, void *out, long rows, long n, float eps, int type) {
    if (type == BF16)
        rms_norm(x, residual, weight, out, rows, n, eps, BF16);
    else
        rms_norm(x, residual, weight, out, rows, n, eps, F32);
}

INLINE void rotate(void *x, long token_stride, const float *cos_sin, const int64_t *positions, long tokens, long heads,
                   long head_dim, long rotary_dim, int type) {
    long half = rotary_dim / 2;
#pragma omp parallel for if (tokens * heads * rotary_dim > 65536)
    for (long t = 0; t < tokens; t++) {
        const float *cosines = cos_sin + positions[t] * rotary_dim, *sines = cosines + half;
        for (long h = 0; h < heads; h++) {
            long at = t * token_stride + h * head_dim;
            for (long i = 0; i < half; i += LANES) {
                f32x16 a = load(x, at + i, type), b = load(x, at + half + i, type);
                f32x16 c = load(cosines, i, F32), s = load(sines, i, F32);
                store(x, at + i, a * c - b * s, type);
                store(x, at + half + i, b * c + a * s, type);
            }
        }
    }
}

/* In place. token_stride: elements between tokens; rotary_dim a multiple of 32. */
void tl_rotary(void *x, long token_stride, const float *cos_sin, const int64_t *positions, long tokens, long heads,
               long head_dim, long rotary_dim, int type) {
    if (type == BF16)
        rotate(x, token_stride, cos_sin, positions, tokens, heads, head_dim, rotary_dim, BF16);
    else
        rotate(x, token_stride, cos_sin, positions, tokens, heads, head_dim, rotary_dim, F32);
}

INLINE void silu_mul(const void *gate_up, void *out, long rows, long n, int type) {
    long pieces = n / LANES;
#pragma omp parallel for if (rows * n > 8192)
    for (long piece = 0; piece < rows * pieces; piece++) {
        long row = piece / pieces, i = piece % pieces * LANES;
        f32x16 gate = load(gate_up, row * 2 * n + i, type), up = load(gate_up, row * 2 * n + n + i, type);
        store(out, row * n + i, gate / (1.0f + exp16(-gate)) * up, type);
    }
}

/* gate_up: [rows, 2 n], gate first; out: [rows, n]. */
void tl_silu_mul(const void *gate_up, void *out, long rows, long n, int type) {
    if (type == BF16)
        silu_mul(gate_up, out, rows, n, BF16);
    else
        silu_mul(gate_up, out, rows, n, F32);
}
