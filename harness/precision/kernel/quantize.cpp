// Quantise a matrix and multiply back, in one pass over memory: `quantize(job)`, called by ctypes from cpu.py.
//
// The same bits as the PyTorch twin (harness/precision/twin.py), NaN payloads aside, whatever the machine's vector
// width and the number of threads. Every tile is looked at first: where nothing in it can overflow or is NaN, the
// shortest instruction sequence that gives those bits runs, elsewhere the general one. Sums of statistics are folded
// in the tiles' order.

#include <memory>
#include <new>
#include <vector>

#include "groups.h"

namespace {

enum Choice { GENERAL, NARROW_PLAIN, NARROW_CLAMPED, SHIFTED_PLAIN, SHIFTED_CLAMPED, COUNTED, COUNTED_ASYMMETRIC, BITS, NOISY, LEVELS };

constexpr int64_t TENSOR_TILE = 4096, FLAT_TILE = 2048, DEEP_TILE = 32768, COLUMN_BYTES = 1 << 19, CHUNK = 1 << 15;

template <class In, class Out>
struct Engine {
    const Job& job;
    const Grid& g;
    Scale whole;           // of the tensor, where it has one
    vf outer;
    int32_t known_amax = -1;  // the tensor's own, where it was looked up beforehand
    int32_t* known_maxima = nullptr;  // its blocks', where they were
    bool exact, stream, statistics, levels;

    explicit Engine(const Job& j) : job(j), g(j.grid), whole{}, statistics(j.statistics) {
        whole.encode = whole.decode = whole.outer = splat(1.0f);
        outer = splat(j.rule.rule == NVFP4 ? 1.0f / j.rule.outer : 1.0f);
        // on the grid: significands of 8 bits at most, far from FP32's subnormals
        exact = (!j.multiply || j.rule.rule == NVFP4) &&
                ((g.kind == NARROW && g.mantissa_bits <= 7) || g.kind == WHOLE ||
                 (g.kind == WIDE && g.mantissa_bits <= 7));
        stream = j.stream;
        levels = false;
        if (g.kind == TABLE && g.num_levels <= 16)
            for (int k = 0; k < g.num_levels; k++) levels |= g.levels[k] == 0;
    }

    const In* x(int64_t row, int64_t col) const { return (const In*)job.x + row * job.row_stride + col; }
    Out* out(int64_t row, int64_t col) const { return (Out*)job.out + row * job.out_stride + col; }
    Place place(int64_t row, int64_t col, bool exact_here) const {
        vu index = lane_numbers() + (uint32_t)(row * job.cols + col);
        return {index, {stream, exact_here}};
    }

    bool noisy() const { return g.kind == NARROW && g.rounding == STOCHASTIC && g.mantissa_bits <= 12; }

    // Scaled magnitudes that need no clamping; what is clamped is counted on the way.
    float unclamped() const { return statistics && job.clip_threshold < job.safe ? job.clip_threshold : job.safe; }

    // The cheapest operation for elements up to `amax` (bits) under factor `encode`.
    Choice choose(int32_t amax, float encode) const {
        if (amax >= EXPONENT) return GENERAL;
        float top = float_of(amax) * encode;
        if (g.kind == NARROW && g.rounding == NEAREST && g.mantissa_bits <= 12) {
            if (top <= unclamped()) return NARROW_PLAIN;
            return g.special || !(top < __builtin_inff()) ? GENERAL : NARROW_CLAMPED;
        }
        if (noisy() && top < __builtin_inff() && (!g.special || top <= g.max)) return NOISY;
        if (g.kind == WHOLE && g.rounding == NEAREST && g.before == 1.0f && top <= job.safe)
            return g.asymmetric ? COUNTED_ASYMMETRIC : COUNTED;
        if (g.kind == WIDE && encode == 1.0f && amax <= bits_of(g.max) && g.mantissa_bits < 23 &&
            (g.rounding == NEAREST ? g.mantissa_bits > 0 : g.rounding == STOCHASTIC && g.mantissa_bits >= 7))
            return BITS;
        return GENERAL;
    }

    // ---- everything the fast operations leave ---------------------------------------------------------------------

    // Where the scales of `n` elements stand: one for all (step 0) or one each (step 1).
    struct Factors {
        const float *encode, *decode, *zero;
        int step;
    };

