//! CPU kernels: decode against the bandwidth of one core, prefill on one and two threads.
//!
//! `cargo bench --bench kernels`. The throughput of `read` is the limit of `decode`: both go once over the same memory,
//! a pool of 128 MB, so that no cache helps.

#![allow(unsafe_code, reason = "kernels take addresses; each call passes those of live vectors")]
#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hotslot_core::kernels::{ActDtype, Exec, Input, Output, Plan, SiteView, apply};
use hotslot_core::layout::{Dtype, padded};

const POOL_BYTES: usize = 128 << 20;

/// Sites over one block of memory, laid out as a pool lays them out: slot after slot, in each slot site after site.
struct Pool {
    memory: Vec<u64>,
    tables: Vec<Table>,
    size: usize,
    rank: usize,
}

struct Table {
    a: Vec<u64>,
    b: Vec<u64>,
    /// The cells of gains and biases.
    none: Vec<u64>,
    scale: Vec<f32>,
    rank: Vec<i32>,
}

impl Pool {
    fn new(bytes: usize, slots: usize, size: usize, rank: usize) -> Self {
        let a_bytes = (rank * padded(size) * 2).next_multiple_of(256);
        let b_bytes = (size * padded(rank) * 2).next_multiple_of(256);
        let sites = (bytes / (slots * (a_bytes + b_bytes))).max(1);
        let memory = vec![0x3c01_bc02_3c03_bc04; slots * sites * (a_bytes + b_bytes) / 8];
        let address =
            |slot: usize, site: usize| (memory.as_ptr().addr() + (slot * sites + site) * (a_bytes + b_bytes)) as u64;
        let tables = (0..sites)
            .map(|site| Table {
                a: (0..slots).map(|slot| address(slot, site)).collect(),
                b: (0..slots).map(|slot| address(slot, site) + a_bytes as u64).collect(),
                none: vec![0; slots],
                scale: vec![0.5; slots],
                rank: vec![rank as i32; slots],
            })
            .collect();
        Self { memory, tables, size, rank }
    }

    fn bytes(&self) -> u64 {
        (self.tables.len() * self.tables[0].a.len() * self.rank * self.size * 4) as u64
    }

    fn views(&self) -> impl Iterator<Item = SiteView> {
        self.tables.iter().map(|table| SiteView {
            in_features: self.size,
            out_features: self.size,
            a_table: table.a.as_ptr(),
            b_table: table.b.as_ptr(),
            gain_table: table.none.as_ptr(),
            bias_table: table.none.as_ptr(),
            scale: table.scale.as_ptr(),
            rank: table.rank.as_ptr(),
            max_loras: table.a.len(),
            weight_dtype: Dtype::Bf16,
        })
    }
}

/// Activations of `tokens` rows, values that stay finite however often the deltas are added.
struct Activations {
    x: Vec<u32>,
    out: Vec<u32>,
    tokens: usize,
    size: usize,
    dtype: ActDtype,
}

impl Activations {
    fn new(tokens: usize, size: usize, dtype: ActDtype) -> Self {
        Self { x: vec![0x2f80_2f80; tokens * size], out: vec![0; tokens * size], tokens, size, dtype }
    }

    fn apply(&mut self, view: &SiteView, plan: &Plan, exec: Exec) {
        let (dtype, row_stride) = (self.dtype, self.size);
        let x = Input { ptr: self.x.as_ptr().cast(), num_tokens: self.tokens, row_stride, dtype };
        let out = Output { ptr: self.out.as_mut_ptr().cast(), row_stride, dtype };
        // SAFETY: the vectors are live and large enough for either type.
        unsafe { apply(view, plan, x, out, exec) }.expect("the arguments fit");
    }
}

fn plan(slots: usize) -> Plan {
    let mut plan = Plan::new(slots);
    plan.set_tokens(&(0..slots as i32).collect::<Vec<_>>()).expect("the slots are in range");
    plan
}

/// The plainest read of memory.
fn read(memory: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn read_avx2(memory: &[u64]) -> u64 {
            memory.iter().fold(0, |sum, word| sum.wrapping_add(*word))
        }
        // SAFETY: the machine has AVX2.
        return unsafe { read_avx2(memory) };
    }
    memory.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Sixteen rows, each with a slot of its own.
fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for size in [2048, 4096] {
        for rank in [8, 16, 64] {
            let pool = Pool::new(POOL_BYTES, 16, size, rank);
            group.throughput(Throughput::Bytes(pool.bytes()));
            let name = format!("{size} rank {rank}");
            group.bench_function(BenchmarkId::new("read", &name), |bencher| {
                bencher.iter(|| read(black_box(&pool.memory)));
            });
            for dtype in [ActDtype::F32, ActDtype::Bf16] {
                let (mut activations, plan) = (Activations::new(16, size, dtype), plan(16));
                group.bench_function(BenchmarkId::new(format!("{dtype:?}"), &name), |bencher| {
                    bencher.iter(|| pool.views().for_each(|view| activations.apply(&view, &plan, Exec::new(1))));
                });
            }
        }
    }
    group.finish();
}

/// Four prompts of 512 tokens, each with an adapter of its own; throughput in multiply-adds.
fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for size in [576, 1024, 1536, 2816] {
        let pool = Pool::new(1, 4, size, 16);
        group.throughput(Throughput::Elements((2048 * 16 * 2 * size) as u64));
        for dtype in [ActDtype::F32, ActDtype::Bf16] {
            for threads in [1, 2] {
                let (mut activations, plan) = (Activations::new(2048, size, dtype), plan(4));
                let view = pool.views().next().expect("a pool has a site");
                group.bench_function(BenchmarkId::new(format!("{dtype:?} {threads} threads"), size), |bencher| {
                    bencher.iter(|| activations.apply(&view, &plan, Exec::new(threads)));
                });
            }
        }
    }
    group.finish();
}

/// What a call costs beside its work: base rows only, and one row of the smallest site.
fn overhead(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("overhead");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));
    let pool = Pool::new(1, 4, 8, 1);
    let view = pool.views().next().expect("a pool has a site");
    for (name, slot) in [("base", -1), ("one row", 0)] {
        let (mut activations, mut plan) = (Activations::new(1, 8, ActDtype::F32), Plan::new(4));
        plan.set_tokens(&[slot]).expect("the slot is in range");
        group.bench_function(name, |bencher| bencher.iter(|| activations.apply(&view, &plan, Exec::new(1))));
    }
    group.finish();
}

criterion_group!(benches, decode, prefill, overhead);
criterion_main!(benches);
