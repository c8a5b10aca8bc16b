// The threads of a block as threads.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

namespace emulator {

inline thread_local Context context;

// The block was given up.
struct GivenUp {};

struct Lock {
    explicit Lock(Monitor& monitor) : held(monitor.mutex) {}
    std::unique_lock<std::mutex> held;
};

inline void note(Block& block, const std::string& error) {
    std::lock_guard<std::mutex> lock(block.error_mutex);
    if (block.error.empty()) block.error = error;
}

inline bool is_given_up(Block& block) {
    std::lock_guard<std::mutex> lock(block.error_mutex);
    return !block.error.empty();
}

[[noreturn]] inline void fail(Block& block, const std::string& error) {
    note(block, coordinates("block", context.block_index) + " " + coordinates("thread", context.thread) + ": " + error);
    throw GivenUp{};
}

template <class Done> void wait_until(Block& block, Monitor& monitor, Lock& lock, Done is_done, const char* what) {
    if (is_done()) {
        monitor.changed.notify_all();
        return;
    }
    for (int tenths = 0; !is_done(); ++tenths) {
        if (is_given_up(block)) throw GivenUp{};
        monitor.changed.wait_for(lock.held, std::chrono::milliseconds(100));
        if (tenths > 300) fail(block, std::string("nobody can go on: waits in ") + what);
    }
}

template <class Body> std::string run_block(Block& block, Body& body) {
    prepare(block);
    std::vector<std::thread> threads;
    for (int i = 0; i < block.size; ++i) {
        threads.emplace_back([&block, &body, i] {
            context.enter(block, i);
            const std::string name = "thread " + std::to_string(i);
            try {
                body();
            } catch (GivenUp&) {
                return;
            }
            {
                Warp& warp = block.warps[i >> 5];
                Lock lock(warp);
                warp.returned |= 1u << (i & 31);
                for (const Meeting& meeting : warp.meetings)
                    if (meeting.barrier.arrived > 0 && (meeting.mask >> (i & 31) & 1))
                        note(block, name + " returned while its warp waits for it in " + meeting.what);
            }
            Lock lock(block);
            --block.live;
            if (block.barrier.arrived > 0) note(block, name + " returned while others wait in __syncthreads");
        });
    }
    for (std::thread& thread : threads) thread.join();
    return block.error;
}

} // namespace emulator
