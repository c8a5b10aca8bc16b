//! `PeerClient`: adapters of other processes, read into memory of this one.

use std::collections::BTreeMap;
use std::time::Duration;

use hotslot_core::Error;
use hotslot_peer::{ClientOptions, ClientTls, Exported, Lease, PeerClient as Core, Progress, Verify};
use pyo3::prelude::*;

use crate::error::{raise, raise_peer};
use crate::packed::{PackedAdapter, Receiving, fingerprint};

/// An adapter in a peer's manifest.
#[pyclass(frozen, get_all, eq, module = "hotslot._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct PeerAdapter {
    /// Its name there.
    adapter: String,
    /// Which load of that process it is.
    generation: u64,
    /// The `LoraWeights.layout_id` of the pool that it is packed for.
    layout_id: String,
    /// Bytes of its packed form.
    nbytes: u64,
    /// The content's identity, None if it is not known yet.
    cache_id: Option<String>,
    /// blake3 of the packed bytes, None if it is not known yet.
    blake3: Option<String>,
    /// "device" or "host".
    tier: String,
}

impl From<Exported> for PeerAdapter {
    fn from(exported: Exported) -> Self {
        let Exported { adapter, generation, layout, nbytes, cache_id, blake3, tier, .. } = exported;
        Self { adapter, generation, layout_id: layout, nbytes, cache_id, blake3, tier }
    }
}

#[pymethods]
impl PeerAdapter {
    fn __repr__(&self) -> String {
        format!("PeerAdapter({:?}, generation={}, {} bytes)", self.adapter, self.generation, self.nbytes)
    }
}

/// What a peer exports.
#[pyclass(frozen, get_all, module = "hotslot._core")]
pub(crate) struct PeerManifest {
    /// A random number of the serving process: another one means that generations began anew.
    epoch: String,
    /// The adapters.
    adapters: Vec<PeerAdapter>,
}

#[pymethods]
impl PeerManifest {
    fn __repr__(&self) -> String {
        let names: Vec<&str> = self.adapters.iter().map(|adapter| adapter.adapter.as_str()).collect();
        format!("PeerManifest({names:?})")
    }
}

/// An adapter that a peer keeps as it is for a while.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PeerLease {
    core: Lease,
}

#[pymethods]
impl PeerLease {
    /// The adapter's name there.
    #[getter]
    fn adapter(&self) -> &str {
        &self.core.adapter
    }

    /// Which load of that process it is.
    #[getter]
    fn generation(&self) -> u64 {
        self.core.generation
    }

    /// Seconds that it was granted for.
    #[getter]
    fn ttl(&self) -> f64 {
        self.core.ttl.as_secs_f64()
    }

    /// What `PackedAdapter.receive` takes.
    #[getter]
    fn header(&self) -> &str {
        &self.core.header
    }

    /// The header's `cache_id`, `base`, `config` and `extras`, as JSON: a hundredth of its length.
    #[getter]
    fn summary(&self) -> &str {
        &self.core.summary
    }

    /// Bytes of its packed form.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.core.facts.nbytes
    }

    /// blake3 of those bytes.
    #[getter]
    fn blake3(&self) -> String {
        self.core.facts.blake3.to_hex().to_string()
    }

    /// Address of the bytes in the peer's memory for engines that read there, None if they lie in several pieces or the peer has
    /// no such engine.
    #[getter]
    fn base(&self) -> Option<u64> {
        self.core.base
    }

    fn __repr__(&self) -> String {
        format!(
            "PeerLease({:?}, generation={}, {} bytes)",
            self.core.adapter, self.core.generation, self.core.facts.nbytes
        )
    }
}

/// How far a fetch is, and how to stop it, from any thread.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PeerProgress {
    core: Progress,
}

#[pymethods]
impl PeerProgress {
    #[new]
    fn new() -> Self {
        Self { core: Progress::default() }
    }

    /// Bytes received.
    #[getter]
    fn received(&self) -> u64 {
        self.core.received()
    }

    /// Bytes verified.
    #[getter]
    fn verified(&self) -> u64 {
        self.core.verified()
    }

    /// Bytes that will come; 0 before the fetch begins.
    #[getter]
    fn total(&self) -> u64 {
        self.core.total()
    }

