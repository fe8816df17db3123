/* Nyström attention as a whole: means of queries and keys, B V, what is small, and F W.

   Where no head's sequence is divided, heads are taken one by one, from the first step to the last, so that what a head
   has stays in a cache and threads meet once. Otherwise all heads take each step together. */

typedef struct {
    means_task queries, keys;
    columns_task columns;
    core_task core;
    rows_task rows;
} whole_task;

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
    each_part(means_forward_item, &t->keys, head, scratch);
    columns_forward_item(&t->columns, head, scratch);
    core_forward_item(&t->core, core_item(&t->core, head), scratch);
    rows_forward_item(&t->rows, head, scratch);
}

ENTRY(nystrom_forward)(const int64_t *args, double scale) {
    whole_task t;
    t.queries = take_means(&args), t.keys = take_means(&args), t.columns = take_columns_forward(&args, scale);
    t.core = take_core(&args, scale), t.rows = take_rows_forward(&args, scale);
    if (head_by_head(&t))
        return nystrom_for_each_item(whole_forward_item, &t, heads_of(&t.core), largest_scratch(&t), t.rows.threads);
    int outcome = run_means_forward(&t.queries);
    if (outcome == DONE) outcome = run_means_forward(&t.keys);
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
    whole_task t;
    t.rows = take_rows_backward(&args, scale), t.core = take_core(&args, scale);
    take_core_gradients(&t.core, &args);
    t.columns = take_columns_backward(&args, scale), t.queries = take_means(&args);
    const int outcome = t.rows.partial && t.columns.partial_kernel ? run_whole_backward(&t) : OUT_OF_MEMORY;
    free(t.rows.partial);
    free(t.columns.partial_kernel);
    return outcome;
}
