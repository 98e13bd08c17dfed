/* The passes over elements, for one type and one instruction set: `kernel.c` includes this file for each pair.

   Defined before: NAME(x), a name with the suffix of the pair; T, the type of the elements; WIDE, 1 where T is double;
   V, I and LANES, a vector of T, of as many integers, and how many; D and HALF, a vector of doubles, and how many. U, IU
   and DU are the same in memory at any address.

   Sums have 16 lanes whatever the width of a vector, so every instruction set adds in the same order. */

#define STEPS (16 / LANES)
#define EACH for (int k = 0; k < STEPS; k++)
#define DSTEPS (16 / HALF)
#define DEACH for (int k = 0; k < DSTEPS; k++)

/* Sums of differences from a shift, with few additions for each float, and the range. */
typedef struct {
    double sum, squares;
    T low, high;
    int64_t zeros;
} NAME(Sums);

#if !WIDE
static INLINE void NAME(sum_in_float)(const T *x, int64_t n, T shift, NAME(Sums) *out) {
    double sums[16] = {0}, squares[16] = {0};
    int32_t zeros[16] = {0};
    T low[16], high[16];
    V lows[STEPS], highs[STEPS], c = SPLAT(shift);
    I none[STEPS];
    EACH { lows[k] = SPLAT(INFINITY); highs[k] = SPLAT(-INFINITY); none[k] = NO_INTEGERS; }
    int64_t i = 0;
    while (i + 32 <= n) {
        int64_t stop = i + ROW <= n ? i + ROW : n; /* 32 additions in each lane, then in float64 */
        V s[STEPS], q[STEPS];
        T part[16];
        EACH { s[k] = SPLAT(0); q[k] = SPLAT(0); }
        for (; i + 32 <= stop; i += 32) {
            EACH {
                V a = LOAD(x + i + k * LANES), b = LOAD(x + i + 16 + k * LANES);
                lows[k] = LEAST(LEAST(a, b), lows[k]);
                highs[k] = MOST(MOST(a, b), highs[k]);
                none[k] = COUNT_ZEROS(COUNT_ZEROS(none[k], a), b);
                a -= c;
                b -= c;
                s[k] += a + b;
                q[k] += a * a + b * b;
            }
        }
        EACH STORE(part + k * LANES, s[k]);
        for (int j = 0; j < 16; j++) sums[j] += part[j];
        EACH STORE(part + k * LANES, q[k]);
        for (int j = 0; j < 16; j++) squares[j] += part[j];
    }
    EACH { STORE(low + k * LANES, lows[k]); STORE(high + k * LANES, highs[k]); STORE_INTEGERS(zeros + k * LANES, none[k]); }
    for (; i < n; i++) {
        int j = (int)(i % 16);
        double d = (T)(x[i] - shift);
        low[j] = x[i] < low[j] ? x[i] : low[j];
        high[j] = x[i] > high[j] ? x[i] : high[j];
        zeros[j] += x[i] == 0;
        sums[j] += d;
        squares[j] += d * d;
    }
    out->sum = total(sums);
    out->squares = total(squares);
    out->zeros = 0;
    out->low = INFINITY;
    out->high = -INFINITY;
    for (int j = 0; j < 16; j++) {
        out->zeros += zeros[j];
        out->low = low[j] < out->low ? low[j] : out->low;
        out->high = high[j] > out->high ? high[j] : out->high;
    }
}
#endif

