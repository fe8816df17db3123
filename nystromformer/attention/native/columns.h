/* softmax(scale·Q Kᵀ + bias) V for few queries and many keys: one pass over keys and values, with queries as columns.

   The logits of some keys are a product (keys × queries), and each query's softmax goes down a column with a running
   maximum. So keys and values are read as they lie, and only the queries are ever transposed. */

enum { KEYS_ADD = 1, QUERIES_ADD = 2 }; /* those of keys and values; those of queries */

typedef struct {
    int64_t threads, G, C, n, s, d, e, overlap;
    int64_t adds;                 /* backward: whether gradients are added to what is there, KEYS_ADD and QUERIES_ADD */
    view query, key, value, bias; /* bias (g, c, s) or none */
    view out, lse;                /* lse (g, c, n) */
    view grad, grad_lse, grad_query, grad_key, grad_value; /* backward; grad_lse (g, c, n) or none */
    view skip, kernel, grad_kernel; /* backward: gradients (g, c, s, e) of a skip convolution of the values with kernels
                                       (c, taps), whose gradients are wanted, too; or none */
    int64_t taps;
    int64_t m;              /* segments of the keys, as in landmarks.h, whose means are wanted, too; or 0 */
    view means, grad_means; /* (g, c, m, d): forward, backward */
    REAL scale;
    int64_t np, dp, ep;       /* n, d, e up to a multiple of COLUMNS */
    int64_t s_each, s_parts;  /* how items divide the keys */
    REAL *partial;            /* of each item, where there are several of one (g, c) */
    REAL *partial_kernel;     /* of each item */
    size_t scratch;           /* bytes that an item needs */
} columns_task;

/* With all that follows from sizes. */
INLINE columns_task sized_columns(columns_task t, int64_t rows_each) {
    t.np = up_to_multiple(t.n, COLUMNS), t.dp = up_to_multiple(t.d, COLUMNS), t.ep = up_to_multiple(t.e, COLUMNS);
    t.s_each = t.overlap ? t.s : rows_of_item(rows_each, t.dp, t.ep);
    t.s_parts = parts_of(t.s, t.s_each);
    return t;
}

INLINE columns_task take_columns(const int64_t **args, double scale) {
    columns_task t = {0};
    t.threads = take(args);
    t.G = take(args), t.C = take(args), t.n = take(args), t.s = take(args), t.d = take(args), t.e = take(args);
    t.overlap = take(args);
    t.query = take_view(args), t.key = take_view(args), t.value = take_view(args), t.bias = take_view(args);
    t.out = take_view(args), t.lse = take_view(args);
    t.scale = (REAL)scale;
    return t;
}

/* What one item of the forward gives: sums of weighted values (n × ep), the maximum and the sum of the weights, and sums
   over segments of the keys (m × dp). */
INLINE int64_t summary_size(const columns_task *t) { return t->n * t->ep + 2 * t->np + t->m * t->dp; }

INLINE REAL *maxima_of(const columns_task *t, REAL *summary) { return summary + t->n * t->ep; }
INLINE REAL *sums_of(const columns_task *t, REAL *summary) { return maxima_of(t, summary) + t->np; }
INLINE REAL *segments_of(const columns_task *t, REAL *summary) { return sums_of(t, summary) + t->np; }

INLINE int64_t segment_begin(const columns_task *t, int64_t j) { return parts_of(j * t->s, t->m); }

/* Adds keys `first` to `first` + `rows`, in K, to the sums over their segments. */
static void add_to_sums(const columns_task *t, const REAL *K, int64_t first, int64_t rows, REAL *segments) {
    const int64_t dp = t->dp;
    for (int64_t r = 0, j = first * t->m / t->s; r < rows; j++) {
        const int64_t end = smaller(segment_begin(t, j + 1) - first, rows);
        for (int64_t k = 0; k < dp; k += LANES) {
            vector total = {0};
            for (int64_t i = r; i < end; i++) total += load(K + i * dp + k);
            store(segments + j * dp + k, load(segments + j * dp + k) + total);
        }
        r = end;
    }
}

