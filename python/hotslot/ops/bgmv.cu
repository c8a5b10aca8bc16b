// The CUDA kernels: out += sum over the row's entries of weight * scale * (x A^T) B^T, with the entries' gains and biases.
//
//   x [tokens, K]   A [rank, K], row stride padded(K)   B [N, rank], row stride padded(rank)   out [tokens, N]   gain, bias [N] f32
//   padded(n) is n rounded up to 8; what lies behind the true width is zero. A and B begin at 256-byte boundaries.
//
//   hotslot_shrink, hotslot_expand               BGMV: a token (or a token's expert) a block; decode
//   hotslot_shrink_groups, hotslot_expand_groups the same for up to four tokens that share their adapters: their weights are read once
//   hotslot_shrink_tiles, hotslot_expand_tiles   SGMV: 64 consecutive tokens of one row a block, on tensor cores; prefill
//   hotslot_pairs                                what BGMV needs to serve the (token, expert) pairs of routed experts
//
// What an adapter is (addresses, scale, rank) is read from the tables when a kernel runs, so a captured graph serves whatever is
// loaded later. Which adapters a row has is read from `slots` and `weights` [rows, entries], which are filled once per step.
//
// Sums are f32 and their order is fixed: it depends on K (shrink) and on the entry's own rank (expand) alone. Columns of K are
// cut into splits, by K alone, whose sums are stored and later added in order: there are no atomics. A row of `out` is rounded
// once. So a row's bits are the same alone or in any batch, in any slot, launched or replayed. BGMV and SGMV differ in their
// bits; which of them serves a row is decided by that row's own number of tokens.
//
// After BGMV and SGMV (Chen et al. 2023, Punica). One module serves one element type of activations and one of weights, numbered as in
// DTYPE_CODES of ops/__init__.py: 0 float32, 1 bfloat16, 2 float16.

#if !defined(HOTSLOT_X) || !defined(HOTSLOT_W)
#error "define HOTSLOT_X and HOTSLOT_W, the element types of activations and weights: 0 float32, 1 bfloat16, 2 float16"
#endif

#if defined(HOTSLOT_EMULATOR)
#include "emulator.h"
#endif

#define DEVICE __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum {
    THREADS = 128,      // of every block
    WARPS = THREADS / 32,
    ROWS = 8,           // rows of A that a block of hotslot_shrink multiplies
    STEP = THREADS * 8, // columns of x that such a block takes at a time
    MAX_RANK = 256,
    MAX_COLUMNS = 512, // columns of out that a block of hotslot_expand may have
    GROUP = 4,         // items with the same slots that a block of the group kernels serves
    AHEAD = 4,         // loads of B that a thread of hotslot_expand has under way
    TILE = 64,         // tokens of a tile: 16 a warp
    TILE_RANKS = 64,   // ranks that a block of the tile kernels holds at a time
    TILE_COLUMNS = 256, // columns of out that a block of hotslot_expand_tiles has, 64 at a time
    // Blocks that a multiprocessor can have at once, which bounds the registers: few enough that nothing spills.
    SHRINK_BLOCKS = HOTSLOT_W == F32 ? 4 : 5,
    EXPAND_BLOCKS = HOTSLOT_W == F32 ? 4 : 6,
    SHRINK_GROUPS_BLOCKS = 3,
    EXPAND_GROUPS_BLOCKS = HOTSLOT_W == F32 ? 2 : 3,
    SHRINK_TILES_BLOCKS = 3,
    EXPAND_TILES_BLOCKS = HOTSLOT_X == F32 || HOTSLOT_W == F16 ? 2 : 3
};

// The tables of one site, by address: `[max_loras]` cells each. An address of 0 in a cell: this slot has nothing here.
struct Site {
    u64 a, b, gain, bias; // of u64
    u64 scale;            // of f32
    u64 rank;             // of i32
};

// Tokens first..first+count of one row of `slots`; count 0 for none.
struct __align__(16) Tile {
    int first, count, row, unused;
};

// ---- what depends on the compiler -------------------------------------------------------------------------------------------

#if defined(HOTSLOT_EMULATOR)

DEVICE float half_to_float(u16 bits) { return emulator::half_to_float(bits); }
DEVICE u16 float_to_half(float value) { return emulator::float_to_half(value); }
DEVICE u16 float_to_bfloat(float value) { return emulator::float_to_bfloat(value); }
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulator::mma_bf16(d, a, b0, b1); }

#else

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// d [16, 8] += a [16, 16] b [16, 8], bf16 and f32. Lane 4 g + q holds rows g and g + 8, columns 2 q and 2 q + 1 of d; see the PTX manual.
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// ---- eight elements ---------------------------------------------------------------------------------------------------------

DEVICE float bfloat_to_float(u32 bits) { return __uint_as_float(bits << 16); }

// Eight consecutive elements, as they lie in memory. PIECES: how many bf16 an element is the sum of, exactly.
template <int TYPE> struct Chunk;
template <> struct Chunk<F32> {
    enum { BYTES = 4, WORDS = 8, PIECES = 3 };
    u32 words[WORDS];
};
template <> struct Chunk<BF16> {
    enum { BYTES = 2, WORDS = 4, PIECES = 1 };
    u32 words[WORDS];
};
template <> struct Chunk<F16> {
    enum { BYTES = 2, WORDS = 4, PIECES = 2 };
    u32 words[WORDS];
};

template <int TYPE> DEVICE Chunk<TYPE> zeros() {
    Chunk<TYPE> chunk;
#pragma unroll
    for (int w = 0; w < Chunk<TYPE>::WORDS; ++w) chunk.words[w] = 0;
    return chunk;
}

// The elements at a 16-byte boundary. `__ldg`, because the compiler cannot see that an address from a table is global memory.
template <int TYPE> DEVICE Chunk<TYPE> load(const char* p) {
    Chunk<TYPE> chunk;
#pragma unroll
    for (int w = 0; w < Chunk<TYPE>::WORDS; w += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(p) + w / 4);
        chunk.words[w] = four.x, chunk.words[w + 1] = four.y, chunk.words[w + 2] = four.z, chunk.words[w + 3] = four.w;
    }
    return chunk;
}