/* The sum, in float64, and the range; there are no squares. */
static INLINE void NAME(sum_in_double)(const T *x, int64_t n, NAME(Sums) *out) {
    double sums[16];
    T low[16], high[16];
    int64_t zeros = 0, i = 0;
    D s[DSTEPS];
    for (int j = 0; j < 16; j++) { low[j] = INFINITY; high[j] = -INFINITY; }
    DEACH s[k] = DSPLAT(0);
    if (n >= 16) {
        V lows[STEPS], highs[STEPS];
        EACH { lows[k] = SPLAT(INFINITY); highs[k] = SPLAT(-INFINITY); }
        while (i + 16 <= n) {
            int64_t stop = n - i > (1 << 20) ? i + (1 << 20) : n;
            I none[STEPS];
            COUNTER counts[16];
            EACH none[k] = NO_INTEGERS;
            for (; i + 16 <= stop; i += 16) {
                EACH {
                    V a = LOAD(x + i + k * LANES);
                    lows[k] = LEAST(a, lows[k]);
                    highs[k] = MOST(a, highs[k]);
                    none[k] = COUNT_ZEROS(none[k], a);
                }
                DEACH s[k] += DLOAD(x + i + k * HALF);
            }
            EACH STORE_INTEGERS(counts + k * LANES, none[k]);
            for (int j = 0; j < 16; j++) zeros += counts[j];
        }
        EACH { STORE(low + k * LANES, lows[k]); STORE(high + k * LANES, highs[k]); }
    }
    DEACH DSTORE(sums + k * HALF, s[k]);
    for (; i < n; i++) {
        int j = (int)(i % 16);
        low[j] = x[i] < low[j] ? x[i] : low[j];
        high[j] = x[i] > high[j] ? x[i] : high[j];
        zeros += x[i] == 0;
        sums[j] += x[i];
    }
    out->sum = total(sums);
    out->zeros = zeros;
    out->low = INFINITY;
    out->high = -INFINITY;
    for (int j = 0; j < 16; j++) {
        out->low = low[j] < out->low ? low[j] : out->low;
        out->high = high[j] > out->high ? high[j] : out->high;
    }
}

static INLINE double NAME(deviations_in_double)(const T *x, int64_t n, double mean) {
    double sums[16];
    int64_t i = 0;
    D s[DSTEPS], m = DSPLAT(mean);
    DEACH s[k] = DSPLAT(0);
    for (; i + 16 <= n; i += 16) {
        DEACH {
            D d = DLOAD(x + i + k * HALF) - m;
            s[k] += d * d;
        }
    }
    DEACH DSTORE(sums + k * HALF, s[k]);
    for (; i < n; i++) {
        double d = x[i] - mean;
        sums[i % 16] += d * d;
    }
    return total(sums);
}

/* The finite ones of elements that are not all finite. */
static void NAME(finite_part)(const T *x, int64_t n, Part *out) {
    double sum = 0, deviations = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = x[i];
        if (v - v != 0) {
            out->nan += v != v;
            out->posinf += v > 0;
            out->neginf += v < 0;
            continue;
        }
        out->finite++;
        out->zeros += v == 0;
        sum += v;
        out->low = v < out->low ? v : out->low;
        out->high = v > out->high ? v : out->high;
    }
    if (!out->finite) return;
    out->sum = sum;
    out->mean = sum / (double)out->finite;
    for (int64_t i = 0; i < n; i++) {
        double d = x[i] - out->mean;
        if (d - d == 0) deviations += d * d;
    }
    out->deviations = deviations;
}

/* The numbers of a block. Returns whether all elements are finite. */
static INLINE int NAME(part_of)(const T *x, int64_t n, T *shift, Part *out) {
    NAME(Sums) found;
    *out = NOTHING;
#if !WIDE
    for (int turn = 0; shift && turn < 2; turn++) {
        NAME(sum_in_float)(x, n, *shift, &found);
        double mean = found.sum / (double)n, rest = found.squares - found.sum * mean;
        if (found.zeros == n) rest = found.squares = 0;
        else if (!(found.squares < 1e30)) break; /* not finite, or squares that float32 does not hold */
        else if (found.squares < (double)n * 1e-24 && !(*shift > 1e-10f || *shift < -1e-10f)) break;
        if (rest >= found.squares / 4) {
            out->finite = n;
            out->zeros = found.zeros;
            out->sum = found.sum + (double)n * *shift;
            out->mean = out->sum / (double)n;
            out->deviations = rest;
            out->low = found.low;
            out->high = found.high;
            return 1;
        }
        *shift = (T)(mean + *shift); /* digits were lost */
    }
    if (shift) *shift = 0;
#else
    (void)shift;
#endif
    NAME(sum_in_double)(x, n, &found);
    if (!(found.sum - found.sum == 0)) {
        NAME(finite_part)(x, n, out);
        return 0;
    }
    out->finite = n;
    out->zeros = found.zeros;
    out->sum = found.sum;
    out->mean = found.sum / (double)n;
    out->deviations = NAME(deviations_in_double)(x, n, out->mean);
    out->low = found.low;
    out->high = found.high;
    return 1;
}

/* --- ranges of units ---------------------------------------------------------------------------------------------- */

