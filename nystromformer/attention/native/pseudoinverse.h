/* The paper's iteration for the pseudoinverse of one matrix after the other, each of which stays in a cache.

   Matrices are squares of `size` × `size` numbers inside, with zeros beyond theirs, which stay zeros: each step of
   Horner's scheme is a product and a multiple, without an identity matrix. */

typedef struct {
    int64_t threads, count, rows, columns, size, iterations;
    view A, Z;      /* (1, c, rows, columns) and (1, c, columns, rows), c matrices */
    REAL *norms;    /* (c): what Aᵀ is divided by for the first Z */
    REAL *steps;    /* (c, iterations, 3, size, size): Z, Y and T of each step, for the backward; or none */
    view grad, grad_A;
    REAL *dots;     /* (c): Σ A ∘ the gradient of the first Zᵀ */
} pinv_task;

INLINE pinv_task take_pinv(const int64_t **args) {
    pinv_task t = {0};
    t.threads = take(args);
    t.count = take(args), t.rows = take(args), t.columns = take(args), t.size = take(args), t.iterations = take(args);
    t.A = take_view(args), t.Z = take_view(args);
    t.norms = (REAL *)(intptr_t)take(args), t.steps = (REAL *)(intptr_t)take(args);
    return t;
}

/* A matrix of rows × columns numbers as a square with zeros beyond, the second time transposed and divided. */
static void pack_square(REAL *to, int64_t size, const REAL *from, int64_t stride, int64_t rows, int64_t columns) {
    pack(to, size, from, stride, rows, columns);
    memset(to + rows * size, 0, (size - rows) * size * sizeof(REAL));
}

static void pack_square_transposed(REAL *to, int64_t size, const REAL *from, int64_t stride, int64_t rows,
                                   int64_t columns, REAL divisor) {
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++)
            to[i * size + j] = i < columns && j < rows ? from[j * stride + i] / divisor : 0;
}

/* C = factor·A B + before·D, of squares. */
NOT_INLINE void square_times(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor,
                             REAL before) {
    product(C, D, size, A, size, 1, B, size, COLUMNS, size, size, size, factor, before);
}

/* C = factor·Aᵀ B + before·D, of squares. */
INLINE void transposed_square_times(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor,
                                    REAL before) {
    transposed_times_plus(C, D, size, A, size, B, size, size, size, size, factor, before);
}

/* C = factor·A Bᵀ + before·D with Bᵀ in panels. */
INLINE void square_times_panels(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor,
                                REAL before) {
    times_plus(C, D, size, A, size, B, size, size, size, factor, before);
}

static void pinv_forward_item(const void *task, int64_t item, void *scratch) {
    const pinv_task *t = task;
    const int64_t size = t->size, square = size * size;
    REAL *A = scratch, *current = A + square, *seven = current + square, *Z = seven + square;
    if (t->steps) Z = t->steps + item * t->iterations * 3 * square;
    pack_square(A, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns);
    pack_square_transposed(current, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns, t->norms[item]);
    for (int64_t i = 0; i < t->iterations; i++) {
        REAL *Y = Z + square, *T = Y + square;
        memcpy(Z, current, square * sizeof(REAL));
        square_times(Y, A, Z, Y, size, 1, 0);
        square_times(seven, Y, Y, Y, size, -1, 7);  /* Y (7 I − Y) */
        square_times(T, Y, seven, Y, size, -1, 15); /* Y (15 I − Y (7 I − Y)) */
        square_times(current, Z, T, Z, size, (REAL)(-1.0 / 4), (REAL)(13.0 / 4));
        if (t->steps) Z += 3 * square;
    }
    unpack(at(t->Z, 0, item, 0), t->Z.r, current, size, t->columns, t->rows);
}

ENTRY(pinv_forward)(const int64_t *args, double unused) {
    const pinv_task t = take_pinv(&args);
    const size_t numbers = (t.steps ? 3 : 6) * t.size * t.size;
    (void)unused;
    return nystrom_for_each_item(pinv_forward_item, &t, t.count, numbers * sizeof(REAL), t.threads);
}

static void pinv_backward_item(const void *task, int64_t item, void *scratch) {
    const pinv_task *t = task;
    const int64_t size = t->size, square = size * size;
    REAL *A = scratch, *grad = A + square, *next = grad + square, *grad_A = next + square, *grad_T = grad_A + square;
    REAL *left = grad_T + square, *both = left + square, *grad_Y = both + square, *panels = grad_Y + square;
    pack_square(A, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns);
    pack_square(grad, size, at(t->grad, 0, item, 0), t->grad.r, t->columns, t->rows);
    memset(grad_A, 0, square * sizeof(REAL));
    for (int64_t i = t->iterations - 1; i >= 0; i--) {
        const REAL *Z = t->steps + (item * t->iterations + i) * 3 * square, *Y = Z + square, *T = Y + square;
        transposed_square_times(grad_T, Z, grad, grad, size, (REAL)(-1.0 / 4), 0);
        /* T = 15 Y − 7 Y² + Y³: with D = grad_T, grad_Y = 15 D − 7 (Yᵀ D + D Yᵀ) + YᵀYᵀ D + Yᵀ D Yᵀ + D YᵀYᵀ. */
        transposed_square_times(left, Y, grad_T, grad_T, size, 1, -7);
        pack_transposed(panels, Y, size, size, size);
        square_times_panels(both, grad_T, panels, left, size, 1, 1);
        square_times_panels(grad_Y, both, panels, grad_T, size, 1, 15);
        transposed_square_times(grad_Y, Y, left, grad_Y, size, 1, 1);
        pack_transposed(panels, T, size, size, size);
        square_times_panels(next, grad, panels, grad, size, (REAL)(-1.0 / 4), (REAL)(13.0 / 4));
        transposed_square_times(grad, A, grad_Y, next, size, 1, 1);
        pack_transposed(panels, Z, size, size, size);
        square_times_panels(grad_A, grad_Y, panels, grad_A, size, 1, 1);
    }
    REAL dot = 0;
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t j = 0; j < t->columns; j++) {
            dot += grad[j * size + i] * A[i * size + j];
            grad_A[i * size + j] += grad[j * size + i] / t->norms[item];
        }
    t->dots[item] = dot;
    unpack(at(t->grad_A, 0, item, 0), t->grad_A.r, grad_A, size, t->rows, t->columns);
}

ENTRY(pinv_backward)(const int64_t *args, double unused) {
    pinv_task t = take_pinv(&args);
    t.grad = take_view(&args), t.grad_A = take_view(&args), t.dots = (REAL *)(intptr_t)take(&args);
    const size_t numbers = 9 * t.size * t.size;
    (void)unused;
    return nystrom_for_each_item(pinv_backward_item, &t, t.count, numbers * sizeof(REAL), t.threads);
}
