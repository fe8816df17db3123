/* The far field: means of segments without their heavy keys, then the heavy keys themselves, and for each block of queries
   the log of how many keys each mean stands for that the block does not see as they are. */

#define NOTHING ((REAL)-1e30) /* the bias of what stands for no key, MASKED in partial_softmax.py */

typedef struct {
    int64_t threads, l, C, heads, segments, heavy, d, e, s, blocks, chosen;
    const int64_t *valid;    /* (b): tokens of each example; segment j of m begins at token ⌈j·valid/m⌉ */
    const int64_t *place;    /* (c, heavy) */
    const uint8_t *real;     /* (c, heavy): whether there are so many keys */
    const int64_t *seen;     /* (c, blocks, chosen): blocks seen beside the neighbours, -1 for none; or 0 */
    view key, value, far_key, far_value; /* (l, c, ...) twice, (c, m, ...) twice; in the backward, gradients of them */
    REAL *bias;              /* (blocks, c, m) */
    int64_t adds;            /* backward: whether gradients are added to what is there */
    int64_t parts;
} far_task;

INLINE far_task take_far(const int64_t **args) {
    far_task t = {0};
    t.threads = take(args);
    t.l = take(args), t.C = take(args), t.heads = take(args), t.segments = take(args), t.heavy = take(args);
    t.d = take(args), t.e = take(args), t.s = take(args), t.blocks = take(args), t.chosen = take(args);
    t.valid = (const int64_t *)(intptr_t)take(args), t.place = (const int64_t *)(intptr_t)take(args);
    t.real = (const uint8_t *)(intptr_t)take(args), t.seen = (const int64_t *)(intptr_t)take(args);
    t.key = take_view(args), t.value = take_view(args), t.far_key = take_view(args), t.far_value = take_view(args);
    t.parts = parts_of(t.segments, SEGMENTS);
    return t;
}

/* A segment, the heavy keys in it in their order, and which of the heavy keys they are. */
typedef struct {
    int64_t begin, end, count;
    int64_t *place, *which;
} segment;

INLINE segment segment_of(const far_task *t, int64_t c, int64_t j, int64_t *scratch) {
    const int64_t valid = t->valid[c / t->heads];
    segment x = {parts_of(j * valid, t->segments), parts_of((j + 1) * valid, t->segments), 0, scratch, scratch + t->heavy};
    for (int64_t i = 0; i < t->heavy; i++) {
        const int64_t place = t->place[c * t->heavy + i];
        if (!t->real[c * t->heavy + i] || place < x.begin || place >= x.end) continue;
        int64_t k = x.count++;
        for (; k > 0 && x.place[k - 1] > place; k--) x.place[k] = x.place[k - 1], x.which[k] = x.which[k - 1];
        x.place[k] = place, x.which[k] = i;
    }
    return x;
}

INLINE void mean_without_heavy(view tokens, int64_t c, const segment *x, REAL *mean, REAL *some, int64_t width) {
    memset(mean, 0, width * sizeof(REAL));
    int64_t r = x->begin;
    for (int64_t i = 0; i <= x->count; i++) {
        const int64_t end = i < x->count ? x->place[i] : x->end;
        while (r < end) {
            memset(some, 0, width * sizeof(REAL));
            for (const int64_t until = smaller(r + ADDED_AT_ONCE, end); r < until; r++)
                add_multiple(some, 1, at(tokens, 0, c, r), width);
            add_multiple(mean, 1, some, width);
        }
        r = end + 1;
    }
    const int64_t count = x->end - x->begin - x->count;
    for (int64_t k = 0; k < width; k++) mean[k] /= count > 0 ? count : 1;
}

INLINE int64_t overlap(const segment *x, int64_t begin, int64_t end) {
    const int64_t first = begin > x->begin ? begin : x->begin, last = smaller(end, x->end);
    return last > first ? last - first : 0;
}

/* How many keys of a segment a block of queries neither sees as they are nor as heavy ones. */
INLINE int64_t unseen(const far_task *t, int64_t c, int64_t g, const segment *x) {
    const int64_t begin = (g - 1) * t->s, end = (g + 2) * t->s;
    const int64_t all = x->end - x->begin - x->count;
    if (!t->chosen && (end <= x->begin || begin >= x->end)) return all;
    const int64_t *seen = t->seen ? t->seen + (c * t->blocks + g) * t->chosen : NULL;
    int64_t left = all - overlap(x, begin, end);
    for (int64_t k = 0; k < t->chosen; k++)
        if (seen[k] >= 0) left -= overlap(x, seen[k] * t->s, (seen[k] + 1) * t->s);
    for (int64_t i = 0; i < x->count; i++) { /* heavy ones that were taken away twice */
        const int64_t place = x->place[i];
        int is_seen = place >= begin && place < end;
        for (int64_t k = 0; k < t->chosen && !is_seen; k++) is_seen = seen[k] == place / t->s;
        left += is_seen;
    }
    return left;
}