/* `low` and `high` have one element for each column of rows, which have `width` elements. */
static INLINE void NAME(range_of_columns)(const T *x, int64_t place, int64_t n, int64_t width, T *low, T *high) {
    int64_t column = place % width;
    while (n) {
        int64_t some = width - column < n ? width - column : n, i = 0;
        T *l = low + column, *h = high + column;
        for (; i + LANES <= some; i += LANES) {
            V a = LOAD(x + i);
            STORE(l + i, LEAST(a, LOAD(l + i)));
            STORE(h + i, MOST(a, LOAD(h + i)));
        }
        for (; i < some; i++) {
            l[i] = x[i] < l[i] ? x[i] : l[i];
            h[i] = x[i] > h[i] ? x[i] : h[i];
        }
        x += some;
        n -= some;
        column = 0;
    }
}

/* Each unit has `inner` elements one after another. */
static INLINE void NAME(range_of_runs)(const T *x, int64_t place, int64_t n, int64_t inner, int64_t units, T *low, T *high) {
    int64_t unit = place / inner % units, left = inner - place % inner;
    while (n) {
        int64_t some = left < n ? left : n;
        T l = low[unit], h = high[unit];
        if (some >= LANES) {
            V a = LOAD(x), lows = a, highs = a, lows2 = a, highs2 = a;
            T last[LANES], first[LANES];
            int64_t i = LANES;
            for (; i + 2 * LANES <= some; i += 2 * LANES) {
                a = LOAD(x + i);
                lows = LEAST(a, lows);
                highs = MOST(a, highs);
                a = LOAD(x + i + LANES);
                lows2 = LEAST(a, lows2);
                highs2 = MOST(a, highs2);
            }
            for (; i < some; i += LANES) { /* the last vector may overlap the one before */
                a = LOAD(x + (i + LANES <= some ? i : some - LANES));
                lows = LEAST(a, lows);
                highs = MOST(a, highs);
            }
            STORE(first, LEAST(lows, lows2));
            STORE(last, MOST(highs, highs2));
            for (int j = 0; j < LANES; j++) {
                l = first[j] < l ? first[j] : l;
                h = last[j] > h ? last[j] : h;
            }
        } else {
            for (int64_t i = 0; i < some; i++) {
                l = x[i] < l ? x[i] : l;
                h = x[i] > h ? x[i] : h;
            }
        }
        low[unit] = l;
        high[unit] = h;
        x += some;
        n -= some;
        left = inner;
        unit = unit + 1 < units ? unit + 1 : 0;
    }
}

/* A NaN stays. */
static void NAME(range_with_nan)(const T *x, int64_t place, int64_t n, int64_t inner, int64_t units, T *low, T *high) {
    for (int64_t i = 0; i < n; i++) {
        int64_t unit = (place + i) / inner % units;
        T v = x[i];
        if (v != v) low[unit] = high[unit] = (T)NAN;
        if (v < low[unit]) low[unit] = v;
        if (v > high[unit]) high[unit] = v;
    }
}

/* --- signed sums -------------------------------------------------------------------------------------------------- */

/* Adds 8 rows to the 8 signed sums: a Walsh-Hadamard transform. Each sum has a row of 256. */
static INLINE void NAME(fold)(const T *const rows[8], const T signs[8], int swap, int64_t columns, T *sums) {
    T *to[8];
    V sign[8];
    for (int t = 0; t < 8; t++) {
        to[t] = sums + (t ^ swap) * COLUMNS;
        sign[t] = SPLAT(signs[t ^ swap]);
    }
    for (int64_t c = 0; c < columns; c += LANES) {
        V a0 = LOAD(rows[0] + c), a1 = LOAD(rows[1] + c), a2 = LOAD(rows[2] + c), a3 = LOAD(rows[3] + c);
        V a4 = LOAD(rows[4] + c), a5 = LOAD(rows[5] + c), a6 = LOAD(rows[6] + c), a7 = LOAD(rows[7] + c);
        /* rows 3 and 7 count negatively */
        V b0 = a0 + a1, b1 = a0 - a1, b2 = a2 - a3, b3 = a2 + a3, b4 = a4 + a5, b5 = a4 - a5, b6 = a6 - a7, b7 = a6 + a7;
        V c0 = b0 + b2, c2 = b0 - b2, c1 = b1 + b3, c3 = b1 - b3, c4 = b4 + b6, c6 = b4 - b6, c5 = b5 + b7, c7 = b5 - b7;
        STORE(to[0] + c, LOAD(to[0] + c) + (c0 + c4) * sign[0]);
        STORE(to[1] + c, LOAD(to[1] + c) + (c1 + c5) * sign[1]);
        STORE(to[2] + c, LOAD(to[2] + c) + (c2 + c6) * sign[2]);
        STORE(to[3] + c, LOAD(to[3] + c) + (c3 + c7) * sign[3]);
        STORE(to[4] + c, LOAD(to[4] + c) + (c0 - c4) * sign[4]);
        STORE(to[5] + c, LOAD(to[5] + c) + (c1 - c5) * sign[5]);
        STORE(to[6] + c, LOAD(to[6] + c) + (c2 - c6) * sign[6]);
        STORE(to[7] + c, LOAD(to[7] + c) + (c3 - c7) * sign[7]);
    }
}

