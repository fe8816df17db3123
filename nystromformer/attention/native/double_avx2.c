#if defined(__x86_64__)
#define REAL double
#define SET avx2
#define BYTES 32
#define TARGET "avx2,fma"
#include "kernels.h"
#endif
