/* The skip convolution: out[i] = Σⱼ kernel[j] · value[i + j − taps/2], one kernel for each head. */

INLINE void pack_taps(REAL *to, const REAL *kernel, int64_t taps, int reversed) {
    for (int64_t j = 0; j < taps; j++) to[j] = kernel[reversed ? taps - 1 - j : j];
}

/* Rows `first` to `first` + `rows` of (g, c) of x, zeros where there is none. */
static void pack_window(REAL *to, int64_t padded, view x, int64_t g, int64_t c, int64_t first, int64_t rows, int64_t n,
                        int64_t width) {
    const int64_t before = smaller(first < 0 ? -first : 0, rows);
    const int64_t inside = smaller(first + rows, n) - (first + before);
    const int64_t present = inside > 0 ? inside : 0;
    memset(to, 0, before * padded * sizeof(REAL));
    if (present) pack(to + before * padded, padded, at(x, g, c, first + before), x.r, present, width);
    memset(to + (before + present) * padded, 0, (rows - before - present) * padded * sizeof(REAL));
}

/* ROWS rows of two vectors of a convolution, whose sums are in registers: a product with a band matrix whose entry (i, k)
   is kernel[k − i]. Nothing outside the band is multiplied, even by 0, so that what is not a number stays in its window. */
INLINE void band_tile(REAL *out, int64_t stride, const REAL *kernel, int64_t taps, const REAL *window, int64_t padded,
                      REAL before) {
    vector sums[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = (vector){0};
#define ADD_ROW_OF_WINDOW(k, from, to)                                                   \
    {                                                                                    \
        vector b0 = load(window + (k) * padded), b1 = load(window + (k) * padded + LANES); \
        IN_REGISTERS(b0, b1);                                                            \
        _Pragma("GCC unroll 16") for (int i = from; i < to; i++) {                       \
            const vector a = every(kernel[(k) - i]);                                     \
            sums[i][0] += a * b0;                                                        \
            sums[i][1] += a * b1;                                                        \
        }                                                                                \
    }
#pragma GCC unroll 16
    for (int k = 0; k < ROWS - 1; k++) ADD_ROW_OF_WINDOW(k, 0, k + 1) /* which the first rows see */
    for (int64_t k = ROWS - 1; k < taps; k++) ADD_ROW_OF_WINDOW(k, 0, ROWS)
#pragma GCC unroll 16
    for (int k = 0; k < ROWS - 1; k++) ADD_ROW_OF_WINDOW(taps + k, k + 1, ROWS) /* which the last rows see */
#undef ADD_ROW_OF_WINDOW
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++, out += stride) {
        if (before != 0) {
            sums[i][0] += before * load(out);
            sums[i][1] += before * load(out + LANES);
        }
        store(out, sums[i][0]);
        store(out + LANES, sums[i][1]);
    }
}

/* out (rows × width) = convolution of a window of rows + taps − 1 rows + before·out. */
NOT_INLINE void convolve(REAL *out, int64_t stride, const REAL *kernel, int64_t taps, const REAL *window, int64_t padded,
                         int64_t rows, int64_t width, REAL before) {
    const REAL one = 1;
    for (int64_t j = 0; j < width; j += COLUMNS) {
        int64_t i = 0;
        if (taps >= ROWS)
            for (; i + ROWS <= rows; i += ROWS)
                band_tile(out + i * stride + j, stride, kernel, taps, window + i * padded + j, padded, before);
        for (; i < rows; i++)
            tile(1, out + i * stride + j, out + i * stride + j, stride, kernel, 0, 1, window + i * padded + j, padded,
                 taps, &one, 0, before);
    }
}

typedef struct {
    int64_t threads, G, C, n, e, taps;
    view value, kernel, out, grad;           /* kernel (1, c, taps) */
    int64_t ep, parts;
    REAL *partial;
} skip_task;

INLINE skip_task take_skip(const int64_t **args) {
    skip_task t = {0};
    t.threads = take(args);
    t.G = take(args), t.C = take(args), t.n = take(args), t.e = take(args), t.taps = take(args);
    t.value = take_view(args), t.kernel = take_view(args);
    t.ep = up_to_multiple(t.e, COLUMNS);
    t.parts = parts_of(t.n, ROWS_FORWARD);
    return t;
}

