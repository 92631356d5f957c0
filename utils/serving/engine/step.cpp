// A decode step of one rank on a CPU: the computation of model.py and linear.py in a few loops.
//
// A PyTorch operator costs several microseconds, which in a decode step of a small model is more
// than its arithmetic. native.py compiles this file once per machine and calls it through ctypes.
// It does not use PyTorch, so compiling takes only seconds. Without a compiler the engine uses
// PyTorch's operators.
//
//     product     y = x·Wᵀ + b
//     stages      a range of stages of the layers' forward
//
// Shapes as in model.py: B rows (one token of each request), C hidden size, D head size, W blocks
// of BLOCK positions in a slot's table; of this rank H query heads, K key-value heads, M columns of
// the MLP. In products W is (N, K). Everything except matrices is fp32.
//
// A row's values depend only on this row: each sum adds its terms in a fixed order, whatever the
// other rows and the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// ---- 1. vectors of as many values as a register of this CPU holds

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

struct Half {
    uint16_t bits;
};

static inline Floats load(const float* from) { return *(const Floats*)from; }

static inline Floats load(const Half* from) {  // fp16 -> fp32, exactly
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && defined(__AVX__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Ints sign, rest;
    for (int i = 0; i < LANES; i++) {
        sign[i] = (int32_t)((uint32_t)(from[i].bits & 0x8000) << 16);
        rest[i] = (from[i].bits & 0x7fff) << 13;
    }
    // the exponent bias is 15 in fp16 and 127 in fp32
    return (Floats)((Ints)((Floats)rest * 0x1p112f) | sign);
#endif
}

// LANES values from index n on, zeros from N on
static inline Floats some(const float* from, int64_t n, int64_t N) {
    if (n + LANES <= N) return load(from + n);
    float rest[LANES] = {};
    std::memcpy(rest, from + n, 4 * (N - n));
    return load(rest);
}

static inline Floats add(Floats sum, Floats w, float x) { return sum + w * x; }

// Adds to each lane four products: its bytes of `w` (0..255) times the bytes of `x` (-127..127).
static inline Ints add(Ints sum, Ints w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // in 16 bits, because the byte instruction adds pairs of products in 16 bits, which overflow
    const __m256i all = _mm256_set1_epi32(x);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
    const __m256i odd = _mm256_srai_epi16(all, 8);
    const __m256i low = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255));
    const __m256i high = _mm256_srli_epi16((__m256i)w, 8);
    return sum + (Ints)_mm256_madd_epi16(low, even) + (Ints)_mm256_madd_epi16(high, odd);
#else
    for (int i = 0; i < 4; i++) sum += (w >> 8 * i & 255) * (int32_t)(int8_t)(x >> 8 * i);
    return sum;
#endif
}

// ---- 2. matrices
//
// A matrix is stored in panels of LANES outputs: a register loads one column of a panel, which is
// multiplied by one value of x. So no sum crosses lanes, and each adds its terms in order.

enum Kind : int64_t { FP32, FP16, INT8, INT4 };
constexpr int64_t GROUP = 32;  // INT4: columns per scale

struct Matrix {
    Kind kind;
    int64_t N, K;
    int64_t offset;      // INT4: columns of the first group that are on another rank
    const void* panels;  // FP32, FP16: (N/LANES, K, LANES)
                         // INT8: values + 128, uint8 (N/LANES, K/4, LANES, 4)
                         // INT4: eight values, the first lowest, int32 (N/LANES, G·4, LANES)
    const float* scale;  // INT8: (N);   INT4: (N/LANES, G, LANES)
    const float* bias;   // (N), or null
};

// A format reads the columns of panel p.

template <class Stored> struct Real {
    typedef float Number;
    typedef Floats Sum;
    const Stored* at;
    Real(const Matrix& m, int64_t p) : at((const Stored*)m.panels + p * m.K * LANES) {}
    static int64_t columns(const Matrix& m) { return m.K; }
    Floats column(int64_t k) const { return load(at + k * LANES); }
};

