/* Statistics of a tensor, the range of each unit and the signed sums of its fingerprint, in one read of its memory.

   No operation of torch computes several numbers in one pass, and on the CPU a watch costs as much as it has passes.

   `reduce` takes an address, sizes and strides, so that neither torch nor numpy is needed to compile it. It uses the
   limited API of Python, so one wheel serves all versions. The numbers have the same bits on every instruction set and
   with any number of threads, because files are compared between machines. For this, elements are added in 16 lanes,
   lanes in blocks, blocks in chunks, each in a fixed order, and no product is contracted with a sum. */

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define INLINE inline __attribute__((always_inline, unused))
#define APART __attribute__((noinline, unused)) /* inlined into one function, the passes would run out of registers */
#define UNUSED __attribute__((unused))
#define FETCH(address) __builtin_prefetch(address)
#ifndef VECTORS /* -DVECTORS=0 computes without the vectors of these compilers, as others do */
#define VECTORS 1
#endif
#else
#define INLINE __forceinline
#define APART __declspec(noinline)
#define UNUSED
#define FETCH(address)
#define VECTORS 0
#endif
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif
#if VECTORS && (defined(__x86_64__) || defined(__i386__)) && defined(__SSE2__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define X86 0
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { MOST_DIMS = 64 };
enum {
    ROW = 1024,       /* so many squares are added in float32, then their sum in float64 */
    BLOCK = 4096,     /* elements of one part, which stay in the first-level cache for all passes */
    SPAN = 4352,      /* elements that are read at once: a block, and a row of a fingerprint that ends after it */
    TURNED = 1 << 14, /* elements that are transposed at once, or those of 32 columns if that is more */
    FAR = 64,         /* so many rows before they are transposed, they are fetched from memory */
    WIDEST = 1 << 16, /* columns of more elements are not transposed but gathered, and rows of more are no rows */
    LONG = 1 << 10,   /* if so many elements of a unit lie together, blocks end where units do */
    CHUNK = 1 << 16,  /* elements whose parts one thread adds up */
    NARROW = 16,      /* if fewer elements of a unit lie together, ranges are kept by column */
    LINE = 64,        /* bytes of a line of the cache, to which buffers are aligned */
    SPARE = 1 << 23,  /* bytes up to which a buffer is kept for the next call */
    SMALL = 1 << 13,  /* up to so many elements, all is done in float64 */
    THREADED = 1 << 16 /* from so many elements on, the GIL is released, and other threads may run */
};
/* These are the constants of statistics/fingerprint.py. FLUSHED: so many rows are added in the type of the elements,
   then their sum in float64. */
enum { COLUMNS = 256, NUMBERS = 16, MASKS = 8, ORDERS = 256, ORDER_BITS = 3, SIGN_BITS = 48, FLUSHED = 16 };
/* These are those of statistics/operations.py. */
enum { OUTERMOST = 80, BINS = 2 * (2 * OUTERMOST + 1) + 1 };

/* --- what all instruction sets share ------------------------------------------------------------------------------ */

/* The numbers of some elements. The mean is kept besides the sum because parts are merged by their means. */
typedef struct {
    int64_t finite, nan, posinf, neginf, zeros;
    double sum, mean, deviations, low, high;
} Part;

static const Part NOTHING = {0, 0, 0, 0, 0, 0, 0, 0, INFINITY, -INFINITY};

/* Elements in an order. They are `direct` if they lie one after another in the type of the computation. */
typedef struct {
    const char *data;
    int dims, direct;
    int64_t turned; /* columns (of the dimension before the last, if these lie together) transposed at once, or 0 */
    int64_t size[MOST_DIMS], stride[MOST_DIMS];
} View;

/* The elements in a buffer that were not asked for yet. */
typedef struct {
    int64_t first, count;
} Held;

/* How a tensor is read. Statistics take any order, so that of the memory, and read broadcast elements once. The signed
   sums need the logical order. If a fingerprint is asked for and no element is broadcast, `memory` has the logical
   order too, and one read serves both. */
