// Attention in CUDA C++, rung by rung: one source for a GPU (NVRTC or nvcc) and, by emulate.hpp, for a CPU.
//
//     s = scale q k^T      p = exp(s - m)      l = sum p      out = p v / l      lse = m + log l
//
// query, out, dout (B, T, N, H), key, value (B, S, K, H); lse, dlse, delta (B, N, T); dq float32. Compiled for one
// type of element and one head_dim: -DELEMENT=0 (float32), 1 (bfloat16) or 2 (float16), and -DHEAD=32, 64, 128 or 256,
// of which the true head_dim H may be less: the rest is zeros on chip.

struct Problem {
    const void *query, *key, *value;
    void *out;
    float *lse;
    const void *dout;
    const float *dlse;
    float *delta, *dq;
    void *dk, *dv;
    float *work;  // for the keys-outer kernel: (B, N, T, H + 2), the unfinished out, m and l
    int B, T, S, N, K, H;
    float scale;
    int is_causal;
};

#ifdef __CUDACC__
#define SHARED(type, name, size) __shared__ type name[size]
#define EXPORT(kernel)
#define INFINITY __int_as_float(0x7f800000)
#else
#include "emulate.hpp"
#endif

constexpr int D = HEAD;
constexpr int THREADS = 128;

// ---- Elements: 32 bits, or 16 in the lower or upper half of a 32-bit word ----