struct FourBits {
    typedef float Number;
    typedef Floats Sum;
    const int32_t* at;
    const float* scale;
    FourBits(const Matrix& m, int64_t p)
        : at((const int32_t*)m.panels + p * columns(m) / 8 * LANES),
          scale(m.scale + p * columns(m) / GROUP * LANES) {}
    static int64_t columns(const Matrix& m) { return (m.offset + m.K + GROUP - 1) / GROUP * GROUP; }
    Floats column(int64_t k) const {
        const Ints eight = *(const Ints*)(at + k / 8 * LANES);
        const int above = 28 - (int)(k % 8) * 4;
        const Ints number = eight << above >> 28;  // the fourth bit is the sign
        return __builtin_convertvector(number, Floats) * load(scale + k / GROUP * LANES);
    }
};

struct EightBits {  // four columns of W at a time, and hence four values of x
    typedef int32_t Number;
    typedef Ints Sum;
    const int32_t* at;
    EightBits(const Matrix& m, int64_t p)
        : at((const int32_t*)m.panels + p * columns(m) * LANES) {}
    static int64_t columns(const Matrix& m) { return (m.K + 3) / 4; }
    Ints column(int64_t k) const { return *(const Ints*)(at + k * LANES); }
};

// Most rows of x multiplied together, so that their sums fit in registers.
constexpr int MOST = REGISTERS / 2;

template <class Number> struct Rows {
    std::vector<Number> numbers;  // (columns, rows)
    float scale[MOST];            // INT8: of each row
    int32_t excess[MOST];         // INT8: the amount that the + 128 in W adds to a row's sums
};

static inline Floats finished(const Matrix&, Floats sum, int64_t, const Rows<float>&, int) {
    return sum;
}

static inline Floats finished(const Matrix& m, Ints sum, int64_t n, const Rows<int32_t>& x, int r) {
    return __builtin_convertvector(sum - x.excess[r], Floats) * x.scale[r] * some(m.scale, n, m.N);
}

// Some rows of x times some panels: the innermost loops, with sums in registers.
template <class Format, int ROWS, int PANELS>
static inline void tile(const Matrix& m, const Rows<typename Format::Number>& x, int64_t p,
                        float* y) {
    typename Format::Sum sums[PANELS][ROWS] = {};
    const int64_t columns = Format::columns(m);
    const typename Format::Number* number = x.numbers.data();
    const Format panel[] = {{m, p}, {m, p + 1}, {m, p + 2}, {m, p + 3}};  // PANELS are read
    for (int64_t k = 0; k < columns; k++, number += ROWS)
        for (int i = 0; i < PANELS; i++) {
            const auto column = panel[i].column(k);
            for (int r = 0; r < ROWS; r++) sums[i][r] = add(sums[i][r], column, number[r]);
        }
    for (int i = 0; i < PANELS; i++) {
        const int64_t n = (p + i) * LANES;
        for (int r = 0; r < ROWS; r++) {
            Floats out = finished(m, sums[i][r], n, x, r);
            if (m.bias) out += some(m.bias, n, m.N);
            if (n + LANES <= m.N) *(Floats*)(y + r * m.N + n) = out;
            else std::memcpy(y + r * m.N + n, &out, 4 * (m.N - n));
        }
    }
}

// The same for the panels from p to `stop`
template <class Format, int ROWS>
static void block(const Matrix& m, const Rows<typename Format::Number>& x, int64_t p, int64_t stop,
                  float* y) {
    constexpr int SUMS = REGISTERS * 3 / 4;
    constexpr int PANELS = 4 * ROWS <= SUMS ? 4 : 2 * ROWS <= SUMS ? 2 : 1;
    for (; p + PANELS <= stop; p += PANELS) tile<Format, ROWS, PANELS>(m, x, p, y);
    for (; p < stop; p++) tile<Format, ROWS, 1>(m, x, p, y);
}

