// Roundings of a vector of scaled values, one struct each; the PyTorch twin in harness/precision/rounding.py has the
// same definitions. `grid` takes x and its scale and returns the value on the format's grid, before the inverse scale.
//
// Narrow, Noisy, Shifted, Counted, Levels and Bits are the fast ones: they need what `choose` in quantize.cpp checks for each tile.
// `general` takes everything: NaN, infinities, overflow, every mantissa width and rounding.
#pragma once

#include "vectors.h"

enum Kind { NARROW, WIDE, WHOLE, TABLE };
enum Rounding { NEAREST, STOCHASTIC, HALF_AWAY };

// What stays the same over a tensor.
struct Grid {
    int32_t kind, rounding, special, mantissa_bits;
    float max;         // largest value; of whole numbers too
    float min_normal;
    float beyond;      // what `special` overflow becomes: infinity or NaN
    float before, after;  // exact factors around whole numbers: 64 and 1/64 for MXINT8
    int32_t asymmetric, num_levels;
    const float *levels, *edges;
    uint32_t key0, key1;
};

// The scale of a block, in all lanes, or of LANES columns. `floor` is the smallest normal and `ceiling` a
// little more than the largest value, both in x's own units where a power-of-two scale lets rounding happen there.
struct Scale {
    vf encode, decode, floor, ceiling, zero;
    vf outer;  // what a value still lacks to be the dequantised one, for the statistics
};

// Adds 1.5 * 2^(e + 23 - M) and takes it away, where 2^e is the value's power of two, at least the smallest normal: the
// FP32 adder rounds to M mantissa bits, ties to even.
inline vf add_and_subtract(vf v, vi min_normal, int32_t raise) {
    vf shift = (vf)(larger((vi)v & EXPONENT, min_normal) + raise);
    return with_sign((v + shift) - shift, v);
}
inline int32_t raise_for(int mantissa_bits) { return ((23 - mantissa_bits) << 23) + 0x400000; }

// The same with 1.5 * 2^(23 - M) as a factor: fused, the product is exact either way.
inline vf to_mantissa(vf v, vf least, vf lift) {
    vf power = (vf)larger((vi)v & EXPONENT, (vi)least);
#if QUANTIZE_AVX512
    vf r = (vf)_mm512_fnmadd_ps((__m512)power, (__m512)lift, _mm512_fmadd_ps((__m512)power, (__m512)lift, (__m512)v));
#else
    vf shift = power * lift;
    vf r = (v + shift) - shift;
#endif
    return with_sign(r, v);
}
inline vf lift_for(int mantissa_bits) { return splat(1.5f * float_of((127 + 23 - mantissa_bits) << 23)); }
// What is clamped to a little more than the maximum, so that it shows what was clipped, rounds to it.
inline float clamp_for(const Grid& g) { return g.max * (1 + 0x1p-22f); }

// The fast operations copy what they need of the grid: the compiler must not think that storing a result changes it.
template <bool CLAMP>
struct Narrow {
    static constexpr bool CLAMPS = CLAMP;
    const vf most, least, lift;
    explicit Narrow(const Grid& g)
        : most(splat(clamp_for(g))), least(splat(g.min_normal)), lift(lift_for(g.mantissa_bits)) {}
    vf grid(const Scale& s, vf x, vu) const {
        vf y = x * s.encode;
        if (CLAMP) y = clamp_magnitude(y, most);
        return to_mantissa(y, least, lift);
    }
    vi count_clipped(const Scale& s, vf x, vi count) const {
        vf y = x * s.encode;
        return count_different(y, clamp_magnitude(y, most), count);
    }
};

// Power-of-two scales: the grid is moved to x instead of x to the grid, which saves both multiplications.
template <bool CLAMP>
struct Shifted {
    static constexpr bool IN_PLACE = true, CLAMPS = CLAMP;
    const vf lift;
    explicit Shifted(const Grid& g) : lift(lift_for(g.mantissa_bits)) {}
    vf grid(const Scale& s, vf x, vu) const {
        if (CLAMP) x = clamp_magnitude(x, s.ceiling);
        return to_mantissa(x, s.floor, lift);
    }
    vi count_clipped(const Scale& s, vf x, vi count) const {
        return count_different(x, clamp_magnitude(x, s.ceiling), count);
    }
};

// Whole numbers within +-2^22.
template <bool ASYMMETRIC>
struct Counted {
    const float max;
    explicit Counted(const Grid& g) : max(g.max) {}
    vf grid(const Scale& s, vf x, vu) const {
        const vf shift = splat(12582912.0f);
        vf q = (x * s.encode + shift) - shift;
        if (!ASYMMETRIC) return q;
        q += s.zero;
        q = q < 0.0f ? splat(0.0f) : q;
        q = q > max ? splat(max) : q;
        return q - s.zero;
    }
};

