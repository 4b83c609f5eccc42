/* Paged attention for single query tokens, read straight from the pages, and the K/V write before it.
 *
 * A token's keys are cut into chunks of fixed size; one work item is (token, chunk) and handles all heads, a few keys at a
 * time, so that memory is read once and in the order in which it lies: going through the keys once per head reads memory
 * at a quarter of that rate. Chunks are joined by their maxima and sums as in FlashDecoding. The cut depends on the token
 * alone, so its result does not depend on what else is in the batch.
 */
#include "cpu_common.h"
#include "cpu_kernels.h"
#include "cpu_pool.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

#define CHUNK 128
#define MAX_HEAD_DIM 256
#define HEADS_AT_ONCE 4
#define KEYS_AT_ONCE 16
/* Loops over a constant number of vectors or heads: their arrays must become registers, at any optimisation level. */
#define UNROLL _Pragma("GCC unroll 16")
/* Sums that the vector registers hold, with room for what is multiplied. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_SUMS 16
#else
#define TILE_SUMS 12
#endif

INLINE long keys_seen(const attention_args *a, long token) { return a->token_end[token] - a->token_first[token]; }

/* What a head's sink adds to the sum of weights whose maximum is `maximum`. */
INLINE float sink_weight(const attention_args *a, long head, float maximum) {
    return a->sinks ? expf(a->sinks[head] - maximum) : 0;
}

/* The weighted values of one chunk, before the division by their sum, then their maximum and sum. */
INLINE float *partial(const attention_args *a, long token, long head, long chunk) {
    return a->partials + ((token * a->heads + head) * a->max_chunks + chunk) * (a->head_dim + 2);
}

