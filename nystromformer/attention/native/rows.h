/* softmax(scale·Q Kᵀ + bias) V for many queries and few keys: each row's softmax is whole, one pass over the queries.

   The backward makes each row again from the queries, so that nothing but the inputs is kept for it. */

#define TOKENS 48 /* rows at a time: few enough that what belongs to them stays in a cache, a multiple of ROWS */

/* Rows of one item of work: enough that packing the keys costs little, few enough for many processors. Of rows with fewer
   than 64 numbers an item takes more. */
#define ROWS_FORWARD 1024
#define ROWS_BACKWARD 2048

INLINE int64_t rows_of_item(int64_t rows, int64_t dp, int64_t ep) {
    const int64_t width = dp < ep ? ep : dp;
    return width < 64 ? rows * 64 / width : rows;
}

typedef struct {
    int64_t threads, G, C, n, s, d, e, shared;
    view query, key, value, bias; /* bias (g, c, s) or none */
    view out, lse;                /* lse (g, c, n) or none */
    view skip, kernel;            /* forward: values (g, c, n, e) and kernels (c, taps) of a skip convolution, or none */
    int64_t taps;
    view grad, grad_lse, grad_query, grad_key, grad_value; /* backward; grad_lse (g, c, n) or none */
    REAL scale;
    int64_t sp, dp, ep;                   /* s, d, e up to a multiple of COLUMNS */
    int64_t g_each, g_parts, r_each, r_parts; /* how items divide the groups, where they share keys, or else the rows */
    REAL *partial;                        /* of each item: gradients of keys and values */
    size_t scratch;                       /* bytes that an item needs */
} rows_task;

/* With all that follows from sizes. */
INLINE rows_task sized_rows(rows_task t, int64_t rows_each) {
    t.sp = up_to_multiple(t.s, COLUMNS), t.dp = up_to_multiple(t.d, COLUMNS), t.ep = up_to_multiple(t.e, COLUMNS);
    rows_each = rows_of_item(rows_each, t.dp, t.ep);
    t.g_each = t.shared ? smaller(t.G, parts_of(rows_each, t.n)) : 1;
    t.g_parts = parts_of(t.G, t.g_each);
    t.r_each = t.shared ? t.n : rows_each;
    t.r_parts = parts_of(t.n, t.r_each);
    return t;
}

/* Numbers of the gradients of keys and values that an item gives. */
INLINE int64_t partial_size(const rows_task *t) { return t->s * (t->dp + t->ep); }

INLINE int64_t rows_items(const rows_task *t) { return t->C * t->g_parts * t->r_parts; }

/* The sizes and views that both directions begin with. */
INLINE rows_task take_rows(const int64_t **args, double scale) {
    rows_task t = {0};
    t.threads = take(args);
    t.G = take(args), t.C = take(args), t.n = take(args), t.s = take(args), t.d = take(args), t.e = take(args);
    t.shared = take(args);
    t.query = take_view(args), t.key = take_view(args), t.value = take_view(args), t.bias = take_view(args);
    t.scale = (REAL)scale;
    return t;
}

typedef struct {
    int64_t c, g, g_end, r, r_end;
} rows_item;

INLINE rows_item find_rows(const rows_task *t, int64_t item) {
    rows_item x;
    x.r = item % t->r_parts * t->r_each;
    x.r_end = smaller(x.r + t->r_each, t->n);
    item /= t->r_parts;
    x.g = item % t->g_parts * t->g_each;
    x.g_end = smaller(x.g + t->g_each, t->G);
    x.c = item / t->g_parts;
    return x;
}

/* The bias of each key, with −∞ where there is none to fill a vector up. */
INLINE void pack_bias(REAL *to, const rows_task *t, int64_t g, int64_t c) {
    for (int64_t j = 0; j < t->s; j++) to[j] = t->bias.data ? at(t->bias, g, c, 0)[j] : 0;
    for (int64_t j = t->s; j < t->sp; j++) to[j] = -(REAL)INFINITY;
}

/* Logits of `rows` rows to weights, in place, which are yet to be multiplied by the row's `share`; log-sum-exps to `lse`,
   where it is given. Each pass takes all rows, whose steps do not wait for each other. */
static void softmax_rows(REAL *S, int64_t rows, int64_t width, const REAL *bias, REAL *shares, REAL *lse) {
    REAL largest[TOKENS], sums[TOKENS];
    for (int64_t i = 0; i < rows; i++) {
        const REAL *row = S + i * width;
        vector most = every(-(REAL)INFINITY);
        for (int64_t j = 0; j < width; j += LANES) most = larger(load(row + j) + load(bias + j), most);
        largest[i] = largest_of(most);
    }
    for (int64_t i = 0; i < rows; i++) {
        REAL *row = S + i * width;
        const REAL less = largest[i];
        vector sum = {0};
        for (int64_t j = 0; j < width; j += LANES) {
            const vector p = exponential(load(row + j) + load(bias + j) - less);
            store(row + j, p);
            sum += p;
        }
        sums[i] = sum_of(sum);
        shares[i] = 1 / sums[i];
    }
    if (lse)
        for (int64_t i = 0; i < rows; i++)
            lse[i] = largest[i] + (IS_FLOAT ? (REAL)logf((float)sums[i]) : (REAL)log((double)sums[i]));
}

