//! What a holder pays: acquire and release by index, by -1 and by name, and the look-ups of a server; then what a writer pays.
#![allow(missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use hotslot_core::adapter::Resident;
use hotslot_core::prelude::*;
use hotslot_core::registry::Registry;

const SLOTS: usize = 16;

fn config() -> PeftAdapterConfig {
    PeftAdapterConfig::new(1, 1.0, false).unwrap()
}

/// A pool of one tiny site, all slots filled.
fn pool() -> LoraWeights {
    let weights = LoraWeights::on_host(PoolSpec::new(vec![Site::linear("proj", 8, 8)], SLOTS, 1)).unwrap();
    for slot in 0..SLOTS {
        load(&weights, slot, &format!("adapter-{slot}"));
    }
    weights
}

fn load(weights: &LoraWeights, slot: usize, name: &str) {
    let ones = [1_u8; 32];
    let half = |rows, cols| Source::in_memory(&ones, SourceDtype::F32, rows, cols);
    let tensors = [PairInput { site: 0, rank: 1, scale: 1.0, a: half(1, 8), b: half(8, 1) }];
    let config = config();
    let input = LoraAdapterInput { name, tensors: &tensors, extras: &[], config: &config, digest: Digest::Compute };
    weights.pack_store_into_slot(slot, &input).unwrap();
}

fn holders(c: &mut Criterion) {
    let weights = pool();
    let mut group = c.benchmark_group("acquire and release");
    group.bench_function("by index", |b| {
        b.iter(|| weights.release_slot(weights.acquire_slot(black_box(Selector::Slot(3)))));
    });
    group.bench_function("active", |b| {
        b.iter(|| weights.release_slot(weights.acquire_slot(black_box(Selector::Active))));
    });
    group.bench_function("by name", |b| {
        b.iter(|| weights.release_slot(weights.acquire_by_name(black_box("adapter-9"))));
    });
    group.finish();

    c.bench_function("touch", |b| b.iter(|| weights.touch_slot(black_box(3))));
    c.bench_function("look a name up", |b| b.iter(|| weights.slot_of(black_box("adapter-9"))));
    c.bench_function("victim of 16 slots", |b| b.iter(|| select_victim_slot(&weights.cache_slot_views())));
}

/// Two threads on one slot: the price of a shared cache line.
fn contended(c: &mut Criterion) {
    let weights = pool();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                weights.release_slot(weights.acquire_slot(Selector::Slot(3)));
            }
        });
        c.bench_function("acquire and release/by index, beside a second thread on the slot", |b| {
            b.iter(|| weights.release_slot(weights.acquire_slot(black_box(Selector::Slot(3)))));
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// The records alone, without weights: what a writer does under the mutex.
fn writers(c: &mut Criterion) {
    let registry = Registry::new(SLOTS, 0);
    for slot in 0..SLOTS {
        let ticket = registry.claim(Room::Slot(slot)).unwrap();
        registry.publish(ticket, Resident::new(&format!("adapter-{slot}"), config()), Arrival::Startup).unwrap();
    }
    c.bench_function("claim and publish of 16 slots, records only", |b| {
        b.iter(|| {
            let ticket = registry.claim(Room::Slot(3)).unwrap();
            registry.publish(ticket, Resident::new("adapter-3", config()), Arrival::Swap).unwrap()
        });
    });
    let mut names = ["adapter-1", "adapter-2"].into_iter().cycle();
    c.bench_function("rotate among 16 slots", |b| {
        b.iter(|| registry.set_active(names.next().unwrap()).unwrap());
    });
}

criterion_group!(benches, holders, contended, writers);
criterion_main!(benches);
