// Causal attention of a row of segments, forward and backward, in float32 arithmetic. Probabilities are computed again in the
// backward pass. TYPE_BF16: the type of the numbers in memory.
//
// A task is a segment and a key head. Its keys are copied to buffers that products read in order; its queries, of all heads that
// share the key head, are processed in blocks of BLOCK tokens, each against the keys up to its end.
#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr int COLUMNS = 2 * LANES;
constexpr int BLOCK = 16;                     // tokens
constexpr int TILE = LANES == 16 ? 12 : 6;    // rows whose sums, and the numbers they are made of, fit into registers

// The sums of COUNT rows: out [COUNT, COLUMNS] = x y, with x [COUNT, inputs] at x + r * row + i * step. `add`: to what is in out.
template <int COUNT>
__attribute__((noinline)) static void multiply(const float* x, int64_t row, int64_t step, const float* y, int64_t y_row, int64_t inputs,
                                               float* out, int64_t out_row, bool add) {
    floats mine[COUNT][2];
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++)
        for (int half = 0; half < 2; half++) mine[r][half] = add ? load(out + r * out_row + half * LANES) : floats{};
    for (int64_t i = 0; i < inputs; i++, x += step, y += y_row) {
        const floats first = load(y), second = load(y + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            const floats factor = floats{} + x[r * row];
            mine[r][0] += factor * first;
            mine[r][1] += factor * second;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++)
        for (int half = 0; half < 2; half++) std::memcpy(out + r * out_row + half * LANES, &mine[r][half], sizeof(floats));
}

template <int COUNT, typename... Arguments>
static inline void multiply_rows(int64_t count, Arguments... arguments) {
    if (count == COUNT) return multiply<COUNT>(arguments...);
    if constexpr (COUNT > 1) multiply_rows<COUNT - 1>(count, arguments...);
}

// out [rows, columns] = x y (or out + x y), for x [rows, inputs] and y [inputs, columns], columns a multiple of COLUMNS.
static void product(int64_t rows, int64_t columns, int64_t inputs, const float* x, int64_t row, int64_t step, const float* y, int64_t y_row,
                    float* out, int64_t out_row, bool add = false) {
    for (int64_t c = 0; c < columns; c += COLUMNS)
        for (int64_t r = 0; r < rows; r += TILE)
            multiply_rows<TILE>(std::min<int64_t>(TILE, rows - r), x + r * row, row, step, y + c, y_row, inputs, out + r * out_row + c, out_row, add);
}

// Heads of tokens: a number of head h, token t is at base + h * head + t * token + d.
struct Heads {
    number* base;
    int64_t head, token;

    number* at(int64_t h, int64_t t) const { return base + h * head + t * token; }
};

struct Segment {
    int64_t start, stop;  // its tokens
    int64_t seen;         // number of tokens before them
    int64_t keys;         // where its keys begin in the list of tokens
};

struct Shape {
    int64_t heads, shared, width;  // query heads, key heads, size of a head (a multiple of COLUMNS)
    int64_t window;                // number of tokens that a token sees, or 0 for all
    float scaling;
};

// One task: the keys and values of a segment and a key head in float32, and the probabilities of a block of its queries.
struct Task {
    const Shape shape;
    const Segment segment;
    const int64_t* tokens;  // of the keys
    const int64_t head, groups, count, padded, across;
    std::vector<float> keys, values, keys_across, values_across, rows, scores;
    int64_t start, size, first, last;  // of the block: tokens of the segment, columns [first, last)

    Task(const Shape& shape, const Segment& segment, const int64_t* list, int64_t head, Heads key, Heads value, bool backward)
        : shape(shape), segment(segment), tokens(list + segment.keys), head(head), groups(shape.heads / shape.shared),
          count(segment.seen + segment.stop - segment.start), padded((count + COLUMNS - 1) / COLUMNS * COLUMNS), across(padded + LANES) {
        keys_across.resize(shape.width * across);
        read(key, keys, keys_across, backward);
        if (backward) values_across.resize(shape.width * across);
        read(value, values, values_across, !backward);
        rows.resize(groups * BLOCK * shape.width);
        scores.resize(groups * BLOCK * padded);
    }

    // Copies as [padded, width], if `along`, and, if there is room, as [width, across].
    void read(Heads from, std::vector<float>& to, std::vector<float>& to_across, bool along) const {
        const int64_t width = shape.width;
        if (along) to.resize(padded * width);
        float row[width];
        for (int64_t j = 0; j < count; j++) {
            wide(from.at(head, tokens[j]), row);
            if (along) std::memcpy(to.data() + j * width, row, sizeof row);
            if (!to_across.empty())
                for (int64_t d = 0; d < width; d++) to_across[d * across + j] = row[d];
        }
    }

    void wide(const number* from, float* to) const {
        for (int64_t d = 0; d < shape.width; d += LANES) {
            const floats x = load_lanes(from + d);
            std::memcpy(to + d, &x, sizeof x);
        }
    }

    int64_t blocks() const { return (segment.stop - segment.start + BLOCK - 1) / BLOCK; }
    int64_t queries() const { return groups * size; }

    // The query head and the token of a row of the block.
    number* place(Heads of, int64_t row) const { return of.at(head * groups + row / size, segment.start + start + row % size); }

    void read_rows(Heads from, float* to) const {
        for (int64_t r = 0; r < queries(); r++) wide(place(from, r), to + r * shape.width);
    }

    void write_rows(Heads out, const float* from) const {
        for (int64_t r = 0; r < queries(); r++)
            for (int64_t d = 0; d < shape.width; d += LANES) store_lanes(place(out, r) + d, load(from + r * shape.width + d));
    }

