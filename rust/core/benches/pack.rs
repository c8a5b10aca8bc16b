//! What a load costs: the cells of a slot, packing with and without conversion, and a promotion from the page cache beside a
//! plain memcpy of the same bytes. Sizes are those of a rank-16 adapter of all seven modules of an 8B Llama (84 MB).
#![allow(unsafe_code, missing_docs)]

use std::fs::File;
use std::hint::black_box;
use std::io::Write;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hotslot_core::config::{ModelConfig, PeftAdapterConfig};
use hotslot_core::identity::{CacheId, Digest};
use hotslot_core::layout::{Dtype, Layout, SlotBases};
use hotslot_core::memory::{DeviceMemory, HostMemory, Region, Stream};
use hotslot_core::pack::{PairInput, Staged, Staging};
use hotslot_core::source::{Source, SourceDtype};
use hotslot_core::tables::{SlotCells, Tables};

const RANK: usize = 16;
const S: Stream = Stream(0);

fn llama_8b() -> Layout {
    let config = ModelConfig {
        hidden_size: 4096,
        intermediate_size: 14336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 128_256,
        ..ModelConfig::default()
    };
    Layout::new(config.sites(), RANK, Dtype::Bf16).unwrap()
}

/// Host memory of `len` bytes that lives as long as the program.
fn host(len: u64) -> (HostMemory, u64) {
    let memory = vec![1_u8; len as usize + 4096].leak();
    let base = (memory.as_mut_ptr().expose_provenance() as u64).next_multiple_of(4096);
    // SAFETY: leaked, and used through the result alone.
    (unsafe { HostMemory::new(&[Region { base, len }]) }.unwrap(), base)
}

/// The adapter's tensors in one file, as pairs.
fn adapter<'a>(layout: &Layout, file: &'a File, dtype: SourceDtype) -> Vec<PairInput<'a>> {
    let mut at = 0;
    let mut tensor = |rows: usize, cols: usize| {
        let source = Source::in_file(file, at, dtype, rows, cols);
        at += source.num_bytes() as u64;
        source
    };
    let pairs = layout.sites().iter().enumerate().map(|(site, dims)| PairInput {
        site,
        rank: RANK,
        scale: 2.0,
        a: tensor(RANK, dims.in_features),
        b: tensor(dims.out_features, RANK),
    });
    pairs.collect()
}

fn file_of(len: u64) -> File {
    let path = std::env::temp_dir().join(format!("hotslot-bench-{}", std::process::id()));
    File::create(&path).unwrap().write_all(&vec![0x3c; len as usize]).unwrap();
    let file = File::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn refresh(c: &mut Criterion) {
    let (num_sites, max_loras) = (48 * 7, 64);
    let len = Tables::bytes(num_sites, max_loras).unwrap();
    let (memory, base) = host(len);
    let tables = Tables::new(Region { base, len }, num_sites, max_loras).unwrap();
    let cells = SlotCells::empty(num_sites);
    c.bench_function("refresh/48 layers x 7 modules", |b| {
        b.iter(|| tables.refresh_slot_tables(&memory, 7, black_box(&cells), S));
    });
}

fn load(c: &mut Criterion) {
    let layout = llama_8b();
    let len = layout.slot_bytes();
    let (memory, base) = host(2 * len);
    let config = PeftAdapterConfig::new(RANK, 32.0, false).unwrap();
    let file = file_of(2 * len);
    let mut group = c.benchmark_group("load");
    group.throughput(Throughput::Bytes(len)).sample_size(10);

    group.bench_function("memcpy of equal bytes", |b| b.iter(|| memory.copy_d2d(base, base + len, len, S)));

    let bf16 = adapter(&layout, &file, SourceDtype::Bf16);
    let mut read_and_write = |name: &str, pairs: &[PairInput<'_>], digest: Digest| {
        let mut staging = Some(Staging::default());
        group.bench_function(name, |b| {
            b.iter(|| {
                let staged =
                    Staged::read(&layout, &config, pairs, &[], digest, staging.take().unwrap_or_default()).unwrap();
                staged.write(&memory, SlotBases { blocks: base, extras: 0 }, S).unwrap();
                staging = Some(staged.into_staging());
            });
        });
    };
    read_and_write("promotion, digest known", &bf16, Digest::Known(CacheId::BASE));
    read_and_write("first load of bf16", &bf16, Digest::Compute);
    read_and_write("first load of f32", &adapter(&layout, &file, SourceDtype::F32), Digest::Compute);
    read_and_write("f32, digest known", &adapter(&layout, &file, SourceDtype::F32), Digest::Known(CacheId::BASE));
    group.finish();
}

criterion_group!(benches, refresh, load);
criterion_main!(benches);
