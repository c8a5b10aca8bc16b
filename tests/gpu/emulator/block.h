// A block's state and CUDA's own words.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(EMULATOR_THREADS)
#include <condition_variable>
#include <mutex>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer puts its red zones round a static only in its own section.
#define __shared__ static
#define EMULATOR_FILLS_SHARED 0
#else
#define __shared__ static __attribute__((section("emulator_shared")))
#define EMULATOR_FILLS_SHARED 1
extern "C" {
extern char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));
}
#endif

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

// One for each warp and one for each block: a common one would order the warps and hide their races from ThreadSanitizer.
struct Monitor {
#if defined(EMULATOR_THREADS)
    std::mutex mutex;
    std::condition_variable changed;
#endif
};

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

// Where the lanes of one mask meet. Two buffers: a lane may be at the next meeting before the others have read this one.
struct Meeting {
    static constexpr int WORDS = 6;
    unsigned mask = 0;
    const char* what = "";
    Barrier barrier;
    uint32_t brought[2][32][WORDS] = {};
};

struct Warp : Monitor {
    std::list<Meeting> meetings;
    unsigned present = 0, returned = 0;
};

struct Block : Monitor {
    dim3 grid, dim, index;
    int size = 0, live = 0;
    Barrier barrier;
    int counts[2] = {0, 0};
    std::vector<Warp> warps;
    std::string error;
#if defined(EMULATOR_THREADS)
    std::mutex error_mutex;
#endif
};

// The thread that runs.
struct Context {
    uint3 thread, block_index;
    dim3 dim, grid;
    int number = 0; // in its block
    Block* block = nullptr;

    void enter(Block& in, int n) {
        block = &in, number = n, dim = in.dim, grid = in.grid;
        block_index = {in.index.x, in.index.y, in.index.z};
        const unsigned at = static_cast<unsigned>(n);
        thread = {at % dim.x, at / dim.x % dim.y, at / (dim.x * dim.y)};
    }
    int lane() const { return number & 31; }
    Warp& warp() const { return block->warps[number >> 5]; }
};

inline std::string coordinates(const char* what, uint3 at) {
    return std::string(what) + " (" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) + ")";
}

inline void prepare(Block& block) {
    block.live = block.size;
    block.barrier = Barrier{};
    block.counts[0] = block.counts[1] = 0;
    block.error.clear();
    block.warps = std::vector<Warp>((block.size + 31) / 32);
    for (int i = 0; i < block.size; ++i) block.warps[i >> 5].present |= 1u << (i & 31);
#if EMULATOR_FILLS_SHARED
    if (__start_emulator_shared != nullptr)
        memset(__start_emulator_shared, 0xff, static_cast<size_t>(__stop_emulator_shared - __start_emulator_shared));
#endif
}

} // namespace emulator