    // Probabilities [queries, last - first] of a block in `scores`, with 0 for keys that a query does not see.
    void attend(int64_t block, Heads query) {
        start = block * BLOCK;
        size = std::min<int64_t>(BLOCK, segment.stop - segment.start - start);
        const int64_t ahead = segment.seen + start, end = ahead + size;
        first = shape.window ? std::max<int64_t>(0, ahead - shape.window + 1) / COLUMNS * COLUMNS : 0;
        last = (end + COLUMNS - 1) / COLUMNS * COLUMNS;
        read_rows(query, rows.data());
        const int64_t columns = last - first;
        product(queries(), columns, shape.width, rows.data(), shape.width, 1, keys_across.data() + first, across, scores.data(), columns);
        for (int64_t r = 0; r < queries(); r++) {
            const int64_t stop = ahead + r % size + 1 - first;
            const int64_t begin = shape.window ? std::max<int64_t>(0, stop - shape.window) : 0;
            float* const row = scores.data() + r * columns;
            for (int64_t j = 0; j < begin; j++) row[j] = -INFINITY;
            for (int64_t j = stop; j < columns; j++) row[j] = -INFINITY;
            floats largest = floats{} - INFINITY, all = {};
            for (int64_t j = 0; j < columns; j += LANES) {
                const floats x = load(row + j);
                largest = x > largest ? x : largest;
            }
            float top = largest[0];
            for (int lane = 1; lane < LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
            for (int64_t j = 0; j < columns; j += LANES) {
                const floats x = load(row + j), e = exponential((x - top) * shape.scaling), kept = x == -INFINITY ? floats{} : e;
                std::memcpy(row + j, &kept, sizeof kept);
                all += kept;
            }
            float total = 0;
            for (int lane = 0; lane < LANES; lane++) total += all[lane];
            for (int64_t j = 0; j < columns; j += LANES) {
                const floats x = load(row + j) / total;
                std::memcpy(row + j, &x, sizeof x);
            }
        }
    }
};

extern "C" int columns() { return COLUMNS; }

// out [heads, T, width] of query, key and value.
extern "C" void forward(const Shape* shape, const Segment* segments, int64_t count, const int64_t* tokens, const Heads* query,
                        const Heads* key, const Heads* value, const Heads* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < count * shape->shared; item++) {
        Task task(*shape, segments[item / shape->shared], tokens, item % shape->shared, *key, *value, false);
        std::vector<float> attended(task.rows.size());
        for (int64_t block = 0; block < task.blocks(); block++) {
            task.attend(block, *query);
            const int64_t columns = task.last - task.first;
            product(task.queries(), shape->width, columns, task.scores.data(), columns, 1, task.values.data() + task.first * shape->width,
                    shape->width, attended.data(), shape->width);
            task.write_rows(*out, attended.data());
        }
    }
}

// The gradients of query, and, added to what is there, of key and value [T, shared, width] in float32. `apart`: no two
// segments have a key in common.
extern "C" void backward(const Shape* shape, const Segment* segments, int64_t count, const int64_t* tokens, const Heads* query,
                         const Heads* key, const Heads* value, const Heads* above, const Heads* query_gradient, float* key_gradient,
                         float* value_gradient, int apart, int threads) {
    const int64_t width = shape->width, shared = shape->shared;
    auto run = [&](const Segment& segment, int64_t head) {
        Task task(*shape, segment, tokens, head, *key, *value, true);
        std::vector<float> gradients(task.rows.size()), by_row(task.rows.size()), changes(task.scores.size());
        std::vector<float> keys(task.padded * width), values(task.padded * width);
        for (int64_t block = 0; block < task.blocks(); block++) {
            task.attend(block, *query);
            const int64_t queries = task.queries(), columns = task.last - task.first, from = task.first * width;
            const float *const rows = task.rows.data(), *const p = task.scores.data();
            float *const above_rows = gradients.data(), *const change = changes.data();
            task.read_rows(*above, above_rows);
            product(columns, width, queries, p, 1, columns, above_rows, width, values.data() + from, width, true);
            product(queries, columns, width, above_rows, width, 1, task.values_across.data() + task.first, task.across, change, columns);
            for (int64_t r = 0; r < queries; r++) {
                floats along = {};
                for (int64_t j = r * columns; j < (r + 1) * columns; j += LANES) along += load(p + j) * load(change + j);
                float total = 0;
                for (int lane = 0; lane < LANES; lane++) total += along[lane];
                for (int64_t j = r * columns; j < (r + 1) * columns; j += LANES) {
                    const floats x = load(p + j) * (load(change + j) - total) * shape->scaling;
                    std::memcpy(change + j, &x, sizeof x);
                }
            }
            product(queries, width, columns, change, columns, 1, task.keys.data() + from, width, by_row.data(), width);
            task.write_rows(*query_gradient, by_row.data());
            product(columns, width, queries, change, 1, columns, rows, width, keys.data() + from, width, true);
        }
        for (int64_t j = 0; j < task.count; j++) {
            const int64_t at = (task.tokens[j] * shared + head) * width;
            for (int64_t d = 0; d < width; d++) {
                key_gradient[at + d] += keys[j * width + d];
                value_gradient[at + d] += values[j * width + d];
            }
        }
    };
    // Segments that have keys in common add to them in their order, so that sums are the same for any number of threads.
    const int64_t parallel = apart ? count * shared : shared;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < parallel; item++)
        for (int64_t s = apart ? item / shared : 0; s < (apart ? item / shared + 1 : count); s++) run(segments[s], item % shared);
}