// Elements k..k+8 of a row of `count`, zero behind its end. `is_aligned`: the row begins at a 16-byte boundary.
template <int TYPE> DEVICE Chunk<TYPE> load_row(const char* row, int k, int count, bool is_aligned) {
    if (is_aligned && k + 8 <= count) return load<TYPE>(row + static_cast<i64>(k) * Chunk<TYPE>::BYTES);
    Chunk<TYPE> chunk = zeros<TYPE>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (k + j >= count) continue;
        if (TYPE == F32) {
            chunk.words[j] = __ldg(reinterpret_cast<const u32*>(row) + k + j);
        } else {
            const u32 bits = __ldg(reinterpret_cast<const u16*>(row) + k + j);
            chunk.words[j / 2] |= bits << (j % 2 * 16);
        }
    }
    return chunk;
}

template <int TYPE> DEVICE void widen(const Chunk<TYPE>& chunk, float (&values)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (TYPE == F32) {
            values[j] = __uint_as_float(chunk.words[j]);
        } else {
            const u32 word = chunk.words[j / 2];
            if (TYPE == BF16) values[j] = j % 2 ? __uint_as_float(word & 0xffff0000u) : bfloat_to_float(word);
            if (TYPE == F16) values[j] = half_to_float(static_cast<u16>(j % 2 ? word >> 16 : word));
        }
    }
}

// value = the sum of `COUNT` bf16, each the head of what the ones before left: exact if it has no more than 8 * COUNT bits.
template <int COUNT> DEVICE void cut(float value, u32 (&pieces)[COUNT]) {
#pragma unroll
    for (int p = 0; p < COUNT; ++p) {
        // Cutting off cannot overflow; the last piece takes what is left, rounded.
        const bool is_number = (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
        pieces[p] = p + 1 < COUNT && is_number ? __float_as_uint(value) >> 16 : float_to_bfloat(value);
        value = is_number ? __fadd_rn(value, -bfloat_to_float(pieces[p])) : 0.0f;
    }
}

// The chunk as sums of bf16: pieces[p][j / 2] holds piece p of elements j and j + 1.
template <int TYPE> DEVICE void cut(const Chunk<TYPE>& chunk, u32 (&pieces)[Chunk<TYPE>::PIECES][4]) {
    if (TYPE == BF16) {
#pragma unroll
        for (int w = 0; w < 4; ++w) pieces[0][w] = chunk.words[w];
    } else {
        float values[8];
        widen<TYPE>(chunk, values);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 low[Chunk<TYPE>::PIECES], high[Chunk<TYPE>::PIECES];
            cut(values[2 * w], low);
            cut(values[2 * w + 1], high);
#pragma unroll
            for (int p = 0; p < Chunk<TYPE>::PIECES; ++p) pieces[p][w] = low[p] | high[p] << 16;
        }
    }
}

// d += a b for 16 x 8 results over 32 values of k, of which lane 4 g + q brings those at 8 q..8 q + 8: rows g and g + 8 of a,
// and row g of b's transpose. The instruction wants other places for them, but any order of k is the same sum, as long as a and b agree.
// Products of pieces that lie 2^-24 below the first are left out.
template <int PA, int PB> DEVICE void multiply(float (&d)[4], const u32 (&low)[PA][4], const u32 (&high)[PA][4], const u32 (&b)[PB][4]) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
#pragma unroll
        for (int p = 0; p < PA; ++p) {
            const u32 a[4] = {low[p][half], high[p][half], low[p][half + 1], high[p][half + 1]};
#pragma unroll
            for (int r = 0; r < PB; ++r)
                if (p + r < 3) mma(d, a, b[r][half], b[r][half + 1]);
        }
    }
}

DEVICE float read_element(const void* p, i64 i) {
    if (HOTSLOT_X == F32) return static_cast<const float*>(p)[i];
    const u16 bits = static_cast<const u16*>(p)[i];
    return HOTSLOT_X == BF16 ? bfloat_to_float(bits) : half_to_float(bits);
}

DEVICE void write_element(void* p, i64 i, float value) {
    if (HOTSLOT_X == F32) static_cast<float*>(p)[i] = value;
    if (HOTSLOT_X == BF16) static_cast<u16*>(p)[i] = float_to_bfloat(value);
    if (HOTSLOT_X == F16) static_cast<u16*>(p)[i] = float_to_half(value);
}

DEVICE u32 narrow_two(float low, float high) {
    return HOTSLOT_X == BF16 ? float_to_bfloat(low) | static_cast<u32>(float_to_bfloat(high)) << 16
                             : float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

// ---- entries and cells ------------------------------------------------------------------------------------------------------

DEVICE u64 address_at(u64 table, int slot) { return __ldg(reinterpret_cast<const u64*>(table) + slot); }

DEVICE int padded(int width) { return (width + 7) & ~7; }

// What one entry of a row does at a site. `b` is null unless there is a whole pair.
struct Entry {
    const char* b;
    int rank;
    float factor; // weight * scale
};

DEVICE Entry entry_at(const Site* site, const int* slots, const float* weights, i64 at, int num_slots, int max_rank) {
    Entry entry = {nullptr, 0, 0.0f};
    const int slot = __ldg(slots + at);
    if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) return entry;
    const u64 a = address_at(__ldg(&site->a), slot), b = address_at(__ldg(&site->b), slot);
    const int rank = __ldg(reinterpret_cast<const int*>(__ldg(&site->rank)) + slot);
    if (a == 0 || b == 0 || rank <= 0) return entry;
    entry.b = reinterpret_cast<const char*>(b);
    entry.rank = min(rank, max_rank);
    entry.factor = __fmul_rn(__ldg(weights + at), __ldg(reinterpret_cast<const float*>(__ldg(&site->scale)) + slot));
    return entry;
}

