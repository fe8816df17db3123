/* The paper's iteration for the pseudoinverse of one matrix after the other, each of which stays in a cache.

   Matrices are squares of `size` × `size` numbers inside, with zeros beyond theirs, which stay zeros: each step of
   Horner's scheme is a product and a multiple, without an identity matrix.

   The first Z is Aᵀ up to a factor. So A Z is symmetric, in every step, as all of its powers are, and of a product that is
   symmetric only what lies above the diagonal has to be computed: a fifth less work in both directions. Rounding alone
   makes A Z unsymmetric, and the iteration corrects rounding only where it sees all of it: so the last step is computed
   whole, which leaves an error of 1e-6 in float32 after 6 steps, and where there are many steps all are. */

#define STEPS_SYMMETRIC 8

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
    t.count = take(args), t.rows = take(args), t.columns = take(args), t.size = take(args);
    t.A = take_view(args), t.Z = take_view(args);
    t.norms = (REAL *)(intptr_t)take(args), t.iterations = take(args), t.steps = (REAL *)(intptr_t)take(args);
    return t;
}

INLINE REAL *steps_of(const pinv_task *t, int64_t item) {
    return t->steps ? t->steps + item * t->iterations * 3 * t->size * t->size : NULL;
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

typedef void times_squares(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor, REAL before);

/* C = factor·A B + before·D, of squares. */
NOT_INLINE void square_times(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor,
                             REAL before) {
    product(C, D, size, A, size, 1, B, size, COLUMNS, size, size, size, &factor, 0, before);
}

/* The same for a product that is symmetric, as D is: what is below its diagonal is copied. */
NOT_INLINE void symmetric_times(REAL *C, const REAL *A, const REAL *B, const REAL *D, int64_t size, REAL factor,
                                REAL before) {
    for (int64_t j = 0; j < size; j += LANES)
        for (int64_t i = 0; i <= j; i += LANES) {
            vector sums[LANES];
            const REAL *b = B + j, *a = A + i * size;
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) sums[r] = (vector){0};
            for (int64_t k = 0; k < size; k++, b += size) {
                vector row = load(b);
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++) sums[r] += a[r * size + k] * row;
            }
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                sums[r] *= factor;
                if (before != 0) sums[r] += before * load(D + (i + r) * size + j);
                store(C + (i + r) * size + j, sums[r]);
            }
            if (i < j) {
                turn(sums);
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++) store(C + (j + r) * size + i, sums[r]);
            }
        }
}

/* `current` from the first Z to the last, for a square A. Z, Y and T of each step go to `steps`, where it is given;
   `spare` is four squares. */
static void pinv_steps(const REAL *A, REAL *current, REAL *steps, REAL *spare, int64_t size, int64_t iterations) {
    const int64_t square = size * size;
    for (int64_t i = 0; i < iterations; i++) {
        times_squares *times_symmetric =
            iterations <= STEPS_SYMMETRIC && i < iterations - 1 ? symmetric_times : square_times;
        REAL *Z = steps ? steps + i * 3 * square : spare + square, *Y = Z + square, *T = Y + square;
        memcpy(Z, current, square * sizeof(REAL));
        times_symmetric(Y, A, Z, Y, size, 1, 0);
        times_symmetric(spare, Y, Y, Y, size, -1, 7); /* Y (7 I − Y) */
        times_symmetric(T, Y, spare, Y, size, -1, 15); /* Y (15 I − Y (7 I − Y)) */
        square_times(current, Z, T, Z, size, (REAL)(-1.0 / 4), (REAL)(13.0 / 4));
    }
}

static void pinv_forward_item(const void *task, int64_t item, void *scratch) {
    const pinv_task *t = task;
    const int64_t size = t->size, square = size * size;
    REAL *A = scratch, *current = A + square, *spare = current + square;
    pack_square(A, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns);
    pack_square_transposed(current, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns, t->norms[item]);
    pinv_steps(A, current, steps_of(t, item), spare, size, t->iterations);
    unpack(at(t->Z, 0, item, 0), t->Z.r, current, size, t->columns, t->rows);
}

ENTRY(pinv_forward)(const int64_t *args, double unused) {
    const pinv_task t = take_pinv(&args);
    const size_t numbers = 6 * t.size * t.size;
    (void)unused;
    return nystrom_for_each_item(pinv_forward_item, &t, t.count, numbers * sizeof(REAL), t.threads);
}

/* C = factor·X + turned·Xᵀ + before·D, of squares; D can be C. */
NOT_INLINE void add_turned(REAL *C, const REAL *X, const REAL *D, int64_t size, REAL factor, REAL turned, REAL before) {
    for (int64_t i = 0; i < size; i += LANES)
        for (int64_t j = 0; j < size; j += LANES) {
            vector block[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) block[r] = load(X + (j + r) * size + i);
            turn(block);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                const int64_t at = (i + r) * size + j;
                store(C + at, factor * load(X + at) + turned * block[r] + before * load(D + at));
            }
        }
}

