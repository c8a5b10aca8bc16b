//! Identities: golden values that no release may change, and what content ids depend on.

use hotslot_core::config::PeftAdapterConfig;
use hotslot_core::identity::{CacheId, Digest, adapter_id_hash, check_adapter_name};
use hotslot_core::layout::{Dtype, Layout, Site};
use hotslot_core::pack::{PairInput, Staged, Staging};
use hotslot_core::source::{Source, SourceDtype};

#[test]
fn generation_zero_is_the_plain_hash_of_the_name() {
    for name in ["sql", "a", "org/model-v1.2"] {
        let digest = blake3::hash(name.as_bytes());
        let first: [u8; 8] = digest.as_bytes()[..8].try_into().unwrap();
        assert_eq!(adapter_id_hash(name, 0), u64::from_le_bytes(first));
    }
}

#[test]
fn ids_are_the_golden_ones() {
    assert_eq!(adapter_id_hash("", 0), 0);
    assert_eq!(adapter_id_hash("", 7), 0);
    for (name, generation, id) in GOLDEN {
        assert_eq!(adapter_id_hash(name, generation), id, "{name} {generation}");
    }
}

#[test]
fn names_are_checked_to_the_letter() {
    let longest = "x".repeat(128);
    for good in ["sql", "0", "a/b.c-d_e", "A", &longest] {
        assert!(check_adapter_name(good).is_ok(), "{good}");
    }
    let too_long = "x".repeat(129);
    for bad in ["", "-a", ".a", "/a", "_a", "a b", "a:b", "hs1:base", "naïve", "a\n", &too_long] {
        assert!(check_adapter_name(bad).is_err(), "{bad}");
    }
}

#[test]
fn cache_ids_are_read_back_and_nothing_else_is() {
    let id = id_of(&Content::default());
    assert_eq!(id.to_string().len(), 4 + 64);
    assert_eq!(id.to_string().parse(), Ok(id));
    assert_ne!(id, CacheId::BASE);
    let upper = id.to_string().to_uppercase();
    for bad in ["", "hs1:", "base", "hs1:BASE", "hs2:base", &upper, &id.to_string()[..67]] {
        assert!(bad.parse::<CacheId>().is_err(), "{bad}");
    }
}

/// Two sites' worth of adapter, with everything that an id may depend on.
#[derive(Clone)]
struct Content {
    a: [Vec<u8>; 2],
    b: [Vec<u8>; 2],
    dtype: SourceDtype,
    scales: [f64; 2],
    paths: [&'static str; 2],
    alpha: f64,
    pool_dtype: Dtype,
    is_reversed: bool,
}

impl Default for Content {
    fn default() -> Self {
        Self {
            a: [vec![1; 16], vec![2; 16]],
            b: [vec![3; 8], vec![4; 8]],
            dtype: SourceDtype::Bf16,
            scales: [1.0, 2.0],
            paths: ["layers.0.q", "layers.1.q"],
            alpha: 2.0,
            pool_dtype: Dtype::Bf16,
            is_reversed: false,
        }
    }
}

fn id_of(content: &Content) -> CacheId {
    let sites = content.paths.iter().map(|&path| Site::linear(path, 8, 4)).collect();
    let layout = Layout::new(sites, 8, content.pool_dtype).unwrap();
    let mut pairs: Vec<_> = (0..2)
        .map(|site| PairInput {
            site,
            rank: 1,
            scale: content.scales[site],
            a: Source::in_memory(&content.a[site], content.dtype, 1, 8),
            b: Source::in_memory(&content.b[site], content.dtype, 4, 1),
        })
        .collect();
    if content.is_reversed {
        pairs.reverse();
    }
    let config = PeftAdapterConfig::new(1, content.alpha, false).unwrap();
    Staged::read(&layout, &config, &pairs, &[], Digest::Compute, Staging::default()).unwrap().cache_id().unwrap()
}

#[test]
fn equal_content_has_one_id_whatever_the_order_of_sites_and_pairs() {
    let content = Content::default();
    let id = id_of(&content);
    assert_eq!(id, id_of(&Content { is_reversed: true, ..content.clone() }));
    let [first, second] = content.a.clone();
    let [b_first, b_second] = content.b.clone();
    let other_order_of_sites = Content {
        a: [second, first],
        b: [b_second, b_first],
        scales: [2.0, 1.0],
        paths: ["layers.1.q", "layers.0.q"],
        ..content
    };
    assert_eq!(id, id_of(&other_order_of_sites));
}

#[test]
fn any_changed_byte_scale_config_or_path_gives_another_id() {
    let content = Content::default();
    let mut ids = vec![id_of(&content)];
    for tensor in 0..4 {
        for byte in [0, 7] {
            let mut changed = content.clone();
            let half = if tensor < 2 { &mut changed.a } else { &mut changed.b };
            half[tensor % 2][byte] ^= 1;
            ids.push(id_of(&changed));
        }
    }
    ids.push(id_of(&Content { scales: [1.0, 2.5], ..content.clone() }));
    ids.push(id_of(&Content { alpha: 3.0, ..content.clone() }));
    ids.push(id_of(&Content { dtype: SourceDtype::F16, ..content.clone() }));
    ids.push(id_of(&Content { pool_dtype: Dtype::F32, ..content.clone() }));
    ids.push(id_of(&Content { paths: ["layers.0.q", "layers.1.k"], ..content.clone() }));
    let num_ids = ids.len();
    ids.sort_by_key(ToString::to_string);
    ids.dedup();
    assert_eq!(ids.len(), num_ids);
}

/// Computed with the reference implementation of blake3, not with this crate.
const GOLDEN: [(&str, u64, u64); 5] = [
    ("sql", 0, 0x0b55_16af_a5b6_1a53),
    ("sql", 1, 0xb690_8fbf_75a6_8c84),
    ("sql", u64::MAX, 0x3839_56df_0627_2b8a),
    ("poet", 0, 0x99aa_9c97_52c7_2930),
    ("org/model-v1.2", 3, 0xbc78_3480_12ee_ba11),
];
