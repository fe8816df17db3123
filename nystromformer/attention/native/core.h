/* All that is small, head by head: A = softmax(scale·Q̃ K̃ᵀ), its pseudoinverse Z, and W = Z (B V). */

typedef struct {
    int64_t threads, G, C, m, d, e, size, iterations;
    view queries, keys, BV, W; /* (g, c, m, ...) */
    view A, Z;                 /* (g, c, size, size) */
    view steps;                /* (g, c, iterations · 3 · size, size), as of a pinv_task, or none */
    view grad_W, grad_BV, grad_queries, grad_keys;
    REAL scale;
    size_t scratch;            /* bytes that an item needs, in either direction */
} core_task;

INLINE core_task sized_core(core_task t) {
    const int64_t dp = up_to_multiple(t.d, COLUMNS), ep = up_to_multiple(t.e, COLUMNS);
    t.scratch = (8 * t.size * t.size + 3 * t.size * (dp + ep) + t.size) * sizeof(REAL);
    return t;
}

/* The largest sums of a softmax matrix's columns and rows, whose product its transpose is divided by. */
typedef struct {
    REAL column_sum, row_sum;
    int64_t column, row;
} norms;

static norms norms_of(const REAL *A, int64_t m, int64_t size, REAL *sums) {
    norms x = {-1, -1, 0, 0};
    memset(sums, 0, size * sizeof(REAL));
    for (int64_t i = 0; i < m; i++) {
        REAL row_sum = 0;
        for (int64_t j = 0; j < m; j++) {
            row_sum += A[i * size + j];
            sums[j] += A[i * size + j];
        }
        if (!(row_sum <= x.row_sum)) x.row_sum = row_sum, x.row = i;
    }
    for (int64_t j = 0; j < m; j++)
        if (!(sums[j] <= x.column_sum)) x.column_sum = sums[j], x.column = j;
    return x;
}

static void core_forward_item(const void *task, int64_t item, void *scratch) {
    const core_task *t = task;
    const int64_t g = item / t->C, c = item % t->C, m = t->m, size = t->size, square = size * size;
    const int64_t dp = up_to_multiple(t->d, COLUMNS), ep = up_to_multiple(t->e, COLUMNS);
    REAL *spare = scratch, *panels = spare + 4 * square, *Q = panels + size * (dp + ep);
    REAL *W = Q + m * dp, *bias = W + m * ep, *A = at(t->A, g, c, 0), *Z = at(t->Z, g, c, 0), shares[TOKENS];
    for (int64_t j = 0; j < size; j++) bias[j] = j < m ? 0 : -(REAL)INFINITY;
    pack_transposed(panels, at(t->keys, g, c, 0), t->keys.r, m, t->d, t->scale);
    pack(Q, dp, at(t->queries, g, c, 0), t->queries.r, m, t->d);
    memset(A, 0, square * sizeof(REAL));
    times(A, size, Q, dp, panels, m, up_to_multiple(m, COLUMNS), t->d, 0);
    for (int64_t r = 0; r < m; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, m - r);
        softmax_rows(A + r * size, rows, size, bias, shares, NULL);
        multiply_rows(A + r * size, rows, size, shares);
    }
    const norms x = norms_of(A, m, size, spare);
    pack_square_transposed(Z, size, A, size, m, m, x.column_sum * x.row_sum);
    pinv_steps(A, Z, t->steps.data ? at(t->steps, g, c, 0) : NULL, spare, size, t->iterations);
    pack_panels(panels, at(t->BV, g, c, 0), t->BV.r, m, t->e);
    times(W, ep, Z, size, panels, m, ep, m, 0);
    unpack(at(t->W, g, c, 0), t->W.r, W, ep, m, t->e);
}


/* Gradients of B V and of the landmarks from that of W; `grad_keys` is added to. */
static void core_backward_item(const void *task, int64_t item, void *scratch) {
    const core_task *t = task;
    const int64_t g = item / t->C, c = item % t->C, m = t->m, size = t->size, square = size * size;
    const int64_t dp = up_to_multiple(t->d, COLUMNS), ep = up_to_multiple(t->e, COLUMNS), mp = up_to_multiple(m, COLUMNS);
    const REAL *A = at(t->A, g, c, 0), *Z = at(t->Z, g, c, 0);
    REAL *grad = scratch, *turned = grad + square, *grad_A = turned + square, *spare = grad_A + square;
    REAL *panels = spare + 5 * square;
    REAL *wide = panels + size * (dp + ep), *result = wide + m * (dp + ep);
    /* of W = Z (B V) */
    pack(wide, ep, at(t->grad_W, g, c, 0), t->grad_W.r, m, t->e);
    memset(result, 0, m * ep * sizeof(REAL));
    add_transposed_times(result, ep, Z, size, wide, ep, m, ep, m);
    unpack(at(t->grad_BV, g, c, 0), t->grad_BV.r, result, ep, m, t->e);
    /* of Z, transposed */
    pack(wide, ep, at(t->BV, g, c, 0), t->BV.r, m, t->e);
    pack_transposed(panels, at(t->grad_W, g, c, 0), t->grad_W.r, m, t->e, 1);
    memset(grad, 0, square * sizeof(REAL));
    times(grad, size, wide, ep, panels, m, mp, t->e, 0);
    const norms x = norms_of(A, m, size, spare);
    const REAL norm = x.column_sum * x.row_sum;
    memset(turned, 0, square * sizeof(REAL));
    pinv_steps_backward(A, grad, turned, at(t->steps, g, c, 0), spare, size, t->iterations);
    const REAL less = first_step_backward(grad_A, A, grad, turned, size, norm) / (norm * norm);
    for (int64_t i = 0; i < m; i++) {
        if (A[i * size + x.column] > 0) grad_A[i * size + x.column] -= less * x.row_sum;
        if (A[x.row * size + i] > 0) grad_A[x.row * size + i] -= less * x.column_sum;
    }
    /* of the softmax */
    for (int64_t r = 0; r < m; r += TOKENS)
        softmax_rows_backward(A + r * size, grad_A + r * size, smaller(TOKENS, m - r), size, t->scale, NULL);
    pack_panels(panels, at(t->keys, g, c, 0), t->keys.r, m, t->d);
    times(result, dp, grad_A, size, panels, m, dp, m, 0);
    unpack(at(t->grad_queries, g, c, 0), t->grad_queries.r, result, dp, m, t->d);
    pack(wide, dp, at(t->queries, g, c, 0), t->queries.r, m, t->d);
    pack(result, dp, at(t->grad_keys, g, c, 0), t->grad_keys.r, m, t->d);
    add_transposed_times(result, dp, grad_A, size, wide, dp, m, dp, m);
    unpack(at(t->grad_keys, g, c, 0), t->grad_keys.r, result, dp, m, t->d);
}
