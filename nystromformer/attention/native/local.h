/* Attention of each block of queries to the blocks of keys that it sees as they are and to far keys that all blocks
   share, in one softmax: what Nyström attention with an exact near field ends with.

   A block sees itself, its two neighbours and, where given, some blocks chosen for it. Keys are rows and queries columns,
   as in columns.h. Neighbours are packed once and used three times. */

#define BLOCKS_EACH 32 /* of an item of the forward */
#define UNSEEN ((REAL)-1e30) /* the bias of what must not be seen: finite, so that a softmax of such alone is no 0/0 */

typedef struct {
    int64_t threads, l, C, s, d, e, chosen, m;
    view query, key, value, bias; /* (l, c, d) twice, (l, c, e), and (c, l) */
    const int64_t *index;         /* (c, blocks, chosen): blocks that each block sees besides, −1 for none */
    view far_key, far_value, far_bias; /* (c, m, d), (c, m, e), and (blocks, c, m) */
    view out, lse;                     /* (l, c, e), and (c, l) */
    view grad, grad_query, grad_key, grad_value, grad_far_key, grad_far_value; /* backward */
    REAL scale;
    int64_t blocks, near, dp, ep, np; /* near: keys that are no far ones; d, e and s up to a multiple of COLUMNS */
    int64_t parts;                    /* items of one c */
} local_task;

INLINE local_task take_local(const int64_t **args, double scale) {
    local_task t = {0};
    t.threads = take(args);
    t.l = take(args), t.C = take(args), t.s = take(args), t.d = take(args), t.e = take(args);
    t.chosen = take(args), t.m = take(args);
    t.query = take_view(args), t.key = take_view(args), t.value = take_view(args), t.bias = take_view(args);
    t.index = (const int64_t *)(intptr_t)take(args);
    t.far_key = take_view(args), t.far_value = take_view(args), t.far_bias = take_view(args);
    t.out = take_view(args), t.lse = take_view(args);
    t.scale = (REAL)scale;
    t.blocks = parts_of(t.l, t.s);
    t.near = (3 + t.chosen) * t.s;
    t.dp = up_to_multiple(t.d, COLUMNS), t.ep = up_to_multiple(t.e, COLUMNS), t.np = up_to_multiple(t.s, COLUMNS);
    t.parts = parts_of(t.blocks, BLOCKS_EACH);
    return t;
}

/* The block in the i-th place of those that block g sees, or −1. Neighbours keep their places while g goes on. */
INLINE int64_t seen_block(const local_task *t, int64_t c, int64_t g, int64_t i) {
    if (i >= 3) return t->index[(c * t->blocks + g) * t->chosen + i - 3];
    const int64_t block = g - 1 + (i - (g + 2) % 3 + 3) % 3; /* the neighbour that leaves the rest i when divided by 3 */
    return block < t->blocks ? block : -1;
}

INLINE int64_t rows_of_block(const local_task *t, int64_t block) {
    return block < 0 ? 0 : smaller(t->s, t->l - block * t->s);
}

typedef struct {
    REAL *K, *V, *bias;    /* of all keys that a block sees: near (3 + chosen) · s, then m */
    int64_t held[3];       /* the neighbours that are packed */
} seen_keys;

INLINE int64_t seen_keys_size(const local_task *t) { return (t->near + t->m) * (t->dp + t->ep + 1); }

/* Far keys are packed once for all blocks of an item. */
static seen_keys pack_far(const local_task *t, int64_t c, REAL *scratch) {
    const int64_t all = t->near + t->m;
    seen_keys x = {.K = scratch, .V = scratch + all * t->dp, .bias = scratch + all * (t->dp + t->ep)};
    pack(x.K + t->near * t->dp, t->dp, at(t->far_key, 0, c, 0), t->far_key.r, t->m, t->d);
    pack(x.V + t->near * t->ep, t->ep, at(t->far_value, 0, c, 0), t->far_value.r, t->m, t->e);
    x.held[0] = x.held[1] = x.held[2] = -2;
    return x;
}

/* The keys that block g sees, in their places. */
static void pack_seen(const local_task *t, int64_t c, int64_t g, seen_keys *x) {
    for (int64_t i = 0; i < 3 + t->chosen; i++) {
        const int64_t block = seen_block(t, c, g, i), rows = rows_of_block(t, block), first = rows ? block * t->s : 0;
        REAL *K = x->K + i * t->s * t->dp, *V = x->V + i * t->s * t->ep, *bias = x->bias + i * t->s;
        if (i < 3 && x->held[i] == block) continue;
        if (i < 3) x->held[i] = block;
        pack(K, t->dp, at(t->key, 0, c, first), t->key.r, rows, t->d);
        pack(V, t->ep, at(t->value, 0, c, first), t->value.r, rows, t->e);
        memset(K + rows * t->dp, 0, (t->s - rows) * t->dp * sizeof(REAL));
        memset(V + rows * t->ep, 0, (t->s - rows) * t->ep * sizeof(REAL));
        memcpy(bias, at(t->bias, 0, c, 0) + first, rows * sizeof(REAL));
        for (int64_t j = rows; j < t->s; j++) bias[j] = UNSEEN;
    }
    memcpy(x->bias + t->near, at(t->far_bias, g, c, 0), t->m * sizeof(REAL));
}

