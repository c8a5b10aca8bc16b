//! Packing: what a slot holds after a load, whatever it held before and wherever the tensors came from.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Write;

use hotslot_core::Error;
use hotslot_core::config::PeftAdapterConfig;
use hotslot_core::identity::Digest;
use hotslot_core::layout::{Dtype, Layout, Site, SlotBases, padded};
use hotslot_core::memory::{DeviceMemory, HostMemory, Region, Stream};
use hotslot_core::pack::{PairInput, Staged, Staging};
use hotslot_core::source::{Source, SourceDtype};
use proptest::prelude::*;

const S: Stream = Stream(0);

fn blocks_at(blocks: u64) -> SlotBases {
    SlotBases { blocks, extras: 0 }
}

/// A slot in memory of its own, full of NaN.
struct Slot {
    memory: Vec<u64>,
}

impl Slot {
    fn poisoned(layout: &Layout) -> Self {
        Self { memory: vec![u64::MAX; layout.slot_bytes() as usize / 8] }
    }

    fn with<T>(&mut self, f: impl FnOnce(&HostMemory, u64) -> T) -> T {
        let base = self.memory.as_mut_ptr().expose_provenance() as u64;
        let region = Region { base, len: self.memory.len() as u64 * 8 };
        // SAFETY: the vector is borrowed exclusively for as long as the object lives.
        f(&unsafe { HostMemory::new(&[region]) }.unwrap(), base)
    }

    fn write(&mut self, staged: &Staged<'_>) {
        self.with(|memory, base| staged.write(memory, blocks_at(base), S)).unwrap();
    }

    /// Rows of a block as f32, pads included.
    fn block(&self, layout: &Layout, offset: u64, rows: usize, cols: usize) -> Vec<Vec<f32>> {
        let bytes: Vec<u8> = self.memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let size = layout.dtype().size();
        let row = |r| {
            bytes[offset as usize + r * padded(cols) * size..][..padded(cols) * size].chunks(size).map(|element| {
                match *element {
                    [a, b] => f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16),
                    [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                    _ => unreachable!(),
                }
            })
        };
        (0..rows).map(|r| row(r).collect()).collect()
    }
}

fn bytes_of(values: &[f32], dtype: SourceDtype) -> Vec<u8> {
    let f16 = |value: f32| {
        // Only for the eighths from -16 to 16 that the tests use, which f16 holds exactly.
        let bits = value.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        if value == 0.0 { sign } else { sign | (((bits & 0x7fff_ffff) - (112 << 23)) >> 13) as u16 }
    };
    values
        .iter()
        .flat_map(|value| match dtype {
            SourceDtype::F32 => value.to_le_bytes().to_vec(),
            SourceDtype::F16 => f16(*value).to_le_bytes().to_vec(),
            SourceDtype::Bf16 => value.to_le_bytes()[2..].to_vec(),
        })
        .collect()
}

/// Eighths that every dtype holds exactly and that differ from place to place.
fn eighths(seed: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 37 + seed * 11) % 255) as f32 / 8.0 - 15.0)
        .map(|v| if v.abs() > 15.0 { 1.0 } else { v })
        .collect()
}

fn config() -> PeftAdapterConfig {
    PeftAdapterConfig::new(8, 16.0, false).unwrap()
}

fn layout(dims: &[(usize, usize)], max_rank: usize, dtype: Dtype) -> Layout {
    let site = |(i, &(n, m)): (usize, &(usize, usize))| Site::linear(format!("layers.{i}.proj"), n, m);
    Layout::new(dims.iter().enumerate().map(site).collect(), max_rank, dtype).unwrap()
}

/// The values and bytes of one adapter: a pair at each site of the layout.
struct Adapter {
    ranks: Vec<usize>,
    dtype: SourceDtype,
    values: Vec<[Vec<f32>; 2]>,
    bytes: Vec<[Vec<u8>; 2]>,
}