typedef struct {
    int kind, in_order;    /* type of the elements; whether `memory` has all of them in logical order */
    int64_t elements;      /* number of elements of the tensor */
    int64_t count, copies; /* elements that are read, and how often each counts */
    int64_t units, apart;  /* units of the tensor, and how many of them lie apart: one if their axis is broadcast */
    int64_t ranges;        /* ranges that are kept: one of each unit, or of each column of rows that hold all units */
    int64_t inner;         /* elements one after another that are in one range */
    int64_t within, repeats; /* columns of each unit in a row, and how often a row holds all units */
    View memory, logical;
} Plan;

typedef struct {
    int64_t length, rows;   /* elements of a sample; rows that were added since the last flush */
    int flushed;            /* whether the totals hold anything */
    const uint64_t *hashes; /* one for each sample */
    double totals[NUMBERS * 16];
} Fold;

/* Masks of columns, and signs of the lanes of each sum, and the same negated. The other tables are offsets, counted in
   elements: PLACES has those of the 16 lanes that each sum is added to, by the order. SIGNED_LANES has those of the
   signs of the lanes, of 8 sums by their 8 signs. */
static float MASK_SIGNS_float[MASKS][COLUMNS], LANE_SIGNS_float[2][NUMBERS][16];
static double MASK_SIGNS_double[MASKS][COLUMNS], LANE_SIGNS_double[2][NUMBERS][16];
static uint16_t PLACES[ORDERS][NUMBERS], SIGNED_LANES[256][8];
static int tables_are_set = 0;

