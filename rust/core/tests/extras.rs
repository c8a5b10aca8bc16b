//! What is neither A nor B: where it lies, what is refused, and that cells, names and faults treat it as they treat pairs.

use std::sync::Arc;

use hotslot_core::host::OwnedHostMemory;
use hotslot_core::prelude::*;

const S: Stream = Stream(0);

/// A linear site with a block, a floating embedding of 40 tokens, a floating conv1d, a router and an expert.
fn sites() -> Vec<Site> {
    vec![
        Site::linear("model.layers.0.self_attn.q_proj", 12, 10),
        Site::new("model.embed_tokens", SiteKind::Embedding, 40, 12),
        Site::new("h.0.c_attn", SiteKind::Conv1d, 6, 20).float(),
        Site::new("model.layers.0.mlp.gate", SiteKind::Router, 12, 4),
        Site::new("model.layers.0.mlp.experts.3.up_proj", SiteKind::Expert, 12, 6),
    ]
}

/// Bytes of the place of `Adapter::full`, worked out by hand: blocks of 256 bytes each, and one of 512.
const NEEDED: u64 = 10 * 256 + 512;

fn spec(dtype: Dtype) -> PoolSpec {
    PoolSpec { pinned: 1, dtype, extras_bytes: NEEDED, ..PoolSpec::new(sites(), 3, 4) }
}

/// A pool and its memory, which a test may damage.
fn pool_of(spec: PoolSpec) -> (LoraWeights, Arc<OwnedHostMemory>) {
    let mut memory = None;
    let weights = LoraWeights::on_host_through(spec, |owned| {
        let owned = Arc::new(owned);
        memory = Some(Arc::clone(&owned));
        owned
    });
    (weights.unwrap(), memory.unwrap())
}

fn pool() -> (LoraWeights, Arc<OwnedHostMemory>) {
    pool_of(spec(Dtype::Bf16))
}

/// Multiples of 1/8, which bf16 holds exactly, different from place to place.
fn values(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 + seed * 11) % 255) as f32 / 8.0 - 15.0).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

struct Pair {
    site: usize,
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    bytes: [Vec<u8>; 2],
}

#[derive(Clone)]
struct Extra {
    site: usize,
    part: ExtraPart,
    rows: usize,
    cols: usize,
    values: Vec<f32>,
    bytes: Vec<u8>,
    stored: Option<Vec<u8>>,
    ids: Vec<u32>,
}

struct Adapter {
    name: &'static str,
    pairs: Vec<Pair>,
    extras: Vec<Extra>,
    config: PeftAdapterConfig,
}

fn extra(site: usize, part: ExtraPart, rows: usize, cols: usize, seed: usize, ids: &[u32]) -> Extra {
    let values = values(seed, rows * cols);
    Extra { site, part, rows, cols, bytes: f32s(&values), values, stored: None, ids: ids.to_vec() }
}

impl Adapter {
    /// A pair at each of `at`, no extras.
    fn pairs(name: &'static str, seed: usize, at: &[usize]) -> Self {
        let pair = |&site: &usize| {
            let (n, m, rank) = (sites()[site].in_features, sites()[site].out_features, 2);
            let (a, b) = (values(seed + site, rank * n), values(seed + site + 50, m * rank));
            Pair { site, rank, bytes: [f32s(&a), f32s(&b)], a, b }
        };
        let config = PeftAdapterConfig::new(2, 4.0, false).unwrap();
        Self { name, pairs: at.iter().map(pair).collect(), extras: Vec::new(), config }
    }

    /// Something of everything, in another order than it will lie in.
    fn full(name: &'static str, seed: usize) -> Self {
        let mut adapter = Self::pairs(name, seed, &[3, 0, 1]);
        adapter.extras = vec![
            extra(1, ExtraPart::Rows, 2, 12, seed + 1, &[39, 7]),
            extra(4, ExtraPart::Weight, 6, 12, seed + 2, &[]),
            extra(0, ExtraPart::Bias, 1, 10, seed + 3, &[]),
            extra(0, ExtraPart::Gain, 1, 10, seed + 4, &[]),
            extra(2, ExtraPart::WeightBias, 1, 20, seed + 5, &[]),
            extra(2, ExtraPart::Weight, 6, 20, seed + 6, &[]),
            extra(0, ExtraPart::Rows, 3, 12, seed + 7, &[9, 0, 4]),
        ];
        adapter
    }

