//! The layout of a slot: blocks that do not overlap, aligned, and large enough for every rank.

use hotslot_core::config::ModelConfig;
use hotslot_core::layout::{BLOCK_ALIGN, Dtype, Layout, Site, SiteKind, module_slot_offsets, padded, pool_slot_bytes};
use proptest::prelude::*;

fn sites(dims: &[(usize, usize)]) -> Vec<Site> {
    dims.iter()
        .enumerate()
        .map(|(i, &(in_features, out_features))| Site::linear(format!("layers.{i}.proj"), in_features, out_features))
        .collect()
}

#[test]
fn smollm2_has_the_bytes_worked_out_by_hand() {
    let config = ModelConfig {
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        vocab_size: 49152,
        ..ModelConfig::default()
    };
    let columns = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536);
    assert_eq!(pool_slot_bytes(&config.sites(), 16, Dtype::Bf16), Ok(30 * columns * 16 * 2));
    assert_eq!(pool_slot_bytes(&config.sites(), 16, Dtype::F32), Ok(30 * columns * 16 * 4));
}

#[test]
fn small_blocks_are_rounded_up_to_the_alignment() {
    let offsets = module_slot_offsets(&sites(&[(5, 3), (16, 16)]), 3, Dtype::Bf16).unwrap();
    // A: 3 rows of 8 elements; B: 3 rows of 8 elements; both within one unit of 256 bytes.
    assert_eq!(offsets.into_iter().flatten().map(|o| (o.a, o.b)).collect::<Vec<_>>(), [(0, 256), (512, 768)]);
}

#[test]
fn what_cannot_be_laid_out_is_refused() {
    let good = sites(&[(8, 8)]);
    assert!(Layout::new(Vec::new(), 8, Dtype::Bf16).is_err());
    assert!(Layout::new(good.clone(), 0, Dtype::Bf16).is_err());
    assert!(Layout::new(good.clone(), usize::MAX, Dtype::Bf16).is_err());
    assert!(Layout::new(sites(&[(0, 8)]), 8, Dtype::Bf16).is_err());
    assert!(Layout::new(sites(&[(8, 0)]), 8, Dtype::Bf16).is_err());
    assert!(Layout::new(sites(&[(usize::MAX, 8)]), 8, Dtype::Bf16).is_err());
    assert!(Layout::new([good.clone(), good.clone()].concat(), 8, Dtype::Bf16).is_err());
    let layout = Layout::new(good, 8, Dtype::Bf16).unwrap();
    assert!(layout.pool_bytes(0).is_err());
    assert!(layout.pool_bytes(usize::MAX).is_err());
    assert_eq!(layout.pool_bytes(3), Ok(3 * 512));
}

#[test]
fn sites_are_found_by_their_path() {
    let site = Site::new("transformer.h.2.mlp.c_proj", SiteKind::Conv1d, 8, 8);
    assert_eq!((site.layer, site.module), (Some(2), None));
    let layout = Layout::new(vec![Site::linear("lm_head", 8, 8), site], 8, Dtype::Bf16).unwrap();
    assert_eq!(layout.site_index("transformer.h.2.mlp.c_proj"), Some(1));
    assert_eq!(layout.site_index("c_proj"), None);
}

proptest! {
    #[test]
    fn blocks_are_aligned_disjoint_and_hold_every_rank(
        dims in prop::collection::vec((1_usize..70, 1_usize..70), 1..12),
        max_rank in 1_usize..40,
        is_f32: bool,
    ) {
        let dtype = if is_f32 { Dtype::F32 } else { Dtype::Bf16 };
        let layout = Layout::new(sites(&dims), max_rank, dtype).unwrap();
        let mut end = 0;
        for (site, offsets) in layout.sites().iter().zip(layout.all_offsets()) {
            let offsets = offsets.unwrap();
            for (begin, rows, stride) in [
                (offsets.a, max_rank, padded(site.in_features)),
                (offsets.b, site.out_features, padded(max_rank)),
            ] {
                prop_assert!(begin.is_multiple_of(BLOCK_ALIGN));
                prop_assert!(begin >= end);
                end = begin + (rows * stride * dtype.size()) as u64;
            }
        }
        prop_assert!(layout.slot_bytes() >= end && layout.slot_bytes() < end + BLOCK_ALIGN);
        prop_assert!(layout.slot_bytes().is_multiple_of(BLOCK_ALIGN));
    }
}
