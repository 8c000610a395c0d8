/* hooks.c: the only file that knows ggml and llama.cpp. Gives each model's routed expert weights a
 * buffer without memory, and answers MUL_MAT_ID with experts from the stream (patches 1 and 2).
 *
 * The buffer is a reserved address range that cannot be read: whoever would touch an expert's
 * bytes without asking the cache crashes at once instead of computing on garbage. It says that it
 * is no host memory, and only the processor's backend accepts it, so the scheduler leaves its
 * operations there and never copies out of it. A stream that uploads lets devices have the
 * operations that they ask for, and brings them the routed experts through the cache (patch 3). */

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "stream.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu-experts.h"
#include "ggml-expert-upload.h"
#include "llama-tensor-source.h"

/* The loader keeps one of these per model; ggml asks it for the buffer. */
struct source {
    struct ggml_backend_buffer_type type; /* first: its address is the buffer type */
    fm_stream *stream;
    struct range *ranges; /* ascending; filled as tensors are placed */
    size_t n_ranges;
    uint8_t *base;
    size_t size;
};

struct range {
    size_t offset;
    int32_t group;
    int32_t part;
};

static _Thread_local struct source *attached;
static pthread_once_t registered = PTHREAD_ONCE_INIT;

static const char *type_name(ggml_backend_buffer_type_t type) {
    (void)type;
    return "FlashMoE";
}

static bool owns(ggml_backend_buffer_type_t type) {
    return type->iface.get_name == type_name;
}

static bool find_part(const fm_stream *stream, const char *tensor, int32_t *group, int32_t *part) {
    for (int32_t g = 0; g < stream->n_groups; g++) {
        for (int32_t p = 0; p < stream->groups[g].n_parts; p++) {
            if (strcmp(stream->groups[g].parts[p].tensor, tensor) == 0) {
                *group = g;
                *part = p;
                return true;
            }
        }
    }
    return false;
}

