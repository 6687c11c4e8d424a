// A tile is a few thousand elements, read a second time from the nearest cache: first its maxima, then its values.
#pragma once

#include "scales.h"

// The fields that harness/precision/kernel/cpu.py fills in, in its order.
struct Job {
    const void* x;
    void* out;
    const float* given;  // GIVEN: the scale; otherwise an amax to use instead of the tensor's own, or null
    float* inverse;      // out: factor outside the product, one or one per row; or null
    float* amax;         // out: largest magnitude of x
    double* statistics;  // out: nonzero, clipped, flushed, signal, noise, scale; or null
    int64_t rows, cols, row_stride;  // of x and out, in elements; columns are contiguous
    int64_t out_stride;
    int64_t block_rows, block_cols;  // of one scale; 0: one for the tensor
    int32_t in_bf16, out_bf16, threads, multiply, stream;
    float clip_threshold, safe;  // scaled magnitudes: counted as clipped above; at most so large without clamping
    Grid grid;
    ScaleRule rule;
};

struct Totals {
    double signal = 0, noise = 0;
    int64_t nonzero = 0, kept = 0, clipped = 0;
    int32_t amax = 0;
    void add(const Totals& other) {
        signal += other.signal, noise += other.noise;
        nonzero += other.nonzero, kept += other.kept, clipped += other.clipped;
        amax = amax > other.amax ? amax : other.amax;
    }
};

constexpr int FOLD = 2048;  // elements whose squares are summed in FP32 before they are added to FP64 sums

// Two accumulators each: one alone would wait for itself.
struct Sums {
    vf signal[2], noise[2];
    vi zeros, flat, clipped;  // x that are zero, results that are zero
    int64_t lanes;            // padding included, which counts as zeros
    __attribute__((always_inline)) Sums() { clear(); }
    __attribute__((always_inline)) void clear() {
        signal[0] = signal[1] = noise[0] = noise[1] = splat(0.0f);
        zeros = flat = clipped = splat(0);
        lanes = 0;
    }
    __attribute__((always_inline)) void fold(Totals& totals) {  // a call would keep the sums in memory
        totals.signal += horizontal_sum(signal[0]) + horizontal_sum(signal[1]);
        totals.noise += horizontal_sum(noise[0]) + horizontal_sum(noise[1]);
        totals.nonzero += lanes - horizontal_count(zeros), totals.kept += lanes - horizontal_count(flat);
        totals.clipped += horizontal_count(clipped);
        clear();
    }
};

template <class Op, class = void>
struct moves_grid { static constexpr bool value = false; };
template <class Op>
struct moves_grid<Op, decltype((void)Op::IN_PLACE)> { static constexpr bool value = true; };
template <class Op, class = void>
struct clamps { static constexpr bool value = false; };
template <class Op>
struct clamps<Op, decltype((void)Op::CLAMPS)> { static constexpr bool value = Op::CLAMPS; };

// What one loop over consecutive elements needs besides its pointers.
struct Place {
    vu index;  // linear index of the first LANES elements, for the noise
    Output how;
};

template <class Op, bool MULTIPLY, bool STATISTICS>
__attribute__((always_inline)) inline vf element(const Op& op, const Scale& s, vf v, vu index, Sums& sums, int which) {
    vf r = op.grid(s, v, index);
    if (!MULTIPLY && !STATISTICS) return r;
    vf value = moves_grid<Op>::value ? r : r * s.decode;
    if (STATISTICS) {
        vf d = v - (MULTIPLY && !moves_grid<Op>::value ? value * s.outer : value);
        sums.signal[which] = accumulate(v, v, sums.signal[which]), sums.noise[which] = accumulate(d, d, sums.noise[which]);
        sums.zeros = count_zeros(v, sums.zeros), sums.flat = count_zeros(r, sums.flat);
        if constexpr (clamps<Op>::value) sums.clipped = op.count_clipped(s, v, sums.clipped);
    }
    return MULTIPLY ? value : r;
}