inline vu noise_before_last_step(uint32_t key0, uint32_t key1, vu index) {
    vu z = index ^ key0;
    z = (z ^ (z >> 16)) * 0x7feb352du;
    z = xor3(z, z >> 15, vu{} + key1);
    return z * 0x846ca68bu;
}
inline vu noise_bits(const Grid& g, vu index) {
    vu z = noise_before_last_step(g.key0, g.key1, index);
    return z ^ (z >> 16);
}

// FP32's exponent range, scale 1, nothing above the maximum: the bits are rounded as integers, sign and all.
template <int ROUNDING>
struct Bits {
    const int dropped;
    const uint32_t key0, key1;
    explicit Bits(const Grid& g) : dropped(23 - g.mantissa_bits), key0(g.key0), key1(g.key1) {}
    vf grid(const Scale&, vf x, vu index) const {
        vu bits = (vu)x;
        if (ROUNDING == NEAREST)
            bits += ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1);
        else  // the hash's last step changes only its lower 16 bits
            bits += noise_before_last_step(key0, key1, index) >> (32 - dropped);
        return (vf)(bits & (~0u << dropped));
    }
};

// A table of at most 16 levels, 0 among them, by halving: the index of a value's level grows by 8, 4, 2 and 1.
struct Levels {
    const Grid& g;
#if QUANTIZE_AVX512
    __m512 levels, edges;
    explicit Levels(const Grid& given) : g(given) {
        const __mmask16 known = (__mmask16)((1u << g.num_levels) - 1);
        levels = _mm512_maskz_loadu_ps(known, g.levels);
        edges = _mm512_mask_loadu_ps(_mm512_set1_ps(__builtin_inff()), (__mmask16)(known >> 1), g.edges);
    }
    vf grid(const Scale& s, vf x, vu) const {
        const __m512 y = (__m512)(x * s.encode);
        __m512i index = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int step = 8; step; step /= 2) {
            const __m512 edge = _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(step - 1)), edges);
            index = _mm512_mask_add_epi32(index, _mm512_cmp_ps_mask(y, edge, _CMP_GT_OQ), index, _mm512_set1_epi32(step));
        }
        return (vf)_mm512_permutexvar_ps(index, levels);
    }
#else
    explicit Levels(const Grid& given) : g(given) {}
    vf grid(const Scale& s, vf x, vu) const {
        const vf y = x * s.encode;
        vf r = splat(g.levels[0]);
        for (int k = 1; k < g.num_levels; k++) r = y > g.edges[k - 1] ? splat(g.levels[k]) : r;
        return r;
    }
#endif
};

// Stochastic rounding of narrow formats: the magnitude over its quantum is cut off after 24 random bits are added.
struct Noisy {
    const vf max;
    const vi min_normal;
    const float per_power, back;
    const uint32_t key0, key1;
    explicit Noisy(const Grid& g)
        : max(splat(g.max)), min_normal(splat(bits_of(g.min_normal))), per_power(float_of((127 + g.mantissa_bits) << 23)),
          back(float_of((127 - g.mantissa_bits) << 23)), key0(g.key0), key1(g.key1) {}
    vf grid(const Scale& s, vf x, vu index) const {
        const vf c = clamp_magnitude(x * s.encode, max);
        const vi power = larger((vi)c & EXPONENT, min_normal);
        const vf v = (vf)magnitude(c) * ((vf)(0x7f000000 - power) * per_power);
        const vf whole = __builtin_convertvector(__builtin_convertvector(v, vi), vf);
        vu z = noise_before_last_step(key0, key1, index);
        const vf uniform = __builtin_convertvector((vi)((z ^ (z >> 16)) >> 8), vf) * 0x1p-24f;
        const vf up = (vf)((vi)splat(1.0f) & (uniform < v - whole));
        return with_sign((whole + up) * ((vf)power * back), c);
    }
};

inline vf floor_of_small(vf v) { return __builtin_convertvector(__builtin_convertvector(v, vi), vf); }

// Whole part of v in [0, 2^24], rounded.
template <int ROUNDING>
vf whole_part(const Grid& g, vf v, vu index) {
    if (ROUNDING == NEAREST) {
        const vf shift = splat(8388608.0f);
        return either(v < shift, (v + shift) - shift, v);
    }
    vf whole = floor_of_small(v), remainder = v - whole;
    vi up;
    if (ROUNDING == HALF_AWAY) {
        up = remainder >= 0.5f;
    } else {
        vf uniform = __builtin_convertvector((vi)(noise_bits(g, index) >> 8), vf) * 0x1p-24f;
        up = uniform < remainder;
    }
    return whole + either(up, splat(1.0f), splat(0.0f));
}