/* The range that begins at this tensor's data; NULL when the tensor is a view into the middle of one. */
static const struct range *range_of(const struct source *source, const struct ggml_tensor *tensor) {
    const size_t offset = (size_t)((const uint8_t *)tensor->data - source->base);
    size_t low = 0;
    size_t high = source->n_ranges;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (source->ranges[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < source->n_ranges && source->ranges[low].offset == offset ? &source->ranges[low] : NULL;
}

static void buffer_free(ggml_backend_buffer_t buffer) {
    struct source *source = buffer->context;
    if (attached == source) {
        attached = NULL; /* the load failed half way */
        llama_set_tensor_source(NULL, NULL);
    }
    munmap(source->base, source->size);
    free(source->ranges);
    free(source);
}

static void *buffer_base(ggml_backend_buffer_t buffer) {
    return ((struct source *)buffer->context)->base;
}

static enum ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor) {
    struct source *source = buffer->context;
    struct range range = {.offset = (size_t)((uint8_t *)tensor->data - source->base)};
    if (tensor->view_src != NULL) {
        return GGML_STATUS_SUCCESS;
    }
    struct range *ranges = realloc(source->ranges, (source->n_ranges + 1) * sizeof *ranges);
    if (ranges == NULL) {
        return GGML_STATUS_ALLOC_FAILED;
    }
    source->ranges = ranges;
    if (!find_part(source->stream, tensor->name, &range.group, &range.part)) {
        return GGML_STATUS_FAILED;
    }
    ranges[source->n_ranges++] = range;
    pthread_mutex_lock(&source->stream->lock);
    source->stream->groups[range.group].n_bound++;
    pthread_mutex_unlock(&source->stream->lock);
    return GGML_STATUS_SUCCESS;
}

static void buffer_memset(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    (void)buffer, (void)tensor, (void)value, (void)offset, (void)size;
}

static void buffer_set(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    (void)buffer, (void)tensor, (void)data, (void)offset, (void)size;
}

/* Bytes [offset, offset + size) of the tensor, which lie in pieces when experts have a stride of their own. */
static int read_bytes(fm_stream *stream, const struct part *part, uint8_t *data, size_t offset, size_t size) {
    while (size > 0) {
        const size_t expert = offset / part->expert_bytes;
        const size_t within = offset % part->expert_bytes;
        const size_t n = size < part->expert_bytes - within ? size : part->expert_bytes - within;
        const struct fm_place place = fm_part_place(part, (int32_t)expert);
        const int error = fm_io_read_now(stream->io, place.file, data, n, place.offset + within);
        if (error != 0) {
            return error;
        }
        data += n;
        offset += n;
        size -= n;
    }
    return 0;
}

/* Whoever wants the bytes outside MUL_MAT_ID gets them from the file. */
static void buffer_get(ggml_backend_buffer_t buffer, const struct ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    struct source *source = buffer->context;
    fm_stream *stream = source->stream;
    const struct range *range = range_of(source, tensor);
    struct load whole = {.expert = -1}; /* for the error: all experts of the part */
    int error = FM_IO_SHORT;
    if (range != NULL) {
        const struct part *part = &stream->groups[range->group].parts[range->part];
        whole.group = range->group;
        whole.part = range->part;
        error = read_bytes(stream, part, data, offset, size);
    }
    if (error != 0) {
        memset(data, 0, size);
        pthread_mutex_lock(&stream->lock);
        fm_load_latch(stream, range != NULL ? &whole : NULL, FM_IO_ERROR, error);
        pthread_mutex_unlock(&stream->lock);
    }
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    (void)buffer, (void)value;
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    struct source *source = (struct source *)type;
    if (source->base != NULL) {
        return NULL; /* one model per attach */
    }
    const struct ggml_backend_buffer_i interface = {
        .free_buffer = buffer_free,
        .get_base = buffer_base,
        .init_tensor = buffer_init_tensor,
        .memset_tensor = buffer_memset,
        .set_tensor = buffer_set,
        .get_tensor = buffer_get,
        .clear = buffer_clear,
    };
    void *base = mmap(NULL, size > 0 ? size : 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return NULL;
    }
    source->base = base;
    source->size = size > 0 ? size : 1;
    return ggml_backend_buffer_init(type, interface, source, size);
}

static size_t alignment(ggml_backend_buffer_type_t type) {
    (void)type;
    return 64;
}

static ggml_backend_buffer_type_t place(const struct ggml_tensor *tensor, void *user_data) {
    struct source *source = user_data;
    int32_t group;
    int32_t part;
    return find_part(source->stream, tensor->name, &group, &part) ? &source->type : NULL;
}

/* The i-th part that its file does not describe. */
static bool describe(int i, struct llama_tensor_description *description, void *user_data) {
    const fm_stream *stream = ((const struct source *)user_data)->stream;
    for (int32_t g = 0; g < stream->n_groups; g++) {
        const struct group *group = &stream->groups[g];
        for (int32_t p = 0; p < group->n_parts; p++) {
            const struct part *part = &group->parts[p];
            if (part->type >= 0 && i-- == 0) {
                description->name = part->tensor;
                description->type = (enum ggml_type)part->type;
                description->ne[0] = part->ne0;
                description->ne[1] = part->ne1;
                description->ne[2] = group->n_expert;
                return true;
            }
        }
    }
    return false;
}

/* The tensors that a packed file brings besides the model's. */
static bool hides(const char *name, void *user_data) {
    (void)user_data;
    return strncmp(name, "flashmoe.", strlen("flashmoe.")) == 0;
}

static const struct llama_tensor_source tensor_source = {
    .place = place,
    .describe = describe,
    .hides = hides,
};

/* The router whose scores these ids come from: the first matmul up the graph with a row per expert. */
static const float *router_of(const struct ggml_tensor *ids, int64_t n_expert, int64_t width) {
    enum { STEPS = 12 };
    const struct ggml_tensor *t = ids;
    for (int i = 0; i < STEPS && t != NULL; i++, t = t->src[0]) {
        const struct ggml_tensor *router = t->op == GGML_OP_MUL_MAT ? t->src[0] : NULL;
        if (router != NULL) {
            const bool fits = router->op == GGML_OP_NONE && router->type == GGML_TYPE_F32 && ggml_is_contiguous(router) &&
                              router->ne[0] == width && router->ne[1] == n_expert && router->buffer != NULL &&
                              ggml_backend_buffer_is_host(router->buffer);
            return fits ? router->data : NULL;
        }
    }
    return NULL;
}

static void *begin(const struct ggml_tensor *dst, const int64_t *n_rows, int n_threads, int32_t *order) {
    const struct ggml_tensor *weights = dst->src[0];
    const struct ggml_tensor *input = dst->src[1];
    const struct ggml_tensor *ids = dst->src[2];
    const struct source *source = (const struct source *)weights->buffer->buft;
    const struct range *range = range_of(source, weights);
    const struct fm_routing routing = {
        .ids = ids->data,
        .n_used = ids->ne[0],
        .n_tokens = ids->ne[1],
        .stride_used = ids->nb[0],
        .stride_token = ids->nb[1],
        /* up and gate take the same row for all experts of a token; down does not */
        .activation = input->type == GGML_TYPE_F32 && input->ne[1] == 1 && ids->ne[1] == 1 ? input->data : NULL,
        .router = ids->ne[1] == 1 ? router_of(ids, weights->ne[2], input->ne[0]) : NULL,
        .width = input->ne[0],
    };
    return fm_operation_begin(source->stream, range != NULL ? range->group : -1, range != NULL ? range->part : -1,
                              &routing, (int32_t)weights->ne[2], n_rows, n_threads, order);
}

static const struct ggml_cpu_expert_source expert_source = {
    .owns = owns,
    .begin = begin,
    .acquire = fm_operation_acquire,
    .release = fm_operation_release,
};

static bool wants_upload(ggml_backend_buffer_type_t type) {
    return owns(type) && ((const struct source *)type)->stream->uploads;
}

/* How many rows each expert has, [n_expert], and so their number. */
static int32_t count_rows(const struct ggml_tensor *ids, const int32_t *data, int64_t *n_rows, int32_t n_expert) {
    int32_t n_distinct = 0;
    for (int64_t t = 0; t < ids->ne[1]; t++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            const int32_t e = data[((size_t)t * ids->nb[1] + (size_t)k * ids->nb[0]) / sizeof *data];
            if (e >= 0 && e < n_expert) {
                n_distinct += n_rows[e]++ == 0;
            }
        }
    }
    return n_distinct;
}

