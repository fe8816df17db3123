/* Exact attention, softmax(scale·Q Kᵀ) V for many queries and many keys, in blocks of both: what belongs to a block stays
   in a cache, and no row of weights is ever whole.

   Kept for the backward are the result and each row's log-sum-exp, from which the weights of any block are made again.
   Weights can be dropped, which ones is a function of a seed, and sequences of one batch can have lengths of their own. */

#define KEYS 256               /* of a block, which has TOKENS rows */
#define APART (KEYS + LANES)   /* from one row of a block to the next: rows compete for fewer places of a cache so */
#define ROWS_EXACT 1024        /* of one item of the forward, whose results wait for the last key in a cache */
#define ITEMS_EXACT 16         /* of the backward, at least, where there are rows enough: each has all keys' gradients */

typedef struct {
    int64_t threads, G, C, n, s, d, e;
    view query, key, value, out, lse; /* lse (g, c, n, 1) */
    view grad, grad_query, grad_key, grad_value; /* backward */
    REAL scale;
    const span *spans;    /* of each sequence of self-attention, in n rows; or none, where all have all rows */
    dropout_rule weights; /* how weights are dropped */
    int64_t head, head_places, row_places; /* the first one, and numbers that are drawn for a head and for a row of it */
    int64_t dp, ep;       /* d and e up to a multiple of COLUMNS */
    int64_t r_each, r_parts; /* how items divide the rows */
    REAL *partial;        /* of each item, where several share a head: gradients of keys and values */
    size_t scratch;       /* bytes that an item needs */
} exact_task;

INLINE exact_task take_exact(const int64_t **args, double scale) {
    exact_task t = {0};
    t.threads = take(args);
    t.G = take(args), t.C = take(args), t.n = take(args), t.s = take(args), t.d = take(args), t.e = take(args);
    t.query = take_view(args), t.key = take_view(args), t.value = take_view(args);
    t.spans = (const span *)(intptr_t)take(args);
    t.weights = take_rule(args);
    t.out = take_view(args), t.lse = take_view(args);
    t.row_places = up_to_multiple(t.s, DRAWN_TOGETHER), t.head_places = t.n * t.row_places;
    t.dp = up_to_multiple(t.d, COLUMNS), t.ep = up_to_multiple(t.e, COLUMNS);
    t.scale = (REAL)scale;
    return t;
}

INLINE exact_task divided(exact_task t, int64_t rows_each) {
    t.r_each = up_to_multiple(rows_each, TOKENS);
    t.r_parts = parts_of(t.n, t.r_each);
    return t;
}

/* Numbers of the gradients of keys and values that an item gives. */
INLINE int64_t exact_partial_size(const exact_task *t) { return t->s * (t->d + t->e); }

/* A head, and some of its rows. */
typedef struct {
    exact_task head;
    int64_t r, r_end;
    view of_key, of_value; /* backward: where its gradients of keys and values go */
} exact_item;

static exact_item find_exact(const exact_task *t, int64_t item) {
    exact_item x = {.head = *t};
    const int64_t part = item % t->r_parts, g = item / t->r_parts % t->G, c = item / t->r_parts / t->G;
    const span own = t->spans ? t->spans[g] : (span){0, t->n, -1};
    view *const of_queries[] = {&x.head.query, &x.head.out, &x.head.lse, &x.head.grad, &x.head.grad_query};
    view *const of_keys[] = {&x.head.key, &x.head.value, &x.head.grad_key, &x.head.grad_value};
    for (int i = 0; i < 5; i++) *of_queries[i] = moved(*of_queries[i], g, c, own.first);
    for (int i = 0; i < 4; i++) *of_keys[i] = moved(*of_keys[i], g, c, own.first);
    x.head.head = g * t->C + c;
    x.head.n = own.length;
    if (t->spans) x.head.s = own.length;
    x.r = smaller(part * t->r_each, own.length), x.r_end = smaller(x.r + t->r_each, own.length);
    x.of_key = x.head.grad_key, x.of_value = x.head.grad_value;
    if (t->partial) {
        REAL *own_part = t->partial + item * exact_partial_size(t);
        x.of_key = (view){own_part, 0, 0, t->d}, x.of_value = (view){own_part + t->s * t->d, 0, 0, t->e};
    }
    return x;
}