// Whether a row has an adapter at all, and whether some of its slots have a gain or a bias at a site.
struct Effects {
    bool has_slot, are_any;
};

DEVICE Effects effects_at(const Site* site, const int* slots, i64 first, int num_entries, int num_slots) {
    Effects effects = {false, false};
    for (int e = 0; e < num_entries; ++e) {
        const int slot = __ldg(slots + first + e);
        if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) continue;
        effects.has_slot = true;
        effects.are_any |= (address_at(__ldg(&site->gain), slot) | address_at(__ldg(&site->bias), slot)) != 0;
    }
    return effects;
}

// The product of the gains of a row's entries at column n, in request order; 1 without any.
DEVICE float gain_at(const Site* site, const int* slots, i64 first, int num_entries, int num_slots, int n) {
    float gain = 1.0f;
    for (int e = 0; e < num_entries; ++e) {
        const int slot = __ldg(slots + first + e);
        if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) continue;
        const float* gains = reinterpret_cast<const float*>(address_at(__ldg(&site->gain), slot));
        if (gains != nullptr) gain = __fmul_rn(gain, __ldg(gains + n));
    }
    return gain;
}

// `value` plus each entry's weight times its bias at column n, in request order.
DEVICE float bias_at(const Site* site, const int* slots, const float* weights, i64 first, int num_entries, int num_slots, int n, float value) {
    for (int e = 0; e < num_entries; ++e) {
        const int slot = __ldg(slots + first + e);
        if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) continue;
        const float* biases = reinterpret_cast<const float*>(address_at(__ldg(&site->bias), slot));
        if (biases != nullptr) value = __fmaf_rn(__ldg(weights + first + e), __ldg(biases + n), value);
    }
    return value;
}

// The sum over the splits of h at `rank`, in order; `partial` is the entry's first.
DEVICE float sum_of_splits(const float* partial, int splits, int h_stride, int rank) {
    float sum = __ldg(partial + rank);
    for (int split = 1; split < splits; ++split) sum = __fadd_rn(sum, __ldg(partial + static_cast<i64>(split) * h_stride + rank));
    return sum;
}

// ---- BGMV -------------------------------------------------------------------------------------------------------------------

// The items of a block: up to `ITEMS` that have the same slots, so that each weight is read once for all of them. No sum depends on it.
template <int ITEMS> struct Items {
    int item[ITEMS], owner[ITEMS];
    int count;
};

// `groups` [groups, GROUP]: items, -1 behind them; null: each item by itself. `owners` and `tokens_per_row` as in hotslot_shrink.
template <int ITEMS>
DEVICE Items<ITEMS> items_at(const int* groups, const int* owners, int tokens_per_row, int num_items, int index) {
    Items<ITEMS> items;
    items.count = 0;
    // Not `count == i`: the compiler would then index by the count, and put the arrays into local memory for that.
    bool is_open = true;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int item = groups != nullptr ? __ldg(groups + static_cast<i64>(index) * GROUP + i) : i == 0 ? index : -1;
        is_open = is_open && static_cast<u32>(item) < static_cast<u32>(num_items);
        const int owner = !is_open ? -1 : owners != nullptr ? __ldg(owners + item) : item / tokens_per_row;
        is_open = owner >= 0;
        items.item[i] = item, items.owner[i] = owner;
        items.count += is_open;
    }
    return items;
}

// The body of hotslot_shrink for up to ITEMS items a block.
template <int ITEMS>
DEVICE void shrink(const char* x, i64 x_stride, int in_features, const Site* sites, const int* slots, int num_entries, int num_slots,
                   const int* groups, const int* x_rows, const int* owners, const int* experts, int tokens_per_row, int num_items,
                   float* h, int h_stride, int chunk, float (&of_warps)[WARPS][ROWS * ITEMS]) {
    const int index = static_cast<int>(blockIdx.x) / num_entries, entry = static_cast<int>(blockIdx.x) - index * num_entries;
    const int splits = (in_features + chunk - 1) / chunk;
    const int group = static_cast<int>(blockIdx.y) / splits, split = static_cast<int>(blockIdx.y) - group * splits;
    const Items<ITEMS> items = items_at<ITEMS>(groups, owners, tokens_per_row, num_items, index);
    // Every return is the same for the whole block.
    if (items.count == 0) return;
    const int expert = experts != nullptr ? __ldg(experts + items.item[0]) : 0;
    if (expert < 0) return;
    const int slot = __ldg(slots + static_cast<i64>(items.owner[0]) * num_entries + entry);
    if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) return;
    const Site* site = sites + static_cast<i64>(expert) * gridDim.z + blockIdx.z;
    const u64 a = address_at(__ldg(&site->a), slot);
    const int rank = min(__ldg(reinterpret_cast<const int*>(__ldg(&site->rank)) + slot), h_stride);
    const int first = group * ROWS;
    if (a == 0 || first >= rank) return;

    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    const i64 a_row = static_cast<i64>(padded(in_features)) * Chunk<HOTSLOT_W>::BYTES;
    const int num_rows = min(static_cast<int>(ROWS), rank - first);
    const int begin = split * chunk, end = min(begin + chunk, in_features);

    float sums[ITEMS][ROWS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[i][r] = 0.0f;
    }
    for (int k = begin + thread * 8; k < end; k += STEP) {
        Chunk<HOTSLOT_W> weights[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            // Rows past the last read the last one again, from the cache: a branch here would keep loads from being under way
            // together.
            const char* p = reinterpret_cast<const char*>(a) + (first + min(r, num_rows - 1)) * a_row;
            weights[r] = load<HOTSLOT_W>(p + static_cast<i64>(k) * Chunk<HOTSLOT_W>::BYTES);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i >= items.count) continue;
            const i64 x_row = x_rows != nullptr ? __ldg(x_rows + items.item[i]) : items.item[i];
            const char* row = x + x_row * x_stride * Chunk<HOTSLOT_X>::BYTES;
            float values[8];
            widen<HOTSLOT_X>(load_row<HOTSLOT_X>(row, k, in_features, (reinterpret_cast<u64>(row) & 15) == 0), values);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float factors[8];
                widen<HOTSLOT_W>(weights[r], factors);
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[i][r] = __fmaf_rn(values[j], factors[j], sums[i][r]);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i >= items.count) continue;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = sums[i][r];
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
            if (lane == 0) of_warps[warp][i * ROWS + r] = sum;
        }
    }
    __syncthreads();
    if (thread < items.count * ROWS && thread % ROWS < num_rows) {
        float sum = of_warps[0][thread];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum = __fadd_rn(sum, of_warps[w][thread]);
        // Read again: an array that a thread's number indexes would have to lie in local memory.
        const int item = ITEMS == 1 ? items.item[0] : __ldg(groups + static_cast<i64>(index) * GROUP + thread / ROWS);
        const i64 at = (static_cast<i64>(blockIdx.z) * num_items + item) * num_entries + entry;
        h[(at * splits + split) * h_stride + first + thread % ROWS] = sum;
    }
}

