// Products with packed weights: with tiles (AMX) or dot products of pairs (AVX-512 BF16) for bfloat16, otherwise in float32
// arithmetic. At the few rows of decoding oneDNN and MKL are slower, and without AVX-512 torch multiplies in bfloat16 at a
// fraction of the speed of float32, oneDNN not at all.
//
// A panel holds the weights of COLUMNS outputs, input by input, so that it is read in order. In bfloat16, the weights of two
// inputs are the lower and upper halves of a 32-bit word, and TYPE_BF16 is 1. A sum adds its products in the order of the
// inputs, so a row's results are the same bits beside any other rows. UNIT: what multiplies.
#include <algorithm>
#include <memory>

#include "vectors.h"

#define VECTORS 0
#define PAIRS 1
#define TILES 2
#if UNIT != VECTORS
#include <immintrin.h>
#endif

constexpr int COLUMNS = 2 * LANES;
constexpr int LINE = 64;  // bytes of a cache line, which the weights of one input fill, or of two in bfloat16
constexpr int BLOCKS = 8;  // of rows, per panel and thread at a time: their inputs stay in the cache
#if UNIT == TILES
constexpr int ROWS = 32, DEPTH = 32;  // rows of a block: two tiles; inputs of a tile
#else
// 12 x 2 sums, 2 weights and an input fit into the 32 registers of AVX-512, 6 x 2 into the 16 of AVX2.
constexpr int ROWS = LANES == 16 ? 12 : TYPE_BF16 ? 4 : 6, DEPTH = 1 + TYPE_BF16;
#endif
#if UNIT == VECTORS
typedef float operand;
#else
typedef number operand;
#endif

// What a block fetches from memory while it computes: `step` bytes per cache line of its own weights.
struct Ahead {
    const char* place;
    int64_t step;

    void fetch() {
        __builtin_prefetch(place, 0, 2);
        place += step;
    }
};

#if UNIT == TILES

// The shapes of the tiles: 0 to 3 are sums (rows x columns), 4 and 5 rows of x, 6 and 7 weights.
struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    explicit Shapes(int64_t count) {
        const uint8_t first = std::min<int64_t>(count, 16), second = count - first;
        const uint8_t each[8] = {first, first, second, second, first, second, 16, 16};
        std::memcpy(rows, each, sizeof each);
        for (int i = 0; i < 8; i++)
            if (!rows[i]) bytes[i] = 0;
    }
};

// The sums of `count` rows of x [count, inputs] and a panel. `shaped`: the count that the tiles of this thread are shaped for.
static inline void multiply_rows(int64_t count, const operand* x, const number* panel, int64_t inputs, Ahead ahead,
                                 floats sums[][2], int64_t& shaped) {
    constexpr int WEIGHTS = 4 * COLUMNS, SUMS = 4 * COLUMNS;  // bytes of a row of pairs, and of sums
    if (shaped != count) {
        const Shapes shapes(shaped = count);
        _tile_loadconfig(&shapes);
    }
    const bool both = count > 16;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t input = 0; input < inputs; input += DEPTH, panel += DEPTH * COLUMNS) {
        for (int line = 0; line < DEPTH * COLUMNS * 2 / LINE; line++) ahead.fetch();
        _tile_loadd(6, panel, WEIGHTS);
        _tile_loadd(7, panel + COLUMNS, WEIGHTS);
        _tile_loadd(4, x + input, 2 * inputs);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + 16 * inputs + input, 2 * inputs);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, &sums[0][0], SUMS);
    _tile_stored(1, &sums[0][1], SUMS);
    if (both) {
        _tile_stored(2, &sums[16][0], SUMS);
        _tile_stored(3, &sums[16][1], SUMS);
    }
}

#else

// sum + a x b. The compiler would add the products of two inputs first, which takes three instructions instead of two, or read
// weights again for every row.
static inline floats add_product(floats sum, floats a, floats b) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

// The sums of COUNT rows of x [COUNT, inputs] and a panel. Not inlined, so that all registers are for its loop.
template <int COUNT>
__attribute__((noinline)) static void multiply(const operand* x, const number* panel, int64_t inputs, Ahead ahead, floats sums[][2]) {
    floats mine[COUNT][2];
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) mine[r][0] = mine[r][1] = floats{};
#if UNIT == PAIRS
    for (int64_t input = 0; input < inputs; input += 2, panel += 2 * COLUMNS) {
        ahead.fetch();
        ahead.fetch();
        const __m512bh first = (__m512bh)_mm512_loadu_ps(panel), second = (__m512bh)_mm512_loadu_ps(panel + COLUMNS);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * inputs + input, sizeof pair);
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            mine[r][0] = _mm512_dpbf16_ps(mine[r][0], factor, first);
            mine[r][1] = _mm512_dpbf16_ps(mine[r][1], factor, second);
        }
    }
#else
    auto add = [&](int64_t input, floats first, floats second) {
#pragma GCC unroll 16
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
#endif
    for (int r = 0; r < COUNT; r++)
        for (int half = 0; half < 2; half++) sums[r][half] = mine[r][half];
}

