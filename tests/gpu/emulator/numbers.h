// Numbers: half, bfloat16, fused multiply-add, and the product of tensor cores.
#pragma once

template <class Value> Value __ldg(const Value* p) { return *p; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
template <class Value> Value min(Value a, Value b) { return b < a ? b : a; }
template <class Value> Value max(Value a, Value b) { return a < b ? b : a; }

namespace emulator {

// To nearest even, as cvt.rn does.
inline uint16_t float_to_bfloat(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(fraction), -24), __uint_as_float(sign | 0x3f800000u));
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; // 65520 and more
    // Below 2^-14 a half counts in steps of 2^-24; nearbyint rounds to nearest even.
    if (magnitude < 0x38800000u) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(std::fabs(value), 24)));
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

// The multiple of 2^least nearest to zero.
inline double cut_below(double value, int least) { return std::ldexp(std::trunc(std::ldexp(value, -least)), least); }

// c plus 16 products. What hardware does here is not documented. By default the exact sum, rounded once. EMULATOR_TRUNCATES is worse
// than any tensor core that was measured (Fasi et al. 2021): all addends lose what lies 2^-24 below the largest, and so does the sum.
inline float sum_of_products(float c, const double (&products)[16]) {
    double sum = c, largest = std::fabs(static_cast<double>(c));
    for (double product : products) sum += product, largest = std::fmax(largest, std::fabs(product));
#if !defined(EMULATOR_TRUNCATES)
    return static_cast<float>(sum);
#endif
    if (!std::isfinite(sum) || largest == 0.0) return static_cast<float>(sum);
    const int least = std::ilogb(largest) - 24;
    sum = cut_below(c, least);
    for (double product : products) sum += cut_below(product, least);
    if (sum == 0.0) return 0.0f;
    return static_cast<float>(cut_below(sum, std::ilogb(sum) - 23));
}

struct Operands {
    uint32_t a[4], b[2];
};

// mma.m16n8k16 with bf16 operands, by the layout of the PTX manual: lane 4 g + q has of a the rows g and g + 8, columns 2 q, 2 q + 1,
// 2 q + 8 and 2 q + 9; of b the same rows of column g; of d rows g and g + 8 of columns 2 q and 2 q + 1.
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Operands all[32];
    const Operands own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    if (meet_warp(0xffffffffu, own, "mma", all) != 0xffffffffu) fail(*context.block, "mma without all 32 lanes");
    const int g = context.lane() >> 2, q = context.lane() & 3;
    const auto element = [](uint32_t word, int i) { return static_cast<double>(__uint_as_float(i ? word & 0xffff0000u : word << 16)); };
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = q * 2 + i % 2;
        double products[16];
        for (int k = 0; k < 16; ++k) {
            // Column k of a and row k of b lie in the lanes k / 2 % 4, in their later registers from 8 on.
            const int holder = k / 2 % 4, later = k / 8;
            products[k] = element(all[g * 4 + holder].a[row + later * 2], k & 1) * element(all[column * 4 + holder].b[later], k & 1);
        }
        d[i] = sum_of_products(d[i], products);
    }
}

} // namespace emulator
