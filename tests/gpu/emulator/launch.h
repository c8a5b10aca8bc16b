// Launches by name, with the arguments of cuLaunchKernel: p[i] is the address of the i-th argument.
#pragma once

namespace emulator {

template <class Body> std::string launch(dim3 grid, dim3 dim, Body body) {
    Block block;
    block.grid = grid, block.dim = dim, block.size = static_cast<int>(dim.x * dim.y * dim.z);
    if (block.size < 1 || block.size > 1024) return "a block of " + std::to_string(block.size) + " threads; expected 1 to 1024";
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                block.index = dim3(x, y, z);
                const std::string error = run_block(block, body);
                if (!error.empty()) return error;
            }
    return "";
}

template <class... Arguments, size_t... I>
std::string launch_packed(void (*kernel)(Arguments...), dim3 grid, dim3 dim, void** p, std::index_sequence<I...>) {
    return launch(grid, dim, [=] { kernel(*static_cast<std::remove_reference_t<Arguments>*>(p[I])...); });
}

template <class... Arguments> std::string launch_packed(void (*kernel)(Arguments...), dim3 grid, dim3 dim, void** p) {
    return launch_packed(kernel, grid, dim, p, std::index_sequence_for<Arguments...>{});
}

template <class... Arguments> int argument_sizes(void (*)(Arguments...), unsigned* sizes) {
    const unsigned found[] = {static_cast<unsigned>(sizeof(Arguments))...};
    for (size_t i = 0; i < sizeof...(Arguments); ++i) sizes[i] = found[i];
    return sizeof...(Arguments);
}

} // namespace emulator

// Exports a kernel: cuemu_args_NAME gives the sizes of its arguments, cuemu_launch_NAME runs it and returns an error or null.
#define EMULATED_KERNEL(name)                                                                                                     \
    extern "C" int cuemu_args_##name(unsigned* sizes) { return emulator::argument_sizes(&name, sizes); }                          \
    extern "C" const char* cuemu_launch_##name(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,      \
                                               void** p) {                                                                        \
        static std::string error;                                                                                                 \
        error = emulator::launch_packed(&name, dim3(gx, gy, gz), dim3(bx, by, bz), p);                                            \
        return error.empty() ? nullptr : error.c_str();                                                                           \
    }
