//! What an adapter is called where nobody else knows its slot: by name and generation, and by content.

use std::fmt;
use std::str::FromStr;

use crate::config::PeftAdapterConfig;
use crate::error::{Error, Result};
use crate::extras::ExtraInput;
use crate::layout::Dtype;
use crate::source::Source;

/// A stable 64-bit identity of an adapter name in one generation; 0 for base (the empty name) and for nothing else.
///
/// The same in every process and release: the first eight bytes, little endian, of the blake3 hash of the name, followed in
/// generations above 0 by a zero byte and the generation as little-endian u64.
///
/// # Examples
/// ```
/// use hotslot_core::identity::adapter_id_hash;
///
/// assert_eq!(adapter_id_hash("", 0), 0);
/// assert_eq!(adapter_id_hash("sql", 0), 0x0b55_16af_a5b6_1a53);
/// assert_ne!(adapter_id_hash("sql", 1), adapter_id_hash("sql", 0));
/// ```
#[must_use]
pub fn adapter_id_hash(name: &str, generation: u64) -> u64 {
    if name.is_empty() {
        return 0;
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(name.as_bytes());
    if generation > 0 {
        hasher.update(&[0]);
        hasher.update(&generation.to_le_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first).max(1)
}

/// Checks that a name may be given to an adapter: `[A-Za-z0-9][A-Za-z0-9_./-]{0,127}`.
///
/// # Errors
/// [`Error::Value`] for any other.
pub fn check_adapter_name(name: &str) -> Result<()> {
    let rest_is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
    let first_is_good = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if first_is_good && name.len() <= 128 && name.bytes().all(rest_is_good) {
        return Ok(());
    }
    Err(Error::value(
        "adapter name",
        format!("{name:?}"),
        "1 to 128 of the characters A-Z a-z 0-9 _ . / -, the first a letter or digit",
    ))
}

/// How a load learns the identity of the content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Digest {
    /// Computed while the content is read.
    #[default]
    Compute,
    /// Verified before, for the very same files: neither hashed nor checked again.
    Known(CacheId),
    /// Computed by somebody else after the load, off the path of whoever waits for the slot.
    Later,
}

/// What an adapter holds, as a key for caches: equal content, equal id, in every slot, process and order of loading.
///
/// Shown and parsed as `hs1:` and 64 hexadecimal digits, or `hs1:base`. No adapter name can equal it.
///
/// # Examples
/// ```
/// use hotslot_core::identity::CacheId;
///
/// assert_eq!(CacheId::BASE.to_string(), "hs1:base");
/// assert_eq!("hs1:base".parse(), Ok(CacheId::BASE));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheId(Option<[u8; 32]>);

impl CacheId {
    /// The id of the base model: no adapter.
    pub const BASE: Self = Self(None);
}

impl fmt::Display for CacheId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(digest) => write!(f, "hs1:{}", blake3::Hash::from_bytes(digest).to_hex()),
            None => f.write_str("hs1:base"),
        }
    }
}

impl FromStr for CacheId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let hex = text.strip_prefix("hs1:");
        match hex {
            Some("base") => Some(Self::BASE),
            Some(hex) => blake3::Hash::from_hex(hex).ok().map(|hash| Self(Some(*hash.as_bytes()))),
            None => None,
        }
        .filter(|id| id.to_string() == text)
        .ok_or_else(|| Error::value("cache_id", format!("{text:?}"), "hs1: and 64 hexadecimal digits, or hs1:base"))
    }
}

impl CacheId {
    /// The id of what the adapter of this id becomes when it is taken from a pool of one element type into one of another.
    #[must_use]
    pub fn converted(self, from: Dtype, to: Dtype) -> Self {
        let mut hasher = blake3::Hasher::new();
        field(&mut hasher, b"hotslot converted cache id 1");
        for part in [&self.to_string(), from.name(), to.name()] {
            field(&mut hasher, part.as_bytes());
        }
        Self(Some(*hasher.finalize().as_bytes()))
    }
}

/// A blake3 hash of whatever its name says, shown and parsed as 64 hexadecimal digits.
///
/// # Examples
/// ```
/// use hotslot_core::identity::Fingerprint;
///
/// let of_nothing: Fingerprint = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262".parse()?;
/// assert_eq!(of_nothing, Fingerprint::of(b""));
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        blake3::hash(bytes).into()
    }
}

impl From<blake3::Hash> for Fingerprint {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let hash = blake3::Hash::from_hex(text).ok().map(Self::from).filter(|hash| hash.to_string() == text);
        hash.ok_or_else(|| Error::value("fingerprint", format!("{text:?}"), "64 hexadecimal digits in lower case"))
    }
}

