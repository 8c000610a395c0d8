/* home.h: on which processor a compute thread wakes up. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What `fm_home_leave` needs; made by `fm_home_wait`, on the stack of the thread that waits. */
struct fm_home {
    int cpu; /* where the thread will wake up; -1: wherever the system likes */
    unsigned char allowed[128]; /* a cpu_set_t: where it may run otherwise */
};

/* Before the calling thread sleeps: it will wake up on a processor that no other compute thread has
 * for its own. now: fm_clock_ns(). Does nothing where the system has no such call, and for threads
 * beyond the number of processors. */
void fm_home_wait(struct fm_home *home, uint64_t now);

/* Awake: the thread may run anywhere again that it might before. */
void fm_home_leave(const struct fm_home *home);