/* The bits of a row of a sample: output number row + 1 of splitmix64 (Steele, Lea and Flood 2014). */
static INLINE uint64_t bits_of_row(uint64_t hash, uint64_t row) {
    uint64_t z = hash + (row + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

static void merge(Part *a, const Part *b) {
    a->nan += b->nan;
    a->posinf += b->posinf;
    a->neginf += b->neginf;
    if (!b->finite) return;
    if (!a->finite) {
        a->mean = b->mean;
        a->deviations = b->deviations;
    } else { /* by the formula of Chan, Golub and LeVeque (1979) */
        double n = (double)a->finite, m = (double)b->finite, d = b->mean - a->mean;
        a->mean += d * (m / (n + m));
        a->deviations += b->deviations + d * d * (n * (m / (n + m)));
    }
    a->finite += b->finite;
    a->zeros += b->zeros;
    a->sum += b->sum;
    if (b->low < a->low) a->low = b->low;
    if (b->high > a->high) a->high = b->high;
}

static INLINE double total(const double *lanes) {
    double eight[8], four[4];
    for (int j = 0; j < 8; j++) eight[j] = lanes[j] + lanes[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static INLINE float of_bfloat16(const char *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return of_bits((uint32_t)half << 16);
}

/* This is exact, also if the processor flushes subnormal numbers to zero. */
static INLINE float of_float16(const char *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    uint32_t exponent = rest & 0x0F800000;
    uint32_t normal = rest + 0x38000000, other = rest + 0x70000000;
    float small = of_bits(rest + 0x38800000) - of_bits(0x38800000);
    uint32_t bits;
    memcpy(&bits, &small, 4);
    bits = exponent == 0x0F800000 ? other : exponent == 0 ? bits : normal;
    return of_bits(bits | sign);
}

/* --- the passes, for each instruction set and type ---------------------------------------------------------------- */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#if VECTORS
#define SPLAT(value) ((T)(value) - (V){0}) /* the compiler knows that nothing is subtracted */
#define DSPLAT(value) ((double)(value) - (D){0})
#define NO_INTEGERS ((I){0})
#define LOAD(from) (*(const U *)(const void *)(from))
#define STORE(to, value) (*(U *)(void *)(to) = (value))
#define DOUBLES(from) (*(const DU *)(const void *)(from))
#define DSTORE(to, value) (*(DU *)(void *)(to) = (value))
#define STORE_INTEGERS(to, value) (*(IU *)(void *)(to) = (value))
#define COUNT_ZEROS(count, x) ((count) - (I)((x) == 0))
#define VECTOR(name, type, bytes) typedef type name __attribute__((vector_size(bytes)))
#define UNALIGNED_VECTOR(name, type, bytes) typedef type name __attribute__((vector_size(bytes), aligned(sizeof(type)), may_alias))
#if !X86
#define CHOSEN(test, a, b) ((V)(((I)(test) & (I)(a)) | (~(I)(test) & (I)(b))))
#define LEAST(a, b) CHOSEN((a) < (b), a, b)
#define MOST(a, b) CHOSEN((a) > (b), a, b)
#endif
#define TWO_ROWS(x, step) _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x)), _mm_loadu_ps((x) + 4 * (step)), 1)
#define BYTES 16
#define SUFFIX _base
#include "level.h"
#else
#define SPLAT(value) ((T)(value))
#define DSPLAT(value) ((double)(value))
#define NO_INTEGERS 0
#define LOAD(from) (*(from))
#define STORE(to, value) (*(to) = (value))
#define DOUBLES(from) (*(from))
#define DSTORE(to, value) (*(to) = (value))
#define STORE_INTEGERS(to, value) (*(to) = (value))
#define COUNT_ZEROS(count, x) ((count) + ((x) == 0))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))
#define BYTES 0
#define SUFFIX _base
#include "level.h"
#endif

#if X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif
#define BYTES 32
#define SUFFIX _avx2
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq")
#endif
#define BYTES 64
#define SUFFIX _avx512
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

typedef void (*Work)(const Plan *, int64_t, int64_t, Fold *, Part *, double *, void *, int64_t *, void *, Held *);

static const struct {
    const char *name;
    Work work[2];
} LEVELS[] = {
    {"base", {work_float_base, work_double_base}},
#if X86
    {"avx2", {work_float_avx2, work_double_avx2}},
    {"avx512", {work_float_avx512, work_double_avx512}},
#endif
};
static int level = 0, levels = 1;

/* --- how the elements lie ----------------------------------------------------------------------------------------- */

static int64_t magnitude(int64_t n) { return n < 0 ? -n : n; }

/* Joins dimensions that lie one after another, and notes how they are read. */
static void join(View *view, int64_t itemsize, int typed) {
    int to = 0;
    for (int d = 0; d < view->dims; d++) {
        if (view->size[d] == 1) continue;
        if (to && view->stride[to - 1] == view->stride[d] * view->size[d]) {
            view->size[to - 1] *= view->size[d];
            view->stride[to - 1] = view->stride[d];
        } else {
            view->size[to] = view->size[d];
            view->stride[to++] = view->stride[d];
        }
    }
    if (!to) {
        view->size[0] = 1;
        view->stride[0] = itemsize;
        to = 1;
    }
    view->dims = to;
    view->turned = 0;
    if (to > 1 && view->stride[to - 1] != itemsize && view->stride[to - 2] == itemsize && view->size[to - 1] >= 4 &&
        view->size[to - 1] <= WIDEST && view->size[to - 2] >= 4) {
        int64_t most = TURNED / view->size[to - 1] / 16 * 16;
        view->turned = most > 32 ? most : 32;
    }
    view->direct = typed && to == 1 && view->stride[0] == itemsize && (uintptr_t)view->data % (uintptr_t)itemsize == 0;
}

/* Returns how many elements the buffer holds in which those of a view are brought into order. */
static int64_t elements_held(const View *view, int64_t most) {
    int64_t span = most < SPAN ? most : SPAN, columns = view->dims > 1 ? view->size[view->dims - 2] : 0;
    if (view->direct) return 0;
    if (!view->turned) return span;
    return SPAN + view->size[view->dims - 1] * (columns < view->turned ? columns : view->turned);
}

/* Fills a plan from the sizes and strides of a tensor, in elements. `axis` is that of the units, or negative. */
static void lay_out(
    Plan *plan, const char *data, const int64_t *size, const int64_t *stride, int dims, int axis, int64_t itemsize, int folded) {
    View *memory = &plan->memory, *logical = &plan->logical;
    int unit = -1, typed = plan->kind == FLOAT32 || plan->kind == FLOAT64;
    plan->copies = plan->count = plan->inner = 1;
    plan->units = axis < 0 ? 0 : size[axis];
    logical->data = data;
    logical->dims = dims;
    memory->data = data;
    memory->dims = 0;
    plan->in_order = folded;
    for (int d = 0; d < dims; d++) plan->in_order &= stride[d] != 0 || size[d] == 1;
    for (int d = 0; d < dims; d++) {
        int64_t step = stride[d] * itemsize;
        logical->size[d] = size[d];
        logical->stride[d] = step;
        if (step == 0) { /* a broadcast element is read once, and counts so often */
            plan->copies *= size[d];
            continue;
        }
        if (size[d] == 1 && d != axis) continue;
        plan->count *= size[d];
        int at = memory->dims++;
        /* Dimensions are sorted, and the smallest stride comes last. */
        while (at && !plan->in_order && magnitude(memory->stride[at - 1]) < magnitude(step)) {
            memory->size[at] = memory->size[at - 1];
            memory->stride[at] = memory->stride[at - 1];
            if (unit == at - 1) unit = at;
            at--;
        }
        memory->size[at] = size[d];
        memory->stride[at] = step;
        if (d == axis) unit = at;
    }
    if (unit >= 0)
        for (int d = unit + 1; d < memory->dims; d++) plan->inner *= memory->size[d];
    plan->apart = unit >= 0 ? memory->size[unit] : plan->units > 0;
    plan->within = plan->repeats = 1;
    plan->ranges = plan->apart;
    if (plan->apart == 1) plan->inner = plan->count;
    else if (plan->apart) {
        int64_t width = plan->apart * plan->inner, rows = width ? plan->count / width : 0;
        if (plan->inner == 1 || (plan->inner < NARROW && rows > 1 && width <= WIDEST)) {
            plan->within = plan->inner;
            plan->inner = 1;
            while (plan->repeats * 2 <= rows && plan->repeats * width < 64) plan->repeats *= 2;
            plan->ranges = width * plan->repeats;
        }
    }
    for (int d = 0; d < memory->dims; d++)
        if (memory->stride[d] < 0 && d != unit && !plan->in_order) { /* it is read from its other end */
            memory->data += memory->stride[d] * (memory->size[d] - 1);
            memory->stride[d] = -memory->stride[d];
        }
    join(memory, itemsize, typed);
    join(logical, itemsize, typed);
}

/* --- what Python calls -------------------------------------------------------------------------------------------- */

/* Reads a tuple of integers into `to`. Returns its length, or -1 with an error. */
static int integers(PyObject *tuple, int64_t *to) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "sizes and strides are tuples");
        return -1;
    }
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n > MOST_DIMS) {
        PyErr_Format(PyExc_ValueError, "a tensor of %zd dimensions", n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (to[i] == -1 && PyErr_Occurred()) return -1;
    }
    return (int)n;
}

/* The numbers of a tensor, as `reduce` returns them. After them come the counts of bins, if they were asked for, and the
   ranges of its units: all lows, then all highs. */
typedef struct {
    uint8_t folded, wide, binned, nothing[5]; /* whether there is a fingerprint, ranges are doubles, there are counts */
    int64_t units;
    int64_t finite, nan, posinf, neginf, zeros;
    double first_nan, first_posinf, first_neginf, low, high, mean, deviations;
    double numbers[NUMBERS];
} Packed;

static void pack(Packed *to, const Part *all, int64_t copies, double index) {
    memset(to, 0, sizeof *to);
    to->finite = all->finite * copies;
    to->nan = all->nan * copies;
    to->posinf = all->posinf * copies;
    to->neginf = all->neginf * copies;
    to->zeros = all->zeros * copies;
    to->first_nan = all->nan ? index : INFINITY;
    to->first_posinf = all->posinf ? index : INFINITY;
    to->first_neginf = all->neginf ? index : INFINITY;
    to->low = all->low + 0.0;
    to->high = all->high + 0.0;
    if (all->finite && all->low == all->high) to->mean = all->low + 0.0;
    else if (all->finite) {
        to->mean = all->sum / (double)all->finite + 0.0;
        to->deviations = all->deviations * (double)copies;
    }
}

/* Reads the tables of signs: masks, signs of the lanes of each sum, orders. They come from statistics/fingerprint.py, so
   that there is one source of them. */
static PyObject *set_tables(PyObject *module, PyObject *args) {
    const char *masks, *lanes, *orders;
    Py_ssize_t m, l, o;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#y#y#", &masks, &m, &lanes, &l, &orders, &o)) return NULL;
    if (m != MASKS * COLUMNS || l != NUMBERS * 16 || o != ORDERS * NUMBERS) {
        PyErr_SetString(PyExc_ValueError, "tables of signs of other sizes");
        return NULL;
    }
    for (int i = 0; i < MASKS * COLUMNS; i++) {
        int sign = ((const int8_t *)masks)[i];
        MASK_SIGNS_double[i / COLUMNS][i % COLUMNS] = MASK_SIGNS_float[i / COLUMNS][i % COLUMNS] = (float)sign;
    }
    for (int i = 0; i < NUMBERS * 16; i++)
        for (int minus = 0; minus < 2; minus++) {
            int sign = ((const int8_t *)lanes)[i];
            LANE_SIGNS_double[minus][i / 16][i % 16] = LANE_SIGNS_float[minus][i / 16][i % 16] = (float)(minus ? -sign : sign);
        }
    for (int i = 0; i < 256 * 8; i++) SIGNED_LANES[i / 8][i % 8] = (uint16_t)((i / 8 >> i % 8 & 1) * NUMBERS * 16 + i % 8 * 16);
    for (int i = 0; i < ORDERS * NUMBERS; i++) PLACES[i / NUMBERS][((const uint8_t *)orders)[i] % NUMBERS] = (uint16_t)(i % NUMBERS * 16);
    tables_are_set = 1;
    Py_RETURN_NONE;
}

/* What one thread has of its own: ranges, counts of bins, and a buffer in which it brings elements into order. */
typedef struct {
    void *ranges, *buffer;
    int64_t bins[BINS + 1];
} Own;

/* One call of `reduce`, whose items several threads may work off. They change `next`, `joined` and what is their own. */
typedef struct {
    Plan plan;
    int folded, binned;
    int64_t length; /* elements of a sample */
    const uint64_t *hashes;
    int64_t items, next, run; /* `run` items, one after another, are worked off by one thread */
    size_t buffer; /* bytes in which a thread brings elements into order */
    int threads, joined; /* how many have something of their own, and how many are at work or were */
    Own *own;
    Part part, *parts;
    double few[NUMBERS], *numbers;
} Job;

/* The buffer of the last call that had one. It is kept, because pages that are new at each call take as long as the
   elements. It is taken and given back with the GIL. */
static void *spare = NULL;
static size_t size_of_spare = 0;

static void *take_buffer(size_t *size) {
    void *buffer = spare;
    if (buffer && size_of_spare >= *size) {
        *size = size_of_spare;
        spare = NULL;
        return buffer;
    }
    return malloc(*size);
}

static void give_buffer_back(void *buffer, size_t size) {
    if (size > SPARE || (spare && size_of_spare >= size)) {
        free(buffer);
        return;
    }
    free(spare);
    spare = buffer;
    size_of_spare = size;
}

#if VECTORS
#define ADDED(counter) __atomic_fetch_add(&(counter), 1, __ATOMIC_RELAXED)
#else
#define ADDED(counter) ((counter)++) /* there is no team */
#endif

/* Works off items until there are no more. Each thread of a team calls it once, without the GIL. */
static void work_off(void *pointer) {
    Job *job = pointer;
    const Plan *plan = &job->plan;
    int wide = plan->kind == FLOAT64, number = ADDED(job->joined);
    if (number >= job->threads) return;
    Own *own = job->own + number;
    Fold fold; /* its totals are set only when they are needed */
    fold.length = job->length;
    fold.hashes = job->hashes;
    for (int64_t item; (item = ADDED(job->next) * job->run) < job->items;) {
        Held held = {0, 0};
        int64_t after = item + job->run < job->items ? item + job->run : job->items;
        for (; item < after; item++)
            LEVELS[level].work[wide](
                plan, item, after, job->folded ? &fold : NULL, job->parts, job->numbers, own->ranges,
                job->binned ? own->bins : NULL, own->buffer, &held);
    }
}

/* Calls a function with its data on each thread of a team: the interface that compilers call for `#pragma omp parallel`.
   With 0 threads the team is that of the operations before, whose threads may still be spinning. Another number would end
   some of them. */
typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);
static Team team = NULL;