    void general_stretch(Factors f, int64_t row, int64_t col, int64_t n, Totals& totals) const {
        constexpr int SIZE = 256;
        alignas(64) float v[SIZE], encode[SIZE], zero[SIZE], r[SIZE];
        const GeneralFunction function = general_function(g);
        for (int64_t i = 0; i < n; i += SIZE) {
            const int count = (int)(n - i < SIZE ? n - i : SIZE), padded = (count + LANES - 1) / LANES * LANES;
            const In* from = x(row, col + i);
            Out* to = out(row, col + i);
            for (int k = 0; k < padded; k += LANES) {
                vf a = k + LANES <= count ? load(from + k) : load_part(from + k, count - k);
                memcpy(v + k, &a, sizeof a);
            }
            for (int k = 0; k < padded; k++) encode[k] = f.encode[f.step * (i + k)];
            for (int k = 0; k < padded; k++) zero[k] = f.zero[f.step * (i + k)];
            function(g, v, encode, zero, r, padded, (uint32_t)(row * job.cols + col + i));
            if (statistics) {
                double signal = 0, noise = 0;
                int64_t nonzero = 0, kept = 0;
                for (int k = 0; k < count; k++) {
                    double d = (double)v[k] - (double)(r[k] * f.decode[f.step * (i + k)] * outer[0]);
                    signal += (double)v[k] * v[k], noise += d * d;
                    nonzero += v[k] != 0, kept += (r[k] != 0) & (v[k] != 0);  // NaN in a NaN block is not zero either
                }
                totals.signal += signal, totals.noise += noise, totals.nonzero += nonzero, totals.kept += kept;
            }
            if (job.multiply)
                for (int k = 0; k < count; k++) r[k] *= f.decode[f.step * (i + k)];
            for (int k = 0; k < count; k += LANES) {
                vf a = load(r + k);
                k + LANES <= count ? store(to + k, a, {false, false}) : store_part(to + k, a, {false, false}, count - k);
            }
        }
    }

    // FP32 sums that overflowed or lost small squares are made again by the general operation, in FP64.
    static bool sums_hold(double signal, double noise) {
        return signal < 1e38 && noise < 1e38 && signal > 1e-20 && (noise > 1e-25 || noise == 0);
    }

    // ---- one scale for `n` consecutive elements -------------------------------------------------------------------

    template <class Op, bool MULTIPLY, bool STATISTICS, bool AMAX>
    vi run_segment(const Scale& s, int64_t row, int64_t col, int64_t n, Totals& totals) const {
        const Op op(g);
        const Scale scale = s;
        Sums sums;
        vi most = splat(0);
        for (int64_t i = 0; i < n; i += FOLD) {
            int64_t count = n - i < FOLD ? n - i : FOLD;
            most = segment<Op, MULTIPLY, STATISTICS, AMAX, 0>(op, scale, x(row, col + i), out(row, col + i), count,
                                                             place(row, col + i, exact), sums, most);
            if (STATISTICS) sums.fold(totals);
        }
        return most;
    }
    // Largest magnitude's bits if AMAX.
    template <class Op, bool AMAX, bool MAY_MULTIPLY = true>
    int32_t run_segment(const Scale& s, int64_t row, int64_t col, int64_t n, Totals& totals) const {
        vi most;
        if (MAY_MULTIPLY && job.multiply)
            most = statistics ? run_segment<Op, MAY_MULTIPLY, true, AMAX>(s, row, col, n, totals)
                              : run_segment<Op, MAY_MULTIPLY, false, AMAX>(s, row, col, n, totals);
        else
            most = statistics ? run_segment<Op, false, true, AMAX>(s, row, col, n, totals)
                              : run_segment<Op, false, false, AMAX>(s, row, col, n, totals);
        return AMAX ? horizontal_max(most) : 0;
    }
    void run_segment(Choice choice, const Scale& s, int64_t row, int64_t col, int64_t n, Totals& totals) const {
        switch (choice) {
            case NARROW_PLAIN: run_segment<Narrow<false>, false>(s, row, col, n, totals);
                return;
            case NARROW_CLAMPED: run_segment<Narrow<true>, false>(s, row, col, n, totals);
                return;
            case NOISY: run_segment<Noisy, false>(s, row, col, n, totals);
                return;
            case COUNTED: run_segment<Counted<false>, false>(s, row, col, n, totals);
                return;
            case COUNTED_ASYMMETRIC: run_segment<Counted<true>, false>(s, row, col, n, totals);
                return;
            case BITS:  // its scale is 1
                g.rounding == NEAREST ? run_segment<Bits<NEAREST>, false, false>(s, row, col, n, totals)
                                      : run_segment<Bits<STOCHASTIC>, false, false>(s, row, col, n, totals);
                return;
            default: {
                float encode = s.encode[0], decode = s.decode[0], zero = s.zero[0];
                return general_stretch({&encode, &decode, &zero, 0}, row, col, n, totals);
            }
        }
    }
    bool few() const { return statistics && job.rows * job.cols <= 4 * TENSOR_TILE; }

