//! Identities: golden values that no release may change, and what content ids depend on.

use hotslot_core::config::PeftAdapterConfig;
use hotslot_core::extras::{ExtraInput, ExtraPart};
use hotslot_core::identity::{CacheId, Digest, adapter_id_hash, check_adapter_name, row_cache_id};
use hotslot_core::layout::{Dtype, Layout, Site};
use hotslot_core::pack::{PairInput, Staged, Staging, content_id};
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
    invocation_tokens: Vec<u32>,
    extras: Vec<ExtraContent>,
}

#[derive(Clone)]
struct ExtraContent {
    site: usize,
    part: ExtraPart,
    bytes: Vec<u8>,
    dtype: SourceDtype,
    shape: (usize, usize),
    ids: Vec<u32>,
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
            invocation_tokens: Vec::new(),
            extras: Vec::new(),
        }
    }
}

impl ExtraContent {
    fn input(&self) -> ExtraInput<'_> {
        let source = Source::in_memory(&self.bytes, self.dtype, self.shape.0, self.shape.1);
        ExtraInput { site: self.site, part: self.part, source, stored: None, ids: &self.ids }
    }
}

/// A gain, and two token rows.
fn with_extras() -> Content {
    let gain = ExtraContent {
        site: 0,
        part: ExtraPart::Gain,
        bytes: vec![5; 16],
        dtype: SourceDtype::F32,
        shape: (1, 4),
        ids: Vec::new(),
    };
    let rows = ExtraContent {
        site: 1,
        part: ExtraPart::Rows,
        bytes: vec![6; 32],
        dtype: SourceDtype::Bf16,
        shape: (2, 8),
        ids: vec![3, 0],
    };
    Content { extras: vec![gain, rows], ..Content::default() }
}

