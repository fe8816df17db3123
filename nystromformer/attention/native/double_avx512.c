#if defined(__x86_64__)
#define REAL double
#define SET avx512
#define BYTES 64
#define TARGET "avx512f,avx512dq,avx2,fma"
#include "kernels.h"
#endif
