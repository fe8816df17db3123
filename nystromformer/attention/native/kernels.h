/* Nyström attention's inner loops for CPUs, called from Python through ctypes: no header but C's own is needed.

   The same source serves float and double, and each set of vector instructions: a small file for every pair defines REAL,
   SET, BYTES (of a vector) and TARGET (instructions), and includes this one. It gives functions with names such as
   rows_forward_float_avx2. What such a function takes comes in one array of 64-bit integers (sizes, addresses, strides
   in elements), in the order in which the function reads them, and each returns DONE or OUT_OF_MEMORY.

   How work is divided depends on sizes alone, and what several items add up to is added in their order: results do not
   depend on the number of threads. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Two of GCC's steps leave too few registers for the sums of a loop: carrying loads over from one pass to the next, and
   counting several addresses up instead of one. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-predictive-commoning", "no-ivopts")
#endif

#if defined(TARGET) && defined(__clang__)
#define QUOTED(x) #x
#define PRAGMA(x) _Pragma(QUOTED(x))
PRAGMA(clang attribute push(__attribute__((target(TARGET))), apply_to = function))
#elif defined(TARGET)
#define QUOTED(x) #x
#define PRAGMA(x) _Pragma(QUOTED(x))
PRAGMA(GCC target(TARGET))
#endif

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define ENTRY(name) __attribute__((visibility("default"))) int JOIN(name, REAL, SET)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define NOT_INLINE static __attribute__((noinline))
#else /* copies for sizes that are known somewhere come out slower */
#define NOT_INLINE static __attribute__((noinline, noclone))
#endif

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t up_to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }
INLINE int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* A tensor of rows, (g, c, r, width), whose rows are contiguous; the strides of the others in elements. */
typedef struct {
    REAL *data;
    int64_t g, c, r;
} view;

INLINE int64_t take(const int64_t **args) { return *(*args)++; }

INLINE view take_view(const int64_t **args) {
    view x;
    x.data = (REAL *)(intptr_t)take(args);
    x.g = take(args);
    x.c = take(args);
    x.r = take(args);
    return x;
}

INLINE REAL *at(view x, int64_t g, int64_t c, int64_t r) { return x.data + g * x.g + c * x.c + r * x.r; }

INLINE view moved(view x, int64_t g, int64_t c, int64_t r) {
    if (x.data) x.data = at(x, g, c, r);
    return x;
}

/* The first row of a sequence, its length, and which of the sequences with landmarks it is (of those that have none: -1). */
typedef struct {
    int64_t first, length, place;
} span;

#include "vectors.h"

#include "dropout.h"
#include "rows.h"
#include "exact.h"
#include "columns.h"
#include "pseudoinverse.h"
#include "landmarks.h"
#include "core.h"
#include "whole.h"
#include "local.h"
#include "local_core.h"
#include "ridge.h"
#include "far.h"

#if defined(TARGET) && defined(__clang__)
_Pragma("clang attribute pop")
#endif