    fn with_input<T>(&self, digest: Digest, run: impl FnOnce(&LoraAdapterInput<'_>) -> T) -> T {
        let source = |bytes, rows, cols| Source::in_memory(bytes, SourceDtype::F32, rows, cols);
        let tensors: Vec<_> = self
            .pairs
            .iter()
            .map(|pair| PairInput {
                site: pair.site,
                rank: pair.rank,
                scale: 2.0,
                a: source(&pair.bytes[0], pair.rank, pair.a.len() / pair.rank),
                b: source(&pair.bytes[1], pair.b.len() / pair.rank, pair.rank),
            })
            .collect();
        let extras: Vec<_> = self
            .extras
            .iter()
            .map(|extra| ExtraInput {
                site: extra.site,
                part: extra.part,
                source: source(&extra.bytes, extra.rows, extra.cols),
                stored: extra.stored.as_ref().map(|stored| source(stored, extra.rows, extra.cols)),
                ids: &extra.ids,
            })
            .collect();
        run(&LoraAdapterInput { name: self.name, tensors: &tensors, extras: &extras, config: &self.config, digest })
    }

    fn promote(&self, weights: &LoraWeights) -> Result<Loaded> {
        self.with_input(Digest::Compute, |input| weights.promote(input, weights.stage(input)?, false))
    }

    fn swap(&self, weights: &LoraWeights, slot: usize) -> Result<Loaded> {
        self.with_input(Digest::Compute, |input| weights.pack_store_into_slot(slot, input))
    }

    fn pack(&self, weights: &LoraWeights, slot: usize) -> Result<Loaded> {
        self.with_input(Digest::Compute, |input| weights.pack_slot(slot, input))
    }
}

/// Rows at an address, pads included, as f32.
fn read(weights: &LoraWeights, address: u64, rows: usize, stride: usize, dtype: Dtype) -> Vec<Vec<f32>> {
    let mut bytes = vec![0; rows * stride * dtype.size()];
    weights.read_pool(address, &mut bytes).unwrap();
    let element = |bytes: &[u8]| match *bytes {
        [a, b] => f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16),
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        _ => unreachable!(),
    };
    bytes.chunks(stride * dtype.size()).map(|row| row.chunks(dtype.size()).map(element).collect()).collect()
}

fn padded_rows(values: &[f32], cols: usize) -> Vec<Vec<f32>> {
    let pad = |row: &[f32]| [row, &[0.0; 8][..cols.next_multiple_of(8) - cols]].concat();
    values.chunks(cols).map(pad).collect()
}

/// Compares all that a slot says and holds with the adapter.
fn assert_holds(weights: &LoraWeights, slot: usize, adapter: &Adapter) {
    let dtype = weights.layout().dtype();
    for pair in &adapter.pairs {
        let place = weights.pair_at(slot, pair.site).unwrap();
        let (cols_a, rows_b) = (pair.a.len() / pair.rank, pair.b.len() / pair.rank);
        let a = read(weights, place.a, pair.rank, cols_a.next_multiple_of(8), dtype);
        assert_eq!(a, padded_rows(&pair.a, cols_a), "A of {}", pair.site);
        assert_eq!(read(weights, place.b, rows_b, 8, dtype), padded_rows(&pair.b, pair.rank), "B of {}", pair.site);
    }
    let mut expected: Vec<&Extra> = adapter.extras.iter().collect();
    expected.sort_by_key(|extra| (extra.site, extra.part));
    let found = weights.slot_extras(slot);
    assert_eq!(found.len(), expected.len());
    let cells = weights.read_cells(slot).unwrap();
    for (expected, found) in expected.into_iter().zip(&found) {
        let place = &found.extra;
        assert_eq!((place.site, place.part, &*place.ids), (expected.site, expected.part, &*expected.ids));
        assert_eq!((place.rows, place.cols), (expected.rows, expected.cols));
        let rows = read(weights, found.address, place.rows, place.row_stride(), place.part.dtype(dtype));
        assert_eq!(rows, padded_rows(&expected.values, expected.cols), "{:?} of {}", place.part, place.site);
        assert!(found.address.is_multiple_of(256));
        match place.part {
            ExtraPart::Gain => assert_eq!(cells.pointers[4 * place.site + 2], found.address),
            ExtraPart::Bias => assert_eq!(cells.pointers[4 * place.site + 3], found.address),
            _ => {}
        }
    }
    weights.check_integrity().unwrap();
}

