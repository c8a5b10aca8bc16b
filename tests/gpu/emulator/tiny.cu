// The program of the sanitizers for the package's kernels: a tiny case of each, in memory of exactly its size.
#include HOTSLOT_SOURCE

EMULATED_KERNEL(hotslot_shrink)
EMULATED_KERNEL(hotslot_expand)
EMULATED_KERNEL(hotslot_shrink_groups)
EMULATED_KERNEL(hotslot_expand_groups)
EMULATED_KERNEL(hotslot_shrink_tiles)
EMULATED_KERNEL(hotslot_expand_tiles)
EMULATED_KERNEL(hotslot_pairs)

namespace {

template <class Value> struct Array {
    explicit Array(size_t count, Value value = Value{}) : p(static_cast<Value*>(aligned_alloc(256, (count * sizeof(Value) + 255) / 256 * 256))), size(count) {
        for (size_t i = 0; i < count; ++i) p[i] = value;
    }
    ~Array() { free(p); }
    Value* p;
    size_t size;
};

// Arrays whose end is their last element, so that a sanitizer sees what reads behind it.
template <class Value> struct Tight {
    explicit Tight(size_t count) : p(new Value[count]), size(count) {}
    ~Tight() { delete[] p; }
    Value* p;
    size_t size;
};

template <class Values> void fill(const Values& values, unsigned seed) {
    for (size_t i = 0; i < values.size; ++i) {
        seed = seed * 1664525u + 1013904223u;
        values.p[i] = float_to_bfloat(static_cast<float>(seed >> 16 & 15) / 8.0f - 1.0f);
    }
}

template <class... Arguments> bool run(const char* (*launch)(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void**), unsigned gx,
                                       unsigned gy, unsigned gz, Arguments... arguments) {
    void* packed[] = {&arguments...};
    const char* error = launch(gx, gy, gz, THREADS, 1, 1, packed);
    if (error != nullptr) puts(error);
    return error == nullptr;
}

} // namespace

int main() {
    const int k = 72, n = 40, rank = 5, row = 17;
    Tight<u16> a(static_cast<size_t>(rank) * k), b(static_cast<size_t>(n) * 8);
    fill(a, 1);
    fill(b, 2);
    for (int i = 0; i < n; ++i)
        for (int r = rank; r < 8; ++r) b.p[i * 8 + r] = 0;
    Array<float> gain(n, 1.5f), bias(n, 0.25f);
    Array<u64> tables(4);
    Array<float> scale(1, 0.5f), weights(2, 1.0f);
    Array<int> ranks(1, rank), slots(2, 0);
    slots.p[1] = -1;
    tables.p[0] = reinterpret_cast<u64>(a.p), tables.p[1] = reinterpret_cast<u64>(b.p);
    tables.p[2] = reinterpret_cast<u64>(gain.p), tables.p[3] = reinterpret_cast<u64>(bias.p);
    Array<Site> site(1);
    site.p[0] = {reinterpret_cast<u64>(tables.p), reinterpret_cast<u64>(tables.p + 1), reinterpret_cast<u64>(tables.p + 2),
                 reinterpret_cast<u64>(tables.p + 3), reinterpret_cast<u64>(scale.p), reinterpret_cast<u64>(ranks.p)};
    const Site* sites = site.p;
    const int* no_ints = nullptr;
    const Tile* no_tiles = nullptr;
    double checksum = 0.0;
    Array<int> group(8, -1);
    group.p[0] = 0, group.p[1] = 2, group.p[4] = 1;
    for (int tokens : {2, 3, 2 * row}) {
        Tight<u16> x(static_cast<size_t>(tokens) * k), out(static_cast<size_t>(tokens) * n);
        fill(x, 3);
        fill(out, 4);
        Tight<float> h(static_cast<size_t>(tokens) * 8);
        const i64 x_stride = k, out_stride = n;
        char *xs = reinterpret_cast<char*>(x.p), *outs = reinterpret_cast<char*>(out.p);
        bool is_done;
        if (tokens == 2) {
            is_done = run(cuemu_launch_hotslot_shrink, 2, 1, 1, xs, x_stride, k, sites, slots.p, 1, 1, no_ints, no_ints, no_ints, 1, tokens, h.p, 8, 1024) &&
                      run(cuemu_launch_hotslot_expand, 2, 2, 1, h.p, 8, 1, sites, 1, slots.p, weights.p, 1, 1, no_ints, no_ints, 1, tokens, outs, out_stride, n, 32);
        } else if (tokens == 3) {
            // Tokens 0 and 2 are one group, each a row of its own.
            Array<int> of_rows(3, 0);
            Array<float> of_weights(3, 1.0f);
            of_rows.p[1] = -1;
            is_done = run(cuemu_launch_hotslot_shrink_groups, 2, 1, 1, xs, x_stride, k, sites, of_rows.p, 1, 1, group.p, no_ints, 1, tokens, h.p, 8,
                          1024) &&
                      run(cuemu_launch_hotslot_expand_groups, 2, 2, 1, h.p, 8, 1, sites, of_rows.p, of_weights.p, 1, 1, group.p, no_ints, 1,
                          tokens, outs, out_stride, n, 32);
        } else {
            is_done = run(cuemu_launch_hotslot_shrink_tiles, 2, 1, 1, xs, x_stride, k, sites, slots.p, 1, 1, no_tiles, tokens, row, h.p, 8, 1024) &&
                      run(cuemu_launch_hotslot_expand_tiles, 2, 1, 1, h.p, 8, 1, sites, slots.p, weights.p, 1, 1, no_tiles, row, outs, out_stride, n);
        }
        if (!is_done) return 1;
        for (size_t i = 0; i < out.size; ++i) checksum += bfloat_to_float(out.p[i]) * static_cast<double>(i % 11);
    }
    // Three tokens of two choices, of which one is masked; the second token's row has no slot.
    Tight<i64> index(6);
    for (int i = 0; i < 6; ++i) index.p[i] = i == 5 ? 1 : 0;
    Tight<int> rows(3), x_rows(6), owners(6), experts(6);
    Tight<unsigned char> adapted(3);
    Tight<i64> places(6);
    for (int i = 0; i < 6; ++i) places.p[i] = 5 - i;
    rows.p[0] = 0, rows.p[1] = 1, rows.p[2] = 0;
    const i64* chosen = index.p;
    const int* of_tokens = rows.p;
    if (!run(cuemu_launch_hotslot_pairs, 1, 1, 1, chosen, 2, 3, sites, 1, sites, 1, 1, slots.p, 1, 1, of_tokens, 1, places.p, x_rows.p, owners.p, experts.p,
             adapted.p))
        return 1;
    for (int i = 0; i < 6; ++i) checksum += x_rows.p[i] + 2 * owners.p[i] + 3 * experts.p[i] + 5 * adapted.p[i / 2];
    printf("done %.6f\n", checksum);
    return 0;
}
