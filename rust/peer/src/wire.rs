//! The messages, as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::exports::Exported;

pub(crate) const MANIFEST: &str = "/v1/peer/manifest";
pub(crate) const AGENT: &str = "/v1/peer/agent";
pub(crate) const LEASE: &str = "/v1/peer/lease";
pub(crate) const RELEASE: &str = "/v1/peer/release";
pub(crate) const BLOB: &str = "/v1/peer/blob/";

/// What a peer exports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The protocol's version, 1.
    pub format: u32,
    /// A random number of the serving process: another one means that generations began anew.
    pub epoch: String,
    /// The adapters.
    pub adapters: Vec<Exported>,
}

/// How a peer can be read from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Agent {
    /// The peer's name for itself.
    pub name: String,
    /// Engine -> what a reader needs for it; "tcp" is always there.
    pub engines: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeaseRequest {
    pub(crate) adapter: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    /// Seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ttl: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeaseReply {
    pub(crate) lease: String,
    pub(crate) generation: u64,
    /// Seconds.
    pub(crate) expires_in: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<u64>,
    pub(crate) header: Box<RawValue>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReleaseRequest {
    pub(crate) lease: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReleaseReply {
    pub(crate) released: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorReply {
    pub(crate) error: String,
}

/// 32 hexadecimal digits that nobody can guess.
///
/// # Errors
/// The operating system's, which has none.
pub(crate) fn random_id() -> Result<String, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Whether text has the form of a lease's id.
pub(crate) fn is_id(text: &str) -> bool {
    text.len() == 32 && crate::facts::is_lower_hex(text)
}