/// All bytes, cells and records of a pool.
fn snapshot(weights: &LoraWeights) -> impl PartialEq {
    let region = |region: Region| {
        let mut bytes = vec![0; region.len as usize];
        weights.read_pool(region.base, &mut bytes).unwrap();
        bytes
    };
    let slots = 0..weights.max_loras();
    (
        region(weights.pool()),
        weights.expert_pool().map(region),
        slots.clone().map(|slot| weights.read_cells(slot).unwrap()).collect::<Vec<_>>(),
        slots.map(|slot| weights.slot_extras(slot)).collect::<Vec<_>>(),
        weights.slot_infos(),
        weights.overlay_raw(),
    )
}

fn unchanged_by<T: std::fmt::Debug>(weights: &LoraWeights, refused: impl FnOnce() -> Result<T>) -> Error {
    let before = snapshot(weights);
    let error = refused().unwrap_err();
    assert!(before == snapshot(weights), "changed by a call that failed with {error}");
    weights.check_integrity().unwrap();
    error
}

#[test]
fn a_place_holds_floating_pairs_and_then_extras_by_site_and_part() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        // In f32 some blocks need twice the room.
        let (weights, _) = pool_of(PoolSpec { extras_bytes: 2 * NEEDED, ..spec(dtype) });
        for (slot, seed) in [(1, 3), (2, 90)] {
            let adapter = Adapter::full("full", seed);
            assert_eq!(adapter.swap(&weights, slot).unwrap().report.num_extras, 7);
            assert_holds(&weights, slot, &adapter);
        }
    }
    let (weights, _) = pool();
    Adapter::full("full", 3).swap(&weights, 1).unwrap();
    let place = weights.expert_pool().unwrap().base + NEEDED;
    let pair = |site| weights.pair_at(1, site).map(|pair| (pair.a - place, pair.b - place)).unwrap();
    // A of the embedding: 2 rows of 40 elements of 2 bytes. B: 12 rows of 8.
    assert_eq!((pair(1), pair(3)), ((0, 256), (512, 768)));
    let offsets: Vec<_> = weights.slot_extras(1).iter().map(|e| (e.address - place, e.extra.part.name())).collect();
    let expected = [
        (1024, "gain"),
        (1280, "bias"),
        (1536, "rows"),
        (1792, "rows"),
        (2048, "weight_bias"),
        // 6 rows of 24 elements of 2 bytes are 288 bytes.
        (2304, "weight"),
        (2816, "weight"),
    ];
    assert_eq!(offsets, expected);
    // The last: 6 rows of 16 elements of 2 bytes, 192 bytes.
    assert_eq!(NEEDED, 2816 + 256);
}

#[test]
fn the_bytes_of_a_place_are_told_before_anything_is_built() {
    let adapter = Adapter::full("full", 1);
    let pairs: Vec<_> = adapter.pairs.iter().map(|pair| (pair.site, pair.rank)).collect();
    let extras: Vec<_> = adapter.extras.iter().map(|e| (e.site, e.part, e.rows, e.cols)).collect();
    let needed = hotslot_core::extras::nbytes(&sites(), Dtype::Bf16, &pairs, &extras).unwrap();
    assert_eq!(needed, NEEDED);
    let exact = |extras_bytes| pool_of(PoolSpec { extras_bytes, ..spec(Dtype::Bf16) }).0;
    let weights = exact(needed);
    assert_holds(&weights, adapter.promote(&weights).unwrap().slot, &adapter);
    let weights = exact(needed - 256);
    let error = unchanged_by(&weights, || adapter.promote(&weights));
    assert_eq!(error, Error::ExtrasRoom { needed, room: needed - 256 });
    assert!(error.to_string().contains(&format!("attach with extras_bytes={needed}")), "{error}");
    let error = hotslot_core::extras::nbytes(&sites(), Dtype::Bf16, &[(5, 1)], &[]);
    assert!(matches!(error, Err(Error::Value { .. })));
}

