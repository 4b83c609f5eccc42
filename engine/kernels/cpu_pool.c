/* A pool in which the calling thread never waits for a helper that has not started.
 *
 * OpenMP's loops end when every thread of the team has come to the barrier, also one that had nothing to do because the
 * system ran another program on its core: with something else running, a step of 150 short loops then takes many times
 * longer. Here a loop is cut into pieces, threads claim them one by one, and it ends when all pieces are done. A helper
 * that comes late finds nothing and costs nothing.
 *
 * One 64-bit word holds the loop's number, its count of pieces and the next piece to claim. A claim is a compare-and-swap
 * of that word, so it cannot succeed for a loop that is over; and a loop with a claimed piece cannot be over, so what
 * describes it may be read without a lock. The pool serves one loop at a time: a thread that comes with another meanwhile
 * runs its own alone.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "cpu_pool.h"

#define MAX_THREADS 64
#define PIECES_PER_THREAD 4
/* Helpers look for work so long before they sleep: it bridges the time between two loops of one step. */
#define SPIN_NS 40000

static struct {
    _Alignas(64) _Atomic uint64_t ticket; /* loop << 32 | pieces << 16 | next piece */
    _Alignas(64) _Atomic long done;
    tl_task task;
    const void *context;
    long count;
    atomic_flag busy; /* a caller has the fields above */
    _Alignas(64) atomic_int threads; /* that may work, the caller included */
    atomic_int sleepers;
    int started; /* helpers that exist; the mutex guards it */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} pool = {.busy = ATOMIC_FLAG_INIT, .threads = 1, .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static inline int has_work(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }

/* Claim and do one piece. Returns 0 when the loop has none left. */
static int work(void) {
    uint64_t ticket = atomic_load(&pool.ticket);
    do {
        if (!has_work(ticket)) return 0;
    } while (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1));
    long piece = ticket & 0xffff, pieces = ticket >> 16 & 0xffff;
    pool.task(pool.context, pool.count * piece / pieces, pool.count * (piece + 1) / pieces);
    atomic_fetch_add(&pool.done, 1);
    return 1;
}

static void *helper(void *argument) {
    int index = (int)(intptr_t)argument; /* 1 is the first helper */
    for (;;) {
        long until = now_ns() + SPIN_NS;
        do {
            if (index < atomic_load(&pool.threads) && work()) until = now_ns() + SPIN_NS;
            for (int i = 0; i < 8; i++) relax();
        } while (now_ns() < until);
        pthread_mutex_lock(&pool.mutex);
        atomic_fetch_add(&pool.sleepers, 1);
        while (index >= atomic_load(&pool.threads) || !has_work(atomic_load(&pool.ticket)))
            pthread_cond_wait(&pool.wake, &pool.mutex);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.mutex);
    }
    return 0;
}

/* Use `threads` threads from now on, the caller included. Returns the number that could be had. */
int tl_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    pthread_mutex_lock(&pool.mutex);
    while (pool.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
        pool.started++;
    }
    if (threads > pool.started + 1) threads = pool.started + 1;
    atomic_store(&pool.threads, threads);
    pthread_mutex_unlock(&pool.mutex);
    return threads;
}

void tl_parallel(long count, long min_piece, tl_task task, const void *context) {
    long pieces = (long)atomic_load(&pool.threads) * PIECES_PER_THREAD;
    if (pieces == PIECES_PER_THREAD) pieces = 1;
    if (pieces > count / min_piece) pieces = count / min_piece;
    if (pieces <= 1 || atomic_flag_test_and_set(&pool.busy)) {
        if (count > 0) task(context, 0, count);
        return;
    }
    uint64_t loop = (atomic_load(&pool.ticket) >> 32) + 1;
    pool.task = task;
    pool.context = context;
    pool.count = count;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, loop << 32 | (uint64_t)pieces << 16);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.mutex);
    }
    while (work()) {}
    /* A helper has claimed the last pieces. If it lost its core in the middle of one, let it have this one. */
    for (int spins = 0; atomic_load(&pool.done) < pieces; spins++) {
        if (spins < 2000)
            relax();
        else
            sched_yield();
    }
    atomic_flag_clear(&pool.busy);
}
