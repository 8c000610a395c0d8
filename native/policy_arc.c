/* policy_arc.c: ARC. Residents that were used once since they came (T1) and more often (T2), each in
 * order of use; the numbers of those that left them (B1, B2); and a target size of T1 that a use of
 * something in B1 raises and of something in B2 lowers. T1's oldest leaves while T1 is above target,
 * else T2's.
 *
 * N. Megiddo, D. S. Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003. What differs
 * because a token uses k experts at once: the target moves for each missing one when the token is
 * seen, before anyone leaves; those that may not leave are passed over, and when none of the list may,
 * the other list's oldest leaves; at the target, T1 gives when any expert that the token misses was in
 * B2. A token's experts are uses in the order of its list. */

#include "policy.h"

enum list { NOWHERE, T1, T2, B1, B2, N_LISTS };

struct expert {
    uint64_t stamp; /* order within its list */
    int32_t list;
};

struct group {
    struct fm_policy_group head;
    uint64_t clock;
    double target;       /* of T1's size */
    int32_t n[N_LISTS];
    bool from_b2;        /* the token misses something of B2 */
    bool token_ended;
};

static struct group *at(const struct fm_policy *policy, int32_t group) {
    return (struct group *)policy + group;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    struct fm_policy *policy = fm_policy_new(setup, sizeof(struct group), sizeof(struct expert));
    for (int32_t g = 0; g < setup->n_groups && policy != NULL; g++) {
        at(policy, g)->n[NOWHERE] = setup->n_expert[g];
    }
    return policy;
}

static void move(struct group *g, int32_t expert, enum list list) {
    struct expert *experts = g->head.experts;
    g->n[experts[expert].list]--;
    g->n[list]++;
    experts[expert].list = list;
    experts[expert].stamp = ++g->clock;
}

/* Of those in the list, and with may_leave only of those that may; -1: none. */
static int32_t oldest(const struct group *g, enum list list, const uint8_t *may_leave) {
    const struct expert *experts = g->head.experts;
    int32_t found = -1;
    for (int32_t e = 0; e < g->head.n_expert && g->n[list] > 0; e++) {
        if (experts[e].list == (int32_t)list && (may_leave == NULL || may_leave[e]) &&
            (found < 0 || experts[e].stamp < experts[found].stamp)) {
            found = e;
        }
    }
    return found;
}

static void begin_use(struct group *g) {
    if (g->token_ended) {
        g->token_ended = g->from_b2 = false;
    }
}

static void on_hit(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    begin_use(g);
    move(g, expert, T2);
}

static void on_miss(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *experts = g->head.experts;
    const double b1 = g->n[B1];
    const double b2 = g->n[B2];
    begin_use(g);
    if (experts[expert].list == B1) {
        g->target += b2 > b1 ? b2 / b1 : 1.0;
        g->target = g->target > g->head.n_slots ? g->head.n_slots : g->target;
        move(g, expert, B1); /* youngest: it is about to come back */
    } else if (experts[expert].list == B2) {
        g->target -= b1 > b2 ? b1 / b2 : 1.0;
        g->target = g->target < 0.0 ? 0.0 : g->target;
        g->from_b2 = true;
        move(g, expert, B2);
    }
}

/* T1 and B1 together are as many as there are slots at most, all four twice as many. */
static void trim(struct group *g) {
    while (g->n[T1] + g->n[B1] > g->head.n_slots && g->n[B1] > 0) {
        move(g, oldest(g, B1, NULL), NOWHERE);
    }
    while (g->n[T1] + g->n[T2] + g->n[B1] + g->n[B2] > 2 * g->head.n_slots && g->n[B1] + g->n[B2] > 0) {
        move(g, oldest(g, g->n[B2] > 0 ? B2 : B1, NULL), NOWHERE);
    }
}

static void on_insert(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    move(g, expert, experts[expert].list == NOWHERE ? T1 : T2);
    trim(g);
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    move(g, expert, experts[expert].list == T1 ? B1 : B2);
    trim(g);
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const double t1 = g->n[T1];
    const bool first = t1 > g->target || (g->from_b2 && t1 > 0.0 && t1 >= g->target);
    const int32_t e = oldest(g, first ? T1 : T2, may_leave);
    return e >= 0 ? e : oldest(g, first ? T2 : T1, may_leave);
}

static void end_token(struct fm_policy *policy, int32_t group) {
    at(policy, group)->token_ended = true;
}

static void resize(struct fm_policy *policy, int32_t group, int32_t n_slots) {
    struct group *g = at(policy, group);
    g->head.n_slots = n_slots;
    g->target = g->target > n_slots ? n_slots : g->target;
    trim(g);
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t n[N_LISTS] = {0};
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        n[experts[e].list]++;
        if ((resident[e] != 0) != (experts[e].list == T1 || experts[e].list == T2)) {
            return false;
        }
    }
    for (int32_t list = 0; list < N_LISTS; list++) {
        if (n[list] != g->n[list]) {
            return false;
        }
    }
    return g->target >= 0.0 && g->target <= g->head.n_slots &&
           (n[B1] == 0 || n[T1] + n[B1] <= g->head.n_slots);
}

const struct fm_policy_type fm_policy_arc = {
    .name = "arc",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = on_hit,
    .on_miss = on_miss,
    .on_insert = on_insert,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = end_token,
    .resize = resize,
    .verify = verify,
};
