//! Adapters from one process to another: HTTP/1.1 over TCP or TLS.
//!
//! A [`PeerServer`] shows what its [`Exports`] export and nothing else: a manifest, a lease that pins one adapter while it is
//! read, its bytes by range, and the lease's release. Nothing can be written through it. A [`PeerClient`] takes a lease and
//! receives the bytes straight into the caller's memory, checked while they come. This crate knows an adapter as bytes and a
//! JSON header of which it reads three fields ([`Facts`]); what is in them is `hotslot-core`'s.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use hotslot_peer::{ClientOptions, Exported, Exports, LeaseRefusal, Leased, PeerClient, PeerServer, Progress, ServerOptions};
//!
//! struct Greeting;
//! impl Leased for Greeting {
//!     fn generation(&self) -> u64 { 1 }
//!     fn header_json(&self) -> &str {
//!         r#"{"nbytes":5,"blake3":"ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f",
//!             "regions":[{"offset":0,"len":5,"xxh3":"9555e8555c62dcfd"}]}"#
//!     }
//!     fn nbytes(&self) -> u64 { 5 }
//!     fn read_at(&self, offset: u64, destination: &mut [u8]) -> std::io::Result<()> {
//!         destination.copy_from_slice(&b"hello"[offset as usize..][..destination.len()]);
//!         Ok(())
//!     }
//! }
//! impl Exports for Greeting {
//!     fn manifest(&self) -> Vec<Exported> { vec![Exported::new("greeting", 1, "00", 5)] }
//!     fn lease(&self, adapter: &str, _: Option<u64>) -> Result<Box<dyn Leased>, LeaseRefusal> {
//!         if adapter == "greeting" { Ok(Box::new(Self)) } else { Err(LeaseRefusal::Unknown) }
//!     }
//! }
//!
//! let server = PeerServer::start(Arc::new(Greeting), ServerOptions::default())?;
//! let client = PeerClient::new(&server.address().to_string(), ClientOptions::default())?;
//! let lease = client.lease("greeting", None, Duration::from_secs(10))?;
//! let mut bytes = [0; 5];
//! client.fetch(&lease, &mut bytes, &Progress::default())?;
//! client.release(&lease)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok::<_, hotslot_peer::PeerError>(())
//! ```

mod address;
mod background;
mod blob;
mod client;
mod clock;
mod connection;
mod error;
mod exports;
mod facts;
mod guarded;
mod hashing;
mod leases;
mod pool;
mod progress;
mod range;
mod receive;
mod server;
mod service;
mod tls;
mod verify;
mod wire;

pub use address::PeerAddress;
pub use client::{ClientOptions, Fetched, Lease, PeerClient};
pub use error::{PeerError, PeerErrorKind, Result};
pub use exports::{Exported, Exports, LeaseRefusal, Leased};
pub use facts::{Facts, Region};
pub use pool::{Pool, PoolExports};
pub use progress::Progress;
pub use server::{PeerServer, ServerOptions, ServerStats};
pub use tls::{ClientTls, ServerTls};
pub use verify::Verify;
pub use wire::{Agent, Manifest};
