/* Paged attention for single query tokens, read straight from the pages, and the K/V write before it.
 *
 * A token's keys are cut into chunks of fixed size; one work item is (token, kv head, chunk) and handles all query heads
 * that share the kv head. Chunks are joined by their maxima and sums as in FlashDecoding. The cut depends on the token
 * alone, so its result does not depend on what else is in the batch.
 */
#include "cpu_common.h"

#define CHUNK 256
#define MAX_HEAD_DIM 256
#define HEADS_AT_ONCE 4

typedef struct {
    const void *q;              /* [tokens, heads, head_dim], token_stride apart */
    const void *k_cache;        /* [blocks, block_size, kv_heads, head_dim] of this layer */
    const void *v_cache;
    void *out;                  /* [tokens, heads, head_dim] */
    const int32_t *block_tables; /* [rows, table_width] */
    const int32_t *token_rows;  /* [tokens], the row of each token */
    const int32_t *token_keys;  /* [tokens], keys a token sees */
    float *partials;            /* [tokens, heads, max_chunks, head_dim + 2]: weighted values, maximum, sum */
    long token_stride, out_stride, table_width, block_size, heads, kv_heads, head_dim, max_chunks;
    float scale;
} attention_args;

/* Attend `count` heads (from `head`) of one token over keys first..last-1. Writes the result, or with several chunks
 * its unnormalised form, to the partials. */
INLINE void attend(const attention_args *a, long token, long head, int count, long chunk, long head_dim, int type) {
    long keys = a->token_keys[token], first = chunk * CHUNK;
    long last = first + CHUNK < keys ? first + CHUNK : keys, length = last - first;
    long kv_head = head / (a->heads / a->kv_heads), key_stride = a->kv_heads * head_dim;
    const int32_t *table = a->block_tables + (long)a->token_rows[token] * a->table_width;
    float scores[HEADS_AT_ONCE][CHUNK] __attribute__((aligned(64)));
    f32x16 acc[HEADS_AT_ONCE][MAX_HEAD_DIM / LANES];
    float maxima[HEADS_AT_ONCE], sums[HEADS_AT_ONCE];
    long vectors = head_dim / LANES;

    for (int h = 0; h < count; h++) {
        for (long i = 0; i < vectors; i++)
            acc[h][i] = load(a->q, token * a->token_stride + (head + h) * head_dim + i * LANES, type) * a->scale;
    }
    for (long key = first; key < last;) {
        long page = table[key / a->block_size], offset = key % a->block_size;
        long stop = key + a->block_size - offset < last ? key + a->block_size - offset : last;
        long at = (page * a->block_size + offset) * key_stride + kv_head * head_dim;
        for (; key < stop; key++, at += key_stride) {
            f32x16 dots[HEADS_AT_ONCE];
            for (int h = 0; h < count; h++) dots[h] = (f32x16){0};
            for (long i = 0; i < vectors; i++) {
                f32x16 k = load(a->k_cache, at + i * LANES, type);
                for (int h = 0; h < count; h++) dots[h] += acc[h][i] * k;
            }
            for (int h = 0; h < count; h++) scores[h][key - first] = sum_lanes(dots[h]);
        }
    }
    long padded = (length + LANES - 1) / LANES * LANES;
    for (int h = 0; h < count; h++) {
        float maximum = scores[h][0];
        for (long i = 1; i < length; i++) {
            float s = scores[h][i];
            maximum = s > maximum || s != s ? s : maximum; /* a NaN score makes the row NaN, as it must */
        }
        for (long i = length; i < padded; i++) scores[h][i] = -INFINITY;
        f32x16 sum = {0};
        for (long i = 0; i < padded; i += LANES) {
            f32x16 p = exp16(load(scores[h], i, F32) - maximum);
            store(scores[h], i, p, F32);
            sum += p;
        }
        maxima[h] = maximum;
        sums[h] = sum_lanes(sum);
        for (long i = 0; i < vectors; i++) acc[h][i] = (f32x16){0};
    }
    for (long key = first; key < last;) {
        long page = table[key / a->block_size], offset = key % a->block_size;
        long stop = key + a->block_size - offset < last ? key + a->block_size - offset : last;
        long at = (page * a->block_size + offset) * key_stride + kv_head * head_dim;
        for (; key < stop; key++, at += key_stride) {
            for (long i = 0; i < vectors; i++) {
                f32x16 v = load(a->v_cache, at + i * LANES, type);
                for (int h = 0; h < count; h++) acc[h][i] += scores[h][key - first] * v;
            }
        }
    }
    for (int h = 0; h < count; h++) {
        if (keys <= CHUNK) {
            for (long i = 0; i < vectors; i++)
                store(a->out, token * a->out_stride + (head + h) * head_dim + i * LANES, acc[h][i] / sums[h], type);
        } else {
            float *partial = a->partials + ((token * a->heads + head + h) * a->max_chunks + chunk) * (head_dim + 2);
            for (long i = 0; i < vectors; i++) store(partial, i * LANES, acc[h][i], F32);
            partial[head_dim] = maxima[h];
            partial[head_dim + 1] = sums[h];
        }
    }
}

