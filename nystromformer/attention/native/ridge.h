/* The values W of the far field with which core rows come out as near to exact attention as the ridge allows, head by
   head. Of r core rows with far logits L and the log-sum-exp of their near keys, whose share of the weight is s:

       A = their weights of the far field,  R = B V − s ∘ near − A v,  M = AᵀA + λ I = UᵀU,  W = v + M⁻¹ Aᵀ R

   The backward needs A, s, U and what is left, E = B V − s ∘ near − A W: with X = M⁻¹ ∂W and ∂R = A X,

       ∂A = E Xᵀ − ∂R Wᵀ + κ A,  κ = −2 · ridge · Σ X ∘ (W − v) / m,  ∂v = ∂W − Aᵀ ∂R */

#define SMALLEST_GRAM 1e-6 /* as in nystrom_local/parts.py */

typedef struct {
    int64_t threads, C, r, m, e, mp, ep; /* mp and ep are m and e up to multiples of COLUMNS */
    view exact, near, near_lse, logits, value, W; /* (c, r, e) twice, (c, r), (c, r, m), (c, m, e) twice */
    view A, share, left, factor;  /* (c, r, mp), (c, r), (c, r, ep), (c, m, mp), for the backward; or none */
    view grad, grad_exact, grad_near, grad_near_lse, grad_logits, grad_value;
    REAL ridge;
} ridge_task;

INLINE ridge_task take_ridge(const int64_t **args, double ridge) {
    ridge_task t = {.ridge = (REAL)ridge};
    t.threads = take(args);
    t.C = take(args), t.r = take(args), t.m = take(args), t.e = take(args), t.mp = take(args), t.ep = take(args);
    t.exact = take_view(args), t.near = take_view(args), t.near_lse = take_view(args), t.logits = take_view(args);
    t.value = take_view(args), t.W = take_view(args);
    t.A = take_view(args), t.share = take_view(args), t.left = take_view(args), t.factor = take_view(args);
    return t;
}

/* M becomes U, M = UᵀU, above the diagonal and on it. */
static void cholesky(REAL *M, int64_t m, int64_t stride) {
    for (int64_t k = 0; k < m; k++) {
        REAL *pivot = M + k * stride;
        const REAL root = IS_FLOAT ? (REAL)sqrtf((float)pivot[k]) : (REAL)sqrt((double)pivot[k]);
        const int64_t begin = k / LANES * LANES; /* whole vectors; what is left of the diagonal has no meaning */
        for (int64_t j = begin; j < m; j += LANES) store(pivot + j, load(pivot + j) / root);
        for (int64_t i = k + 1; i < m; i++) {
            const vector factor = every(pivot[i]);
            REAL *row = M + i * stride;
            for (int64_t j = i / LANES * LANES; j < m; j += LANES) store(row + j, load(row + j) - factor * load(pivot + j));
        }
    }
}

/* X, (m × width), becomes M⁻¹ X. */
static void cholesky_solve(const REAL *U, int64_t stride, REAL *X, int64_t m, int64_t width) {
    for (int64_t k = 0; k < m; k++) {
        REAL *solved = X + k * width;
        for (int64_t j = 0; j < width; j += LANES) store(solved + j, load(solved + j) / U[k * stride + k]);
        for (int64_t i = k + 1; i < m; i++)
            for (int64_t j = 0; j < width; j += LANES)
                store(X + i * width + j, load(X + i * width + j) - U[k * stride + i] * load(solved + j));
    }
    for (int64_t k = m - 1; k >= 0; k--) {
        REAL *solved = X + k * width;
        for (int64_t j = 0; j < width; j += LANES) store(solved + j, load(solved + j) / U[k * stride + k]);
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < width; j += LANES)
                store(X + i * width + j, load(X + i * width + j) - U[i * stride + k] * load(solved + j));
    }
}

/* Weights of far keys from logits, in place, of a row that is padded with -∞, and the share of the near ones. */
INLINE REAL far_weights(REAL *row, int64_t padded, REAL near_lse) {
    vector most = every(near_lse), sum = {0};
    for (int64_t j = 0; j < padded; j += LANES) most = larger(load(row + j), most);
    const REAL largest = largest_of(most);
    for (int64_t j = 0; j < padded; j += LANES) {
        const vector p = exponential(load(row + j) - largest);
        store(row + j, p);
        sum += p;
    }
    const REAL near = exponential(every(near_lse - largest))[0], total = sum_of(sum) + near;
    for (int64_t j = 0; j < padded; j += LANES) store(row + j, load(row + j) / total);
    return near / total;
}

