/* Paged attention, read straight from the pages, and the K/V write before it.
 *
 * The keys are cut into chunks at fixed positions. A token takes all heads over one chunk, a few keys at a time, so that
 * memory is read once and in the order in which it lies: going through the keys once per head reads memory at a quarter of
 * that rate. Chunks are joined by their maxima and sums as in FlashDecoding, always in order. A token that generates has
 * its chunks shared out to the threads and joined afterwards; the tokens of a prompt go through the chunks together, each
 * joining at once, so that a chunk comes from memory once for all of them. What is computed for a token is the same in
 * both: its bits depend neither on what else is in the step nor on how a prompt was cut.
 */
#include "cpu_common.h"
#include "cpu_kernels.h"
#include "cpu_pool.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

#define CHUNK 128
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

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }

INLINE long first_chunk(const attention_args *a, long token) { return a->token_first[token] / CHUNK; }
INLINE long last_chunk(const attention_args *a, long token) { return (a->token_end[token] - 1) / CHUNK; }

/* A state of a head: weighted values [head_dim], before the division by the sum of their weights; the score that the
 * weights are relative to; that sum. */
INLINE float *state_of(const attention_args *a, long token, long number, long head) {
    return a->states + ((a->token_states[token] + number) * a->heads + head) * (a->head_dim + 2);
}

/* Takes more keys into a state. Not inlined: every caller shall round alike. */
NOT_INLINE void merge(float *state, const float *values, float maximum, float sum, long head_dim) {
    float before = state[head_dim], top = maximum > before || maximum != maximum ? maximum : before;
    float keep = expf(before - top), weight = expf(maximum - top);
    for (long i = 0; i < head_dim; i += LANES)
        store(state, i, load(state, i, F32) * keep + load(values, i, F32) * weight, F32);
    state[head_dim] = top;
    state[head_dim + 1] = state[head_dim + 1] * keep + sum * weight;
}

