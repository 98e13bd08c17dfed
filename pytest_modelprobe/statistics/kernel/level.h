/* The passes for one instruction set: `kernel.c` includes this file for each. Vectors have BYTES bytes, and 0 means no
   vectors. SUFFIX is that of the names. */

#define NAME(x) JOIN(JOIN(x, TYPE), SUFFIX)
#define V NAME(v)
#define U NAME(u)
#define I NAME(i)
#define IU NAME(iu)
#define D NAME(d)
#define DU NAME(du)
#define HU NAME(hu)

#define T float
#define TYPE _float
#define BITS uint32_t
#define WIDE 0
#define COUNTER int32_t
#if BYTES
#define LANES (BYTES / 4)
#define HALF (BYTES / 8)
#define DLOAD(from) __builtin_convertvector(*(const HU *)(const void *)(from), D)
VECTOR(V, float, BYTES);
UNALIGNED_VECTOR(U, float, BYTES);
VECTOR(I, int32_t, BYTES);
UNALIGNED_VECTOR(IU, int32_t, BYTES);
VECTOR(D, double, BYTES);
UNALIGNED_VECTOR(DU, double, BYTES);
UNALIGNED_VECTOR(HU, float, (BYTES / 2));
#else
#define LANES 1
#define HALF 1
#define DLOAD(from) ((double)*(from))
typedef float V;
typedef int32_t I;
typedef double D;
#endif
#if X86 && BYTES == 16
#define LEAST(a, b) ((V)_mm_min_ps((__m128)(a), (__m128)(b)))
#define MOST(a, b) ((V)_mm_max_ps((__m128)(a), (__m128)(b)))
#elif X86 && BYTES == 32
#define LEAST(a, b) ((V)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MOST(a, b) ((V)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define SIGNED_SUM(sum, x, sign) ((V)_mm256_fmadd_ps((__m256)(x), (__m256)(sign), (__m256)(sum)))
#define HALVES_LEAST(x) ((__m256)(x))
#elif X86 && BYTES == 64
#define LEAST(a, b) ((V)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MOST(a, b) ((V)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define SIGNED_SUM(sum, x, sign) ((V)_mm512_fmadd_ps((__m512)(x), (__m512)(sign), (__m512)(sum)))
#define HALVES_LEAST(x) _mm256_min_ps(_mm512_castps512_ps256((__m512)(x)), _mm512_extractf32x8_ps((__m512)(x), 1))
#endif
#define AVX2_FLOATS (X86 && BYTES >= 32)
#include "passes.h"

#define T double
#define TYPE _double
#define BITS uint64_t
#define WIDE 1
#define COUNTER int64_t
#if BYTES
#define LANES (BYTES / 8)
#define HALF (BYTES / 8)
#define DLOAD(from) (*(const DU *)(const void *)(from))
VECTOR(V, double, BYTES);
UNALIGNED_VECTOR(U, double, BYTES);
VECTOR(I, int64_t, BYTES);
UNALIGNED_VECTOR(IU, int64_t, BYTES);
VECTOR(D, double, BYTES);
UNALIGNED_VECTOR(DU, double, BYTES);
#else
#define LANES 1
#define HALF 1
#define DLOAD(from) (*(from))
typedef double V;
typedef int64_t I;
typedef double D;
#endif
#if X86 && BYTES == 16
#define LEAST(a, b) ((V)_mm_min_pd((__m128d)(a), (__m128d)(b)))
#define MOST(a, b) ((V)_mm_max_pd((__m128d)(a), (__m128d)(b)))
#elif X86 && BYTES == 32
#define LEAST(a, b) ((V)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#define MOST(a, b) ((V)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define SIGNED_SUM(sum, x, sign) ((V)_mm256_fmadd_pd((__m256d)(x), (__m256d)(sign), (__m256d)(sum)))
#elif X86 && BYTES == 64
#define LEAST(a, b) ((V)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#define MOST(a, b) ((V)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#define SIGNED_SUM(sum, x, sign) ((V)_mm512_fmadd_pd((__m512d)(x), (__m512d)(sign), (__m512d)(sum)))
#endif
#define AVX2_FLOATS 0
#include "passes.h"

#undef NAME
#undef V
#undef U
#undef I
#undef IU
#undef D
#undef DU
#undef HU
#undef BYTES
#undef SUFFIX
