// A small CUDA on a CPU: enough of it to run attention.cu, one thread block after another, by a C++17 compiler that
// has ucontext.h.
//
// A thread of a thread block is a fibre, which gives way where it waits: at __syncthreads, and at what a warp does
// together (shuffles, mma). So one order of execution is seen, always the same. Races are found all the same, because
// they are not looked for in results: each element of a SHARED array remembers who wrote and who read it since the
// last barrier, and two threads of which one wrote, with no barrier between them, are a race in any order.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(type, name, size) static emulate::Watched<type, (size)> name(#name)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

constexpr int WARP = 32;
constexpr size_t STACK = 1 << 17;

struct Warp {
    unsigned long turn = 0;  // how often all lanes have met
    int arrived = 0;
    unsigned words[2][WARP];  // two, so that a fast lane does not overwrite what a slow one still reads
    const unsigned *a[WARP], *b[WARP];
    float *c[WARP];
};

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done = false;
    const unsigned long *waits_for = nullptr;  // a counter, and the value at which it must not stay
    unsigned long seen = 0;
};

static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static unsigned current, arrived;
static unsigned long epoch = 1, first_epoch = 1;  // counts barriers, and where those of this thread block begin
static long faults = 0;
static std::string first_fault;

static void report(const std::string &what) {
    if (!faults++) first_fault = what;
}

static void wait_for(const unsigned long &counter, unsigned long seen) {
    Fibre &mine = fibres[current];
    mine.waits_for = &counter;
    mine.seen = seen;
    swapcontext(&mine.context, &scheduler);
}

// An array in shared memory that knows of each element who touched it since the last barrier.
template <typename T, int SIZE>
class Watched {
    static constexpr int NOBODY = -1, MANY = -2;
    struct Element {
        T value;
        unsigned long written = 0, read = 0;  // epochs
        int writer = NOBODY, reader = NOBODY;
    };
    Element elements[SIZE];
    const char *name;

    void fault(int index, const char *what, int other) const {
        std::string who = other == MANY ? "several threads" : "thread " + std::to_string(other);
        report(std::string(name) + "[" + std::to_string(index) + "]: thread " + std::to_string(current) + " " + what + " " + who +
               ", with no barrier between");
    }
    T read(int index) {
        Element &e = at(index);
        int me = current;
        if (e.written < first_epoch)
            report(std::string(name) + "[" + std::to_string(index) + "]: read, but never written by this block");
        if (e.written == epoch && e.writer != me) fault(index, "reads what was written by", e.writer);
        e.reader = e.read == epoch && e.reader != me ? MANY : me;
        e.read = epoch;
        return e.value;
    }
    void write(int index, T value) {
        Element &e = at(index);
        int me = current;
        if (e.written == epoch && e.writer != me) fault(index, "writes what was written by", e.writer);
        if (e.read == epoch && e.reader != me) fault(index, "writes what was read by", e.reader);
        e.value = value;
        e.writer = me;
        e.written = epoch;
    }
    Element &at(int index) {
        if (index >= 0 && index < SIZE) return elements[index];
        report(std::string(name) + "[" + std::to_string(index) + "]: outside the array of " + std::to_string(SIZE));
        return elements[0];
    }

  public:
    explicit Watched(const char *name) : name(name) {}
    struct Reference {
        Watched &array;
        int index;
        operator T() const { return array.read(index); }
        T operator=(T value) const { return array.write(index, value), value; }
        T operator+=(T value) const { return *this = array.read(index) + value; }
    };
    Reference operator[](int index) { return {*this, index}; }
};

// All lanes of a warp meet; the last one does the work. The number of the meeting is returned.
template <typename Work>
static unsigned long meet(Warp &warp, Work work) {
    unsigned long turn = warp.turn;
    if (++warp.arrived == WARP) {
        work();
        warp.arrived = 0;
        ++warp.turn;
    } else {
        wait_for(warp.turn, turn);
    }
    return turn;
}

static float exact(unsigned short bits, bool is_bf16) {
    if (is_bf16) {
        unsigned word = unsigned(bits) << 16;
        float value;
        return std::memcpy(&value, &word, 4), value;
    }
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                 : exponent     ? std::ldexp(float(fraction + 1024), exponent - 25)
                                : std::ldexp(float(fraction), -24);
    return bits >> 15 ? -size : size;
}