INLINE int64_t exact_items(const exact_task *t) { return t->C * t->G * t->r_parts; }

/* What `count` weights of row r, from key k on, are multiplied with. */
INLINE void draw_weights(REAL *factors, const exact_task *t, int64_t r, int64_t k, int64_t count) {
    draw(factors, &t->weights, t->head * t->head_places + r * t->row_places + k, count);
}

/* Logits of a block, `width` keys from k on, to weights, in place, relative to the row's largest logit so far. What came
   of the row before, `sums` and O, follows where that is a larger one now. */
static void weigh(REAL *S, const exact_task *t, int64_t r, int64_t rows, int64_t k, int64_t width, REAL *largest,
                  REAL *sums, REAL *O) {
    REAL less[TOKENS], factors[KEYS];
    for (int64_t i = 0; i < rows; i++) {
        const REAL *row = S + i * APART;
        vector most = every(largest[i]);
        for (int64_t j = 0; j < width; j += LANES) most = larger(load(row + j), most);
        less[i] = largest[i], largest[i] = largest_of(most);
        less[i] -= largest[i];
    }
    for (int64_t i = rows; i < TOKENS; i++) less[i] = 0;
    for (int64_t i = 0; i < TOKENS; i += LANES) store(less + i, exponential(load(less + i)));
    for (int64_t i = 0; i < rows; i++) {
        REAL *row = S + i * APART;
        vector sum = {0};
        if (drops(&t->weights)) draw_weights(factors, t, r + i, k, width);
        for (int64_t j = 0; j < width; j += LANES) {
            const vector p = exponential(load(row + j) - largest[i]);
            store(row + j, drops(&t->weights) ? p * load(factors + j) : p);
            sum += p;
        }
        sums[i] = sums[i] * less[i] + sum_of(sum);
    }
    if (k) multiply_rows(O, rows, t->ep, less);
}

static void exact_forward_item(const void *task, int64_t item, void *scratch) {
    const exact_item x = find_exact(task, item);
    const exact_task *t = &x.head;
    const int64_t dp = t->dp, ep = t->ep;
    REAL *KT = scratch, *V = KT + t->d * KEYS, *Q = V + KEYS * ep, *S = Q + t->r_each * dp, *all = S + TOKENS * APART;
    REAL *largest = all + t->r_each * ep, *sums = largest + t->r_each;
    if (x.r == x.r_end) return;
    pack(Q, dp, at(t->query, 0, 0, x.r), t->query.r, x.r_end - x.r, t->d);
    for (int64_t i = 0; i < x.r_end - x.r; i++) largest[i] = IS_FLOAT ? -FLT_MAX : (REAL)-DBL_MAX, sums[i] = 0;
    for (int64_t k = 0; k < t->s; k += KEYS) {
        const int64_t keys = smaller(KEYS, t->s - k), width = up_to_multiple(keys, COLUMNS);
        pack_transposed(KT, at(t->key, 0, 0, k), t->key.r, keys, t->d, t->scale);
        pack_panels(V, at(t->value, 0, 0, k), t->value.r, keys, t->e);
        for (int64_t r = x.r; r < x.r_end; r += TOKENS) {
            const int64_t rows = smaller(TOKENS, x.r_end - r), i = r - x.r;
            REAL *O = all + i * ep;
            times(S, APART, Q + i * dp, dp, KT, rows, width, t->d, 0);
            for (int64_t row = 0; keys < width && row < rows; row++)
                for (int64_t j = keys; j < width; j++) S[row * APART + j] = -(REAL)INFINITY;
            weigh(S, t, r, rows, k, width, largest + i, sums + i, O);
            times(O, ep, S, APART, V, rows, ep, keys, k > 0);
        }
    }
    for (int64_t i = 0, r = x.r; r < x.r_end; i++, r++) {
        const REAL share = 1 / sums[i];
        REAL *out = at(t->out, 0, 0, r);
        for (int64_t j = 0; j < t->e; j++) out[j] = all[i * ep + j] * share;
        *at(t->lse, 0, 0, r) = largest[i] + (IS_FLOAT ? (REAL)logf((float)sums[i]) : (REAL)log((double)sums[i]));
    }
}

