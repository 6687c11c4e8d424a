// Short blocks of consecutive elements, a group of eight to thirty-two at a time: while one group is rounded, the next one's
// maxima and scales are on their way and the one after it is fetched, so that neither memory nor a scale is waited for.
// The bits are those of `Engine::block_tile`, which does what `fast_group` or `look` refuses.
#pragma once

#include <type_traits>

#include "tiles.h"

#if QUANTIZE_AVX512

enum class Fast { NONE, MX, SHIFTED, NARROW, NVFP4, COUNTED };

// How a job's blocks can be done here; BF16 to FP32 is not worth the code.
template <class In, class Out>
Fast fast_group(const Job& job) {
    const Grid& g = job.grid;
    const ScaleRule& r = job.rule;
    if (job.statistics || job.block_rows != 1 || !job.multiply || (is_bf16<In> && !is_bf16<Out>)) return Fast::NONE;
    if (g.rounding != NEAREST || g.asymmetric) return Fast::NONE;
    const bool usual = job.block_cols == 32 || job.block_cols == 128;
    if (g.kind == WHOLE) return g.before == 1.0f && r.rule == STEP && usual ? Fast::COUNTED : Fast::NONE;
    if (g.kind != NARROW || g.mantissa_bits > 7) return Fast::NONE;
    if (r.rule == NVFP4) return job.block_cols == 16 && r.outer > 0x1p-100f && r.outer < 0x1p100f ? Fast::NVFP4 : Fast::NONE;
    if (r.rule == MX) return job.block_cols == 32 && !g.special ? Fast::MX : Fast::NONE;
    if (!usual) return Fast::NONE;
    return !r.power_of_two ? Fast::NARROW : g.special ? Fast::NONE : Fast::SHIFTED;
}
constexpr int blocks_in_group(int64_t length) { return length < 32 ? 32 : length < 64 ? 16 : 8; }
constexpr int MAX_GROUP = 32;

// What the blocks of a group have, and whether the fast operation holds for all of them.
struct Factors {
    alignas(64) float first[MAX_GROUP], second[MAX_GROUP];  // encode and decode, or floor and ceiling where the grid moves to x
    bool holds;
};

// Largest magnitudes of 8 or 16 blocks of N elements; zero in the lanes that are left.
template <int N, int BLOCKS, class In>
__attribute__((always_inline)) inline vi maxima_of_blocks(const In* x) {
    __m256i blocks[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) blocks[k] = folded<N>(x + k * N);
    const __m512i low = _mm512_zextsi256_si512(maxima(blocks));
    if (BLOCKS == 8) return (vi)low;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) blocks[k] = folded<N>(x + (k + 8) * N);
    return (vi)_mm512_inserti64x4(low, maxima(blocks), 1);
}

// KNOWN: the blocks' maxima were looked up before.
template <class In, class Out, int N, Fast FAST, bool KNOWN>
struct Groups {
    static constexpr bool SHIFTS = FAST == Fast::MX || FAST == Fast::SHIFTED, EXACT = SHIFTS || FAST == Fast::NVFP4;
    static constexpr int BLOCKS = blocks_in_group(N);
    static constexpr int64_t SIZE = BLOCKS * N, WRITE_AHEAD = 512;  // elements
    using Op = std::conditional_t<SHIFTS, Shifted<true>, std::conditional_t<FAST == Fast::COUNTED, Counted<false>, Narrow<false>>>;

    const ScaleRule rule;
    const Op op;
    const float most;                // scaled magnitudes that the operation takes
    const int32_t lowest, highest;   // decode factors that it takes, as bits
    const int32_t carry, to_decode;  // from an MX block's maximum to its decode factor
    const float floor, ceiling;
    vf encodes;  // NVFP4: the tensor's scale over 1, 1.125 to 1.875, twice

    explicit Groups(const Job& job)
        : rule(job.rule), op(job.grid), most(SHIFTS ? 0x1.fffffep127f : job.safe), lowest(lowest_decode(job.grid)),
          highest(highest_decode(job.grid)), carry(carry_of(job.rule)), to_decode(job.rule.emax << 23),
          floor(job.grid.min_normal), ceiling(clamp_for(job.grid)) {
        for (int k = 0; k < LANES; k++) encodes[k] = rule.outer / (1.0f + 0.125f * (k % 8));
    }