    // A tile of a tensor or row whose scale is known.
    void scaled_tile(const Scale& s, int64_t row, int64_t col, int64_t n, int32_t amax, Totals& totals) const {
        const float encode = s.encode[0], zero = s.zero[0];
        Totals tile;
        bool done = false, counted = false;  // the clipped are counted too
        if (amax < 0 && choose(0, encode) == NARROW_PLAIN && !few()) {  // look and round in one go
            amax = run_segment<Narrow<true>, true>(s, row, col, n, tile);
            done = counted = choose(amax, encode) != GENERAL;
        } else if (amax < 0 && choose(0, encode) == BITS && !few()) {
            amax = g.rounding == NEAREST ? run_segment<Bits<NEAREST>, true, false>(s, row, col, n, tile)
                                         : run_segment<Bits<STOCHASTIC>, true, false>(s, row, col, n, tile);
            done = choose(amax, encode) == BITS;
        } else {
            if (amax < 0) amax = horizontal_max(lane_amax(x(row, col), n));
            Choice choice = few() ? GENERAL : choose(amax, encode);
            if (choice != GENERAL) run_segment(choice, s, row, col, n, tile), done = true, counted = choice == NARROW_CLAMPED;
        }
        if (!done || (statistics && !sums_hold(tile.signal, tile.noise) && amax != 0)) {
            tile = Totals();
            counted = false;
            run_segment(GENERAL, s, row, col, n, tile);
        }
        tile.amax = amax;
        if (statistics && !counted && (g.asymmetric || !(float_of(amax) * encode <= job.clip_threshold)))
            tile.clipped += total(count_clipped(job, &encode, &zero, 0, x(row, col), n, splat(0)));
        totals.add(tile);
    }

    // ---- blocks of rows x cols under scales of their own ----------------------------------------------------------

    void block_maxima(Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, int count) const {
        const int64_t n = job.block_cols;
        int k = 0;
        vi lanes[LANES];
        for (; k < count; k += LANES) {
            for (int lane = 0; lane < LANES; lane++) {
                lanes[lane] = splat(0);
                if (k + lane >= count) continue;
                int64_t first = (k + lane) * n, length = width - first < n ? width - first : n;
                for (int64_t i = 0; i < height; i++)
                    lanes[lane] = larger(lanes[lane], lane_amax(x(row + i, col + first), length));
            }
            vi m = maxima(lanes);
            memcpy(b.amax + k, &m, sizeof m);
        }
        if (!g.asymmetric) return;
        for (k = 0; k < count; k++) {
            int64_t first = k * n, length = width - first < n ? width - first : n;
            b.low[k] = b.high[k] = 0;
            for (int64_t i = 0; i < height; i++) extremes(x(row + i, col + first), length, b.low[k], b.high[k]);
            if (b.amax[k] >= EXPONENT) b.high[k] = __builtin_inff();
        }
    }
#if QUANTIZE_AVX512
    // Whole blocks of N columns, eight at a time.
    template <int N>
    void short_maxima(Blocks& b, int64_t row, int64_t col, int64_t height, int count) const {
        for (int k = 0; k < count; k += 8) {
            __m256i blocks[8];
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) blocks[j] = folded<N>(x(row, col + (k + j) * N));
            for (int64_t i = 1; i < height; i++) {
                const In* from = x(row + i, col + k * N);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) blocks[j] = _mm256_max_epi32(blocks[j], folded<N>(from + j * N));
            }
            __m256i m = maxima(blocks);
            memcpy(b.amax + k, &m, sizeof m);
        }
    }
