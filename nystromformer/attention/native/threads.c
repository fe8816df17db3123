#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef void parallel_region(void (*body)(void *), void *data, unsigned threads, unsigned flags);
static parallel_region *region = NULL;

__attribute__((visibility("default"))) void nystrom_set_parallel_region(void *function) {
    region = (parallel_region *)function;
}

typedef struct {
    work_on_item *work;
    const void *task;
    int64_t items;
    size_t scratch_bytes;
    atomic_llong next;
    atomic_int outcome;
} job;

static void work_until_done(void *data) {
    job *j = data;
    if (atomic_load(&j->next) >= j->items) return;
    void *scratch = aligned_alloc(64, (j->scratch_bytes / 64 + 1) * 64);
    if (!scratch) {
        atomic_store(&j->outcome, OUT_OF_MEMORY);
        return;
    }
    for (int64_t item; (item = atomic_fetch_add(&j->next, 1)) < j->items;) j->work(j->task, item, scratch);
    free(scratch);
}

int nystrom_for_each_item(work_on_item *work, const void *task, int64_t items, size_t scratch_bytes, int64_t threads) {
    job j = {.work = work, .task = task, .items = items, .scratch_bytes = scratch_bytes};
    atomic_init(&j.next, 0);
    atomic_init(&j.outcome, DONE);
    if (threads > items) threads = items;
    if (threads > 1 && region)
        region(work_until_done, &j, (unsigned)threads, 0);
    else
        work_until_done(&j);
    return atomic_load(&j.outcome);
}