#if ELEMENT == 0
typedef float E;
__device__ float wide(E x) { return x; }
__device__ E narrow(float x) { return x; }
#else
struct E {
    unsigned short bits;
};
constexpr bool IS_BF16 = ELEMENT == 1;
#ifdef __CUDACC__
__device__ float wide(E x) {
    float wide;
    if (IS_BF16) return __int_as_float(int(x.bits) << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}
__device__ E narrow(float x) {
    E narrow;
    if (IS_BF16)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    return narrow;
}
// Not volatile: it has no effect but its result, and the compiler may move it.
__device__ void mma_16x8x16(float *c, const unsigned *a, const unsigned *b, bool) {
#if ELEMENT == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
__device__ float wide(E x) { return emulate::exact(x.bits, IS_BF16); }
__device__ E narrow(float x) { return {emulate::rounded(x, IS_BF16)}; }
#endif
__device__ unsigned pack(E low, E high) { return low.bits | unsigned(high.bits) << 16; }
#endif

// ---- Rows in memory ----

struct Head {  // one query head of one member of the batch, and the key head that it reads
    int b, n, k;
};
__device__ Head head_of(const Problem &p, int index) {
    int b = index / p.N, n = index % p.N;
    return {b, n, n / (p.N / p.K)};
}
__device__ long query_row(const Problem &p, Head head, int i) {
    return ((long(head.b) * p.T + i) * p.N + head.n) * p.H;
}
__device__ long key_row(const Problem &p, Head head, int j) {
    return ((long(head.b) * p.S + j) * p.K + head.k) * p.H;
}
__device__ long stat(const Problem &p, Head head, int i) {  // of lse and delta
    return (long(head.b) * p.N + head.n) * p.T + i;
}
__device__ int least(int a, int b) { return a < b ? a : b; }
__device__ float most(float a, float b) { return a > b ? a : b; }
// Keys that queries below `stop` see: tiles beyond them are not even loaded.
__device__ int keys_of(const Problem &p, int stop) { return p.is_causal ? least(p.S, stop) : p.S; }
__device__ float load(const void *array, long row, int d, bool is_inside, int H) {
    return is_inside && d < H ? wide(((const E *)array)[row + d]) : 0.0f;
}

// ---- Rung a: a thread for each query and dimension, and each of them computes the whole row of logits ----
// grid: (queries x dimensions / threads, 1, B x N). The dimensions of a query see the same logits, H times computed.

__device__ float logit(const Problem &p, long q, long k) {
    float s = 0;
    for (int d = 0; d < p.H; ++d) s += wide(((const E *)p.query)[q + d]) * wide(((const E *)p.key)[k + d]);
    return p.scale * s;
}

extern "C" __global__ void forward_elements(Problem p) {
    Head head = head_of(p, blockIdx.z);
    long element = long(blockIdx.x) * blockDim.x + threadIdx.x;
    int i = int(element / p.H), d = int(element % p.H);
    if (i >= p.T) return;
    long q = query_row(p, head, i);
    float m = -INFINITY, l = 0, out = 0;
    for (int j = 0; j < keys_of(p, i + 1); ++j) {
        long k = key_row(p, head, j);
        float s = logit(p, q, k), larger = most(m, s);
        float shrink = expf(m - larger), weight = expf(s - larger);
        l = l * shrink + weight;
        out = out * shrink + weight * wide(((const E *)p.value)[k + d]);
        m = larger;
    }
    ((E *)p.out)[q + d] = narrow(out / l);
    if (d == 0) p.lse[stat(p, head, i)] = m + logf(l);
}
EXPORT(forward_elements)

// ---- Tiles of keys and values, as float32 in shared memory ----

constexpr int KEYS = 2048 / D < 32 ? 2048 / D : 32;

template <typename Tile>
__device__ void load_keys(const Problem &p, Head head, const void *array, int start, Tile &tile) {
    for (int e = threadIdx.x; e < KEYS * D; e += blockDim.x) {
        int j = start + e / D;
        tile[e] = load(array, key_row(p, head, j), e % D, j < p.S, p.H);
    }
}

// What a thread that owns a query does with a tile: q, and out, m and l as far as they are known.
template <typename Tile>
__device__ void attend(const Problem &p, int i, int start, const float *q, float *out,
                       float &m, float &l, Tile &keys, Tile &values) {
    float weights[KEYS], larger = m, sum = 0;
    int stop = i < p.T ? keys_of(p, i + 1) - start : 0;
    if (stop <= 0) return;
    for (int j = 0; j < KEYS; ++j) {
        float s = 0;
        for (int d = 0; d < D; ++d) s += q[d] * keys[j * D + d];
        weights[j] = j < stop ? p.scale * s : -INFINITY;
        larger = most(larger, weights[j]);
    }
    float shrink = expf(m - larger);
    for (int d = 0; d < D; ++d) out[d] *= shrink;
    for (int j = 0; j < KEYS; ++j) {
        float weight = expf(weights[j] - larger);
        sum += weight;
        for (int d = 0; d < D; ++d) out[d] += weight * values[j * D + d];
    }
    l = l * shrink + sum;
    m = larger;
}

// ---- Rung b: the order of FlashAttention-1. Keys outside: out, m and l of every query come and go once a tile ----
// grid: (1, 1, B x N): a thread block for a whole head, because two must not change one row of out.

extern "C" __global__ void __launch_bounds__(THREADS) forward_keys_outer(Problem p) {
    SHARED(float, keys, KEYS * D);
    SHARED(float, values, KEYS * D);
    Head head = head_of(p, blockIdx.z);
    for (int start = 0; start < keys_of(p, p.T); start += KEYS) {
        load_keys(p, head, p.key, start, keys);
        load_keys(p, head, p.value, start, values);
        __syncthreads();
        bool is_last = start + KEYS >= keys_of(p, p.T);
        for (int i = threadIdx.x; i < p.T; i += blockDim.x) {
            float q[D], out[D], *work = p.work + stat(p, head, i) * (p.H + 2);
            float m = start ? work[p.H] : -INFINITY, l = start ? work[p.H + 1] : 0;
            for (int d = 0; d < D; ++d) {
                q[d] = load(p.query, query_row(p, head, i), d, true, p.H);
                out[d] = start && d < p.H ? work[d] : 0;
            }
            attend(p, i, start, q, out, m, l, keys, values);
            work[p.H] = m;
            work[p.H + 1] = l;
            for (int d = 0; d < D; ++d) {
                if (d >= p.H) continue;
                work[d] = out[d];
                if (!is_last) continue;
                ((E *)p.out)[query_row(p, head, i) + d] = narrow(out[d] / l);
            }
            if (is_last) p.lse[stat(p, head, i)] = m + logf(l);
        }
        __syncthreads();
    }
}
EXPORT(forward_keys_outer)

// ---- Rung c: queries outside. A thread owns a query and keeps its row of out to the end ----
// grid: (T / THREADS, 1, B x N)

extern "C" __global__ void __launch_bounds__(THREADS) forward_rows(Problem p) {
    SHARED(float, keys, KEYS * D);
    SHARED(float, values, KEYS * D);
    Head head = head_of(p, blockIdx.z);
    int first = blockIdx.x * THREADS, i = first + threadIdx.x;
    float q[D], out[D], m = -INFINITY, l = 0;
    for (int d = 0; d < D; ++d) {
        q[d] = load(p.query, query_row(p, head, i), d, i < p.T, p.H);
        out[d] = 0;
    }
    int stop = keys_of(p, least(p.T, first + THREADS));
    for (int start = 0; start < stop; start += KEYS) {
        load_keys(p, head, p.key, start, keys);
        load_keys(p, head, p.value, start, values);
        __syncthreads();
        attend(p, i, start, q, out, m, l, keys, values);
        __syncthreads();
    }
    if (i >= p.T) return;
    for (int d = 0; d < D; ++d)
        if (d < p.H) ((E *)p.out)[query_row(p, head, i) + d] = narrow(out[d] / l);
    p.lse[stat(p, head, i)] = m + logf(l);
}
EXPORT(forward_rows)

// ---- Rung d: tensor cores. A warp owns 16 queries; logits, weights and out stay in its registers ----
// grid: (T / 64, 1, B x N), 128 threads. Lane 4 g + t holds, of a tile of 16 queries and 8 keys, in c[0] and c[1] row g
// and in c[2] and c[3] row g + 8, columns 2 t and 2 t + 1. Two such tiles side by side, rounded, are what the product
// with the values wants as its first factor, in the same lanes: weights never leave the registers.

#if ELEMENT != 0
constexpr int TILE_Q = 64, TILE_K = D == 256 ? 32 : 64;
// Words between rows of shared memory, so that the 32 lanes of a warp read 32 different banks.
constexpr int KEY_STRIDE = D / 2 + 4, VALUE_STRIDE = D + 8;

__device__ E element(const void *array, long row, int d, bool is_inside, int H) {
    E zero = {0};
    return is_inside && d < H ? ((const E *)array)[row + d] : zero;
}
__device__ unsigned two(const void *array, long row, int d, bool is_inside, int H) {
    if (is_inside && d + 1 < H && H % 2 == 0) return *(const unsigned *)((const E *)array + row + d);
    return pack(element(array, row, d, is_inside, H), element(array, row, d + 1, is_inside, H));
}
constexpr unsigned ALL_LANES = ~0u;
__device__ float over_four_lanes(float x, bool is_sum) {
    for (int mask = 1; mask <= 2; mask *= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, mask);
        x = is_sum ? x + other : most(x, other);
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) forward_tensor_cores(Problem p) {
    SHARED(unsigned, keys, TILE_K * KEY_STRIDE);          // two dimensions of a key in a word
    SHARED(unsigned, values, TILE_K / 2 * VALUE_STRIDE);  // two keys of a dimension in a word
    Head head = head_of(p, blockIdx.z);
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int first = blockIdx.x * TILE_Q, row = first + threadIdx.x / 32 * 16 + g;

    unsigned q[D / 16][4];
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            int i = row + 8 * (part % 2), d = 16 * step + 2 * t + 8 * (part / 2);
            q[step][part] = two(p.query, query_row(p, head, i), d, i < p.T, p.H);
        }
    float out[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    const float in_base_two = p.scale * 1.4426950408889634f;

    for (int start = 0; start < keys_of(p, least(p.T, first + TILE_Q)); start += TILE_K) {
        for (int e = threadIdx.x; e < TILE_K * (D / 2); e += THREADS) {
            int j = e / (D / 2), d = e % (D / 2);
            keys[j * KEY_STRIDE + d] = two(p.key, key_row(p, head, start + j), 2 * d, start + j < p.S, p.H);
        }
        for (int e = threadIdx.x; e < TILE_K / 2 * D; e += THREADS) {
            int j = start + e / D * 2, d = e % D;
            values[e / D * VALUE_STRIDE + d] = pack(element(p.value, key_row(p, head, j), d, j < p.S, p.H),
                                                    element(p.value, key_row(p, head, j + 1), d, j + 1 < p.S, p.H));
        }
        __syncthreads();

        float s[TILE_K / 8][4] = {};
#pragma unroll
        for (int column = 0; column < TILE_K / 8; ++column)
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                int word = (8 * column + g) * KEY_STRIDE + 8 * step + t;
                unsigned b[2] = {keys[word], keys[word + 4]};
                mma_16x8x16(s[column], q[step], b, IS_BF16);
            }
        // A tile that every one of these queries sees whole needs no mask.
        bool is_full = start + TILE_K <= keys_of(p, first + 1);
        float larger[2] = {m[0], m[1]};
#pragma unroll
        for (int column = 0; column < TILE_K / 8; ++column)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                int j = start + 8 * column + 2 * t + part % 2, i = row + 8 * (part / 2);
                bool is_seen = is_full || j < keys_of(p, i + 1);
                s[column][part] = is_seen ? in_base_two * s[column][part] : -INFINITY;
                larger[part / 2] = most(larger[part / 2], s[column][part]);
            }
        float shrink[2], sum[2] = {0, 0};
        for (int half = 0; half < 2; ++half) {
            larger[half] = over_four_lanes(larger[half], false);
            shrink[half] = exp2f(m[half] - larger[half]);
            m[half] = larger[half];
        }
#pragma unroll
        for (int column = 0; column < TILE_K / 8; ++column)
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                s[column][part] = exp2f(s[column][part] - m[part / 2]);
                sum[part / 2] += s[column][part];
            }
        for (int half = 0; half < 2; ++half) l[half] = l[half] * shrink[half] + sum[half];
#pragma unroll
        for (int column = 0; column < D / 8; ++column)
#pragma unroll
            for (int part = 0; part < 4; ++part) out[column][part] *= shrink[part / 2];

        // -- p v by tensor cores
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
            unsigned weights[4];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float *two_weights = s[2 * step + part / 2] + part % 2 * 2;
                weights[part] = pack(narrow(two_weights[0]), narrow(two_weights[1]));
            }