#endif

    // The operation for all blocks of a tile; sets floor and ceiling where the grid moves to x.
    // `largest` and `scaled` become the largest magnitude's bits, before and after scaling. b's arrays are padded to
    // whole vectors.
    Choice choose_blocks(Blocks& b, int count, int32_t& largest, int32_t& scaled) const {
        vi most = splat(0), worst = splat(0);  // as bits, where NaN is above infinity
        for (int k = 0; k < count; k += LANES) {
            vi amax;
            memcpy(&amax, b.amax + k, sizeof amax);
            most = larger(most, amax);
            worst = larger(worst, magnitude((vf)amax * load(b.encode + k)));
        }
        scaled = horizontal_max(worst), largest = horizontal_max(most);
        if (largest >= EXPONENT || scaled >= EXPONENT) return GENERAL;
        const float top = float_of(scaled);
        const bool fits = top <= (g.kind == NARROW ? unclamped() : job.safe);
        if (noisy() && (!g.special || top <= g.max)) return NOISY;
        if (levels && (job.multiply || job.block_cols == 1)) return LEVELS;
        if (g.kind == WHOLE && g.rounding == NEAREST && g.before == 1.0f && fits)
            return g.asymmetric ? COUNTED_ASYMMETRIC : COUNTED;
        if (g.kind != NARROW || g.rounding != NEAREST || g.mantissa_bits > 12 || (g.special && !fits)) return GENERAL;
        if (job.multiply && (job.rule.rule == MX || (job.rule.rule == ENCODE && job.rule.power_of_two))) {
            // decode = 2^E with: floor 2^(E + emin) normal in FP32, and 1.5 * 2^(E + emax + 1 + 23 - M) finite
            const int32_t e_min = (bits_of(g.min_normal) >> 23) - 127, e_max = (bits_of(g.max) >> 23) - 127;
            const int32_t lowest = (-126 - e_min + 127) << 23, highest = (126 - 24 + g.mantissa_bits - e_max + 127) << 23;
            const float least = g.min_normal, max = clamp_for(g);
            vi outside = splat(0);
            for (int k = 0; k < count; k += LANES) {
                vi amax;
                memcpy(&amax, b.amax + k, sizeof amax);
                vf decode = either(amax == 0, splat(1.0f), load(b.decode + k));
                outside |= ((vi)decode < lowest) | ((vi)decode > highest);
                put(b.floor + k, decode * least), put(b.ceiling + k, decode * max);
            }
            if (!horizontal_max(outside & 1)) return fits ? SHIFTED_PLAIN : SHIFTED_CLAMPED;
        }
        return fits ? NARROW_PLAIN : NARROW_CLAMPED;
    }

    template <class Op, bool STATISTICS, int FIXED>
    void run_blocks(const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, int count, bool exact_here,
                    Totals& totals) const {
        const int64_t n = FIXED ? FIXED : job.block_cols;
        const Op op(g);
        const vf beyond = outer;
        Sums sums;
        int64_t pending = 0;
        for (int64_t i = 0; i < height; i++) {
            const In* from = x(row + i, col);
            Out* to = out(row + i, col);
            Place here = place(row + i, col, exact_here);
            int64_t left = width;
            for (int k = 0; k < count; k++, from += n, to += n, left -= n) {
                Scale s;
                s.encode = splat(b.encode[k]), s.decode = splat(b.decode[k]);
                s.floor = splat(b.floor[k]), s.ceiling = splat(b.ceiling[k]), s.zero = splat(b.zero[k]);
                s.outer = beyond;
                const int64_t length = FIXED ? FIXED : (left < n ? left : n);
                segment<Op, true, STATISTICS, false, FIXED>(op, s, from, to, length, here, sums, splat(0));
                here.index += (uint32_t)n;
                if (STATISTICS && (pending += length) >= FOLD) sums.fold(totals), pending = 0;
            }
        }
        if (STATISTICS) sums.fold(totals);
    }
    template <class Op, bool STATISTICS, bool SHORT>
    void blocks_of(const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, int count, bool exact_here,
                    Totals& totals) const {
        const bool full = SHORT && width == count * job.block_cols;
        if (full && job.block_cols == 32)
            return run_blocks<Op, STATISTICS, SHORT ? 32 : 0>(b, row, col, height, width, count, exact_here, totals);
        if (full && job.block_cols == 16)
            return run_blocks<Op, STATISTICS, SHORT ? 16 : 0>(b, row, col, height, width, count, exact_here, totals);
        run_blocks<Op, STATISTICS, 0>(b, row, col, height, width, count, exact_here, totals);
    }
    template <bool STATISTICS>
    void run_blocks(Choice choice, const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, int count,
                    Totals& totals) const {
        switch (choice) {
            case NARROW_PLAIN: return blocks_of<Narrow<false>, STATISTICS, true>(b, row, col, height, width, count, exact, totals);
            case NARROW_CLAMPED: return blocks_of<Narrow<true>, STATISTICS, true>(b, row, col, height, width, count, exact, totals);
            case SHIFTED_PLAIN: return blocks_of<Shifted<false>, STATISTICS, true>(b, row, col, height, width, count, shifted_exact(), totals);
            case SHIFTED_CLAMPED: return blocks_of<Shifted<true>, STATISTICS, true>(b, row, col, height, width, count, shifted_exact(), totals);
            case NOISY: return blocks_of<Noisy, STATISTICS, true>(b, row, col, height, width, count, exact, totals);
            case LEVELS: return blocks_of<Levels, STATISTICS, false>(b, row, col, height, width, count, false, totals);
            case COUNTED: return blocks_of<Counted<false>, STATISTICS, false>(b, row, col, height, width, count, exact, totals);
            case COUNTED_ASYMMETRIC: return blocks_of<Counted<true>, STATISTICS, false>(b, row, col, height, width, count, exact, totals);
            default: break;
        }
        for (int64_t i = 0; i < height; i++)
            for (int k = 0; k < count; k++) {
                int64_t first = k * job.block_cols, length = width - first < job.block_cols ? width - first : job.block_cols;
                general_stretch({b.encode + k, b.decode + k, b.zero + k, 0}, row + i, col + first, length, totals);
            }
    }
    bool shifted_exact() const { return g.mantissa_bits <= 7; }
    void run_blocks(Choice choice, const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, int count,
                    Totals& totals) const {
        statistics ? run_blocks<true>(choice, b, row, col, height, width, count, totals)
                   : run_blocks<false>(choice, b, row, col, height, width, count, totals);
    }

    void block_tile(int64_t row, int64_t col, int64_t height, int64_t width, Totals& totals) const {
        Blocks b;
        const int count = (int)((width + job.block_cols - 1) / job.block_cols);
        bool looked = false;
#if QUANTIZE_AVX512
        if (count % LANES == 0 && width == count * job.block_cols && !g.asymmetric) {
            looked = true;
            switch (job.block_cols) {
                case 16: short_maxima<16>(b, row, col, height, count); break;
                case 32: short_maxima<32>(b, row, col, height, count); break;
                case 64: short_maxima<64>(b, row, col, height, count); break;
                case 128: short_maxima<128>(b, row, col, height, count); break;
                default: looked = false;
            }
        }
#endif
        if (!looked) block_maxima(b, row, col, height, width, count);
        block_scales(job.rule, b, count);
        publish_rows(b, row, 1);
        Totals tile;
        int32_t largest, scaled;
        Choice choice = choose_blocks(b, count, largest, scaled);
        if (few()) choice = GENERAL;
        if (count == 1 && height == 1 && choice != SHIFTED_PLAIN && choice != SHIFTED_CLAMPED && choice != LEVELS)
            run_segment(choice, scale_of(b, 0), row, col, width, tile);
        else
            run_blocks(choice, b, row, col, height, width, count, tile);
        if (statistics && choice != GENERAL && !sums_hold(tile.signal, tile.noise) && largest != 0) {
            tile = Totals();
            choice = GENERAL;
            run_blocks(GENERAL, b, row, col, height, width, count, tile);
        }
        tile.amax = largest;
        const bool counted = choice == NARROW_CLAMPED || choice == SHIFTED_CLAMPED;
        if (statistics && !counted && (g.asymmetric || !(float_of(scaled) <= job.clip_threshold))) {
            vi clipped = splat(0);
            for (int k = 0; k < count; k++) {
                if (!g.asymmetric && float_of(b.amax[k]) * b.encode[k] <= job.clip_threshold) continue;
                int64_t first = k * job.block_cols, length = width - first < job.block_cols ? width - first : job.block_cols;
                for (int64_t i = 0; i < height; i++)
                    clipped = count_clipped(job, b.encode + k, b.zero + k, 0, x(row + i, col + first), length, clipped);
            }
            tile.clipped += total(clipped);
        }
        totals.add(tile);
    }
    Scale scale_of(const Blocks& b, int k) const {
        Scale s;
        s.encode = splat(b.encode[k]), s.decode = splat(b.decode[k]), s.zero = splat(b.zero[k]);
        s.floor = s.ceiling = splat(0.0f), s.outer = outer;
        return s;
    }

    // ---- blocks of one column: scales lie along the vectors --------------------------------------------------------

    template <class Op, bool MULTIPLY, bool STATISTICS>
    void run_columns(const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, bool exact_here,
                     Totals& totals) const {
        const Op op(g);
        const vf beyond = outer;
        Sums sums;
        int64_t pending = 0;
        for (int64_t i = 0; i < height; i++) {
            Place here = place(row + i, col, exact_here);
            const In* from = x(row + i, col);
            Out* to = out(row + i, col);
            auto scale = [&](int64_t k) {
                return Scale{load(b.encode + k), load(b.decode + k), load(b.floor + k), load(b.ceiling + k), load(b.zero + k),
                             beyond};
            };
            int64_t k = 0;
            for (; k + 2 * LANES <= width; k += 2 * LANES) {
                vf v = load(from + k), w = load(from + k + LANES);
                store(to + k, element<Op, MULTIPLY, STATISTICS>(op, scale(k), v, here.index, sums, 0), here.how);
                here.index += LANES;
                store(to + k + LANES, element<Op, MULTIPLY, STATISTICS>(op, scale(k + LANES), w, here.index, sums, 1), here.how);
                here.index += LANES;
            }
            for (; k < width; k += LANES, here.index += LANES) {
                const int64_t left = width - k;
                vf v = left < LANES ? load_part(from + k, left) : load(from + k);
                v = element<Op, MULTIPLY, STATISTICS>(op, scale(k), v, here.index, sums, 0);
                left < LANES ? store_part(to + k, v, here.how, left) : store(to + k, v, here.how);
            }
            if (STATISTICS) sums.lanes += (width + LANES - 1) / LANES * LANES;
            if (STATISTICS && (pending += width) >= FOLD) sums.fold(totals), pending = 0;
        }
        if (STATISTICS) sums.fold(totals);
    }
    template <class Op, bool STATISTICS>
    void run_columns(const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width, bool exact_here,
                     Totals& totals) const {
        if (job.multiply || moves_grid<Op>::value)
            return run_columns<Op, true, STATISTICS>(b, row, col, height, width, exact_here, totals);
        run_columns<Op, moves_grid<Op>::value, STATISTICS>(b, row, col, height, width, exact_here, totals);
    }
    template <bool STATISTICS>
    void run_columns(Choice choice, const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width,
                     Totals& totals) const {
        switch (choice) {
            case NARROW_PLAIN: return run_columns<Narrow<false>, STATISTICS>(b, row, col, height, width, exact, totals);
            case NARROW_CLAMPED: return run_columns<Narrow<true>, STATISTICS>(b, row, col, height, width, exact, totals);
            case SHIFTED_PLAIN: return run_columns<Shifted<false>, STATISTICS>(b, row, col, height, width, shifted_exact(), totals);
            case SHIFTED_CLAMPED: return run_columns<Shifted<true>, STATISTICS>(b, row, col, height, width, shifted_exact(), totals);
            case NOISY: return run_columns<Noisy, STATISTICS>(b, row, col, height, width, exact, totals);
            case LEVELS: return run_columns<Levels, STATISTICS>(b, row, col, height, width, false, totals);
            case COUNTED: return run_columns<Counted<false>, STATISTICS>(b, row, col, height, width, exact, totals);
            case COUNTED_ASYMMETRIC: return run_columns<Counted<true>, STATISTICS>(b, row, col, height, width, exact, totals);
            default: break;
        }
        for (int64_t i = 0; i < height; i++) general_stretch({b.encode, b.decode, b.zero, 1}, row + i, col, width, totals);
    }
    void run_columns(Choice choice, const Blocks& b, int64_t row, int64_t col, int64_t height, int64_t width,
                     Totals& totals) const {
        statistics ? run_columns<true>(choice, b, row, col, height, width, totals)
                   : run_columns<false>(choice, b, row, col, height, width, totals);
    }
    void column_tile(int64_t row, int64_t col, int64_t height, int64_t width, Totals& totals) const {
        Blocks b;
        const int padded = (int)((width + LANES - 1) / LANES * LANES);
        memset(b.amax, 0, 4 * padded);
        memset(b.low, 0, 4 * padded), memset(b.high, 0, 4 * padded);
        const int64_t whole_columns = g.asymmetric ? 0 : width / LANES * LANES;
        int64_t i = 0;
        for (; i + 4 <= height; i += 4)
            for (int64_t k = 0; k < whole_columns; k += LANES) {
                vi m;
                memcpy(&m, b.amax + k, sizeof m);
                m = larger(m, larger(magnitude(load(x(row + i, col + k))), magnitude(load(x(row + i + 1, col + k)))));
                m = larger(m, larger(magnitude(load(x(row + i + 2, col + k))), magnitude(load(x(row + i + 3, col + k)))));
                memcpy(b.amax + k, &m, sizeof m);
            }
        for (int64_t j = 0; j < height; j++) {
            const In* from = x(row + j, col);
            for (int64_t k = j < i ? whole_columns : 0; k < width; k += LANES) {
                vf v = k + LANES <= width ? load(from + k) : load_part(from + k, width - k);
                vi m;
                memcpy(&m, b.amax + k, sizeof m);
                m = larger(m, magnitude(v));
                memcpy(b.amax + k, &m, sizeof m);
                if (g.asymmetric) {
                    vf low = load(b.low + k), high = load(b.high + k);
                    low = v < low ? v : low, high = v > high ? v : high;
                    memcpy(b.low + k, &low, sizeof low), memcpy(b.high + k, &high, sizeof high);
                }
            }
        }
        for (int k = 0; g.asymmetric && k < padded; k++)
            if (b.amax[k] >= EXPONENT) b.high[k] = __builtin_inff();
        block_scales(job.rule, b, padded);
        publish_rows(b, col, (int)width);
        Totals tile;
        int32_t largest, scaled;
        Choice choice = choose_blocks(b, padded, largest, scaled);
        if (few()) choice = GENERAL;
        run_columns(choice, b, row, col, height, width, tile);
        if (statistics && choice != GENERAL && !sums_hold(tile.signal, tile.noise) && largest != 0) {
            tile = Totals();
            choice = GENERAL;
            run_columns(GENERAL, b, row, col, height, width, tile);
        }
        tile.amax = largest;
        const bool counted = choice == NARROW_CLAMPED || choice == SHIFTED_CLAMPED;
        if (statistics && !counted && (g.asymmetric || !(float_of(scaled) <= job.clip_threshold))) {
            vi clipped = splat(0);
            for (int64_t i = 0; i < height; i++)
                clipped = count_clipped(job, b.encode, b.zero, 1, x(row + i, col), width, clipped);
            tile.clipped += total(clipped);
        }
        totals.add(tile);
    }
    void publish_rows(const Blocks& b, int64_t first, int count) const {
        if (job.statistics && first == 0) job.statistics[5] = b.encode[0];
        if (!job.inverse || job.rule.rule == NVFP4) return;
        for (int k = 0; k < count; k++) job.inverse[first + k] = b.decode[k];
    }

    // ---- the matrix -----------------------------------------------------------------------------------------------

    template <class Work>
    void parallel(int64_t tasks, Work work, Totals& totals) const {
        if (job.threads <= 1 || tasks == 1) {
            for (int64_t t = 0; t < tasks; t++) {
                Totals part;
                work(t, part);
                totals.add(part);
            }
            return;
        }
        std::vector<Totals> parts(tasks);
#pragma omp parallel for num_threads(job.threads) schedule(static)
        for (int64_t t = 0; t < tasks; t++) work(t, parts[t]);
        for (const Totals& part : parts) totals.add(part);
    }

    void look() {  // the whole tensor's amax, before anything is written
        const int64_t pieces = (job.cols + TENSOR_TILE - 1) / TENSOR_TILE;
        Totals seen;
        parallel(job.rows * pieces, [&](int64_t t, Totals& part) {
            int64_t row = t / pieces, col = t % pieces * TENSOR_TILE;
            part.amax = horizontal_max(lane_amax(x(row, col), job.cols - col < TENSOR_TILE ? job.cols - col : TENSOR_TILE));
        }, seen);
        known_amax = seen.amax;
    }