INLINE void multiply_rows(REAL *S, int64_t rows, int64_t width, const REAL *factors) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i * width; j < (i + 1) * width; j += LANES) store(S + j, load(S + j) * factors[i]);
}

#include "convolution.h"

static void rows_forward_item(const void *task, int64_t item, void *scratch) {
    const rows_task *t = task;
    const rows_item x = find_rows(t, item);
    const int64_t sp = t->sp, dp = t->dp, ep = t->ep;
    REAL *KT = scratch, *V = KT + t->d * sp, *bias = V + t->s * ep, *Q = bias + sp, *S = Q + TOKENS * dp;
    REAL *O = S + TOKENS * sp, *window = O + TOKENS * ep, *taps = window + (TOKENS + t->taps) * ep, shares[TOKENS];
    pack_transposed(KT, at(t->key, x.g, x.c, 0), t->key.r, t->s, t->d, t->scale);
    pack_panels(V, at(t->value, x.g, x.c, 0), t->value.r, t->s, t->e);
    if (t->skip.data) pack_taps(taps, at(t->kernel, 0, x.c, 0), t->taps, 0);
    for (int64_t g = x.g; g < x.g_end; g++) {
        pack_bias(bias, t, g, x.c);
        for (int64_t r = x.r; r < x.r_end; r += TOKENS) {
            const int64_t rows = smaller(TOKENS, x.r_end - r);
            const int64_t next = smaller(TOKENS, x.r_end - r - rows);
            pack(Q, dp, at(t->query, g, x.c, r), t->query.r, rows, t->d);
            prefetch(at(t->query, g, x.c, r + rows), t->query.r, next, t->d, 0);
            prefetch(at(t->out, g, x.c, r), t->out.r, rows, t->e, 1);
            times(S, sp, Q, dp, KT, rows, sp, t->d, 0);
            softmax_rows(S, rows, sp, bias, shares, t->lse.data ? at(t->lse, g, x.c, 0) + r : NULL);
            REAL *out = at(t->out, g, x.c, r), *to = t->e == ep ? out : O;
            const int64_t stride = t->e == ep ? t->out.r : ep;
            times_by_row(to, stride, S, sp, V, rows, ep, t->s, shares);
            if (t->skip.data) {
                pack_window(window, ep, t->skip, g, x.c, r - t->taps / 2, rows + t->taps - 1, t->n, t->e);
                const int64_t ahead = r + rows + t->taps / 2;
                prefetch(at(t->skip, g, x.c, ahead), t->skip.r, smaller(next, t->n - ahead), t->e, 0);
                convolve(to, stride, taps, t->taps, window, ep, rows, ep, 1);
            }
            if (to == O) unpack(out, t->out.r, O, ep, rows, t->e);
        }
    }
}

INLINE rows_task sized_rows_forward(rows_task t) {
    t = sized_rows(t, ROWS_FORWARD);
    t.scratch = (t.d * t.sp + t.s * t.ep + t.sp + TOKENS * (t.dp + t.sp + 2 * t.ep) + t.taps * t.ep + t.taps) *
                sizeof(REAL);
    return t;
}

static int run_rows_forward(const rows_task *t) {
    return nystrom_for_each_item(rows_forward_item, t, rows_items(t), t->scratch, t->threads);
}

ENTRY(rows_forward)(const int64_t *args, double scale) {
    rows_task t = take_rows(&args, scale);
    t.out = take_view(&args), t.lse = take_view(&args);
    t = sized_rows_forward(t);
    return run_rows_forward(&t);
}

/* Gradients of weights P, in dP, to those of the logits: P ∘ (dP − Σ P dP + the gradient of the log-sum-exp). */
static void softmax_rows_backward(const REAL *P, REAL *dP, int64_t rows, int64_t width, REAL scale, const REAL *of_lse) {
    REAL less[TOKENS];
    for (int64_t i = 0; i < rows; i++) {
        vector sum = {0};
        for (int64_t j = i * width; j < (i + 1) * width; j += LANES) sum += load(P + j) * load(dP + j);
        less[i] = sum_of(sum) - (of_lse ? of_lse[i] : 0);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i * width; j < (i + 1) * width; j += LANES)
            store(dP + j, load(P + j) * (load(dP + j) - less[i]) * scale);
}