// h[member, item, entry, split, i] = sum over k in split of x[row(item), k] * A[member, slot(item, entry)][i, k]
//
// An item is a token, or one (token, expert) pair. `x_rows` [items]: its row of x; null: the item itself. `owners` [items]: its
// row of `slots`, or -1 for none; null: item / tokens_per_row. `experts` [items]: its expert, or -1 for none; null: 0.
// `sites` [experts, members], whose K are equal.
// grid (items * entries, splits * padded(max rank) / 8, members), 128 threads; h_stride is padded(max rank), `chunk` a multiple of
// 1024.
//
// Thread i takes elements 8 i..8 i + 8 of each 1024 by fused multiply-add, ascending; lanes are added by xor 16, 8, 4, 2, 1, then
// the four warps in order.
extern "C" __global__ void __launch_bounds__(THREADS, SHRINK_BLOCKS)
    hotslot_shrink(const char* __restrict__ x, i64 x_stride, int in_features, const Site* __restrict__ sites,
                   const int* __restrict__ slots, int num_entries, int num_slots, const int* __restrict__ x_rows,
                   const int* __restrict__ owners, const int* __restrict__ experts, int tokens_per_row, int num_items,
                   float* __restrict__ h, int h_stride, int chunk) {
    __shared__ float of_warps[WARPS][ROWS];
    shrink<1>(x, x_stride, in_features, sites, slots, num_entries, num_slots, nullptr, x_rows, owners, experts, tokens_per_row,
              num_items, h, h_stride, chunk, of_warps);
}

// The same, bit for bit, for groups of items that have the same slots: grid (groups * entries, as above). `groups` [groups, 4].
extern "C" __global__ void __launch_bounds__(THREADS, SHRINK_GROUPS_BLOCKS)
    hotslot_shrink_groups(const char* __restrict__ x, i64 x_stride, int in_features, const Site* __restrict__ sites,
                          const int* __restrict__ slots, int num_entries, int num_slots, const int* __restrict__ groups,
                          const int* __restrict__ owners, int tokens_per_row, int num_items, float* __restrict__ h, int h_stride,
                          int chunk) {
    __shared__ float of_warps[WARPS][ROWS * GROUP];
    shrink<GROUP>(x, x_stride, in_features, sites, slots, num_entries, num_slots, groups, nullptr, owners, nullptr, tokens_per_row,
                  num_items, h, h_stride, chunk, of_warps);
}