#pragma unroll
            for (int column = 0; column < D / 8; ++column) {
                int word = (8 * step + t) * VALUE_STRIDE + 8 * column + g;
                unsigned b[2] = {values[word], values[word + 4 * VALUE_STRIDE]};
                mma_16x8x16(out[column], weights, b, IS_BF16);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int i = row + 8 * half;
        l[half] = over_four_lanes(l[half], true);
        if (i >= p.T) continue;
        if (t == 0) p.lse[stat(p, head, i)] = 0.6931471805599453f * m[half] + logf(l[half]);
#pragma unroll
        for (int column = 0; column < D / 8; ++column)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                int d = 8 * column + 2 * t + part;
                if (d < p.H)
                    ((E *)p.out)[query_row(p, head, i) + d] = narrow(out[column][2 * half + part] / l[half]);
            }
    }
}
EXPORT(forward_tensor_cores)
#endif

// ---- Backward: delta, then one kernel. A thread block owns a tile of keys, and adds its part of dq by atomicAdd ----
// grid of delta: (T / THREADS, 1, B x N); of backward: (S / ROWS, 1, B x K)

extern "C" __global__ void delta(Problem p) {
    Head head = head_of(p, blockIdx.z);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.T) return;
    long row = query_row(p, head, i);
    float sum = 0;
    for (int d = 0; d < p.H; ++d) sum += wide(((const E *)p.out)[row + d]) * wide(((const E *)p.dout)[row + d]);
    p.delta[stat(p, head, i)] = sum - p.dlse[stat(p, head, i)];
}
EXPORT(delta)

