/* Items of work on PyTorch's own threads: its OpenMP runtime's entry for a parallel region is handed over by Python. A
   second pool would compete with threads of the first, which stay awake for a while after each region. */

#include <stddef.h>
#include <stdint.h>

enum { DONE = 0, OUT_OF_MEMORY = 1 };

typedef void work_on_item(const void *task, int64_t item, void *scratch);

/* Call `work` for items 0 to `items` − 1, in any order, on at most `threads` threads, each with `scratch_bytes` of its
   own, 64-byte aligned. DONE or OUT_OF_MEMORY. */
int nystrom_for_each_item(work_on_item *work, const void *task, int64_t items, size_t scratch_bytes, int64_t threads);