/* The result of (g, c) from its summary. */
static void finish_columns(const columns_task *t, int64_t g, int64_t c, REAL *summary) {
    const REAL *maxima = maxima_of(t, summary), *sums = sums_of(t, summary);
    for (int64_t i = 0; i < t->n; i++) {
        REAL *out = at(t->out, g, c, i);
        const REAL share = 1 / sums[i];
        for (int64_t k = 0; k < t->e; k++) out[k] = summary[i * t->ep + k] * share;
        at(t->lse, g, c, 0)[i] = maxima[i] + (IS_FLOAT ? (REAL)logf((float)sums[i]) : (REAL)log((double)sums[i]));
    }
    for (int64_t j = 0; j < t->m; j++) {
        const REAL *segment = segments_of(t, summary) + j * t->dp;
        const REAL share = (REAL)1 / (segment_begin(t, j + 1) - segment_begin(t, j));
        for (int64_t k = 0; k < t->d; k++) at(t->means, g, c, j)[k] = segment[k] * share;
    }
}

/* Logits of `rows` keys to weights relative to the running maximum, in place; maxima, sums and results follow it. */
static void softmax_columns(REAL *S, int64_t rows, const REAL *bias, const columns_task *t, REAL *summary) {
    const int64_t np = t->np;
    REAL *maxima = maxima_of(t, summary), *sums = sums_of(t, summary);
    for (int64_t j = 0; j < np; j += LANES) {
        const vector before = load(maxima + j);
        vector most = before;
        for (int64_t i = 0; i < rows; i++) {
            if (bias) store(S + i * np + j, load(S + i * np + j) + bias[i]);
            most = larger(load(S + i * np + j), most);
        }
        vector total = {0};
        for (int64_t i = 0; i < rows; i++) {
            const vector p = exponential(load(S + i * np + j) - most);
            store(S + i * np + j, p);
            total += p;
        }
        const vector factor = exponential(before - most);
        store(sums + j, load(sums + j) * factor + total);
        store(maxima + j, most);
        for (int64_t l = 0; l < LANES && j + l < t->n; l++)
            if (before[l] != most[l]) {
                REAL *row = summary + (j + l) * t->ep;
                for (int64_t k = 0; k < t->ep; k += LANES) store(row + k, load(row + k) * factor[l]);
            }
    }
}

static void columns_forward_item(const void *task, int64_t item, void *scratch) {
    const columns_task *t = task;
    const int64_t np = t->np, dp = t->dp, ep = t->ep;
    const int64_t first = item % t->s_parts * t->s_each, end = smaller(first + t->s_each, t->s);
    const int64_t g = item / t->s_parts % t->G, c = item / t->s_parts / t->G;
    REAL *QT = scratch, *K = QT + t->d * np, *V = K + TOKENS * dp, *S = V + TOKENS * ep, *own = S + TOKENS * np;
    REAL *summary = t->partial ? t->partial + item * summary_size(t) : own;
    memset(summary, 0, summary_size(t) * sizeof(REAL));
    for (int64_t j = 0; j < np; j++) maxima_of(t, summary)[j] = -float_or_double(FLT_MAX, DBL_MAX);
    pack_transposed(QT, at(t->query, g, c, 0), t->query.r, t->n, t->d, t->scale);
    for (int64_t r = first; r < end; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, end - r);
        pack(K, dp, at(t->key, g, c, r), t->key.r, rows, t->d);
        pack(V, ep, at(t->value, g, c, r), t->value.r, rows, t->e);
        const int64_t next = smaller(TOKENS, end - r - rows);
        prefetch(at(t->key, g, c, r + rows), t->key.r, next, t->d, 0);
        prefetch(at(t->value, g, c, r + rows), t->value.r, next, t->e, 0);
        if (t->m) add_to_sums(t, K, r, rows, segments_of(t, summary));
        times(S, np, K, dp, QT, rows, np, t->d, 0);
        softmax_columns(S, rows, t->bias.data ? at(t->bias, g, c, 0) + r : NULL, t, summary);
        add_transposed_times(summary, ep, S, np, V, ep, t->n, ep, rows);
    }
    if (!t->partial) finish_columns(t, g, c, summary);
}