/* Lane i of the result: the sum of rows[i]'s lanes, by a tree of pairwise steps, each halving what is left to add. */
INLINE f32v sum_rows(const f32v rows[LANES]) {
#if defined(__AVX512F__) && !defined(__clang__)
#define PAIR(a, b, low, high) (__builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high))
    const i32v low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i32v low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const i32v low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i32v low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    f32v a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = PAIR(rows[i], rows[i + 8], low8, low8 + 8); /* lanes 0-7: row i, 8-15: i + 8 */
    for (int i = 0; i < 4; i++) b[i] = PAIR(a[i], a[i + 4], low4, low4 + 4);
    for (int i = 0; i < 2; i++) c[i] = PAIR(b[i], b[i + 2], low2, low2 + 2);
    return PAIR(c[0], c[1], low1, low1 + 1);
#elif defined(__AVX__) && LANES == 8
    __m256 pairs[4], fours[2]; /* each half of a vector on its own: the halves of four rows meet at the end */
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_hadd_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    for (int i = 0; i < 2; i++) fours[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
    return (f32v)(_mm256_permute2f128_ps(fours[0], fours[1], 0x20) + _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#else
    float columns[LANES][LANES], sums[LANES];
    f32v out;
    memcpy(columns, rows, sizeof columns);
    for (int i = 0; i < LANES; i++) {
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += columns[i][j];
        sums[i] = sum;
    }
    memcpy(&out, sums, sizeof out);
    return out;
#endif
}

/* exp(score - maximum) for the first `padded` scores, in place. Returns the sum of the results and the maximum. */
NOT_INLINE float exponentiate(float *scores, long padded, float *maximum) {
    float lanes[LANES], largest;
    f32v maxima = load(scores, 0, F32), sum = {0};
    for (long i = LANES; i < padded; i += LANES) maxima = max_lanes(maxima, load(scores, i, F32));
    store(lanes, 0, maxima, F32);
    largest = lanes[0];
    for (int i = 1; i < LANES; i++) largest = lanes[i] > largest || lanes[i] != lanes[i] ? lanes[i] : largest;
    for (long i = 0; i < padded; i += LANES) {
        f32v p = exp_lanes(load(scores, i, F32) - largest);
        store(scores, i, p, F32);
        sum += p;
    }
    *maximum = largest;
    return sum_lanes(sum);
}

/* Where the keys of a chunk lie, in elements. The last one's place is repeated up to a multiple of KEYS_AT_ONCE. */
INLINE void locate_keys(const attention_args *a, long token, long first, long length, long *offsets) {
    const int32_t *table = a->block_tables + (long)a->token_rows[token] * a->table_width;
    long key_stride = a->kv_heads * a->head_dim, key = 0;
    while (key < length) {
        long page = (first + key) / a->block_size, slot = (first + key) % a->block_size;
        long at = (table[page] * a->block_size + slot) * key_stride;
        for (; slot < a->block_size && key < length; slot++, key++, at += key_stride) offsets[key] = at;
    }
    for (; key % KEYS_AT_ONCE; key++) offsets[key] = offsets[length - 1];
}

/* Heads that share a kv head, and KEYS_AT_ONCE keys or values, of which the first `keys` count. */
typedef struct {
    const float *q;      /* [heads, head_dim], scaled */
    float *scores;       /* [heads, CHUNK] */
    float *acc;          /* [heads, head_dim] */
    const void *cache;   /* K or V of the kv head on page 0 */
    const long *offsets; /* [KEYS_AT_ONCE] */
    long keys;
} block_args;

/* The scores of `count` heads for these keys. The sums of all heads by `tile` keys stay in registers. */
INLINE void score(const block_args *b, int count, int tile, long head_dim, int type) {
    for (long start = 0; start < KEYS_AT_ONCE; start += LANES) {
        f32v dots[HEADS_AT_ONCE][LANES];
        for (int j = 0; j < LANES; j += tile) {
            const long *at = b->offsets + start + j;
            f32v sum[HEADS_AT_ONCE][4];
            UNROLL for (int h = 0; h < count; h++) {
                UNROLL for (int k = 0; k < tile; k++) sum[h][k] = (f32v){0};
            }
            for (long i = 0; i < head_dim; i += LANES) {
                f32v key[4];
                UNROLL for (int k = 0; k < tile; k++) key[k] = load(b->cache, at[k] + i, type);
                UNROLL for (int h = 0; h < count; h++) {
                    f32v q = load(b->q, h * head_dim + i, F32);
                    UNROLL for (int k = 0; k < tile; k++) sum[h][k] += q * key[k];
                }
            }
            UNROLL for (int h = 0; h < count; h++) {
                UNROLL for (int k = 0; k < tile; k++) dots[h][j + k] = sum[h][k];
            }
        }
        for (int h = 0; h < count; h++) {
            f32v row = sum_rows(dots[h]);
            for (long j = 0; j < LANES; j++)
                if (start + j >= b->keys) row[j] = -INFINITY;
            store(b->scores + h * CHUNK, start, row, F32);
        }
    }
}

/* Add these values to the sums of `count` heads, `tile` vectors of each at a time in registers. */
INLINE void add_values(const block_args *b, int count, int tile, long head_dim, int type) {
    for (long dim = 0; dim < head_dim; dim += tile * LANES) {
        f32v acc[HEADS_AT_ONCE][4];
        UNROLL for (int h = 0; h < count; h++) {
            UNROLL for (int i = 0; i < tile; i++) acc[h][i] = load(b->acc, h * head_dim + dim + i * LANES, F32);
        }
        for (long key = 0; key < b->keys; key++) {
            f32v weight[HEADS_AT_ONCE];
            UNROLL for (int h = 0; h < count; h++) weight[h] = splat(b->scores[h * CHUNK + key]);
            UNROLL for (int i = 0; i < tile; i++) {
                f32v value = load(b->cache, b->offsets[key] + dim + i * LANES, type);
                UNROLL for (int h = 0; h < count; h++) acc[h][i] += weight[h] * value;
            }
        }
        UNROLL for (int h = 0; h < count; h++) {
            UNROLL for (int i = 0; i < tile; i++) store(b->acc, h * head_dim + dim + i * LANES, acc[h][i], F32);
        }
    }
}

INLINE void take(const block_args *b, int values, int count, int tile, long head_dim, int type) {
    if (values)
        add_values(b, count, tile, head_dim, type);
    else
        score(b, count, tile, head_dim, type);
}

/* All heads of a kv head, up to HEADS_AT_ONCE together, each count its own unrolled copy. */
INLINE void take_group(block_args b, long group, int values, long head_dim, int usual, int type) {
    for (long count; group > 0; group -= count, b.q += count * head_dim, b.acc += count * head_dim) {
        count = !usual ? 1 : group < HEADS_AT_ONCE ? group : HEADS_AT_ONCE;
        if (!usual) /* one head at a time keeps the compiled code small */
            take(&b, values, 1, 1, head_dim, type);
        else if (count == 4)
            take(&b, values, 4, TILE_SUMS / 8 * 2, head_dim, type);
        else if (count == 3)
            take(&b, values, 3, 4, head_dim, type);
        else if (count == 2)
            take(&b, values, 2, 4, head_dim, type);
        else
            take(&b, values, 1, 4, head_dim, type);
        b.scores += count * CHUNK;
    }
}

/* Scores of, or values for, all heads and all keys of a chunk. Pages come from memory, in an order that the processor does
 * not foresee: while one block of keys is worked on, the next is asked for, piece by piece. */
INLINE void pass(const attention_args *a, block_args b, const long *offsets, long length, int values, long head_dim,
                 int usual, int type) {
    const void *cache = values ? a->v_cache : a->k_cache;
    long group = a->heads / a->kv_heads, row_bytes = a->kv_heads * head_dim * element_bytes(type);
    for (long start = 0; start < length; start += KEYS_AT_ONCE) {
        const void *next_cache = values || start + KEYS_AT_ONCE < length ? cache : a->v_cache;
        const long *next = start + KEYS_AT_ONCE < length ? offsets + start + KEYS_AT_ONCE : offsets;
        for (long kv_head = 0; kv_head < a->kv_heads; kv_head++) {
            long from = KEYS_AT_ONCE * kv_head / a->kv_heads, to = KEYS_AT_ONCE * (kv_head + 1) / a->kv_heads;
            for (long key = from; key < to; key++) {
                const char *row = (const char *)next_cache + next[key] * element_bytes(type);
                for (long i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i);
            }
            long head = kv_head * group;
            block_args part = {b.q + head * head_dim, b.scores + head * CHUNK + start, b.acc + head * head_dim,
                               (const char *)cache + kv_head * head_dim * element_bytes(type), offsets + start,
                               length - start < KEYS_AT_ONCE ? length - start : KEYS_AT_ONCE};
            take_group(part, group, values, head_dim, usual, type);
        }
    }
}

/* One token over the keys of one chunk. Writes the result, or with several chunks its unnormalised form, to the partials. */
INLINE void attend(const attention_args *a, long token, long chunk, long head_dim, int usual, int type) {
    long keys = keys_seen(a, token), done = chunk * CHUNK, length = keys - done < CHUNK ? keys - done : CHUNK;
    long padded = (length + LANES - 1) / LANES * LANES, width = a->heads * head_dim, offsets[CHUNK];
    float scores[a->heads * CHUNK] __attribute__((aligned(64)));
    float q[width] __attribute__((aligned(64))), acc[width] __attribute__((aligned(64)));

    locate_keys(a, token, a->token_first[token] + done, length, offsets);
    for (long i = 0; i < width; i += LANES) {
        store(q, i, load(a->q, token * a->token_stride + i, type) * a->scale, F32);
        store(acc, i, (f32v){0}, F32);
    }
    block_args block = {q, scores, acc, 0, 0, 0};
    pass(a, block, offsets, length, 0, head_dim, usual, type);
    float maxima[a->heads], sums[a->heads];
    for (long h = 0; h < a->heads; h++) sums[h] = exponentiate(scores + h * CHUNK, padded, maxima + h);
    pass(a, block, offsets, length, 1, head_dim, usual, type);
    for (long h = 0; h < a->heads; h++) {
        if (keys <= CHUNK) {
            float sum = sums[h] + sink_weight(a, h, maxima[h]);
            for (long i = h * head_dim; i < (h + 1) * head_dim; i += LANES)
                store(a->out, token * a->out_stride + i, load(acc, i, F32) / sum, type);
        } else {
            float *to = partial(a, token, h, chunk);
            memcpy(to, acc + h * head_dim, head_dim * sizeof(float));
            to[head_dim] = maxima[h];
            to[head_dim + 1] = sums[h];
        }
    }
}

INLINE void join_chunks(const attention_args *a, long token, long head, int type) {
    long head_dim = a->head_dim, chunks = (keys_seen(a, token) + CHUNK - 1) / CHUNK;
    const float *part = partial(a, token, head, 0);
    float maximum = part[head_dim], sum = 0;
    for (long c = 1; c < chunks; c++) {
        float m = part[c * (head_dim + 2) + head_dim];
        maximum = m > maximum || m != m ? m : maximum;
    }
    f32v acc[MAX_HEAD_DIM / LANES];
    for (long i = 0; i < head_dim / LANES; i++) acc[i] = (f32v){0};
    for (long c = 0; c < chunks; c++, part += head_dim + 2) {
        float weight = expf(part[head_dim] - maximum);
        sum += weight * part[head_dim + 1];
        for (long i = 0; i < head_dim / LANES; i++) acc[i] += weight * load(part, i * LANES, F32);
    }
    sum += sink_weight(a, head, maximum);
    for (long i = 0; i < head_dim / LANES; i++)
        store(a->out, token * a->out_stride + head * head_dim + i * LANES, acc[i] / sum, type);
}

typedef struct {
    const attention_args *attention;
    const int32_t *items;
} item_args;

INLINE void attend_items(const item_args *work, long first, long last, int type) {
    const attention_args *a = work->attention;
    for (long n = first; n < last; n++) {
        long token = work->items[2 * n], chunk = work->items[2 * n + 1];
        if (a->head_dim == 64)
            attend(a, token, chunk, 64, 1, type);
        else if (a->head_dim == 128)
            attend(a, token, chunk, 128, 1, type);
        else
            attend(a, token, chunk, a->head_dim, 0, type);
    }
}

INLINE void join_items(const attention_args *a, long first, long last, int type) {
    for (long n = first; n < last; n++)
        if (keys_seen(a, n / a->heads) > CHUNK) join_chunks(a, n / a->heads, n % a->heads, type);
}

static void attend_f32(const void *work, long first, long last) { attend_items(work, first, last, F32); }
static void attend_bf16(const void *work, long first, long last) { attend_items(work, first, last, BF16); }
static void join_f32(const void *a, long first, long last) { join_items(a, first, last, F32); }
static void join_bf16(const void *a, long first, long last) { join_items(a, first, last, BF16); }

void tl_paged_attention(const attention_args *args, const int32_t *items, long num_items, long tokens, int type) {
    item_args work = {args, items};
    tl_parallel(num_items, 1, type == BF16 ? attend_bf16 : attend_f32, &work);
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

void tl_kv_write(const void *k, const void *v, long k_stride, long v_stride, void *k_cache, void *v_cache,
                 const int64_t *slots, long tokens, long kv_bytes) {
    write_args a = {k, v, k_cache, v_cache, slots, k_stride, v_stride, kv_bytes};
    tl_parallel(tokens, 1 + 65536 / kv_bytes, write_tokens, &a);
}
