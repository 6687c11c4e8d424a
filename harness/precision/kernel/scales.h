// From a block's maximum to its scale; the PyTorch twin in harness/precision/scales.py has the same definitions.
#pragma once

#include "rounding.h"

enum Rule { GIVEN, ENCODE, STEP, MX, NVFP4 };
enum ScaleRounding { FLOOR, UP, EVEN };

struct ScaleRule {
    int32_t rule, scale_rounding, power_of_two;
    int32_t emax;        // power of two of the largest value; with `mantissa_bits` and `top` for MX
    int32_t mantissa_bits, top_fraction;
    float dividend;      // the format's maximum over 2^margin
    float margin_factor;  // 2^margin
    float max;
    int32_t asymmetric;
    float outer;         // NVFP4's scale of the tensor
};

constexpr int MAX_BLOCKS = 256;

// What a tile's blocks have: in the maximum's bits (NaN is above infinity), out the factors of each.
struct Blocks {
    alignas(64) int32_t amax[MAX_BLOCKS];
    alignas(64) float low[MAX_BLOCKS], high[MAX_BLOCKS];
    alignas(64) float encode[MAX_BLOCKS], decode[MAX_BLOCKS], zero[MAX_BLOCKS], floor[MAX_BLOCKS], ceiling[MAX_BLOCKS];
};

inline vf bounded(vf v, float low, float high) {
    v = v < low ? splat(low) : v;
    return v > high ? splat(high) : v;
}
inline vi bits_if(bool condition, int32_t bits) { return splat(condition ? bits : 0); }

inline vf encode_scales(const ScaleRule& rule, vi amax) {
    const vi usable = (amax > 0) & (amax < EXPONENT);
    const vi kept = rule.power_of_two ? splat(EXPONENT) : splat(-1);
    vf scale = either(usable, splat(rule.dividend) / (vf)amax, splat(1.0f));
    return bounded((vf)((vi)scale & kept), 0x1p-120f, 0x1p120f);
}

// `extent` is NaN or infinite where the data are.
inline void step_scales(const ScaleRule& rule, vf extent, vf low, vf& encode, vf& step, vf& zero) {
    step = extent / rule.max;
    const vi usable = (extent > 0.0f) & ((vi)step < EXPONENT);
    step = either(usable, step < 0x1p-126f ? splat(0x1p-126f) : step, splat(1.0f));
    encode = 1.0f / step;
    if (rule.power_of_two) {
        encode = (vf)((vi)encode & EXPONENT);
        step = 1.0f / encode;
    }
    zero = splat(0.0f);
    if (rule.asymmetric) {
        const vf shift = splat(8388608.0f);
        vf z = bounded(-low / step, 0.0f, rule.max);
        zero = either(usable, (z + shift) - shift, zero);
    }
}

inline vi mx_exponents(const ScaleRule& rule, vi amax) {
    // subnormals are lifted by 2^30 so that they too have an exponent field
    const vi small = amax < bits_of(0x1p-100f);
    vi bits = small ? (vi)((vf)amax * 0x1p30f) : amax;
    bits += bits_if(rule.scale_rounding == EVEN && rule.mantissa_bits < 23, 1 << (22 - rule.mantissa_bits % 23));
    vi exponent = (bits >> 23) - (127 + rule.emax) + (small & -30);
    exponent -= ((bits & 0x7fffff) > rule.top_fraction) & bits_if(rule.scale_rounding == UP, -1);
    exponent = smaller(larger(exponent, splat(-127)), splat(127));
    return amax == 0 ? splat(-127) : exponent;
}

inline vf powers_of_two(vi exponent) {
    return (vf)(exponent > -127 ? (exponent + 127) << 23 : splat(0x00400000));
}

inline vf round_to_e4m3(vf v) {  // v >= 0 or NaN; saturating
    v = v > 448.0f ? splat(448.0f) : v;
    vf shift = (vf)larger((vi)v & EXPONENT, splat(bits_of(0x1p-6f))) * 0x1.8p20f;
    return (v + shift) - shift;
}

inline void put(float* to, vf v) { memcpy(to, &v, sizeof v); }

// Factors of LANES blocks. `low` and `high`: their smallest and largest values, for asymmetric formats.
__attribute__((always_inline)) inline void scales_of(const ScaleRule& rule, vi amax, vf low, vf high, vf& encode, vf& decode, vf& zero) {
    zero = splat(0.0f);
    if (rule.rule == MX) {
        const vi exponent = mx_exponents(rule, amax);
        encode = either(amax < EXPONENT, powers_of_two(-exponent), (vf)splat(QUIET_NAN));
        decode = powers_of_two(exponent);
    } else if (rule.rule == NVFP4) {
        decode = round_to_e4m3(((vf)amax / 6.0f) * rule.outer);
        decode = either(decode == decode, decode, (vf)splat(QUIET_NAN));  // a full payload would carry into the sign
        encode = either(decode > 0.0f, rule.outer / decode, splat(0.0f));
    } else if (rule.rule == STEP) {
        const vf extent = rule.asymmetric ? high - low : (vf)amax * rule.margin_factor;
        step_scales(rule, extent, low, encode, decode, zero);
    } else {
        encode = encode_scales(rule, amax);
        decode = 1.0f / encode;
    }
}

// `count` is rounded up to whole vectors.
inline void block_scales(const ScaleRule& given, Blocks& b, int count) {
    const ScaleRule rule = given;
    for (int k = 0; k < count; k += LANES) {
        vi amax;
        memcpy(&amax, b.amax + k, sizeof amax);
        vf encode, decode, zero;
        scales_of(rule, amax, load(b.low + k), load(b.high + k), encode, decode, zero);
        put(b.encode + k, encode), put(b.decode + k, decode), put(b.zero + k, zero);
    }
}

inline float nvfp4_outer(float amax) {
    bool usable = amax > 0 && bits_of(amax) < EXPONENT;
    float outer = usable ? (6.0f * 448.0f) / amax : 1.0f;
    outer = outer < 0x1p-118f ? 0x1p-118f : outer;
    return outer > 0x1p118f ? 0x1p118f : outer;
}
