/* Paged attention for single query tokens, read straight from the pages, and the K/V write before it.
 *
 * A token's keys are cut into chunks of fixed size; one work item is (token, kv head, chunk) and handles all query heads
 * that share the kv head. Chunks are joined by their maxima and sums as in FlashDecoding. The cut depends on the token
 * alone, so its result does not depend on what else is in the batch.
 */
#include "cpu_common.h"
#include "cpu_pool.h"

#define CHUNK 256
#define MAX_HEAD_DIM 256
#define HEADS_AT_ONCE 4
#define KEYS_AHEAD 16
/* Loops over a constant number of vectors or heads: their arrays must become registers, at any optimisation level. */
#define UNROLL _Pragma("GCC unroll 8")

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

/* Lane i of the result: the sum of rows[i]'s lanes. A tree of 15 pairwise steps, each halving what is left to add. */
NOT_INLINE f32x16 sum_rows(const f32x16 rows[LANES]) {
#if !defined(__AVX512F__) || defined(__clang__)
    float columns[LANES][LANES], sums[LANES]; /* narrower vectors: leave the transposition to memory */
    f32x16 out;
    memcpy(columns, rows, sizeof columns);
    for (int i = 0; i < LANES; i++) {
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += columns[i][j];
        sums[i] = sum;
    }
    memcpy(&out, sums, sizeof out);
    return out;
#else
#define PAIR(a, b, low, high) (__builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high))
    const i32x16 low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i32x16 low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const i32x16 low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i32x16 low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    f32x16 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = PAIR(rows[i], rows[i + 8], low8, low8 + 8); /* lanes 0-7: row i, 8-15: i + 8 */
    for (int i = 0; i < 4; i++) b[i] = PAIR(a[i], a[i + 4], low4, low4 + 4);
    for (int i = 0; i < 2; i++) c[i] = PAIR(b[i], b[i + 2], low2, low2 + 2);
    return PAIR(c[0], c[1], low1, low1 + 1);
#endif
}

INLINE void prefetch(const void *base, long index, long count, int type) {
    const char *at = (const char *)base + index * element_bytes(type);
    for (long i = 0; i < count * element_bytes(type); i += 64) __builtin_prefetch(at + i);
}

/* scores[0..padded) to exp(score - maximum), in place; `maxima` holds the maximum spread over lanes. Returns the sum of
 * the results and the maximum. */
NOT_INLINE float exponentiate(float *scores, long padded, const f32x16 *maxima, float *maximum) {
    float lanes[LANES], largest;
    store(lanes, 0, *maxima, F32);
    largest = lanes[0];
    for (int i = 1; i < LANES; i++) largest = lanes[i] > largest || lanes[i] != lanes[i] ? lanes[i] : largest;
    f32x16 sum = {0};
    for (long i = 0; i < padded; i += LANES) {
        f32x16 p = exp16(load(scores, i, F32) - largest);
        store(scores, i, p, F32);
        sum += p;
    }
    *maximum = largest;
    return sum_lanes(sum);
}

/* Attend `count` heads (from `head`) of one token over the keys of one chunk. Writes the result, or with several chunks
 * its unnormalised form, to the partials. */