INLINE void prefetch_block(const local_task *t, int64_t c, int64_t block) {
    if (block < 0 || block >= t->blocks) return;
    const int64_t rows = rows_of_block(t, block), first = block * t->s;
    prefetch(at(t->key, 0, c, first), t->key.r, rows, t->d, 0);
    prefetch(at(t->value, 0, c, first), t->value.r, rows, t->e, 0);
}

/* What block g + 1 sees and block g does not. */
INLINE void prefetch_next(const local_task *t, int64_t c, int64_t g) {
    prefetch_block(t, c, g + 2);
    for (int64_t i = 3; i < 3 + t->chosen && g + 1 < t->blocks; i++) prefetch_block(t, c, seen_block(t, c, g + 1, i));
}

/* Logits of `keys` keys in S to weights relative to each column's maximum, in place. */
static void softmax_seen(REAL *S, int64_t keys, int64_t np, const REAL *bias, REAL *maxima, REAL *sums) {
    for (int64_t j = 0; j < np; j += COLUMNS) {
        vector most0 = every(-(REAL)INFINITY), most1 = most0, sum0 = {0}, sum1 = {0};
        REAL *column = S + j;
        for (int64_t i = 0; i < keys; i++, column += np) {
            most0 = larger(load(column) + bias[i], most0);
            most1 = larger(load(column + LANES) + bias[i], most1);
        }
        column = S + j;
        for (int64_t i = 0; i < keys; i++, column += np) {
            const vector p0 = exponential(load(column) + bias[i] - most0);
            const vector p1 = exponential(load(column + LANES) + bias[i] - most1);
            store(column, p0), store(column + LANES, p1);
            sum0 += p0, sum1 += p1;
        }
        store(maxima + j, most0), store(maxima + j + LANES, most1);
        store(sums + j, sum0), store(sums + j + LANES, sum1);
    }
}

INLINE REAL logarithm(REAL x) { return IS_FLOAT ? (REAL)logf((float)x) : (REAL)log((double)x); }

static void local_forward_item(const void *task, int64_t item, void *scratch) {
    const local_task *t = task;
    const int64_t c = item / t->parts, begin = item % t->parts * BLOCKS_EACH;
    const int64_t end = smaller(begin + BLOCKS_EACH, t->blocks), all = t->near + t->m;
    REAL *QT = (REAL *)scratch + seen_keys_size(t), *S = QT + t->d * t->np, *O = S + all * t->np;
    REAL *maxima = O + t->s * t->ep, *sums = maxima + t->np;
    seen_keys x = pack_far(t, c, scratch);
    for (int64_t g = begin; g < end; g++) {
        const int64_t rows = rows_of_block(t, g), np = up_to_multiple(rows, COLUMNS), first = g * t->s;
        pack_seen(t, c, g, &x);
        prefetch_next(t, c, g);
        pack_transposed(QT, at(t->query, 0, c, first), t->query.r, rows, t->d, t->scale);
        prefetch(at(t->query, 0, c, first + rows), t->query.r, rows_of_block(t, g + 1 < t->blocks ? g + 1 : -1), t->d, 0);
        prefetch(at(t->out, 0, c, first), t->out.r, rows, t->e, 1);
        times(S, np, x.K, t->dp, QT, all, np, t->d, 0);
        softmax_seen(S, all, np, x.bias, maxima, sums);
        transposed_times_plus(O, O, t->ep, S, np, x.V, t->ep, rows, t->ep, all, 1, 0);
        for (int64_t i = 0; i < rows; i++) {
            REAL *out = at(t->out, 0, c, first + i);
            const REAL share = 1 / sums[i];
            for (int64_t k = 0; k < t->e; k++) out[k] = O[i * t->ep + k] * share;
            at(t->lse, 0, c, 0)[first + i] = maxima[i] + logarithm(sums[i]);
        }
    }
}

ENTRY(local_forward)(const int64_t *args, double scale) {
    local_task t = take_local(&args, scale);
    const int64_t numbers = seen_keys_size(&t) + (t.d + t.near + t.m + 2) * t.np + t.s * t.ep;
    return nystrom_for_each_item(local_forward_item, &t, t.C * t.parts, numbers * sizeof(REAL), t.threads);
}

/* Logits in P to weights, and gradients of weights in dP to those of logits, as softmax_columns_backward. */
static void softmax_seen_backward(REAL *P, REAL *dP, int64_t keys, int64_t np, const REAL *bias, REAL scale,
                                  const REAL *lse, const REAL *less) {
    for (int64_t i = 0; i < keys; i++, P += np, dP += np)
        for (int64_t j = 0; j < np; j += LANES) {
            const vector x = load(P + j) + bias[i] - load(lse + j);
            const vector p = exponential(-larger(every(-80), -x)); /* above 0 by rounding only */
            store(P + j, p);
            store(dP + j, p * (load(dP + j) - load(less + j)) * scale);
        }
}

