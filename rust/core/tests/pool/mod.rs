//! A small pool and adapters for it, shared by the tests of the life cycle.
#![allow(dead_code)]

use hotslot_core::pack::Staging;
use hotslot_core::prelude::*;

pub const MAX_RANK: usize = 4;

/// Two layers of a tiny Llama: 14 sites.
pub fn model() -> ModelConfig {
    ModelConfig {
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 12,
        vocab_size: 32,
        ..ModelConfig::default()
    }
}

pub fn spec(max_loras: usize, pinned: usize) -> PoolSpec {
    PoolSpec { pinned, dtype: Dtype::F32, ..PoolSpec::new(model().sites(), max_loras, MAX_RANK) }
}

pub fn pool(max_loras: usize, pinned: usize) -> LoraWeights {
    LoraWeights::on_host(spec(max_loras, pinned)).unwrap()
}

/// An adapter in memory, all of whose elements are `value`.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub name: String,
    pub value: f32,
    pub rank: usize,
    pub sites: Vec<usize>,
    pub config: PeftAdapterConfig,
    tensors: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Adapter {
    pub fn new(name: &str, value: f32) -> Self {
        Self::of_sites(name, value, 2, (0..model().sites().len()).collect())
    }

    pub fn of_sites(name: &str, value: f32, rank: usize, sites: Vec<usize>) -> Self {
        let all = model().sites();
        let tensors = sites
            .iter()
            .map(|&site| {
                let bytes = |len: usize| value.to_le_bytes().repeat(len);
                (bytes(rank * all[site].in_features), bytes(all[site].out_features * rank))
            })
            .collect();
        let config =
            PeftAdapterConfig::new(rank, if value.is_finite() { f64::from(value) } else { 1.0 }, false).unwrap();
        Self { name: name.to_owned(), value, rank, sites, config, tensors }
    }

    pub fn pairs(&self) -> Vec<PairInput<'_>> {
        let all = model().sites();
        self.sites
            .iter()
            .zip(&self.tensors)
            .map(|(&site, (a, b))| PairInput {
                site,
                rank: self.rank,
                scale: self.config.scaling(),
                a: Source::in_memory(a, SourceDtype::F32, self.rank, all[site].in_features),
                b: Source::in_memory(b, SourceDtype::F32, all[site].out_features, self.rank),
            })
            .collect()
    }

    pub fn staged(&self, weights: &LoraWeights) -> Staged<'_> {
        Staged::read(weights.layout(), &self.config, &self.pairs(), &[], Digest::Compute, Staging::default()).unwrap()
    }

    pub fn with_input<T>(&self, run: impl FnOnce(&LoraAdapterInput<'_>) -> T) -> T {
        let tensors = self.pairs();
        run(&LoraAdapterInput {
            name: &self.name,
            tensors: &tensors,
            extras: &[],
            config: &self.config,
            digest: Digest::Compute,
        })
    }

    pub fn pack(&self, weights: &LoraWeights, slot: usize) -> Result<Loaded> {
        self.with_input(|input| weights.pack_slot(slot, input))
    }

    pub fn swap(&self, weights: &LoraWeights, slot: usize) -> Result<Loaded> {
        self.with_input(|input| weights.pack_store_into_slot(slot, input))
    }

    pub fn promote(&self, weights: &LoraWeights, activate: bool) -> Result<Loaded> {
        self.with_input(|input| weights.promote(input, self.staged(weights), activate))
    }

    pub fn replace(&self, weights: &LoraWeights) -> Result<Loaded> {
        self.with_input(|input| weights.replace(input, self.staged(weights), false))
    }
}

/// What the slot of this index says when read as a kernel would: the element of every A and B that its cells lead to.
///
/// Panics if the elements differ, or if any padding that a kernel may read is not zero.
pub fn value_in_slot(weights: &LoraWeights, slot: usize) -> Option<f32> {
    let memory = PoolReader(weights);
    let cells = weights.read_cells(slot).unwrap();
    let mut values = Vec::new();
    for (site, shape) in weights.layout().sites().iter().enumerate() {
        let rank = cells.ranks[site] as usize;
        if rank > 0 {
            values.extend(memory.rows(cells.pointers[4 * site], rank, shape.in_features));
            values.extend(memory.rows(cells.pointers[4 * site + 1], shape.out_features, rank));
        }
    }
    let first = values.first().copied()?;
    assert!(values.iter().all(|value| value.to_bits() == first.to_bits()), "slot {slot} mixes contents");
    Some(first)
}

