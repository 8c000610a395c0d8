/* flashmoe.h: run the routed experts of a MoE model from disk through a bounded cache.
 *
 * One fm_stream serves one loaded model. Python describes the model's expert tensors to it,
 * attaches it to the thread that loads the model, then starts it with so many slots per group.
 * While llama.cpp computes, hooks.c asks it for one expert at a time.
 *
 * Terms: a group is the routed experts of one layer (and family); a part is one weight tensor of
 * the group (up, gate, down); a slot holds all parts of one expert; the ring is a few buffers of
 * one part each, for operations that need more experts than the group has slots.
 *
 * Functions that can fail return an fm_status and leave a message in fm_last_message() of the
 * calling thread. Nothing here prints, exits or aborts. Python reads this header as it is
 * (cffi, ABI mode): declarations only, no preprocessor conditionals.
 */

enum fm_status {
    FM_OK = 0,
    FM_BAD_ARGUMENT = 1,
    FM_NO_MEMORY = 2,
    FM_IO_ERROR = 3,
    FM_BAD_STATE = 4,
    FM_CORRUPT = 5, /* bytes that do not match their checksum */
};

enum fm_io_mode {
    FM_IO_AUTO = 0,     /* direct where the file system allows it, else buffered */
    FM_IO_DIRECT = 1,   /* direct or fail */
    FM_IO_BUFFERED = 2, /* through the page cache */
};

enum fm_verify {
    FM_VERIFY_FIRST = 0, /* check each part when it is read for the first time */
    FM_VERIFY_ALWAYS = 1,
    FM_VERIFY_OFF = 2,
};

typedef struct fm_stream fm_stream;

struct fm_options {
    int32_t io_mode;       /* enum fm_io_mode */
    int32_t n_workers;     /* reading threads per drive; 0: nothing is read until fm_pump (tests) */
    int32_t n_ring;        /* ring buffers, at least 2 */
    uint32_t request_bytes; /* one read at most; a multiple of 4096 */
    int32_t verify;        /* enum fm_verify */
};

/* The first error since it was last taken. Layer, expert: -1 when not known. */
struct fm_error {
    int32_t status;
    int32_t sys_errno; /* 0: the file ended early */
    int32_t file;
    int32_t layer;
    int32_t expert;
    int32_t part;
    uint64_t count;   /* failed loads in all */
    char tensor[128];
};

/* Counters since the start, except the *_bytes of memory, which are as of now. */
struct fm_stats {
    uint64_t tokens;          /* routed tokens, counted at the first layer */
    uint64_t operations;      /* MUL_MAT_ID operations begun */
    uint64_t lookups;         /* distinct experts wanted, one per expert and layer pass */
    uint64_t hits;            /* of these, in a slot already */
    uint64_t decode_lookups;  /* the same for passes of one token */
    uint64_t decode_hits;
    uint64_t bypassed;        /* missing experts that went through the ring */
    uint64_t inserted;
    uint64_t evicted;
    uint64_t missed_bytes;    /* exact bytes of the parts that had to be loaded */
    uint64_t read_bytes;      /* bytes read from the files */
    uint64_t reads;           /* read requests */
    uint64_t ahead_issued;    /* ring parts read before their operation began */
    uint64_t ahead_used;
    uint64_t ahead_dropped;
    uint64_t guesses;         /* experts that lookahead read before their group's router had run */
    uint64_t guesses_used;
    uint64_t guesses_wasted;
    uint64_t guesses_overtaken; /* used, and still being read when they were wanted */
    uint64_t waits;           /* times a thread slept for an expert */
    uint64_t wait_ns;         /* time asleep, divided by the threads of the operation */
    uint64_t failed_loads;
    uint64_t verified;        /* loads that were checked against their checksum */
    uint64_t slot_bytes;      /* memory reserved for slots */
    uint64_t resident_bytes;  /* of which hold an expert */
    uint64_t ring_bytes;
    int32_t files_direct;
    int32_t files_buffered;
};