static INLINE void NAME(clear)(Fold *fold, T *sums) {
    for (int s = 0; s < 8; s++)
        for (int64_t c = s * COLUMNS; c < s * COLUMNS + fold->columns; c += 16) EACH STORE(sums + c + k * LANES, SPLAT(0));
    fold->rows = 0;
}

/* Adds what the floats hold to the totals, in float64: the first time they are the totals. */
static INLINE void NAME(flush)(Fold *fold, const T *sums) {
    for (int s = 0; s < 8; s++)
        for (int64_t c = s * COLUMNS; c < s * COLUMNS + fold->columns; c += 16) {
            double *to = fold->totals + c;
            if (fold->flushed) DEACH DSTORE(to + k * HALF, DOUBLES(to + k * HALF) + DLOAD(sums + c + k * HALF));
            else DEACH DSTORE(to + k * HALF, DLOAD(sums + c + k * HALF));
        }
    fold->flushed = 1;
}

/* Adds elements of one sample, of which the first is number `place`. */
static INLINE void NAME(fold_sample)(Fold *fold, T *sums, const T *x, int64_t place, int64_t n, const int8_t *sample) {
    static const T nothing[COLUMNS] = {0};
    while (n) {
        int64_t row = place / COLUMNS, group = row / 8, end = (group + 1) * 8 * COLUMNS;
        int64_t some = end - place < n ? end - place : n;
        int swap = GROUPS[group % PERIOD];
        T signs[8];
        for (int s = 0; s < 8; s++) {
            int sign = FLIPS[group % PERIOD][s] * PERIODS[group / PERIOD % PERIOD_SIGNS][s] * (sample ? sample[s] : 1);
            signs[s] = (T)sign;
        }
        if (place % COLUMNS + some <= COLUMNS) { /* within a row */
            int64_t column = place % COLUMNS;
            for (int s = 0; s < 8; s++) {
                T sign = ROWS[row % 8][s ^ swap] * signs[s], *to = sums + s * COLUMNS + column;
                V v = SPLAT(sign);
                int64_t i = 0;
                for (; i + LANES <= some; i += LANES) STORE(to + i, LOAD(to + i) + LOAD(x + i) * v);
                for (; i < some; i++) to[i] += x[i] * sign;
            }
            fold->rows += 1;
        } else {
            const T *rows[8];
            T ends[2][COLUMNS];
            int64_t first = place - place % COLUMNS; /* of the row */
            for (int i = 0; i < 8; i++) {
                int64_t from = (group * 8 + i) * COLUMNS - place, to = from + COLUMNS;
                if (to <= 0 || from >= some) rows[i] = nothing;
                else if (from >= 0 && to <= some) rows[i] = x + from;
                else {
                    T *end_row = ends[from + place > first];
                    for (int64_t c = 0; c < COLUMNS; c++) end_row[c] = from + c >= 0 && from + c < some ? x[from + c] : 0;
                    rows[i] = end_row;
                }
            }
            NAME(fold)(rows, signs, swap, COLUMNS, sums);
            fold->rows += 8;
        }
        if (fold->rows >= FLUSHED) {
            NAME(flush)(fold, sums);
            NAME(clear)(fold, sums);
        }
        x += some;
        place += some;
        n -= some;
    }
}