// Arranges rows of x for these loops: (columns, rows); in 8 bits, four values of a row in one.
static void arrange(const Matrix& m, const float* x, int rows, const float*, Rows<float>& to) {
    const int64_t columns = m.kind == INT4 ? FourBits::columns(m) : m.K;
    to.numbers.resize(columns * rows);
    if (columns > m.K) std::fill(to.numbers.begin(), to.numbers.end(), 0.0f);
    for (int r = 0; r < rows; r++, x += m.K)
        for (int64_t k = 0; k < m.K; k++) to.numbers[(m.offset + k) * rows + r] = x[k];
}

// The largest absolute value of K, / 127: with this scale all fit in 8 bits.
static float scale_of(const float* x, int64_t K) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t k = 0; k < K; k++) most = std::max(most, std::fabs(x[k]));
    return most / 127;
}

static void arrange(const Matrix& m, const float* x, int rows, const float* scale,
                    Rows<int32_t>& to) {
    const int64_t columns = EightBits::columns(m);
    to.numbers.resize(columns * rows);
    std::vector<int8_t> whole(4 * columns);  // zeros after the last column
    for (int r = 0; r < rows; r++, x += m.K) {
        to.scale[r] = scale ? scale[r] : scale_of(x, m.K);
        const float inverse = to.scale[r] > 0 ? 1 / to.scale[r] : 0;
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < m.K; k++) {
            const int32_t number = (int32_t)std::nearbyintf(x[k] * inverse);
            whole[k] = (int8_t)number, sum += number;
        }
        to.excess[r] = 128 * sum;
        for (int64_t c = 0; c < columns; c++)
            std::memcpy(&to.numbers[c * rows + r], &whole[4 * c], 4);
    }
}

template <class Format, int... R>
static void by_rows(const Matrix& m, const float* x, int64_t rows, const float* scale, float* y,
                    int threads, std::integer_sequence<int, R...>) {
    typedef Rows<typename Format::Number> Arranged;
    static void (*const blocks[])(const Matrix&, const Arranged&, int64_t, int64_t, float*) = {
        block<Format, R + 1>...};
    const int64_t parts = (rows + MOST - 1) / MOST, panels = (m.N + LANES - 1) / LANES;
    auto many = [&](int64_t part) { return (int)std::min<int64_t>(MOST, rows - part * MOST); };
    static thread_local std::vector<Arranged> kept;  // reuses its memory
    std::vector<Arranged>& arranged = kept;          // this thread's, read by all threads
    if (arranged.size() < (size_t)parts) arranged.resize(parts);
    for (int64_t i = 0; i < parts; i++)
        arrange(m, x + i * MOST * m.K, many(i), scale ? scale + i * MOST : nullptr, arranged[i]);
    // a few panels stay in a core's cache while all rows are multiplied with them
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p += 4)
        for (int64_t i = 0; i < parts; i++)
            blocks[many(i) - 1](m, arranged[i], p, std::min(p + 4, panels), y + i * MOST * m.N);
}

// y (rows, N) = x (rows, K) · Wᵀ + b.   scale: INT8, of each row of x; null: each row's own
static void multiply(const Matrix& m, const float* x, int64_t rows, const float* scale, float* y,
                     int threads) {
    constexpr auto each = std::make_integer_sequence<int, MOST>();
    switch (m.kind) {
    case FP32: return by_rows<Real<float>>(m, x, rows, scale, y, threads, each);
    case FP16: return by_rows<Real<Half>>(m, x, rows, scale, y, threads, each);
    case INT8: return by_rows<EightBits>(m, x, rows, scale, y, threads, each);
    case INT4: return by_rows<FourBits>(m, x, rows, scale, y, threads, each);
    }
}

// ---- 3. operations between matrices

// e^x to within a few units in the last place: 2^n · e^r, where |r| <= ln 2 / 2. Unlike std::exp,
// the compiler vectorizes it. (The polynomial is that of Cephes' expf.)
static inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyintf(x * 1.44269504f);
    const float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// Rotates consecutive heads (D) to a position: adjacent pairs are complex numbers, as in model.py.