impl Adapter {
    fn new(layout: &Layout, ranks: &[usize], dtype: SourceDtype) -> Self {
        let values: Vec<_> = layout
            .sites()
            .iter()
            .zip(ranks)
            .enumerate()
            .map(|(i, (site, rank))| {
                [eighths(2 * i, rank * site.in_features), eighths(2 * i + 1, rank * site.out_features)]
            })
            .collect();
        let bytes = values.iter().map(|pair| pair.each_ref().map(|half| bytes_of(half, dtype))).collect();
        Self { ranks: ranks.to_vec(), dtype, values, bytes }
    }

    fn pairs<'a>(
        &'a self,
        layout: &Layout,
        source: impl Fn(usize, usize, &'a [u8]) -> SourceAt<'a>,
    ) -> Vec<PairInput<'a>> {
        let half =
            |site: usize, half: usize, rows: usize, cols: usize| match source(site, half, &self.bytes[site][half]) {
                SourceAt::Memory(bytes) => Source::in_memory(bytes, self.dtype, rows, cols),
                SourceAt::File(file, offset) => Source::in_file(file, offset, self.dtype, rows, cols),
            };
        let pair = |site: usize| {
            let (rank, Site { in_features, out_features, .. }) = (self.ranks[site], &layout.sites()[site]);
            PairInput {
                site,
                rank,
                scale: 0.5,
                a: half(site, 0, rank, *in_features),
                b: half(site, 1, *out_features, rank),
            }
        };
        (0..self.ranks.len()).map(pair).collect()
    }

    fn in_memory(&self, layout: &Layout) -> Vec<PairInput<'_>> {
        self.pairs(layout, |_, _, bytes| SourceAt::Memory(bytes))
    }

    /// A file with all tensors in order, after seven bytes of something else, and where each begins.
    fn to_file(&self) -> (File, Vec<[u64; 2]>) {
        let path = std::env::temp_dir().join(format!("hotslot-pack-{}-{:p}", std::process::id(), self));
        let mut file = File::create(&path).unwrap();
        file.write_all(b"1234567").unwrap();
        let mut at = 7;
        let mut offsets = Vec::new();
        for pair in &self.bytes {
            offsets.push(pair.each_ref().map(|half| {
                file.write_all(half).unwrap();
                at += half.len() as u64;
                at - half.len() as u64
            }));
        }
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        (file, offsets)
    }
}