/* What follows from the gradient of T = 15 Y − 7 Y² + Y³ for that of Y, where all of them are symmetric; `spare` is two
   squares. With D = grad_T it is 15 D − 7 (Y D + D Y) + Y Y D + Y D Y + D Y Y = 15 D + N + Nᵀ. */
static void horner_backward_symmetric(REAL *grad_Y, const REAL *grad_T, const REAL *Y, REAL *spare, int64_t size) {
    REAL *P = spare, *N = P + size * size;
    square_times(P, Y, grad_T, P, size, 1, 0);
    add_turned(grad_Y, P, P, size, 1, (REAL)0.5, 0);
    square_times(N, Y, grad_Y, P, size, 1, -7); /* Y (P + Pᵀ/2) − 7 P */
    add_turned(grad_Y, N, grad_T, size, 1, 1, 15);
}

/* The same for any grad_T and Y, both transposed. */
static void horner_backward(REAL *grad_Y, const REAL *grad_T, const REAL *Y, REAL *spare, int64_t size) {
    REAL *left = spare, *both = left + size * size;
    square_times(left, grad_T, Y, grad_T, size, 1, -7);
    square_times(both, Y, grad_T, left, size, 1, 1);
    square_times(grad_Y, Y, both, grad_T, size, 1, 15);
    square_times(grad_Y, left, Y, grad_Y, size, 1, 1);
}

/* `grad` from that of the last Z to that of the first, and what the steps add to `grad_A`; `spare` is five squares.
   All gradients are transposed here: then Xᵀ D is D' X, D Xᵀ is X D', and no matrix has to be turned. */
static void pinv_steps_backward(const REAL *A, REAL *grad, REAL *grad_A, const REAL *steps, REAL *spare, int64_t size,
                                int64_t iterations) {
    const int64_t square = size * size;
    const int symmetric = iterations <= STEPS_SYMMETRIC;
    REAL *grad_T = spare, *grad_Y = grad_T + square, *next = grad_Y + square;
    for (int64_t i = iterations - 1; i >= 0; i--) {
        const REAL *Z = steps + i * 3 * square, *Y = Z + square, *T = Y + square;
        if (symmetric) {
            square_times(next, grad, Z, grad, size, (REAL)(-1.0 / 4), 0);
            add_turned(grad_T, next, next, size, (REAL)0.5, (REAL)0.5, 0);
            horner_backward_symmetric(grad_Y, grad_T, Y, next, size);
        } else {
            square_times(grad_T, grad, Z, grad, size, (REAL)(-1.0 / 4), 0);
            horner_backward(grad_Y, grad_T, Y, next, size);
        }
        square_times(next, T, grad, grad, size, (REAL)(-1.0 / 4), (REAL)(13.0 / 4));
        square_times(grad, grad_Y, A, next, size, 1, 1);
        square_times(grad_A, Z, grad_Y, grad_A, size, 1, 1);
    }
}

/* The gradient of A, but for the norm, from what the steps gave, transposed, and that of the first Z = Aᵀ / norm, of which
   Σ A ∘ it is returned. */
static REAL first_step_backward(REAL *to, const REAL *A, const REAL *grad, const REAL *grad_A, int64_t size, REAL norm) {
    REAL total = 0;
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) {
            total += grad[i * size + j] * A[i * size + j];
            to[i * size + j] = grad_A[j * size + i] + grad[i * size + j] / norm;
        }
    return total;
}

static void pinv_backward_item(const void *task, int64_t item, void *scratch) {
    const pinv_task *t = task;
    const int64_t size = t->size, square = size * size;
    REAL *A = scratch, *grad = A + square, *grad_A = grad + square, *spare = grad_A + square;
    pack_square(A, size, at(t->A, 0, item, 0), t->A.r, t->rows, t->columns);
    pack_square_transposed(grad, size, at(t->grad, 0, item, 0), t->grad.r, t->columns, t->rows, 1);
    memset(grad_A, 0, square * sizeof(REAL));
    pinv_steps_backward(A, grad, grad_A, steps_of(t, item), spare, size, t->iterations);
    t->dots[item] = first_step_backward(spare, A, grad, grad_A, size, t->norms[item]);
    unpack(at(t->grad_A, 0, item, 0), t->grad_A.r, spare, size, t->rows, t->columns);
}

ENTRY(pinv_backward)(const int64_t *args, double unused) {
    pinv_task t = take_pinv(&args);
    t.grad = take_view(&args), t.grad_A = take_view(&args), t.dots = (REAL *)(intptr_t)take(&args);
    const size_t numbers = 8 * t.size * t.size;
    (void)unused;
    return nystrom_for_each_item(pinv_backward_item, &t, t.count, numbers * sizeof(REAL), t.threads);
}