static void turn(float* heads, int64_t many, const float* turns, int64_t D) {
    for (int64_t h = 0; h < many; h++, heads += D)
        for (int64_t d = 0; d < D; d += 2) {
            const float a = heads[d], b = heads[d + 1], c = turns[d], s = turns[d + 1];
            heads[d] = a * c - b * s, heads[d + 1] = a * s + b * c;
        }
}

constexpr int64_t BLOCK = 16;  // positions of a block of the cache, as in blocks.py

// The location of a slot's keys and values (heads, BLOCK, D), for some heads.
struct Kept {
    float *keys, *values;   // of block 0
    const int32_t* blocks;  // of the slot, in the order of its positions
    int64_t stride;         // floats from one block to the next
    int64_t block(int64_t l) const { return blocks[l / BLOCK] * stride; }
};

// The attention of some heads' queries, `group` per head, to L positions: y (heads · group, D),
// like q. All heads read a block before any reads the next, so that memory is read contiguously.
// p: room for L values per query
static inline void attend(const float* q, const Kept& kept, int64_t heads, int64_t group, int64_t L,
                          int64_t D, float* __restrict__ p, float* __restrict__ y) {
    const float root = 1 / std::sqrt((float)D);
    const int64_t queries = heads * group;
    for (int64_t first = 0; first < L; first += BLOCK) {
        const float* keys = kept.keys + kept.block(first);
        const int64_t many = std::min(BLOCK, L - first);
        for (int64_t i = 0; i < queries; i++)
            for (int64_t l = 0; l < many; l++) {
                const float *k = keys + (i / group * BLOCK + l) * D, *of = q + i * D;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < D; d++) sum += of[d] * k[d];
                p[i * L + first + l] = sum * root;
            }
    }
    for (int64_t i = 0; i < queries; i++) {
        float most = -INFINITY, total = 0, *of = p + i * L;
        for (int64_t l = 0; l < L; l++) most = std::max(most, of[l]);
#pragma omp simd reduction(+ : total)
        for (int64_t l = 0; l < L; l++) of[l] = exponential(of[l] - most), total += of[l];
        for (int64_t l = 0; l < L; l++) of[l] /= total;
    }
    std::fill(y, y + queries * D, 0.0f);
    for (int64_t first = 0; first < L; first += BLOCK) {
        const float* values = kept.values + kept.block(first);
        const int64_t many = std::min(BLOCK, L - first);
        for (int64_t i = 0; i < queries; i++)
            for (int64_t l = 0; l < many; l++) {
                const float* v = values + (i / group * BLOCK + l) * D;
                for (int64_t d = 0; d < D; d++) y[i * D + d] += p[i * L + first + l] * v[d];
            }
    }
}

// silu(gate) · up: gate_up (2 M) -> y (M)
static void gated(const float* gate_up, int64_t M, float* y) {
#pragma omp simd
    for (int64_t m = 0; m < M; m++)
        y[m] = gate_up[m] / (1 + exponential(-gate_up[m])) * gate_up[M + m];
}

// ---- 4. the layers

struct Layer {
    const float *attention_norm, *mlp_norm;  // (C)
    Matrix qkv, o, gate_up, down;
    float *keys, *values;  // (blocks, K, BLOCK, D)
};

struct Model {
    int64_t threads, C, H, K, D, M, W;
    double eps;
    const float* turns;     // (positions, D): cos and sin of each pair's angle
    const int32_t* blocks;  // (slots, W)
    const Layer* layers;
};

struct Pass {
    int64_t B;
    const int64_t *slots, *positions;  // (B)
    float* x;                          // (B, C)
    float* y;                          // (B, C): to be added to x
    float* h;                          // (B, C)
    float* wide;                       // (B, (H + 2 K) D) or (B, 2 M)
    float* narrow;                     // (B, H D) or (B, M)
    float* scale;                      // (B): scales of `narrow` in 8 bits
};