    // Floors are normal in FP32 and no intermediate value overflows; BF16 results are not subnormal.
    static int32_t lowest_decode(const Grid& g) {
        if (SHIFTS) return (-126 - exponent(g.min_normal) + 127) << 23;
        const int32_t quantum = g.kind == WHOLE ? 0 : exponent(g.min_normal) - g.mantissa_bits;
        return !EXACT && is_bf16<Out> ? (-126 - quantum + 127) << 23 : 0;
    }
    static int32_t highest_decode(const Grid& g) {
        return SHIFTS ? (126 - 24 + g.mantissa_bits - exponent(g.max) + 127) << 23 : EXPONENT;
    }
    static int32_t exponent(float v) { return (bits_of(v) >> 23) - 127; }
    // Added to a maximum it reaches the next power of two where `mx_exponents` goes up.
    static int32_t carry_of(const ScaleRule& rule) {
        if (rule.scale_rounding == UP) return 0x7fffff - rule.top_fraction;
        return rule.scale_rounding == EVEN ? 1 << (22 - rule.mantissa_bits) : 0;
    }

    // Lanes of `some` whose v is not in [low, high], signs and NaN included.
    static __mmask16 outside(__mmask16 some, vi v, int32_t low, int32_t high) {
        return _mm512_mask_cmp_epu32_mask(some, (__m512i)(v - low), _mm512_set1_epi32(high - low), _MM_CMPINT_NLE);
    }

    // The definitions of `scales_of` without its divisions: by six with a correction of the last bit, and by an E4M3
    // number as one of eight quotients and a power of two.
    __attribute__((always_inline)) void nvfp4_scales(vi amax, vf& encode, vf& decode) const {
        const __m512 sixth = _mm512_set1_ps(1.0f / 6.0f), a = (__m512)amax;
        const __m512 estimate = _mm512_mul_ps(a, sixth), rest = _mm512_fnmadd_ps(estimate, _mm512_set1_ps(6.0f), a);
        decode = round_to_e4m3((vf)_mm512_fmadd_ps(rest, sixth, estimate) * rule.outer);
        const __m512i bits = (__m512i)decode;
        const vi quotient = (vi)_mm512_permutexvar_ps(_mm512_srli_epi32(bits, 20), (__m512)encodes) - (((vi)decode & EXPONENT) - bits_of(1.0f));
        encode = (vf)_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(bits, bits), (__m512i)quotient);
    }

    // Maxima and factors of the group at `x`; `largest` is raised to the maxima.
    __attribute__((always_inline)) void look(const In* x, const int32_t* known, Factors& f, vi& largest) const {
        f.holds = look_at<0>(x, known, f, largest);
        if (BLOCKS > LANES) f.holds &= look_at<LANES>(x, known, f, largest);
    }
    template <int FIRST>
    __attribute__((always_inline)) bool look_at(const In* x, const int32_t* known, Factors& f, vi& largest) const {
        vi amax;
        if (KNOWN)
            memcpy(&amax, known + FIRST, sizeof amax);
        else
            amax = maxima_of_blocks<N, (BLOCKS < LANES ? BLOCKS : LANES)>(x + FIRST * N);
        largest = larger(largest, amax);
        const __mmask16 some = _mm512_test_epi32_mask((__m512i)amax, (__m512i)amax);
        if (FAST == Fast::MX) {
            const vi decode = ((amax + carry) & EXPONENT) - to_decode;  // of a block of zeros any will do
            put(f.first + FIRST, (vf)decode * floor), put(f.second + FIRST, (vf)decode * ceiling);
            return !outside(some, decode, lowest, highest);
        }
        vf encode, decode, zero;
        __mmask16 bad;
        if (FAST == Fast::NVFP4) {
            nvfp4_scales(amax, encode, decode);
            bad = outside(some, amax, bits_of(0x1p-100f), EXPONENT - 1);
        } else {
            scales_of(rule, amax, splat(0.0f), splat(0.0f), encode, decode, zero);
            bad = outside(some, (vi)decode, lowest, highest);
        }
        put(f.first + FIRST, SHIFTS ? decode * floor : encode), put(f.second + FIRST, SHIFTS ? decode * ceiling : decode);
        const vi scaled = magnitude((vf)amax * encode);  // a NaN's bits are above any limit
        return !(bad | _mm512_cmp_epi32_mask((__m512i)scaled, _mm512_set1_epi32(bits_of(most)), _MM_CMPINT_NLE));
    }

    __attribute__((always_inline)) vf rounded(vf first, vf second, vf v) const {
        Scale s{};
        if (SHIFTS) {
            s.floor = first, s.ceiling = second;
            return op.grid(s, v, vu{});
        }
        s.encode = first, s.decode = second;
        return op.grid(s, v, vu{}) * second;
    }

    static void put_two(Out* to, vf v, vf w, bool stream) {
#if defined(__AVX512BF16__)
        if constexpr (!EXACT && is_bf16<Out>) {  // the instruction takes subnormals for zero: `lowest`
            alignas(64) static constexpr uint16_t zipped[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)w, (__m512)v);
            if (Pair<In, Out>::SPLIT) both = _mm512_permutexvar_epi16(_mm512_load_si512(zipped), both);
            return stream ? _mm512_stream_si512((__m512i*)to, both) : _mm512_storeu_si512(to, both);
        }