/* The result of a head: the mean of its values, where a sink is a weight without a value. */
NOT_INLINE void finish(const attention_args *a, long token, long head, const float *values, float maximum, float sum,
                       int type) {
    if (a->sinks) sum += expf(a->sinks[head] - maximum);
    for (long i = 0; i < a->head_dim; i += LANES)
        store(a->out, token * a->out_stride + head * a->head_dim + i, load(values, i, F32) / sum, type);
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

/* exp(x) for x that is at most 0, or NaN, which stays one: as exp_lanes, but what is below -87 is taken as -87. */
INLINE f32v exp_negative(f32v x) {
    x = select_lanes(x < -87.0f, splat(-87.0f), x);
    f32v n = (x * 1.44269504088896f + ROUNDING) - ROUNDING;
    f32v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f32v p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    i32v power = (__builtin_convertvector(n, i32v) + 127) << 23;
    f32v scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
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
        f32v p = exp_negative(load(scores, i, F32) - largest);
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
                f32v q[HEADS_AT_ONCE];
                UNROLL for (int h = 0; h < count; h++) {
                    q[h] = load(b->q, h * head_dim + i, F32);
                    IN_REGISTER(q[h]);
                }
                UNROLL for (int k = 0; k < tile; k++) {
                    f32v key = load(b->cache, at[k] + i, type);
                    IN_REGISTER(key);
                    UNROLL for (int h = 0; h < count; h++) sum[h][k] += q[h] * key;
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
                IN_REGISTER(value);
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
 * not foresee: while one block of keys is worked on, `fetch` asks for the next, piece by piece. */
INLINE void pass(const attention_args *a, block_args b, const long *offsets, long length, int values, int fetch,
                 long head_dim, int usual, int type) {
    const void *cache = values ? a->v_cache : a->k_cache;
    long group = a->heads / a->kv_heads, row_bytes = a->kv_heads * head_dim * element_bytes(type);
    for (long start = 0; start < length; start += KEYS_AT_ONCE) {
        const void *next_cache = values || start + KEYS_AT_ONCE < length ? cache : a->v_cache;
        const long *next = start + KEYS_AT_ONCE < length ? offsets + start + KEYS_AT_ONCE : offsets;
        for (long kv_head = 0; kv_head < a->kv_heads; kv_head++) {
            long from = KEYS_AT_ONCE * kv_head / a->kv_heads, to = KEYS_AT_ONCE * (kv_head + 1) / a->kv_heads;
            for (long key = from; fetch && key < to; key++) {
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

/* One token over the keys of one chunk. A token's only chunk yields the result; others become state number `number` of the
 * token, or are joined to it. */
INLINE void attend(const attention_args *a, long token, long chunk, long number, int fetch, long head_dim, int usual,
                   int type) {
    long first = larger(chunk * CHUNK, a->token_first[token]);
    long length = smaller((chunk + 1) * CHUNK, a->token_end[token]) - first;
    long padded = (length + LANES - 1) / LANES * LANES, width = a->heads * head_dim, offsets[CHUNK];
    float scores[a->heads * CHUNK] __attribute__((aligned(64)));
    float q[width] __attribute__((aligned(64))), acc[width] __attribute__((aligned(64)));

    locate_keys(a, token, first, length, offsets);
    for (long i = 0; i < width; i += LANES) {
        store(q, i, load(a->q, token * a->token_stride + i, type) * a->scale, F32);
        store(acc, i, (f32v){0}, F32);
    }
    block_args block = {q, scores, acc, 0, 0, 0};
    pass(a, block, offsets, length, 0, fetch, head_dim, usual, type);
    float maxima[a->heads], sums[a->heads];
    for (long h = 0; h < a->heads; h++) sums[h] = exponentiate(scores + h * CHUNK, padded, maxima + h);
    pass(a, block, offsets, length, 1, fetch, head_dim, usual, type);
    int alone = first_chunk(a, token) == last_chunk(a, token);
    int joins = number == 0 && chunk > first_chunk(a, token);
    for (long h = 0; h < a->heads; h++) {
        const float *values = acc + h * head_dim;
        if (alone) {
            finish(a, token, h, values, maxima[h], sums[h], type);
        } else if (joins) {
            merge(state_of(a, token, 0, h), values, maxima[h], sums[h], head_dim);
        } else {
            float *state = state_of(a, token, number, h);
            memcpy(state, values, head_dim * sizeof(float));
            state[head_dim] = maxima[h];
            state[head_dim + 1] = sums[h];
        }
    }
}

/* A token and one of its chunks; or, with a chunk of -1, `count` tokens of a row and all of their chunks. */
typedef struct {
    int32_t token, count, chunk;
} item;

INLINE void attend_item(const attention_args *a, item work, long head_dim, int usual, int type) {
    long token = work.token, last = token + work.count - 1, all = work.chunk < 0;
    for (long chunk = all ? first_chunk(a, token) : work.chunk; chunk <= (all ? last_chunk(a, last) : work.chunk); chunk++) {
        int fetch = 1; /* for the first token; the others find the chunk in the second-level cache */
        for (long t = token; t <= last; t++) {
            if (chunk < first_chunk(a, t) || chunk > last_chunk(a, t)) continue;
            attend(a, t, chunk, all ? 0 : chunk - first_chunk(a, t), fetch, head_dim, usual, type);
            fetch = 0;
        }
    }
    for (long t = token; all && t <= last; t++) {
        for (long h = 0; h < a->heads && first_chunk(a, t) < last_chunk(a, t); h++) {
            const float *state = state_of(a, t, 0, h);
            finish(a, t, h, state, state[a->head_dim], state[a->head_dim + 1], type);
        }
    }
}

typedef struct {
    const attention_args *attention;
    const item *items;
    const int32_t *joins;
} step_args;

INLINE void attend_items(const step_args *step, long first, long last, int type) {
    const attention_args *a = step->attention;
    for (long n = first; n < last; n++) {
        if (a->head_dim == 64)
            attend_item(a, step->items[n], 64, 1, type);
        else if (a->head_dim == 128)
            attend_item(a, step->items[n], 128, 1, type);
        else if (a->head_dim == 256)
            attend_item(a, step->items[n], 256, 1, type);
        else
            attend_item(a, step->items[n], a->head_dim, 0, type);
    }
}

/* Joins the states of heads first..last-1, counted through all tokens that have several. */
INLINE void join_states(const step_args *step, long first, long last, int type) {
    const attention_args *a = step->attention;
    for (long n = first; n < last; n++) {
        long token = step->joins[n / a->heads], head = n % a->heads, head_dim = a->head_dim;
        float *state = state_of(a, token, 0, head);
        for (long number = 1; number <= last_chunk(a, token) - first_chunk(a, token); number++) {
            const float *more = state_of(a, token, number, head);
            merge(state, more, more[head_dim], more[head_dim + 1], head_dim);
        }
        finish(a, token, head, state, state[head_dim], state[head_dim + 1], type);
    }
}

static void attend_f32(const void *step, long first, long last) { attend_items(step, first, last, F32); }
static void attend_bf16(const void *step, long first, long last) { attend_items(step, first, last, BF16); }
static void join_f32(const void *step, long first, long last) { join_states(step, first, last, F32); }
static void join_bf16(const void *step, long first, long last) { join_states(step, first, last, BF16); }

void tl_paged_attention(const attention_args *args, int type) {
    step_args step = {args, (const item *)args->items, args->joins};
    tl_parallel(args->num_items, 1, type == BF16 ? attend_bf16 : attend_f32, &step);
    tl_parallel(args->num_joins * args->heads, 16, type == BF16 ? join_bf16 : join_f32, &step);
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