    /// How often a broken connection was taken up again.
    #[getter]
    fn resumes(&self) -> u64 {
        self.core.resumes()
    }

    /// Whether it was cancelled.
    #[getter]
    fn cancelled(&self) -> bool {
        self.core.is_cancelled()
    }

    /// Lets the fetch end with `PeerError`, reason "cancelled": within a twentieth of a second, or when a connection that is being made
    /// is there.
    fn cancel(&self) {
        self.core.cancel();
    }

    fn __repr__(&self) -> String {
        format!("PeerProgress({} of {} bytes)", self.core.received(), self.core.total())
    }
}

/// Reads adapters from one peer. Can be shared between threads; keeps one connection for the next exchange.
///
/// Connects to nothing until it is asked for something. Redirects are not followed, and proxies of the environment not used.
///
/// Args:
///     address: Host and port: "10.0.0.7:41234", "[fd00::7]:41234" or "name.example:41234".
///     token: The peer's bearer token.
///     authority: PEM of whoever signed the peer's certificate; with it the connection is TLS.
///     certificate, key: PEM of this side's own certificate and private key, for peers that want one.
///     server_name: The name in the peer's certificate, if it is not the host.
///     connect_timeout: Seconds for a connection.
///     exchange_timeout: Seconds for a whole exchange that is no transfer.
///     transfer_timeout: Seconds for a whole transfer, beside what its bytes take at `min_rate`.
///     min_rate: Bytes a second that a transfer must reach; 0 for no such demand.
///     silence: Seconds for the next byte.
///     verify: "full" (blake3 of all bytes, and xxh3 of each region) or "fast" (xxh3 alone while they come; blake3 afterwards).
///
/// Raises:
///     PeerError: The address is none (reason "address").
///     ValueError: Another argument makes no sense.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PeerClient {
    core: Core,
    verify: Verify,
}

/// Seconds as a duration.
pub(crate) fn seconds(what: &'static str, seconds: f64) -> PyResult<Duration> {
    let duration = Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| {
        raise(Error::Value { what, found: seconds.to_string(), expected: "seconds, more than 0".to_owned() })
    })
}

/// Two arguments of which either both or none are given.
pub(crate) fn both<T>(what: &'static str, first: Option<T>, second: Option<T>) -> PyResult<Option<(T, T)>> {
    match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (None, None) => Ok(None),
        _ => Err(raise(Error::Value { what, found: "one of them".to_owned(), expected: "both or neither".to_owned() })),
    }
}

