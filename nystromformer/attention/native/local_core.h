/* What Nyström attention with an exact near field asks of its core rows, a few queries of each head: how much weight each
   key gets from them, and their attention to the keys that their blocks see as they are. */

typedef struct {
    int64_t threads, C, n, l, d;
    view query, lse, key, sums; /* (c, n, d), (c, n), (l, c, d), (c, l) */
    REAL scale;
    int64_t np, dp, parts;
} sums_task;

/* Sums of columns of the softmax matrix whose rows have the log-sum-exps `lse`. */
static void column_sums_item(const void *task, int64_t item, void *scratch) {
    const sums_task *t = task;
    const int64_t c = item / t->parts, begin = item % t->parts * ROWS_FORWARD;
    const int64_t end = smaller(begin + ROWS_FORWARD, t->l), np = t->np;
    REAL *QT = scratch, *lse = QT + t->d * np, *K = lse + np, *S = K + TOKENS * t->dp;
    pack_transposed(QT, at(t->query, 0, c, 0), t->query.r, t->n, t->d, t->scale);
    pack(lse, np, at(t->lse, 0, c, 0), 0, 1, t->n);
    for (int64_t j = t->n; j < np; j++) lse[j] = (REAL)INFINITY;
    for (int64_t r = begin; r < end; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, end - r);
        pack(K, t->dp, at(t->key, 0, c, r), t->key.r, rows, t->d);
        prefetch(at(t->key, 0, c, r + rows), t->key.r, smaller(TOKENS, end - r - rows), t->d, 0);
        times(S, np, K, t->dp, QT, rows, np, t->d, 0);
        for (int64_t i = 0; i < rows; i++) {
            vector total = {0};
            for (int64_t j = 0; j < np; j += LANES) {
                const vector x = load(S + i * np + j) - load(lse + j);
                total += exponential(-larger(every(-80), -x)); /* above 0 by rounding only */
            }
            at(t->sums, 0, c, 0)[r + i] = sum_of(total);
        }
    }
}

ENTRY(column_sums)(const int64_t *args, double scale) {
    sums_task t = {.scale = (REAL)scale};
    t.threads = take(&args);
    t.C = take(&args), t.n = take(&args), t.l = take(&args), t.d = take(&args);
    t.query = take_view(&args), t.lse = take_view(&args), t.key = take_view(&args), t.sums = take_view(&args);
    t.np = up_to_multiple(t.n, COLUMNS), t.dp = up_to_multiple(t.d, COLUMNS), t.parts = parts_of(t.l, ROWS_FORWARD);
    const int64_t numbers = (t.d + 1 + TOKENS) * t.np + TOKENS * t.dp;
    return nystrom_for_each_item(column_sums_item, &t, t.C * t.parts, numbers * sizeof(REAL), t.threads);
}

/* Attention of single rows to what their blocks see. */
typedef struct {
    local_task local;      /* its `query`, `out` and so on are of the rows, (c, n, d); it has no far keys */
    int64_t n;
    const int64_t *places; /* (c, n): where in the sequence the rows are */
    view grad_lse;         /* backward: (c, n) or none */
} near_task;

INLINE near_task take_near(const int64_t **args, double scale) {
    near_task t = {.local = take_local(args, scale)};
    t.n = take(args);
    t.places = (const int64_t *)(intptr_t)take(args);
    return t;
}

INLINE REAL dot(const REAL *a, const REAL *b, int64_t width) {
    vector total = {0};
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) total += load(a + k) * load(b + k);
    REAL sum = sum_of(total);
    for (; k < width; k++) sum += a[k] * b[k];
    return sum;
}

INLINE void add_multiple(REAL *to, REAL factor, const REAL *from, int64_t width) {
    for (int64_t k = 0; k < width; k++) to[k] += factor * from[k];
}

/* The places of the keys that a row's block sees, and how many they are. Those of the next row are asked for. */
INLINE int64_t find_seen(const near_task *near, int64_t c, int64_t r, int64_t *rows) {
    const local_task *t = &near->local;
    const int64_t *g = near->places + c * near->n + r;
    int64_t count = 0;
    for (int64_t i = 0; i < 3 + t->chosen; i++) {
        const int64_t block = seen_block(t, c, *g / t->s, i);
        for (int64_t j = 0; j < rows_of_block(t, block); j++) rows[count++] = block * t->s + j;
        if (r + 1 < near->n) prefetch_block(t, c, seen_block(t, c, g[1] / t->s, i));
    }
    return count;
}

