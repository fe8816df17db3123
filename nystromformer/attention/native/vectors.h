/* Vectors, the exponential function, products of small matrices and copies into them. */

#define LANES ((int64_t)(BYTES / sizeof(REAL)))
#define COLUMNS (2 * LANES) /* of a product that are summed together, with as many rows as there are registers for: */
#if BYTES == 64
#define ROWS 12
#else
#define ROWS 6
#endif

typedef REAL vector __attribute__((vector_size(BYTES)));
typedef REAL unaligned_vector __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

INLINE vector load(const REAL *p) { return *(const unaligned_vector *)p; }
INLINE void store(REAL *p, vector x) { *(unaligned_vector *)p = x; }
INLINE vector every(REAL x) { return x - (vector){0}; }

#define IS_FLOAT (sizeof(REAL) == sizeof(float))

/* Left to themselves, compilers keep in memory what a loop multiplies with, and read it again for each product. */
#if defined(__x86_64__)
#define IN_REGISTERS(a, b) __asm__("" : "+v"(a), "+v"(b))
#else
#define IN_REGISTERS(a, b)
#endif

/* The larger of each two; b where one of them is not a number, as the instruction has it. */
INLINE vector larger(vector a, vector b) {
#if defined(__x86_64__) && BYTES == 64
    return IS_FLOAT ? (vector)_mm512_max_ps((__m512)a, (__m512)b) : (vector)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__x86_64__) && BYTES == 32
    return IS_FLOAT ? (vector)_mm256_max_ps((__m256)a, (__m256)b) : (vector)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__x86_64__)
    return IS_FLOAT ? (vector)_mm_max_ps((__m128)a, (__m128)b) : (vector)_mm_max_pd((__m128d)a, (__m128d)b);
#else
    vector result = b;
    for (int i = 0; i < LANES; i++)
        if (a[i] > b[i]) result[i] = a[i];
    return result;
#endif
}

/* By halves, which is exact to the same digits whatever the vector holds, and no long chain of steps. */
INLINE REAL sum_of(vector x) {
#if defined(__x86_64__) && BYTES == 64
    return IS_FLOAT ? (REAL)_mm512_reduce_add_ps((__m512)x) : (REAL)_mm512_reduce_add_pd((__m512d)x);
#endif
#pragma GCC unroll 8
    for (int64_t half = LANES / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int64_t i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE REAL largest_of(vector x) {
#if defined(__x86_64__) && BYTES == 64
    return IS_FLOAT ? (REAL)_mm512_reduce_max_ps((__m512)x) : (REAL)_mm512_reduce_max_pd((__m512d)x);
#endif
#pragma GCC unroll 8
    for (int64_t half = LANES / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int64_t i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

#define float_or_double(a, b) ((REAL)(IS_FLOAT ? (a) : (b)))

/* p·2^k, k being whole, and 0 where x is so small that the result were below the smallest normal number. `shifted` is k
   with its digits where a whole number's are. */
INLINE vector times_power(vector p, vector k, vector shifted, vector x, REAL least) {
#if defined(__x86_64__) && BYTES == 64
    (void)shifted;
    if (IS_FLOAT) {
        const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps((float)least), _CMP_NLT_UQ);
        return (vector)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)k);
    }
    const __mmask8 normal = _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd((double)least), _CMP_NLT_UQ);
    return (vector)_mm512_maskz_scalef_pd(normal, (__m512d)p, (__m512d)k);
#else
    (void)k;
    if (IS_FLOAT) {
        typedef int32_t integers __attribute__((vector_size(BYTES)));
        const vector power = (vector)(((integers)shifted + 127) << 23);
        return (vector)((integers)(p * power) & ~(integers)(x < least));
    }
    typedef int64_t integers __attribute__((vector_size(BYTES)));
    const vector power = (vector)(((integers)shifted + 1023) << 52);
    return (vector)((integers)(p * power) & ~(integers)(x < least));
#endif
}

/* exp(x) for x ≤ 80: 2^k exp(r) with |r| ≤ ln 2 / 2. Exactly 0 where it is below the smallest normal number; what is not
   a number stays that. */