/* set_team(address): GOMP_parallel of the OpenMP library that computes for torch, or 0 for one thread. */
static PyObject *set_team(PyObject *module, PyObject *address) {
    (void)module;
    void *found = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    memcpy(&team, &found, sizeof team);
    Py_RETURN_NONE;
}

/* Works off all items and merges what threads have of their own into that of the first. Returns -1 with an error if there
   is no memory. */
static int work_off_together(Job *job, Own *first) {
    const Plan *plan = &job->plan;
    int wide = plan->kind == FLOAT64, small = job->folded ? plan->elements < THREADED : plan->count < THREADED;
    size_t ranges = (size_t)plan->ranges * (wide ? 16 : 8), threads = (size_t)job->threads, size = job->buffer * threads;
    char *all = ranges ? malloc(ranges * threads) : NULL, *buffer = size ? take_buffer(&size) : NULL;
    job->own = threads > 1 ? malloc(sizeof(Own) * threads) : first;
    if ((ranges && !all) || (job->buffer && !buffer) || !job->own) {
        if (job->own != first) free(job->own);
        free(all);
        free(buffer);
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < threads; i++) {
        Own *own = job->own + i;
        own->ranges = all ? all + ranges * i : NULL;
        if (wide) no_range_double_base(own->ranges, plan->ranges);
        else no_range_float_base(own->ranges, plan->ranges);
        own->buffer = buffer ? buffer + (LINE - (uintptr_t)buffer % LINE) % LINE + job->buffer * i : NULL;
        if (job->binned) memset(own->bins, 0, sizeof own->bins);
    }
    PyThreadState *state = small ? NULL : PyEval_SaveThread();
    if (threads > 1) team(work_off, job, 0, 0);
    else work_off(job);
    if (state) PyEval_RestoreThread(state);
    if (buffer) give_buffer_back(buffer, size);
    *first = *job->own;
    for (int i = 1; i < job->threads && i < job->joined; i++) {
        const Own *own = job->own + i;
        if (ranges && wide) merge_ranges_double_base(first->ranges, own->ranges, plan->ranges);
        else if (ranges) merge_ranges_float_base(first->ranges, own->ranges, plan->ranges);
        for (int k = 0; job->binned && k < BINS; k++) first->bins[k] += own->bins[k];
    }
    if (job->own != first) free(job->own);
    return 0;
}