// The body of hotslot_expand for up to ITEMS items a block.
template <int ITEMS>
DEVICE void expand(const float* h, int h_stride, int splits, const Site* sites, int site_stride, const int* slots,
                   const float* weights, int num_entries, int num_slots, const int* groups, const int* owners, const int* experts,
                   int tokens_per_row, int num_items, char* out, i64 out_stride, int out_features, int columns,
                   float (&ranks)[ITEMS][MAX_RANK], float (&sums)[ITEMS][MAX_COLUMNS]) {
    const int first = static_cast<int>(blockIdx.y) * columns;
    const Items<ITEMS> items = items_at<ITEMS>(groups, owners, tokens_per_row, num_items, static_cast<int>(blockIdx.x));
    if (items.count == 0) return;
    const int expert = experts != nullptr ? __ldg(experts + items.item[0]) : 0;
    if (expert < 0) return;
    const Site* site = sites + static_cast<i64>(expert) * site_stride;
    const i64 at = static_cast<i64>(items.owner[0]) * num_entries;
    const Effects effects = effects_at(site, slots, at, num_entries, num_slots);
    if (!effects.has_slot) return;
    const int thread = static_cast<int>(threadIdx.x);
    const int count = min(columns, out_features - first);

    // What stands in out is asked for now and used at the end.
    enum { PAIRS = MAX_COLUMNS / (2 * THREADS) };
    u32 standing[ITEMS][PAIRS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const char* row = out + (static_cast<i64>(items.item[i]) * out_stride + first) * Chunk<HOTSLOT_X>::BYTES;
        const bool is_paired = i < items.count && HOTSLOT_X != F32 && (reinterpret_cast<u64>(row) & 3) == 0;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int c = (p * THREADS + thread) * 2;
            standing[i][p] = is_paired && c + 1 < count ? reinterpret_cast<const u32*>(row)[c / 2] : 0;
        }
    }

    bool is_adapted = false;
    for (int e = 0; e < num_entries; ++e) {
        const Entry entry = entry_at(site, slots, weights, at + e, num_slots, min(h_stride, static_cast<int>(MAX_RANK)));
        if (entry.b == nullptr) continue;
        const int width = padded(entry.rank);
        int lanes = 1;
        while (lanes * 8 < width) lanes *= 2;
        const int g = thread & (lanes - 1), column = thread / lanes, per_pass = THREADS / lanes;
        const char* b = entry.b + ((static_cast<i64>(first) + column) * width + g * 8) * Chunk<HOTSLOT_W>::BYTES;
        const i64 pass_bytes = static_cast<i64>(per_pass) * width * Chunk<HOTSLOT_W>::BYTES;

        // Pass number i of a thread has the column i * per_pass + column. The first loads of B are under way while h is summed up.
        const int passes = g * 8 < width && column < count ? (count - column - 1) / per_pass + 1 : 0;
        Chunk<HOTSLOT_W> next[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) next[u] = u < passes ? load<HOTSLOT_W>(b + u * pass_bytes) : zeros<HOTSLOT_W>();
        // The entry before may still be reading.
        if (is_adapted) __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i >= items.count) continue;
            const i64 of_item = static_cast<i64>(items.owner[i]) * num_entries + e;
            // The slot is the same for all items; the weight need not be.
            const float factor = i == 0 ? entry.factor : entry_at(site, slots, weights, of_item, num_slots, h_stride).factor;
            const float* partial = h + (static_cast<i64>(items.item[i]) * num_entries + e) * splits * h_stride;
            for (int r = thread; r < width; r += THREADS)
                ranks[i][r] = r < entry.rank ? __fmul_rn(sum_of_splits(partial, splits, h_stride, r), factor) : 0.0f;
        }
        __syncthreads();
        float factors[ITEMS][8];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) factors[i][j] = i < items.count && g * 8 < width ? ranks[i][g * 8 + j] : 0.0f;
        }

        // The trip count is the same for all threads: they shuffle.
        for (int pass = 0; pass * per_pass < count; pass += AHEAD) {
            Chunk<HOTSLOT_W> here[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                here[u] = next[u];
                const int later = pass + AHEAD + u;
                next[u] = later < passes ? load<HOTSLOT_W>(b + later * pass_bytes) : zeros<HOTSLOT_W>();
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                float values[8];
                widen<HOTSLOT_W>(here[u], values);
                const int c = (pass + u) * per_pass + column;
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    if (i >= items.count) continue;
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(factors[i][j], values[j], sum);
                    for (int distance = lanes / 2; distance > 0; distance /= 2)
                        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
                    if (g == 0 && c < count) sums[i][c] = is_adapted ? __fadd_rn(sums[i][c], sum) : sum;
                }
            }
        }
        is_adapted = true;
    }

    if (!is_adapted && !effects.are_any) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i >= items.count) continue;
        char* row = out + (static_cast<i64>(items.item[i]) * out_stride + first) * Chunk<HOTSLOT_X>::BYTES;
        const bool is_paired = HOTSLOT_X != F32 && !effects.are_any && (reinterpret_cast<u64>(row) & 3) == 0;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int c = (p * THREADS + thread) * 2;
            if (is_paired && c + 1 < count) {
                const u32 two = standing[i][p];
                const float low = HOTSLOT_X == BF16 ? bfloat_to_float(two) : half_to_float(static_cast<u16>(two));
                const float high = HOTSLOT_X == BF16 ? bfloat_to_float(two >> 16) : half_to_float(static_cast<u16>(two >> 16));
                reinterpret_cast<u32*>(row)[c / 2] = narrow_two(__fadd_rn(low, sums[i][c]), __fadd_rn(high, sums[i][c + 1]));
                continue;
            }
#pragma unroll 1
            for (int d = c; d < min(c + 2, count); ++d) {
                const float base = read_element(row, d), delta = is_adapted ? sums[i][d] : 0.0f;
                float value = __fadd_rn(base, delta);
                if (effects.are_any) {
                    // The order of the CPU's epilogue.
                    const i64 of_item = static_cast<i64>(items.owner[i]) * num_entries;
                    const float gain = gain_at(site, slots, of_item, num_entries, num_slots, first + d);
                    value = __fadd_rn(__fmul_rn(base, gain), __fmul_rn(delta, gain));
                    value = bias_at(site, slots, weights, of_item, num_entries, num_slots, first + d, value);
                }
                write_element(row, d, value);
            }
        }
    }
}

// out[item, n] = round(g * out[item, n] + g * (sum over e, i of h[item, e, i] * B[slot(item, e)][n, i]) + sum over e of w[e] * bias[e, n])
// where h[item, e, i] = weight * scale * (the sum over the splits, ascending)
//
// As above; `h` and `sites` begin at one member, and `site_stride` sites lie from one expert to the next.
// grid (items, ceil(N / columns)), 128 threads; columns a multiple of 16, 512 at most: no sum depends on it.
//
// G lanes share a column, G the least power of two that covers the rank in eights: lane g takes ranks 8 g..8 g + 8 by fused
// multiply-add, ascending; lanes are added by xor G / 2, ..., 1; entries in request order.
extern "C" __global__ void __launch_bounds__(THREADS, EXPAND_BLOCKS)
    hotslot_expand(const float* __restrict__ h, int h_stride, int splits, const Site* __restrict__ sites, int site_stride,
                   const int* __restrict__ slots, const float* __restrict__ weights, int num_entries, int num_slots,
                   const int* __restrict__ owners, const int* __restrict__ experts, int tokens_per_row, int num_items,
                   char* __restrict__ out, i64 out_stride, int out_features, int columns) {
    __shared__ float ranks[1][MAX_RANK];
    __shared__ float sums[1][MAX_COLUMNS];
    expand<1>(h, h_stride, splits, sites, site_stride, slots, weights, num_entries, num_slots, nullptr, owners, experts,
              tokens_per_row, num_items, out, out_stride, out_features, columns, ranks, sums);
}

