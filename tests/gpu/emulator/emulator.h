// Enough of CUDA C++ to run the kernels' own source on the CPU, for tests.
//
//   g++ -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -fPIC -shared -DHOTSLOT_EMULATOR -I. ...
//
// Contraction is off because a kernel says where it wants a fused multiply-add; aliasing, because kernels read halves as words.
//
//   fibers (default)    The threads of a block are fibers of one thread, which change over only where a kernel waits: barriers,
//                       shuffles, votes, mma. EMULATOR_ORDER=forward|reverse|SEED says who goes on first.
//   EMULATOR_THREADS    Every CUDA thread is a thread: slow, but ThreadSanitizer then names what no barrier separates.
//
// Shared memory is refilled with 0xff, which is NaN, before every block. Blocks run one after another. Where nobody can go on, or a
// lane of a mask never comes, the launch returns a message that names block and threads instead of hanging.
// EMULATOR_TRUNCATES makes mma as inexact as hardware may be (see numbers.h).
//
// Left out: dynamic shared memory, `__shared__` inside templates, cp.async, TMA, clusters, blocks that wait for each other.
#pragma once

#include "block.h"
#if defined(EMULATOR_THREADS)
#include "threads.h"
#else
#include "fibers.h"
#endif
#include "warp.h"
#include "numbers.h"
#include "launch.h"