/* An operation like any other, but for what is done with each expert while it is there. */
static void upload(ggml_backend_t backend, const struct ggml_tensor *weights, struct ggml_tensor *copy,
                   const struct ggml_tensor *ids, const int32_t *ids_data) {
    /* kernels may read past a matrix, where there must be numbers: src/ggml-cuda, MMQ */
    enum { PADDING = 512 };
    const struct source *source = (const struct source *)weights->buffer->buft;
    const struct range *range = range_of(source, weights);
    const int32_t n_expert = (int32_t)weights->ne[2];
    const size_t bytes = weights->nb[2];
    const struct fm_routing routing = {
        .ids = (const char *)ids_data,
        .n_used = ids->ne[0],
        .n_tokens = ids->ne[1],
        .stride_used = ids->nb[0],
        .stride_token = ids->nb[1],
    };
    int64_t n_rows[n_expert];
    int32_t order[n_expert];
    memset(n_rows, 0, sizeof n_rows);
    const int32_t n = count_rows(ids, ids_data, n_rows, n_expert);
    void *operation = fm_operation_begin(source->stream, range != NULL ? range->group : -1,
                                         range != NULL ? range->part : -1, &routing, n_expert, n_rows, 1, order);
    for (int32_t i = 0; i < n; i++) {
        const size_t at = (size_t)order[i] * bytes;
        const void *expert = fm_operation_acquire(operation, i);
        ggml_backend_tensor_set_async(backend, copy, expert, at, bytes);
        if (order[i] + 1 < n_expert && n_rows[order[i] + 1] == 0) {
            ggml_backend_tensor_set_async(backend, copy, expert, at + bytes, bytes < PADDING ? bytes : PADDING);
        }
        ggml_backend_synchronize(backend); /* meanwhile the next ones are read */
        fm_operation_release(operation, i);
    }
}

static const struct ggml_expert_upload expert_upload = {
    .wants = wants_upload,
    .upload = upload,
};

void fm_hooks_upload(fm_stream *stream, int32_t on) {
    stream->uploads = on != 0;
}

/* llm_graph_context::build_moe_ffn names so what it takes from the router's probabilities for the
 * chosen experts, [1, n_used, n_tokens]; the second only where a softmax over the chosen ones follows. */
static const char *const probs_names[] = {"ffn_moe_weights-", "ffn_moe_weights_softmax-"};

/* The layer of such a node; -1: another node. */
static int32_t probs_layer(const struct ggml_tensor *node) {
    for (size_t i = 0; i < sizeof probs_names / sizeof probs_names[0]; i++) {
        const size_t length = strlen(probs_names[i]);
        char *end;
        if (strncmp(node->name, probs_names[i], length) == 0) {
            const long layer = strtol(node->name + length, &end, 10);
            return *end == '\0' && end != node->name + length ? (int32_t)layer : -1;
        }
    }
    return -1;
}

static bool on_node(struct ggml_tensor *node, bool ask, void *user_data) {
    const int32_t layer = probs_layer(node);
    if (ask) {
        return layer >= 0;
    }
    if (layer >= 0 && node->type == GGML_TYPE_F32 && node->ne[0] == 1 && node->ne[3] == 1 && ggml_is_contiguous(node)) {
        float *probs = malloc(ggml_nbytes(node));
        if (probs != NULL) {
            ggml_backend_tensor_get(node, probs, 0, ggml_nbytes(node)); /* it may be on another device */
            fm_trace_probs(user_data, layer, probs, node->ne[1], node->ne[2]);
            free(probs);
        }
    }
    return true;
}

void *fm_hooks_probs_callback(void) {
    bool (*callback)(struct ggml_tensor *, bool, void *) = on_node;
    void *address;
    memcpy(&address, &callback, sizeof address); /* ISO C has no cast for this */
    return address;
}

static void register_source(void) {
    ggml_cpu_set_expert_source(&expert_source);
    ggml_set_expert_upload(&expert_upload);
}

int32_t fm_hooks_attach(fm_stream *stream) {
    if (stream != NULL && stream->ring == NULL) {
        return fm_fail(FM_BAD_STATE, "the stream is not open");
    }
    pthread_once(&registered, register_source);
    if (attached != NULL && attached->base == NULL) {
        free(attached); /* nothing was loaded: no buffer owns it */
    }
    attached = NULL;
    llama_set_tensor_source(NULL, NULL);
    if (stream == NULL) {
        return FM_OK;
    }
    attached = calloc(1, sizeof *attached);
    if (attached == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory");
    }
    attached->stream = stream;
    attached->type.iface.get_name = type_name;
    attached->type.iface.alloc_buffer = alloc_buffer;
    attached->type.iface.get_alignment = alignment;
    llama_set_tensor_source(&tensor_source, attached);
    return FM_OK;
}