enum SourceAt<'a> {
    Memory(&'a [u8]),
    File(&'a File, u64),
}

fn assert_holds(slot: &Slot, layout: &Layout, adapter: &Adapter) {
    for (site, rank) in adapter.ranks.iter().copied().enumerate() {
        let Site { in_features, out_features, .. } = layout.sites()[site];
        let offsets = layout.offsets(site).unwrap();
        for (half, offset, rows, cols) in [(0, offsets.a, rank, in_features), (1, offsets.b, out_features, rank)] {
            let mut expected: Vec<Vec<f32>> = adapter.values[site][half].chunks(cols).map(<[f32]>::to_vec).collect();
            for row in &mut expected {
                row.resize(padded(cols), 0.0);
            }
            assert_eq!(slot.block(layout, offset, rows, cols), expected, "site {site} half {half}");
        }
    }
}

proptest! {
    #[test]
    fn a_slot_holds_the_values_and_zeroed_pads_for_every_rank_shape_dtype_and_source(
        dims in prop::collection::vec((1_usize..40, 1_usize..40), 1..5),
        max_rank in 1_usize..20,
        rank_seed in prop::collection::vec(0_usize..1000, 5),
        dtype in prop::sample::select(vec![SourceDtype::F32, SourceDtype::F16, SourceDtype::Bf16]),
        is_f32: bool,
        from_file: bool,
    ) {
        let layout = layout(&dims, max_rank, if is_f32 { Dtype::F32 } else { Dtype::Bf16 });
        let ranks: Vec<_> = (0..dims.len()).map(|i| 1 + rank_seed[i] % max_rank).collect();
        let adapter = Adapter::new(&layout, &ranks, dtype);
        let (file, offsets) = adapter.to_file();
        let pairs = if from_file {
            adapter.pairs(&layout, |site, half, _| SourceAt::File(&file, offsets[site][half]))
        } else {
            adapter.in_memory(&layout)
        };

        let staged = Staged::read(&layout, &config(), &pairs, &[], Digest::Compute, Staging::default()).unwrap();
        prop_assert_eq!(staged.report().num_rounded, 0);
        prop_assert_eq!(staged.report().max_rank, ranks.iter().copied().max().unwrap());
        let mut slot = Slot::poisoned(&layout);
        slot.write(&staged);
        assert_holds(&slot, &layout, &adapter);

        let known = Staged::read(&layout, &config(), &pairs, &[], Digest::Known(staged.cache_id().unwrap()), staged.into_staging()).unwrap();
        let mut slot = Slot::poisoned(&layout);
        slot.write(&known);
        assert_holds(&slot, &layout, &adapter);
    }
}

#[test]
fn cells_are_those_of_the_pairs_and_zero_elsewhere() {
    let layout = layout(&[(8, 8), (8, 8), (8, 8)], 4, Dtype::Bf16);
    let adapter = Adapter::new(&layout, &[3, 1, 2], SourceDtype::Bf16);
    let mut pairs = adapter.in_memory(&layout);
    pairs.remove(1);
    let staged = Staged::read(&layout, &config(), &pairs, &[], Digest::Compute, Staging::default()).unwrap();
    let cells = staged.content().cells(&layout, blocks_at(4096), config().scaling() as f32);
    let at = |site: usize| layout.offsets(site).map(|offsets| (4096 + offsets.a, 4096 + offsets.b)).unwrap();
    assert_eq!(cells.pointers, [at(0).0, at(0).1, 0, 0, 0, 0, 0, 0, at(2).0, at(2).1, 0, 0]);
    assert_eq!(cells.ranks, [3, 0, 2]);
    assert_eq!(cells.scales, [0.5, 0.0, 0.5, 2.0]);
}

#[test]
fn known_content_that_needs_no_conversion_goes_from_the_file_to_the_slot_in_few_copies() {
    let layout = layout(&[(128, 128), (256, 128), (64, 512)], 16, Dtype::Bf16);
    let adapter = Adapter::new(&layout, &[16, 16, 16], SourceDtype::Bf16);
    let (file, offsets) = adapter.to_file();
    let pairs = adapter.pairs(&layout, |site, half, _| SourceAt::File(&file, offsets[site][half]));
    let staged = Staged::read(&layout, &config(), &pairs, &[], Digest::Compute, Staging::default()).unwrap();
    assert_eq!(staged.num_copies(), 1);
    let known =
        Staged::read(&layout, &config(), &pairs, &[], Digest::Known(staged.cache_id().unwrap()), staged.into_staging())
            .unwrap();
    assert_eq!(known.num_copies(), 1);
    let mut slot = Slot::poisoned(&layout);
    slot.write(&known);
    assert_holds(&slot, &layout, &adapter);
}

#[test]
fn rounded_values_are_counted() {
    let layout = layout(&[(3, 3)], 1, Dtype::Bf16);
    let half = |values: [f32; 3]| bytes_of(&values, SourceDtype::F32);
    let (a, b) = (half([1.0, 1.001, 0.1]), half([0.5, 3.0, -0.3]));
    let pair = PairInput {
        site: 0,
        rank: 1,
        scale: 1.0,
        a: Source::in_memory(&a, SourceDtype::F32, 1, 3),
        b: Source::in_memory(&b, SourceDtype::F32, 3, 1),
    };
    let staged = Staged::read(&layout, &config(), &[pair], &[], Digest::Compute, Staging::default()).unwrap();
    assert_eq!(staged.report().num_rounded, 3);
}

#[test]
fn a_pair_that_does_not_fit_is_refused_with_its_numbers() {
    let layout = layout(&[(8, 4)], 2, Dtype::Bf16);
    let zeros = [0; 1024];
    let tensor = |rows, cols| Source::in_memory(&zeros[..rows * cols * 2], SourceDtype::Bf16, rows, cols);
    let good = PairInput { site: 0, rank: 2, scale: 1.0, a: tensor(2, 8), b: tensor(4, 2) };
    let read = |pairs: &[PairInput<'_>]| {
        Staged::read(&layout, &config(), pairs, &[], Digest::Compute, Staging::default()).map(|_| ())
    };
    let path = || "layers.0.proj".to_owned();
    let shape = |half, found, expected| Err(Error::AdapterShape { site: path(), half, found, expected });

    assert_eq!(read(&[good]), Ok(()));
    assert_eq!(read(&[PairInput { rank: 3, ..good }]), Err(Error::Rank { site: path(), rank: 3, max_rank: 2 }));
    assert_eq!(read(&[PairInput { rank: 0, ..good }]), Err(Error::Rank { site: path(), rank: 0, max_rank: 2 }));
    assert_eq!(read(&[PairInput { a: tensor(2, 9), ..good }]), shape("A", (2, 9), (2, 8)));
    assert_eq!(read(&[PairInput { b: tensor(2, 4), ..good }]), shape("B", (2, 4), (4, 2)));
    assert!(matches!(read(&[PairInput { scale: f64::NAN, ..good }]), Err(Error::AdapterConfig { .. })));
    assert!(matches!(read(&[PairInput { scale: 1e300, ..good }]), Err(Error::AdapterConfig { .. })));
    assert!(matches!(read(&[PairInput { site: 1, ..good }]), Err(Error::Value { .. })));
    assert!(matches!(read(&[good, good]), Err(Error::Value { .. })));
    assert!(matches!(read(&[]), Err(Error::Value { .. })));
    let short = Source::in_memory(&zeros[..31], SourceDtype::Bf16, 2, 8);
    assert!(matches!(read(&[PairInput { a: short, ..good }]), Err(Error::AdapterFile { .. })));
}

#[test]
fn a_value_that_the_pool_cannot_hold_is_named() {
    let layout = layout(&[(300, 1)], 1, Dtype::Bf16);
    let b = bytes_of(&[1.0], SourceDtype::F32);
    for (index, value) in [(0, f32::NAN), (299, f32::INFINITY), (123, f32::MAX)] {
        let mut values = vec![1.0; 300];
        values[index] = value;
        let a = bytes_of(&values, SourceDtype::F32);
        let pair = PairInput {
            site: 0,
            rank: 1,
            scale: 1.0,
            a: Source::in_memory(&a, SourceDtype::F32, 1, 300),
            b: Source::in_memory(&b, SourceDtype::F32, 1, 1),
        };
        match Staged::read(&layout, &config(), &[pair], &[], Digest::Compute, Staging::default()) {
            Err(Error::AdapterValue { site, half: "A", index: at, value: found, .. }) => {
                assert_eq!((site.as_str(), at, found.to_bits()), ("layers.0.proj", index, value.to_bits()));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_truncated_file_is_found_before_the_slot_is_touched() {
    let layout = layout(&[(64, 64), (64, 64)], 8, Dtype::Bf16);
    let adapter = Adapter::new(&layout, &[8, 8], SourceDtype::Bf16);
    let (file, offsets) = adapter.to_file();
    let pairs = adapter.pairs(&layout, |site, half, _| SourceAt::File(&file, offsets[site][half] + 1));
    let id = Staged::read(&layout, &config(), &adapter.in_memory(&layout), &[], Digest::Compute, Staging::default())
        .unwrap()
        .cache_id()
        .unwrap();
    for digest in [Digest::Compute, Digest::Known(id)] {
        match Staged::read(&layout, &config(), &pairs, &[], digest, Staging::default()) {
            Err(Error::AdapterFile { path, .. }) => assert_eq!(path, "layers.1.proj.lora_B.weight"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn only_the_slot_is_written() {
    let layout = layout(&[(20, 20)], 4, Dtype::Bf16);
    let adapter = Adapter::new(&layout, &[4], SourceDtype::Bf16);
    let staged =
        Staged::read(&layout, &config(), &adapter.in_memory(&layout), &[], Digest::Compute, Staging::default())
            .unwrap();
    let mut slot = Slot::poisoned(&layout);
    // One byte further than it fits.
    let error =
        slot.with(|memory, base| staged.write(memory, blocks_at(base + layout.slot_bytes() - 8), S)).unwrap_err();
    assert!(matches!(error, Error::Region { .. }), "{error}");
    assert!(slot.with(|memory, base| memory.zero(base, layout.slot_bytes(), S)).is_ok());
}
