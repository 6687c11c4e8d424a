// Vectors of FP32 lanes in GCC's and clang's portable extension, as wide as the machine's registers.
// Intrinsics stand behind __AVX512*__ where one instruction does the work of several; the bits are the same without.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && !defined(QUANTIZE_PORTABLE)
#define QUANTIZE_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

constexpr int32_t SIGN = INT32_MIN, MAGNITUDE = 0x7fffffff, EXPONENT = 0x7f800000, QUIET_NAN = 0x7fc00000;

inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#if QUANTIZE_AVX512
inline vf splat(float value) { return (vf)_mm512_set1_ps(value); }
inline vi splat(int32_t value) { return (vi)_mm512_set1_epi32(value); }
#else
inline vf splat(float value) { return vf{} + value; }
inline vi splat(int32_t value) { return vi{} + value; }
#endif
inline vu lane_numbers() {
    static const uint32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vu v;
    memcpy(&v, numbers, sizeof v);
    return v;
}
inline vi larger(vi a, vi b) { return a > b ? a : b; }
inline vi smaller(vi a, vi b) { return a < b ? a : b; }
inline vi magnitude(vf v) { return (vi)v & MAGNITUDE; }
inline vf with_sign(vf value, vf sign) {  // of a value that has none, or the same
#if QUANTIZE_AVX512
    return (vf)_mm512_ternarylogic_epi32((__m512i)value, (__m512i)sign, _mm512_set1_epi32(SIGN), 0xf8);
#else
    return (vf)((vi)value | ((vi)sign & SIGN));
#endif
}
inline vu xor3(vu a, vu b, vu c) {
#if QUANTIZE_AVX512
    return (vu)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
    return a ^ b ^ c;
#endif
}
inline vf either(vi mask, vf a, vf b) { return mask ? a : b; }

inline vf load(const float* from) {
    vf v;
    memcpy(&v, from, sizeof v);
    return v;
}
inline vf load(const bf16* from) {
    vh half;
    memcpy(&half, from, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
// The first `count` lanes. Without a call to memcpy: it would force the loops around it out of their registers.
inline vf load_part(const float* from, int64_t count) {
#if QUANTIZE_AVX512
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    vf v = splat(0.0f);
    for (int lane = 0; lane < LANES; lane++) v[lane] = lane < count ? from[lane] : 0.0f;
    return v;
#endif
}
inline vf load_part(const bf16* from, int64_t count) {
#if QUANTIZE_AVX512
    vh half = (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from);
#else
    vh half = {};
    for (int lane = 0; lane < LANES; lane++) half[lane] = lane < count ? from[lane].bits : 0;
#endif
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

#if QUANTIZE_AVX512
// BF16 numbers in two vectors, which are FP32 with zeros below, in one.
inline vu upper_halves(vf v, vf w) {
    alignas(64) static constexpr uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return (vu)_mm512_permutex2var_epi16((__m512i)v, _mm512_load_si512(odd), (__m512i)w);
}
#endif

// How results are written. `stream`: past the caches, for outputs larger than they are. `exact`: every value is a
// BF16 number, so that cutting off the lower half rounds nothing.
struct Output {
    bool stream, exact;
};

inline void store(float* to, vf v, Output how) {
#if QUANTIZE_AVX512
    if (how.stream) return _mm512_stream_ps(to, (__m512)v);
#endif
    (void)how;
    memcpy(to, &v, sizeof v);
}
inline vh narrow(vf v, bool exact) {
    vu bits = (vu)v;
    if (!exact) bits += 0x7fff + ((bits >> 16) & 1);  // nearest even; the NaN made here have no low bits to carry
    return __builtin_convertvector(bits >> 16, vh);
}
inline void store(bf16* to, vf v, Output how) {
    vh half = narrow(v, how.exact);
#if QUANTIZE_AVX512
    if (how.stream) return _mm256_stream_si256((__m256i*)to, (__m256i)half);
#endif
    memcpy(to, &half, sizeof half);
}
// 2 LANES elements as two vectors. BF16 on both sides: the even and the odd ones, which need no widening and no packing.
template <class In, class Out>
struct Pair {
#if QUANTIZE_AVX512
    static constexpr bool SPLIT = is_bf16<In> && is_bf16<Out>, PACKED = is_bf16<Out>;
#else
    static constexpr bool SPLIT = false, PACKED = false;
#endif
    static void load_two(const In* from, vf& v, vf& w) {
        if constexpr (SPLIT) {
            vu both;
            memcpy(&both, from, sizeof both);
            v = (vf)(both << 16), w = (vf)(both & 0xffff0000u);
        } else {
            v = load(from), w = load(from + LANES);
        }
    }
    // Linear indices of the elements of v and w, where `index` are those of the first LANES.
    static void indices(vu index, vu& v, vu& w) {
        v = SPLIT ? index + lane_numbers() : index;
        w = v + (SPLIT ? 1 : LANES);
    }
    static void store_two(Out* to, vf v, vf w, Output how) {
#if QUANTIZE_AVX512
        if constexpr (PACKED) {
            vu low = (vu)v, high = (vu)w, both;
            if (!how.exact) low += 0x7fff + ((low >> 16) & 1), high += 0x7fff + ((high >> 16) & 1);
            if constexpr (SPLIT)
                both = (vu)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)(low >> 16), (__m512i)high);
            else
                both = upper_halves((vf)low, (vf)high);
            if (how.stream) return _mm512_stream_si512((__m512i*)to, (__m512i)both);
            memcpy(to, &both, sizeof both);
            return;
        }
#endif
        store(to, v, how), store(to + LANES, w, how);
    }
};
inline void store_part(float* to, vf v, Output, int64_t count) {
#if QUANTIZE_AVX512
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
    for (int lane = 0; lane < count; lane++) to[lane] = v[lane];
#endif
}
inline void store_part(bf16* to, vf v, Output how, int64_t count) {
    vh half = narrow(v, how.exact);
#if QUANTIZE_AVX512
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)half);
#else
    for (int lane = 0; lane < count; lane++) to[lane].bits = half[lane];