ENTRY(exact_forward)(const int64_t *args, double scale) {
    exact_task t = take_exact(&args, scale);
    t = divided(t, smaller(t.n, rows_of_item(ROWS_EXACT, t.dp, t.ep)));
    const int64_t block = KEYS * (t.d + t.ep) + TOKENS * APART, rows = t.r_each * (t.dp + t.ep + 2);
    t.scratch = (block + rows) * sizeof(REAL);
    return nystrom_for_each_item(exact_forward_item, &t, exact_items(&t), t.scratch, t.threads);
}

/* Logits of a block in P to weights, and their gradients in dP to those of products of queries and keys, P ∘ (dP − the
   row's `less`)·scale; of what is dropped none comes. */
static void weigh_backward(REAL *P, REAL *dP, const exact_task *t, int64_t r, int64_t rows, int64_t k, int64_t width,
                           const REAL *less) {
    REAL factors[KEYS];
    for (int64_t i = 0; i < rows; i++, P += APART, dP += APART) {
        const REAL lse = *at(t->lse, 0, 0, r + i);
        if (drops(&t->weights)) draw_weights(factors, t, r + i, k, width);
        for (int64_t j = 0; j < width; j += LANES) {
            const vector p = exponential(load(P + j) - lse);
            vector kept = p, of_weight = load(dP + j);
            if (drops(&t->weights)) kept *= load(factors + j), of_weight *= load(factors + j);
            store(P + j, kept);
            store(dP + j, p * (of_weight - less[i]) * t->scale);
        }
    }
}

/* Σ P dP of each row, which is the product of its result and of the gradient of that. */
static void sums_of_gradients(REAL *sums, const exact_item *x, REAL *G, REAL *O) {
    const exact_task *t = &x->head;
    for (int64_t r = x->r; r < x->r_end; r++) {
        vector sum = {0};
        pack(G, t->ep, at(t->grad, 0, 0, r), t->grad.r, 1, t->e);
        pack(O, t->ep, at(t->out, 0, 0, r), t->out.r, 1, t->e);
        for (int64_t j = 0; j < t->ep; j += LANES) sum += load(G + j) * load(O + j);
        sums[r - x->r] = sum_of(sum);
    }
}