INLINE vector exponential(vector x) {
    const REAL least = float_or_double(-87.3, -708.0);
    const REAL magic = float_or_double(12582912.0, 6755399441055744.0); /* after it is added, digits are whole */
    const REAL high = float_or_double(0.693359375, 6.93145751953125e-1);
    const REAL low = float_or_double(-2.12194440e-4, 1.42860682030941723212e-6);
    const vector bounded = BYTES == 64 ? x : larger(every(least), x); /* what is below is cut off in any case */
    const vector shifted = bounded * (REAL)1.44269504088896340736 + magic;
    const vector k = shifted - magic;
    const vector r = bounded - k * high - k * low;
    vector p;
    if (IS_FLOAT) { /* whose largest relative error is 3e-9 */
        p = every((REAL)1.3814539895737675e-3);
        p = p * r + (REAL)8.368745127722593e-3;
        p = p * r + (REAL)4.1668390789395486e-2;
        p = p * r + (REAL)1.666652039884013e-1;
        p = p * r + (REAL)4.999999343210006e-1;
    } else { /* Taylor's series */
        p = every((REAL)(1.0 / 6227020800.0));
        p = p * r + (REAL)(1.0 / 479001600.0);
        p = p * r + (REAL)(1.0 / 39916800.0);
        p = p * r + (REAL)(1.0 / 3628800.0);
        p = p * r + (REAL)(1.0 / 362880.0);
        p = p * r + (REAL)(1.0 / 40320.0);
        p = p * r + (REAL)(1.0 / 5040.0);
        p = p * r + (REAL)(1.0 / 720.0);
        p = p * r + (REAL)(1.0 / 120.0);
        p = p * r + (REAL)(1.0 / 24.0);
        p = p * r + (REAL)(1.0 / 6.0);
        p = p * r + (REAL)0.5;
    }
    p = p * (r * r) + r + (REAL)1;
    return times_power(p, k, shifted, x, least);
}

/* `rows` rows of two vectors of C = factor·A B + before·D. `rows` is a constant where this is called, so that all sums
   are in registers. The factor of a row is `each` numbers after that of the row before. */