static void near_forward_item(const void *task, int64_t c, void *scratch) {
    const near_task *near = task;
    const local_task *t = &near->local;
    int64_t *rows = scratch;
    REAL *P = (REAL *)(rows + t->near);
    for (int64_t r = 0; r < near->n; r++) {
        const int64_t count = find_seen(near, c, r, rows);
        const REAL *query = at(t->query, 0, c, r), *bias = at(t->bias, 0, c, 0);
        REAL *out = at(t->out, 0, c, r), most = -(REAL)INFINITY;
        for (int64_t i = 0; i < count; i++) {
            P[i] = dot(query, at(t->key, 0, c, rows[i]), t->d) * t->scale + bias[rows[i]];
            most = P[i] > most ? P[i] : most;
        }
        for (int64_t i = count; i < up_to_multiple(count, LANES); i++) P[i] = -(REAL)INFINITY;
        vector total = {0};
        for (int64_t i = 0; i < count; i += LANES) {
            const vector p = exponential(load(P + i) - most);
            store(P + i, p);
            total += p;
        }
        const REAL sum = sum_of(total);
        memset(out, 0, t->e * sizeof(REAL));
        for (int64_t i = 0; i < count; i++) add_multiple(out, P[i], at(t->value, 0, c, rows[i]), t->e);
        for (int64_t k = 0; k < t->e; k++) out[k] /= sum;
        at(t->lse, 0, c, 0)[r] = most + logarithm(sum);
    }
}

ENTRY(near_forward)(const int64_t *args, double scale) {
    const near_task t = take_near(&args, scale);
    const int64_t bytes = t.local.near * sizeof(int64_t) + up_to_multiple(t.local.near, LANES) * sizeof(REAL);
    return nystrom_for_each_item(near_forward_item, &t, t.local.C, bytes, t.local.threads);
}

static void near_backward_item(const void *task, int64_t c, void *scratch) {
    const near_task *near = task;
    const local_task *t = &near->local;
    int64_t *rows = scratch;
    for (int64_t r = 0; r < near->n; r++) {
        const int64_t count = find_seen(near, c, r, rows);
        const REAL *query = at(t->query, 0, c, r), *grad = at(t->grad, 0, c, r), *bias = at(t->bias, 0, c, 0);
        const REAL lse = at(t->lse, 0, c, 0)[r], of_lse = near->grad_lse.data ? at(near->grad_lse, 0, c, 0)[r] : 0;
        const REAL less = dot(grad, at(t->out, 0, c, r), t->e) - of_lse;
        REAL *grad_query = at(t->grad_query, 0, c, r);
        memset(grad_query, 0, t->d * sizeof(REAL));
        for (int64_t i = 0; i < count; i++) {
            const REAL *key = at(t->key, 0, c, rows[i]), x = dot(query, key, t->d) * t->scale + bias[rows[i]] - lse;
            const REAL p = exponential(every(x > 80 ? 80 : x))[0]; /* above 0 by rounding only */
            const REAL of_logit = p * (dot(grad, at(t->value, 0, c, rows[i]), t->e) - less) * t->scale;
            add_multiple(grad_query, of_logit, key, t->d);
            add_multiple(at(t->grad_key, 0, c, rows[i]), of_logit, query, t->d);
            add_multiple(at(t->grad_value, 0, c, rows[i]), p, grad, t->e);
        }
    }
}

/* The gradients of keys and values must hold zeros. */
ENTRY(near_backward)(const int64_t *args, double scale) {
    near_task t = take_near(&args, scale);
    t.local.grad = take_view(&args), t.grad_lse = take_view(&args), t.local.grad_query = take_view(&args);
    t.local.grad_key = take_view(&args), t.local.grad_value = take_view(&args);
    return nystrom_for_each_item(near_backward_item, &t, t.local.C, t.local.near * sizeof(int64_t), t.local.threads);
}