#[test]
fn floating_sites_take_no_bytes_of_a_slot() {
    let (weights, _) = pool();
    let linear = vec![sites().remove(0)];
    assert_eq!(weights.layout().slot_bytes(), pool_slot_bytes(&linear, 4, Dtype::Bf16).unwrap());
    let offsets = module_slot_offsets(&sites(), 4, Dtype::Bf16).unwrap();
    assert_eq!(offsets.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, false, false, false]);
    assert_eq!(weights.expert_pool_bytes(), 3 * NEEDED);

    // Floating ones alone make a pool only with a place for them.
    let floating = |extras_bytes| PoolSpec { extras_bytes, ..PoolSpec::new(sites().split_off(1), 2, 4) };
    assert!(matches!(LoraWeights::on_host(floating(0)), Err(Error::Value { .. })));
    let weights = LoraWeights::on_host(floating(2000)).unwrap();
    assert_eq!((weights.pool_bytes(), weights.expert_pool_bytes()), (0, 2 * 2048));
    weights.check_integrity().unwrap();
}

#[test]
fn without_a_place_only_pairs_of_sites_with_blocks_fit() {
    let weights = LoraWeights::on_host(PoolSpec { extras_bytes: 0, ..spec(Dtype::Bf16) }).unwrap();
    assert_eq!((weights.expert_pool(), weights.expert_pool_bytes()), (None, 0));
    Adapter::pairs("plain", 1, &[0]).promote(&weights).unwrap();
    for adapter in [Adapter::pairs("floating", 1, &[1]), Adapter::full("full", 1)] {
        assert!(matches!(unchanged_by(&weights, || adapter.promote(&weights)), Error::ExtrasRoom { room: 0, .. }));
    }
}

#[test]
fn memory_and_extras_bytes_must_agree() {
    let memory = Arc::new(OwnedHostMemory::new(1 << 20).unwrap());
    let all = memory.region();
    let spec = spec(Dtype::Bf16);
    let bytes = spec.bytes().unwrap();
    let (pool, tables) = (all.part("pool", 0, bytes.pool).unwrap(), all.part("t", 1 << 16, bytes.tables).unwrap());
    let extras = |offset, len| Some(Region { base: all.base + (2 << 16) + offset, len });
    let build = |spec: &PoolSpec, extras| {
        LoraWeights::new(spec.clone(), pool, extras, tables, Arc::clone(&memory) as Arc<dyn DeviceMemory>)
    };
    assert!(build(&spec, extras(0, bytes.extras)).is_ok());
    assert!(matches!(build(&spec, None), Err(Error::Value { .. })));
    assert!(matches!(build(&spec, extras(8, bytes.extras)), Err(Error::Value { .. })));
    assert!(matches!(build(&spec, extras(0, bytes.extras - 1)), Err(Error::Region { .. })));
    let none = PoolSpec { extras_bytes: 0, ..spec };
    assert!(build(&none, None).is_ok());
    assert!(matches!(build(&none, extras(0, bytes.extras)), Err(Error::Value { .. })));
}

#[test]
fn an_extra_that_does_not_fit_its_site_is_refused_and_nothing_changes() {
    let (weights, _) = pool();
    Adapter::full("resident", 5).promote(&weights).unwrap();
    let attempt = |extras: Vec<Extra>| {
        let adapter = Adapter { extras, ..Adapter::pairs("new", 1, &[0]) };
        let refused = [
            unchanged_by(&weights, || adapter.promote(&weights)),
            unchanged_by(&weights, || adapter.swap(&weights, 2)),
            unchanged_by(&weights, || adapter.pack(&weights, 0)),
        ];
        assert!(refused.iter().all(|error| error.to_string() == refused[0].to_string()));
        refused[0].clone()
    };
    let shapes = [
        (0, ExtraPart::Gain, (1, 12), (1, 10), 0),
        (0, ExtraPart::Bias, (10, 1), (1, 10), 0),
        (2, ExtraPart::WeightBias, (1, 6), (1, 20), 0),
        (0, ExtraPart::Weight, (12, 10), (10, 12), 0),
        (2, ExtraPart::Weight, (20, 6), (6, 20), 0),
        (1, ExtraPart::Weight, (12, 40), (40, 12), 0),
        (1, ExtraPart::Rows, (1, 10), (1, 12), 1),
        (0, ExtraPart::Rows, (2, 12), (1, 12), 1),
    ];
    for (site, part, found, expected, num_ids) in shapes {
        let error = attempt(vec![extra(site, part, found.0, found.1, 1, &[5, 6][..num_ids])]);
        let site = sites()[site].path.clone();
        assert_eq!(error, Error::AdapterShape { site, half: part.name(), found, expected });
    }
    let gain = extra(0, ExtraPart::Gain, 1, 10, 1, &[]);
    let values = [
        vec![gain.clone(), gain.clone()],
        vec![extra(5, ExtraPart::Gain, 1, 10, 1, &[])],
        vec![extra(0, ExtraPart::Gain, 1, 10, 1, &[3])],
        vec![extra(0, ExtraPart::Rows, 2, 12, 1, &[3, 3])],
        vec![extra(0, ExtraPart::Rows, 1, 12, 1, &[10])],
        vec![extra(1, ExtraPart::Rows, 1, 12, 1, &[40])],
        vec![extra(1, ExtraPart::Rows, 0, 12, 1, &[])],
    ];
    for extras in values {
        let error = attempt(extras);
        assert!(matches!(error, Error::Value { .. }), "{error}");
    }
    let mut short = gain.clone();
    short.bytes.pop();
    assert!(matches!(attempt(vec![short]), Error::AdapterFile { path, .. } if path.ends_with("q_proj.gain")));
    for (value, in_stored) in [(f32::NAN, false), (f32::INFINITY, true)] {
        let mut bad = gain.clone();
        let mut values = bad.values.clone();
        values[7] = value;
        if in_stored {
            bad.stored = Some(f32s(&values));
        } else {
            bad.bytes = f32s(&values);
        }
        assert!(matches!(attempt(vec![bad]), Error::AdapterValue { half: "gain", index: 7, .. }));
    }
    let none = Adapter::pairs("new", 1, &[]);
    assert!(matches!(unchanged_by(&weights, || none.promote(&weights)), Error::Value { .. }));
    // Extras alone are an adapter.
    Adapter { extras: vec![gain], ..Adapter::pairs("gain-alone", 1, &[]) }.promote(&weights).unwrap();
}