// `n` consecutive elements under one scale; returns `most` raised to their magnitudes if AMAX. FIXED: n, where the
// compiler knows it.
template <class Op, bool MULTIPLY, bool STATISTICS, bool AMAX, int FIXED, class In, class Out>
__attribute__((always_inline)) inline vi segment(const Op& op, const Scale& s, const In* x, Out* out, int64_t n, Place place,
                                                 Sums& sums, vi most) {
    if (FIXED) n = FIXED;
    vu index = place.index;
    int64_t i = 0;
#pragma GCC unroll 2
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vf v, w;
        vu at_v, at_w;
        Pair<In, Out>::load_two(x + i, v, w);
        Pair<In, Out>::indices(index, at_v, at_w);
        if (AMAX) most = larger(most, larger(magnitude(v), magnitude(w)));
        v = element<Op, MULTIPLY, STATISTICS>(op, s, v, at_v, sums, 0);
        w = element<Op, MULTIPLY, STATISTICS>(op, s, w, at_w, sums, 1);
        Pair<In, Out>::store_two(out + i, v, w, place.how);
        index += 2 * LANES;
    }
    if (i + LANES <= n) {
        vf v = load(x + i);
        if (AMAX) most = larger(most, magnitude(v));
        store(out + i, element<Op, MULTIPLY, STATISTICS>(op, s, v, index, sums, 0), place.how);
        index += LANES, i += LANES;
    }
    if (i < n) {
        vf v = load_part(x + i, n - i);
        if (AMAX) most = larger(most, magnitude(v));
        store_part(out + i, element<Op, MULTIPLY, STATISTICS>(op, s, v, index, sums, 1), place.how, n - i);
    }
    if (STATISTICS) sums.lanes += (n + LANES - 1) / LANES * LANES;
    return most;
}

template <class In>
vi lane_amax(const In* x, int64_t n) {
    vi a = splat(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a = larger(a, magnitude(load(x + i)));
        b = larger(b, magnitude(load(x + i + LANES)));
        c = larger(c, magnitude(load(x + i + 2 * LANES)));
        d = larger(d, magnitude(load(x + i + 3 * LANES)));
    }
    for (; i + LANES <= n; i += LANES) a = larger(a, magnitude(load(x + i)));
    if (i < n) b = larger(b, magnitude(load_part(x + i, n - i)));
    return larger(larger(a, b), larger(c, d));
}

// Smallest and largest, 0 included. NaN is ignored: callers look for it in the amax.
template <class In>
void extremes(const In* x, int64_t n, float& low, float& high) {
    vf l = splat(0.0f), h = l;
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = i + LANES <= n ? load(x + i) : load_part(x + i, n - i);
        l = v < l ? v : l, h = v > h ? v : h;
    }
    float lows[LANES], highs[LANES];
    memcpy(lows, &l, sizeof l), memcpy(highs, &h, sizeof h);
    for (int lane = 0; lane < LANES; lane++) {
        low = lows[lane] < low ? lows[lane] : low;
        high = highs[lane] > high ? highs[lane] : high;
    }
}

// `count` less one in each lane for every scaled element of `n` beyond the threshold. The factors stand `step` (0 or 1)
// apart.
template <class In>
vi count_clipped(const Job& job, const float* encode, const float* zero, int step, const In* x, int64_t n, vi count) {
    const float threshold = job.clip_threshold;
    Scale s{};
    s.encode = splat(*encode), s.zero = splat(*zero);
    for (int64_t i = 0; i < n; i += LANES) {
        if (step) s.encode = load(encode + i), s.zero = load(zero + i);
        vf y = (i + LANES <= n ? load(x + i) : load_part(x + i, n - i)) * s.encode;
        if (job.grid.asymmetric) {
            vf c = clamp_magnitude(y, splat(2 * job.grid.max));
            vf code = with_sign(whole_part<NEAREST>(job.grid, (vf)magnitude(c), vu{}), c) + s.zero;
            count += ((code < 0.0f) | (code > job.grid.max)) & (y == y);
        } else {
            count += (vf)magnitude(y) > threshold;
        }
    }
    return count;
}

inline int64_t total(vi count) {
    int32_t counts[LANES];
    memcpy(counts, &count, sizeof count);
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum -= counts[lane];
    return sum;
}