/* Per group, as of now and since the start. */
struct fm_group_stats {
    int32_t layer;
    int32_t family;
    int32_t n_expert;
    int32_t n_slots;
    int32_t n_resident;
    int32_t n_bound;          /* parts that a loaded model uses; 0: the group is not part of its graph */
    uint64_t lookups;
    uint64_t hits;
    uint64_t evicted;
};

/* Where the experts of one file begin. */
struct fm_place {
    int32_t file;
    uint64_t offset;
};

/* One weight tensor of a group, in one file or spread over up to 16: expert e lies in the file of
 * places[e % n_places], at its offset + e / n_places * stride. */
struct fm_part {
    const char *tensor;
    const struct fm_place *places; /* [n_places] */
    int32_t n_places;
    uint64_t expert_bytes;
    uint64_t stride;
    const uint64_t *sums; /* [n_expert] XXH3-64 of each expert's bytes; NULL: nothing to check against */
    int32_t type;         /* ggml type, when the file does not describe the tensor to llama.cpp; else -1 */
    int64_t ne0;          /* then also row length and rows */
    int64_t ne1;
};

const char *fm_last_message(void);

/* Names of the eviction policies, by index; NULL past the end. */
const char *fm_policy_name(int32_t index);

/* A policy that the caller brings along, see policy.h for what each function is told. Functions that
 * are NULL are left out; victim is not. They are called by computing threads, one at a time, and must
 * not call anything that is declared here. When one sets `failed`, or victim names an expert that may
 * not leave, no function is called any more and lru takes over. */
enum fm_foreign_failure { FM_FOREIGN_RAISED = 1, FM_FOREIGN_NAMED_WRONG = 2 };
struct fm_foreign_policy {
    void (*on_hit)(int32_t group, int32_t expert);
    void (*on_miss)(int32_t group, int32_t expert);
    void (*on_insert)(int32_t group, int32_t expert);
    void (*on_remove)(int32_t group, int32_t expert);
    int32_t (*victim)(int32_t group, const uint8_t *may_leave);
    void (*end_token)(int32_t group);
    void (*begin_sequence)(void);
    int32_t failed; /* enum fm_foreign_failure; 0: it works */
    int32_t named;  /* the wrong expert */
    uint64_t ns;    /* spent in these functions */
};

/* Describe: files, then groups, then parts in the order up, gate_up, gate, down. Return an index, or -1. */
fm_stream *fm_stream_new(const struct fm_options *options);
/* drive: 0, one that a file was added with, or the next number. Each drive has its own readers, so
 * that a slow one holds up nobody else. */
int32_t fm_stream_add_file(fm_stream *stream, const char *path, int32_t drive);
int32_t fm_stream_add_group(fm_stream *stream, int32_t layer, int32_t family, int32_t n_expert);
int32_t fm_stream_add_part(fm_stream *stream, int32_t group, const struct fm_part *part);

/* Bytes that one slot of this group takes; bytes of the whole ring. */
uint64_t fm_stream_slot_bytes(const fm_stream *stream, int32_t group);
uint64_t fm_stream_ring_bytes(const fm_stream *stream);

/* Allocate the ring: from now on operations can run, everything through the ring. */
int32_t fm_stream_open(fm_stream *stream);
/* Allocate slots, n_slots[n_groups]; once, after open, while no operation runs. */
int32_t fm_stream_start(fm_stream *stream, const int32_t *n_slots, const char *policy);
/* The same with a policy that stays with the caller until fm_stream_free. */
int32_t fm_stream_start_foreign(fm_stream *stream, const int32_t *n_slots, struct fm_foreign_policy *policy);

/* What the policy has learned, after start. save: returns how many numbers that are, and writes them
 * when n is enough; 0: it learns nothing. freeze: from now on it keeps them (1), or learns again (0). */
uint64_t fm_stream_policy_save(fm_stream *stream, float *weights, uint64_t n);
int32_t fm_stream_policy_load(fm_stream *stream, const float *weights, uint64_t n);
void fm_stream_policy_freeze(fm_stream *stream, int32_t frozen);

