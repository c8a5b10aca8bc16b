//! Where everything lies inside a slot.
//!
//! A slot holds, for every site in turn, the block of A and then the block of B, each at a 256-byte boundary and each with
//! room for `max_rank`. An adapter of a lower rank uses the front of its blocks, with the row stride of its own rank:
//!
//! ```text
//! A [rank, in]   row stride padded(in)      block: max_rank * padded(in)
//! B [out, rank]  row stride padded(rank)    block: out * padded(max_rank)
//! ```
//!
//! Sites that few adapters touch, or that would make every slot large, float: they have no blocks here. Their pairs lie in the
//! slot's place in a second allocation, each as large as it is, beside all that is neither A nor B (see
//! [`extras`](crate::extras)).

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::error::Error;
use crate::identity::{Fingerprint, field};
use crate::module::{LoraModule, layer_of_path};

/// Alignment in bytes of each block and of each slot.
pub const BLOCK_ALIGN: u64 = 256;

/// Row strides of A and B are multiples of this many elements.
pub const ROW_ALIGN: usize = 8;

/// The row stride, in elements, of rows of `n` elements.
#[must_use]
pub const fn padded(n: usize) -> usize {
    n.next_multiple_of(ROW_ALIGN)
}

/// The element type of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Dtype {
    /// bfloat16: half the bytes; values of other types are rounded to nearest even.
    #[default]
    Bf16,
    /// float32: exact.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name that torch and numpy users know: `bfloat16` or `float32`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }

    /// The pool dtype of that name.
    ///
    /// # Errors
    /// [`Error::Value`] for any other name.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        match name {
            "bfloat16" => Ok(Self::Bf16),
            "float32" => Ok(Self::F32),
            other => Err(Error::value("pool_dtype", other, "bfloat16 or float32")),
        }
    }
}

/// What kind of layer a site is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum SiteKind {
    /// A linear layer.
    #[default]
    Linear,
    /// A linear layer that keeps its weight transposed (GPT-2).
    Conv1d,
    /// A token embedding: `in_features` is the vocabulary.
    Embedding,
    /// The router of a mixture of experts.
    Router,
    /// One projection of one routed expert.
    Expert,
}

impl SiteKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Linear, Self::Conv1d, Self::Embedding, Self::Router, Self::Expert];

    /// The kind's name in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Conv1d => "conv1d",
            Self::Embedding => "embedding",
            Self::Router => "router",
            Self::Expert => "expert",
        }
    }

    /// The kind of that name.
    ///
    /// # Errors
    /// [`Error::Value`] for any other name.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| Error::value("site kind", name, "linear, conv1d, embedding, router or expert"))
    }

    /// Whether sites of this kind always float.
    #[must_use]
    pub const fn floats(self) -> bool {
        matches!(self, Self::Embedding | Self::Router | Self::Expert)
    }
}

/// A layer that takes adapters. Its full module path is its key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// Full module path, as in `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// What kind of layer it is.
    pub kind: SiteKind,
    /// Columns of A.
    pub in_features: usize,
    /// Rows of B.
    pub out_features: usize,
    /// Decoder layer, derived from the path.
    pub layer: Option<usize>,
    /// Module, derived from the path.
    pub module: Option<LoraModule>,
    /// Whether the site has no block in a slot: its pairs lie among the extras.
    pub floating: bool,
}

impl Site {
    /// A site at `path`; its layer and module follow from the path. It floats if its kind always does.
    #[must_use]
    pub fn new(path: impl Into<String>, kind: SiteKind, in_features: usize, out_features: usize) -> Self {
        let path = path.into();
        let layer = layer_of_path(&path);
        let module = LoraModule::of_path(&path).map(|(_, module)| module);
        Self { path, kind, in_features, out_features, layer, module, floating: kind.floats() }
    }

    /// The same site without a block in a slot.
    #[must_use]
    pub fn float(self) -> Self {
        Self { floating: true, ..self }
    }

    /// A linear site at `path`.
    #[must_use]
    pub fn linear(path: impl Into<String>, in_features: usize, out_features: usize) -> Self {
        Self::new(path, SiteKind::Linear, in_features, out_features)
    }
}

