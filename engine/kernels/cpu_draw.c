/* Draws tokens: of each row's distribution, cut by top_k and top_p, the token at which a number in [0, 1) falls.
 *
 * Nothing is sorted but what has to be. Tokens of about the same weight are in one bucket, whose sum and count are known;
 * the tokens in order of their weights are the buckets in order, and only those in which a border falls are looked into.
 */
#include <float.h>
#include <stdlib.h>

#include "cpu_common.h"
#include "cpu_kernels.h"
#include "cpu_pool.h"

/* Of a weight, at most 1, the exponent and four bits behind the point: weights in a bucket differ by a sixteenth. */
#define SHIFT 19
#define BUCKETS ((0x3f800000 >> SHIFT) + 1)
/* Without a cut tokens are taken in their own order, so many at a time. */
#define STRIDE 512

typedef struct {
    double mass;
    long count;
} bucket;

typedef struct {
    float weight;
    int32_t token;
} member;

typedef struct {
    float *weights; /* [vocab] */
    member *members; /* [vocab], of bucket `sorted`, the likeliest first */
    bucket buckets[BUCKETS];
    long vocab, sorted;
} row_state;

/* The first tokens of a row, in order of their weights. */
typedef struct {
    long count;
    double mass;
    long bucket, taken; /* where the last of them is, and how many of that bucket there are */
} prefix;

INLINE long bucket_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits >> SHIFT;
}

static int by_weight(const void *a, const void *b) {
    const member *x = a, *y = b;
    if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

static void sort_bucket(row_state *s, long number) {
    long count = 0;
    if (s->sorted == number) return;
    for (long i = 0; i < s->vocab; i++)
        if (s->weights[i] > 0 && bucket_of(s->weights[i]) == number) s->members[count++] = (member){s->weights[i], i};
    qsort(s->members, count, sizeof *s->members, by_weight);
    s->sorted = number;
}

/* The longest prefix of at most `most` tokens before each of which there is less mass than `below`. */
static prefix take_while(row_state *s, long most, double below) {
    prefix p = {0, 0, -1, 0};
    for (long b = BUCKETS - 1; b >= 0 && p.count < most && p.mass < below; b--) {
        const bucket *next = s->buckets + b;
        if (!next->count) continue;
        p.bucket = b;
        if (p.count + next->count <= most && p.mass + next->mass < below) {
            p.count += next->count;
            p.mass += next->mass;
            p.taken = next->count;
            continue;
        }
        sort_bucket(s, b);
        for (p.taken = 0; p.taken < next->count && p.count < most && p.mass < below; p.taken++, p.count++)
            p.mass += s->members[p.taken].weight;
    }
    return p;
}

/* -1 if there is none. */
static long last_of(row_state *s, prefix p) {
    if (!p.count) return -1;
    sort_bucket(s, p.bucket);
    return s->members[p.taken - 1].token;
}

static double smaller_double(double a, double b) { return a < b ? a : b; }

/* Where in [0, mass) a number in [0, 1) falls. */
static double target_of(double uniform, double mass) { return smaller_double(uniform * mass, nextafter(mass, 0)); }

static long draw_ranked(row_state *s, double uniform, double top_p, long top_k) {
    memset(s->buckets, 0, sizeof s->buckets);
    s->sorted = -1;
    for (long i = 0; i < s->vocab; i++) {
        float weight = s->weights[i];
        if (!(weight > 0)) continue; /* NaN neither */
        bucket *b = s->buckets + bucket_of(weight);
        b->mass += weight;
        b->count++;
    }
    prefix kept = take_while(s, top_k, INFINITY);
    kept = take_while(s, kept.count, fmax(top_p * kept.mass, DBL_MIN)); /* the likeliest always */
    return last_of(s, take_while(s, kept.count, nextafter(target_of(uniform, kept.mass), INFINITY)));
}

static long draw_plain(const row_state *s, double uniform) {
    double sums[s->vocab / STRIDE + 1], mass = 0, before = 0;
    for (long start = 0, n = 0; start < s->vocab; start += STRIDE, n++) {
        long end = start + STRIDE < s->vocab ? start + STRIDE : s->vocab;
        double parts[4] = {0};
        for (long i = start; i < end; i++) parts[i % 4] += s->weights[i];
        mass += sums[n] = parts[0] + parts[1] + parts[2] + parts[3];
    }
    double target = target_of(uniform, mass);
    long last = -1;
    for (long start = 0, n = 0; start < s->vocab; before += sums[n], start += STRIDE, n++) {
        if (before + sums[n] <= target) continue;
        double sum = before;
        for (long i = start; i < start + STRIDE && i < s->vocab; i++) {
            sum += s->weights[i];
            if (s->weights[i] > 0) last = i;
            if (sum > target) return last;
        }
    }
    return last; /* sums were rounded: the last token that can be drawn */
}

typedef struct {
    const float *scaled;
    const double *uniform, *top_p;
    const int64_t *top_k;
    int64_t *tokens;
    long vocab;
} draw_args;

/* exp of a row, whose numbers are at most 0. */
static void weigh(const float *scaled, float *weights, long vocab) {
    long i = 0;
    for (; i + LANES <= vocab; i += LANES) store(weights, i, exp_lanes(load(scaled, i, F32)), F32);
    float tail[LANES] = {0};
    memcpy(tail, scaled + i, (vocab - i) * sizeof(float));
    store(tail, 0, exp_lanes(load(tail, 0, F32)), F32);
    memcpy(weights + i, tail, (vocab - i) * sizeof(float));
}

static void draw_rows(const void *context, long first, long last) {
    const draw_args *a = context;
    row_state *s = malloc(sizeof *s);
    float *weights = malloc(a->vocab * sizeof(float));
    member *members = malloc(a->vocab * sizeof(member));
    for (long row = first; row < last; row++) {
        a->tokens[row] = -1;
        if (!s || !weights || !members) continue;
        s->weights = weights;
        s->members = members;
        s->vocab = a->vocab;
        weigh(a->scaled + row * a->vocab, weights, a->vocab);
        long token = a->top_k[row] <= 0 && a->top_p[row] >= 1
                         ? draw_plain(s, a->uniform[row])
                         : draw_ranked(s, a->uniform[row], a->top_p[row], a->top_k[row] > 0 ? a->top_k[row] : a->vocab);
        a->tokens[row] = token < 0 ? 0 : token; /* a row that is NaN: some token, nobody will look at it */
    }
    free(members);
    free(weights);
    free(s);
}

void tl_draw(const float *scaled, const double *uniform, const double *top_p, const int64_t *top_k, int64_t *tokens,
             long rows, long vocab) {
    draw_args a = {scaled, uniform, top_p, top_k, tokens, vocab};
    tl_parallel(rows, 1, draw_rows, &a);
}