#endif
        Pair<In, Out>::store_two(to, v, w, {stream, EXACT});
    }

    template <bool STREAM>
    __attribute__((always_inline)) void round(const In* x, Out* out, const Factors& f) const {
        const Groups self = *this;  // a store must not seem to change it
        for (int k = 0; k < BLOCKS; k += N < 2 * LANES ? 2 : 1) {
            vf first = splat(f.first[k]), second = splat(f.second[k]), third = first, fourth = second;
            if (N < 2 * LANES) third = splat(f.first[k + 1]), fourth = splat(f.second[k + 1]);
            if (N < 2 * LANES && Pair<In, Out>::SPLIT)  // even and odd elements of two blocks
                first = third = halves(first, third), second = fourth = halves(second, fourth);
#pragma GCC unroll 2
            for (int i = 0; i < (N < 2 * LANES ? 2 * LANES : N); i += 2 * LANES) {
                const In* from = x + k * N + i;
                Out* to = out + k * N + i;
                __builtin_prefetch(from + 2 * SIZE);
                if (!is_bf16<In>) __builtin_prefetch(from + 2 * SIZE + LANES);
                if (!STREAM) __builtin_prefetch(to + WRITE_AHEAD, 1);
                if (!STREAM && !is_bf16<Out>) __builtin_prefetch(to + WRITE_AHEAD + LANES, 1);
                vf v, w;
                Pair<In, Out>::load_two(from, v, w);
                v = self.rounded(first, second, v), w = self.rounded(third, fourth, w);
                put_two(to, v, w, STREAM);
            }
        }
    }
    static vf halves(vf low, vf high) { return (vf)_mm512_mask_blend_ps(0xff00, (__m512)low, (__m512)high); }

    // At most `count` groups, up to one that is refused; returns how many. `largest` is raised to their magnitudes.
    template <bool STREAM>
    int64_t run(const In* x, Out* out, int64_t count, const int32_t* known, vi& largest) const {
        Factors f[2];
        look(x, known, f[0], largest);
        for (int64_t i = 0; i < count; i++) {
            if (!f[i & 1].holds) return i;
            if (i + 1 < count) look(x + (i + 1) * SIZE, known + (i + 1) * BLOCKS, f[(i + 1) & 1], largest);
            round<STREAM>(x + i * SIZE, out + i * SIZE, f[i & 1]);
        }
        return count;
    }
};

template <Fast FAST, int N, bool KNOWN = false, class In, class Out>
int64_t run_groups(const Job& job, const In* x, Out* out, int64_t count, const int32_t* known, vi& largest) {
    const Groups<In, Out, N, FAST, KNOWN> groups(job);
    return job.stream ? groups.template run<true>(x, out, count, known, largest)
                      : groups.template run<false>(x, out, count, known, largest);
}
// `known`: the blocks' maxima, or null.
template <class In, class Out>
int64_t run_groups(Fast fast, const Job& job, const In* x, Out* out, int64_t count, const int32_t* known, vi& largest) {
    if constexpr (!(is_bf16<In> && !is_bf16<Out>)) {
        const bool short_ones = job.block_cols == 32;
        switch (fast) {
            case Fast::MX: return run_groups<Fast::MX, 32>(job, x, out, count, known, largest);
            case Fast::NVFP4:
                return known ? run_groups<Fast::NVFP4, 16, true>(job, x, out, count, known, largest)
                             : run_groups<Fast::NVFP4, 16>(job, x, out, count, known, largest);
            case Fast::SHIFTED:
                return short_ones ? run_groups<Fast::SHIFTED, 32>(job, x, out, count, known, largest)
                                  : run_groups<Fast::SHIFTED, 128>(job, x, out, count, known, largest);
            case Fast::NARROW:
                return short_ones ? run_groups<Fast::NARROW, 32>(job, x, out, count, known, largest)
                                  : run_groups<Fast::NARROW, 128>(job, x, out, count, known, largest);
            case Fast::COUNTED:
                return short_ones ? run_groups<Fast::COUNTED, 32>(job, x, out, count, known, largest)
                                  : run_groups<Fast::COUNTED, 128>(job, x, out, count, known, largest);
            default: break;
        }
    }
    return 0;
}

#endif