#if QUANTIZE_AVX512
    // The same, with the maxima of blocks of 16, which cost nothing while memory is waited for.
    bool can_keep_maxima() const {
        return fast_group<In, Out>(job) == Fast::NVFP4 && job.cols % (blocks_in_group(16) * 16) == 0 && !few();
    }
    void look_at_blocks() {
        const int64_t pieces = (job.cols + CHUNK - 1) / CHUNK;
        Totals seen;
        parallel(job.rows * pieces, [&](int64_t t, Totals& part) {
            int64_t row = t / pieces, col = t % pieces * CHUNK, n = job.cols - col < CHUNK ? job.cols - col : CHUNK;
            int32_t* to = known_maxima + (row * job.cols + col) / 16;
            vi largest = splat(0);
            for (int64_t i = 0; i < n; i += 16 * LANES, to += LANES) {
                const vi amax = maxima_of_blocks<16, LANES>(x(row, col + i));
                largest = larger(largest, amax);
                memcpy(to, &amax, sizeof amax);
            }
            part.amax = horizontal_max(largest);
        }, seen);
        known_amax = seen.amax;
    }
#endif

    // The tensor's one scale; false where the scale of a block follows.
    void find_scale() {
        float encode = 1, decode = 1, zero = 0;
        if (job.rule.rule == GIVEN) {
            encode = *job.given, decode = 1.0f / encode;
        } else {
            look();
            int32_t reference = job.given ? bits_of(*job.given) : known_amax;
            if (job.rule.rule == ENCODE) {
                encode = encode_scales(job.rule, splat(reference))[0], decode = 1.0f / encode;
            } else {
                float extent = float_of(reference), low = -extent, high = extent;
                if (g.asymmetric) {
                    if (!job.given) {
                        low = high = 0;
                        for (int64_t row = 0; row < job.rows; row++) extremes(x(row, 0), job.cols, low, high);
                        if (known_amax >= EXPONENT) high = __builtin_inff();
                    }
                    extent = high - low;
                } else {
                    extent *= job.rule.margin_factor;
                }
                vf e, d, z;
                step_scales(job.rule, splat(extent), splat(low), e, d, z);
                encode = e[0], decode = d[0], zero = z[0];
            }
        }
        whole.encode = splat(encode), whole.decode = splat(decode), whole.zero = splat(zero);
        if (job.inverse) *job.inverse = decode;
        if (job.statistics) job.statistics[5] = encode;
    }

