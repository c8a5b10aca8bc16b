//! `PeerServer`: the adapters of this process, for others to read.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use hotslot_core::Error;
use hotslot_core::weights::LoraWeights as CoreWeights;
use hotslot_peer::{Pool, PoolExports, ServerOptions, ServerTls};
use pyo3::prelude::*;

use crate::error::{raise, raise_peer};
use crate::peer::{both, seconds};
use crate::tiers::{HostTier, key_of};
use crate::weights::LoraWeights;

/// A pool that Python owns too.
struct Owned(Py<LoraWeights>);

impl Pool for Owned {
    fn weights(&self) -> Option<&CoreWeights> {
        self.0.get().open().ok()
    }
}

/// What a server did and does.
#[pyclass(frozen, get_all, module = "hotslot._core")]
pub(crate) struct PeerServerStats {
    /// Connections now.
    connections: usize,
    /// Leases now.
    leases: usize,
    /// Leases granted so far.
    leases_granted: u64,
    /// Requests refused so far.
    refused: u64,
    /// Bytes sent so far, headers among them.
    bytes_sent: u64,
}

#[pymethods]
impl PeerServerStats {
    fn __repr__(&self) -> String {
        format!(
            "PeerServerStats(connections={}, leases={}, bytes_sent={})",
            self.connections, self.leases, self.bytes_sent
        )
    }
}

/// Serves the adapters of a pool and of its host tier to other processes, from a thread of its own, until it is closed.
///
/// Others can read what is exported and write nothing. A lease holds a reference on the slot while the adapter is read, or the tier's
/// copy if there is one of the same content.
///
/// Args:
///     weights: The pool. Its resident adapters are exported under their names.
///     tier: The host tier whose copies can be named by `set_copies`.
///     host: The address to listen at. Beyond loopback only with a token, or with `client_authority`.
///     port: The port; 0 takes a free one.
///     token: What clients must present as bearer token.
///     certificate, key: PEM of the certificate and private key for TLS.
///     client_authority: PEM of whoever signed the clients' certificates; others are not served then.
///     adapters: The only names to export, or None for all.
///     name: The server's name for itself.
///     max_connections: Connections at once; further ones are closed.
///     max_leases: Leases at once; further ones are refused.
///     max_ttl: The longest life of a lease, in seconds.
///     request_timeout: Seconds for a request to arrive, and for a kept connection to be idle.
///     stall_timeout: Seconds that a reader may take nothing.
///
/// Raises:
///     ValueError: An argument makes no sense, or the address is beyond loopback without token and mTLS.
///     PeerError: It cannot listen there (reason "bind").
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct PeerServer {
    core: hotslot_peer::PeerServer,
    exports: Arc<PoolExports<Owned>>,
}

#[pymethods]
impl PeerServer {
    #[new]
    #[pyo3(signature = (weights, *, tier = None, host = "127.0.0.1", port = 0, token = None, certificate = None, key = None,
        client_authority = None, adapters = None, name = "hotslot", max_connections = 128, max_leases = 64, max_ttl = 300.0,
        request_timeout = 10.0, stall_timeout = 10.0))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments: where and to whom a server serves")]
    fn new(
        py: Python<'_>,
        weights: Py<LoraWeights>,
        tier: Option<&Bound<'_, HostTier>>,
        host: &str,
        port: u16,
        token: Option<String>,
        certificate: Option<Vec<u8>>,
        key: Option<Vec<u8>>,
        client_authority: Option<Vec<u8>>,
        adapters: Option<HashSet<String>>,
        name: &str,
        max_connections: usize,
        max_leases: usize,
        max_ttl: f64,
        request_timeout: f64,
        stall_timeout: f64,
    ) -> PyResult<Self> {
        weights.get().open()?;
        let tls = match (both("certificate and key", certificate, key)?, client_authority) {
            (Some((certificate, key)), client_authority) => Some(ServerTls { certificate, key, client_authority }),
            (None, None) => None,
            (None, Some(_)) => {
                return Err(raise(Error::Value {
                    what: "client_authority",
                    found: "no certificate of the server beside it".to_owned(),
                    expected: "certificate and key".to_owned(),
                }));
            }
        };
        let options = ServerOptions {
            host: host.to_owned(),
            port,
            token,
            tls,
            name: name.to_owned(),
            max_connections,
            max_leases,
            max_ttl: seconds("max_ttl", max_ttl)?,
            request_timeout: seconds("request_timeout", request_timeout)?,
            stall_timeout: seconds("stall_timeout", stall_timeout)?,
            ..ServerOptions::default()
        };
        let tier = tier.map(|tier| tier.get().core().clone());
        let exports = Arc::new(PoolExports::new(Owned(weights), tier, adapters));
        let shared = Arc::clone(&exports);
        let core = py.detach(|| hotslot_peer::PeerServer::start(shared, options)).map_err(raise_peer)?;
        Ok(Self { core, exports })
    }

    /// Where it listens: host and port, as a client takes them.
    #[getter]
    fn address(&self) -> String {
        self.core.address().to_string()
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.core.is_closed()
    }

    /// Says which copies of the host tier have which names, in place of what was said before. A resident adapter of that name goes
    /// first; a copy that has left the tier is not exported.
    ///
    /// Args:
    ///     copies: Name -> (cache_id, layout_id, base).
    ///
    /// Raises:
    ///     ValueError: A name or an id is none.
    fn set_copies(&self, copies: BTreeMap<String, (String, String, Option<String>)>) -> PyResult<()> {
        let copies = copies.into_iter().map(|(name, (cache_id, layout_id, base))| {
            hotslot_core::identity::check_adapter_name(&name).map_err(raise)?;
            Ok((name, key_of(&cache_id, &layout_id, base.as_deref())?))
        });
        self.exports.set_copies(copies.collect::<PyResult<_>>()?);
        Ok(())
    }

    /// Says what the extras of resident adapters were worked out from, in place of what was said before. Needed for adapters with such
    /// extras that did not come packed (see `LoraWeights.export_slot`); without it they cannot be leased.
    ///
    /// Args:
    ///     bases: Name -> fingerprint of the base's parameters.
    ///
    /// Raises:
    ///     ValueError: A fingerprint is none.
    fn set_bases(&self, bases: BTreeMap<String, String>) -> PyResult<()> {
        let bases = bases.into_iter().map(|(name, base)| Ok((name, base.parse().map_err(raise)?)));
        self.exports.set_bases(bases.collect::<PyResult<_>>()?);
        Ok(())
    }

    /// Tells readers that they may also use another engine, and what they need for it.
    fn set_engine(&self, name: &str, value: &str) {
        self.core.set_engine(name, value);
    }

    /// Counts of this moment.
    fn stats(&self) -> PeerServerStats {
        let stats = self.core.stats();
        PeerServerStats {
            connections: stats.connections,
            leases: stats.leases,
            leases_granted: stats.leases_granted,
            refused: stats.refused,
            bytes_sent: stats.bytes_sent,
        }
    }

    /// Ends all connections and leases; on return nothing is held any more, and the port is free. Nothing happens the second time.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.core.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("PeerServer({:?})", self.core.address().to_string())
    }
}
