#define REAL float
#define SET baseline
#define BYTES 16
#include "kernels.h"