#[test]
fn what_was_derived_goes_into_the_place_and_is_checked_even_if_the_content_is_known() {
    let (weights, _) = pool();
    let mut adapter = Adapter::full("full", 1);
    let id = adapter.promote(&weights).unwrap().cache_id.unwrap();
    let derived: Vec<f32> = values(77, 10);
    adapter.extras[3].stored = Some(f32s(&derived));
    adapter.extras[3].values.clone_from(&derived);
    let known = Digest::Known(id);
    let loaded = adapter.with_input(known, |input| weights.pack_store_into_slot(2, input)).unwrap();
    assert_eq!(loaded.cache_id, Some(id));
    assert_holds(&weights, 2, &adapter);
    adapter.extras[3].stored = Some(f32s(&[f32::NAN; 10]));
    let error = unchanged_by(&weights, || adapter.with_input(known, |input| weights.pack_store_into_slot(1, input)));
    assert!(matches!(error, Error::AdapterValue { half: "gain", index: 0, .. }), "{error}");
}

#[test]
fn the_next_adapter_finds_nothing_of_the_last_one() {
    let (weights, _) = pool();
    for round in 0..3 {
        let full = Adapter::full("full", 10 * round);
        full.swap(&weights, 1).unwrap();
        assert_holds(&weights, 1, &full);
        let plain = Adapter::pairs("plain", round, &[0]);
        plain.swap(&weights, 1).unwrap();
        assert_holds(&weights, 1, &plain);
        assert!(weights.slot_extras(1).is_empty());
        let cells = weights.read_cells(1).unwrap();
        assert_eq!(cells.pointers.iter().filter(|&&pointer| pointer != 0).count(), 2);
    }
    weights.unload("plain", false).unwrap();
    assert!(weights.read_cells(1).unwrap().is_empty());
    for slot in [0, 1, 3, usize::MAX] {
        assert!(weights.slot_extras(slot).is_empty());
    }
}

#[test]
fn a_holder_keeps_its_extras_through_a_hot_replace() {
    let (weights, _) = pool();
    let old = Adapter::full("name", 1);
    old.promote(&weights).unwrap();
    let held = weights.acquire_by_name("name");
    let new = Adapter::full("name", 30);
    let slot = new.promote(&weights).unwrap().slot;
    assert_holds(&weights, held.slot().unwrap(), &old);
    assert_holds(&weights, slot, &new);
    weights.release_slot(held);
    assert!(weights.slot_extras(1).is_empty());
}