fn id_of(content: &Content) -> CacheId {
    let sites = content.paths.iter().map(|&path| Site::linear(path, 8, 4)).collect();
    let layout = Layout::new(sites, 8, content.pool_dtype).unwrap().with_extras(4096).unwrap();
    let mut pairs: Vec<_> = (0..2)
        .map(|site| PairInput {
            site,
            rank: 1,
            scale: content.scales[site],
            a: Source::in_memory(&content.a[site], content.dtype, 1, 8),
            b: Source::in_memory(&content.b[site], content.dtype, 4, 1),
        })
        .collect();
    let mut extras: Vec<_> = content.extras.iter().map(ExtraContent::input).collect();
    if content.is_reversed {
        pairs.reverse();
        extras.reverse();
    }
    let mut config = PeftAdapterConfig::new(1, content.alpha, false).unwrap();
    config.alora_invocation_tokens.clone_from(&content.invocation_tokens);
    assert_eq!(
        content_id(&layout, &config, &pairs, &extras).unwrap(),
        Staged::read(&layout, &config, &pairs, &extras, Digest::Compute, Staging::default())
            .unwrap()
            .cache_id()
            .unwrap()
    );
    Staged::read(&layout, &config, &pairs, &extras, Digest::Compute, Staging::default()).unwrap().cache_id().unwrap()
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

#[test]
fn ids_of_content_are_the_golden_ones() {
    let expect = |content: &Content, hex: &str| assert_eq!(id_of(content).to_string(), format!("hs1:{hex}"));
    expect(&Content::default(), "f01b82d1835bf11ce3cbbb936f607141f09687f2e212093309dd9408fe467070");
    let alora = Content { invocation_tokens: vec![7, 300], ..Content::default() };
    expect(&alora, "d5b3d0f4bf7c57f175a6c1e4c15746159a30af6dc747ae7009f3f224b25d6ced");
    expect(&with_extras(), "461a6efdeab61df504b496fc729fe619064d6639939ea72dfef68a693f999757");
    let member: CacheId = format!("hs1:{}", "5".repeat(64)).parse().unwrap();
    let row = row_cache_id(&[(member, 0.5), (CacheId::BASE, 1.0)], Some(7));
    assert_eq!(row.to_string(), "hs1:4784595f15c74992a26ab811f4df69bf3834d12e9c87f79593a6f07ff72d4fef");
}

#[test]
fn any_changed_field_of_an_extra_gives_another_id() {
    let content = with_extras();
    let changed = |change: fn(&mut Vec<ExtraContent>)| {
        let mut content = content.clone();
        change(&mut content.extras);
        id_of(&content)
    };
    let mut ids = vec![
        id_of(&content),
        id_of(&Content { extras: Vec::new(), ..content.clone() }),
        id_of(&Content { invocation_tokens: vec![0], ..content.clone() }),
        id_of(&Content { invocation_tokens: vec![0, 0], ..content.clone() }),
        changed(|extras| extras.truncate(1)),
        changed(|extras| extras[0].site = 1),
        changed(|extras| extras[0].part = ExtraPart::Bias),
        changed(|extras| extras[0].bytes[15] ^= 1),
        changed(|extras| {
            extras[0].dtype = SourceDtype::F16;
            extras[0].bytes.truncate(8);
        }),
        changed(|extras| extras[1].ids.swap(0, 1)),
        changed(|extras| extras[1].ids[1] = 1),
        changed(|extras| {
            extras[1].ids.truncate(1);
            extras[1].shape.0 = 1;
            extras[1].bytes.truncate(16);
        }),
        changed(|extras| {
            // The same bytes as a weight.
            extras[1].part = ExtraPart::Weight;
            extras[1].bytes.extend([6; 32]);
            extras[1].shape = (4, 8);
            extras[1].ids.clear();
        }),
    ];
    let num_ids = ids.len();
    ids.sort_by_key(ToString::to_string);
    ids.dedup();
    assert_eq!(ids.len(), num_ids);
    assert_eq!(id_of(&content), id_of(&Content { is_reversed: true, ..content.clone() }), "whatever the order");
}

#[test]
fn a_derived_value_is_not_part_of_the_id() {
    let layout = Layout::new(vec![Site::linear("q", 8, 4)], 8, Dtype::Bf16).unwrap().with_extras(256).unwrap();
    let config = PeftAdapterConfig::new(1, 1.0, false).unwrap();
    let bytes: Vec<u8> = [1_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let (a, b) = (&bytes[..], bytes.iter().rev().map(|byte| byte & 0x3f).collect::<Vec<u8>>());
    let id = |content: &[u8], stored: Option<&[u8]>| {
        let source = |bytes| Source::in_memory(bytes, SourceDtype::F32, 1, 4);
        let extra = |content, stored: Option<_>| ExtraInput {
            site: 0,
            part: ExtraPart::Gain,
            source: source(content),
            stored: stored.map(source),
            ids: &[],
        };
        let extras = [extra(content, stored)];
        let staged = Staged::read(&layout, &config, &[], &extras, Digest::Compute, Staging::default()).unwrap();
        assert_eq!(staged.cache_id(), Some(content_id(&layout, &config, &[], &extras).unwrap()));
        staged.cache_id()
    };
    assert_eq!(id(a, None), id(a, Some(&b)));
    assert_ne!(id(a, Some(&b)), id(&b, Some(&b)));
}

#[test]
fn a_row_has_the_id_of_its_one_adapter_or_one_of_its_own() {
    let ids = ["1", "2"].map(|digit| format!("hs1:{}", digit.repeat(64)).parse::<CacheId>().unwrap());
    assert_eq!(row_cache_id(&[], None), CacheId::BASE);
    assert_eq!(row_cache_id(&[], Some(3)), CacheId::BASE);
    assert_eq!(row_cache_id(&[(ids[0], 1.0)], None), ids[0]);
    let rows = [
        row_cache_id(&[(ids[0], 1.0)], None),
        row_cache_id(&[(ids[0], 1.0)], Some(0)),
        row_cache_id(&[(ids[0], 1.0)], Some(1)),
        row_cache_id(&[(ids[0], 0.5)], None),
        row_cache_id(&[(ids[0], 0.5), (ids[1], 0.5)], None),
        row_cache_id(&[(ids[1], 0.5), (ids[0], 0.5)], None),
        row_cache_id(&[(ids[0], 0.5), (ids[1], 0.25)], None),
    ];
    for (i, row) in rows.iter().enumerate() {
        assert!(!rows[..i].contains(row), "row {i}");
    }
}

/// Computed with the reference implementation of blake3, not with this crate. So are the ids above.
const GOLDEN: [(&str, u64, u64); 5] = [
    ("sql", 0, 0x0b55_16af_a5b6_1a53),
    ("sql", 1, 0xb690_8fbf_75a6_8c84),
    ("sql", u64::MAX, 0x3839_56df_0627_2b8a),
    ("poet", 0, 0x99aa_9c97_52c7_2930),
    ("org/model-v1.2", 3, 0xbc78_3480_12ee_ba11),
];