static void far_forward_item(const void *task, int64_t item, void *scratch) {
    const far_task *t = task;
    const int64_t c = item / t->parts, first = item % t->parts * SEGMENTS, last = smaller(first + SEGMENTS, t->segments);
    const int64_t m = t->segments + t->heavy, most = parts_of(t->valid[c / t->heads], t->segments);
    int64_t *places = scratch;
    REAL *some = (REAL *)(places + 2 * t->heavy * SEGMENTS), *logs = some + (t->d > t->e ? t->d : t->e);
    for (int64_t i = 0; i <= most; i++) logs[i] = i ? logarithm((REAL)i) : NOTHING;
    segment found[SEGMENTS];
    for (int64_t j = first; j < last; j++) {
        segment *x = found + j - first;
        *x = segment_of(t, c, j, places + 2 * t->heavy * (j - first));
        mean_without_heavy(t->key, c, x, at(t->far_key, 0, c, j), some, t->d);
        mean_without_heavy(t->value, c, x, at(t->far_value, 0, c, j), some, t->e);
    }
    for (int64_t g = 0; g < t->blocks; g++)
        for (int64_t j = first; j < last; j++)
            t->bias[(g * t->C + c) * m + j] = logs[unseen(t, c, g, found + j - first)];
    if (first > 0) return;
    for (int64_t i = 0; i < t->heavy; i++) {
        const int64_t place = t->place[c * t->heavy + i];
        memcpy(at(t->far_key, 0, c, t->segments + i), at(t->key, 0, c, place), t->d * sizeof(REAL));
        memcpy(at(t->far_value, 0, c, t->segments + i), at(t->value, 0, c, place), t->e * sizeof(REAL));
        for (int64_t g = 0; g < t->blocks; g++)
            t->bias[(g * t->C + c) * m + t->segments + i] = t->real[c * t->heavy + i] ? 0 : NOTHING;
    }
}

ENTRY(far_forward)(const int64_t *args, double unused) {
    far_task t = take_far(&args);
    (void)unused;
    t.bias = (REAL *)(intptr_t)take(&args);
    const int64_t numbers = (t.d > t.e ? t.d : t.e) + parts_of(t.l, t.segments) + 1;
    const int64_t bytes = 2 * t.heavy * SEGMENTS * sizeof(int64_t) + numbers * sizeof(REAL);
    return nystrom_for_each_item(far_forward_item, &t, t.C * t.parts, bytes, t.threads);
}

/* Rows of a segment get their share of the mean's gradient, heavy ones their own. */
INLINE void segment_backward(const far_task *t, view tokens, view far, int64_t c, int64_t j, const segment *x, REAL *share,
                             int64_t width) {
    const int64_t count = x->end - x->begin - x->count;
    const REAL *grad = at(far, 0, c, j);
    for (int64_t k = 0; k < width; k++) share[k] = grad[k] / (count > 0 ? count : 1);
    for (int64_t r = x->begin, i = 0; r < x->end; r++) {
        const int is_heavy = i < x->count && x->place[i] == r;
        const REAL *from = is_heavy ? at(far, 0, c, t->segments + x->which[i]) : share;
        if (t->adds)
            add_multiple(at(tokens, 0, c, r), 1, from, width);
        else
            memcpy(at(tokens, 0, c, r), from, width * sizeof(REAL));
        i += is_heavy;
    }
}

static void far_backward_item(const void *task, int64_t item, void *scratch) {
    const far_task *t = task;
    const int64_t c = item / t->parts, first = item % t->parts * SEGMENTS, last = smaller(first + SEGMENTS, t->segments);
    int64_t *places = scratch;
    REAL *share = (REAL *)(places + 2 * t->heavy);
    for (int64_t j = first; j < last; j++) {
        const segment x = segment_of(t, c, j, places);
        segment_backward(t, t->key, t->far_key, c, j, &x, share, t->d);
        segment_backward(t, t->value, t->far_value, c, j, &x, share, t->e);
    }
    if (last < t->segments || t->adds) return;
    for (int64_t r = t->valid[c / t->heads]; r < t->l; r++) {
        memset(at(t->key, 0, c, r), 0, t->d * sizeof(REAL));
        memset(at(t->value, 0, c, r), 0, t->e * sizeof(REAL));
    }
}

ENTRY(far_backward)(const int64_t *args, double unused) {
    far_task t = take_far(&args);
    t.adds = take(&args);
    const int64_t bytes = 2 * t.heavy * sizeof(int64_t) + (t.d > t.e ? t.d : t.e) * sizeof(REAL);
    (void)unused;
    return nystrom_for_each_item(far_backward_item, &t, t.C * t.parts, bytes, t.threads);
}
