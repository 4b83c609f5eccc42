/* Threads for the CPU kernels that share a loop with whoever has time, and wait for nobody else. See cpu_pool.c. */
#ifndef TIERLINE_CPU_POOL_H
#define TIERLINE_CPU_POOL_H

/* Does the iterations first..last-1 of a loop. */
typedef void (*tl_task)(const void *context, long first, long last);

/* Run `task` over 0..count-1 in pieces of at least `min_piece`, on this thread and the pool's. Returns when all is done. */
void tl_parallel(long count, long min_piece, tl_task task, const void *context);

#endif