/* All heads of one kv head: HEADS_AT_ONCE at a time, each count its own unrolled copy. */
INLINE void attend_group(const attention_args *a, long token, long kv_head, long chunk, long head_dim, int type) {
    long group = a->heads / a->kv_heads;
    for (long done = 0; done < group; done += HEADS_AT_ONCE) {
        long head = kv_head * group + done, left = group - done;
        if (left >= 4)
            attend(a, token, head, 4, chunk, head_dim, type);
        else if (left == 3)
            attend(a, token, head, 3, chunk, head_dim, type);
        else if (left == 2)
            attend(a, token, head, 2, chunk, head_dim, type);
        else
            attend(a, token, head, 1, chunk, head_dim, type);
    }
}

INLINE void join_chunks(const attention_args *a, long token, long head, int type) {
    long head_dim = a->head_dim, chunks = (a->token_keys[token] + CHUNK - 1) / CHUNK;
    const float *partial = a->partials + (token * a->heads + head) * a->max_chunks * (head_dim + 2);
    float maximum = partial[head_dim], sum = 0;
    for (long c = 1; c < chunks; c++) {
        float m = partial[c * (head_dim + 2) + head_dim];
        maximum = m > maximum || m != m ? m : maximum;
    }
    f32x16 acc[MAX_HEAD_DIM / LANES];
    for (long i = 0; i < head_dim / LANES; i++) acc[i] = (f32x16){0};
    for (long c = 0; c < chunks; c++, partial += head_dim + 2) {
        float weight = expf(partial[head_dim] - maximum);
        sum += weight * partial[head_dim + 1];
        for (long i = 0; i < head_dim / LANES; i++) acc[i] += weight * load(partial, i * LANES, F32);
    }
    for (long i = 0; i < head_dim / LANES; i++)
        store(a->out, token * a->out_stride + head * head_dim + i * LANES, acc[i] / sum, type);
}

INLINE void attend_all(const attention_args *a, const int32_t *items, long num_items, long tokens, int type) {
    int several = a->max_chunks > 1;
#pragma omp parallel if (num_items > 1)
    {
#pragma omp for schedule(static, 1)
        for (long n = 0; n < num_items * a->kv_heads; n++) {
            const int32_t *item = items + n / a->kv_heads * 2; /* token, chunk */
            long kv_head = n % a->kv_heads;
            if (a->head_dim == 64)
                attend_group(a, item[0], kv_head, item[1], 64, type);
            else if (a->head_dim == 128)
                attend_group(a, item[0], kv_head, item[1], 128, type);
            else
                attend_group(a, item[0], kv_head, item[1], a->head_dim, type);
        }
        if (several) {
#pragma omp for
            for (long n = 0; n < tokens * a->heads; n++)
                if (a->token_keys[n / a->heads] > CHUNK) join_chunks(a, n / a->heads, n % a->heads, type);
        }
    }
}

/* items: [num_items, 2], (token, chunk) for every chunk of every token. head_dim: a multiple of 16, at most 256. */
void tl_paged_attention(const attention_args *args, const int32_t *items, long num_items, long tokens, int type) {
    if (type == BF16)
        attend_all(args, items, num_items, tokens, BF16);
    else
        attend_all(args, items, num_items, tokens, F32);
}

/* Copy K and V of all tokens to their slots. Strides in bytes; kv_bytes: one token's keys. */
void tl_kv_write(const char *k, const char *v, long k_stride, long v_stride, char *k_cache, char *v_cache,
                 const int64_t *slots, long tokens, long kv_bytes) {
#pragma omp parallel for if (tokens * kv_bytes > 65536)
    for (long t = 0; t < tokens; t++) {
        memcpy(k_cache + slots[t] * kv_bytes, k + t * k_stride, kv_bytes);
        memcpy(v_cache + slots[t] * kv_bytes, v + t * v_stride, kv_bytes);
    }
}