#[pymethods]
impl PeerClient {
    #[new]
    #[pyo3(signature = (address, *, token = None, authority = None, certificate = None, key = None, server_name = None,
        connect_timeout = 2.0, exchange_timeout = 5.0, transfer_timeout = 5.0, min_rate = 50_000_000, silence = 5.0,
        verify = "full"))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments: how a client connects and how long it waits")]
    fn new(
        address: &str,
        token: Option<String>,
        authority: Option<Vec<u8>>,
        certificate: Option<Vec<u8>>,
        key: Option<Vec<u8>>,
        server_name: Option<String>,
        connect_timeout: f64,
        exchange_timeout: f64,
        transfer_timeout: f64,
        min_rate: u64,
        silence: f64,
        verify: &str,
    ) -> PyResult<Self> {
        let value =
            |what, found: String, expected: &str| raise(Error::Value { what, found, expected: expected.to_owned() });
        let verify = match verify {
            "full" => Verify::Full,
            "fast" => Verify::Fast,
            other => return Err(value("verify", format!("{other:?}"), "\"full\" or \"fast\"")),
        };
        let identity = both("certificate and key", certificate, key)?;
        let tls = match authority {
            Some(authority) => Some(ClientTls { authority, identity, server_name }),
            None if identity.is_some() || server_name.is_some() => {
                return Err(value("authority", "none beside other settings of TLS".to_owned(), "the peer's authority"));
            }
            None => None,
        };
        let options = ClientOptions {
            token,
            tls,
            connect_timeout: seconds("connect_timeout", connect_timeout)?,
            exchange_timeout: seconds("exchange_timeout", exchange_timeout)?,
            transfer_timeout: seconds("transfer_timeout", transfer_timeout)?,
            min_rate,
            silence: seconds("silence", silence)?,
            verify,
            ..ClientOptions::default()
        };
        Ok(Self { core: Core::new(address, options).map_err(raise_peer)?, verify })
    }

    /// The peer's address.
    #[getter]
    fn address(&self) -> String {
        self.core.address().to_string()
    }

    /// What the peer exports.
    ///
    /// Raises:
    ///     PeerError: It did not say.
    fn manifest(&self, py: Python<'_>) -> PyResult<PeerManifest> {
        let manifest = py.detach(|| self.core.manifest()).map_err(raise_peer)?;
        let adapters = manifest.adapters.into_iter().map(PeerAdapter::from).collect();
        Ok(PeerManifest { epoch: manifest.epoch, adapters })
    }

    /// The peer's name for itself, and by engine what a reader needs for it; "tcp" is always there.
    ///
    /// Raises:
    ///     PeerError: It did not say.
    fn agent(&self, py: Python<'_>) -> PyResult<(String, BTreeMap<String, String>)> {
        let agent = py.detach(|| self.core.agent()).map_err(raise_peer)?;
        Ok((agent.name, agent.engines))
    }

    /// Lets the peer keep an adapter as it is, to be read.
    ///
    /// Args:
    ///     adapter: Its name there.
    ///     generation: The generation that it must have, or None for whichever it has.
    ///     ttl: Seconds; the peer may grant less.
    ///
    /// Raises:
    ///     PeerError: There is none (reason "gone"), the peer does not want to ("refused"), or it did not answer.
    ///     ValueError: The name or ttl makes no sense.
    #[pyo3(signature = (adapter, generation = None, ttl = 60.0))]
    fn lease(&self, py: Python<'_>, adapter: &str, generation: Option<u64>, ttl: f64) -> PyResult<PeerLease> {
        let ttl = seconds("ttl", ttl)?;
        let core = py.detach(|| self.core.lease(adapter, generation, ttl)).map_err(raise_peer)?;
        Ok(PeerLease { core })
    }

    /// Receives a lease's bytes and checks them.
    ///
    /// They go from the socket to their place, and are hashed by a second thread while they come. A connection that breaks is taken up
    /// again once, where it broke. Until this returns, `receiving` is closed to others.
    ///
    /// Args:
    ///     lease: The lease.
    ///     receiving: What `PackedAdapter.receive(lease.header, ...)` gave.
    ///     progress: Counters to watch from other threads, and a way to cancel.
    ///
    /// Raises:
    ///     PeerError: The transfer failed; `receiving` can be used again, for the same adapter from another peer.
    ///     AdapterFileError: The bytes are what the header says and yet no adapter. The memory is given back.
    ///     ValueError: `receiving` has room for another length.
    ///     ClosedError: `receiving` was finished or closed, or receives from another peer.
    #[pyo3(signature = (lease, receiving, progress = None))]
    fn fetch(
        &self,
        py: Python<'_>,
        lease: &Bound<'_, PeerLease>,
        receiving: &Bound<'_, Receiving>,
        progress: Option<&Bound<'_, PeerProgress>>,
    ) -> PyResult<PackedAdapter> {
        let own = Progress::default();
        let (lease, receiving) = (&lease.get().core, receiving.get());
        let progress = progress.map_or(&own, |progress| &progress.get().core);
        let mut core = receiving.take()?;
        let fetched = py.detach(|| self.core.fetch(lease, core.buffer(), progress));
        if let Err(error) = fetched {
            receiving.put_back(core);
            return Err(raise_peer(error));
        }
        let blake3 = match self.verify {
            Verify::Full => fingerprint(Some(lease.facts.blake3.to_hex().as_str()))?,
            Verify::Fast => None,
        };
        let finished = py.detach(|| match blake3 {
            Some(blake3) => core.finish_hashed(blake3, None),
            None => core.finish(),
        });
        finished.map(PackedAdapter::from).map_err(raise)
    }

    /// Tells the peer that a lease is no longer needed; whether it still stood.
    ///
    /// Raises:
    ///     PeerError: It did not answer. The lease then ends by itself, at its time.
    fn release(&self, py: Python<'_>, lease: &Bound<'_, PeerLease>) -> PyResult<bool> {
        let lease = &lease.get().core;
        py.detach(|| self.core.release(lease)).map_err(raise_peer)
    }

    fn __repr__(&self) -> String {
        format!("PeerClient({:?})", self.core.address().to_string())
    }
}