static void exact_backward_item(const void *task, int64_t item, void *scratch) {
    const exact_item x = find_exact(task, item);
    const exact_task *t = &x.head;
    const int64_t dp = t->dp, ep = t->ep;
    REAL *KT = scratch, *K = KT + t->d * KEYS, *VT = K + KEYS * dp, *Q = VT + t->e * KEYS, *G = Q + TOKENS * dp;
    REAL *P = G + TOKENS * ep, *dP = P + TOKENS * APART, *dQ = dP + TOKENS * APART;
    REAL *dK = dQ + TOKENS * dp, *dV = dK + KEYS * dp, *less = dV + KEYS * ep;
    if (x.r == x.r_end) return;
    sums_of_gradients(less, &x, G, dV);
    for (int64_t k = 0; k < t->s; k += KEYS) {
        const int64_t keys = smaller(KEYS, t->s - k), width = up_to_multiple(keys, COLUMNS);
        pack_transposed(KT, at(t->key, 0, 0, k), t->key.r, keys, t->d, t->scale);
        pack_panels(K, at(t->key, 0, 0, k), t->key.r, keys, t->d);
        pack_transposed(VT, at(t->value, 0, 0, k), t->value.r, keys, t->e, 1);
        memset(dK, 0, KEYS * (dp + ep) * sizeof(REAL));
        for (int64_t r = x.r; r < x.r_end; r += TOKENS) {
            const int64_t rows = smaller(TOKENS, x.r_end - r), next = smaller(TOKENS, x.r_end - r - rows);
            pack(Q, dp, at(t->query, 0, 0, r), t->query.r, rows, t->d);
            pack(G, ep, at(t->grad, 0, 0, r), t->grad.r, rows, t->e);
            prefetch(at(t->query, 0, 0, r + rows), t->query.r, next, t->d, 0);
            prefetch(at(t->grad, 0, 0, r + rows), t->grad.r, next, t->e, 0);
            prefetch(at(t->grad_query, 0, 0, r), t->grad_query.r, rows, t->d, 1);
            times(P, APART, Q, dp, KT, rows, width, t->d, 0);
            times(dP, APART, G, ep, VT, rows, width, t->e, 0);
            weigh_backward(P, dP, t, r, rows, k, width, less + r - x.r);
            /* keys that fill the last block up are left out from here on */
            add_transposed_times(dV, ep, P, APART, G, ep, keys, ep, rows);
            add_transposed_times(dK, dp, dP, APART, Q, dp, keys, dp, rows);
            times(dQ, dp, dP, APART, K, rows, dp, keys, 0);
            REAL *to = at(t->grad_query, 0, 0, r);
            if (k)
                unpack_adding(to, t->grad_query.r, dQ, dp, rows, t->d);
            else
                unpack(to, t->grad_query.r, dQ, dp, rows, t->d);
        }
        unpack(at(x.of_key, 0, 0, k), x.of_key.r, dK, dp, keys, t->d);
        unpack(at(x.of_value, 0, 0, k), x.of_value.r, dV, ep, keys, t->e);
    }
}

/* Adds up the gradients of keys and values that the items of one head gave. */
static void exact_backward_sum(const void *task, int64_t head, void *scratch) {
    const exact_task *all = task;
    (void)scratch;
    for (int64_t part = 0; part < all->r_parts; part++) {
        const exact_item x = find_exact(all, head * all->r_parts + part);
        const exact_task *t = &x.head;
        if (part && x.r == x.r_end) return;
        void (*give)(REAL *, int64_t, const REAL *, int64_t, int64_t, int64_t) = part ? unpack_adding : unpack;
        give(t->grad_key.data, t->grad_key.r, x.of_key.data, t->d, t->s, t->d);
        give(t->grad_value.data, t->grad_value.r, x.of_value.data, t->e, t->s, t->e);
    }
}

ENTRY(exact_backward)(const int64_t *args, double scale) {
    exact_task t = take_exact(&args, scale);
    t.grad = take_view(&args);
    t.grad_query = take_view(&args), t.grad_key = take_view(&args), t.grad_value = take_view(&args);
    const int64_t heads = t.G * t.C, parts = parts_of(ITEMS_EXACT, heads ? heads : 1);
    const int64_t rows_each = parts_of(t.n, parts), least = rows_of_item(ROWS_EXACT, t.dp, t.ep);
    t = divided(t, rows_each > least ? rows_each : least);
    const int64_t of_keys = KEYS * (t.d + 2 * t.dp + t.e + t.ep), of_rows = TOKENS * (2 * t.dp + t.ep) + t.r_each;
    t.scratch = (of_keys + of_rows + 2 * TOKENS * APART) * sizeof(REAL);
    if (t.r_parts <= 1) return nystrom_for_each_item(exact_backward_item, &t, heads, t.scratch, t.threads);
    t.partial = malloc(exact_items(&t) * exact_partial_size(&t) * sizeof(REAL) + 1);
    if (!t.partial) return OUT_OF_MEMORY;
    int outcome = nystrom_for_each_item(exact_backward_item, &t, exact_items(&t), t.scratch, t.threads);
    if (outcome == DONE) outcome = nystrom_for_each_item(exact_backward_sum, &t, heads, 0, t.threads);
    free(t.partial);
    return outcome;
}
