// The threads of a block as fibers, one at a time.
#pragma once

#include <algorithm>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulator {

constexpr size_t STACK = 256 << 10;

struct Fiber {
    void* stack_pointer = nullptr;
    ucontext_t machine;
    char* stack = nullptr;
    bool is_done = false;
    const char* waits_in = "";
    int number = 0;
};

inline Context context;
inline std::vector<Fiber> fibers;
inline Fiber* running = nullptr;
inline void* scheduler_stack = nullptr;
inline ucontext_t scheduler_machine;
// Counts what any fiber achieves: a round without it means that nobody can go on.
inline unsigned long long progress = 0;

// A switch in a few instructions where that is possible: a tenth of swapcontext's time, which asks the kernel about signals.
#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT) && !defined(__SANITIZE_ADDRESS__)
#define EMULATOR_SWITCH 1
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.weak emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
#endif

struct Lock {
    explicit Lock(Monitor&) {}
};

inline void change_over() {
#ifdef EMULATOR_SWITCH
    emulator_switch(&running->stack_pointer, scheduler_stack);
#else
    swapcontext(&running->machine, &scheduler_machine);
#endif
}

// Gives the block up: its fibers are never resumed.
[[noreturn]] inline void fail(Block& block, const std::string& error) {
    if (block.error.empty()) block.error = coordinates("block", context.block_index) + " " + coordinates("thread", context.thread) + ": " + error;
    for (;;) {
        running->is_done = true;
        change_over();
    }
}

template <class Done> void wait_until(Block&, Monitor&, Lock&, Done is_done, const char* what) {
    ++progress;
    while (!is_done()) {
        running->waits_in = what;
        change_over();
    }
    ++progress;
}

class Order {
  public:
    explicit Order(int size) : order_(size) {
        for (int i = 0; i < size; ++i) order_[i] = i;
        const char* asked = getenv("EMULATOR_ORDER");
        if (asked == nullptr || !strcmp(asked, "forward")) return;
        if (!strcmp(asked, "reverse")) {
            std::reverse(order_.begin(), order_.end());
        } else {
            state_ = strtoull(asked, nullptr, 10) * 2654435761u + 88172645463325252ull;
        }
    }

    // The order of the next round: another one each time, if a seed was given.
    const std::vector<int>& next() {
        if (state_ != 0) {
            for (size_t i = order_.size() - 1; i > 0; --i) {
                state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
                std::swap(order_[i], order_[state_ % (i + 1)]);
            }
        }
        return order_;
    }

  private:
    std::vector<int> order_;
    uint64_t state_ = 0;
};

template <class Body> struct Entry {
    static inline Body* body;
    static inline Block* block;

    static void begin() {
        (*body)();
        running->is_done = true;
        --block->live;
        block->warps[running->number >> 5].returned |= 1u << (running->number & 31);
        ++progress;
        for (;;) change_over();
    }
};

inline void start(Fiber& fiber, int number, void (*begin)()) {
    fiber.is_done = false, fiber.number = number, fiber.waits_in = "";
#ifdef EMULATOR_SWITCH
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack + STACK) & ~uintptr_t{15});
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(begin);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.machine);
    fiber.machine.uc_stack.ss_sp = fiber.stack;
    fiber.machine.uc_stack.ss_size = STACK;
    fiber.machine.uc_link = nullptr;
    makecontext(&fiber.machine, begin, 0);
#endif
}

inline std::string who_waits(const Block& block) {
    std::string found = coordinates("block", {block.index.x, block.index.y, block.index.z}) + ": nobody can go on";
    int named = 0;
    for (int i = 0; i < block.size && named < 4; ++i)
        if (!fibers[i].is_done) found += "; thread " + std::to_string(i) + " waits in " + fibers[i].waits_in, ++named;
    return found;
}

template <class Body> std::string run_block(Block& block, Body& body) {
    prepare(block);
    while (static_cast<int>(fibers.size()) < block.size) {
        Fiber fiber;
        void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return "no memory for a fiber's stack";
        mprotect(memory, 4096, PROT_NONE);
        fiber.stack = static_cast<char*>(memory);
        fibers.push_back(fiber);
    }
    Entry<Body>::body = &body, Entry<Body>::block = &block;
    for (int i = 0; i < block.size; ++i) start(fibers[i], i, &Entry<Body>::begin);
    Order order(block.size);
    int left = block.size;
    while (left > 0) {
        const auto before = progress;
        for (int i : order.next()) {
            Fiber& fiber = fibers[i];
            if (fiber.is_done) continue;
            context.enter(block, i);
            running = &fiber;
#ifdef EMULATOR_SWITCH
            emulator_switch(&scheduler_stack, fiber.stack_pointer);
#else
            swapcontext(&scheduler_machine, &fiber.machine);
#endif
            if (!block.error.empty()) return block.error;
            if (fiber.is_done) --left;
        }
        if (left > 0 && progress == before) return who_waits(block);
    }
    return "";
}

} // namespace emulator