template <int ROUNDING>
vf general_narrow(const Grid& g, vf y, vu index) {
    // 2^(emax + 1) is the first power above: what rounds up to it or beyond the maximum is out of range
    vf limit = splat(g.special ? float_of((bits_of(g.max) & EXPONENT) + 0x800000) : g.max);
    vf c = clamp_magnitude(y, limit), r;
    if (ROUNDING == NEAREST && g.mantissa_bits <= 21) {
        r = add_and_subtract(c, splat(bits_of(g.min_normal)), raise_for(g.mantissa_bits));
    } else {
        vi power = larger((vi)c & EXPONENT, splat(bits_of(g.min_normal)));
        vf inverse = (vf)(0x7f000000 - power);
        float per_power = float_of((127 + g.mantissa_bits) << 23), back = float_of((127 - g.mantissa_bits) << 23);
        vf whole = whole_part<ROUNDING>(g, (vf)magnitude(c) * (inverse * per_power), index);
        r = with_sign(whole * ((vf)power * back), c);
    }
    if (g.special) r = either(magnitude(r) > bits_of(g.max), with_sign(splat(g.beyond), r), r);
    return r;
}

template <int ROUNDING>
vf general_wide(const Grid& g, vf y, vu index) {
    const int dropped = 23 - g.mantissa_bits;
    vi m = smaller(magnitude(y), splat(EXPONENT));
    if (dropped > 0) {
        const int half = 1 << (dropped - 1);
        if (ROUNDING == NEAREST) {
            vi last = m >> dropped;
            m += (half - 1) + (dropped == 23 ? smaller(last, splat(1)) : last & 1);
        } else if (ROUNDING == HALF_AWAY) {
            m += half;
        } else {
            m += (vi)(noise_bits(g, index) >> (32 - dropped));
        }
        m &= -(1 << dropped);
    }
    if (g.special)
        m = m > bits_of(g.max) ? splat(bits_of(g.beyond)) : m;
    else
        m = smaller(m, splat(bits_of(g.max)));
    return (vf)(m | ((vi)y & SIGN));
}

template <int ROUNDING>
vf general_whole(const Grid& g, vf y, vf zero, vu index) {
    vf c = clamp_magnitude(y, splat(g.asymmetric ? 2 * g.max : g.max));  // rounding then moves nothing across
    vf r = with_sign(whole_part<ROUNDING>(g, (vf)magnitude(c), index), c) + 0.0f;  // -0 + 0 = 0
    if (g.asymmetric) {
        r += zero;
        r = r < 0.0f ? splat(0.0f) : r;
        r = r > g.max ? splat(g.max) : r;
        r -= zero;
    }
    return r * g.after;
}

inline vf general_table(const Grid& g, vf y) {
    vf r = splat(g.levels[0]);
    for (int k = 1; k < g.num_levels; k++) r = y > g.edges[k - 1] ? splat(g.levels[k]) : r;
    return r;
}

// The general operation on a stretch of elements with a scale each: y = x * encode, and r on the grid.
template <int KIND, int ROUNDING>
void general(const Grid& given, const float* x, const float* encode, const float* zero, float* r, int count, uint32_t first) {
    const Grid g = given;
    vu index = lane_numbers() + first;
    for (int i = 0; i < count; i += LANES, index += LANES) {
        vf y = load(x + i) * load(encode + i), v;
        if (KIND == NARROW) v = general_narrow<ROUNDING>(g, y, index);
        if (KIND == WIDE) v = general_wide<ROUNDING>(g, y, index);
        if (KIND == WHOLE) v = general_whole<ROUNDING>(g, y * g.before, load(zero + i), index);
        if (KIND == TABLE) v = general_table(g, y);
        v = either(y == y, v, (vf)splat(QUIET_NAN));
        memcpy(r + i, &v, sizeof v);
    }
}

using GeneralFunction = void (*)(const Grid&, const float*, const float*, const float*, float*, int, uint32_t);

inline GeneralFunction general_function(const Grid& g) {
    static const GeneralFunction functions[4][3] = {
        {general<NARROW, NEAREST>, general<NARROW, STOCHASTIC>, general<NARROW, HALF_AWAY>},
        {general<WIDE, NEAREST>, general<WIDE, STOCHASTIC>, general<WIDE, HALF_AWAY>},
        {general<WHOLE, NEAREST>, general<WHOLE, STOCHASTIC>, general<WHOLE, HALF_AWAY>},
        {general<TABLE, NEAREST>, general<TABLE, NEAREST>, general<TABLE, NEAREST>},
    };
    return functions[g.kind][g.rounding];
}
