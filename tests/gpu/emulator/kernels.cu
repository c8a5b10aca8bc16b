// The package's kernels as a library of the CPU.
#include HOTSLOT_SOURCE

EMULATED_KERNEL(hotslot_shrink)
EMULATED_KERNEL(hotslot_expand)
EMULATED_KERNEL(hotslot_shrink_groups)
EMULATED_KERNEL(hotslot_expand_groups)
EMULATED_KERNEL(hotslot_pairs)
#if HOTSLOT_W != 0
EMULATED_KERNEL(hotslot_shrink_tiles)
EMULATED_KERNEL(hotslot_expand_tiles)
#endif