static INLINE void NAME(fold_span)(Fold *fold, T *sums, const T *x, int64_t place, int64_t n) {
    while (n) {
        int64_t sample = place / fold->length, within = place % fold->length;
        int64_t some = fold->length - within < n ? fold->length - within : n;
        NAME(fold_sample)(fold, sums, x, within, some, fold->signs ? fold->signs + 8 * sample : NULL);
        x += some;
        place += some;
        n -= some;
    }
}

static INLINE void NAME(begin)(Fold *fold, T *sums) {
    fold->flushed = 0;
    NAME(clear)(fold, sums);
}

/* Writes the 16 numbers of the totals. */
static INLINE void NAME(finish)(Fold *fold, T *sums, double *numbers) {
    NAME(flush)(fold, sums);
    for (int number = 0; number < NUMBERS; number++) {
        const double *from = fold->totals + number / 2 * COLUMNS, *signs = COLUMN_SIGNS[number];
        double lanes[16];
        D sum[DSTEPS];
        DEACH sum[k] = DSPLAT(0);
        for (int64_t c = 0; c < fold->columns; c += 16) DEACH sum[k] += DOUBLES(from + c + k * HALF) * DOUBLES(signs + c + k * HALF);
        DEACH DSTORE(lanes + k * HALF, sum[k]);
        numbers[number] = total(lanes) / 4;
    }
}

/* --- elements in an order, one after another ---------------------------------------------------------------------- */

/* Writes a run of elements `stride` bytes apart as T. */
static INLINE void NAME(copy_run)(const char *from, int64_t stride, int64_t n, int kind, T *to) {
#if WIDE
    (void)kind;
    if (stride == 8) memcpy(to, from, (size_t)n * 8);
    else for (int64_t i = 0; i < n; i++) memcpy(to + i, from + i * stride, 8);
#else
    if (kind == FLOAT32) {
        if (stride == 4) memcpy(to, from, (size_t)n * 4);
        else for (int64_t i = 0; i < n; i++) memcpy(to + i, from + i * stride, 4);
    } else if (kind == BFLOAT16) {
        if (stride == 2) for (int64_t i = 0; i < n; i++) to[i] = of_bfloat16(from + 2 * i);
        else for (int64_t i = 0; i < n; i++) to[i] = of_bfloat16(from + i * stride);
    } else {
        int64_t i = 0;
#if X86 && LANES == 8
        for (; stride == 2 && i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + 2 * i))));
#endif
        for (; i < n; i++) to[i] = of_float16(from + i * stride);
    }
#endif
}

static INLINE void NAME(gather)(const View *view, int kind, int64_t start, int64_t n, T *to) {
    int64_t at[MOST_DIMS];
    const char *from = view->data;
    int last = view->dims - 1;
    for (int d = last; d >= 0; d--) {
        at[d] = start % view->size[d];
        start /= view->size[d];
        from += at[d] * view->stride[d];
    }
    for (;;) {
        int64_t some = view->size[last] - at[last] < n ? view->size[last] - at[last] : n;
        NAME(copy_run)(from, view->stride[last], some, kind, to);
        n -= some;
        if (!n) return;
        to += some;
        from -= at[last] * view->stride[last];
        at[last] = 0;
        for (int d = last - 1; d >= 0; d--) {
            from += view->stride[d];
            if (++at[d] < view->size[d]) break;
            from -= view->size[d] * view->stride[d];
            at[d] = 0;
        }
    }
}

/* Writes the columns of 16 rows of 16 elements as rows. */
static INLINE void NAME(transpose)(const T *from, int64_t step, T *to, int64_t to_step) {
#if X86 && LANES == 8
    for (int c = 0; c < 16; c += 4)
        for (int r = 0; r < 16; r += 8) { /* rows r to r + 3 beside rows r + 4 to r + 7 */
            __m256 x[4], y[4];
            for (int i = 0; i < 4; i++) {
                const T *row = from + (r + i) * step + c;
                x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * step), 1);
            }
            y[0] = _mm256_unpacklo_ps(x[0], x[1]);
            y[1] = _mm256_unpacklo_ps(x[2], x[3]);
            y[2] = _mm256_unpackhi_ps(x[0], x[1]);
            y[3] = _mm256_unpackhi_ps(x[2], x[3]);
            for (int i = 0; i < 4; i += 2) {
                _mm256_storeu_ps(to + (c + i) * to_step + r, _mm256_shuffle_ps(y[i], y[i + 1], _MM_SHUFFLE(1, 0, 1, 0)));
                _mm256_storeu_ps(to + (c + i + 1) * to_step + r, _mm256_shuffle_ps(y[i], y[i + 1], _MM_SHUFFLE(3, 2, 3, 2)));
            }
        }