/* total += A B for `rows` rows of A (np apart) and B in panels of s rows; through `room` where widths differ. */
INLINE void add_product(view total, int64_t c, int64_t first, int64_t rows, int64_t width, int64_t padded, const REAL *A,
                        int64_t np, const REAL *B, int64_t inner, REAL *room) {
    if (!rows) return;
    REAL *to = at(total, 0, c, first);
    if (width == padded) {
        times(to, total.r, A, np, B, rows, padded, inner, 1);
    } else {
        times(room, padded, A, np, B, rows, padded, inner, 0);
        unpack_adding(to, total.r, room, padded, rows, width);
    }
}

/* All blocks of one c: what several see gets a sum. */
static void local_backward_item(const void *task, int64_t c, void *scratch) {
    const local_task *t = task;
    const int64_t dp = t->dp, ep = t->ep, all = t->near + t->m;
    REAL *QT = (REAL *)scratch + seen_keys_size(t), *Q = QT + t->d * t->np, *GT = Q + t->s * dp, *G = GT + t->e * t->np;
    REAL *P = G + t->s * ep, *dP = P + all * t->np, *lse = dP + all * t->np, *less = lse + t->np;
    REAL *dQ = less + t->np, *dK = dQ + t->s * (dp > ep ? dp : ep), *dV = dK + t->m * dp;
    seen_keys x = pack_far(t, c, scratch);
    memset(dK, 0, t->m * (dp + ep) * sizeof(REAL));
    for (int64_t g = 0; g < t->blocks; g++) {
        const int64_t n = rows_of_block(t, g), np = up_to_multiple(n, COLUMNS), first = g * t->s;
        pack_seen(t, c, g, &x);
        prefetch_next(t, c, g);
        pack_transposed(QT, at(t->query, 0, c, first), t->query.r, n, t->d, t->scale);
        pack_panels(Q, at(t->query, 0, c, first), t->query.r, n, t->d);
        pack_transposed(GT, at(t->grad, 0, c, first), t->grad.r, n, t->e, 1);
        pack_panels(G, at(t->grad, 0, c, first), t->grad.r, n, t->e);
        memset(lse, 0, 2 * t->np * sizeof(REAL));
        for (int64_t i = 0; i < n; i++) {
            const REAL *out = at(t->out, 0, c, first + i), *grad = at(t->grad, 0, c, first + i);
            REAL total = 0;
            for (int64_t k = 0; k < t->e; k++) total += grad[k] * out[k];
            lse[i] = at(t->lse, 0, c, 0)[first + i];
            less[i] = total;
        }
        times(P, np, x.K, dp, QT, all, np, t->d, 0);
        times(dP, np, x.V, ep, GT, all, np, t->e, 0);
        softmax_seen_backward(P, dP, all, np, x.bias, t->scale, lse, less);
        transposed_times_plus(dQ, dQ, dp, dP, np, x.K, dp, n, dp, all, 1, 0);
        unpack(at(t->grad_query, 0, c, first), t->grad_query.r, dQ, dp, n, t->d);
        for (int64_t i = 0; i < 3 + t->chosen; i++) {
            const int64_t block = seen_block(t, c, g, i), rows = rows_of_block(t, block), from = i * t->s * np;
            add_product(t->grad_key, c, block * t->s, rows, t->d, dp, dP + from, np, Q, n, dQ);
            add_product(t->grad_value, c, block * t->s, rows, t->e, ep, P + from, np, G, n, dQ);
        }
        times(dK, dp, dP + t->near * np, np, Q, t->m, dp, n, 1);
        times(dV, ep, P + t->near * np, np, G, t->m, ep, n, 1);
    }
    unpack(at(t->grad_far_key, 0, c, 0), t->grad_far_key.r, dK, dp, t->m, t->d);
    unpack(at(t->grad_far_value, 0, c, 0), t->grad_far_value.r, dV, ep, t->m, t->e);
}

/* The gradients of keys and values must hold zeros. */
ENTRY(local_backward)(const int64_t *args, double scale) {
    local_task t = take_local(&args, scale);
    t.grad = take_view(&args), t.grad_query = take_view(&args);
    t.grad_key = take_view(&args), t.grad_value = take_view(&args);
    t.grad_far_key = take_view(&args), t.grad_far_value = take_view(&args);
    const int64_t widest = t.dp > t.ep ? t.dp : t.ep, all = t.near + t.m;
    const int64_t numbers = seen_keys_size(&t) + (t.d + t.e + 2 * all + 2) * t.np + t.s * (t.dp + t.ep + widest) +
                            t.m * (t.dp + t.ep);
    return nystrom_for_each_item(local_backward_item, &t, t.C, numbers * sizeof(REAL), t.threads);
}