INLINE void attend(const attention_args *a, long token, long head, int count, long chunk, long head_dim, int type) {
    long keys = a->token_keys[token], first = chunk * CHUNK;
    long length = keys - first < CHUNK ? keys - first : CHUNK, padded = (length + LANES - 1) / LANES * LANES;
    long kv_head = head / (a->heads / a->kv_heads), key_stride = a->kv_heads * head_dim, vectors = head_dim / LANES;
    const int32_t *table = a->block_tables + (long)a->token_rows[token] * a->table_width;
    long offsets[CHUNK];
    float scores[HEADS_AT_ONCE][CHUNK] __attribute__((aligned(64)));
    f32x16 acc[HEADS_AT_ONCE][MAX_HEAD_DIM / LANES], maxima[HEADS_AT_ONCE];
    float maximum[HEADS_AT_ONCE], sums[HEADS_AT_ONCE];

    for (long key = 0; key < length;) {
        long page = (first + key) / a->block_size, slot = (first + key) % a->block_size;
        long at = (table[page] * a->block_size + slot) * key_stride + kv_head * head_dim;
        for (; slot < a->block_size && key < length; slot++, key++, at += key_stride) offsets[key] = at;
    }
    UNROLL for (int h = 0; h < count; h++) {
        maxima[h] = splat(-INFINITY);
        UNROLL for (long i = 0; i < vectors; i++)
            acc[h][i] = load(a->q, token * a->token_stride + (head + h) * head_dim + i * LANES, type) * a->scale;
    }
    for (long start = 0; start < length; start += LANES) {
        f32x16 dots[HEADS_AT_ONCE][LANES];
        long stop = length - start < LANES ? length - start : LANES;
        for (long j = 0; j < stop; j++) {
            /* Pages come from memory, in strides that the processor does not foresee: ask for keys ahead, and for the
             * values of these keys. */
            long ahead = start + j + KEYS_AHEAD < length ? start + j + KEYS_AHEAD : length - 1;
            prefetch(a->k_cache, offsets[ahead], head_dim, type);
            prefetch(a->v_cache, offsets[start + j], head_dim, type);
            f32x16 dot[HEADS_AT_ONCE];
            UNROLL for (int h = 0; h < count; h++) dot[h] = (f32x16){0};
            UNROLL for (long i = 0; i < vectors; i++) {
                f32x16 k = load(a->k_cache, offsets[start + j] + i * LANES, type);
                UNROLL for (int h = 0; h < count; h++) dot[h] += acc[h][i] * k;
            }
            UNROLL for (int h = 0; h < count; h++) dots[h][j] = dot[h];
        }
        UNROLL for (int h = 0; h < count; h++) {
            for (long j = stop; j < LANES; j++) dots[h][j] = (f32x16){0};
            f32x16 row = sum_rows(dots[h]);
            for (long j = stop; j < LANES; j++) row[j] = -INFINITY;
            store(scores[h], start, row, F32);
            maxima[h] = max_lanes(maxima[h], row);
        }
    }
    UNROLL for (int h = 0; h < count; h++) {
        sums[h] = exponentiate(scores[h], padded, &maxima[h], &maximum[h]);
        UNROLL for (long i = 0; i < vectors; i++) acc[h][i] = (f32x16){0};
    }
    for (long key = 0; key < length; key++) {
        UNROLL for (long i = 0; i < vectors; i++) {
            f32x16 v = load(a->v_cache, offsets[key] + i * LANES, type);
            UNROLL for (int h = 0; h < count; h++) acc[h][i] += scores[h][key] * v;
        }
    }
    UNROLL for (int h = 0; h < count; h++) {
        if (keys <= CHUNK) {
            UNROLL for (long i = 0; i < vectors; i++)
                store(a->out, token * a->out_stride + (head + h) * head_dim + i * LANES, acc[h][i] / sums[h], type);
        } else {
            float *partial = a->partials + ((token * a->heads + head + h) * a->max_chunks + chunk) * (head_dim + 2);
            UNROLL for (long i = 0; i < vectors; i++) store(partial, i * LANES, acc[h][i], F32);
            partial[head_dim] = maximum[h];
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

typedef struct {
    const attention_args *attention;
    const int32_t *items;
} item_args;

INLINE void attend_items(const item_args *work, long first, long last, int type) {
    const attention_args *a = work->attention;
    long group = a->heads / a->kv_heads;
    for (long n = first; n < last; n++) {
        long token = work->items[n / a->kv_heads * 2], chunk = work->items[n / a->kv_heads * 2 + 1];
        long kv_head = n % a->kv_heads;
        if (a->head_dim == 64)
            attend_group(a, token, kv_head, chunk, 64, type);
        else if (a->head_dim == 128)
            attend_group(a, token, kv_head, chunk, 128, type);
        else /* unusual sizes: one head at a time keeps the compiled code small */
            for (long h = 0; h < group; h++) attend(a, token, kv_head * group + h, 1, chunk, a->head_dim, type);
    }
}

INLINE void join_items(const attention_args *a, long first, long last, int type) {
    for (long n = first; n < last; n++)
        if (a->token_keys[n / a->heads] > CHUNK) join_chunks(a, n / a->heads, n % a->heads, type);
}

static void attend_f32(const void *work, long first, long last) { attend_items(work, first, last, F32); }
static void attend_bf16(const void *work, long first, long last) { attend_items(work, first, last, BF16); }
static void join_f32(const void *a, long first, long last) { join_items(a, first, last, F32); }
static void join_bf16(const void *a, long first, long last) { join_items(a, first, last, BF16); }

/* items: [num_items, 2], (token, chunk) for every chunk of every token. head_dim: a multiple of 16, at most 256. */
void tl_paged_attention(const attention_args *args, const int32_t *items, long num_items, long tokens, int type) {
    item_args work = {args, items};
    tl_parallel(num_items * args->kv_heads, 1, type == BF16 ? attend_bf16 : attend_f32, &work);
    if (args->max_chunks > 1) tl_parallel(tokens * args->heads, 16, type == BF16 ? join_bf16 : join_f32, args);
}

typedef struct {
    const char *k, *v;
    char *k_cache, *v_cache;
    const int64_t *slots;
    long k_stride, v_stride, kv_bytes;
} write_args;

static void write_tokens(const void *context, long first, long last) {
    const write_args *a = context;
    for (long t = first; t < last; t++) {
        memcpy(a->k_cache + a->slots[t] * a->kv_bytes, a->k + t * a->k_stride, a->kv_bytes);
        memcpy(a->v_cache + a->slots[t] * a->kv_bytes, a->v + t * a->v_stride, a->kv_bytes);
    }
}

/* Copy K and V of all tokens to their slots. Strides in bytes; kv_bytes: one token's keys. */
void tl_kv_write(const char *k, const char *v, long k_stride, long v_stride, char *k_cache, char *v_cache,
                 const int64_t *slots, long tokens, long kv_bytes) {
    write_args a = {k, v, k_cache, v_cache, slots, k_stride, v_stride, kv_bytes};
    tl_parallel(tokens, 1 + 65536 / kv_bytes, write_tokens, &a);
}
