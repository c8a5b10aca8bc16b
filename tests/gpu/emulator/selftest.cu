// What the emulator promises: features that kernels rely on, and misuse that it must report.
#include "emulator.h"

extern "C" __global__ void shuffles(int* out) { // rows of blockDim.x
    const int v = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
    out[0 * n + v] = __shfl_xor_sync(0xffffffffu, v, 5);
    out[1 * n + v] = __shfl_down_sync(0xffffffffu, v, 3u, 8);
    out[2 * n + v] = __shfl_up_sync(0xffffffffu, v, 2u, 16);
    out[3 * n + v] = __shfl_sync(0xffffffffu, v, 9, 8);
    out[4 * n + v] = static_cast<int>(__ballot_sync(0xffffffffu, v % 3 == 0));
    const unsigned half = v & 16 ? 0xffff0000u : 0x0000ffffu;
    if (v & 16) {
        out[5 * n + v] = __shfl_xor_sync(half, v * 2, 1);
    } else {
        out[5 * n + v] = __shfl_xor_sync(half, v * 3, 2);
    }
}

extern "C" __global__ void transpose(float* out, int* counts) { // blocks of 16 x 16
    __shared__ float tile[16][17];
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), block = static_cast<int>(blockIdx.x);
    tile[y][x] = static_cast<float>(y * 16 + x + 1000 * block);
    const int count = __syncthreads_count(x == y);
    out[(block * 16 + y) * 16 + x] = tile[x][y];
    if (x == 0 && y == 0) counts[block] = count;
}

// d [16, 8] = c + a [16, 16] b [16, 8], all row-major, one warp a block; a and b are bf16.
extern "C" __global__ void product(const uint16_t* a, const uint16_t* b, float* d) {
    const int lane = static_cast<int>(threadIdx.x), g = lane / 4, q = lane % 4;
    const auto two = [](uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; };
    uint32_t left[4];
    for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, k = q * 2 + i / 2 * 8;
        left[i] = two(a[row * 16 + k], a[row * 16 + k + 1]);
    }
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + q * 2 + i % 2];
    emulator::mma_bf16(sums, left, two(b[(q * 2) * 8 + g], b[(q * 2 + 1) * 8 + g]), two(b[(q * 2 + 8) * 8 + g], b[(q * 2 + 9) * 8 + g]));
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + q * 2 + i % 2] = sums[i];
}

extern "C" __global__ void convert(const float* values, uint16_t* bfloats, uint16_t* halves, float* back) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    bfloats[i] = emulator::float_to_bfloat(values[i]);
    halves[i] = emulator::float_to_half(values[i]);
    back[i] = emulator::half_to_float(static_cast<uint16_t>(i));
}

// ---- misuse -----------------------------------------------------------------------------------------------------------------

extern "C" __global__ void bad_shuffle(int* out) { // half a warp shuffles with all of it
    const int v = static_cast<int>(threadIdx.x);
    if (v < 16) out[v] = __shfl_xor_sync(0xffffffffu, v, 1);
}
extern "C" __global__ void bad_barrier(int* out) { // some threads skip a barrier
    if (threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = 1;
}
extern "C" __global__ void bad_return(int* out) { // some threads return before a barrier
    if (threadIdx.x >= 50) return;
    out[threadIdx.x] = 1;
    __syncthreads();
}
extern "C" __global__ void bad_mask(int* out) { // a lane that is not in its own mask
    const int v = static_cast<int>(threadIdx.x);
    out[v] = v & 1 ? __shfl_xor_sync(0x55555555u, v, 2) : 0;
}
extern "C" __global__ void bad_meeting(int* out) { // two operations at one place
    const int v = static_cast<int>(threadIdx.x);
    out[v] = v & 1 ? __shfl_xor_sync(0xffffffffu, v, 1) : static_cast<int>(__ballot_sync(0xffffffffu, v));
}
extern "C" __global__ void bad_mma(float* out) { // fifteen lanes bring nothing
    float d[4] = {};
    const uint32_t a[4] = {};
    if (threadIdx.x < 17) emulator::mma_bf16(d, a, 0, 0);
    out[threadIdx.x] = d[0];
}
extern "C" __global__ void bad_unwritten(float* out) { // half of the shared memory is read before anyone writes it
    __shared__ float shared[64];
    if (threadIdx.x < 32) shared[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x];
}
extern "C" __global__ void bad_no_barrier(int* out) { // "a warp runs in lockstep"
    __shared__ int shared[64];
    shared[threadIdx.x] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
extern "C" __global__ void bad_shared(int* out) { // one element past the end of shared memory
    __shared__ int shared[64];
    shared[threadIdx.x + 1] = 1;
    __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x];
}
extern "C" __global__ void bad_global(int* out) { out[64 + threadIdx.x] = 1; } // behind an array of 64
extern "C" __global__ void bad_alignment(int* out) { // sixteen bytes from an odd address
    out[threadIdx.x] = static_cast<int>(reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(out) + 2)->x);
}

EMULATED_KERNEL(shuffles)
EMULATED_KERNEL(transpose)
EMULATED_KERNEL(product)
EMULATED_KERNEL(convert)
EMULATED_KERNEL(bad_shuffle)
EMULATED_KERNEL(bad_barrier)
EMULATED_KERNEL(bad_return)
EMULATED_KERNEL(bad_mask)
EMULATED_KERNEL(bad_meeting)
EMULATED_KERNEL(bad_mma)
EMULATED_KERNEL(bad_unwritten)
EMULATED_KERNEL(bad_no_barrier)
EMULATED_KERNEL(bad_shared)
EMULATED_KERNEL(bad_global)
EMULATED_KERNEL(bad_alignment)

#if defined(EMULATOR_MAIN)
// The program of the sanitizers: runs the kernel that it is told, one block of 64 threads on an array of 64 words.
int main(int, char** arguments) {
    static const struct {
        const char* name;
        const char* (*launch)(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void**);
    } kernels[] = {
        {"transpose", nullptr},
        {"bad_no_barrier", cuemu_launch_bad_no_barrier},
        {"bad_shared", cuemu_launch_bad_shared},
        {"bad_global", cuemu_launch_bad_global},
        {"bad_alignment", cuemu_launch_bad_alignment},
    };
    for (const auto& kernel : kernels) {
        if (strcmp(kernel.name, arguments[1]) != 0) continue;
        const char* error;
        if (kernel.launch == nullptr) {
            std::vector<float> out(256);
            std::vector<int> counts(1);
            float* p = out.data();
            int* q = counts.data();
            void* packed[] = {&p, &q};
            error = cuemu_launch_transpose(1, 1, 1, 16, 16, 1, packed);
        } else {
            int* out = new int[64];
            void* packed[] = {&out};
            error = kernel.launch(1, 1, 1, 64, 1, 1, packed);
            delete[] out;
        }
        puts(error == nullptr ? "done" : error);
        return 0;
    }
    return 2;
}
#endif