// The same, bit for bit, for groups of items that have the same slots: grid (groups, as above).
extern "C" __global__ void __launch_bounds__(THREADS, EXPAND_GROUPS_BLOCKS)
    hotslot_expand_groups(const float* __restrict__ h, int h_stride, int splits, const Site* __restrict__ sites,
                          const int* __restrict__ slots, const float* __restrict__ weights, int num_entries, int num_slots,
                          const int* __restrict__ groups, const int* __restrict__ owners, int tokens_per_row, int num_items,
                          char* __restrict__ out, i64 out_stride, int out_features, int columns) {
    __shared__ float ranks[GROUP][MAX_RANK];
    __shared__ float sums[GROUP][MAX_COLUMNS];
    expand<GROUP>(h, h_stride, splits, sites, 1, slots, weights, num_entries, num_slots, groups, owners, nullptr, tokens_per_row,
                  num_items, out, out_stride, out_features, columns, ranks, sums);
}

// ---- routed experts -----------------------------------------------------------------------------------------------------------

// For the pair of token t and its choice c, as hotslot_shrink and hotslot_expand take it; p is places[t * top_k + c], or t * top_k + c:
//
//   x_rows[p] = t    experts[p] = index[t, c], or -1 if there is no such expert (masked)    owners[p] = row(t) if t is adapted, else -1
//   adapted[t] = whether one of the row's slots has a pair at one of the token's experts: 1 or 0; not written if null
//
// `index` [tokens, top_k]; `places` [tokens * top_k], or null. `first` [experts, first_members] and `second` [experts, second_members] are the sites of the experts'
// projections. `rows` [tokens]: each token's row of `slots`, or -1 for none; null: token / tokens_per_row.
// grid (ceil(tokens / 4)), 128 threads: a warp has a token, a lane every 32nd of its cells.
extern "C" __global__ void __launch_bounds__(THREADS)
    hotslot_pairs(const i64* __restrict__ index, int top_k, int num_tokens, const Site* __restrict__ first, int first_members,
                  const Site* __restrict__ second, int second_members, int num_experts, const int* __restrict__ slots, int num_entries,
                  int num_slots, const int* __restrict__ rows, int tokens_per_row, const i64* __restrict__ places,
                  int* __restrict__ x_rows, int* __restrict__ owners, int* __restrict__ experts, unsigned char* __restrict__ adapted) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const int token = static_cast<int>(blockIdx.x) * WARPS + warp;
    // The same for the whole warp.
    if (token >= num_tokens) return;
    const int row = rows != nullptr ? __ldg(rows + token) : token / tokens_per_row;
    const i64* chosen = index + static_cast<i64>(token) * top_k;
    const int members = first_members + second_members, cells = row < 0 ? 0 : top_k * num_entries * members;
    int is_adapted = 0;
    for (int cell = lane; cell < cells; cell += 32) {
        const int of_entries = cell / members, member = cell - of_entries * members;
        const int choice = of_entries / num_entries, entry = of_entries - choice * num_entries;
        const i64 expert = __ldg(chosen + choice);
        const int slot = __ldg(slots + static_cast<i64>(row) * num_entries + entry);
        if (static_cast<u64>(expert) >= static_cast<u64>(num_experts) || static_cast<u32>(slot) >= static_cast<u32>(num_slots)) continue;
        const Site* site =
            member < first_members ? first + expert * first_members + member : second + expert * second_members + member - first_members;
        is_adapted |= address_at(__ldg(&site->a), slot) != 0 && address_at(__ldg(&site->b), slot) != 0;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) is_adapted |= __shfl_xor_sync(0xffffffffu, is_adapted, distance);
    for (int choice = lane; choice < top_k; choice += 32) {
        const i64 expert = __ldg(chosen + choice), natural = static_cast<i64>(token) * top_k + choice;
        const i64 pair = places != nullptr ? __ldg(places + natural) : natural;
        x_rows[pair] = token;
        experts[pair] = static_cast<u64>(expert) < static_cast<u64>(num_experts) ? static_cast<int>(expert) : -1;
        owners[pair] = is_adapted ? row : -1;
    }
    if (lane == 0 && adapted != nullptr) adapted[token] = static_cast<unsigned char>(is_adapted);
}

// ---- SGMV -------------------------------------------------------------------------------------------------------------------

// Weights of float32 are for those who want no rounding: their rows go through BGMV, whatever their number.
#if HOTSLOT_W != 0

// The tile of a block: from `tiles`, or else every `tokens_per_row` tokens are a row.
DEVICE Tile tile_at(const Tile* tiles, int tokens_per_row, int index) {
    Tile tile;
    if (tiles != nullptr) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(tiles) + index);
        tile.first = four.x, tile.count = four.y, tile.row = four.z, tile.unused = 0;
        return tile;
    }
    const int per_row = (tokens_per_row + TILE - 1) / TILE;
    tile.row = index / per_row;
    const int within = (index - tile.row * per_row) * TILE;
    tile.first = tile.row * tokens_per_row + within;
    tile.count = min(static_cast<int>(TILE), tokens_per_row - within);
    tile.unused = 0;
    return tile;
}