/* Reads the experts of groups that have a slot for each of them, in the background. */
void fm_stream_fill(fm_stream *stream);

/* From now on n_slots[n_groups] of the slots are used, no more than at the start; the memory of the
 * others goes back to the system. Those in use right now stay until the next call. */
int32_t fm_stream_resize(fm_stream *stream, const int32_t *n_slots);

/* Once, after the start: guess experts of the next group by a predictor ("routing": what this token and the
 * one before used; "router": the next router on this group's input), `width` per group at most.
 * adaptive: only while tokens come faster with it than without, as measured in turns. */
int32_t fm_stream_lookahead(fm_stream *stream, const char *predictor, int32_t width, int32_t adaptive);

void fm_stream_stats(fm_stream *stream, struct fm_stats *stats);
int32_t fm_stream_group_stats(fm_stream *stream, int32_t group, struct fm_group_stats *stats);
/* Per expert of a group, each [n_expert]: 1 when it has a slot now, and how many tokens have used it since the start. */
int32_t fm_stream_experts(fm_stream *stream, int32_t group, uint8_t *resident, uint64_t *uses);
/* The routing of the last n_tokens decoded tokens from now on, up to k experts of each group. */
int32_t fm_window_start(fm_stream *stream, int32_t k, int32_t n_tokens);
/* Tokens seen since the start of the window. */
uint64_t fm_window_tokens(fm_stream *stream);
/* Copies the window without the token that may be under way, oldest first: ids [n_tokens][n_groups][k],
 * 65535: none; hits [n_tokens]: how many of a token's experts were resident without lookahead. Returns how many tokens. */
int32_t fm_window_read(fm_stream *stream, uint16_t *ids, uint32_t *hits);
/* Copies and clears the latched error; returns 1 when there was one. */
int32_t fm_stream_take_error(fm_stream *stream, struct fm_error *error);
/* Checks every invariant of cache and policy; FM_OK or FM_BAD_STATE. */
int32_t fm_stream_verify(fm_stream *stream);
/* Waits for reads in flight and frees everything. The model must be gone. */
void fm_stream_free(fm_stream *stream);

/* Recorded routing, replayed through a cache of its own per layer as decoding goes through it, without
 * weights. The arrays stay with the caller, until fm_simulation_free. */
typedef struct fm_simulation fm_simulation;
struct fm_simulation_setup {
    const uint16_t *experts;  /* [n_tokens][n_layers][k]; 65535: none */
    int64_t n_tokens;
    int32_t n_layers;
    int32_t k;
    const int64_t *sequences; /* [n_sequences] the first token of each, ascending */
    int64_t n_sequences;
    const int32_t *n_expert;  /* [n_layers] */
    const int32_t *n_slots;   /* [n_layers] */
    const char *policy;       /* one that fm_policy_name() knows, or belady, or belady-bypass */
    struct fm_foreign_policy *foreign; /* in its place; NULL: none */
    uint64_t seed;            /* for policies that draw lots */
    int32_t bypass;           /* 1: what a token has just used may leave as well, in place of another */
    uint16_t *victims;        /* [n_tokens][n_layers][k] who left, in order, 65535 beforehand; NULL: not wanted */
};
struct fm_layer_counts {
    uint64_t lookups;
    uint64_t hits;      /* before anything of the token was inserted */
    uint64_t evicted;
    uint64_t refetched; /* of these, needed again within 5 tokens */
};
fm_simulation *fm_simulation_new(const struct fm_simulation_setup *setup);
/* What the policy has learned before, and has learned by now (returns how many numbers that are, and
 * writes them when n is enough; 0: it learns nothing). */
int32_t fm_simulation_load(fm_simulation *simulation, const float *weights, uint64_t n);
uint64_t fm_simulation_save(fm_simulation *simulation, float *weights, uint64_t n);
/* Replays so many more tokens; returns how many are left. */
int64_t fm_simulation_run(fm_simulation *simulation, int64_t n_tokens);
/* counts[n_layers] so far; FM_BAD_STATE when the policy's invariants are broken. */
int32_t fm_simulation_counts(const fm_simulation *simulation, struct fm_layer_counts *counts);
void fm_simulation_free(fm_simulation *simulation);
/* The tokens that are computed next belong to another request: tells the policy and the trace. */
void fm_stream_begin_sequence(fm_stream *stream);