static void ridge_forward_item(const void *task, int64_t c, void *scratch) {
    const ridge_task *t = task;
    const int64_t r = t->r, m = t->m, e = t->e, mp = t->mp, ep = t->ep;
    REAL *A = scratch, *R = A + r * mp, *M = R + r * ep, *X = M + m * mp, *panels = X + m * ep, *shares = panels + m * ep;
    for (int64_t i = 0; i < r; i++) {
        const REAL *exact = at(t->exact, 0, c, i), *near = at(t->near, 0, c, i);
        pack(A + i * mp, mp, at(t->logits, 0, c, i), 0, 1, m);
        for (int64_t j = m; j < mp; j++) A[i * mp + j] = -(REAL)INFINITY;
        shares[i] = far_weights(A + i * mp, mp, at(t->near_lse, 0, c, 0)[i]);
        for (int64_t k = 0; k < e; k++) R[i * ep + k] = exact[k] - shares[i] * near[k];
        for (int64_t k = e; k < ep; k++) R[i * ep + k] = 0;
    }
    pack_panels(panels, at(t->value, 0, c, 0), t->value.r, m, e);
    times_plus(R, R, ep, A, mp, panels, r, ep, m, -1, 1);
    transposed_times_plus(M, M, mp, A, mp, A, mp, m, mp, r, 1, 0);
    REAL diagonal = 0;
    for (int64_t j = 0; j < m; j++) diagonal += M[j * mp + j];
    const REAL more = t->ridge * (diagonal / m + (REAL)SMALLEST_GRAM);
    for (int64_t j = 0; j < m; j++) M[j * mp + j] += more;
    transposed_times_plus(X, X, ep, A, mp, R, ep, m, ep, r, 1, 0);
    cholesky(M, m, mp);
    cholesky_solve(M, mp, X, m, ep);
    for (int64_t j = 0; j < m; j++) {
        const REAL *value = at(t->value, 0, c, j);
        REAL *W = at(t->W, 0, c, j);
        for (int64_t k = 0; k < e; k++) W[k] = value[k] + X[j * ep + k];
    }
    if (!t->A.data) return;
    pack_panels(panels, X, ep, m, ep);
    times_plus(R, R, ep, A, mp, panels, r, ep, m, -1, 1);
    memcpy(at(t->A, 0, c, 0), A, r * mp * sizeof(REAL));
    memcpy(at(t->left, 0, c, 0), R, r * ep * sizeof(REAL));
    memcpy(at(t->factor, 0, c, 0), M, m * mp * sizeof(REAL));
    memcpy(at(t->share, 0, c, 0), shares, r * sizeof(REAL));
}

ENTRY(ridge_forward)(const int64_t *args, double ridge) {
    const ridge_task t = take_ridge(&args, ridge);
    const int64_t numbers = t.r * (t.mp + t.ep + 1) + t.m * (t.mp + 2 * t.ep);
    return nystrom_for_each_item(ridge_forward_item, &t, t.C, numbers * sizeof(REAL), t.threads);
}

static void ridge_backward_item(const void *task, int64_t c, void *scratch) {
    const ridge_task *t = task;
    const int64_t r = t->r, m = t->m, e = t->e, mp = t->mp, ep = t->ep;
    const REAL *A = at(t->A, 0, c, 0), *left = at(t->left, 0, c, 0), *shares = at(t->share, 0, c, 0);
    REAL *X = scratch, *grad_R = X + m * ep, *grad_A = grad_R + r * ep, *panels = grad_A + r * mp;
    pack(X, ep, at(t->grad, 0, c, 0), t->grad.r, m, e);
    cholesky_solve(at(t->factor, 0, c, 0), mp, X, m, ep);
    pack_panels(panels, X, ep, m, ep);
    times(grad_R, ep, A, mp, panels, r, ep, m, 0);
    pack_transposed(panels, X, ep, m, e, 1);
    times(grad_A, mp, left, ep, panels, r, mp, e, 0);
    pack_transposed(panels, at(t->W, 0, c, 0), t->W.r, m, e, 1);
    times_plus(grad_A, grad_A, mp, grad_R, ep, panels, r, mp, e, -1, 1);
    REAL dots = 0;
    for (int64_t j = 0; j < m; j++) {
        const REAL *W = at(t->W, 0, c, j), *value = at(t->value, 0, c, j);
        for (int64_t k = 0; k < e; k++) dots += X[j * ep + k] * (W[k] - value[k]);
    }
    const REAL of_diagonal = -2 * t->ridge * dots / m;
    pack(X, ep, at(t->grad, 0, c, 0), t->grad.r, m, e);
    transposed_times_plus(X, X, ep, A, mp, grad_R, ep, m, ep, r, -1, 1);
    unpack(at(t->grad_value, 0, c, 0), t->grad_value.r, X, ep, m, e);
    unpack(at(t->grad_exact, 0, c, 0), t->grad_exact.r, grad_R, ep, r, e);
    for (int64_t i = 0; i < r; i++) {
        const REAL *weights = A + i * mp, *of_R = grad_R + i * ep, share = shares[i];
        REAL *of_A = grad_A + i * mp, *of_near = at(t->grad_near, 0, c, i), *of_logits = at(t->grad_logits, 0, c, i);
        const REAL of_share = -dot(of_R, at(t->near, 0, c, i), e);
        for (int64_t j = 0; j < m; j++) of_A[j] += of_diagonal * weights[j];
        const REAL less = share * of_share + dot(weights, of_A, m);
        for (int64_t j = 0; j < m; j++) of_logits[j] = weights[j] * (of_A[j] - less);
        for (int64_t k = 0; k < e; k++) of_near[k] = -share * of_R[k];
        at(t->grad_near_lse, 0, c, 0)[i] = share * (of_share - less);
    }
}

ENTRY(ridge_backward)(const int64_t *args, double ridge) {
    ridge_task t = take_ridge(&args, ridge);
    t.grad = take_view(&args), t.grad_exact = take_view(&args), t.grad_near = take_view(&args);
    t.grad_near_lse = take_view(&args), t.grad_logits = take_view(&args), t.grad_value = take_view(&args);
    const int64_t panels = t.m * t.ep > t.e * t.mp ? t.m * t.ep : t.e * t.mp;
    const int64_t numbers = t.m * t.ep + t.r * (t.ep + t.mp) + panels;
    return nystrom_for_each_item(ridge_backward_item, &t, t.C, numbers * sizeof(REAL), t.threads);
}
