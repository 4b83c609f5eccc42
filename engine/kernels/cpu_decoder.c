/* All blocks of a decoder in one call, for steps in which every matrix is packed and every token attended by
 * tl_paged_attention; no mixtures of experts. The calls are those that `Decoder` makes one by one, in float32, so the results are the same bits;
 * but a step of one token is some three hundred of them, and calling each from Python takes as long as computing.
 */
#include "cpu_common.h"
#include "cpu_kernels.h"

typedef struct {
    const uint8_t *w;
    const uint16_t *scales;
    const float *bias; /* may be null */
    long out_features, in_features, bits;
} matrix;

typedef struct {
    matrix qkv, attention_output, gate_up, down;
    const float *attention_norm, *mlp_norm;
    const float *post_attention_norm, *post_mlp_norm; /* of what is added to the sum, or null */
    const float *q_norm, *k_norm; /* [head_dim], or null */
    const float *cos_sin;         /* [positions, rotary_dim], or null: no position embedding */
    const float *sinks;           /* [heads], or null */
    void *k_cache, *v_cache;
    attention_args *attention; /* of the layers with the same window */
    long rotary_dim;
} layer;

typedef struct {
    const layer *layers;
    float *residual;          /* [tokens, hidden]: the embeddings; on return the sum of all blocks but the last product */
    float *delta;             /* [tokens, hidden]: on return the last block's last product */
    float *x, *qkv, *attended, *gate_up, *activated; /* each [tokens, its width] */
    void *blocks;             /* quantised activations: of the widest input */
    const int64_t *positions, *slots;
    long num_layers, hidden, intermediate, activation;
    float eps;
} blocks_args;

static void multiply(const matrix *m, const float *x, const blocks_args *a, float *y, long tokens) {
    tl_packed_linear(m->w, m->scales, x, m->bias, a->blocks, y, tokens, m->out_features, m->in_features, (int)m->bits, F32,
                     F32);
}

static void attend(const blocks_args *a, const layer *l, long tokens) {
    attention_args *attention = l->attention;
    long head_dim = attention->head_dim, q_size = attention->heads * head_dim, kv_size = attention->kv_heads * head_dim;
    long row = q_size + 2 * kv_size;
    float *q = a->qkv, *k = q + q_size, *v = k + kv_size;
    for (long t = 0; l->q_norm && t < tokens; t++) {
        tl_rms_norm(q + t * row, 0, l->q_norm, q + t * row, attention->heads, head_dim, a->eps, F32);
        tl_rms_norm(k + t * row, 0, l->k_norm, k + t * row, attention->kv_heads, head_dim, a->eps, F32);
    }
    /* The heads of K lie behind those of Q. */
    if (l->cos_sin)
        tl_rotary(q, row, l->cos_sin, a->positions, tokens, attention->heads + attention->kv_heads, head_dim, l->rotary_dim,
                  F32);
    tl_kv_write(k, v, row * sizeof(float), row * sizeof(float), l->k_cache, l->v_cache, a->slots, tokens,
                kv_size * sizeof(float));
    attention->q = q;
    attention->out = a->attended;
    attention->k_cache = l->k_cache;
    attention->v_cache = l->v_cache;
    attention->sinks = l->sinks;
    attention->token_stride = row;
    attention->out_stride = q_size;
    tl_paged_attention(attention, F32);
}

static void norm_delta(const blocks_args *a, const float *weight, long tokens) {
    if (weight) tl_rms_norm(a->delta, 0, weight, a->delta, tokens, a->hidden, a->eps, F32);
}

void tl_blocks(const blocks_args *a, long tokens) {
    for (long i = 0; i < a->num_layers; i++) {
        const layer *l = a->layers + i;
        const float *x = i ? a->delta : a->residual;
        tl_rms_norm(x, i ? a->residual : 0, l->attention_norm, a->x, tokens, a->hidden, a->eps, F32);
        multiply(&l->qkv, a->x, a, a->qkv, tokens);
        attend(a, l, tokens);
        multiply(&l->attention_output, a->attended, a, a->delta, tokens);
        norm_delta(a, l->post_attention_norm, tokens);
        tl_rms_norm(a->delta, a->residual, l->mlp_norm, a->x, tokens, a->hidden, a->eps, F32);
        multiply(&l->gate_up, a->x, a, a->gate_up, tokens);
        tl_gated(a->gate_up, a->activated, tokens, a->intermediate, (int)a->activation, F32);
        multiply(&l->down, a->activated, a, a->delta, tokens);
        norm_delta(a, l->post_mlp_norm, tokens);
    }
}