// multiply<count>, of COUNT or fewer.
template <int COUNT>
static inline void multiply_rows(int64_t count, const operand* x, const number* panel, int64_t inputs, Ahead ahead,
                                 floats sums[][2], int64_t& shaped) {
    if (count == COUNT) return multiply<COUNT>(x, panel, inputs, ahead, sums);
    if constexpr (COUNT > 1) multiply_rows<COUNT - 1>(count, x, panel, inputs, ahead, sums, shaped);
}

#endif

static inline floats silu(floats x) {
    const floats small = exponential(x < 0 ? x : -x);
    return x * (x < 0 ? small : 1.0f + floats{}) / (1.0f + small);
}

// What follows the sums of the outputs.
struct Ending {
    const Product& weights;
    Then then;
    const number* other;  // [rows, outputs]
    number* out;          // [rows, outputs]

    // The sums of the outputs from `column` on, in a row. `gate`: those of the gate, or null.
    void write(floats sum, const floats* gate, const Product* gates, int64_t row, int64_t column) const {
        const int64_t width = std::min<int64_t>(LANES, weights.outputs - column), place = row * weights.outputs + column;
        if (width <= 0) return;
        if (weights.bias) sum += load(weights.bias + column);
        if (gate) {
            // Rounded, as where the gate's product is stored first.
            number rounded[LANES];
            store_lanes(rounded, silu(gates->bias ? *gate + load(gates->bias + column) : *gate));
            sum *= load_lanes(rounded);
        }
        if (then == SILU) sum = silu(sum);
        if (width == LANES) {
            if (then == TIMES) sum *= load_lanes(other + place);
            if (then == PLUS) sum += load_lanes(other + place);
            return store_lanes(out + place, sum);
        }
        // The last panel is wider than the outputs.
        number numbers[LANES] = {};
        if (then == TIMES || then == PLUS) {
            std::memcpy(numbers, other + place, width * sizeof(number));
            sum = then == TIMES ? sum * load_lanes(numbers) : sum + load_lanes(numbers);
        }
        store_lanes(numbers, sum);
        std::memcpy(out + place, numbers, width * sizeof(number));
    }
};

extern "C" int columns() { return COLUMNS; }
extern "C" int depth() { return DEPTH; }

// out [rows, outputs] = x [rows, inputs] times the weights, then `then` with other [rows, outputs], which may be `out`. `gate`: if
// given, SiLU of its product is multiplied first. `following`: if given, the weights of the next call, which are fetched
// at the end. `inputs` is a multiple of depth().
extern "C" void multiply(const number* x, const Product* weights, const Product* gate, const Product* following,
                         const number* other, number* out, int64_t rows, int then, int threads) {
    const Ending ending{*weights, Then(then), other, out};
    const int64_t inputs = weights->inputs;
#if TYPE_BF16 && UNIT == VECTORS
    const std::unique_ptr<float[]> in_float32(new float[rows * inputs]);
    for (int64_t i = 0; i < rows * inputs; i++) {
        const uint32_t bits = uint32_t(x[i]) << 16;
        std::memcpy(&in_float32[i], &bits, sizeof bits);
    }
    const operand* const from = in_float32.get();
#else
    const operand* const from = x;
#endif
    const int64_t panels = (weights->outputs + COLUMNS - 1) / COLUMNS, blocks = (rows + ROWS - 1) / ROWS;
    const int64_t groups = (blocks + BLOCKS - 1) / BLOCKS, size = inputs * COLUMNS;
    const Product* const first = gate ? gate : weights;
#pragma omp parallel num_threads(threads)
    {
        int64_t shaped = 0;
        // Dynamic: a thread whose processor is busy with something else does less.
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t item = 0; item < panels * groups; item++) {
            const int64_t group = item / panels, number_of = item % panels, column = number_of * COLUMNS;
            const int64_t begin = blocks * group / groups, end = blocks * (group + 1) / groups;
            const number* const panel = weights->panels + number_of * size;
            // Every block fetches its share of the panel that this thread probably has next, so that memory is never idle.
            const int64_t after = item + threads, past = after - panels * groups;
            const number* const next = past >= 0 && following ? following->panels + past * size : first->panels + after % panels * size;
            for (int64_t block = begin; block < end; block++) {
                const int64_t row = rows * block / blocks, some = rows * (block + 1) / blocks - row;
                auto sum = [&](const number* of, const number* fetched, floats sums[][2]) {
                    const char* const place = (const char*)fetched + sizeof(number) * size * (block - begin) / (end - begin);
                    const Ahead ahead{place, LINE / (end - begin)};
#if UNIT == TILES
                    multiply_rows(some, from + row * inputs, of, inputs, ahead, sums, shaped);
#else
                    multiply_rows<ROWS>(some, from + row * inputs, of, inputs, ahead, sums, shaped);
#endif
                };
                floats sums[ROWS][2], gates[ROWS][2];
                if (gate) sum(gate->panels + number_of * size, panel, gates);
                sum(panel, next, sums);
                for (int64_t r = 0; r < some; r++)
                    for (int half = 0; half < 2; half++)
                        ending.write(sums[r][half], gate ? &gates[r][half] : nullptr, gate, row + r, column + half * LANES);
            }
        }
#if UNIT == TILES
        _tile_release();
#endif
    }
}
