/* Nyström attention as a whole: means of queries, B V with means of keys, what is small, and F W.

   Where no head's sequence is divided, heads are taken one by one, from the first step to the last, so that what a head
   has stays in a cache and threads meet once. Otherwise all heads take each step together. */

typedef struct {
    means_task queries;
    columns_task columns;
    core_task core;
    rows_task rows;
} whole_task;

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

/* What both directions begin with: sizes, all inputs, and the memory that the backward finds again, which is A, Z, W, B V,
   landmarks, log-sum-exps and, where they are wanted, the steps of the pseudoinverse. */
INLINE whole_task take_whole(const int64_t **args, double scale) {
    whole_task t = {0};
    const int64_t threads = take(args), G = take(args), C = take(args), n = take(args), s = take(args);
    const int64_t d = take(args), e = take(args), m = take(args), size = take(args), iterations = take(args);
    const view query = take_view(args), key = take_view(args), value = take_view(args), kernel = take_view(args);
    const int64_t taps = take(args), keeps = take(args);
    heads_memory small = {.C = C, .number = take(args)};
    small.data = (REAL *)(intptr_t)take(args);
    core_task *core = &t.core;
    *core = (core_task){.threads = threads, .G = G, .C = C, .m = m, .d = d, .e = e, .size = size};
    core->iterations = iterations, core->scale = (REAL)scale;
    core->A = next_part(&small, size, size), core->Z = next_part(&small, size, size);
    if (keeps) core->steps = next_part(&small, iterations * 3 * size, size);
    core->W = next_part(&small, m, e), core->BV = next_part(&small, m, e);
    core->queries = next_part(&small, m, d), core->keys = next_part(&small, m, d);
    const view lse = next_part(&small, 1, m);
    t.queries = (means_task){threads, G, C, n, m, d, query, core->queries, parts_of(m, SEGMENTS)};
    t.columns = (columns_task){.threads = threads, .G = G, .C = C, .n = m, .s = s, .d = d, .e = e, .scale = (REAL)scale};
    t.columns.query = core->queries, t.columns.key = key, t.columns.value = value;
    t.columns.out = core->BV, t.columns.lse = lse, t.columns.m = m, t.columns.means = core->keys;
    t.rows = (rows_task){.threads = threads, .G = G, .C = C, .n = n, .s = m, .d = d, .e = e, .scale = (REAL)scale};
    t.rows.query = query, t.rows.key = core->keys, t.rows.value = core->W;
    if (taps) t.rows.skip = value, t.rows.kernel = kernel, t.rows.taps = taps;
    t.core = sized_core(t.core);
    return t;
}

INLINE int head_by_head(const whole_task *t) { return t->columns.s_parts == 1 && t->rows.r_parts == 1; }

INLINE size_t largest_scratch(const whole_task *t) {
    const size_t each[] = {means_scratch(&t->queries), t->columns.scratch, t->core.scratch, t->rows.scratch};
    size_t most = 0;
    for (int i = 0; i < 4; i++) most = each[i] > most ? each[i] : most;
    return most;
}

INLINE int64_t heads_of(const core_task *t) { return t->G * t->C; }

/* Of head c of example g, the (c·G + g)-th for all parts but the core, which counts them the other way. */
INLINE int64_t core_item(const core_task *t, int64_t head) { return head % t->G * t->C + head / t->G; }

INLINE void each_part(work_on_item *work, const means_task *t, int64_t head, void *scratch) {
    for (int64_t part = 0; part < t->parts; part++) work(t, head * t->parts + part, scratch);
}

static void whole_forward_item(const void *task, int64_t head, void *scratch) {
    const whole_task *t = task;
    each_part(means_forward_item, &t->queries, head, scratch);
    columns_forward_item(&t->columns, head, scratch);
    core_forward_item(&t->core, core_item(&t->core, head), scratch);
    rows_forward_item(&t->rows, head, scratch);
}

ENTRY(nystrom_forward)(const int64_t *args, double scale) {
    whole_task t = take_whole(&args, scale);
    t.rows.out = take_view(&args);
    t.columns = sized_columns_forward(t.columns), t.rows = sized_rows_forward(t.rows);
    if (head_by_head(&t))
        return nystrom_for_each_item(whole_forward_item, &t, heads_of(&t.core), largest_scratch(&t), t.rows.threads);
    int outcome = run_means_forward(&t.queries);
    if (outcome == DONE) outcome = run_columns_forward(&t.columns);
    if (outcome == DONE)
        outcome = nystrom_for_each_item(core_forward_item, &t.core, heads_of(&t.core), t.core.scratch, t.core.threads);
    return outcome == DONE ? run_rows_forward(&t.rows) : outcome;
}

static void whole_backward_item(const void *task, int64_t head, void *scratch) {
    const whole_task *t = task;
    rows_backward_item(&t->rows, head, scratch);
    rows_backward_sum(&t->rows, head, scratch);
    core_backward_item(&t->core, core_item(&t->core, head), scratch);
    columns_backward_item(&t->columns, head, scratch);
    each_part(means_backward_item, &t->queries, head, scratch);
}

static int run_whole_backward(const whole_task *t) {
    int outcome;
    if (head_by_head(t)) {
        outcome = nystrom_for_each_item(whole_backward_item, t, heads_of(&t->core), largest_scratch(t), t->rows.threads);
        if (outcome == DONE) sum_kernel_gradient(&t->columns);
        return outcome;
    }
    outcome = run_rows_backward(&t->rows);
    if (outcome == DONE)
        outcome = nystrom_for_each_item(core_backward_item, &t->core, heads_of(&t->core), t->core.scratch,
                                        t->core.threads);
    if (outcome == DONE) outcome = run_columns_backward(&t->columns);
    return outcome == DONE ? run_means_backward(&t->queries) : outcome;
}

ENTRY(nystrom_backward)(const int64_t *args, double scale) {
    whole_task t = take_whole(&args, scale);
    core_task *core = &t.core;
    const view grad = take_view(&args), grad_query = take_view(&args), grad_key = take_view(&args);
    const view grad_value = take_view(&args), grad_kernel = take_view(&args);
    heads_memory small = {.C = core->C, .number = 2 * core->m * (core->d + core->e)};
    REAL *memory = small.data = malloc(heads_of(core) * small.number * sizeof(REAL) + 1);
    core->grad_W = next_part(&small, core->m, core->e), core->grad_BV = next_part(&small, core->m, core->e);
    core->grad_queries = next_part(&small, core->m, core->d), core->grad_keys = next_part(&small, core->m, core->d);
    t.rows.grad = grad, t.rows.grad_query = grad_query;
    t.rows.grad_key = core->grad_keys, t.rows.grad_value = core->grad_W;
    t.columns.grad = core->grad_BV, t.columns.grad_query = core->grad_queries, t.columns.adds = QUERIES_ADD;
    t.columns.grad_key = grad_key, t.columns.grad_value = grad_value;
    t.columns.grad_means = core->grad_keys;
    t.columns.kernel = t.rows.kernel, t.columns.grad_kernel = grad_kernel, t.columns.taps = t.rows.taps;
    if (t.rows.taps) t.columns.skip = grad;
    t.queries.tokens = grad_query, t.queries.means = core->grad_queries;
    t.rows = sized_rows_backward(t.rows), t.columns = sized_columns_backward(t.columns);
    const int has_memory = memory && t.rows.partial && t.columns.partial_kernel;
    const int outcome = has_memory ? run_whole_backward(&t) : OUT_OF_MEMORY;
    free(memory);
    free(t.rows.partial);
    free(t.columns.partial_kernel);
    return outcome;
}