/* One summary from those of several items, in the first one's place. */
static void columns_forward_merge(const void *task, int64_t item, void *scratch) {
    const columns_task *t = task;
    REAL *first = t->partial + item * t->s_parts * summary_size(t);
    (void)scratch;
    for (int64_t part = 1; part < t->s_parts; part++) {
        REAL *next = first + part * summary_size(t);
        REAL *maxima = maxima_of(t, first), *sums = sums_of(t, first);
        for (int64_t i = 0; i < t->n; i++) {
            const REAL other = maxima_of(t, next)[i], most = maxima[i] > other ? maxima[i] : other;
            const REAL a = exponential(every(maxima[i] - most))[0], b = exponential(every(other - most))[0];
            for (int64_t k = 0; k < t->ep; k += LANES)
                store(first + i * t->ep + k, a * load(first + i * t->ep + k) + b * load(next + i * t->ep + k));
            maxima[i] = most;
            sums[i] = a * sums[i] + b * sums_of(t, next)[i];
        }
        REAL *segments = segments_of(t, first);
        for (int64_t k = 0; k < t->m * t->dp; k += LANES)
            store(segments + k, load(segments + k) + load(segments_of(t, next) + k));
    }
    finish_columns(t, item % t->G, item / t->G, first);
}

INLINE columns_task sized_columns_forward(columns_task t) {
    t = sized_columns(t, ROWS_FORWARD);
    t.scratch = (t.d * t.np + TOKENS * (t.dp + t.ep + t.np) + summary_size(&t)) * sizeof(REAL);
    return t;
}

static int run_columns_forward(columns_task *t) {
    const int64_t items = t->G * t->C * t->s_parts;
    if (t->s_parts > 1 && !(t->partial = malloc(items * summary_size(t) * sizeof(REAL)))) return OUT_OF_MEMORY;
    int outcome = nystrom_for_each_item(columns_forward_item, t, items, t->scratch, t->threads);
    if (t->partial && outcome == DONE)
        outcome = nystrom_for_each_item(columns_forward_merge, t, t->G * t->C, 0, t->threads);
    free(t->partial);
    return outcome;
}

ENTRY(columns_forward)(const int64_t *args, double scale) {
    columns_task t = sized_columns_forward(take_columns(&args, scale));
    return run_columns_forward(&t);
}

/* Logits in P to weights, and gradients of weights in dP to those of logits, for `rows` keys. */
static void softmax_columns_backward(REAL *P, REAL *dP, int64_t rows, const REAL *bias, const columns_task *t,
                                     const REAL *lse, const REAL *less) {
    for (int64_t i = 0; i < rows; i++, P += t->np, dP += t->np)
        for (int64_t j = 0; j < t->np; j += LANES) {
            const vector x = load(P + j) + (bias ? bias[i] : 0) - load(lse + j);
            const vector p = exponential(-larger(every(-80), -x)); /* above 0 by rounding only */
            store(P + j, p);
            store(dP + j, p * (load(dP + j) - load(less + j)) * t->scale);
        }
}

INLINE int64_t taps_padded(const columns_task *t) { return up_to_multiple(t->taps, TAPS); }

/* Adds their share of the gradient of segment means to gradients of keys `first` to `first` + `rows`. */
INLINE void add_to_segments(const columns_task *t, int64_t g, int64_t c, int64_t first, int64_t rows, REAL *grad,
                            int64_t stride) {
    int64_t j = first * t->m / t->s, end = segment_begin(t, j + 1);
    REAL share = (REAL)1 / (end - segment_begin(t, j));
    for (int64_t r = first; r < first + rows; r++, grad += stride) {
        if (r == end) {
            j++;
            end = segment_begin(t, j + 1);
            share = (REAL)1 / (end - r);
        }
        const REAL *mean = at(t->grad_means, g, c, j);
        for (int64_t k = 0; k < t->d; k++) grad[k] += mean[k] * share;
    }
}

