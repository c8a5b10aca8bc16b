//! What a server shows: the border to whoever owns the weights.

use std::io;

use serde::{Deserialize, Serialize};

/// One adapter of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Exported {
    /// Its name in the process that serves it.
    pub adapter: String,
    /// Which load of that process it is; another content of that name has another one.
    pub generation: u64,
    /// Hexadecimal digits: equal for pools between which the bytes can go as they are.
    pub layout: String,
    /// Bytes of its packed form.
    pub nbytes: u64,
    /// The content's identity, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_id: Option<String>,
    /// The digest of the packed bytes, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Where it lies: "device" or "host".
    #[serde(default)]
    pub tier: String,
}

impl Exported {
    /// An adapter of which no more is known; in tier "device".
    #[must_use]
    pub fn new(adapter: &str, generation: u64, layout: &str, nbytes: u64) -> Self {
        Self {
            adapter: adapter.to_owned(),
            generation,
            layout: layout.to_owned(),
            nbytes,
            cache_id: None,
            blake3: None,
            tier: "device".to_owned(),
        }
    }
}

/// Why there is no lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseRefusal {
    /// No adapter of that name is exported.
    Unknown,
    /// The name has another generation by now.
    Changed,
    /// It cannot be had now, for the reason given; later perhaps.
    Unavailable(String),
}

/// The adapters that a process lets others read.
///
/// Called on threads of the server, which must not wait for long: other peers wait meanwhile.
pub trait Exports: Send + Sync + 'static {
    /// All that is exported at this moment.
    fn manifest(&self) -> Vec<Exported>;

    /// Pins an adapter, so that it stays as it is until what is returned is dropped.
    ///
    /// # Errors
    /// The reason why not. [`LeaseRefusal::Changed`] if `generation` is given and is not the present one.
    fn lease(&self, adapter: &str, generation: Option<u64>) -> Result<Box<dyn Leased>, LeaseRefusal>;
}

/// An adapter that stays as it is until this is dropped.
pub trait Leased: Send + Sync + 'static {
    /// Which load of the process it is.
    fn generation(&self) -> u64;

    /// The header that describes the bytes: an object with at least what [`Facts`](crate::Facts) reads.
    fn header_json(&self) -> &str;

    /// How many bytes there are.
    fn nbytes(&self) -> u64;

    /// The bytes from `offset` as far as they lie in one piece of this process's memory, so that they can be sent from there.
    ///
    /// `None`, or a short piece, sends the server to [`read_at`](Self::read_at).
    fn piece(&self, offset: u64) -> Option<&[u8]> {
        let _ = offset;
        None
    }

    /// Fills `destination` with the bytes from `offset`, which all exist.
    ///
    /// # Errors
    /// The device's; the transfer ends there.
    fn read_at(&self, offset: u64, destination: &mut [u8]) -> io::Result<()>;

    /// Address of the first byte if all of them lie in one piece, for engines that read memory themselves.
    fn base(&self) -> Option<u64> {
        None
    }
}
