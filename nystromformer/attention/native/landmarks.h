/* Means over segments of equal size, up to one token: segment j of m begins at token ⌈j·n/m⌉. */

#define SEGMENTS 8         /* of one item of work */
#define ROWS_AHEAD 32      /* are asked for before they are read */
#define ADDED_AT_ONCE 128  /* rows: long sums are sums of such sums, which keeps their rounding small */

typedef struct {
    int64_t threads, G, C, n, m, d;
    view tokens, means; /* (g, c, n, d), (g, c, m, d) */
    int64_t parts;      /* in which items divide a sequence's segments */
} means_task;

INLINE int64_t first_of(const means_task *t, int64_t segment) { return parts_of(segment * t->n, t->m); }

static void means_forward_item(const void *task, int64_t item, void *scratch) {
    const means_task *t = task;
    const int64_t g = item / t->parts % t->G, c = item / t->parts / t->G, first = item % t->parts * SEGMENTS;
    REAL *total = scratch, *some = total + t->d;
    for (int64_t j = first; j < smaller(first + SEGMENTS, t->m); j++) {
        const int64_t begin = first_of(t, j), end = first_of(t, j + 1);
        REAL *mean = at(t->means, g, c, j);
        memset(total, 0, t->d * sizeof(REAL));
        for (int64_t r = begin; r < end;) {
            memset(some, 0, t->d * sizeof(REAL));
            for (const int64_t until = smaller(r + ADDED_AT_ONCE, end); r < until; r++) {
                const REAL *row = at(t->tokens, g, c, r);
                prefetch(row + ROWS_AHEAD * t->tokens.r, 0, r + ROWS_AHEAD < t->n, t->d, 0);
                for (int64_t k = 0; k < t->d; k++) some[k] += row[k];
            }
            for (int64_t k = 0; k < t->d; k++) total[k] += some[k];
        }
        const int64_t count = end - begin;
        for (int64_t k = 0; k < t->d; k++) mean[k] = total[k] / (count ? count : 1);
    }
}

INLINE int64_t means_items(const means_task *t) { return t->G * t->C * t->parts; }
INLINE size_t means_scratch(const means_task *t) { return 2 * t->d * sizeof(REAL); }

static int run_means_forward(const means_task *t) {
    return nystrom_for_each_item(means_forward_item, t, means_items(t), means_scratch(t), t->threads);
}

/* Adds to `tokens` their share of what `means` holds, a gradient each. */
static void means_backward_item(const void *task, int64_t item, void *scratch) {
    const means_task *t = task;
    const int64_t g = item / t->parts % t->G, c = item / t->parts / t->G, first = item % t->parts * SEGMENTS;
    REAL *share = scratch;
    for (int64_t j = first; j < smaller(first + SEGMENTS, t->m); j++) {
        const int64_t begin = first_of(t, j), end = first_of(t, j + 1);
        const REAL *mean = at(t->means, g, c, j);
        for (int64_t k = 0; k < t->d; k++) share[k] = mean[k] / (end - begin);
        for (int64_t r = begin; r < end; r++) {
            REAL *row = at(t->tokens, g, c, r);
            for (int64_t k = 0; k < t->d; k++) row[k] += share[k];
        }
    }
}

static int run_means_backward(const means_task *t) {
    return nystrom_for_each_item(means_backward_item, t, means_items(t), means_scratch(t), t->threads);
}

/* Sums and sums of squares over blocks of equal size, of which the last may have fewer tokens. */
typedef struct {
    int64_t threads, l, C, s, d, blocks, parts;
    view tokens, sums, squares; /* (l, c, d), and (c, blocks, d) twice */
} moments_task;

static void moments_item(const void *task, int64_t item, void *scratch) {
    const moments_task *t = task;
    const int64_t c = item / t->parts, begin = item % t->parts * SEGMENTS;
    (void)scratch;
    for (int64_t g = begin; g < smaller(begin + SEGMENTS, t->blocks); g++) {
        REAL *restrict sum = at(t->sums, 0, c, g), *restrict square = at(t->squares, 0, c, g);
        memset(sum, 0, t->d * sizeof(REAL));
        memset(square, 0, t->d * sizeof(REAL));
        for (int64_t r = g * t->s; r < smaller((g + 1) * t->s, t->l); r++) {
            const REAL *row = at(t->tokens, 0, c, r);
            for (int64_t k = 0; k < t->d; k++) sum[k] += row[k], square[k] += row[k] * row[k];
        }
    }
}

ENTRY(moments)(const int64_t *args, double unused) {
    moments_task t;
    (void)unused;
    t.threads = take(&args);
    t.l = take(&args), t.C = take(&args), t.s = take(&args), t.d = take(&args);
    t.tokens = take_view(&args), t.sums = take_view(&args), t.squares = take_view(&args);
    t.blocks = parts_of(t.l, t.s), t.parts = parts_of(t.blocks, SEGMENTS);
    return nystrom_for_each_item(moments_item, &t, t.C * t.parts, 0, t.threads);
}