// h as in hotslot_shrink, with tokens for items, on tensor cores.
//
// grid (tiles, splits * ceil(h_stride / 64), members * entries), 128 threads; `num_tokens` is that of x and h.
// A warp has 16 tokens and 64 ranks. Operands go from memory to registers, 16 bytes a lane (see `multiply`); k ascends by 32.
extern "C" __global__ void __launch_bounds__(THREADS, SHRINK_TILES_BLOCKS)
    hotslot_shrink_tiles(const char* __restrict__ x, i64 x_stride, int in_features, const Site* __restrict__ sites,
                         const int* __restrict__ slots, int num_entries, int num_slots, const Tile* __restrict__ tiles, int num_tokens,
                         int tokens_per_row, float* __restrict__ h, int h_stride, int chunk) {
    const Tile tile = tile_at(tiles, tokens_per_row, static_cast<int>(blockIdx.x));
    const int splits = (in_features + chunk - 1) / chunk;
    const int group = static_cast<int>(blockIdx.y) / splits, split = static_cast<int>(blockIdx.y) - group * splits;
    const int member = static_cast<int>(blockIdx.z) / num_entries, entry = static_cast<int>(blockIdx.z) - member * num_entries;
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, g = lane >> 2, q = lane & 3;
    // Every return is the same for the whole warp, and no warp waits for another.
    if (tile.row < 0 || warp * 16 >= tile.count) return;
    const int slot = __ldg(slots + static_cast<i64>(tile.row) * num_entries + entry);
    if (static_cast<u32>(slot) >= static_cast<u32>(num_slots)) return;
    const Site* site = sites + member;
    const u64 a = address_at(__ldg(&site->a), slot);
    const int rank = min(__ldg(reinterpret_cast<const int*>(__ldg(&site->rank)) + slot), h_stride);
    const int first = group * TILE_RANKS;
    if (a == 0 || first >= rank) return;

    const int eights = (min(static_cast<int>(TILE_RANKS), rank - first) + 7) / 8;
    const int begin = split * chunk, end = min(begin + chunk, in_features);
    const int low_token = warp * 16 + g, high_token = low_token + 8;
    const i64 x_bytes = x_stride * Chunk<HOTSLOT_X>::BYTES;
    const char* low_row = x + (tile.first + static_cast<i64>(low_token)) * x_bytes;
    const char* high_row = low_row + 8 * x_bytes;
    const bool is_low = low_token < tile.count, is_high = high_token < tile.count;
    const bool is_aligned = ((reinterpret_cast<u64>(low_row) | static_cast<u64>(x_bytes)) & 15) == 0;
    const i64 a_row = static_cast<i64>(padded(in_features)) * Chunk<HOTSLOT_W>::BYTES;

    float sums[TILE_RANKS / 8][4];
#pragma unroll
    for (int j = 0; j < TILE_RANKS / 8; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.0f;
    for (int step = begin; step < end; step += 32) {
        const int k = step + q * 8;
        u32 low[Chunk<HOTSLOT_X>::PIECES][4], high[Chunk<HOTSLOT_X>::PIECES][4];
        cut<HOTSLOT_X>(is_low && k < end ? load_row<HOTSLOT_X>(low_row, k, in_features, is_aligned) : zeros<HOTSLOT_X>(), low);
        cut<HOTSLOT_X>(is_high && k < end ? load_row<HOTSLOT_X>(high_row, k, in_features, is_aligned) : zeros<HOTSLOT_X>(), high);
#pragma unroll
        for (int j = 0; j < TILE_RANKS / 8; ++j) {
            if (j >= eights) continue;
            // Ranks past the last are the last one again; nobody reads what comes of them.
            const int r = min(first + j * 8 + g, rank - 1);
            const char* p = reinterpret_cast<const char*>(a) + r * a_row + static_cast<i64>(k) * Chunk<HOTSLOT_W>::BYTES;
            u32 b[Chunk<HOTSLOT_W>::PIECES][4];
            cut<HOTSLOT_W>(k < end ? load<HOTSLOT_W>(p) : zeros<HOTSLOT_W>(), b);
            multiply(sums[j], low, high, b);
        }
    }

    const i64 token = static_cast<i64>(member) * num_tokens + tile.first + low_token;
#pragma unroll
    for (int j = 0; j < TILE_RANKS / 8; ++j) {
        if (j >= eights) continue;
        float* p = h + ((token * num_entries + entry) * splits + split) * h_stride + first + j * 8 + q * 2;
        if (is_low) p[0] = sums[j][0], p[1] = sums[j][1];
        p += static_cast<i64>(8) * num_entries * splits * h_stride;
        if (is_high) p[0] = sums[j][2], p[1] = sums[j][3];
    }
}

// h of a tile as pieces of bf16, two ranks a word; a row's words lie 48 apart, so that no two lanes of a load share a bank.
enum { H_PIECES = HOTSLOT_X == F32 ? 3 : 2, H_STRIDE = 48 };

// Adds one row's part of a tile to out: 16 columns of a lane. `p` is the first, of which `count` are there; `part` is 0 for row g and
// 2 for row g + 8. `effects` holds gains and summed up biases from that column on, or is null.
DEVICE void add_row(char* p, const float (&sums)[TILE_RANKS / 8][4], int part, int count, const float (*effects)[64]) {
    enum { WORDS = Chunk<HOTSLOT_X>::WORDS };
    const bool is_whole = count >= 16 && (reinterpret_cast<u64>(p) & 15) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Chunk<HOTSLOT_X> chunk = zeros<HOTSLOT_X>();
        uint4* fours = reinterpret_cast<uint4*>(p) + half * WORDS / 4;
        float values[8];
        if (is_whole) {
#pragma unroll
            for (int w = 0; w < WORDS; w += 4) {
                const uint4 four = fours[w / 4];
                chunk.words[w] = four.x, chunk.words[w + 1] = four.y, chunk.words[w + 2] = four.z, chunk.words[w + 3] = four.w;
            }
            widen<HOTSLOT_X>(chunk, values);
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = half * 8 + c < count ? read_element(p, half * 8 + c) : 0.0f;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float delta = sums[half * 4 + c / 2][part + c % 2];
            if (effects == nullptr) {
                values[c] = __fadd_rn(values[c], delta);
            } else {
                const float gain = effects[0][half * 8 + c];
                values[c] = __fadd_rn(__fadd_rn(__fmul_rn(values[c], gain), __fmul_rn(delta, gain)), effects[1][half * 8 + c]);
            }
        }
        if (is_whole) {
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                chunk.words[w] = HOTSLOT_X == F32 ? __float_as_uint(values[w % 8]) : narrow_two(values[w * 2 % 8], values[w * 2 % 8 + 1]);
#pragma unroll
            for (int w = 0; w < WORDS; w += 4)
                fours[w / 4] = make_uint4(chunk.words[w], chunk.words[w + 1], chunk.words[w + 2], chunk.words[w + 3]);
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (half * 8 + c < count) write_element(p, half * 8 + c, values[c]);
        }
    }
}