static unsigned short rounded(float value, bool is_bf16) {  // to nearest, ties to even
    unsigned word;
    std::memcpy(&word, &value, 4);
    if (is_bf16) {
        if (value != value) return 0x7fff;
        return (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    unsigned short sign = word >> 16 & 0x8000;
    float size = std::fabs(value);
    if (!(size < 65520.0f)) return sign | (value != value ? 0x7fff : 0x7c00);
    if (size < 0x1p-14f) return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));  // zero and below normal
    int exponent;
    std::frexp(size, &exponent);
    unsigned fraction = (unsigned)std::nearbyint(std::ldexp(size, 11 - exponent));  // 1024 to 2048: may carry
    return sign | (unsigned short)(((exponent + 13) << 10) + fraction);
}

// D = A B + C for a warp. Which lane holds which element is NVIDIA's rule for mma.m16n8k16 (PTX, "Matrix fragments").
static void multiply(Warp &warp, bool is_bf16) {
    float A[16][16], B[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                A[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = exact(warp.a[lane][i] >> 16 * half, is_bf16);
        for (int i = 0; i < 2; ++i)
            for (int half = 0; half < 2; ++half)
                B[2 * t + half + 8 * i][g] = exact(warp.b[lane][i] >> 16 * half, is_bf16);
    }
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i) {
            float sum = 0;
            for (int k = 0; k < 16; ++k) sum += A[lane / 4 + 8 * (i / 2)][k] * B[k][lane % 4 * 2 + i % 2];
            warp.c[lane][i] += sum;
        }
}

template <typename Kernel>
static void enter(Kernel *kernel) {
    (*kernel)();
    fibres[current].done = true;
    swapcontext(&fibres[current].context, &scheduler);
}

template <typename Kernel>
static void run_block(Kernel &kernel, unsigned threads) {
    first_epoch = ++epoch;
    arrived = 0;
    fibres.resize(threads);
    warps.assign(threads / WARP, Warp());
    for (Fibre &fibre : fibres) {
        fibre.done = false;
        fibre.waits_for = nullptr;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = STACK;
        fibre.context.uc_link = nullptr;
        static Kernel *now;
        now = &kernel;
        makecontext(&fibre.context, +[] { enter(now); }, 0);
    }
    for (unsigned done = 0; done < threads;) {
        bool moved = false;
        for (current = 0; current < threads; ++current) {
            Fibre &fibre = fibres[current];
            if (fibre.done || (fibre.waits_for && *fibre.waits_for == fibre.seen)) continue;
            fibre.waits_for = nullptr;
            threadIdx.x = current;
            swapcontext(&scheduler, &fibre.context);
            moved = true;
            done += fibre.done;
        }
        if (!moved) return report("a barrier or a warp waits for threads that never come");
    }
}

template <typename Kernel>
static long launch(Kernel kernel, const int *grid, int threads) {
    faults = 0;
    gridDim = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
    blockDim = {unsigned(threads), 1, 1};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(kernel, threads);
    return faults;
}

}  // namespace emulate

static void __syncthreads() {
    unsigned long before = emulate::epoch;
    if (++emulate::arrived == emulate::fibres.size()) {
        emulate::arrived = 0;
        ++emulate::epoch;
    } else {
        emulate::wait_for(emulate::epoch, before);
    }
}

static float __shfl_xor_sync(unsigned, float value, int mask) {
    emulate::Warp &warp = emulate::warps[threadIdx.x / emulate::WARP];
    unsigned lane = threadIdx.x % emulate::WARP, word;
    std::memcpy(&word, &value, 4);
    warp.words[warp.turn % 2][lane] = word;
    unsigned long turn = emulate::meet(warp, [] {});
    std::memcpy(&value, &warp.words[turn % 2][lane ^ mask], 4);
    return value;
}

static float atomicAdd(float *address, float value) {  // fibres do not interrupt each other
    float before = *address;
    *address += value;
    return before;
}

static void mma_16x8x16(float *c, const unsigned *a, const unsigned *b, bool is_bf16) {
    emulate::Warp &warp = emulate::warps[threadIdx.x / emulate::WARP];
    unsigned lane = threadIdx.x % emulate::WARP;
    warp.a[lane] = a, warp.b[lane] = b, warp.c[lane] = c;
    emulate::meet(warp, [&] { emulate::multiply(warp, is_bf16); });
}

#define EXPORT(kernel)                                                              \
    extern "C" long launch_##kernel(const Problem *p, const int *grid, int threads) { \
        Problem problem = *p;                                                       \
        return emulate::launch([problem] { kernel(problem); }, grid, threads);      \
    }
extern "C" const char *first_fault() { return emulate::first_fault.c_str(); }
