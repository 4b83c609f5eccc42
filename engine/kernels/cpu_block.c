/* The decoder block's small operations: RMS norm, rotary embedding, activation(gate) * up. Each is a loop over rows or pieces
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
    int activation;
} gated_args;

/* `limit` where v is larger; a NaN stays. */
INLINE f32v at_most(f32v v, float limit) { return select_lanes(v > limit, splat(limit), v); }

/* silu, and the tanh form of gelu, which is x * sigmoid(2 z): tanh(z) = 2 sigmoid(2 z) - 1. */
INLINE f32v activate(f32v gate, f32v up, int activation) {
    if (activation == CLAMPED_SWIGLU) {
        gate = at_most(gate, 7.0f);
        up = -at_most(-at_most(up, 7.0f), 7.0f);
        return gate / (1.0f + exp_lanes(gate * -1.702f)) * (up + 1.0f);
    }
    f32v z = gate;
    if (activation == GELU_TANH) z = (gate + gate * gate * gate * 0.044715f) * 1.59576912160573f; /* sqrt(8 / pi) */
    return gate / (1.0f + exp_lanes(-z)) * up;
}

INLINE void gated(const gated_args *a, long first, long last, int activation, int type) {
    for (long row = first; row < last; row++) {
        long gates = row * 2 * a->n, ups = gates + a->n, to = row * a->n;
        for (long i = 0; i < a->n; i += LANES) {
            f32v gate = load(a->gate_up, gates + i, type), up = load(a->gate_up, ups + i, type);
            store(a->out, to + i, activate(gate, up, activation), type);
        }
    }
}

INLINE void gated_rows(const gated_args *a, long first, long last, int type) {
    if (a->activation == SILU)
        gated(a, first, last, SILU, type);
    else if (a->activation == GELU_TANH)
        gated(a, first, last, GELU_TANH, type);
    else
        gated(a, first, last, CLAMPED_SWIGLU, type);
}
BY_TYPE(gated_rows)

void tl_gated(const void *gate_up, void *out, long rows, long n, int activation, int type) {
    gated_args a = {gate_up, out, n, activation};
    tl_parallel(rows, rows_per_piece(4 * n), type == BF16 ? gated_rows_bf16 : gated_rows_f32, &a);
}