/* Returns how many chunks, one after another, a thread takes together: what is transposed at once has parts of all. */
static int64_t together_of(const Plan *plan, int64_t chunks, int threads) {
    const View *view = &plan->memory;
    int64_t some = view->turned ? view->turned * view->size[view->dims - 1] / CHUNK : 0, share = chunks / threads;
    return some < 1 ? 1 : some < share ? some : share;
}

/* reduce(address, kind, sizes, strides, axis, index, hashes, threads, histogram=False) returns the numbers, as bytes of
   `Packed`, or None if elements are so large that float64 does not hold their squares. */
static PyObject *reduce(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    static const int64_t itemsizes[] = {4, 8, 2, 2};
    int64_t size[MOST_DIMS], stride[MOST_DIMS];
    Job job;
    Own own;
    Plan *plan = &job.plan;
    PyObject *result = NULL;
    (void)module;
    if (count != 8 && count != 9) {
        PyErr_SetString(PyExc_TypeError, "reduce() takes 8 arguments or 9");
        return NULL;
    }
    const char *data = PyLong_AsVoidPtr(args[0]);
    long kind = PyLong_AsLong(args[1]);
    int dims = integers(args[2], size), others = dims < 0 ? -1 : integers(args[3], stride);
    if (PyErr_Occurred()) return NULL;
    long axis = args[4] == Py_None ? -1 : PyLong_AsLong(args[4]) + dims;
    double index = PyFloat_AsDouble(args[5]);
    long threads = PyLong_AsLong(args[7]);
    job.binned = count == 9 ? PyObject_IsTrue(args[8]) : 0;
    if (PyErr_Occurred()) return NULL;
    if (kind < FLOAT32 || kind > BFLOAT16 || dims != others || axis >= dims) {
        PyErr_SetString(PyExc_ValueError, "no such type, strides or axis");
        return NULL;
    }
    int wide = kind == FLOAT64;
    int64_t itemsize = wide ? 8 : 4, elements = 1;
    for (int d = 0; d < dims; d++) elements *= size[d];
    plan->kind = (int)kind;
    job.folded = args[6] != Py_None;
    lay_out(plan, data, size, stride, dims, axis < 0 ? -1 : (int)axis, itemsizes[kind], job.folded);
    if (!elements) plan->count = 0;
    plan->elements = elements;
    job.next = job.joined = 0;
    job.parts = &job.part;
    job.numbers = job.few;
    own.ranges = NULL;
    job.hashes = NULL;
    job.length = 0;

    Py_buffer hashes = {0};
    if (job.folded) {
        if (PyObject_GetBuffer(args[6], &hashes, PyBUF_SIMPLE)) return NULL;
        int64_t samples = hashes.len / 8;
        if (!tables_are_set || hashes.len % 8 || (uintptr_t)hashes.buf % 8 || !samples || elements % samples) {
            PyErr_SetString(PyExc_ValueError, "hashes that are not one uint64 for each sample");
            goto done;
        }
        job.hashes = hashes.buf;
        job.length = elements ? elements / samples : 1;
    }

    int64_t most = job.folded ? elements : plan->count, chunks = (most + CHUNK - 1) / CHUNK;
    if (chunks > 1) {
        job.parts = malloc((size_t)chunks * sizeof(Part));
        job.numbers = malloc((size_t)chunks * sizeof(double) * NUMBERS);
        if (!job.parts || !job.numbers) {
            PyErr_NoMemory();
            goto done;
        }
    }
    job.part = NOTHING;
    memset(job.few, 0, sizeof job.few);
    job.items = chunks ? chunks : 1;
    int64_t needed = elements_held(&plan->memory, most);
    if (job.folded && !plan->in_order && elements_held(&plan->logical, most) > needed) needed = elements_held(&plan->logical, most);
    job.buffer = needed ? ((size_t)(needed * itemsize) + 2 * LINE) / LINE * LINE : 0;
    /* If there were as many units as elements, the ranges of each thread would take longer to merge than to find. */
    int together = team && job.items > 1 && threads > 1 && plan->ranges <= plan->count / 16;
    job.threads = !together ? 1 : threads < job.items ? (int)threads : (int)job.items;
    job.run = job.threads == 1 ? job.items : together_of(plan, job.items, job.threads);
    if (work_off_together(&job, &own)) goto done;

    Part all = job.parts[0];
    for (int64_t i = 1; i < chunks; i++) merge(&all, job.parts + i);
    if (wide && (all.high > 1e150 || all.low < -1e150) && all.finite) {
        result = Py_None;
        Py_INCREF(result);
        goto done;
    }
    Packed packed;
    size_t ahead = sizeof packed + (job.binned ? sizeof(int64_t) * BINS : 0);
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)ahead + (Py_ssize_t)(plan->ranges ? plan->units * 2 * itemsize : 0));
    if (!result) goto done;
    char *to = PyBytes_AsString(result), *low = to + ahead, *high = low + plan->units * itemsize;
    pack(&packed, &all, plan->copies, index);
    packed.wide = (uint8_t)wide;
    if (plan->ranges) {
        packed.units = plan->units;
        if (wide) range_of_units_double_base(own.ranges, plan->apart, plan->within, plan->repeats, (double *)(void *)low, (double *)(void *)high);
        else range_of_units_float_base(own.ranges, plan->apart, plan->within, plan->repeats, (float *)(void *)low, (float *)(void *)high);
        if (plan->apart == 1)
            for (int64_t u = 1; u < plan->units; u++) {
                memcpy(low + u * itemsize, low, (size_t)itemsize);
                memcpy(high + u * itemsize, high, (size_t)itemsize);
            }
    }
    if (job.folded) {
        double last = 0;
        for (int k = 0; k < NUMBERS; k++) {
            for (int64_t i = 1; i < chunks; i++) job.numbers[k] += job.numbers[i * NUMBERS + k];
            last += job.numbers[k] - job.numbers[k];
        }
        if (last == 0) {
            packed.folded = 1;
            memcpy(packed.numbers, job.numbers, sizeof packed.numbers);
        }
    }
    if (job.binned) {
        packed.binned = 1;
        for (int i = 0; i < BINS; i++) own.bins[i] *= plan->copies;
        memcpy(to + sizeof packed, own.bins, sizeof(int64_t) * BINS);
    }
    memcpy(to, &packed, sizeof packed);
