// What a decoder computes between its matrix products when sampling: norms, rotary positions, writing to a paged
// key/value cache, and the attention of decoding sequences over it.
//
// Compiled for one shape: TYPE_BF16 (0 or 1), HEAD (head size), GROUPS (query heads per key head) and PAGE (tokens per
// page) are macros, so that the loops over them unroll. All arithmetic is in float32.
#include <vector>

#include "vectors.h"

constexpr int LINE = 64;          // bytes of a cache line
constexpr int PARTS = HEAD / LANES;  // HEAD is a multiple of 32

// The lane sums of LANES vectors, as one vector: pairs are halved and interleaved until one is left.
static inline floats sums(floats* x) {
#define HALVE(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
#ifdef __AVX512F__
    for (int i = 0; i < 8; i++)
        x[i] = HALVE(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               HALVE(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        x[i] = HALVE(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               HALVE(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        x[i] = HALVE(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               HALVE(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return HALVE(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           HALVE(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
    for (int i = 0; i < 4; i++)
        x[i] = HALVE(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + HALVE(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        x[i] = HALVE(x[i], x[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + HALVE(x[i], x[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return HALVE(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) + HALVE(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
#endif
}

static inline float total(floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

// weight x row / sqrt(mean(row^2) + epsilon), for a row of `size` numbers, a multiple of 2 x LANES.
static inline void norm(const number* row, const number* weight, number* out, int64_t size, float epsilon) {
    floats squares[2] = {floats{}, floats{}}, x[2], w[2];
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        load(row + i, x);
        squares[0] += x[0] * x[0];
        squares[1] += x[1] * x[1];
    }
    const float factor = 1.0f / std::sqrt(total(squares[0] + squares[1]) / size + epsilon);
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        load(row + i, x);
        load(weight + i, w);
        const floats scaled[2] = {x[0] * factor * w[0], x[1] * factor * w[1]};
        store(out + i, scaled);
    }
}

// x and out [rows, size].
extern "C" void normalize(const number* x, const number* weight, number* out, int64_t rows, int64_t size, float epsilon,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; row++) norm(x + row * size, weight, out + row * size, size, epsilon);
}

// heads [tokens, queries + 2 x kv_heads, HEAD]: queries, keys, values. Queries and keys are normalized, if weights are
// given, and rotated in place by cosines and sines [tokens, HEAD]. Keys and values are then copied to rows
// rows[token] + key head x PAGE of the cache.
extern "C" void rotate_and_store(number* heads, const number* cosines, const number* sines, const number* query_weight,
                      const number* key_weight, float epsilon, number* keys, number* values, const int64_t* rows,
                      int64_t tokens, int64_t queries, int64_t kv_heads, int threads) {
    constexpr int HALF = HEAD / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 4)
    for (int64_t token = 0; token < tokens; token++) {
        for (int64_t h = 0; h < queries + 2 * kv_heads; h++) {
            number* mine = heads + (token * (queries + 2 * kv_heads) + h) * HEAD;
            if (h < queries + kv_heads) {
                const number* weight = h < queries ? query_weight : key_weight;
                if (weight) norm(mine, weight, mine, HEAD, epsilon);
                for (int i = 0; i < HALF; i += LANES) {
                    // The two halves of the angles are equal.
                    const floats a = load_lanes(mine + i), b = load_lanes(mine + HALF + i);
                    const floats cosine = load_lanes(cosines + token * HEAD + i);
                    const floats sine = load_lanes(sines + token * HEAD + i);
                    store_lanes(mine + i, a * cosine - b * sine);
                    store_lanes(mine + HALF + i, b * cosine + a * sine);
                }
            }
            if (h >= queries) {
                number* store_in = h < queries + kv_heads ? keys : values;
                const int64_t row = rows[token] + (h - queries) % kv_heads * PAGE;
                std::memcpy(store_in + row * HEAD, mine, HEAD * sizeof(number));
            }
        }
    }
}

struct Row {
    int64_t slot;    // of the sequence
    int64_t source;  // slot whose first pages are read instead of the sequence's own
    int64_t shared;  // number of those pages
    int64_t first;   // first visible token
    int64_t stop;    // one past the last
};

// Row r of queries [count, heads, GROUPS, HEAD] begins at queries + r x stride. out has the same shape and is contiguous;
// keys and values are [pages, slots, heads, PAGE, HEAD].
extern "C" void attend(const number* queries, int64_t stride, const number* keys, const number* values, number* out, const Row* rows,
                       int64_t count, int64_t heads, int64_t slots, float scaling, int threads) {
    int64_t width = 0;
    for (int64_t i = 0; i < count; i++) width = rows[i].stop > width ? rows[i].stop : width;
    width = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores(GROUPS * width);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < count * heads; item++) {
            const Row row = rows[item / heads];
            const int64_t head = item % heads, begin = row.first / LANES * LANES;
            // Address of a token's row in its page; the kernel reads LANES tokens of a page at a time.
            auto row_of = [&](const number* from, int64_t token) {
                const int64_t page = token / PAGE, slot = page < row.shared ? row.source : row.slot;
                return from + (((page * slots + slot) * heads + head) * PAGE + token % PAGE) * HEAD;
            };
            const number* mine = queries + item / heads * stride + head * GROUPS * HEAD;
            floats query[GROUPS][PARTS];
            for (int g = 0; g < GROUPS; g++)
                for (int d = 0; d < PARTS; d += 2) load(mine + g * HEAD + d * LANES, query[g] + d);
            for (int64_t token = begin; token < row.stop; token += LANES) {
                const number *key = row_of(keys, token), *value = row_of(values, token);
                floats products[GROUPS][LANES];
                for (int t = 0; t < LANES; t++) {
                    // Otherwise memory is idle until the first value is read.
                    for (int at = 0; at < HEAD; at += LINE / int(sizeof(number))) __builtin_prefetch(value + t * HEAD + at, 0, 2);
                    floats wide[PARTS];
#pragma GCC unroll 16
                    for (int d = 0; d < PARTS; d += 2) load(key + t * HEAD + d * LANES, wide + d);
#pragma GCC unroll 8
                    for (int g = 0; g < GROUPS; g++) {
                        floats sum = query[g][0] * wide[0];
#pragma GCC unroll 16
                        for (int d = 1; d < PARTS; d++) sum += query[g][d] * wide[d];
                        products[g][t] = sum;
                    }
                }
                for (int g = 0; g < GROUPS; g++) {
                    const floats mine = sums(products[g]) * scaling;
                    std::memcpy(scores.data() + g * width + token, &mine, sizeof mine);
                }
            }
            float totals[GROUPS];
            for (int g = 0; g < GROUPS; g++) {
                float* mine = scores.data() + g * width;
                for (int64_t t = begin; t < row.first; t++) mine[t] = -INFINITY;
                for (int64_t t = row.stop; t % LANES; t++) mine[t] = -INFINITY;
                floats largest = floats{} - INFINITY, all = floats{};
                for (int64_t t = begin; t < row.stop; t += LANES) {
                    floats x = load(mine + t);
                    largest = x > largest ? x : largest;
                }
                float top = largest[0];
                for (int lane = 1; lane < LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
                for (int64_t t = begin; t < row.stop; t += LANES) {
                    floats x = exponential(load(mine + t) - top);
                    std::memcpy(mine + t, &x, sizeof x);
                    all += x;
                }
                totals[g] = total(all);
            }
            floats sum[GROUPS][PARTS];
            for (int g = 0; g < GROUPS; g++)
                for (int d = 0; d < PARTS; d++) sum[g][d] = floats{};
            for (int64_t token = row.first; token < row.stop;) {
                const int64_t end = (token / PAGE + 1) * PAGE < row.stop ? (token / PAGE + 1) * PAGE : row.stop;
                for (const number* value = row_of(values, token); token < end; token++, value += HEAD) {
                    floats wide[PARTS];
#pragma GCC unroll 16
                    for (int d = 0; d < PARTS; d += 2) load(value + d * LANES, wide + d);
#pragma GCC unroll 8
                    for (int g = 0; g < GROUPS; g++) {
                        const float share = scores[g * width + token];
#pragma GCC unroll 16
                        for (int d = 0; d < PARTS; d++) sum[g][d] += share * wide[d];
                    }
                }
            }
            for (int g = 0; g < GROUPS; g++)
                for (int d = 0; d < PARTS; d += 2) {
                    const floats mine[2] = {sum[g][d] * (1.0f / totals[g]), sum[g][d + 1] * (1.0f / totals[g])};
                    store(out + (item * GROUPS + g) * HEAD + d * LANES, mine);
                }
        }
    }
}

struct Layer {
    const number *before, *between;        // weights of the norms before attention and before the MLP
    const number *query_norm, *key_norm;  // or null
    Product project, combine, gate, up, down;
    number *keys, *values;
    const Row* rows;
    float scaling;
};

// Layers of attention and a gated MLP, each with a norm before it and a residual around it, over x [tokens, hidden] in place.
// `places` are the `rows` of rotate_and_store. Scratch memory: normal [tokens, hidden], heads [tokens, outputs of `project`],
// attended [tokens, inputs of `combine`], inner [tokens, outputs of `up`].
extern "C" void run(const Layer* layers, int64_t count, Multiply* multiply, number* x, const number* cosines, const number* sines,
                    const int64_t* places, number* normal, number* heads, number* attended, number* inner, int64_t tokens,
                    int64_t kv_heads, int64_t slots, float epsilon, int threads) {
    for (const Layer* layer = layers; layer < layers + count; layer++) {
        auto product = [&](const Product& weights, const Product* gate, const Product* next, const number* from, Then then, number* to) {
            multiply(from, &weights, gate, next, to, to, tokens, then, threads);
        };
        const int64_t hidden = layer->project.inputs, width = layer->project.outputs;
        normalize(x, layer->before, normal, tokens, hidden, epsilon, threads);
        product(layer->project, nullptr, &layer->combine, normal, NOTHING, heads);
        rotate_and_store(heads, cosines, sines, layer->query_norm, layer->key_norm, epsilon, layer->keys, layer->values, places,
                         tokens, width / HEAD - 2 * kv_heads, kv_heads, threads);
        attend(heads, width, layer->keys, layer->values, attended, layer->rows, tokens, kv_heads, slots, layer->scaling, threads);
        product(layer->combine, nullptr, &layer->gate, attended, PLUS, x);
        normalize(x, layer->between, normal, tokens, hidden, epsilon, threads);
        product(layer->up, &layer->gate, &layer->down, normal, NOTHING, inner);
        product(layer->down, nullptr, layer + 1 < layers + count ? &layer[1].project : nullptr, inner, PLUS, x);
    }
}
