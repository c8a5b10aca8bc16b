//! What a promotion from a tier costs beside a plain memcpy of equal bytes: adapters of 5, 50 and 200 MB from the host tier and from
//! the disk cache (page cache), at full rank, where a slot is one stretch, and at half the pool's, where each block is one.
#![allow(unsafe_code, missing_docs)]

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hotslot_core::block::PageAllocator;
use hotslot_core::memory::{DeviceMemory, HostMemory, Region, Stream};
use hotslot_core::packed::PackedAdapter;
use hotslot_core::prelude::*;
use hotslot_core::tiers::disk::DiskCache;
use hotslot_core::tiers::host::HostTier;

const S: Stream = Stream(0);
const RANK: usize = 16;

/// A Llama whose adapters of rank 16 have about so many bytes in bf16.
fn model(mb: usize) -> ModelConfig {
    let (hidden_size, num_hidden_layers) = match mb {
        5 => (576, 16),
        50 => (2048, 38),
        _ => (4096, 76),
    };
    ModelConfig {
        hidden_size,
        intermediate_size: hidden_size * 7 / 2,
        num_hidden_layers,
        num_attention_heads: hidden_size / 64,
        num_key_value_heads: hidden_size / 256,
        head_dim: 64,
        vocab_size: 128_256,
        ..ModelConfig::default()
    }
}

/// Two slots and an adapter that goes from the one to the other.
fn pool(mb: usize, max_rank: usize) -> (LoraWeights, PackedAdapter) {
    let weights = LoraWeights::on_host(PoolSpec::new(model(mb).sites(), 2, max_rank)).unwrap();
    let ones = 1_f32.to_le_bytes().repeat(RANK * 14336);
    let half = |rows: usize, cols: usize| Source::in_memory(&ones[..4 * rows * cols], SourceDtype::F32, rows, cols);
    let pair = |(site, dims): (usize, &Site)| {
        let (a, b) = (half(RANK, dims.in_features), half(dims.out_features, RANK));
        PairInput { site, rank: RANK, scale: 2.0, a, b }
    };
    let pairs: Vec<_> = weights.layout().sites().iter().enumerate().map(pair).collect();
    let config = PeftAdapterConfig::new(RANK, 32.0, false).unwrap();
    let packed =
        PackedAdapter::pack(weights.layout(), &config, &pairs, &[], Digest::Compute, None, &PageAllocator).unwrap();
    (weights, packed)
}

fn promote(c: &mut Criterion) {
    let folder = std::env::temp_dir().join(format!("hotslot-bench-{}", std::process::id()));
    let disk = DiskCache::open(&folder, 1 << 30).unwrap();
    let host = HostTier::new(1 << 30);
    for mb in [5, 50, 200] {
        for max_rank in [RANK, 2 * RANK] {
            let (weights, packed) = pool(mb, max_rank);
            let (key, nbytes) = (packed.key(), packed.contents().nbytes);
            disk.put(&packed).unwrap();
            host.put(Arc::new(packed)).unwrap();
            let mut group = c.benchmark_group(format!("promotion of {mb} MB, max_rank {max_rank}"));
            group.throughput(Throughput::Bytes(nbytes)).sample_size(20);

            let memory = vec![1_u8; 2 * nbytes as usize].leak();
            let base = memory.as_mut_ptr().expose_provenance() as u64;
            // SAFETY: leaked, and used through the result alone.
            let plain = unsafe { HostMemory::new(&[Region { base, len: 2 * nbytes }]) }.unwrap();
            let id = |name| BenchmarkId::from_parameter(name);
            group.bench_function(id("memcpy"), |b| b.iter(|| plain.copy_d2d(base, base + nbytes, nbytes, S)));

            let mut turn = 0_u32;
            let mut in_turn = |load: &dyn Fn(&str) -> Loaded| {
                // Another name each time, into the slot of the one before the last.
                turn += 1;
                assert!(!load(&format!("a{turn}")).was_resident);
            };
            group.bench_function(id("host tier"), |b| {
                b.iter(|| {
                    in_turn(&|name| weights.promote_packed(name, &host.get(&key).unwrap(), None, false).unwrap());
                });
            });
            group.bench_function(id("disk cache"), |b| {
                b.iter(|| {
                    let found = disk.find(&key).unwrap().unwrap();
                    in_turn(&|name| weights.promote_file(name, &found, None, false).unwrap());
                });
            });
            group.bench_function(id("disk cache, into memory"), |b| {
                b.iter(|| disk.get(&key, weights.layout(), &PageAllocator).unwrap().unwrap());
            });
            group.finish();
            host.clear();
            disk.clear().unwrap();
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

criterion_group!(benches, promote);
criterion_main!(benches);