// out as in hotslot_expand, with tokens for items, on tensor cores. h is the sum of two bf16 here (three for float32).
//
// grid (tiles, ceil(N / 256)), 128 threads; `h` and `sites` begin at one member.
// A warp has 16 tokens and 64 columns at a time; ranks ascend by 32, entries are in request order.
extern "C" __global__ void __launch_bounds__(THREADS, EXPAND_TILES_BLOCKS)
    hotslot_expand_tiles(const float* __restrict__ h, int h_stride, int splits, const Site* __restrict__ sites,
                         const int* __restrict__ slots, const float* __restrict__ weights, int num_entries, int num_slots,
                         const Tile* __restrict__ tiles, int tokens_per_row, char* __restrict__ out, i64 out_stride, int out_features) {
    const Tile tile = tile_at(tiles, tokens_per_row, static_cast<int>(blockIdx.x));
    if (tile.row < 0 || tile.count <= 0) return;
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5, g = lane >> 2, q = lane & 3;
    const i64 at = static_cast<i64>(tile.row) * num_entries;
    const Effects found = effects_at(sites, slots, at, num_entries, num_slots);
    if (!found.has_slot) return;
    const bool is_plain = !found.are_any;

    __shared__ __align__(16) u32 ranks[H_PIECES][TILE][H_STRIDE];
    __shared__ float effects[2][64];
    int staged = 0;
    // What was staged serves all columns if it is all there is.
    bool is_staged = false;
    for (int n0 = static_cast<int>(blockIdx.y) * TILE_COLUMNS; n0 < min(out_features, static_cast<int>(blockIdx.y + 1) * TILE_COLUMNS); n0 += 64) {
        float sums[8][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.0f;
        bool is_adapted = false;
        for (int e = 0; e < num_entries; ++e) {
            const Entry entry = entry_at(sites, slots, weights, at + e, num_slots, min(h_stride, static_cast<int>(MAX_RANK)));
            if (entry.b == nullptr) continue;
            is_adapted = true;
            const int width = padded(entry.rank);
            for (int first = 0; first < entry.rank; first += TILE_RANKS) {
                const int steps = (min(static_cast<int>(TILE_RANKS), width - first) + 31) / 32;
                if (!is_staged) {
                    if (staged > 0) __syncthreads();
#pragma unroll 1
                    for (int i = thread; i < TILE * steps * 16; i += THREADS) {
                        const int token = i / (steps * 16), word = i - token * (steps * 16), r = first + word * 2;
                        u32 low[H_PIECES], high[H_PIECES];
                        const float* partial =
                            h + ((tile.first + static_cast<i64>(token)) * num_entries + e) * splits * h_stride;
                        const bool is_there = token < tile.count;
                        cut(is_there && r < entry.rank ? __fmul_rn(sum_of_splits(partial, splits, h_stride, r), entry.factor) : 0.0f, low);
                        cut(is_there && r + 1 < entry.rank ? __fmul_rn(sum_of_splits(partial, splits, h_stride, r + 1), entry.factor) : 0.0f, high);
#pragma unroll
                        for (int p = 0; p < H_PIECES; ++p) ranks[p][token][word] = low[p] | high[p] << 16;
                    }
                    ++staged;
                    is_staged = num_entries == 1 && entry.rank <= TILE_RANKS;
                    __syncthreads();
                }
#pragma unroll 1
                for (int step = 0; step < steps; ++step) {
                    u32 low[H_PIECES][4], high[H_PIECES][4];
#pragma unroll
                    for (int p = 0; p < H_PIECES; ++p) {
                        const uint4 above = *reinterpret_cast<const uint4*>(&ranks[p][warp * 16 + g][step * 16 + q * 4]);
                        const uint4 below = *reinterpret_cast<const uint4*>(&ranks[p][warp * 16 + g + 8][step * 16 + q * 4]);
                        low[p][0] = above.x, low[p][1] = above.y, low[p][2] = above.z, low[p][3] = above.w;
                        high[p][0] = below.x, high[p][1] = below.y, high[p][2] = below.z, high[p][3] = below.w;
                    }
                    const int r = first + step * 32 + q * 8;
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        // Columns are dealt out so that a lane's results lie side by side: 16 q..16 q + 16.
                        const int n = n0 + (g >> 1) * 16 + j * 2 + (g & 1);
                        const char* p = entry.b + (static_cast<i64>(n) * width + r) * Chunk<HOTSLOT_W>::BYTES;
                        u32 b[Chunk<HOTSLOT_W>::PIECES][4];
                        cut<HOTSLOT_W>(r < width && n < out_features ? load<HOTSLOT_W>(p) : zeros<HOTSLOT_W>(), b);
                        multiply(sums[j], low, high, b);
                    }
                }
            }
        }
        if (!is_adapted && is_plain) return;
        if (!is_plain) {
            // All tokens of the tile have the same gains and biases.
            __syncthreads();
            if (thread < 64 && n0 + thread < out_features) {
                effects[0][thread] = gain_at(sites, slots, at, num_entries, num_slots, n0 + thread);
                effects[1][thread] = bias_at(sites, slots, weights, at, num_entries, num_slots, n0 + thread, 0.0f);
            }
            __syncthreads();
        }
        const i64 bytes = out_stride * Chunk<HOTSLOT_X>::BYTES;
        const int token = warp * 16 + g, n = n0 + q * 16;
        char* p = out + (tile.first + static_cast<i64>(token)) * bytes + static_cast<i64>(n) * Chunk<HOTSLOT_X>::BYTES;
        const float (*of_columns)[64] = is_plain ? nullptr : reinterpret_cast<const float (*)[64]>(&effects[0][q * 16]);
        if (token < tile.count) add_row(p, sums, 0, out_features - n, of_columns);
        if (token + 8 < tile.count) add_row(p + 8 * bytes, sums, 2, out_features - n, of_columns);
    }
}

#endif