/* Recording which experts each token uses: a row per token, in the order of computing, [n_groups][k]
 * ids in the router's order; 0xFFFF where a token used fewer. Rows wait until they are taken, at
 * most max_rows of them; what finds no room is counted as lost. For one context at a time. */
struct fm_trace_counts {
    uint64_t rows;    /* since the start */
    uint64_t waiting; /* of which can be taken */
    uint64_t lost;
};
int32_t fm_trace_start(fm_stream *stream, int32_t k, uint64_t max_rows, int32_t with_probs);
void fm_trace_stop(fm_stream *stream);
/* What the rows to come are marked with: 0 prompt, 1 answer. */
void fm_trace_set_phase(fm_stream *stream, int32_t phase);
void fm_trace_count(fm_stream *stream, struct fm_trace_counts *counts);
/* Forgets all rows but the first so many, which were of a decode that failed. */
void fm_trace_cut(fm_stream *stream, uint64_t rows);
/* Moves up to max_rows of the oldest rows out: ids and probs [rows][n_groups][k], phases and starts
 * (1 where a sequence begins) [rows]; NULL: not wanted. Between two decodes. Returns how many. */
uint64_t fm_trace_take(fm_stream *stream, uint64_t max_rows, uint16_t *ids, float *probs, uint8_t *phases, uint8_t *starts);
/* The router's probabilities [n_tokens][n_used] of a layer's pass that comes next. */
void fm_trace_probs(fm_stream *stream, int32_t layer, const float *probs, int64_t n_used, int64_t n_tokens);
/* llama.cpp's eval callback (cb_eval, user data: the stream) that calls it. */
void *fm_hooks_probs_callback(void);

/* The one model that this thread loads next gets its expert tensors from `stream`, which is open;
 * NULL ends it, in the same thread and before that model is freed. */
int32_t fm_hooks_attach(fm_stream *stream);

/* Whether devices may take over large operations, whose experts are then uploaded to them through
 * the cache. Before the model is loaded; off at first. */
void fm_hooks_upload(fm_stream *stream, int32_t on);

/* One operation, as hooks.c runs it. ids: [n_tokens][n_used] with byte strides; n_rows [n_expert];
 * order [n_expert] is filled with the experts to visit. begin never fails: with an unknown group it
 * latches an error and serves zeros. */
struct fm_routing {
    const char *ids;
    int64_t n_used;
    int64_t n_tokens;
    uint64_t stride_used;
    uint64_t stride_token;
    const float *activation; /* [width] of a single token: what goes into the experts; NULL: not at hand */
    const float *router;     /* [n_expert][width] of this group; NULL: not at hand */
    int64_t width;
};
void *fm_operation_begin(fm_stream *stream, int32_t group, int32_t part, const struct fm_routing *routing,
                         int32_t n_expert, const int64_t *n_rows, int32_t n_threads, int32_t *order);
const void *fm_operation_acquire(void *operation, int32_t i);
void fm_operation_release(void *operation, int32_t i);

/* Faults for tests: reads that begin once `after` more reads have begun, `count` of them, fail
 * (sys_errno > 0), come up short (sys_errno 0), or are held until fm_fault_release (hold 1). */
struct fm_fault {
    int32_t sys_errno;
    int32_t hold;
    uint64_t after;
    uint64_t count;
};
void fm_fault_set(fm_stream *stream, const struct fm_fault *fault);
void fm_fault_release(fm_stream *stream);
/* Held reads right now. */
int32_t fm_fault_held(fm_stream *stream);
/* With no workers: run the queued read at position `index`, in the order they would run; 0 when there is none. */
int32_t fm_pump(fm_stream *stream, int32_t index);