INLINE void columns_backward_of(const columns_task *t, int64_t g, int64_t c, int64_t first, int64_t end, REAL *dQ,
                                REAL *of_taps, REAL *scratch) {
    const int64_t np = t->np, dp = t->dp, ep = t->ep;
    REAL *QT = scratch, *Q = QT + t->d * np, *GT = Q + t->n * dp, *G = GT + t->e * np, *lse = G + t->n * ep;
    REAL *less = lse + np, *K = less + np, *V = K + TOKENS * dp, *P = V + TOKENS * ep, *dP = P + TOKENS * np;
    REAL *window = dP + TOKENS * np, *taps = window + (TOKENS + taps_padded(t)) * ep;
    if (t->taps) pack_taps(taps, at(t->kernel, 0, c, 0), t->taps, 1);
    pack_transposed(QT, at(t->query, g, c, 0), t->query.r, t->n, t->d, t->scale);
    pack_panels(Q, at(t->query, g, c, 0), t->query.r, t->n, t->d);
    pack_transposed(GT, at(t->grad, g, c, 0), t->grad.r, t->n, t->e, 1);
    pack_panels(G, at(t->grad, g, c, 0), t->grad.r, t->n, t->e);
    pack(lse, np, at(t->lse, g, c, 0), 0, 1, t->n);
    memset(less, 0, np * sizeof(REAL));
    for (int64_t i = 0; i < t->n; i++) {
        const REAL *out = at(t->out, g, c, i), *grad = at(t->grad, g, c, i);
        REAL total = 0;
        for (int64_t k = 0; k < t->e; k++) total += grad[k] * out[k];
        less[i] = total - (t->grad_lse.data ? at(t->grad_lse, g, c, 0)[i] : 0);
    }
    for (int64_t r = first; r < end; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, end - r);
        REAL *grad_key = at(t->grad_key, g, c, r), *grad_value = at(t->grad_value, g, c, r);
        pack(K, dp, at(t->key, g, c, r), t->key.r, rows, t->d);
        pack(V, ep, at(t->value, g, c, r), t->value.r, rows, t->e);
        const int64_t next = smaller(TOKENS, end - r - rows);
        prefetch(at(t->key, g, c, r + rows), t->key.r, next, t->d, 0);
        prefetch(at(t->value, g, c, r + rows), t->value.r, next, t->e, 0);
        prefetch(grad_key, t->grad_key.r, rows, t->d, 1);
        prefetch(grad_value, t->grad_value.r, rows, t->e, 1);
        times(P, np, K, dp, QT, rows, np, t->d, 0);
        times(dP, np, V, ep, GT, rows, np, t->e, 0);
        softmax_columns_backward(P, dP, rows, t->bias.data ? at(t->bias, g, c, 0) + r : NULL, t, lse, less);
        add_transposed_times(dQ, dp, dP, np, K, dp, t->n, dp, rows);
        if (t->taps) {
            pack_window(window, ep, t->skip, g, c, r - t->taps / 2, rows + taps_padded(t), t->s, t->e);
            add_correlation(of_taps, V, window, rows, taps_padded(t), ep);
        }
        /* Without `adds`, each row is written once, into memory that held anything. */
        if (t->e == ep) {
            times(grad_value, t->grad_value.r, P, np, G, rows, ep, t->n, t->adds & KEYS_ADD ? 1 : 0);
            if (t->taps) convolve(grad_value, t->grad_value.r, taps, t->taps, window, ep, rows, ep, 1);
        } else {
            times(V, ep, P, np, G, rows, ep, t->n, 0);
            if (t->taps) convolve(V, ep, taps, t->taps, window, ep, rows, ep, 1);
            (t->adds & KEYS_ADD ? unpack_adding : unpack)(grad_value, t->grad_value.r, V, ep, rows, t->e);
        }
        if (t->d == dp) {
            times(grad_key, t->grad_key.r, dP, np, Q, rows, dp, t->n, t->adds & KEYS_ADD ? 1 : 0);
        } else {
            times(K, dp, dP, np, Q, rows, dp, t->n, 0);
            (t->adds & KEYS_ADD ? unpack_adding : unpack)(grad_key, t->grad_key.r, K, dp, rows, t->d);
        }
        if (t->m) add_to_segments(t, g, c, r, rows, grad_key, t->grad_key.r);
    }
}

/* What the skip convolution alone adds to gradients of the values of (g, c), and what it gives for the kernel's. */
static void skip_backward_item(const void *task, int64_t item, void *scratch) {
    const columns_task *t = task;
    const int64_t g = item % t->G, c = item / t->G, ep = t->ep;
    REAL *V = scratch, *window = V + TOKENS * ep, *taps = window + (TOKENS + taps_padded(t)) * ep;
    REAL *of_taps = t->partial_kernel + item * taps_padded(t);
    memset(of_taps, 0, taps_padded(t) * sizeof(REAL));
    if (!t->taps) return;
    pack_taps(taps, at(t->kernel, 0, c, 0), t->taps, 1);
    for (int64_t r = 0; r < t->s; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, t->s - r);
        pack(V, ep, at(t->value, g, c, r), t->value.r, rows, t->e);
        pack_window(window, ep, t->skip, g, c, r - t->taps / 2, rows + taps_padded(t), t->s, t->e);
        add_correlation(of_taps, V, window, rows, taps_padded(t), ep);
        convolve(V, ep, taps, t->taps, window, ep, rows, ep, 0);
        unpack_adding(at(t->grad_value, g, c, r), t->grad_value.r, V, ep, rows, t->e);
    }
}

