// Vectors of the width of the processor's registers, in float32, and their conversion from and to the type of the numbers in
// memory: bfloat16 if the macro TYPE_BF16 is 1, float32 if it is 0. Also packed weights, and the declaration of their product.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
// Wider vectors than the processor's would be kept in memory instead of registers.
constexpr int LANES = 8;
#endif
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline floats load(const float* from) {
    floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// Load and store 2 x LANES numbers of a head. In bfloat16 they are split into even and odd ones, the lower and upper halves
// of 32-bit words: a float32 is a bfloat16 with 16 more bits. `load_lanes` and `store_lanes` keep the order of LANES numbers.
#if TYPE_BF16
typedef uint16_t number;
static inline words load_pairs(const number* from) {
    words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}
static inline floats lower(const number* from) { return (floats)(load_pairs(from) << 16); }
static inline floats upper(const number* from) { return (floats)(load_pairs(from) & 0xffff0000u); }
static inline void load(const number* from, floats* to) {
    to[0] = lower(from);
    to[1] = upper(from);
}
static inline words rounded(floats x) {  // to nearest, ties to even
    words bits = (words)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
static inline void store(number* to, const floats* x) {
    words pairs = (rounded(x[0]) >> 16) | (rounded(x[1]) & 0xffff0000u);
    std::memcpy(to, &pairs, sizeof pairs);
}
static inline floats load_lanes(const number* from) {
    halves x;
    std::memcpy(&x, from, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
}
static inline void store_lanes(number* to, floats x) {
    halves narrow = __builtin_convertvector(rounded(x) >> 16, halves);
    std::memcpy(to, &narrow, sizeof narrow);
}
#else
typedef float number;
static inline void load(const number* from, floats* to) {
    to[0] = load(from);
    to[1] = load(from + LANES);
}
static inline void store(number* to, const floats* x) { std::memcpy(to, x, 2 * sizeof *x); }
static inline floats load_lanes(const number* from) { return load(from); }
static inline void store_lanes(number* to, floats x) { std::memcpy(to, &x, sizeof x); }
#endif

// e^x for x <= 0 with a relative error of about 1e-7: 2^n times a polynomial of the remainder.
static inline floats exponential(floats x) {
    x = x < -87.0f ? floats{} - 87.0f : x;
    // x is negative, so truncation after subtracting 0.5 rounds to nearest.
    ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    floats n = __builtin_convertvector(whole, floats);
    floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (floats)((whole + 127) << 23);
}

// What follows a product: nothing, SiLU, or a product or sum with other numbers.
enum Then { NOTHING, SILU, TIMES, PLUS };

// The packed weights of a linear module, and its bias [outputs, padded to whole panels] or null.
struct Product {
    const number* panels;
    const float* bias;
    int64_t inputs, outputs;
};

// `multiply` of products.cpp.
typedef void Multiply(const number* x, const Product* weights, const Product* gate, const Product* following, const number* other,
                      number* out, int64_t rows, int then, int threads);