/// Where what a slot holds begins: its blocks, and its place among the extras.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotBases {
    /// Address of its blocks.
    pub blocks: u64,
    /// Address of its place among the extras; 0 if the pool has none.
    pub extras: u64,
}

/// Byte offsets of a pair's blocks from the start of a slot, or of a place among the extras.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteOffsets {
    /// Of A.
    pub a: u64,
    /// Of B.
    pub b: u64,
}

/// The layout of a pool: its sites, and where each lies in a slot.
///
/// # Examples
/// ```
/// use hotslot_core::layout::{Dtype, Layout, Site};
///
/// let sites = vec![Site::linear("model.layers.0.self_attn.q_proj", 576, 576)];
/// let layout = Layout::new(sites, 16, Dtype::Bf16)?;
/// assert_eq!(layout.offsets(0).map(|offsets| offsets.b), Some(16 * 576 * 2));
/// assert_eq!(layout.slot_bytes(), 2 * 16 * 576 * 2);
/// # Ok::<(), hotslot_core::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Layout {
    sites: Vec<Site>,
    by_path: Arc<HashMap<String, usize>>,
    id: OnceLock<Fingerprint>,
    offsets: Vec<Option<SiteOffsets>>,
    slot_bytes: u64,
    extras_bytes: u64,
    max_rank: usize,
    dtype: Dtype,
}

impl Layout {
    /// Lays out `sites` for adapters of up to `max_rank`, without room for extras.
    ///
    /// # Errors
    /// [`Error::Value`] if there are no sites, if two have one path, if `max_rank` or a feature count is 0, or if a slot would
    /// not fit the address space.
    pub fn new(sites: Vec<Site>, max_rank: usize, dtype: Dtype) -> Result<Self, Error> {
        if sites.is_empty() {
            return Err(Error::value("the number of sites", 0, "at least one layer that takes adapters"));
        }
        if max_rank == 0 {
            return Err(Error::value("max_rank", 0, "at least 1"));
        }
        let mut by_path = HashMap::with_capacity(sites.len());
        let mut offsets = Vec::with_capacity(sites.len());
        let mut end = 0_u64;
        for (index, site) in sites.iter().enumerate() {
            if by_path.insert(site.path.clone(), index).is_some() {
                return Err(Error::value("site path", &site.path, "each path once"));
            }
            if site.in_features == 0 || site.out_features == 0 {
                return Err(Error::value("features of a site", &site.path, "in and out features of at least 1"));
            }
            if site.floating {
                offsets.push(None);
                continue;
            }
            let too_big = || Error::value("bytes of a slot, at site", &site.path, "less than 2^63");
            let a_bytes = block_bytes(max_rank, site.in_features, dtype);
            let b_bytes = block_bytes(site.out_features, max_rank, dtype);
            let a = end;
            let b = a_bytes.and_then(|bytes| a.checked_add(bytes)).ok_or_else(too_big)?;
            end = b_bytes.and_then(|bytes| b.checked_add(bytes)).filter(|&end| end < 1 << 63).ok_or_else(too_big)?;
            offsets.push(Some(SiteOffsets { a, b }));
        }
        let (by_path, id) = (Arc::new(by_path), OnceLock::new());
        Ok(Self { sites, by_path, id, offsets, slot_bytes: end, extras_bytes: 0, max_rank, dtype })
    }

    /// The same layout with a place of at least `bytes` among the extras for each slot.
    ///
    /// # Errors
    /// [`Error::Value`] if the place would not fit the address space.
    pub fn with_extras(self, bytes: u64) -> Result<Self, Error> {
        let extras_bytes = bytes
            .checked_next_multiple_of(BLOCK_ALIGN)
            .filter(|&bytes| bytes < 1 << 63)
            .ok_or_else(|| Error::value("extras_bytes", bytes, "less than 2^63"))?;
        Ok(Self { extras_bytes, ..self })
    }

