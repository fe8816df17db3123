/* Nyström attention as a whole: means of queries, B V with means of keys, what is small, and F W.

   Where no head's sequence is divided, heads are taken one by one, from the first step to the last, so that what a head
   has stays in a cache and threads meet once. Otherwise all heads take each step together.

   Sequences of one batch may have lengths of their own, as `spans` tells. Each is computed as it would be alone: short ones
   exactly, those that are not divided head by head, all together, longer ones one after the other. */

/* What is computed, for G sequences of C heads each. */
typedef struct {
    int64_t threads, G, C, n, s, d, e, m, size, iterations, taps, keeps;
    const span *spans;   /* of each sequence, in n rows; or none, where all have all rows */
    int64_t exact_up_to; /* tokens of a sequence, at least m */
    view query, key, value, kernel, out; /* (g, c, n, d), (g, c, s, d), (g, c, s, e), (c, taps), (g, c, n, e) */
    view grad, grad_query, grad_key, grad_value, grad_kernel; /* backward */
    int64_t number, grad_number; /* of numbers at the next two for each head */
    REAL *small, *grad_small;    /* all that is small, (sequences with landmarks, c), and its gradients */
    REAL *kernel_sums;           /* backward, with spans: gradients of kernels from each head of each sequence */
    REAL scale;
} whole;

typedef struct {
    means_task queries;
    columns_task columns;
    core_task core;
    rows_task rows;
    int exact; /* there are no landmarks: `rows` are of all keys */
} whole_task;

/* Heads `c` to `c` + `heads` of sequence g, alone. */
static whole part_of(const whole *x, int64_t g, int64_t c, int64_t heads) {
    whole part = *x;
    const span own = x->spans[g];
    view *const of_tokens[] = {&part.query, &part.key, &part.value, &part.out, &part.grad, &part.grad_query,
                               &part.grad_key, &part.grad_value};
    for (int i = 0; i < 8; i++) *of_tokens[i] = moved(*of_tokens[i], g, c, own.first);
    part.kernel = moved(x->kernel, 0, c, 0), part.grad_kernel = moved(x->grad_kernel, 0, c, 0);
    part.spans = NULL;
    part.G = 1, part.C = heads, part.n = part.s = own.length;
    if (own.place >= 0) {
        part.small += (own.place * x->C + c) * x->number;
        if (part.grad_small) part.grad_small += (own.place * x->C + c) * x->grad_number;
    }
    return part;
}

/* Parts of what is small, (g, c, rows, width) one after the other in `number` numbers of each head. */
typedef struct {
    REAL *data;
    int64_t C, number;
} heads_memory;

INLINE view next_part(heads_memory *x, int64_t rows, int64_t width) {
    const view part = {x->data, x->C * x->number, x->number, width};
    x->data += rows * width;
    return part;
}

/* The steps of both directions. The memory that the backward finds again is A, Z, the steps of the pseudoinverse where
   they are wanted, W, B V, landmarks and log-sum-exps. */
static whole_task whole_steps(const whole *x) {
    whole_task t = {.exact = x->s <= x->exact_up_to};
    const int64_t threads = x->threads, G = x->G, C = x->C, n = x->n, s = x->s, d = x->d, e = x->e, m = x->m;
    heads_memory small = {x->small, C, x->number}, grads = {x->grad_small, C, x->grad_number};
    core_task *core = &t.core;
    *core = (core_task){.threads = threads, .G = G, .C = C, .m = m, .d = d, .e = e, .size = x->size};
    core->iterations = x->iterations, core->scale = x->scale;
    core->A = next_part(&small, x->size, x->size), core->Z = next_part(&small, x->size, x->size);
    if (x->keeps) core->steps = next_part(&small, x->iterations * 3 * x->size, x->size);
    core->W = next_part(&small, m, e), core->BV = next_part(&small, m, e);
    core->queries = next_part(&small, m, d), core->keys = next_part(&small, m, d);
    const view lse = next_part(&small, 1, m);
    core->grad_W = next_part(&grads, m, e), core->grad_BV = next_part(&grads, m, e);
    core->grad_queries = next_part(&grads, m, d), core->grad_keys = next_part(&grads, m, d);
    t.core = sized_core(t.core);

    const int backward = x->grad.data != NULL;
    t.queries = (means_task){threads, G, C, n, m, d, x->query, core->queries, parts_of(m, SEGMENTS)};
    if (backward) t.queries.tokens = x->grad_query, t.queries.means = core->grad_queries;

    t.columns = (columns_task){.threads = threads, .G = G, .C = C, .n = m, .s = s, .d = d, .e = e, .scale = x->scale};
    t.columns.query = core->queries, t.columns.key = x->key, t.columns.value = x->value;
    t.columns.out = core->BV, t.columns.lse = lse, t.columns.m = m, t.columns.means = core->keys;
    t.columns.grad = core->grad_BV, t.columns.grad_query = core->grad_queries, t.columns.adds = QUERIES_ADD;
    t.columns.grad_key = x->grad_key, t.columns.grad_value = x->grad_value, t.columns.grad_means = core->grad_keys;
    if (x->taps) t.columns.skip = x->grad;
    t.columns.kernel = x->kernel, t.columns.grad_kernel = x->grad_kernel, t.columns.taps = x->taps;

    t.rows = (rows_task){.threads = threads, .G = G, .C = C, .n = n, .s = m, .d = d, .e = e, .scale = x->scale};
    t.rows.query = x->query, t.rows.key = core->keys, t.rows.value = core->W, t.rows.out = x->out;
    t.rows.grad = x->grad, t.rows.grad_query = x->grad_query;
    t.rows.grad_key = core->grad_keys, t.rows.grad_value = core->grad_W;
    if (x->taps) t.rows.skip = x->value, t.rows.kernel = x->kernel, t.rows.taps = x->taps;
    if (t.exact) {
        t.rows.s = s, t.rows.key = x->key, t.rows.value = x->value;
        t.rows.grad_key = x->grad_key, t.rows.grad_value = x->grad_value;
    }
    t.columns = backward ? sized_columns_backward(t.columns) : sized_columns_forward(t.columns);
    t.rows = backward ? sized_rows_backward(t.rows) : sized_rows_forward(t.rows);
    return t;
}

