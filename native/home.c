/* home.c: compute threads that wait for an expert are woken all at once, by the reading thread. The
 * scheduler tends to put them onto one processor then, the waker's or the first idle one, and leaves the
 * other idle for milliseconds: the threads of an operation wait for each other, so it takes twice as long.
 *
 * So a thread sleeps with a mask of one processor, its home, and gets its full mask back when it wakes
 * up: a choice of where to start, not of where to stay. The scheduler may still move it, and where it has
 * moved it to is its next home, unless that is another thread's. */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "home.h"

#if defined(__linux__)

#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { N_CPUS = CPU_SETSIZE };

/* A thread that has not waited for so long does not compute any more: others may have its home. */
static const uint64_t kept_ns = 100000000;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const void *owner; /* the address of a thread's `mine` */
    uint64_t waited;   /* when it last did */
} homes[N_CPUS];

static _Thread_local int mine = -1;

_Static_assert(sizeof(cpu_set_t) <= sizeof((struct fm_home *)0)->allowed, "room for a mask");

static bool is_free(int cpu, uint64_t now) {
    return homes[cpu].owner == NULL || homes[cpu].owner == &mine || now - homes[cpu].waited > kept_ns;
}

static int find_free(const cpu_set_t *allowed, uint64_t now) {
    for (int cpu = 0; cpu < N_CPUS; cpu++) {
        if (CPU_ISSET(cpu, allowed) && is_free(cpu, now)) {
            return cpu;
        }
    }
    return -1;
}

/* The home that this thread has from now on; -1: every processor is another's. */
static int choose(const cpu_set_t *allowed, uint64_t now) {
    const int current = sched_getcpu();
    const bool has_one = mine >= 0 && homes[mine].owner == &mine && CPU_ISSET(mine, allowed);
    int cpu = has_one ? mine : -1;
    if (current >= 0 && current < N_CPUS && CPU_ISSET(current, allowed) && is_free(current, now)) {
        cpu = current;
    } else if (!has_one) {
        cpu = find_free(allowed, now);
    }
    if (has_one && cpu != mine) {
        homes[mine].owner = NULL;
    }
    if (cpu >= 0) {
        homes[cpu].owner = &mine;
        homes[cpu].waited = now;
    }
    return cpu;
}

void fm_home_wait(struct fm_home *home, uint64_t now) {
    cpu_set_t allowed;
    cpu_set_t only;
    home->cpu = -1;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) {
        return;
    }
    pthread_mutex_lock(&lock);
    mine = choose(&allowed, now);
    pthread_mutex_unlock(&lock);
    if (mine < 0) {
        return;
    }
    CPU_ZERO(&only);
    CPU_SET(mine, &only);
    if (sched_setaffinity(0, sizeof only, &only) == 0) {
        home->cpu = mine;
        memcpy(home->allowed, &allowed, sizeof allowed);
    }
}

void fm_home_leave(const struct fm_home *home) {
    cpu_set_t mask;
    if (home->cpu < 0) {
        return;
    }
    /* somebody may have moved the process to other processors meanwhile: that is to last */
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) == 1 && CPU_ISSET(home->cpu, &mask)) {
        memcpy(&mask, home->allowed, sizeof mask);
        sched_setaffinity(0, sizeof mask, &mask);
    }
}

#else

void fm_home_wait(struct fm_home *home, uint64_t now) {
    (void)now;
    home->cpu = -1;
}

void fm_home_leave(const struct fm_home *home) {
    (void)home;
}

#endif
