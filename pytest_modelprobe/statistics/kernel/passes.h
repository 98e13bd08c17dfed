/* The passes over elements, for one type and one instruction set: `kernel.c` includes this file for each pair.

   These are defined before: NAME(x), a name with the suffix of the pair; T, the type of the elements; WIDE, 1 if T is
   double; V, I and LANES, a vector of T, one of as many integers, and how many; D and HALF, a vector of doubles, and
   how many. U, IU and DU are the same vectors in memory at any address. AVX2_FLOATS is 1 for floats where there is AVX2;
   HALVES_LEAST(x) then has the least of both halves of a vector twice as wide as those of AVX2, or is x.

   Sums have 16 lanes whatever the width of a vector, so that every instruction set adds in the same order. */

#define STEPS (16 / LANES)
#define EACH for (int k = 0; k < STEPS; k++)
#define DSTEPS (16 / HALF)
#define DEACH for (int k = 0; k < DSTEPS; k++)
#ifndef SIGNED_SUM /* a sign is +1 or -1, so the product is exact, and it may be contracted with the sum */
#define SIGNED_SUM(sum, x, sign) ((sum) + (x) * (sign))
#endif

/* Returns the sum of 16 lanes, in a fixed order. */
static INLINE double NAME(total)(D *lanes) {
    double four[HALF > 4 ? HALF : 4];
    for (int w = DSTEPS / 2; w * HALF >= 4; w /= 2)
        for (int k = 0; k < w; k++) lanes[k] += lanes[k + w];
    for (int k = 0; k * HALF < 4; k++) DSTORE(four + k * HALF, lanes[k]);
    for (int j = 4; j < HALF; j++) four[j - 4] += four[j];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Sums of differences from a shift, and the range. Without a shift, squares would lose their digits if the mean
   dominates. */
typedef struct {
    double sum, squares;
    T low, high;
    int64_t zeros;
} NAME(Sums);

#if !WIDE
static APART void NAME(sum_in_float)(const T *x, int64_t n, T shift, NAME(Sums) *out) {
    double sums[16] = {0}, squares[16] = {0};
    int32_t zeros[16] = {0};
    T low[16], high[16];
    V lows[STEPS], highs[STEPS], c = SPLAT(shift);
    I none[STEPS];
    EACH { lows[k] = SPLAT(INFINITY); highs[k] = SPLAT(-INFINITY); none[k] = NO_INTEGERS; }
    int64_t i = 0;
    while (i + 32 <= n) {
        int64_t stop = i + ROW <= n ? i + ROW : n; /* each lane adds 32 times in float32, then once in float64 */
        V s[STEPS], q[STEPS];
        T part[16];
        EACH { s[k] = SPLAT(0); q[k] = SPLAT(0); }
        for (; i + 32 <= stop; i += 32) {
            FETCH(x + i + BLOCK);
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

/* Takes the sum in float64, and the range. There are no squares, as they need the mean first. */
static APART void NAME(sum_in_double)(const T *x, int64_t n, NAME(Sums) *out) {
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
                FETCH(x + i + BLOCK);
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

static APART double NAME(deviations_in_double)(const T *x, int64_t n, double mean) {
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

/* Takes the numbers of the finite ones among elements that are not all finite. */
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

/* Takes the numbers of a block, and returns whether all elements are finite.

   It tries float32 twice, and then float64. The first shift is what the block before ended with. If digits were lost,
   the second is the mean that was found. */
static APART int NAME(part_of)(const T *x, int64_t n, T *shift, Part *out) {
    NAME(Sums) found;
    *out = NOTHING;
#if !WIDE
    for (int turn = 0; shift && turn < 2; turn++) {
        NAME(sum_in_float)(x, n, *shift, &found);
        double mean = found.sum / (double)n, rest = found.squares - found.sum * mean;
        if (found.zeros == n) rest = found.squares = 0;
        else if (!(found.squares < 1e30)) break; /* an element is not finite, or squares are too large for float32 */
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
        *shift = (T)(mean + *shift); /* digits were lost, so the mean is subtracted the next time */
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

/* Takes the range of each column of rows of `width` elements. `low` and `high` have one element for each column. */
static APART void NAME(range_of_columns)(const T *x, int64_t place, int64_t n, int64_t width, T *low, T *high) {
    int64_t column = place % width;
    while (n) {
        int64_t some = width - column < n ? width - column : n, i = 0;
        T *l = low + column, *h = high + column;
        if (!column && n >= 4 * width) { /* four rows at once, so that low and high are read and written less often */
            for (; i + LANES <= width; i += LANES) {
                V a = LOAD(x + i), b = LOAD(x + i + width), c = LOAD(x + i + 2 * width), d = LOAD(x + i + 3 * width);
                STORE(l + i, LEAST(LEAST(LEAST(a, b), LEAST(c, d)), LOAD(l + i)));
                STORE(h + i, MOST(MOST(MOST(a, b), MOST(c, d)), LOAD(h + i)));
            }
            for (; i < width; i++)
                for (const T *v = x + i; v < x + 4 * width; v += width) {
                    l[i] = *v < l[i] ? *v : l[i];
                    h[i] = *v > h[i] ? *v : h[i];
                }
            x += 4 * width;
            n -= 4 * width;
            continue;
        }
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

static INLINE T NAME(lowest)(V x) {
#if AVX2_FLOATS
    __m256 y = HALVES_LEAST(x);
    __m128 a = _mm_min_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_shuffle_ps(a, a, 1)));
#else
    T lanes[LANES];
    STORE(lanes, x);
    for (int j = 1; j < LANES; j++) lanes[0] = lanes[j] < lanes[0] ? lanes[j] : lanes[0];
    return lanes[0];
#endif
}

/* Takes the range of each unit. A unit has `inner` elements one after another. */
static APART void NAME(range_of_runs)(const T *x, int64_t place, int64_t n, int64_t inner, int64_t units, T *low, T *high) {
    int64_t unit = place / inner % units, left = inner - place % inner;
    while (n) {
        int64_t some = left < n ? left : n;
        T l = low[unit], h = high[unit];
        if (some >= LANES) {
            V a = LOAD(x), lows = a, highs = a, lows2 = a, highs2 = a;
            int64_t i = LANES;
            for (; i + 2 * LANES <= some; i += 2 * LANES) {
                a = LOAD(x + i);
                lows = LEAST(a, lows);
                highs = MOST(a, highs);
                a = LOAD(x + i + LANES);
                lows2 = LEAST(a, lows2);
                highs2 = MOST(a, highs2);
            }
            for (; i < some; i += LANES) { /* the last vector may overlap the one before, which changes no range */
                a = LOAD(x + (i + LANES <= some ? i : some - LANES));
                lows = LEAST(a, lows);
                highs = MOST(a, highs);
            }
            T first = NAME(lowest)(LEAST(lows, lows2)), last = -NAME(lowest)(-MOST(highs, highs2));
            l = first < l ? first : l;
            h = last > h ? last : h;
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

/* Takes the range of each unit, element by element. A NaN stays. */
static void NAME(range_with_nan)(const T *x, int64_t place, int64_t n, int64_t inner, int64_t units, T *low, T *high) {
    for (int64_t i = 0; i < n; i++) {
        int64_t unit = (place + i) / inner % units;
        T v = x[i];
        if (v != v) low[unit] = high[unit] = (T)NAN;
        if (v < low[unit]) low[unit] = v;
        if (v > high[unit]) high[unit] = v;
    }
}

/* --- histogram ---------------------------------------------------------------------------------------------------- */

/* Counts elements in two bins to an octave, and those that are not finite apart. See statistics/histogram.py. */
static APART void NAME(count_bins)(const T *x, int64_t n, int64_t *bins) {
#if WIDE
    const BITS digits = 52, root = 0x6A09E667F3BCD, infinity = (BITS)0x7FF << 52;
#else
    const BITS digits = 23, root = 0x3504F4, infinity = (BITS)0xFF << 23;
#endif
    const COUNTER middle = (COUNTER)(infinity >> digits) - 1;
    COUNTER at[ROW];
    for (int64_t done = 0; done < n; done += ROW) {
        int some = n - done < ROW ? (int)(n - done) : ROW;
        for (int i = 0; i < some; i++) {
            BITS bits, magnitude;
            memcpy(&bits, x + done + i, sizeof bits);
            magnitude = bits & ~((BITS)1 << (8 * sizeof bits - 1));
            /* The exponent counts twice: as it is, and with the mantissa counted from the root of two. */
            COUNTER bin = (COUNTER)(magnitude >> digits) + (COUNTER)((magnitude + ((BITS)1 << digits) - root) >> digits) - middle;
            bin = bin < -OUTERMOST ? -OUTERMOST : bin;
            bin = bin > OUTERMOST ? OUTERMOST : bin;
            bin = magnitude ? bin + OUTERMOST + 1 : 0;
            bin = BINS / 2 + (bits == magnitude ? bin : -bin);
            at[i] = magnitude < infinity ? bin : BINS;
        }
        for (int i = 0; i < some; i++) bins[at[i]]++;
    }
}

/* --- signed sums -------------------------------------------------------------------------------------------------- */

/* Adds the first `blocks` blocks of 16 elements of a row, a power of two, to the 16 sums of 16 lanes each.

   A Walsh-Hadamard transform of the blocks gives the sums of columns; each goes to the projection that the order of the
   row names. */
static INLINE void NAME(fold_blocks)(const T *x, const int blocks, uint64_t bits, T *sums) {
    const T *mask = JOIN(MASK_SIGNS, TYPE)[bits % MASKS];
    const uint16_t *places = PLACES[(bits >> ORDER_BITS) % ORDERS];
    for (int lane = 0; lane < 16; lane += LANES) {
        V a[16];
        for (int b = 0; b < blocks; b++) a[b] = LOAD(x + 16 * b + lane) * LOAD(mask + 16 * b + lane);
        /* A stage of the transform: pairs of elements `w` apart. */
#define BUTTERFLIES(w, from, blocks)                        \
    for (int i = 0; (w) < (blocks) && i < (blocks) / 2; i++) { \
        const int j = (from) + i / (w) * 2 * (w) + i % (w); \
        V p = a[j], q = a[j + (w)];                         \
        a[j] = p + q;                                       \
        a[j + (w)] = p - q;                                 \
    }
        BUTTERFLIES(8, 0, blocks)
        UNROLL for (int turn = 0; turn < 16; turn += 8) { /* in halves, because all of it does not fit the registers */
            const T *lanes = JOIN(LANE_SIGNS, TYPE)[0][turn] + lane;
            const uint16_t *signed_lanes = SIGNED_LANES[(bits >> (SIGN_BITS + turn)) & 255];
            const int first = blocks == 16 ? turn : 0, some = blocks < 8 ? blocks : 8;
            T *to = sums + lane;
            if (first == turn) {
                BUTTERFLIES(1, first, some)
                BUTTERFLIES(2, first, some)
                BUTTERFLIES(4, first, some)
            }
            for (int t = 0; t < 8; t++) {
                T *at = to + places[turn + t];
                STORE(at, SIGNED_SUM(LOAD(at), a[first + t % some], LOAD(lanes + signed_lanes[t])));
            }
        }
#undef BUTTERFLIES
    }
}

/* The row one block further on is fetched from memory meanwhile, where the elements are read from there: every second
   line of it, and the others while the statistics are taken. Else the first pass of the next block waits for each. */
static APART void NAME(fold_row)(const T *x, int blocks, uint64_t bits, T *sums, int direct) {
    const int line = (int)(LINE / sizeof(T));
    if (blocks == 16 && direct) for (int i = line; i < COLUMNS; i += 2 * line) FETCH(x + i + BLOCK);
    if (blocks == 16) NAME(fold_blocks)(x, 16, bits, sums);
    else if (blocks == 8) NAME(fold_blocks)(x, 8, bits, sums);
    else if (blocks == 4) NAME(fold_blocks)(x, 4, bits, sums);
    else if (blocks == 2) NAME(fold_blocks)(x, 2, bits, sums);
    else NAME(fold_blocks)(x, 1, bits, sums);
}

static INLINE void NAME(clear)(Fold *fold, T *sums) {
    for (int i = 0; i < NUMBERS * 16; i += 16) EACH STORE(sums + i + k * LANES, SPLAT(0));
    fold->rows = 0;
}

/* Adds what the sums hold to the totals, in float64. */
static APART void NAME(flush)(Fold *fold, T *sums) {
    for (int i = 0; i < NUMBERS * 16; i += 16) {
        double *to = fold->totals + i;
        if (fold->flushed) DEACH DSTORE(to + k * HALF, DOUBLES(to + k * HALF) + DLOAD(sums + i + k * HALF));
        else DEACH DSTORE(to + k * HALF, DLOAD(sums + i + k * HALF));
    }
    fold->flushed = 1;
    NAME(clear)(fold, sums);
}

/* Adds elements, of which the first is number `place`. */
static APART void NAME(fold_span)(Fold *fold, T *sums, const T *x, int64_t place, int64_t n, int direct) {
    const uint64_t length = (uint64_t)fold->length;
    uint64_t sample = (uint64_t)place / length, within = (uint64_t)place % length, some;
    for (uint64_t left = (uint64_t)n; left; left -= some, x += some) {
        uint64_t before = within % COLUMNS, bits = bits_of_row(fold->hashes[sample], within / COLUMNS);
        some = COLUMNS - before < length - within ? COLUMNS - before : length - within;
        some = some < left ? some : left;
        int blocks = 16;
        while (blocks > 1 && before + some <= (uint64_t)(8 * blocks)) blocks /= 2;
        if (some == (uint64_t)(16 * blocks)) NAME(fold_row)(x, blocks, bits, sums, direct);
        else {
            T padded[COLUMNS];
            for (int b = 0; b < blocks; b++) EACH STORE(padded + 16 * b + k * LANES, SPLAT(0));
            for (uint64_t i = 0; i < some; i++) padded[before + i] = x[i];
            NAME(fold_row)(padded, blocks, bits, sums, 0);
        }
        if (++fold->rows == FLUSHED) NAME(flush)(fold, sums);
        within += some;
        if (within == length) {
            within = 0;
            sample++;
        }
    }
}

static INLINE void NAME(begin)(Fold *fold, T *sums) {
    fold->flushed = 0;
    NAME(clear)(fold, sums);
}

/* Writes the 16 numbers of the sums and the totals. */
static APART void NAME(finish)(const Fold *fold, const T *sums, double *numbers) {
    for (int i = 0; i < NUMBERS; i++) {
        D a[DSTEPS];
        DEACH {
            a[k] = DLOAD(sums + 16 * i + k * HALF);
            if (fold->flushed) a[k] += DOUBLES(fold->totals + 16 * i + k * HALF);
        }
        numbers[i] = NAME(total)(a) / 4;
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
        int64_t i = 0;
        for (; stride == 4 && i + LANES <= n; i += LANES) memcpy(to + i, from + 4 * i, sizeof(V));
        for (; i < n; i++) memcpy(to + i, from + i * stride, 4);
    } else if (kind == BFLOAT16) {
        if (stride == 2) for (int64_t i = 0; i < n; i++) to[i] = of_bfloat16(from + 2 * i);
        else for (int64_t i = 0; i < n; i++) to[i] = of_bfloat16(from + i * stride);
    } else {
        int64_t i = 0;
#if AVX2_FLOATS
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

/* Writes the columns of a tile of at most 16 rows of 16 elements as rows. Vectors do so in blocks of 8 and 4 rows. */
static INLINE void NAME(transpose)(const T *from, int64_t step, int64_t rows, int64_t columns, T *to, int64_t to_step) {
    int64_t done = 0; /* rows that were written */
#if AVX2_FLOATS
    for (; done + 8 <= rows; done += 8) {
        int64_t c = 0;
        for (; c + 4 <= columns; c += 4) {
            const T *x = from + done * step + c;
            T *y = to + c * to_step + done;
            __m256 a = TWO_ROWS(x, step), b = TWO_ROWS(x + step, step), d = TWO_ROWS(x + 2 * step, step), e = TWO_ROWS(x + 3 * step, step);
            __m256 f = _mm256_unpacklo_ps(a, b), g = _mm256_unpacklo_ps(d, e);
            __m256 h = _mm256_unpackhi_ps(a, b), i = _mm256_unpackhi_ps(d, e);
            _mm256_storeu_ps(y, _mm256_shuffle_ps(f, g, _MM_SHUFFLE(1, 0, 1, 0)));
            _mm256_storeu_ps(y + to_step, _mm256_shuffle_ps(f, g, _MM_SHUFFLE(3, 2, 3, 2)));
            _mm256_storeu_ps(y + 2 * to_step, _mm256_shuffle_ps(h, i, _MM_SHUFFLE(1, 0, 1, 0)));
            _mm256_storeu_ps(y + 3 * to_step, _mm256_shuffle_ps(h, i, _MM_SHUFFLE(3, 2, 3, 2)));
        }
        for (; c < columns; c++)
            for (int i = 0; i < 8; i++) to[c * to_step + done + i] = from[(done + i) * step + c];
    }
#endif
#if X86 && !WIDE
    for (; done + 4 <= rows; done += 4) {
        int64_t c = 0;
        for (; c + 4 <= columns; c += 4) {
            const T *x = from + done * step + c;
            T *y = to + c * to_step + done;
            __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + step), d = _mm_loadu_ps(x + 2 * step), e = _mm_loadu_ps(x + 3 * step);
            _MM_TRANSPOSE4_PS(a, b, d, e);
            _mm_storeu_ps(y, a);
            _mm_storeu_ps(y + to_step, b);
            _mm_storeu_ps(y + 2 * to_step, d);
            _mm_storeu_ps(y + 3 * to_step, e);
        }
        for (; c < columns; c++)
            for (int i = 0; i < 4; i++) to[c * to_step + done + i] = from[(done + i) * step + c];
    }
#endif
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = done; r < rows; r++) to[c * to_step + r] = from[r * step + c];
}

static APART void NAME(transpose_tile)(const T *from, int64_t step, T *to, int64_t to_step) {
    for (int c = 0; c < 16; c += 4) /* where all 16 fall on the same places of the cache, it holds less than 16 lines */
        for (int r = 0; r < 16; r += 8) NAME(transpose)(from + r * step + c, step, 8, 4, to + c * to_step + r, to_step);
}

static APART void NAME(transpose_rest)(const T *from, int64_t step, int64_t rows, int64_t columns, T *to, int64_t to_step) {
    NAME(transpose)(from, step, rows, columns, to, to_step);
}

/* Writes `rows` rows of elements `stride` bytes apart, in each of which `columns` lie together, as columns. */
static APART void NAME(turn)(const char *from, int64_t stride, int kind, int64_t rows, int64_t columns, T *to) {
    const int64_t itemsize = WIDE ? 8 : kind == FLOAT32 ? 4 : 2, size = sizeof(T);
    int direct = itemsize == size && (uintptr_t)from % sizeof(T) == 0 && stride % size == 0;
    int64_t step = direct ? stride / size : 16;
    T few[16 * 16];
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < columns; c += 16) {
            int64_t some_rows = rows - r < 16 ? rows - r : 16, some = columns - c < 16 ? columns - c : 16;
            const char *corner = from + r * stride + c * itemsize;
            const T *tile = direct ? (const T *)(const void *)corner : few;
            for (int64_t i = 0; i < some_rows; i++) FETCH(corner + (FAR + i) * stride);
            for (int64_t i = 0; !direct && i < some_rows; i++) NAME(copy_run)(corner + i * stride, itemsize, some, kind, few + 16 * i);
            if (some_rows == 16 && some == 16) NAME(transpose_tile)(tile, step, to + c * rows + r, rows);
            else NAME(transpose_rest)(tile, step, some_rows, some, to + c * rows + r, rows);
        }
}

/* Adds whole rows of the last dimension to a buffer, transposed. The first is the one that has element `start`. */
static INLINE void NAME(add_turned)(const View *view, int kind, int64_t start, int64_t end, T *buffer, Held *held) {
    int last = view->dims - 1;
    int64_t rows = view->size[last], columns = view->size[last - 1], itemsize = WIDE ? 8 : kind == FLOAT32 ? 4 : 2;
    int64_t at = start / rows, column = at % columns, needed = (end - 1) / rows + 1 - at;
    int64_t some = columns - column < view->turned ? columns - column : view->turned;
    const char *from = view->data + column * itemsize;
    if (some > (needed + 3) / 4 * 4) some = (needed + 3) / 4 * 4; /* vectors transpose four columns */
    at /= columns;
    for (int d = last - 2; d >= 0; d--) {
        from += at % view->size[d] * view->stride[d];
        at /= view->size[d];
    }
    NAME(turn)(from, view->stride[last], kind, rows, some, buffer + held->count);
    if (!held->count) held->first = start % rows;
    held->count += some * rows - held->first;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

/* Returns the elements of a view from `start` on, and how many they are: SPAN at least, or all up to `end`. With so many,
   a whole block and a whole row are always at hand. What is held after `end` is for the chunks up to `last`. */
static INLINE const T *NAME(span)(
    const View *view, int kind, int64_t start, int64_t end, int64_t last, T *buffer, Held *held, int64_t *n) {
    int64_t left = end - start, most = left < SPAN ? left : SPAN;
    *n = most;
    if (view->direct) return (const T *)(const void *)view->data + start;
    while (held->count < most) {
        memmove(buffer, buffer + held->first, (size_t)held->count * sizeof(T));
        held->first = 0;
        if (view->turned) NAME(add_turned)(view, kind, start + held->count, last, buffer, held);
        else {
            NAME(gather)(view, kind, start + held->count, most - held->count, buffer + held->count);
            held->count = most;
        }
    }
    return buffer + held->first;
}

/* Adds the numbers of elements of a unit, or of several, of which the first is number `place`. */
static INLINE void NAME(count_block)(
    const Plan *plan, const T *x, int64_t place, int64_t n, T *shift, Part *all, T *low, int64_t *bins) {
    T *high = low + plan->ranges;
    Part part;
    int finite = NAME(part_of)(x, n, plan->count <= SMALL ? NULL : shift, &part);
    merge(all, &part);
    if (bins) NAME(count_bins)(x, n, bins);
    if (!low) return;
    if (!finite) NAME(range_with_nan)(x, place, n, plan->inner, plan->ranges, low, high);
    else if (plan->inner >= LONG) {
        int64_t unit = place / plan->inner % plan->ranges;
        if (part.low < low[unit]) low[unit] = (T)part.low;
        if (part.high > high[unit]) high[unit] = (T)part.high;
    } else if (plan->inner == 1) NAME(range_of_columns)(x, place, n, plan->ranges, low, high);
    else NAME(range_of_runs)(x, place, n, plan->inner, plan->ranges, low, high);
}

/* Takes the numbers of one chunk, and the range of each column or unit in it. Neither blocks nor rows depend on the
   spans in which elements are brought into order, so that numbers have the same bits however a tensor lies in memory. */
static void NAME(work)(
    const Plan *plan, int64_t item, int64_t after, Fold *fold, Part *parts, double *numbers, void *ranges, int64_t *bins, void *buffer,
    Held *held) {
    T sums[NUMBERS * 16], shift = 0;
    Part all = NOTHING;
    if (fold) NAME(begin)(fold, sums);
    for (int pass = 0; pass < (fold && !plan->in_order ? 2 : 1); pass++) {
        const View *view = pass ? &plan->logical : &plan->memory;
        int64_t first = item * CHUNK, most = pass ? plan->elements : plan->count, end = first + CHUNK < most ? first + CHUNK : most;
        int64_t counted = pass ? end : first, folded = fold && pass == !plan->in_order ? first : end;
        int64_t last = after * CHUNK < most ? after * CHUNK : most;
        if (fold && !plan->in_order) *held = (Held){0, 0}; /* both passes use the buffer */
        for (int64_t start = first; start < end;) {
            int64_t n;
            const T *x = NAME(span)(view, plan->kind, start, end, last, buffer, held, &n);
            int64_t stop = start + n;
            while (counted < stop) {
                int64_t left = plan->inner - counted % plan->inner;
                n = end - counted < BLOCK ? end - counted : BLOCK;
                if (plan->inner >= LONG && left < n) n = left;
                if (counted + n > stop) break;
                NAME(count_block)(plan, x + (counted - start), counted, n, &shift, &all, ranges, bins);
                counted += n;
            }
            if (folded < stop) {
                n = stop - folded;
                if (stop < end) n -= stop % fold->length % COLUMNS;
                NAME(fold_span)(fold, sums, x + (folded - start), folded, n, view->direct);
                folded += n;
            }
            stop = counted < folded ? counted : folded;
            held->first += stop - start;
            held->count -= stop - start;
            start = stop;
        }
    }
    parts[item] = all;
    if (fold) NAME(finish)(fold, sums, numbers + NUMBERS * item);
}

UNUSED static void NAME(no_range)(T *ranges, int64_t n) {
    for (int64_t i = 0; i < n; i++) { ranges[i] = INFINITY; ranges[n + i] = -INFINITY; }
}

/* Merges the ranges of two threads. A NaN stays. */
UNUSED static void NAME(merge_ranges)(T *ranges, const T *others, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        T low = others[i], high = others[n + i];
        if (low < ranges[i] || low != low) ranges[i] = low;
        if (high > ranges[n + i] || high != high) ranges[n + i] = high;
    }
}

/* Takes the range of each unit from those of columns. A unit has `inner` columns, and all units are there `repeats`
   times. */
UNUSED static void NAME(range_of_units)(const T *columns, int64_t units, int64_t inner, int64_t repeats, T *low, T *high) {
    const T *lows = columns, *highs = columns + units * inner * repeats;
    for (int64_t u = 0; u < units; u++) {
        low[u] = lows[u * inner] + 0; /* +0 for a negative zero: which zero is met first depends on the order */
        high[u] = highs[u * inner] + 0;
    }
    for (int64_t r = 0; r < repeats; r++, lows += units * inner, highs += units * inner)
        for (int64_t i = r ? 0 : 1; i < inner; i++)
            for (int64_t u = 0; u < units; u++) {
                T a = lows[u * inner + i] + 0, b = highs[u * inner + i] + 0;
                low[u] = ((a < low[u]) | (a != a)) ? a : low[u];
                high[u] = ((b > high[u]) | (b != b)) ? b : high[u];
            }
}

#undef STEPS
#undef EACH
#undef DSTEPS
#undef DEACH
#undef T
#undef TYPE
#undef BITS
#undef WIDE
#undef COUNTER
#undef LANES
#undef HALF
#undef DLOAD
#undef SIGNED_SUM
#undef AVX2_FLOATS
#undef HALVES_LEAST
#if X86 && BYTES
#undef LEAST
#undef MOST
#endif
