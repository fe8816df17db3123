#if defined(__x86_64__)
#define REAL float
#define SET avx2
#define BYTES 32
#define TARGET "avx2,fma"
#include "kernels.h"
#endif