#elif X86 && !WIDE
    for (int c = 0; c < 16; c += 4)
        for (int r = 0; r < 16; r += 4) {
            __m128 a = _mm_loadu_ps(from + r * step + c), b = _mm_loadu_ps(from + (r + 1) * step + c);
            __m128 d = _mm_loadu_ps(from + (r + 2) * step + c), e = _mm_loadu_ps(from + (r + 3) * step + c);
            _MM_TRANSPOSE4_PS(a, b, d, e);
            _mm_storeu_ps(to + c * to_step + r, a);
            _mm_storeu_ps(to + (c + 1) * to_step + r, b);
            _mm_storeu_ps(to + (c + 2) * to_step + r, d);
            _mm_storeu_ps(to + (c + 3) * to_step + r, e);
        }
#else
    for (int c = 0; c < 16; c++)
        for (int r = 0; r < 16; r++) to[c * to_step + r] = from[r * step + c];
#endif
}

/* Writes `rows` rows of elements `stride` bytes apart, in each of which `columns` lie together, as columns. */
static INLINE void NAME(turn)(const char *from, int64_t stride, int kind, int64_t rows, int64_t columns, T *to, int64_t to_step) {
    int64_t itemsize = WIDE ? 8 : kind == FLOAT32 ? 4 : 2;
    int direct = itemsize == (int64_t)sizeof(T) && (uintptr_t)from % sizeof(T) == 0 && stride % itemsize == 0;
    T few[16 * 16];
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < columns; c += 16) {
            int64_t some_rows = rows - r < 16 ? rows - r : 16, some = columns - c < 16 ? columns - c : 16;
            const char *corner = from + r * stride + c * itemsize;
            for (int i = 0; i < 16; i++) PREFETCH(corner + (AHEAD + i) * stride);
            if (direct && some_rows == 16 && some == 16) {
                NAME(transpose)((const T *)(const void *)corner, stride / itemsize, to + c * to_step + r, to_step);
                continue;
            }
            for (int64_t i = 0; i < some_rows; i++) NAME(copy_run)(corner + i * stride, itemsize, some, kind, few + 16 * i);
            if (some_rows == 16 && some == 16) NAME(transpose)(few, 16, to + c * to_step + r, to_step);
            else
                for (int64_t j = 0; j < some; j++)
                    for (int64_t i = 0; i < some_rows; i++) to[(c + j) * to_step + r + i] = few[16 * i + j];
        }
}

/* Adds all elements where those that lie together are not those of the last dimension, but of the one before: whole rows
   of the last, many at once, and then in the spans and chunks of all other tensors, for the same bits. */