INLINE int head_by_head(const whole_task *t) { return t->columns.s_parts <= 1 && t->rows.r_parts <= 1; }

INLINE size_t largest_scratch(const whole_task *t) {
    const size_t each[] = {means_scratch(&t->queries), t->columns.scratch, t->core.scratch, t->rows.scratch};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = each[i] > most ? each[i] : most;
    return most;
}

/* Of head c of sequence g, the (c·G + g)-th for all parts but the core, which counts them the other way. */
INLINE int64_t core_item(const core_task *t, int64_t head) { return head % t->G * t->C + head / t->G; }

INLINE int64_t heads_of(const whole *x) { return x->G * x->C; }

INLINE void each_part(work_on_item *work, const means_task *t, int64_t head, void *scratch) {
    for (int64_t part = 0; part < t->parts; part++) work(t, head * t->parts + part, scratch);
}

static void whole_forward_item(const void *task, int64_t head, void *scratch) {
    const whole_task *t = task;
    if (!t->exact) {
        each_part(means_forward_item, &t->queries, head, scratch);
        columns_forward_item(&t->columns, head, scratch);
        core_forward_item(&t->core, core_item(&t->core, head), scratch);
    }
    rows_forward_item(&t->rows, head, scratch);
}

static int run_whole_forward(const whole *x) {
    whole_task t = whole_steps(x);
    if (head_by_head(&t))
        return nystrom_for_each_item(whole_forward_item, &t, heads_of(x), largest_scratch(&t), x->threads);
    int outcome = run_means_forward(&t.queries);
    if (outcome == DONE) outcome = run_columns_forward(&t.columns);
    if (outcome == DONE)
        outcome = nystrom_for_each_item(core_forward_item, &t.core, heads_of(x), t.core.scratch, x->threads);
    return outcome == DONE ? run_rows_forward(&t.rows) : outcome;
}

static void whole_backward_item(const void *task, int64_t head, void *scratch) {
    const whole_task *t = task;
    rows_backward_item(&t->rows, head, scratch);
    rows_backward_sum(&t->rows, head, scratch);
    if (t->exact) {
        skip_backward_item(&t->columns, head, scratch);
        return;
    }
    core_backward_item(&t->core, core_item(&t->core, head), scratch);
    columns_backward_item(&t->columns, head, scratch);
    each_part(means_backward_item, &t->queries, head, scratch);
}

static int run_whole_steps_backward(const whole *x, const whole_task *t) {
    int outcome;
    if (head_by_head(t)) {
        outcome = nystrom_for_each_item(whole_backward_item, t, heads_of(x), largest_scratch(t), x->threads);
        if (outcome == DONE) add_kernel_gradient(&t->columns);
        return outcome;
    }
    outcome = run_rows_backward(&t->rows);
    if (outcome == DONE)
        outcome = nystrom_for_each_item(core_backward_item, &t->core, heads_of(x), t->core.scratch, x->threads);
    if (outcome == DONE) outcome = run_columns_backward(&t->columns);
    return outcome == DONE ? run_means_backward(&t->queries) : outcome;
}

static int run_whole_backward(const whole *x) {
    whole_task t = whole_steps(x);
    t.rows.partial = malloc(rows_partial_size(&t.rows) * sizeof(REAL) + 1);
    t.columns = with_partials(t.columns);
    const int outcome = t.rows.partial && t.columns.partial_kernel ? run_whole_steps_backward(x, &t) : OUT_OF_MEMORY;
    free(t.rows.partial);
    free(t.columns.partial_kernel);
    return outcome;
}

/* Sequences of lengths of their own */

