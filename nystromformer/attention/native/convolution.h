/* The skip convolution: out[i] = Σⱼ kernel[j] · value[i + j − taps/2], one kernel for each head.

   For ROWS rows together it is a product with a band matrix of ROWS × (taps + ROWS − 1) numbers whose entry (i, k) is
   kernel[k − i]: with zeros on both sides of the kernel no matrix is needed, only its strides −1 and 1. */

INLINE int64_t taps_size(int64_t taps) { return taps + 2 * ROWS; }

INLINE void pack_taps(REAL *to, const REAL *kernel, int64_t taps) {
    memset(to, 0, taps_size(taps) * sizeof(REAL));
    memcpy(to + ROWS, kernel, taps * sizeof(REAL));
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

/* out (rows × width) = convolution of a window of rows + taps − 1 rows + before·out; `packed` by pack_taps. */
NOT_INLINE void convolve(REAL *out, int64_t stride, const REAL *packed, const REAL *window,
                                               int64_t padded, int64_t rows, int64_t width, int64_t taps, REAL before) {
    for (int64_t j = 0; j < width; j += COLUMNS) {
        int64_t i = 0;
        for (; i + ROWS <= rows; i += ROWS)
            tile(ROWS, out + i * stride + j, out + i * stride + j, stride, packed + ROWS, -1, 1, window + i * padded + j,
                 padded, taps + ROWS - 1, 1, before);
        for (; i < rows; i++)
            tile(1, out + i * stride + j, out + i * stride + j, stride, packed + ROWS, -1, 1, window + i * padded + j,
                 padded, taps, 1, before);
    }
}
