/* The decoder block's small operations: RMS norm, rotary embedding, silu(gate) * up. Each is a loop over rows or pieces
 * of rows, shared out by the pool, in one copy per element type. */
#include "cpu_common.h"
#include "cpu_kernels.h"
#include "cpu_pool.h"

/* Elements below which another thread is not worth waking. */
#define MIN_ELEMENTS 16384

#define BY_TYPE(name)                                                                                       \
    static void name##_f32(const void *context, long first, long last) { name(context, first, last, F32); }           \
    static void name##_bf16(const void *context, long first, long last) { name(context, first, last, BF16); }

static long rows_per_piece(long elements_per_row) { return (MIN_ELEMENTS + elements_per_row - 1) / elements_per_row; }

typedef struct {
    const void *x;
    float *residual; /* may be null */
    const float *weight;
    void *out;
    long n;
    float eps;
} norm_args;

INLINE void rms_norm(const norm_args *a, long first, long last, int type) {
    long n = a->n, row_bytes = n * element_bytes(type);
    for (long row = first; row < last; row++) {
        const char *from = (const char *)a->x + row * row_bytes;
        float *sum_row = a->residual ? a->residual + row * n : 0;
        char *to = (char *)a->out + row * row_bytes;
        f32v squares = {0};
        for (long i = 0; i < n; i += LANES) {
            f32v v = load(from, i, type);
            if (sum_row) {
                v += load(sum_row, i, F32);
                store(sum_row, i, v, F32);
            }
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)n + a->eps);
        for (long i = 0; i < n; i += LANES) {
            f32v v = sum_row ? load(sum_row, i, F32) : load(from, i, type);
            store(to, i, v * scale * load(a->weight, i, F32), type);
        }
    }
}
BY_TYPE(rms_norm)

void tl_rms_norm(const void *x, float *residual, const float *weight, void *out, long rows, long n, float eps, int type) {
    norm_args a = {x, residual, weight, out, n, eps};
    tl_parallel(rows, rows_per_piece(n), type == BF16 ? rms_norm_bf16 : rms_norm_f32, &a);
}

typedef struct {
    void *x;
    const float *cos_sin;
    const int64_t *positions;
    long token_stride, heads, head_dim, rotary_dim;
} rotary_args;

INLINE void rotate(const rotary_args *a, long first, long last, int type) {
    long half = a->rotary_dim / 2;
    for (long t = first; t < last; t++) {
        const float *cosines = a->cos_sin + a->positions[t] * a->rotary_dim, *sines = cosines + half;
        for (long h = 0; h < a->heads; h++) {
            long at = t * a->token_stride + h * a->head_dim;
            for (long i = 0; i < half; i += LANES) {
                f32v x = load(a->x, at + i, type), y = load(a->x, at + half + i, type);
                f32v c = load(cosines, i, F32), s = load(sines, i, F32);
                store(a->x, at + i, x * c - y * s, type);
                store(a->x, at + half + i, y * c + x * s, type);
            }
        }
    }
}
BY_TYPE(rotate)

void tl_rotary(void *x, long token_stride, const float *cos_sin, const int64_t *positions, long tokens, long heads,
               long head_dim, long rotary_dim, int type) {
    rotary_args a = {x, cos_sin, positions, token_stride, heads, head_dim, rotary_dim};
    tl_parallel(tokens, rows_per_piece(heads * rotary_dim), type == BF16 ? rotate_bf16 : rotate_f32, &a);
}

typedef struct {
    const void *gate_up;
    void *out;
    long n;
} silu_args;

INLINE void silu_mul(const silu_args *a, long first, long last, int type) {
    for (long row = first; row < last; row++) {
        long gates = row * 2 * a->n, ups = gates + a->n, to = row * a->n;
        for (long i = 0; i < a->n; i += LANES) {
            f32v gate = load(a->gate_up, gates + i, type), up = load(a->gate_up, ups + i, type);
            store(a->out, to + i, gate / (1.0f + exp_lanes(-gate)) * up, type);
        }
    }
}
BY_TYPE(silu_mul)

void tl_silu_mul(const void *gate_up, void *out, long rows, long n, int type) {
    silu_args a = {gate_up, out, n};
    tl_parallel(rows, rows_per_piece(4 * n), type == BF16 ? silu_mul_bf16 : silu_mul_f32, &a);
}
