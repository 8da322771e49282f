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
constexpr int LINE = 64;  // bytes of a cache line, which the weights of one input fill, or of two in bfloat16
constexpr int ROWS = TYPE_BF16 ? 4 : 6;  // of a tile: 6 x 2 sums, 2 weights and an input fit into 16 registers
constexpr int TILES = 8;  // of rows, per panel and thread at a time: their inputs stay in the cache

// sum + a x b. The compiler would add the products of two inputs first, which takes three instructions instead of two, or read
// weights again for every row.
static inline floats add_product(floats sum, floats a, floats b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

// What a tile fetches from memory while it computes: `step` bytes per cache line of its own weights.
struct Ahead {
    const char* place;
    int64_t step;

    void fetch() {
        __builtin_prefetch(place);
        place += step;
    }
};

// The sums of COUNT rows of x [COUNT, inputs] and a panel. Not inlined, so that all registers are for its loop.
template <int COUNT>
__attribute__((noinline)) static void multiply(const float* x, const number* panel, int64_t inputs, Ahead ahead, floats sums[][2]) {
    floats mine[COUNT][2];
#pragma GCC unroll 8
    for (int r = 0; r < COUNT; r++) mine[r][0] = mine[r][1] = floats{};
    auto add = [&](int64_t input, floats first, floats second) {
#pragma GCC unroll 8
        for (int r = 0; r < COUNT; r++) {
            const floats factor = floats{} + x[r * inputs + input];
            mine[r][0] = add_product(mine[r][0], factor, first);
            mine[r][1] = add_product(mine[r][1], factor, second);
        }
    };
#if TYPE_BF16
    for (int64_t input = 0; input < inputs; input += 2, panel += 2 * COLUMNS) {
        ahead.fetch();
        add(input, lower(panel), lower(panel + COLUMNS));
        asm("" : "+r"(panel));  // reads the weights again, since there are no registers to keep them
        add(input + 1, upper(panel), upper(panel + COLUMNS));
    }
#else
    for (int64_t input = 0; input < inputs; input++, panel += COLUMNS) {
        ahead.fetch();
        add(input, load(panel), load(panel + LANES));
    }
#endif
    for (int r = 0; r < COUNT; r++)
        for (int half = 0; half < 2; half++) sums[r][half] = mine[r][half];
}

static inline void multiply_rows(int64_t count, const float* x, const number* panel, int64_t inputs, Ahead ahead, floats sums[][2]) {
    switch (count) {
        case 1: return multiply<1>(x, panel, inputs, ahead, sums);
        case 2: return multiply<2>(x, panel, inputs, ahead, sums);
        case 3: return multiply<3>(x, panel, inputs, ahead, sums);
        case 4: return multiply<4>(x, panel, inputs, ahead, sums);
#if !TYPE_BF16
        case 5: return multiply<5>(x, panel, inputs, ahead, sums);
        case 6: return multiply<6>(x, panel, inputs, ahead, sums);
#endif
    }
}

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
// `then` with other [rows, outputs], which may be `out`. In bfloat16, `inputs` is even.
extern "C" void multiply(const number* x, const number* panels, const float* bias, const number* other, number* out,
                         int64_t rows, int64_t inputs, int64_t outputs, int then, int threads) {
    const Ending ending{bias, Then(then), other, out, outputs};
#if TYPE_BF16
    const std::unique_ptr<float[]> in_float32(new float[rows * inputs]);
    for (int64_t i = 0; i < rows * inputs; i++) {
        const uint32_t bits = uint32_t(x[i]) << 16;
        std::memcpy(&in_float32[i], &bits, sizeof bits);
    }
    const float* const from = in_float32.get();
#else
    const float* const from = x;
#endif
    const int64_t count = (outputs + COLUMNS - 1) / COLUMNS, tiles = (rows + ROWS - 1) / ROWS;
    const int64_t blocks = (tiles + TILES - 1) / TILES;
    // Dynamic: a thread whose processor is busy with something else does less.
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < count * blocks; item++) {
        const int64_t block = item / count, column = item % count * COLUMNS;
        const int64_t begin = tiles * block / blocks, end = tiles * (block + 1) / blocks;
        const number* panel = panels + column * inputs;
        for (int64_t tile = begin; tile < end; tile++) {
            const int64_t first = rows * tile / tiles, some = rows * (tile + 1) / tiles - first;
            // Every tile fetches its share of the panel that this thread probably has next, so that memory is never idle.
            const int64_t size = inputs * COLUMNS * sizeof(number);
            const char* const next = (const char*)panel + threads * size;
            floats sums[ROWS][2];
            multiply_rows(some, from + first * inputs, panel, inputs,
                          {next + size * (tile - begin) / (end - begin), LINE / (end - begin)}, sums);
            for (int64_t r = 0; r < some; r++)
                for (int half = 0; half < 2; half++) ending.write(sums[r][half], first + r, column + half * LANES);
        }
    }
}