static void rows_backward_item(const void *task, int64_t item, void *scratch) {
    const rows_task *t = task;
    const rows_item x = find_rows(t, item);
    const int64_t sp = t->sp, dp = t->dp, ep = t->ep;
    REAL *KT = scratch, *K = KT + t->d * sp, *VT = K + t->s * dp, *bias = VT + t->e * sp, *Q = bias + sp;
    REAL *G = Q + TOKENS * dp, *P = G + TOKENS * ep, *dP = P + TOKENS * sp, *dQ = dP + TOKENS * sp;
    REAL *dK = t->partial + item * partial_size(t), *dV = dK + t->s * dp, shares[TOKENS];
    memset(dK, 0, partial_size(t) * sizeof(REAL));
    pack_transposed(KT, at(t->key, x.g, x.c, 0), t->key.r, t->s, t->d, t->scale);
    pack_panels(K, at(t->key, x.g, x.c, 0), t->key.r, t->s, t->d);
    pack_transposed(VT, at(t->value, x.g, x.c, 0), t->value.r, t->s, t->e, 1);
    for (int64_t g = x.g; g < x.g_end; g++) {
        pack_bias(bias, t, g, x.c);
        for (int64_t r = x.r; r < x.r_end; r += TOKENS) {
            const int64_t rows = smaller(TOKENS, x.r_end - r);
            pack(Q, dp, at(t->query, g, x.c, r), t->query.r, rows, t->d);
            pack(G, ep, at(t->grad, g, x.c, r), t->grad.r, rows, t->e);
            const int64_t next = smaller(TOKENS, x.r_end - r - rows);
            prefetch(at(t->query, g, x.c, r + rows), t->query.r, next, t->d, 0);
            prefetch(at(t->grad, g, x.c, r + rows), t->grad.r, next, t->e, 0);
            prefetch(at(t->grad_query, g, x.c, r), t->grad_query.r, rows, t->d, 1);
            times(P, sp, Q, dp, KT, rows, sp, t->d, 0);
            softmax_rows(P, rows, sp, bias, shares, NULL);
            multiply_rows(P, rows, sp, shares);
            times(dP, sp, G, ep, VT, rows, sp, t->e, 0);
            add_transposed_times(dV, ep, P, sp, G, ep, t->s, ep, rows);
            softmax_rows_backward(P, dP, rows, sp, t->scale, t->grad_lse.data ? at(t->grad_lse, g, x.c, 0) + r : NULL);
            add_transposed_times(dK, dp, dP, sp, Q, dp, t->s, dp, rows);
            REAL *out = at(t->grad_query, g, x.c, r);
            if (t->d == dp) {
                times(out, t->grad_query.r, dP, sp, K, rows, dp, t->s, 0);
            } else {
                times(dQ, dp, dP, sp, K, rows, dp, t->s, 0);
                unpack(out, t->grad_query.r, dQ, dp, rows, t->d);
            }
        }
    }
}

/* Adds up the gradients of keys and values that the items of one (g, c), or of one c, gave. */
static void rows_backward_sum(const void *task, int64_t item, void *scratch) {
    const rows_task *t = task;
    const int64_t size = partial_size(t), each = t->shared ? t->g_parts : t->r_parts;
    const int64_t c = t->shared ? item : item / t->G, g = t->shared ? 0 : item % t->G;
    REAL *total = t->partial + item * each * size;
    (void)scratch;
    for (int64_t i = 1; i < each; i++)
        for (int64_t j = 0; j < size; j += LANES) store(total + j, load(total + j) + load(total + i * size + j));
    unpack(at(t->grad_key, g, c, 0), t->grad_key.r, total, t->dp, t->s, t->d);
    unpack(at(t->grad_value, g, c, 0), t->grad_value.r, total + t->s * t->dp, t->ep, t->s, t->e);
}

INLINE rows_task sized_rows_backward(rows_task t) {
    t = sized_rows(t, ROWS_BACKWARD);
    t.scratch = ((t.d + t.e) * t.sp + t.s * t.dp + t.sp + TOKENS * (2 * t.dp + t.ep + 2 * t.sp)) * sizeof(REAL);
    return t;
}

/* Numbers of the gradients that all items give. */
INLINE int64_t rows_partial_size(const rows_task *t) { return rows_items(t) * partial_size(t); }

static int run_rows_backward(const rows_task *t) {
    const int outcome = nystrom_for_each_item(rows_backward_item, t, rows_items(t), t->scratch, t->threads);
    if (outcome != DONE) return outcome;
    return nystrom_for_each_item(rows_backward_sum, t, t->C * (t->shared ? 1 : t->G), 0, t->threads);
}

ENTRY(rows_backward)(const int64_t *args, double scale) {
    rows_task t = take_rows(&args, scale);
    t.grad = take_view(&args), t.grad_lse = take_view(&args);
    t.grad_query = take_view(&args), t.grad_key = take_view(&args), t.grad_value = take_view(&args);
    t = sized_rows_backward(t);
    t.partial = malloc(rows_partial_size(&t) * sizeof(REAL) + 1);
    const int outcome = t.partial ? run_rows_backward(&t) : OUT_OF_MEMORY;
    free(t.partial);
    return outcome;
}
