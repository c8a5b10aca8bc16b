// Barriers, shuffles and votes: what the threads of a block or the lanes of a warp do together.
#pragma once

namespace emulator {

// Waits for the whole block; returns how many of its threads brought true.
inline int meet_block(bool is_true) {
    Block& block = *context.block;
    Lock lock(block);
    if (block.live != block.size) fail(block, "__syncthreads after " + std::to_string(block.size - block.live) + " threads of the block returned");
    const unsigned generation = block.barrier.generation;
    block.counts[generation & 1] += is_true;
    if (++block.barrier.arrived == block.size) {
        block.barrier.arrived = 0;
        block.counts[(generation + 1) & 1] = 0;
        ++block.barrier.generation;
    }
    wait_until(block, block, lock, [&] { return block.barrier.generation != generation; }, "__syncthreads");
    return block.counts[generation & 1];
}

// Waits for the lanes of `mask`; returns those that are there. `all` gets what each of them brought.
template <class Value> unsigned meet_warp(unsigned mask, const Value& value, const char* what, Value (&all)[32]) {
    static_assert(sizeof(Value) <= 4 * Meeting::WORDS, "a lane brings too much");
    Block& block = *context.block;
    Warp& warp = context.warp();
    const int lane = context.lane();
    Lock lock(warp);
    if (!(mask >> lane & 1)) fail(block, std::string(what) + ": the calling lane is not in its own mask");
    mask &= warp.present;
    if (mask & warp.returned) fail(block, std::string(what) + ": a lane of the mask has returned");
    Meeting* meeting = nullptr;
    for (Meeting& found : warp.meetings)
        if (found.mask == mask) meeting = &found;
    if (meeting == nullptr) {
        warp.meetings.emplace_back();
        meeting = &warp.meetings.back();
        meeting->mask = mask;
    }
    if (meeting->barrier.arrived == 0) {
        meeting->what = what;
    } else if (strcmp(meeting->what, what) != 0) {
        fail(block, std::string("lanes of one warp meet at different operations: ") + what + " and " + meeting->what);
    }
    const unsigned generation = meeting->barrier.generation;
    memcpy(meeting->brought[generation & 1][lane], &value, sizeof value);
    if (++meeting->barrier.arrived == __builtin_popcount(mask)) {
        meeting->barrier.arrived = 0;
        ++meeting->barrier.generation;
    }
    wait_until(block, warp, lock, [&] { return meeting->barrier.generation != generation; }, what);
    for (int i = 0; i < 32; ++i) memcpy(&all[i], meeting->brought[generation & 1][i], sizeof value);
    return mask;
}

// What lane `source` brought; the caller's own where that lies outside its segment.
template <class Value> Value shuffle(unsigned mask, Value value, int source, bool is_inside, const char* what) {
    Value all[32];
    const unsigned met = meet_warp(mask, value, what, all);
    if (!is_inside) return value;
    if (!(met >> source & 1)) fail(*context.block, std::string(what) + " reads a lane outside the mask");
    return all[source];
}

} // namespace emulator

#define threadIdx (emulator::context.thread)
#define blockIdx (emulator::context.block_index)
#define blockDim (emulator::context.dim)
#define gridDim (emulator::context.grid)
#define warpSize 32

inline void __syncthreads() { emulator::meet_block(false); }
inline int __syncthreads_count(int is_true) { return emulator::meet_block(is_true != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    int all[32];
    emulator::meet_warp(mask, 0, "__syncwarp", all);
}

template <class Value> Value __shfl_xor_sync(unsigned mask, Value value, int distance, int width = 32) {
    const int lane = emulator::context.lane(), source = lane ^ distance;
    return emulator::shuffle(mask, value, source & 31, source < 32 && (source & -width) <= (lane & -width), "__shfl_xor_sync");
}
template <class Value> Value __shfl_down_sync(unsigned mask, Value value, unsigned distance, int width = 32) {
    const int lane = emulator::context.lane(), source = lane + static_cast<int>(distance);
    return emulator::shuffle(mask, value, source & 31, (lane & (width - 1)) + static_cast<int>(distance) < width, "__shfl_down_sync");
}
template <class Value> Value __shfl_up_sync(unsigned mask, Value value, unsigned distance, int width = 32) {
    const int lane = emulator::context.lane(), source = lane - static_cast<int>(distance);
    return emulator::shuffle(mask, value, source & 31, (lane & (width - 1)) >= static_cast<int>(distance), "__shfl_up_sync");
}
template <class Value> Value __shfl_sync(unsigned mask, Value value, int of, int width = 32) {
    const int lane = emulator::context.lane();
    return emulator::shuffle(mask, value, (lane & -width) | (of & (width - 1)), true, "__shfl_sync");
}
inline unsigned __ballot_sync(unsigned mask, int is_true) {
    int all[32];
    unsigned found = 0;
    const unsigned met = emulator::meet_warp(mask, static_cast<int>(is_true != 0), "__ballot_sync", all);
    for (int i = 0; i < 32; ++i)
        if ((met >> i & 1) && all[i]) found |= 1u << i;
    return found;
}