static INLINE void NAME(fold_turned)(const Plan *plan, Fold *fold, T *sums, double *numbers, T *buffer) {
    const View *view = &plan->logical;
    int last = view->dims - 1;
    int64_t rows = view->size[last], columns = view->size[last - 1], itemsize = WIDE ? 8 : plan->kind == FLOAT32 ? 4 : 2;
    int64_t at[MOST_DIMS] = {0}, done = 0, held = 0;
    const char *from = view->data;
    NAME(begin)(fold, sums);
    for (;;) {
        for (int64_t c = 0; c < columns; c += plan->turned) {
            int64_t n = columns - c < plan->turned ? columns - c : plan->turned, start = 0;
            NAME(turn)(from + c * itemsize, view->stride[last], plan->kind, rows, n, buffer + held, rows);
            held += n * rows;
            for (; held >= SPAN; held -= SPAN) {
                NAME(fold_span)(fold, sums, buffer + start, done, SPAN);
                start += SPAN;
                done += SPAN;
                if (done % CHUNK == 0 && done < plan->elements) {
                    NAME(finish)(fold, sums, numbers + NUMBERS * (done / CHUNK - 1));
                    NAME(begin)(fold, sums);
                }
            }
            if (start) memmove(buffer, buffer + start, (size_t)held * sizeof(T));
        }
        int d = last - 2;
        for (; d >= 0; d--) {
            from += view->stride[d];
            if (++at[d] < view->size[d]) break;
            from -= view->size[d] * view->stride[d];
            at[d] = 0;
        }
        if (d < 0) break;
    }
    NAME(fold_span)(fold, sums, buffer, done, held);
    NAME(finish)(fold, sums, numbers + NUMBERS * ((plan->elements - 1) / CHUNK));
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static INLINE const T *NAME(span)(const View *view, int kind, int64_t start, int64_t n, T *buffer) {
    if (view->direct) return (const T *)(const void *)view->data + start;
    NAME(gather)(view, kind, start, n, buffer);
    return buffer;
}

/* The numbers of one chunk, and the range of each column or unit in it; or of all chunks the signed sums, as the first
   item, where rows are transposed for them. */
static void NAME(work)(const Plan *plan, int64_t item, Fold *fold, Part *parts, double *numbers, void *ranges, void *buffer) {
    T sums[8 * COLUMNS], *low = ranges, *high = low ? low + plan->ranges : NULL, shift = 0;
    if (plan->turned) {
        if (!item) {
            NAME(fold_turned)(plan, fold, sums, numbers, buffer);
            return;
        }
        fold = NULL;
        item--;
    }
    int64_t first = item * CHUNK, end = first + CHUNK < plan->count ? first + CHUNK : plan->count;
    Part all = NOTHING;
    if (fold) NAME(begin)(fold, sums);
    for (int64_t start = first; start < end; start += SPAN) {
        int64_t n = end - start < SPAN ? end - start : SPAN;
        const T *x = NAME(span)(&plan->memory, plan->kind, start, n, buffer);
        for (int64_t i = 0; i < n; i += BLOCK) {
            int64_t some = n - i < BLOCK ? n - i : BLOCK;
            Part part;
            int finite = NAME(part_of)(x + i, some, plan->count <= SMALL ? NULL : &shift, &part);
            merge(&all, &part);
            if (!low) continue;
            if (!finite) NAME(range_with_nan)(x + i, start + i, some, plan->inner, plan->ranges, low, high);
            else if (plan->inner == 1) NAME(range_of_columns)(x + i, start + i, some, plan->ranges, low, high);
            else NAME(range_of_runs)(x + i, start + i, some, plan->inner, plan->ranges, low, high);
        }
        if (fold && plan->same_order) NAME(fold_span)(fold, sums, x, start, n);
    }
    parts[item] = all;
    if (!fold) return;
    end = first + CHUNK < plan->elements ? first + CHUNK : plan->elements;
    for (int64_t start = first; start < end && !plan->same_order; start += SPAN) {
        int64_t n = end - start < SPAN ? end - start : SPAN;
        NAME(fold_span)(fold, sums, NAME(span)(&plan->logical, plan->kind, start, n, buffer), start, n);
    }
    NAME(finish)(fold, sums, numbers + NUMBERS * item);
}

UNUSED static void NAME(no_range)(T *ranges, int64_t n) {
    for (int64_t i = 0; i < n; i++) { ranges[i] = INFINITY; ranges[n + i] = -INFINITY; }
}

/* A NaN stays. */
UNUSED static void NAME(merge_ranges)(T *ranges, const T *others, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        T low = others[i], high = others[n + i];
        if (low < ranges[i] || low != low) ranges[i] = low;
        if (high > ranges[n + i] || high != high) ranges[n + i] = high;
    }
}

/* The range of each of the units, from that of columns: `inner` of each unit, and all of them `repeats` times. */
UNUSED static void NAME(range_of_units)(const T *columns, int64_t units, int64_t inner, int64_t repeats, T *low, T *high) {
    const T *lows = columns, *highs = columns + units * inner * repeats;
    for (int64_t u = 0; u < units; u++) {
        T l = INFINITY, h = -INFINITY;
        for (int64_t r = 0; r < repeats; r++)
            for (int64_t i = 0; i < inner; i++) {
                T a = lows[(r * units + u) * inner + i], b = highs[(r * units + u) * inner + i];
                if (a != a) l = h = a;
                if (a < l) l = a;
                if (b > h) h = b;
            }
        low[u] = l + 0; /* no negative zero: which of them is met first depends on the order */
        high[u] = h + 0;
    }
}

#undef STEPS
#undef EACH
#undef DSTEPS
#undef DEACH
#undef T
#undef TYPE
#undef WIDE
#undef COUNTER
#undef LANES
#undef HALF
#undef DLOAD
#if X86 && BYTES
#undef LEAST
#undef MOST
#endif