    /// The sites, in the order of their blocks.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// The index of the site at `path`.
    #[must_use]
    pub fn site_index(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// What two pools have in common if a packed adapter of the one is, byte for byte, one of the other: element type, sites in
    /// their order, alignment. Neither `max_rank` nor the number of slots nor the room for extras is part of it.
    pub fn id(&self) -> Fingerprint {
        *self.id.get_or_init(|| {
            let mut hasher = blake3::Hasher::new();
            field(&mut hasher, b"hotslot layout 1");
            field(&mut hasher, self.dtype.name().as_bytes());
            let mut number = |number: u64| field(&mut hasher, &number.to_le_bytes());
            number(BLOCK_ALIGN);
            number(ROW_ALIGN as u64);
            number(self.sites.len() as u64);
            for site in &self.sites {
                field(&mut hasher, site.path.as_bytes());
                field(&mut hasher, site.kind.name().as_bytes());
                field(&mut hasher, &(site.in_features as u64).to_le_bytes());
                field(&mut hasher, &(site.out_features as u64).to_le_bytes());
            }
            hasher.finalize().into()
        })
    }

    /// The offsets of a site's blocks in a slot; `None` for a floating one, which has none.
    ///
    /// # Panics
    /// If there is no such site.
    #[must_use]
    pub fn offsets(&self, site: usize) -> Option<SiteOffsets> {
        self.offsets[site]
    }

    /// The offsets of all sites' blocks in a slot.
    #[must_use]
    pub fn all_offsets(&self) -> &[Option<SiteOffsets>] {
        &self.offsets
    }

    /// Bytes of one slot's blocks; 0 if all sites float.
    #[must_use]
    pub const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of one slot's place among the extras, a multiple of [`BLOCK_ALIGN`]; 0 for a pool that has none.
    #[must_use]
    pub const fn extras_bytes(&self) -> u64 {
        self.extras_bytes
    }

    /// Bytes of a pool of `max_loras` slots.
    ///
    /// # Errors
    /// [`Error::Value`] if there are no slots, or if they would not fit the address space.
    pub fn pool_bytes(&self, max_loras: usize) -> Result<u64, Error> {
        Self::times(self.slot_bytes, max_loras)
    }

    /// Bytes of the extras of `max_loras` slots.
    ///
    /// # Errors
    /// As [`pool_bytes`](Self::pool_bytes).
    pub fn all_extras_bytes(&self, max_loras: usize) -> Result<u64, Error> {
        Self::times(self.extras_bytes, max_loras)
    }

    fn times(bytes: u64, max_loras: usize) -> Result<u64, Error> {
        if max_loras == 0 {
            return Err(Error::value("max_loras", 0, "at least 1"));
        }
        bytes
            .checked_mul(max_loras as u64)
            .filter(|&bytes| bytes < 1 << 63)
            .ok_or_else(|| Error::value("max_loras", max_loras, "a pool of less than 2^63 bytes"))
    }

    /// The highest rank that fits.
    #[must_use]
    pub const fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }
}

/// Bytes of `rows` rows of `cols` elements with their pads, up to where the next block may begin.
pub(crate) fn block_bytes(rows: usize, cols: usize, dtype: Dtype) -> Option<u64> {
    let stride = cols.checked_next_multiple_of(ROW_ALIGN)? as u64;
    let bytes = (rows as u64).checked_mul(stride)?.checked_mul(dtype.size() as u64)?;
    bytes.checked_next_multiple_of(BLOCK_ALIGN)
}

/// Byte offsets of each site's A and B from the start of a slot; `None` for a floating site.
///
/// # Errors
/// As [`Layout::new`].
pub fn module_slot_offsets(sites: &[Site], max_rank: usize, dtype: Dtype) -> Result<Vec<Option<SiteOffsets>>, Error> {
    Ok(Layout::new(sites.to_vec(), max_rank, dtype)?.offsets)
}

/// Bytes of one slot; slot `k` begins at `k` times this.
///
/// # Errors
/// As [`Layout::new`].
pub fn pool_slot_bytes(sites: &[Site], max_rank: usize, dtype: Dtype) -> Result<u64, Error> {
    Ok(Layout::new(sites.to_vec(), max_rank, dtype)?.slot_bytes)
}

/// The bytes that a pool will take, told before anything is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolPlan {
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Bytes of all slots.
    pub pool_bytes: u64,
    /// Bytes of the tables.
    pub table_bytes: u64,
    /// Sites with room.
    pub num_sites: usize,
}