static void skip_item(const void *task, int64_t item, void *scratch) {
    const skip_task *t = task;
    const int64_t first = item % t->parts * ROWS_FORWARD, end = smaller(first + ROWS_FORWARD, t->n), ep = t->ep;
    const int64_t g = item / t->parts % t->G, c = item / t->parts / t->G;
    REAL *window = scratch, *own = window + (TOKENS + t->taps) * ep, *taps = own + TOKENS * ep;
    pack_taps(taps, at(t->kernel, 0, c, 0), t->taps, 0);
    for (int64_t r = first; r < end; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, end - r);
        REAL *out = at(t->out, g, c, r);
        pack_window(window, ep, t->value, g, c, r - t->taps / 2, rows + t->taps - 1, t->n, t->e);
        if (t->e == ep) {
            convolve(out, t->out.r, taps, t->taps, window, ep, rows, ep, 0);
        } else {
            convolve(own, ep, taps, t->taps, window, ep, rows, ep, 0);
            unpack(out, t->out.r, own, ep, rows, t->e);
        }
    }
}

ENTRY(skip)(const int64_t *args, double unused) {
    skip_task t = take_skip(&args);
    t.out = take_view(&args);
    const size_t numbers = (2 * TOKENS + t.taps) * t.ep + t.taps;
    (void)unused;
    return nystrom_for_each_item(skip_item, &t, t.G * t.C * t.parts, numbers * sizeof(REAL), t.threads);
}

#define TAPS 12 /* of a kernel whose gradients are summed together, in as many registers */

/* sums[j] += Σ x[i] · window[i + j] over rows, for j up to a multiple of TAPS. */
NOT_INLINE void add_correlation(REAL *sums, const REAL *x, const REAL *window, int64_t rows, int64_t taps, int64_t ep) {
    for (int64_t j = 0; j < taps; j += TAPS) {
        vector some[TAPS] = {0};
        for (int64_t k = 0; k < ep; k += LANES)
            for (int64_t i = 0; i < rows; i++) {
                const vector a = load(x + i * ep + k);
#pragma GCC unroll 12
                for (int l = 0; l < TAPS; l++) some[l] += a * load(window + (i + j + l) * ep + k);
            }
#pragma GCC unroll 12
        for (int l = 0; l < TAPS; l++) sums[j + l] += sum_of(some[l]);
    }
}

/* Σ grad[i] · value[i + j − taps/2] over the rows of an item, for each tap j. */
static void skip_kernel_item(const void *task, int64_t item, void *scratch) {
    const skip_task *t = task;
    const int64_t first = item % t->parts * ROWS_FORWARD, end = smaller(first + ROWS_FORWARD, t->n), ep = t->ep;
    const int64_t g = item / t->parts % t->G, c = item / t->parts / t->G, padded = up_to_multiple(t->taps, TAPS);
    REAL *G = scratch, *window = G + TOKENS * ep, *sums = t->partial + item * padded;
    memset(sums, 0, padded * sizeof(REAL));
    for (int64_t r = first; r < end; r += TOKENS) {
        const int64_t rows = smaller(TOKENS, end - r);
        pack(G, ep, at(t->grad, g, c, r), t->grad.r, rows, t->e);
        pack_window(window, ep, t->value, g, c, r - t->taps / 2, rows + padded, t->n, t->e);
        add_correlation(sums, G, window, rows, padded, ep);
    }
}

ENTRY(skip_kernel)(const int64_t *args, double unused) {
    skip_task t = take_skip(&args);
    t.grad = take_view(&args);
    const int64_t items = t.G * t.C * t.parts, padded = up_to_multiple(t.taps, TAPS);
    const size_t numbers = (2 * TOKENS + padded) * t.ep;
    (void)unused;
    if (!(t.partial = malloc(items * padded * sizeof(REAL) + 1))) return OUT_OF_MEMORY;
    const int outcome = nystrom_for_each_item(skip_kernel_item, &t, items, numbers * sizeof(REAL), t.threads);
    for (int64_t c = 0; c < t.C; c++) { /* the gradient goes where the kernel's view says */
        REAL *to = at(t.kernel, 0, c, 0), *from = t.partial + c * t.G * t.parts * padded;
        for (int64_t j = 0; j < t.taps; j++) {
            to[j] = 0;
            for (int64_t i = 0; i < t.G * t.parts; i++) to[j] += from[i * padded + j];
        }
    }
    free(t.partial);
    return outcome;
}