#endif
}

// |v| at most `limit` (a positive vector), sign kept. NaN becomes the limit: callers look for NaN in the amax.
inline vf clamp_magnitude(vf v, vf limit) {
#if QUANTIZE_AVX512
    return (vf)_mm512_range_ps((__m512)v, (__m512)limit, 0b0010);
#else
    return with_sign((vf)smaller(magnitude(v), (vi)limit), v);
#endif
}

#if QUANTIZE_AVX512
inline double horizontal_sum(vf v) {
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
                                              _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1))));
}
inline int64_t horizontal_count(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline int32_t horizontal_max(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
// Out of line: an array of the lanes would keep the vector in memory wherever it lives.
__attribute__((noinline)) static int32_t horizontal_max(vi v) {
    int32_t lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    int32_t largest = lanes[0];
    for (int lane = 1; lane < LANES; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    return largest;
}
__attribute__((noinline)) static int64_t horizontal_count(vi v) {
    int32_t lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}
__attribute__((noinline)) static double horizontal_sum(vf v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}
#endif
// `count` raised in the lanes where v is zero, or where a and b differ.
inline vi count_zeros(vf v, vi count) {
#if QUANTIZE_AVX512
    const __mmask16 where = _mm512_testn_epi32_mask((__m512i)v, _mm512_set1_epi32(MAGNITUDE));
    return (vi)_mm512_mask_sub_epi32((__m512i)count, where, (__m512i)count, _mm512_set1_epi32(-1));
#else
    return count - (magnitude(v) == 0);
#endif
}
inline vi count_different(vf a, vf b, vi count) {
#if QUANTIZE_AVX512
    const __mmask16 where = _mm512_cmpneq_epi32_mask((__m512i)a, (__m512i)b);
    return (vi)_mm512_mask_sub_epi32((__m512i)count, where, (__m512i)count, _mm512_set1_epi32(-1));
#else
    return count - ((vi)a != (vi)b);
#endif
}
// a * b + sum for statistics, whose last bits nobody promises.
inline vf accumulate(vf a, vf b, vf sum) {
#if QUANTIZE_AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return a * b + sum;
#endif
}

// Largest lane of each of LANES vectors, by a tree of shuffles (three instructions a vector instead of eight).
inline vi maxima(const vi* v) {
#if QUANTIZE_AVX512
    __m512i a[8], b[4];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        __m512i p = (__m512i)v[2 * k], q = (__m512i)v[2 * k + 1];
        a[k] = _mm512_max_epi32(_mm512_unpacklo_epi32(p, q), _mm512_unpackhi_epi32(p, q));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        b[k] = _mm512_max_epi32(_mm512_unpacklo_epi64(a[2 * k], a[2 * k + 1]),
                                _mm512_unpackhi_epi64(a[2 * k], a[2 * k + 1]));
    __m512i low = _mm512_max_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x44), _mm512_shuffle_i32x4(b[0], b[1], 0xee));
    __m512i high = _mm512_max_epi32(_mm512_shuffle_i32x4(b[2], b[3], 0x44), _mm512_shuffle_i32x4(b[2], b[3], 0xee));
    return (vi)_mm512_max_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
#else
    int32_t largest[LANES];
    for (int k = 0; k < LANES; k++) largest[k] = horizontal_max(v[k]);
    vi result;
    memcpy(&result, largest, sizeof result);
    return result;
#endif
}

#if QUANTIZE_AVX512
// The same of half vectors, eight of them at a time: a block's vectors are first folded to one half, which is half the work.
inline __m256i maxima(const __m256i* v) {
    __m256i a[4], b[2];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        a[k] = _mm256_max_epi32(_mm256_unpacklo_epi32(v[2 * k], v[2 * k + 1]), _mm256_unpackhi_epi32(v[2 * k], v[2 * k + 1]));
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++)
        b[k] = _mm256_max_epi32(_mm256_unpacklo_epi64(a[2 * k], a[2 * k + 1]), _mm256_unpackhi_epi64(a[2 * k], a[2 * k + 1]));
    return _mm256_max_epi32(_mm256_permute2x128_si256(b[0], b[1], 0x20), _mm256_permute2x128_si256(b[0], b[1], 0x31));
}
// Magnitudes of N elements, folded to eight lanes.
template <int N>
inline __m256i folded(const float* from) {
    const __m256i mask = _mm256_set1_epi32(MAGNITUDE);
    __m256i m = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)from), mask);
#pragma GCC unroll 16
    for (int i = 8; i < N; i += 8)
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(from + i)), mask));
    return m;
}
template <int N>
inline __m256i folded(const bf16* from) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i m = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)from), mask);
#pragma GCC unroll 16
    for (int i = 16; i < N; i += 16)
        m = _mm256_max_epi16(m, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(from + i)), mask));
    return _mm256_max_epi32(_mm256_slli_epi32(m, 16), _mm256_and_si256(m, _mm256_set1_epi32(EXPONENT | 0x7f0000)));
}
#endif