/// What a row of a batch computes with, as a key for caches of what it computed.
///
/// `members` are the row's adapters and their weights, in request order; `start` is the first token that they serve, if not
/// the first of all. A row of one adapter at weight 1 from the start has that adapter's id, a row of none the base's.
///
/// # Examples
/// ```
/// use hotslot_core::identity::{CacheId, row_cache_id};
///
/// let sql: CacheId = format!("hs1:{}", "5".repeat(64)).parse()?;
/// assert_eq!(row_cache_id(&[], None), CacheId::BASE);
/// assert_eq!(row_cache_id(&[(sql, 1.0)], None), sql);
/// assert_ne!(row_cache_id(&[(sql, 1.0)], Some(7)), sql);
/// # Ok::<(), hotslot_core::Error>(())
/// ```
#[must_use]
pub fn row_cache_id(members: &[(CacheId, f32)], start: Option<u64>) -> CacheId {
    match (members, start) {
        ([], _) => return CacheId::BASE,
        ([(id, weight)], None) if weight.to_bits() == 1_f32.to_bits() => return *id,
        _ => {}
    }
    let mut hasher = blake3::Hasher::new();
    field(&mut hasher, b"hotslot row cache id 1");
    let (is_late, start) = start.map_or((0, 0), |start| (1, start));
    field(&mut hasher, &[is_late]);
    field(&mut hasher, &start.to_le_bytes());
    for (id, weight) in members {
        field(&mut hasher, id.to_string().as_bytes());
        field(&mut hasher, &weight.to_bits().to_le_bytes());
    }
    CacheId(Some(*hasher.finalize().as_bytes()))
}

/// Adds `bytes`, framed by their length.
pub(crate) fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// Computes a [`CacheId`] from an adapter's content: pair by pair in the order of the sites' paths, then extra by extra in that
/// of paths and parts.
///
/// Every field is framed by its length, so that no two contents feed the same bytes. A tensor enters as the digest of its
/// bytes: hashed on its own, it is hashed by vectors.
#[derive(Debug)]
pub struct CacheIdHasher {
    content: blake3::Hasher,
    tensor: blake3::Hasher,
}

impl CacheIdHasher {
    /// Begins with what holds for the whole adapter.
    #[must_use]
    pub fn new(pool_dtype: Dtype, config: &PeftAdapterConfig) -> Self {
        let mut this = Self { content: blake3::Hasher::new(), tensor: blake3::Hasher::new() };
        this.field(b"hotslot cache id 1");
        this.field(pool_dtype.name().as_bytes());
        this.field(&config.scaling().to_bits().to_le_bytes());
        if !config.alora_invocation_tokens.is_empty() {
            // No module's path has a blank in it.
            this.field(b"alora invocation tokens");
            this.ids(&config.alora_invocation_tokens);
        }
        this
    }

    /// Adds what holds for one pair. Its halves follow.
    pub fn pair(&mut self, path: &str, scale: f64) {
        self.field(path.as_bytes());
        self.field(&scale.to_bits().to_le_bytes());
        // Flags of features that change what a pair means; none yet.
        self.field(&0_u64.to_le_bytes());
    }

    /// Adds bytes of the next half.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.tensor.update(bytes);
    }

    /// Ends a half, `"A"` or `"B"`, of which all bytes were added.
    pub fn half(&mut self, half: &str, source: &Source<'_>) {
        self.shape(half, source);
        self.digest();
    }

    fn shape(&mut self, name: &str, source: &Source<'_>) {
        self.field(name.as_bytes());
        self.field(source.dtype.name().as_bytes());
        self.field(&(source.rows as u64).to_le_bytes());
        self.field(&(source.cols as u64).to_le_bytes());
    }

    fn digest(&mut self) {
        let digest = self.tensor.finalize();
        self.field(digest.as_bytes());
        self.tensor.reset();
    }

    /// Ends an extra of the site at `path`, of whose source all bytes were added.
    pub fn extra(&mut self, path: &str, extra: &ExtraInput<'_>) {
        self.field(path.as_bytes());
        self.shape(extra.part.name(), &extra.source);
        self.ids(extra.ids);
        self.digest();
    }

    fn ids(&mut self, ids: &[u32]) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.field(&bytes);
    }

    /// The id of all that was added.
    #[must_use]
    pub fn finish(self) -> CacheId {
        CacheId(Some(*self.content.finalize().as_bytes()))
    }

    fn field(&mut self, bytes: &[u8]) {
        field(&mut self.content, bytes);
    }
}
