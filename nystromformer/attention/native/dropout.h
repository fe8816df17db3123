/* Dropout. Which numbers are kept is a function of a seed and of their places, so that the backward finds the same ones
   again and nothing is kept for it, and threads change nothing.

   Four numbers next to each other share one word of 64 bits, the k-th of SplitMix64 from the seed on (Steele, Lea and
   Flood, 2014), from which each takes 16 bits. */

#define DROPPED_TOGETHER ((int64_t)(BYTES / sizeof(int16_t))) /* numbers that one vector of words decides on */
#define DRAWN_TOGETHER 32 /* the most of any set of instructions, so that all draw the same */
#define DROPOUT_ITEM 32768

typedef uint64_t words __attribute__((vector_size(BYTES)));
typedef int16_t levels __attribute__((vector_size(BYTES)));

typedef struct {
    int64_t dropped; /* numbers of 65,536; 0 is none */
    uint64_t seed;
} dropout_rule;

INLINE dropout_rule take_rule(const int64_t **args) {
    dropout_rule x;
    x.dropped = take(args), x.seed = (uint64_t)take(args);
    return x;
}

INLINE int drops(const dropout_rule *x) { return x->dropped != 0; }

INLINE levels levels_from(uint64_t seed, int64_t first_word) {
    words z;
    for (int64_t i = 0; i < (int64_t)(BYTES / sizeof(uint64_t)); i++)
        z[i] = seed + (uint64_t)(first_word + i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (levels)(z ^ (z >> 31));
}

/* What `count` numbers, up to DROPPED_TOGETHER of them, from `place` on are multiplied with: those that are kept by so much
   that the mean stays, the others by 0. `count` is a constant where it can be, for which loops become vectors. */
INLINE void draw_some(REAL *restrict factors, const dropout_rule *rule, int64_t place, int64_t count) {
    int16_t drawn[DROPPED_TOGETHER];
    const levels all = levels_from(rule->seed, place / 4);
    const int32_t least = (int32_t)(rule->dropped - 32768);
    const REAL factor = (REAL)(65536.0 / (double)(65536 - rule->dropped));
    memcpy(drawn, &all, sizeof all);
    for (int64_t j = 0; j < count; j++) factors[j] = drawn[j] >= least ? factor : 0;
}

/* The same for any number of them; `place` is a multiple of DRAWN_TOGETHER. */
static void draw(REAL *factors, const dropout_rule *rule, int64_t place, int64_t count) {
    int64_t j = 0;
    for (; j + DROPPED_TOGETHER <= count; j += DROPPED_TOGETHER)
        draw_some(factors + j, rule, place + j, DROPPED_TOGETHER);
    if (j < count) draw_some(factors + j, rule, place + j, count - j);
}

typedef struct {
    int64_t count;
    dropout_rule rule;
    const REAL *x;
    REAL *out;
} dropout_task;

INLINE void drop(const dropout_task *t, int64_t i, int64_t count) {
    REAL factors[DROPPED_TOGETHER];
    const REAL *restrict x = t->x + i;
    REAL *restrict out = t->out + i;
    draw_some(factors, &t->rule, i, count);
    for (int64_t j = 0; j < count; j++) out[j] = factors[j] != 0 ? x[j] * factors[j] : 0;
}

static void dropout_item(const void *task, int64_t item, void *scratch) {
    const dropout_task *t = task;
    int64_t i = item * DROPOUT_ITEM;
    const int64_t end = smaller(i + DROPOUT_ITEM, t->count);
    (void)scratch;
    for (; i + DROPPED_TOGETHER <= end; i += DROPPED_TOGETHER) drop(t, i, DROPPED_TOGETHER);
    if (i < end) drop(t, i, end - i);
}

ENTRY(dropout)(const int64_t *args, double unused) {
    dropout_task t;
    const int64_t threads = take(&args);
    (void)unused;
    t.count = take(&args), t.rule = take_rule(&args);
    t.x = (const REAL *)(intptr_t)take(&args), t.out = (REAL *)(intptr_t)take(&args);
    return nystrom_for_each_item(dropout_item, &t, parts_of(t.count, DROPOUT_ITEM), 0, threads);
}