/* Rows of an example before and after its sequence become 0: in the result, or in gradients. */
static void zero_around_item(const void *task, int64_t item, void *scratch) {
    const whole *x = task;
    const span own = x->spans[item];
    const view results[] = {x->out, x->grad_query, x->grad_key, x->grad_value};
    const int64_t widths[] = {x->e, x->d, x->d, x->e};
    (void)scratch;
    for (int i = 0; i < 4; i++)
        for (int64_t r = 0; results[i].data && r < x->n; r++) {
            if (r == own.first) r += own.length;
            for (int64_t c = 0; r < x->n && c < x->C; c++)
                memset(at(results[i], item, c, r), 0, widths[i] * sizeof(REAL));
        }
}

static void sequence_forward_item(const void *task, int64_t item, void *scratch) {
    const whole *x = task, own = part_of(x, item % x->G, item / x->G, 1);
    const whole_task t = whole_steps(&own);
    if (own.n && head_by_head(&t)) whole_forward_item(&t, 0, scratch);
}

static void sequence_backward_item(const void *task, int64_t item, void *scratch) {
    const whole *x = task, own = part_of(x, item % x->G, item / x->G, 1);
    whole_task t = whole_steps(&own);
    if (!own.n || !head_by_head(&t)) return;
    t.rows.partial = scratch;
    t.columns.partial_kernel = x->kernel_sums + item * taps_padded(&t.columns);
    whole_backward_item(&t, 0, t.rows.partial + rows_partial_size(&t.rows));
}

/* Those that are divided. */
static int run_long_sequences(const whole *x, int (*run)(const whole *)) {
    int outcome = DONE;
    for (int64_t g = 0; outcome == DONE && g < x->G; g++) {
        const whole own = part_of(x, g, 0, x->C);
        const whole_task t = whole_steps(&own);
        if (!head_by_head(&t)) outcome = run(&own);
    }
    return outcome;
}

static int run_spans(const whole *x) {
    const int backward = x->grad.data != NULL;
    whole one = *x;
    size_t scratch = 0;
    one.G = one.C = 1;
    for (int64_t more = 0; more <= 1; more++) { /* what an item needs grows with its sequence while that is exact */
        one.n = one.s = x->exact_up_to + more;
        const whole_task t = whole_steps(&one);
        const size_t needed = largest_scratch(&t) + (backward ? rows_partial_size(&t.rows) * sizeof(REAL) : 0);
        scratch = needed > scratch ? needed : scratch;
    }
    int outcome = nystrom_for_each_item(zero_around_item, x, x->n ? x->G : 0, 0, x->threads);
    if (outcome == DONE)
        outcome = nystrom_for_each_item(backward ? sequence_backward_item : sequence_forward_item, x, heads_of(x), scratch,
                                        x->threads);
    if (backward && outcome == DONE) {
        columns_task given = {.G = x->G, .C = x->C, .s_parts = 1, .taps = x->taps};
        given.grad_kernel = x->grad_kernel, given.partial_kernel = x->kernel_sums;
        add_kernel_gradient(&given);
    }
    return outcome == DONE ? run_long_sequences(x, backward ? run_whole_backward : run_whole_forward) : outcome;
}

INLINE whole take_whole(const int64_t **args, double scale) {
    whole x = {0};
    x.threads = take(args), x.G = take(args), x.C = take(args), x.n = take(args), x.s = take(args);
    x.d = take(args), x.e = take(args), x.m = take(args), x.size = take(args), x.iterations = take(args);
    x.spans = (const span *)(intptr_t)take(args), x.exact_up_to = take(args);
    x.query = take_view(args), x.key = take_view(args), x.value = take_view(args), x.kernel = take_view(args);
    x.taps = take(args), x.keeps = take(args), x.number = take(args);
    x.small = (REAL *)(intptr_t)take(args);
    x.scale = (REAL)scale;
    return x;
}

ENTRY(nystrom_forward)(const int64_t *args, double scale) {
    whole x = take_whole(&args, scale);
    x.out = take_view(&args);
    return x.spans ? run_spans(&x) : run_whole_forward(&x);
}

/* `grad_kernel` is added to. */
ENTRY(nystrom_backward)(const int64_t *args, double scale) {
    whole x = take_whole(&args, scale);
    x.grad = take_view(&args), x.grad_query = take_view(&args), x.grad_key = take_view(&args);
    x.grad_value = take_view(&args), x.grad_kernel = take_view(&args);
    const int64_t sequences = take(&args); /* with landmarks */
    x.grad_number = 2 * x.m * (x.d + x.e);
    const int64_t sums = x.spans ? heads_of(&x) * up_to_multiple(x.taps, TAPS) : 0;
    REAL *memory = malloc((sequences * x.C * x.grad_number + sums) * sizeof(REAL) + 1);
    if (!memory) return OUT_OF_MEMORY;
    x.grad_small = memory, x.kernel_sums = memory + sequences * x.C * x.grad_number;
    memset(x.kernel_sums, 0, sums * sizeof(REAL));
    const int outcome = x.spans ? run_spans(&x) : run_whole_backward(&x);
    free(memory);
    return outcome;
}