INLINE void give_grad_query(const columns_task *t, int64_t g, int64_t c, const REAL *dQ) {
    (t->adds & QUERIES_ADD ? unpack_adding : unpack)(at(t->grad_query, g, c, 0), t->grad_query.r, dQ, t->dp, t->n, t->d);
}

/* All blocks of one c where their keys overlap, otherwise some keys of one (g, c). */
static void columns_backward_item(const void *task, int64_t item, void *scratch) {
    const columns_task *t = task;
    const int64_t first = item % t->s_parts * t->s_each, end = smaller(first + t->s_each, t->s);
    const int64_t size = t->n * t->dp;
    REAL *dQ = t->partial ? t->partial + item * size : scratch;
    REAL *of_taps = t->partial_kernel + item * taps_padded(t);
    memset(of_taps, 0, taps_padded(t) * sizeof(REAL));
    for (int64_t g = 0; g < t->G; g++) {
        if (!t->overlap && g != item / t->s_parts % t->G) continue;
        const int64_t c = t->overlap ? item : item / t->s_parts / t->G;
        memset(dQ, 0, size * sizeof(REAL));
        columns_backward_of(t, g, c, first, end, dQ, of_taps, (REAL *)scratch + size);
        if (!t->partial) give_grad_query(t, g, c, dQ);
    }
}

static void columns_backward_sum(const void *task, int64_t item, void *scratch) {
    const columns_task *t = task;
    const int64_t size = t->n * t->dp;
    REAL *total = t->partial + item * t->s_parts * size;
    (void)scratch;
    for (int64_t i = 1; i < t->s_parts; i++)
        for (int64_t j = 0; j < size; j += LANES) store(total + j, load(total + j) + load(total + i * size + j));
    give_grad_query(t, item % t->G, item / t->G, total);
}

INLINE int64_t columns_backward_items(const columns_task *t) { return t->overlap ? t->C : t->G * t->C * t->s_parts; }

INLINE columns_task sized_columns_backward(columns_task t) {
    t = sized_columns(t, ROWS_BACKWARD);
    t.scratch = (2 * t.n * t.dp + (t.d + t.e) * t.np + t.n * t.ep + 2 * t.np + TOKENS * (t.dp + t.ep + 2 * t.np) +
                 (TOKENS + taps_padded(&t)) * t.ep + t.taps) * sizeof(REAL);
    return t;
}

/* With memory for what items of the backward give, at `partial_kernel`, NULL where there is none. */
INLINE columns_task with_partials(columns_task t) {
    const int64_t items = columns_backward_items(&t), padded = taps_padded(&t);
    const size_t of_queries = t.s_parts > 1 ? items * t.n * t.dp : 0;
    t.partial_kernel = malloc((of_queries + items * padded) * sizeof(REAL) + 1);
    if (of_queries && t.partial_kernel) t.partial = t.partial_kernel + items * padded;
    return t;
}

/* Adds to the kernel's gradient what items gave: windows of gradients give the taps from the last to the first. */
static void add_kernel_gradient(const columns_task *t) {
    const int64_t padded = taps_padded(t), each = t->G * t->s_parts;
    for (int64_t c = 0; t->taps && c < t->C; c++) {
        const REAL *from = t->partial_kernel + c * each * padded;
        for (int64_t j = 0; j < t->taps; j++) {
            REAL *to = at(t->grad_kernel, 0, c, 0) + t->taps - 1 - j;
            for (int64_t i = 0; i < each; i++) *to += from[i * padded + j];
        }
    }
}

static int run_columns_backward(const columns_task *t) {
    int outcome = nystrom_for_each_item(columns_backward_item, t, columns_backward_items(t), t->scratch, t->threads);
    if (t->partial && outcome == DONE)
        outcome = nystrom_for_each_item(columns_backward_sum, t, t->G * t->C, 0, t->threads);
    if (outcome == DONE) add_kernel_gradient(t);
    return outcome;
}

ENTRY(columns_backward)(const int64_t *args, double scale) {
    columns_task t = take_columns(&args, scale);
    t.grad = take_view(&args), t.grad_lse = take_view(&args);
    t.grad_query = take_view(&args), t.grad_key = take_view(&args), t.grad_value = take_view(&args);
    t.adds = take(&args);
    t = with_partials(sized_columns_backward(t));
    const int outcome = t.partial_kernel ? run_columns_backward(&t) : OUT_OF_MEMORY;
    free(t.partial_kernel);
    return outcome;
}
