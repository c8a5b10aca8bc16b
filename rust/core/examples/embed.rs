//! A Rust program with a pool of adapters and no Python: build, load, acquire, compute, swap, promote, replace.
//!
//! `cargo run --release --example embed`
#![allow(unsafe_code)]

use hotslot_core::kernels::{ActDtype, Exec, Input, Output, Plan, RowEntry, apply};
use hotslot_core::prelude::*;

const RANK: usize = 4;

/// An adapter whose A and B hold one value each, so that the result can be checked by head.
struct Uniform {
    name: &'static str,
    config: PeftAdapterConfig,
    /// Bytes of A and B by site.
    tensors: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Uniform {
    fn new(name: &'static str, sites: &[Site], value: f32) -> Result<Self> {
        let bytes = |len: usize| value.to_le_bytes().repeat(len);
        let tensors =
            sites.iter().map(|site| (bytes(RANK * site.in_features), bytes(site.out_features * RANK))).collect();
        Ok(Self { name, config: PeftAdapterConfig::new(RANK, 8.0, false)?, tensors })
    }

    /// Calls `load` with what a pool takes: one pair a site, here from memory. From a file it is [`Source::in_file`].
    fn with_input<T>(&self, sites: &[Site], load: impl FnOnce(&LoraAdapterInput<'_>) -> Result<T>) -> Result<T> {
        let pairs = self.tensors.iter().enumerate().map(|(site, (a, b))| PairInput {
            site,
            rank: RANK,
            scale: self.config.scaling(),
            a: Source::in_memory(a, SourceDtype::F32, RANK, sites[site].in_features),
            b: Source::in_memory(b, SourceDtype::F32, sites[site].out_features, RANK),
        });
        let tensors: Vec<_> = pairs.collect();
        load(&LoraAdapterInput {
            name: self.name,
            tensors: &tensors,
            extras: &[],
            config: &self.config,
            digest: Digest::Compute,
        })
    }
}

/// The delta of a batch at one site, row by row, for x = 1.
fn deltas(weights: &LoraWeights, site: usize, rows: &[SlotId]) -> Result<Vec<f32>> {
    let mut plan = Plan::new(weights.max_loras());
    plan.set_rows(&rows.iter().map(|id| [RowEntry::new(id.get())]).collect::<Vec<_>>())?;
    let view = weights.site_view(site);
    let x = vec![1.0_f32; rows.len() * view.in_features];
    let mut out = vec![0.0_f32; rows.len() * view.out_features];
    let input =
        Input { ptr: x.as_ptr().cast(), num_tokens: rows.len(), row_stride: view.in_features, dtype: ActDtype::F32 };
    let output = Output { ptr: out.as_mut_ptr().cast(), row_stride: view.out_features, dtype: ActDtype::F32 };
    // SAFETY: `x` and `out` have the shapes that `input` and `output` say; the pool's memory lives as long as `weights`, and
    // every slot of `rows` is held by the caller.
    unsafe { apply(&view, &plan, input, output, Exec::new(1)) }?;
    Ok(out.chunks(view.out_features).map(|row| row[0]).collect())
}

fn show(weights: &LoraWeights, title: &str) {
    println!("\n{title}\nslot  name    state    refs  rank  bytes    pinned");
    for slot in weights.slot_infos() {
        let mark = if slot.slot == weights.active() { '*' } else { ' ' };
        let SlotInfo { slot, name, state, ref_count, rank, nbytes, pinned, .. } = slot;
        println!("{slot:>3}{mark}  {name:<6}  {:<7}  {ref_count:>4}  {rank:>4}  {nbytes:>7}  {pinned}", state.name());
    }
}

fn main() -> Result<()> {
    let model = ModelConfig {
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 256,
        ..ModelConfig::default()
    };
    model.validate()?;
    let sites = model.sites();
    let adapter = |name, value| Uniform::new(name, &sites, value);

    let spec = PoolSpec { pinned: 1, ..PoolSpec::new(sites.clone(), 3, 8) };
    let PoolBytes { pool, tables, .. } = spec.bytes()?;
    println!("{} sites, 3 slots of rank 8: {pool} bytes of pool, {tables} of tables", sites.len());
    let weights = LoraWeights::on_host(spec)?;

    adapter("sql", 0.5)?.with_input(&sites, |input| weights.pack_slot(0, input))?;
    for (name, value) in [("poet", 0.25), ("legal", 0.125)] {
        adapter(name, value)?.with_input(&sites, |input| weights.promote(input, weights.stage(input)?, false))?;
    }
    show(&weights, "one startup adapter, two promoted");

    // A batch holds one reference per adapter, from before its first layer to after its last.
    let held = [weights.acquire_slot(Selector::Active), weights.acquire_by_name("poet")];
    let rows =
        weights.build_seq_slot_host(&[Selector::Active, Selector::Base, weights.resolve_adapter_slot("poet")?])?;
    let found = deltas(&weights, 0, &rows)?;
    // scale * in * rank * value^2, and nothing for base
    assert_eq!(found, [2.0 * 64.0 * 4.0 * 0.25, 0.0, 2.0 * 64.0 * 4.0 * 0.0625]);
    println!("\ndeltas of [active, base, poet] at {}: {found:?}", sites[0].path);

    // What is held is not taken away: a swap is refused, a promotion evicts the idle slot, a replace moves the name.
    let refused = adapter("late", 1.0)?.with_input(&sites, |input| weights.pack_store_into_slot(1, input));
    println!("\nswap into slot 1: {}", refused.unwrap_err());
    let late = adapter("late", 1.0)?;
    let loaded = late.with_input(&sites, |input| weights.promote(input, weights.stage(input)?, false))?;
    println!("promotion of \"late\": slot {}, evicted {:?}", loaded.slot, loaded.evicted);
    let poet = adapter("poet", 2.0)?;
    let loaded = poet.with_input(&sites, |input| weights.replace(input, weights.stage(input)?, false))?;
    assert_eq!(deltas(&weights, 0, &rows)?, found, "the batch keeps the weights it began with");
    println!("hot replace of \"poet\": slot {}, generation {}", loaded.slot, loaded.generation);
    show(&weights, "while the batch runs");

    for held in held {
        weights.release_slot(held);
    }
    weights.set_active("poet")?;
    weights.unload("sql", false)?;
    weights.check_integrity()?;
    show(&weights, "after it, rotated to \"poet\", \"sql\" unloaded");
    Ok(())
}