#if QUANTIZE_AVX512
    void run_in_groups(Fast fast, Totals& totals) const {
        const int64_t group = blocks_in_group(job.block_cols) * job.block_cols, chunk = CHUNK / group * group;
        const int64_t pieces = (job.cols + chunk - 1) / chunk;
        parallel(job.rows * pieces, [&](int64_t t, Totals& part) {
            const int64_t row = t / pieces, col = t % pieces * chunk;
            const int64_t n = job.cols - col < chunk ? job.cols - col : chunk;
            const int32_t* maxima = known_maxima ? known_maxima + (row * job.cols + col) / job.block_cols : nullptr;
            vi largest = splat(0);
            int64_t done = n < group ? 0 : group * run_groups(fast, job, x(row, col), out(row, col), n / group, maxima, largest);
            part.amax = horizontal_max(largest);
            for (; done < n; done += FLAT_TILE) block_tile(row, col + done, 1, n - done < FLAT_TILE ? n - done : FLAT_TILE, part);
        }, totals);
    }
#endif

    void run(Totals& totals) {
        if (!job.block_cols) {
            find_scale();
            const int64_t pieces = (job.cols + TENSOR_TILE - 1) / TENSOR_TILE;
            parallel(job.rows * pieces, [&](int64_t t, Totals& part) {
                int64_t row = t / pieces, col = t % pieces * TENSOR_TILE;
                scaled_tile(whole, row, col, job.cols - col < TENSOR_TILE ? job.cols - col : TENSOR_TILE, known_amax, part);
            }, totals);
            return;
        }
        const int64_t height = job.block_rows < job.rows ? job.block_rows : job.rows;
        const int64_t groups = (job.rows + height - 1) / height;
        int64_t width;
        if (job.block_cols == 1) {
            width = COLUMN_BYTES / (int64_t)sizeof(In) / height / LANES * LANES;
            width = width < LANES ? LANES : width > MAX_BLOCKS ? MAX_BLOCKS : width;
        } else {
            int64_t blocks = (height == 1 ? FLAT_TILE : DEEP_TILE) / height / job.block_cols;
            width = job.block_cols * (blocks < 1 ? 1 : blocks > MAX_BLOCKS ? MAX_BLOCKS : blocks);
        }
#if QUANTIZE_AVX512
        if (const Fast fast = fast_group<In, Out>(job); fast != Fast::NONE && !few())
            return run_in_groups(fast, totals);
#endif
        const int64_t pieces = (job.cols + width - 1) / width;
        parallel(groups * pieces, [&](int64_t t, Totals& part) {
            int64_t row = t / pieces * height, col = t % pieces * width;
            int64_t h = job.rows - row < height ? job.rows - row : height, w = job.cols - col < width ? job.cols - col : width;
            job.block_cols == 1 ? column_tile(row, col, h, w, part) : block_tile(row, col, h, w, part);
        }, totals);
    }
};

