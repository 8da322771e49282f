// Products with packed weights, in float32 arithmetic, for processors without AVX-512. There oneDNN is slower at the few rows of
// decoding, and torch multiplies in bfloat16 at a fraction of the speed of float32, oneDNN not at all.
//
// A panel holds the weights of COLUMNS outputs, input by input, so that it is read in order. In bfloat16, the weights of two
// inputs are the lower and upper halves of a 32-bit word, and TYPE_BF16 is 1. A sum adds its products in the order of the
// inputs, so a row's results are the same bits beside any other rows.
#include <algorithm>
#include <memory>

#include "vectors.h"

constexpr int COLUMNS = 2 * LANES;
constexpr int ROWS = 6;  // 6 x 2 sums, 2 weights and an input fit into 16 registers
constexpr int TILES = 8;  // of rows, per panel and thread at a time: their inputs stay in the cache
constexpr int AHEAD = 512;  // numbers by which weights are fetched ahead

enum Then { NOTHING, SILU, TIMES, PLUS };

// The sums of COUNT rows of x [COUNT, inputs] and a panel.
template <int COUNT, typename Panel>
static inline void multiply(const float* x, const Panel* panel, int64_t inputs, floats sums[ROWS][2]) {
    floats mine[COUNT][2];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) mine[r][0] = mine[r][1] = floats{};
    auto add = [&](int64_t input, floats first, floats second) {
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) {
            const floats factor = floats{} + x[r * inputs + input];
            mine[r][0] += factor * first;
            mine[r][1] += factor * second;
        }
    };
    if constexpr (sizeof(Panel) == 2) {
        for (int64_t input = 0; input < inputs; input += 2, panel += 2 * COLUMNS) {
            __builtin_prefetch(panel + AHEAD);
            floats first[2], second[2];
            load(panel, first);
            load(panel + COLUMNS, second);
            add(input, first[0], second[0]);
            add(input + 1, first[1], second[1]);
        }
    } else {
        for (int64_t input = 0; input < inputs; input++, panel += COLUMNS) {
            __builtin_prefetch(panel + AHEAD);
            add(input, load(panel), load(panel + LANES));
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int half = 0; half < 2; half++) sums[r][half] = mine[r][half];
}

template <typename Panel>
static inline void multiply_rows(int64_t count, const float* x, const Panel* panel, int64_t inputs, floats sums[ROWS][2]) {
    switch (count) {
        case 1: return multiply<1>(x, panel, inputs, sums);
        case 2: return multiply<2>(x, panel, inputs, sums);
        case 3: return multiply<3>(x, panel, inputs, sums);
        case 4: return multiply<4>(x, panel, inputs, sums);
        case 5: return multiply<5>(x, panel, inputs, sums);
        default: return multiply<6>(x, panel, inputs, sums);
    }
}

#if TYPE_BF16
// The panel in float32, which many rows multiply by faster.
static inline void widen(const number* panel, int64_t inputs, float* wide) {
    for (int64_t input = 0; input < inputs; input += 2, panel += 2 * COLUMNS, wide += 2 * COLUMNS)
        for (int half = 0; half < 2; half++) {
            floats pair[2];
            load(panel + half * COLUMNS, pair);
            for (int next = 0; next < 2; next++) std::memcpy(wide + next * COLUMNS + half * LANES, pair + next, sizeof *pair);
        }
}
#endif

static inline floats silu(floats x) {
    const floats small = exponential(x < 0 ? x : -x);
    return x * (x < 0 ? small : 1.0f + floats{}) / (1.0f + small);
}

// What follows the sums of the outputs.
struct Ending {
    const float* bias;    // [outputs, padded to whole panels] or null
    Then then;
    const number* other;  // [rows, outputs]
    number* out;          // [rows, outputs]
    int64_t outputs;

    // The sums of the outputs from `column` on, in a row.
    void write(floats sum, int64_t row, int64_t column) const {
        // The last panel may be wider than the outputs.
        const int64_t width = std::min<int64_t>(LANES, outputs - column), place = row * outputs + column;
        if (width <= 0) return;
        number numbers[LANES] = {};
        if (bias) sum += load(bias + column);
        if (then == SILU) sum = silu(sum);
        if (then == TIMES || then == PLUS) {
            std::memcpy(numbers, other + place, width * sizeof(number));
            sum = then == TIMES ? sum * load_lanes(numbers) : sum + load_lanes(numbers);
        }
        store_lanes(numbers, sum);
        std::memcpy(out + place, numbers, width * sizeof(number));
    }
};

extern "C" int columns() { return COLUMNS; }

// out [rows, outputs] = x [rows, inputs] times the weights, plus `bias` [outputs, padded to whole panels] if it is given, then
// `then` with other [rows, outputs]. In bfloat16, `inputs` is even.
extern "C" void multiply(const number* x, const number* panels, const float* bias, const number* other, number* out,
                         int64_t rows, int64_t inputs, int64_t outputs, int then, int threads) {
    const Ending ending{bias, Then(then), other, out, outputs};
    const int64_t count = (outputs + COLUMNS - 1) / COLUMNS, tiles = (rows + ROWS - 1) / ROWS;
    const int64_t blocks = (tiles + TILES - 1) / TILES;
#if TYPE_BF16
    const std::unique_ptr<float[]> in_float32(new float[rows * inputs]);
    for (int64_t i = 0; i < rows * inputs; i++) {
        const uint32_t bits = uint32_t(x[i]) << 16;
        std::memcpy(&in_float32[i], &bits, sizeof bits);
    }
    const float* const from = in_float32.get();
    const bool widens = tiles > 2 * blocks;
#else
    const float* const from = x;
#endif
#pragma omp parallel num_threads(threads)
    {
#if TYPE_BF16
        const std::unique_ptr<float[]> wide(new float[widens ? inputs * COLUMNS : 0]);
#endif
        // Dynamic: a thread whose processor is busy with something else does less.
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < count * blocks; item++) {
            const int64_t block = item / count, column = item % count * COLUMNS;
            const number* panel = panels + column * inputs;
#if TYPE_BF16
            if (widens) widen(panel, inputs, wide.get());
#endif
            for (int64_t tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; tile++) {
                const int64_t first = rows * tile / tiles, some = rows * (tile + 1) / tiles - first;
                floats sums[ROWS][2];
#if TYPE_BF16
                if (widens)
                    multiply_rows(some, from + first * inputs, wide.get(), inputs, sums);
                else
#endif
                    multiply_rows(some, from + first * inputs, panel, inputs, sums);
                for (int64_t r = 0; r < some; r++)
                    for (int half = 0; half < 2; half++)
                        ending.write(sums[r][half], first + r, column + half * LANES);
            }
        }
    }
}