#[test]
fn a_broken_gain_cell_is_seen_and_mended() {
    let (weights, memory) = pool();
    let adapter = Adapter::full("full", 1);
    adapter.swap(&weights, 1).unwrap();
    for table in [weights.tables().gain_table(0), weights.tables().bias_table(0), weights.tables().gain_table(2)] {
        memory.copy_h2d(table + 8, &0x1234_u64.to_ne_bytes(), S).unwrap();
        match weights.check_integrity() {
            Err(Error::Integrity { problems }) => assert!(problems[0].starts_with("slot 1: cells"), "{problems:?}"),
            other => panic!("{other:?}"),
        }
        weights.rewrite_slot_tables(1).unwrap();
        assert_holds(&weights, 1, &adapter);
    }
}

#[test]
fn raw_token_rows_of_startup_adapters_are_kept_until_the_overlay_is_built() {
    let (weights, _) = pool();
    assert_eq!(weights.overlay_raw(), [None]);
    let startup = Adapter::full("startup", 1);
    startup.pack(&weights, 0).unwrap();
    let raw = weights.overlay_raw()[0].clone().unwrap();
    assert_eq!(raw.rows.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [9, 0, 4, 39, 7]);
    let (head, embedding) = (&startup.extras[6].values, &startup.extras[0].values);
    assert_eq!((&raw.rows[1].1[..], &raw.rows[4].1[..]), (&head[12..24], &embedding[12..]));
    // They go with their adapter, and a swap or a promotion keeps none.
    Adapter::full("swapped", 2).swap(&weights, 0).unwrap();
    assert_eq!(weights.overlay_raw(), [None]);
    startup.pack(&weights, 0).unwrap();
    let held = weights.acquire_by_name("startup");
    weights.unload("startup", true).unwrap();
    assert_eq!(weights.overlay_raw(), [None]);
    weights.release_slot(held);
    Adapter::pairs("no-rows", 2, &[0]).pack(&weights, 0).unwrap();
    assert_eq!(weights.overlay_raw(), [None]);
    startup.pack(&weights, 0).unwrap();
    assert!(weights.overlay_raw()[0].is_some());
    weights.set_lora_weights();
    assert_eq!(weights.overlay_raw(), [None]);
    startup.pack(&weights, 0).unwrap();
    assert_eq!(weights.overlay_raw(), [None]);
    weights.set_lora_weights();
    assert_holds(&weights, 0, &startup);
}

#[test]
fn layers_show_the_pairs_of_routers_and_experts() {
    let (weights, _) = pool();
    Adapter::pairs("moe", 1, &[0, 3, 4]).swap(&weights, 1).unwrap();
    let layer = &weights.slots()[1].layers[0];
    assert_eq!(layer.module_pair(LoraModule::QProj), weights.pair_at(1, 0));
    assert_eq!(layer.router, weights.pair_at(1, 3));
    let experts = layer.experts.as_ref().unwrap();
    assert_eq!(experts.pairs.get(&(3, LoraModule::UpProj)).copied(), weights.pair_at(1, 4));
    Adapter::pairs("dense", 1, &[0]).swap(&weights, 1).unwrap();
    let layer = &weights.slots()[1].layers[0];
    assert_eq!((layer.router, &layer.experts), (None, &None));
}

#[cfg(feature = "fault-injection")]
#[test]
fn a_fault_at_any_call_of_a_load_leaves_the_slot_whole_or_empty() {
    use hotslot_core::memory::FaultyMemory;

    let build = || {
        let mut device = None;
        let weights = LoraWeights::on_host_through(spec(Dtype::Bf16), |memory| {
            let memory = Arc::new(FaultyMemory::new(memory));
            device = Some(Arc::clone(&memory));
            memory
        });
        (weights.unwrap(), device.unwrap())
    };
    let (old, new) = (Adapter::full("old", 1), Adapter::full("new", 40));
    let (weights, device) = build();
    old.swap(&weights, 1).unwrap();
    device.heal();
    new.swap(&weights, 1).unwrap();
    let calls = device.calls();
    assert!(calls > 9, "{calls} calls");
    for n in 0..calls {
        let (weights, device) = build();
        old.swap(&weights, 1).unwrap();
        device.fail_at(n, false);
        assert!(matches!(new.swap(&weights, 1), Err(Error::Device { sticky: false, .. })), "call {n} of {calls}");
        device.heal();
        weights.check_integrity().unwrap();
        assert_eq!(weights.slot_infos()[1].state, SlotState::Empty);
        assert!(weights.read_cells(1).unwrap().is_empty() && weights.slot_extras(1).is_empty());
        new.swap(&weights, 1).unwrap();
        assert_holds(&weights, 1, &new);
    }
}