// x += y; h = norm(x)
static void add_and_norm(const Model& m, const Pass& now, const float* weight) {
    for (int64_t b = 0; b < now.B; b++) {
        float *x = now.x + b * m.C, *y = now.y + b * m.C, *h = now.h + b * m.C, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < m.C; c++) x[c] += y[c], squares += x[c] * x[c];
        const float size = 1 / std::sqrt(squares / m.C + (float)m.eps);
#pragma omp simd
        for (int64_t c = 0; c < m.C; c++) h[c] = x[c] * size * weight[c];
    }
}

// Rotates q and k, stores k and v in their slot's blocks, and attends to all of the slot.
static void keep_and_attend(const Model& m, const Pass& now, const Layer& layer) {
    const int64_t D = m.D, group = m.H / m.K;
    // a row per thread; if there are fewer rows, some of a row's heads
    const int64_t parts = std::min(m.K, (m.threads + now.B - 1) / now.B);
#pragma omp parallel for collapse(2) num_threads(m.threads) if (m.threads > 1)
    for (int64_t b = 0; b < now.B; b++)
        for (int64_t part = 0; part < parts; part++) {
            static thread_local std::vector<float> room;
            const int64_t j = part * m.K / parts, heads = (part + 1) * m.K / parts - j;
            const int64_t position = now.positions[b], L = position + 1, head = j * BLOCK * D;
            const Kept kept = {layer.keys + head, layer.values + head,
                               m.blocks + now.slots[b] * m.W, m.K * BLOCK * D};
            room.resize(heads * group * L);
            float* of_row = now.wide + b * (m.H + 2 * m.K) * D;
            float *q = of_row + j * group * D, *k = of_row + (m.H + j) * D, *v = k + m.K * D;
            turn(q, heads * group, m.turns + position * D, D);
            turn(k, heads, m.turns + position * D, D);
            const int64_t place = kept.block(position) + position % BLOCK * D;
            for (int64_t h = 0; h < heads; h++) {
                std::memcpy(kept.keys + place + h * BLOCK * D, k + h * D, 4 * D);
                std::memcpy(kept.values + place + h * BLOCK * D, v + h * D, 4 * D);
            }
            float* y = now.narrow + (b * m.H + j * group) * D;
            // the compiler keeps y in registers if it knows the size
            if (D == 64) attend(q, kept, heads, group, L, 64, room.data(), y);
            else if (D == 128) attend(q, kept, heads, group, L, 128, room.data(), y);
            else attend(q, kept, heads, group, L, D, room.data(), y);
        }
}

// Half of a layer without its last product, which may need the other ranks' scales first
static void up_to(const Matrix& last, const Model& m, const Pass& now, const Layer& layer) {
    if (&last == &layer.o) {
        add_and_norm(m, now, layer.attention_norm);
        multiply(layer.qkv, now.h, now.B, nullptr, now.wide, m.threads);
        keep_and_attend(m, now, layer);
    } else {
        add_and_norm(m, now, layer.mlp_norm);
        multiply(layer.gate_up, now.h, now.B, nullptr, now.wide, m.threads);
        for (int64_t b = 0; b < now.B; b++)
            gated(now.wide + b * 2 * m.M, m.M, now.narrow + b * m.M);
    }
    for (int64_t b = 0; b < now.B && last.kind == INT8; b++)
        now.scale[b] = scale_of(now.narrow + b * last.K, last.K);
}

extern "C" {

int64_t lanes() { return LANES; }

void product(const Matrix* m, const float* x, int64_t rows, const float* scale, float* y,
             int64_t threads) {
    multiply(*m, x, rows, scale, y, (int)threads);
}

// Runs stages first .. last - 1. A layer has four: up to the o matrix, its product, up to the down
// matrix, its product.
void stages(const Model* m, const Pass* now, int64_t first, int64_t last) {
    for (int64_t stage = first; stage < last; stage++) {
        const Layer& layer = m->layers[stage / 4];
        const Matrix& matrix = stage % 4 < 2 ? layer.o : layer.down;
        if (stage % 2 == 0) up_to(matrix, *m, *now, layer);
        else multiply(matrix, now->narrow, now->B, now->scale, now->y, (int)m->threads);
    }
}
}
