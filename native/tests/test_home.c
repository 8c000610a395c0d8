/* test_home.c: threads that wait have processors of their own, and everything they may use again when
 * they wake up. */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "check.h"
#include "clock.h"
#include "home.h"

#if defined(__linux__)

enum { MAX_THREADS = 16 };

static const uint64_t second = 1000000000;

struct waiter {
    pthread_t thread;
    pthread_barrier_t *all_wait;
    struct fm_home home;
    uint64_t now;
    int n_while_waiting; /* processors in the mask */
    cpu_set_t before;
    cpu_set_t after;
};

static void *wait_with_others(void *arg) {
    struct waiter *w = arg;
    cpu_set_t mask;
    sched_getaffinity(0, sizeof w->before, &w->before);
    fm_home_wait(&w->home, w->now);
    sched_getaffinity(0, sizeof mask, &mask);
    w->n_while_waiting = CPU_COUNT(&mask);
    pthread_barrier_wait(w->all_wait);
    fm_home_leave(&w->home);
    sched_getaffinity(0, sizeof w->after, &w->after);
    return NULL;
}

static void run(struct waiter *waiters, int n, uint64_t now) {
    pthread_barrier_t all_wait;
    pthread_barrier_init(&all_wait, NULL, (unsigned)n);
    memset(waiters, 0, (size_t)n * sizeof *waiters);
    for (int i = 0; i < n; i++) {
        waiters[i].all_wait = &all_wait;
        waiters[i].now = now;
        CHECK_EQUAL(pthread_create(&waiters[i].thread, NULL, wait_with_others, &waiters[i]), 0);
    }
    for (int i = 0; i < n; i++) {
        pthread_join(waiters[i].thread, NULL);
    }
    pthread_barrier_destroy(&all_wait);
}

/* All processors that this process may use, two at least. */
static int n_cpus(void) {
    cpu_set_t mask;
    CHECK_EQUAL(sched_getaffinity(0, sizeof mask, &mask), 0);
    if (CPU_COUNT(&mask) < 2) {
        check_skip("one processor");
    }
    return CPU_COUNT(&mask);
}

#endif

TEST(threads_that_wait_have_different_homes_and_get_their_masks_back) {
#if defined(__linux__)
    struct waiter waiters[MAX_THREADS];
    const int n = n_cpus() < MAX_THREADS ? n_cpus() : MAX_THREADS;
    for (uint64_t round = 1; round < 50; round++) {
        cpu_set_t homes;
        CPU_ZERO(&homes);
        run(waiters, n, round * second);
        for (int i = 0; i < n; i++) {
            CHECK(waiters[i].home.cpu >= 0);
            CHECK_EQUAL(waiters[i].n_while_waiting, 1);
            CHECK(CPU_EQUAL(&waiters[i].before, &waiters[i].after));
            CHECK(!CPU_ISSET(waiters[i].home.cpu, &homes));
            CPU_SET(waiters[i].home.cpu, &homes);
        }
    }
#else
    check_skip("no such call");
#endif
}

TEST(more_threads_than_processors_leave_some_without_a_home) {
#if defined(__linux__)
    struct waiter waiters[2 * MAX_THREADS];
    const int n = n_cpus();
    if (n > MAX_THREADS) {
        check_skip("many processors");
    }
    run(waiters, n + 2, 100 * second);
    int n_homes = 0;
    for (int i = 0; i < n + 2; i++) {
        n_homes += waiters[i].home.cpu >= 0;
        CHECK(waiters[i].home.cpu >= 0 || waiters[i].n_while_waiting == n);
        CHECK(CPU_EQUAL(&waiters[i].before, &waiters[i].after));
    }
    CHECK_EQUAL(n_homes, n);
#else
    check_skip("no such call");
#endif
}

TEST(a_home_is_anothers_when_its_thread_has_not_waited_for_long) {
#if defined(__linux__)
    struct waiter waiters[MAX_THREADS];
    struct fm_home home;
    const int n = n_cpus();
    if (n > MAX_THREADS) {
        check_skip("many processors");
    }
    fm_home_wait(&home, 200 * second);
    fm_home_leave(&home);
    CHECK(home.cpu >= 0);
    for (int late = 0; late <= 1; late++) {
        int n_homes = 0;
        run(waiters, n, (late ? 201 : 200) * second);
        for (int i = 0; i < n; i++) {
            n_homes += waiters[i].home.cpu >= 0;
            CHECK(late || waiters[i].home.cpu != home.cpu);
        }
        CHECK_EQUAL(n_homes, late ? n : n - 1);
    }
#else
    check_skip("no such call");
#endif
}

TEST(a_mask_that_somebody_sets_meanwhile_stays) {
#if defined(__linux__)
    struct fm_home home;
    cpu_set_t all;
    cpu_set_t two;
    cpu_set_t now;
    n_cpus();
    CHECK_EQUAL(sched_getaffinity(0, sizeof all, &all), 0);
    fm_home_wait(&home, 300 * second);
    CHECK(home.cpu >= 0);
    CPU_ZERO(&two);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            CPU_SET(cpu, &two);
        }
    }
    CHECK_EQUAL(sched_setaffinity(0, sizeof two, &two), 0);
    fm_home_leave(&home);
    CHECK_EQUAL(sched_getaffinity(0, sizeof now, &now), 0);
    CHECK(CPU_EQUAL(&now, &two));
    sched_setaffinity(0, sizeof all, &all);
#else
    check_skip("no such call");
#endif
}
