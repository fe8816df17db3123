/* Dropout. Which numbers are kept is a function of a seed and of their places, so that the backward finds the same ones
   again and nothing is kept for it, and threads change nothing.

   Four numbers next to each other share one word of 64 bits, the k-th of SplitMix64 from the seed on (Steele, Lea and
   Flood, 2014), from which each takes 16 bits. */

#define DROPPED_TOGETHER ((int64_t)(BYTES / sizeof(int16_t))) /* numbers that one vector of words decides on */
#define DROPOUT_ITEM 32768

typedef uint64_t words __attribute__((vector_size(BYTES)));
typedef int16_t levels __attribute__((vector_size(BYTES)));

typedef struct {
    int64_t count, least; /* numbers; the least level, from −32,768 to 32,767, at which one is kept */
    uint64_t seed;
    const REAL *x;
    REAL *out;
    REAL factor; /* of those that are kept */
} dropout_task;

INLINE levels levels_from(uint64_t seed, int64_t first_word) {
    words z;
    for (int64_t i = 0; i < (int64_t)(BYTES / sizeof(uint64_t)); i++)
        z[i] = seed + (uint64_t)(first_word + i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (levels)(z ^ (z >> 31));
}

/* `count` numbers from the i-th on. It is a constant where it can be, for which loops become vectors. */
INLINE void drop(const dropout_task *t, int64_t i, int64_t count) {
    int16_t drawn[DROPPED_TOGETHER];
    const levels all = levels_from(t->seed, i / 4);
    const REAL *restrict x = t->x + i, factor = t->factor;
    REAL *restrict out = t->out + i;
    const int32_t least = (int32_t)t->least;
    memcpy(drawn, &all, sizeof all);
    for (int64_t j = 0; j < count; j++) out[j] = drawn[j] >= least ? x[j] * factor : 0;
}

static void dropout_item(const void *task, int64_t item, void *scratch) {
    const dropout_task *t = task;
    int64_t i = item * DROPOUT_ITEM;
    const int64_t end = smaller(i + DROPOUT_ITEM, t->count);
    (void)scratch;
    for (; i + DROPPED_TOGETHER <= end; i += DROPPED_TOGETHER) drop(t, i, DROPPED_TOGETHER);
    if (i < end) drop(t, i, end - i);
}

ENTRY(dropout)(const int64_t *args, double factor) {
    dropout_task t = {.factor = (REAL)factor};
    const int64_t threads = take(&args);
    t.count = take(&args), t.least = take(&args), t.seed = (uint64_t)take(&args);
    t.x = (const REAL *)(intptr_t)take(&args), t.out = (REAL *)(intptr_t)take(&args);
    return nystrom_for_each_item(dropout_item, &t, parts_of(t.count, DROPOUT_ITEM), 0, threads);
}