done:
    if (job.parts != &job.part) free(job.parts);
    if (job.numbers != job.few) free(job.numbers);
    free(own.ranges);
    if (hashes.obj) PyBuffer_Release(&hashes);
    return result;
}

/* merge(a, b) returns the numbers of both sets of elements together, or None if only one has a fingerprint, a histogram
   or these units. */
static PyObject *merge_packed(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Packed both, other;
    char *a, *b;
    Py_ssize_t size, as_large;
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "merge() takes 2 arguments");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &a, &size) || PyBytes_AsStringAndSize(args[1], &b, &as_large)) return NULL;
    if (size < (Py_ssize_t)sizeof both || as_large < (Py_ssize_t)sizeof both) {
        PyErr_SetString(PyExc_ValueError, "no numbers of a tensor");
        return NULL;
    }
    memcpy(&both, a, sizeof both);
    memcpy(&other, b, sizeof other);
    if (size != as_large || both.units != other.units || both.wide != other.wide || both.folded != other.folded ||
        both.binned != other.binned)
        Py_RETURN_NONE;
    if (other.finite && both.finite) { /* by the formula of Chan, Golub and LeVeque (1979) */
        double n = (double)both.finite, m = (double)other.finite, d = other.mean - both.mean;
        both.mean += d * (m / (n + m));
        both.deviations += d * d * (n * m / (n + m));
    } else if (other.finite) both.mean = other.mean;
    both.deviations += other.deviations;
    both.finite += other.finite;
    both.nan += other.nan;
    both.posinf += other.posinf;
    both.neginf += other.neginf;
    both.zeros += other.zeros;
    if (other.first_nan < both.first_nan) both.first_nan = other.first_nan;
    if (other.first_posinf < both.first_posinf) both.first_posinf = other.first_posinf;
    if (other.first_neginf < both.first_neginf) both.first_neginf = other.first_neginf;
    if (other.low < both.low) both.low = other.low;
    if (other.high > both.high) both.high = other.high;
    for (int k = 0; k < NUMBERS; k++) both.numbers[k] += other.numbers[k];
    PyObject *result = PyBytes_FromStringAndSize(a, size);
    if (!result) return NULL;
    char *to = PyBytes_AsString(result);
    memcpy(to, &both, sizeof both);
    to += sizeof both;
    b += sizeof both;
    if (both.binned) {
        int64_t bins[BINS], more[BINS];
        memcpy(bins, to, sizeof bins);
        memcpy(more, b, sizeof more);
        for (int i = 0; i < BINS; i++) bins[i] += more[i];
        memcpy(to, bins, sizeof bins);
        to += sizeof bins;
        b += sizeof bins;
    }
    void *ranges = to;
    const void *others = b;
    if (both.wide) merge_ranges_double_base(ranges, others, both.units);
    else merge_ranges_float_base(ranges, others, both.units);
    return result;
}