struct PoolReader<'a>(&'a LoraWeights);

impl PoolReader<'_> {
    fn rows(&self, address: u64, rows: usize, cols: usize) -> Vec<f32> {
        let stride = cols.next_multiple_of(8);
        let mut bytes = vec![0; rows * stride * 4];
        self.0.read_pool(address, &mut bytes).unwrap();
        let floats: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        floats
            .chunks_exact(stride)
            .flat_map(|row| {
                assert!(row[cols..].iter().all(|pad| pad.to_bits() == 0), "padding is not zero");
                row[..cols].to_vec()
            })
            .collect()
    }
}

/// Fills a slot's memory with NaN, so that any trace of it is seen.
pub fn poison(weights: &LoraWeights, slot: usize) {
    let claim = weights.begin(Room::Slot(slot)).unwrap();
    let len = weights.layout().slot_bytes() as usize;
    claim.write_raw(0, &f32::NAN.to_le_bytes().repeat(len / 4)).unwrap();
    drop(claim);
}

/// All that a caller can see of a pool, to compare before and after.
pub fn snapshot(weights: &LoraWeights) -> impl PartialEq + std::fmt::Debug + use<> {
    let mut bytes = vec![0; weights.pool_bytes() as usize];
    weights.read_pool(weights.pool().base, &mut bytes).unwrap();
    let cells: Vec<_> = (0..weights.max_loras()).map(|slot| weights.read_cells(slot).unwrap()).collect();
    (
        weights.slot_infos(),
        weights.slots(),
        weights.active(),
        weights.adapter_config(),
        weights.adapter_names(),
        cells,
        bytes,
    )
}

pub fn slot(index: usize) -> Selector {
    Selector::Slot(index)
}

/// A pool whose first slots hold the startup adapters "s0", "s1", ...
pub fn started(max_loras: usize, pinned: usize) -> LoraWeights {
    let weights = pool(max_loras, pinned);
    for k in 0..pinned {
        Adapter::new(&format!("s{k}"), 1.0 + k as f32).pack(&weights, k).unwrap();
    }
    weights.check_integrity().unwrap();
    weights
}

pub fn unchanged_by<T: std::fmt::Debug>(weights: &LoraWeights, refused: impl FnOnce() -> Result<T>) -> Error {
    let before = snapshot(weights);
    let error = refused().unwrap_err();
    assert!(before == snapshot(weights), "changed by a call that failed with {error}");
    weights.check_integrity().unwrap();
    error
}

/// Of the pool of the fault tests ("s0", "a" and "new" with the values 1, 2 and 9): each slot holds an adapter whole, or is an empty
/// placeholder, with zero cells unless a replace that succeeded left it.
pub fn assert_whole(weights: &LoraWeights, has_replaced: bool) {
    weights.check_integrity().unwrap();
    for info in weights.slot_infos() {
        match info.state {
            SlotState::Ready => {
                let expected = match info.name.as_str() {
                    "s0" => [1.0, 9.0],
                    "a" => [2.0, 9.0],
                    "new" => [9.0, 9.0],
                    other => panic!("unknown adapter {other:?}"),
                };
                let found = value_in_slot(weights, info.slot).unwrap();
                assert!(expected.contains(&found), "{info:?} holds {found}");
            }
            SlotState::Empty => {
                assert!(has_replaced || weights.read_cells(info.slot).unwrap().is_empty(), "{info:?}");
                assert_eq!((info.name.as_str(), info.nbytes, info.rank, info.ref_count), ("", 0, 0, 0));
                assert_eq!(weights.adapter_id_for_slot(Selector::Slot(info.slot)), 0);
                assert_eq!(weights.acquire_slot(Selector::Slot(info.slot)).to_raw(), -1);
            }
            SlotState::Loading | SlotState::Retired => panic!("left behind: {info:?}"),
        }
    }
}
