/* policy_lecar.c: LeCaR. Each victim is chosen by LRU or by LFU, by lot with learned weights. Both
 * remember whom they sent away; when one of these is needed again, the one that sent it away was
 * wrong, the more so the shorter ago, and the other gains weight.
 *
 * G. Vietri et al., Driving Cache Replacement with ML-based LeCaR, HotStorage 2018, with its constants:
 * learning rate 0.45, discount 0.005^(1/slots) per use, histories as long as the cache; counts are kept
 * while an expert is resident or in a history; a victim that both would choose is not remembered.
 * What differs because a token uses k experts at once: weights move for each missing one when the
 * token is seen, before anyone leaves; both choose among those that may leave only. */

#include <math.h>

#include "policy.h"

static const double learning_rate = 0.45;
static const double discount_base = 0.005;

enum chooser { NOBODY, LRU, LFU, N_CHOOSERS };

struct expert {
    uint64_t last_use;
    uint64_t n_uses;  /* 0: forgotten */
    uint64_t left_at;
    int32_t sender;   /* in whose history it is */
};

struct group {
    struct fm_policy_group head;
    uint64_t clock;     /* uses */
    uint64_t lots;
    double lru_weight;  /* LFU has the rest of 1 */
    double discount;
    int32_t n_sent[N_CHOOSERS];
    int32_t victim;     /* that was named last; -1: none */
    int32_t chooser;    /* NOBODY: both */
};

static struct group *at(const struct fm_policy *policy, int32_t group) {
    return (struct group *)policy + group;
}

static void set_slots(struct group *g, int32_t n_slots) {
    g->head.n_slots = n_slots;
    g->discount = n_slots > 0 ? pow(discount_base, 1.0 / n_slots) : 0.0;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    struct fm_policy *policy = fm_policy_new(setup, sizeof(struct group), sizeof(struct expert));
    uint64_t seed = setup->seed;
    for (int32_t i = 0; i < setup->n_groups && policy != NULL; i++) {
        struct group *g = at(policy, i);
        g->lots = fm_policy_draw(&seed);
        g->lru_weight = 0.5;
        g->victim = -1;
        set_slots(g, setup->n_slots[i]);
    }
    return policy;
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *e = (struct expert *)g->head.experts + expert;
    e->n_uses++;
    e->last_use = ++g->clock;
}

static void leave_history(struct group *g, struct expert *expert) {
    g->n_sent[expert->sender]--;
    expert->sender = NOBODY;
}

static void on_miss(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *e = (struct expert *)g->head.experts + expert;
    if (e->sender == NOBODY) {
        e->n_uses = 0;
    } else {
        const double regret = pow(g->discount, (double)(g->clock - e->left_at));
        const double gain = exp(learning_rate * regret);
        const double lru = g->lru_weight * (e->sender == LFU ? gain : 1.0);
        const double lfu = (1.0 - g->lru_weight) * (e->sender == LRU ? gain : 1.0);
        g->lru_weight = lru / (lru + lfu);
        leave_history(g, e);
    }
    used(policy, group, expert);
}

static void on_insert(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *e = (struct expert *)g->head.experts + expert;
    if (e->sender != NOBODY) { /* it comes unasked */
        leave_history(g, e);
    }
}

static void forget_oldest(struct group *g, int32_t sender) {
    struct expert *experts = g->head.experts;
    int32_t oldest = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (experts[e].sender == sender && (oldest < 0 || experts[e].left_at < experts[oldest].left_at)) {
            oldest = e;
        }
    }
    experts[oldest].n_uses = 0;
    leave_history(g, &experts[oldest]);
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *e = (struct expert *)g->head.experts + expert;
    const int32_t sender = expert == g->victim ? g->chooser : NOBODY;
    g->victim = -1;
    if (sender == NOBODY) {
        e->n_uses = 0;
        return;
    }
    if (g->n_sent[sender] >= g->head.n_slots) {
        forget_oldest(g, sender);
    }
    e->sender = sender;
    e->left_at = g->clock;
    g->n_sent[sender]++;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t lru = -1;
    int32_t lfu = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (!may_leave[e]) {
            continue;
        }
        if (lru < 0 || experts[e].last_use < experts[lru].last_use) {
            lru = e;
        }
        if (lfu < 0 || experts[e].n_uses < experts[lfu].n_uses ||
            (experts[e].n_uses == experts[lfu].n_uses && experts[e].last_use < experts[lfu].last_use)) {
            lfu = e;
        }
    }
    const double lot = (double)(fm_policy_draw(&g->lots) >> 11) * 0x1p-53;
    g->chooser = lot < g->lru_weight ? LRU : LFU;
    g->victim = g->chooser == LRU ? lru : lfu;
    if (lru == lfu) {
        g->chooser = NOBODY;
    }
    return g->victim;
}

static void resize(struct fm_policy *policy, int32_t group, int32_t n_slots) {
    struct group *g = at(policy, group);
    set_slots(g, n_slots);
    for (int32_t sender = LRU; sender <= LFU; sender++) {
        while (g->n_sent[sender] > n_slots) {
            forget_oldest(g, sender);
        }
    }
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t n_sent[N_CHOOSERS] = {0};
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        n_sent[experts[e].sender]++;
        if ((resident[e] && experts[e].sender != NOBODY) || experts[e].last_use > g->clock) {
            return false;
        }
    }
    return n_sent[LRU] == g->n_sent[LRU] && n_sent[LFU] == g->n_sent[LFU] && n_sent[LRU] <= g->head.n_slots &&
           n_sent[LFU] <= g->head.n_slots && g->lru_weight >= 0.0 && g->lru_weight <= 1.0;
}

const struct fm_policy_type fm_policy_lecar = {
    .name = "lecar",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = used,
    .on_miss = on_miss,
    .on_insert = on_insert,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = fm_policy_no_end,
    .resize = resize,
    .verify = verify,
};