/* choose(name) makes the kernel compute with this instruction set from now on. */
static PyObject *choose(PyObject *module, PyObject *name) {
    (void)module;
    for (int i = 0; i < levels; i++) {
        PyObject *other = PyUnicode_FromString(LEVELS[i].name);
        if (!other) return NULL;
        int same = PyUnicode_Compare(name, other) == 0;
        Py_DECREF(other);
        if (same) {
            level = i;
            Py_RETURN_NONE;
        }
    }
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no instruction set %R", name);
    return NULL;
}

static PyMethodDef methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL, NULL},
    {"merge", (PyCFunction)(void (*)(void))merge_packed, METH_FASTCALL, NULL},
    {"set_tables", set_tables, METH_VARARGS, NULL},
    {"set_team", set_team, METH_O, NULL},
    {"choose", choose, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
#if X86
    __builtin_cpu_init();
    unsigned a, b, features = 0, d; /* older versions of clang know no "f16c" */
    int f16c = __get_cpuid(1, &a, &b, &features, &d) && features & bit_F16C;
    if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels = 2;
    if (levels == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) levels = 3;
#endif
    level = levels - 1;
    PyObject *names = PyTuple_New(levels);
    if (!names) return -1;
    for (int i = 0; i < levels; i++) {
        PyObject *name = PyUnicode_FromString(LEVELS[i].name);
        if (!name || PyTuple_SetItem(names, i, name)) {
            Py_DECREF(names);
            return -1;
        }
    }
    if (PyModule_AddObjectRef(module, "LEVELS", names)) {
        Py_DECREF(names);
        return -1;
    }
    Py_DECREF(names);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Numbers of a tensor, in one read.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