template <class In, class Out>
void run(Job& job) {
    std::unique_ptr<int32_t[]> maxima;
    if (job.rule.rule == NVFP4) {
        float amax;
        if (job.given) {
            amax = *job.given;
        } else {
            Engine<In, Out> first(job);
#if QUANTIZE_AVX512
            job.rule.outer = 1.0f;
            if (first.can_keep_maxima()) maxima.reset(new (std::nothrow) int32_t[job.rows * job.cols / 16]);
            first.known_maxima = maxima.get();
            maxima ? first.look_at_blocks() : first.look();
#else
            first.look();
#endif
            amax = float_of(first.known_amax);
        }
        job.rule.outer = nvfp4_outer(amax);
        if (job.inverse) *job.inverse = 1.0f / job.rule.outer;
    }
    Totals totals;
    Engine<In, Out> engine(job);
    engine.known_maxima = maxima.get();
    engine.run(totals);
    if (job.amax) *job.amax = float_of(totals.amax);
    if (job.statistics) {
        job.statistics[0] = (double)totals.nonzero, job.statistics[1] = (double)totals.clipped;
        job.statistics[2] = (double)(totals.nonzero - totals.kept);
        job.statistics[3] = totals.signal, job.statistics[4] = totals.noise;
    }
#if QUANTIZE_AVX512
    if (job.stream) _mm_sfence();
#endif
}

}  // namespace

extern "C" int64_t quantize_job_bytes() { return sizeof(Job); }

extern "C" void quantize(Job* given) {
    Job job = *given;
    if (job.in_bf16)
        job.out_bf16 ? run<bf16, bf16>(job) : run<bf16, float>(job);
    else
        job.out_bf16 ? run<float, bf16>(job) : run<float, float>(job);
}