INLINE void tile(const int rows, REAL *C, const REAL *D, int64_t ldc, const REAL *A, int64_t row, int64_t column,
                 const REAL *B, int64_t ldb, int64_t inner, const REAL *factor, const int64_t each, REAL before) {
    vector sums[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = (vector){0};
    for (int64_t k = 0; k < inner; k++, A += column, B += ldb) {
        vector b0 = load(B), b1 = load(B + LANES);
        IN_REGISTERS(b0, b1);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const vector a = every(A[i * row]);
            sums[i][0] += a * b0;
            sums[i][1] += a * b1;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        vector first = factor[i * each] * sums[i][0], second = factor[i * each] * sums[i][1];
        if (before != 0) {
            first += before * load(D + i * ldc);
            second += before * load(D + i * ldc + LANES);
        }
        store(C + i * ldc, first);
        store(C + i * ldc + LANES, second);
    }
}

/* C (m × n) = factor·A B + before·D, for n a multiple of COLUMNS. Entry (i, k) of A is A[i·row + k·column]; rows of B lie
   ldb apart, those of C and D ldc, and B's next COLUMNS columns `panel` numbers further. Where `before` is 0, what D holds
   does not matter; D can be C. */
INLINE void product(REAL *C, const REAL *D, int64_t ldc, const REAL *A, const int64_t row, const int64_t column,
                    const REAL *B, int64_t ldb, int64_t panel, int64_t m, int64_t n, int64_t inner, const REAL *factor,
                    const int64_t each, REAL before) {
    for (int64_t j = 0; j < n; j += COLUMNS, B += panel) {
        int64_t i = 0;
#define ROWS_OF_TILES(rows)                                                                                         \
    for (; i + rows <= m; i += rows)                                                                                \
        tile(rows, C + i * ldc + j, D + i * ldc + j, ldc, A + i * row, row, column, B, ldb, inner, factor + i * each, \
             each, before);
        ROWS_OF_TILES(ROWS)
        ROWS_OF_TILES(4)
        ROWS_OF_TILES(2)
        ROWS_OF_TILES(1)
#undef ROWS_OF_TILES
    }
}

/* A square of LANES × LANES numbers, transposed: after as many steps as LANES is a power of two, each of which lets the
   rows of one half and those of the other take turns. */
INLINE void turn(vector *square) {
#if defined(__GNUC__) && !defined(__clang__)
    typedef typeof((vector){0} < (vector){0}) places;
    places low, high;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        low[i] = i % 2 * LANES + i / 2;
        high[i] = low[i] + LANES / 2;
    }
#pragma GCC unroll 4
    for (int64_t step = 1; step < LANES; step *= 2) {
        vector next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(square[i], square[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(square[i], square[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) square[i] = next[i];
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const REAL other = square[i][j];
            square[i][j] = square[j][i];
            square[j][i] = other;
        }
#endif
}

/* C = factor·A B + before·D with A (m × inner), its rows lda apart, and B as `pack_panels` leaves it: rows of a matrix
   would compete for the same places of the cache. */
NOT_INLINE void times_plus(REAL *C, const REAL *D, int64_t ldc, const REAL *A, int64_t lda, const REAL *B, int64_t m,
                           int64_t n, int64_t inner, REAL factor, REAL before) {
    product(C, D, ldc, A, lda, 1, B, COLUMNS, inner * COLUMNS, m, n, inner, &factor, 0, before);
}

/* C = factor·Aᵀ B + before·D with A (inner × m) and B (inner × n), their rows lda and ldb apart. */
NOT_INLINE void transposed_times_plus(REAL *C, const REAL *D, int64_t ldc, const REAL *A, int64_t lda, const REAL *B,
                                      int64_t ldb, int64_t m, int64_t n, int64_t inner, REAL factor, REAL before) {
    product(C, D, ldc, A, 1, lda, B, ldb, COLUMNS, m, n, inner, &factor, 0, before);
}

/* C = A B with a factor for each row, the same otherwise. */
NOT_INLINE void times_by_row(REAL *C, int64_t ldc, const REAL *A, int64_t lda, const REAL *B, int64_t m, int64_t n,
                             int64_t inner, const REAL *factors) {
    product(C, C, ldc, A, lda, 1, B, COLUMNS, inner * COLUMNS, m, n, inner, factors, 1, 0);
}

/* C = A B + before·C, the same otherwise. */
INLINE void times(REAL *C, int64_t ldc, const REAL *A, int64_t lda, const REAL *B, int64_t m, int64_t n, int64_t inner,
                  REAL before) {
    times_plus(C, C, ldc, A, lda, B, m, n, inner, 1, before);
}

/* C += Aᵀ B, the same otherwise. */
INLINE void add_transposed_times(REAL *C, int64_t ldc, const REAL *A, int64_t lda, const REAL *B, int64_t ldb, int64_t m,
                                 int64_t n, int64_t inner) {
    transposed_times_plus(C, C, ldc, A, lda, B, ldb, m, n, inner, 1, 1);
}

/* Rows of `width` numbers, `stride` apart, as rows that are `padded` long, with zeros at their ends. */
static void pack(REAL *to, int64_t padded, const REAL *from, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++, to += padded, from += stride) {
        memcpy(to, from, width * sizeof(REAL));
        for (int64_t k = width; k < padded; k++) to[k] = 0;
    }
}

/* Ask for rows of `width` numbers, `stride` apart, that are read or written soon: rows of one head lie too far from each
   other for a processor to guess which one is next. `write` is a constant. */
INLINE void prefetch(const REAL *from, int64_t stride, int64_t rows, int64_t width, const int write) {
    for (int64_t i = 0; i < rows; i++, from += stride)
        for (int64_t k = 0; k < width; k += (int64_t)(64 / sizeof(REAL)))
            if (write)
                __builtin_prefetch(from + k, 1, 2);
            else
                __builtin_prefetch(from + k, 0, 2);
}

/* Rows of `width` numbers, `stride` apart, COLUMNS columns after the other: (panels × rows × COLUMNS), zeros at the end. */
static void pack_panels(REAL *to, const REAL *from, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t j = 0; j < width; j += COLUMNS, to += rows * COLUMNS)
        pack(to, COLUMNS, from + j, stride, rows, smaller(COLUMNS, width - j));
}

/* The same for the transposed matrix: rows become columns, (panels × width × COLUMNS), times a factor. */
static void pack_transposed(REAL *to, const REAL *from, int64_t stride, int64_t rows, int64_t width, REAL factor) {
    for (int64_t j = 0; j < rows; j += COLUMNS) {
        const int64_t columns = smaller(COLUMNS, rows - j);
        for (int64_t k = 0; k < width; k++, to += COLUMNS) {
            for (int64_t i = 0; i < columns; i++) to[i] = from[(j + i) * stride + k] * factor;
            for (int64_t i = columns; i < COLUMNS; i++) to[i] = 0;
        }
    }
}

/* Rows that are `padded` long as rows of `width`, `stride` apart. */
static void unpack(REAL *to, int64_t stride, const REAL *from, int64_t padded, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * stride, from + i * padded, width * sizeof(REAL));
}

static void unpack_adding(REAL *to, int64_t stride, const REAL *from, int64_t padded, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++, to += stride, from += padded)
        for (int64_t k = 0; k < width; k++) to[k] += from[k];
}
