/* The kernels that Python calls, one by one or, through tl_blocks, all of a step's at once. `type`: of activations and the
 * KV cache, as cpu_common.h numbers them. Matrices are contiguous unless a stride says otherwise.
 */
#ifndef TIERLINE_CPU_KERNELS_H
#define TIERLINE_CPU_KERNELS_H

#include <stdint.h>

/* cpu_block.c. x, residual, out: [rows, n]. residual, float32, may be null; otherwise residual += x comes first. out may
 * be x. */
void tl_rms_norm(const void *x, float *residual, const float *weight, void *out, long rows, long n, float eps, int type);

/* x: [tokens, heads, head_dim], in place. token_stride: elements between tokens; rotary_dim: a multiple of 32. */
void tl_rotary(void *x, long token_stride, const float *cos_sin, const int64_t *positions, long tokens, long heads,
               long head_dim, long rotary_dim, int type);

/* As the Python side numbers them; see `Activation` in engine/models/spec.py. */
enum { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

/* gate_up: [rows, 2 n], gate first; out: [rows, n]. */
void tl_gated(const void *gate_up, void *out, long rows, long n, int activation, int type);

/* cpu_linear.c. x: [m, k]; y: [m, n]; bias: float [n] or null; scratch: m * k / 32 blocks of tl_x_block_bytes(). k is a
 * multiple of 32; a last tile of fewer than 16 rows of W is padded. */
void tl_packed_linear(const uint8_t *w, const uint16_t *scales, const void *x, const float *bias, void *scratch, void *y,
                      long m, long n, long k, int bits, int x_type, int y_type);
long tl_x_block_bytes(void);

/* cpu_attention.c. */
typedef struct {
    const void *q;              /* [tokens, heads, head_dim], tokens token_stride apart */
    const void *k_cache;        /* [blocks, block_size, kv_heads, head_dim] of this layer */
    const void *v_cache;
    void *out;                  /* [tokens, heads, head_dim] */
    const int32_t *block_tables; /* [rows, table_width] */
    const int32_t *token_rows;  /* [tokens], the row of each token */
    const int32_t *token_first; /* [tokens], the first key a token sees: 0 without a window */
    const int32_t *token_end;   /* [tokens], the key after the last it sees */
    const float *sinks;         /* [heads], a score per head that has no value, or null */
    float *states;              /* [any, heads, head_dim + 2], of tokens with several chunks */
    const int64_t *token_states; /* [tokens], the first state of each such token: it has one per chunk, or one */
    const int32_t *items;       /* [num_items, 3]: token, 1, chunk; or the first of several tokens of a row, how many, -1 */
    const int32_t *joins;       /* [num_joins]: the tokens with several chunks that are items of their own */
    long token_stride, out_stride, table_width, block_size, heads, kv_heads, head_dim, num_items, num_joins;
    float scale;
} attention_args;

/* head_dim: a multiple of 16, at most 256. */
void tl_paged_attention(const attention_args *args, int type);

/* Copy K and V of all tokens to their slots. Strides in bytes; kv_bytes: one token's keys. */
void tl_kv_write(const void *k, const void *v, long k_stride, long v_stride, void *k_cache, void *v_cache,
                 const int64_t *slots, long tokens, long kv_bytes);

/* cpu_draw.c. scaled: [rows, vocab], at most 0, minus infinity for what is not to be drawn; uniform: [rows], in [0, 1);
 * top_k: 0 is off; top_p: 1 is off. tokens: [rows], -1 where there was no memory. */
void tl_draw(const float *scaled, const double *uniform, const double *top_p, const int64_t *top_k, int64_t *tokens,
             long rows, long vocab);

#endif