constexpr int ROWS = 2048 / D < 32 ? 2048 / D : 32;  // of queries and of keys
constexpr int MINE = (ROWS * D + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) backward(Problem p) {
    SHARED(float, q, ROWS * D);
    SHARED(float, k, ROWS * D);
    SHARED(float, v, ROWS * D);
    SHARED(float, dout, ROWS * D);
    SHARED(float, weights, ROWS * ROWS);
    SHARED(float, ds, ROWS * ROWS);
    int group = p.N / p.K, start = blockIdx.x * ROWS;
    Head head = {int(blockIdx.z) / p.K, 0, int(blockIdx.z) % p.K};
    float dk[MINE] = {}, dv[MINE] = {};
    for (int e = threadIdx.x; e < ROWS * D; e += THREADS) {
        int j = start + e / D;
        k[e] = load(p.key, key_row(p, head, j), e % D, j < p.S, p.H);
        v[e] = load(p.value, key_row(p, head, j), e % D, j < p.S, p.H);
    }
    for (head.n = head.k * group; head.n < (head.k + 1) * group; ++head.n)
        for (int first = p.is_causal ? start : 0; first < p.T; first += ROWS) {
            for (int e = threadIdx.x; e < ROWS * D; e += THREADS) {
                int i = first + e / D;
                q[e] = load(p.query, query_row(p, head, i), e % D, i < p.T, p.H);
                dout[e] = load(p.dout, query_row(p, head, i), e % D, i < p.T, p.H);
            }
            __syncthreads();
            for (int e = threadIdx.x; e < ROWS * ROWS; e += THREADS) {
                int row = e / ROWS, column = e % ROWS, i = first + row, j = start + column;
                float s = 0, dp = 0;
                for (int d = 0; d < D; ++d) {
                    s += q[row * D + d] * k[column * D + d];
                    dp += dout[row * D + d] * v[column * D + d];
                }
                bool is_seen = i < p.T && j < keys_of(p, i + 1);
                float weight = is_seen ? expf(p.scale * s - p.lse[stat(p, head, i)]) : 0;
                weights[e] = weight;
                ds[e] = is_seen ? weight * (dp - p.delta[stat(p, head, i)]) : 0;
            }
            __syncthreads();
            // -- dk, dv and dq of a tile
            for (int mine = 0; mine < MINE; ++mine) {
                int e = threadIdx.x + mine * THREADS, row = e / D, d = e % D;
                if (row >= ROWS) continue;
                float sum = 0;
                for (int other = 0; other < ROWS; ++other) {
                    dv[mine] += weights[other * ROWS + row] * dout[other * D + d];
                    dk[mine] += ds[other * ROWS + row] * q[other * D + d];
                    sum += ds[row * ROWS + other] * k[other * D + d];
                }
                if (first + row < p.T && d < p.H)
                    atomicAdd(p.dq + query_row(p, head, first + row) + d, p.scale * sum);
            }
            __syncthreads();
        }
    for (int mine = 0; mine < MINE; ++mine) {
        int e = threadIdx.x + mine * THREADS, j = start + e / D, d = e % D;
        if (e / D >= ROWS || j >= p.S || d >= p.H) continue;
        ((E *)p.dk)[key_row(p, head, j) + d] = narrow(p.scale * dk[mine]);
        ((E *)p.dv)[key_row(p, head, j) + d] = narrow(dv[mine]);
    }
}
EXPORT(backward)
