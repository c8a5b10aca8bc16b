//! A server: one thread of its own that serves all connections.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::address::is_loopback;
use crate::background::step_back;
use crate::error::{PeerError, PeerErrorKind, Result};
use crate::exports::Exports;
use crate::guarded::{Deadline, Guarded};
use crate::leases::Leases;
use crate::service::{Never, Service, Token};
use crate::tls::ServerTls;
use crate::wire::random_id;

/// The largest head of a request.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 64;

/// Where and to whom a server serves.
#[derive(Clone)]
pub struct ServerOptions {
    /// The address to listen at. Beyond loopback only with a token or mTLS.
    pub host: String,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// What clients must present as `Authorization: Bearer`.
    pub token: Option<String>,
    /// A certificate, and whether clients need one.
    pub tls: Option<ServerTls>,
    /// The server's name for itself.
    pub name: String,
    /// Connections at once; further ones are closed.
    pub max_connections: usize,
    /// Leases at once; further ones are refused.
    pub max_leases: usize,
    /// The longest life of a lease.
    pub max_ttl: Duration,
    /// How long a request may take to arrive, a TLS handshake to finish, and a kept connection to be idle.
    pub request_timeout: Duration,
    /// How long a reader may take nothing.
    pub stall_timeout: Duration,
    /// How long a lease outlives a transfer that broke.
    pub grace: Duration,
}

impl Default for ServerOptions {
    /// A free port of loopback, no token, no TLS.
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 0,
            token: None,
            tls: None,
            name: "hotslot".to_owned(),
            max_connections: 128,
            max_leases: 64,
            max_ttl: Duration::from_secs(300),
            request_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(10),
            grace: Duration::from_secs(3),
        }
    }
}

/// What a server did and does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServerStats {
    /// Connections now.
    pub connections: usize,
    /// Leases now.
    pub leases: usize,
    /// Leases granted so far.
    pub leases_granted: u64,
    /// Requests refused so far.
    pub refused: u64,
    /// Bytes sent so far, headers among them.
    pub bytes_sent: u64,
}

/// Serves adapters until it is closed or dropped.
pub struct PeerServer {
    address: SocketAddr,
    service: Arc<Service>,
    slots: Arc<Semaphore>,
    max_connections: usize,
    bytes_sent: Arc<AtomicU64>,
    running: Mutex<Option<Running>>,
    /// The process that the thread belongs to: a forked child has the object but not the thread.
    pid: u32,
}

struct Running {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl PeerServer {
    /// Listens and serves from now on.
    ///
    /// # Errors
    /// [`PeerErrorKind::Settings`] for options that make no sense, among them an address beyond loopback without token and mTLS;
    /// [`PeerErrorKind::Bind`] if it cannot listen there.
    pub fn start(exports: Arc<dyn Exports>, options: ServerOptions) -> Result<Self> {
        let shown = format!("{}:{}", options.host, options.port);
        let wrong = |found: String, expected: &str| PeerError::new(PeerErrorKind::Settings, &shown, found, expected);
        if let Some(token) = &options.token
            && (token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return Err(wrong("a token that no header can carry".to_owned(), "visible ASCII characters, at least one"));
        }
        if options.max_connections == 0 || options.max_leases == 0 || options.max_ttl.is_zero() {
            return Err(wrong("a limit of 0".to_owned(), "limits above 0"));
        }
        let tls = options.tls.as_ref().map(|tls| tls.config(&shown)).transpose()?;
        let is_mutual = options.tls.as_ref().is_some_and(|tls| tls.client_authority.is_some());
        let ip = ip_of(&options.host, &shown)?;
        if !is_loopback(ip) && options.token.is_none() && !is_mutual {
            return Err(wrong(
                format!("{ip}, which other machines can reach, and neither a token nor mTLS"),
                "loopback, a token, or TLS with the clients' authority",
            ));
        }
        let bind = |error: &dyn std::fmt::Display| {
            PeerError::new(PeerErrorKind::Bind, &shown, error.to_string(), "an address of this machine and a free port")
        };
        let random = |error: getrandom::Error| bind(&error);
        let listener = listen(SocketAddr::new(ip, options.port)).map_err(|error| bind(&error))?;
        let address = listener.local_addr().map_err(|error| bind(&error))?;
        let service = Arc::new(Service {
            exports,
            leases: Arc::new(Leases::new(options.max_leases, options.grace)),
            token: options.token.as_deref().map(Token::new).transpose().map_err(random)?,
            is_mutual,
            epoch: random_id().map_err(random)?,
            name: options.name,
            engines: Mutex::new(BTreeMap::from([("tcp".to_owned(), address.to_string())])),
            max_ttl: options.max_ttl,
            patience: options.request_timeout,
            num_leases: AtomicU64::new(0),
            num_refused: AtomicU64::new(0),
        });
        let door = Door {
            service: Arc::clone(&service),
            slots: Arc::new(Semaphore::new(options.max_connections.min(Semaphore::MAX_PERMITS))),
            tls,
            request_timeout: options.request_timeout,
            stall_timeout: options.stall_timeout,
            bytes_sent: Arc::default(),
        };
        let (slots, bytes_sent) = (Arc::clone(&door.slots), Arc::clone(&door.bytes_sent));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(2)
            .thread_name("hotslot-peer-work")
            .build()
            .map_err(|error| bind(&error))?;
        let (stop, stopped) = oneshot::channel();
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(|error| bind(&error))?
        };
        let thread = std::thread::Builder::new()
            .name("hotslot-peer".to_owned())
            .spawn(move || {
                step_back();
                runtime.block_on(door.serve(listener, stopped));
            })
            .map_err(|error| bind(&error))?;
        Ok(Self {
            address,
            service,
            max_connections: slots.available_permits(),
            slots,
            bytes_sent,
            running: Mutex::new(Some(Running { stop, thread })),
            pid: std::process::id(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells readers of [`AGENT`](crate::Agent) that they may also use another engine, and what they need for it.
    pub fn set_engine(&self, name: &str, value: &str) {
        let mut engines = self.service.engines.lock().unwrap_or_else(PoisonError::into_inner);
        engines.insert(name.to_owned(), value.to_owned());
    }

    /// Counts of this moment.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        ServerStats {
            connections: self.max_connections.saturating_sub(self.slots.available_permits()),
            leases: self.service.leases.len(),
            leases_granted: self.service.num_leases.load(Relaxed),
            refused: self.service.num_refused.load(Relaxed),
            bytes_sent: self.bytes_sent.load(Relaxed),
        }
    }

    /// Ends all connections and leases; on return nothing is pinned, the port is free and the thread gone.
    ///
    /// Does nothing the second time, and nothing in a forked child.
    pub fn close(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Running { stop, thread }) = running.take() else { return };
        if std::process::id() != self.pid {
            // The thread is the parent's.
            std::mem::forget((stop, thread));
            return;
        }
        // Both fail only if the thread ended by a panic: then there is nothing left to stop.
        let _ = stop.send(());
        let _ = thread.join();
        self.service.leases.clear();
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.close();
    }
}

fn ip_of(host: &str, shown: &str) -> Result<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if let Ok(ip) = bare.parse() {
        return Ok(ip);
    }
    let named = |found: String| {
        PeerError::new(PeerErrorKind::Settings, shown, found, "an IP address of this machine, or a name that has one")
    };
    let mut found = (host, 0).to_socket_addrs().map_err(|error| named(error.to_string()))?;
    found.next().map(|address| address.ip()).ok_or_else(|| named(format!("no address of {host:?}")))
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // So that a server can be started anew while connections of the last one linger.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(256)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Where connections come in.
struct Door {
    service: Arc<Service>,
    slots: Arc<Semaphore>,
    tls: Option<Arc<ServerConfig>>,
    request_timeout: Duration,
    stall_timeout: Duration,
    bytes_sent: Arc<AtomicU64>,
}

impl Door {
    async fn serve(self, listener: tokio::net::TcpListener, mut stopped: oneshot::Receiver<()>) {
        let door = Arc::new(self);
        let leases = Arc::clone(&door.service.leases);
        let expiring = leases.keep_expiring();
        tokio::pin!(expiring);
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                _ = &mut stopped => break,
                () = &mut expiring => {}
                Some(_) = connections.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        // Beyond the limit a connection is closed at once, so that its peer asks another one.
                        if let Ok(slot) = Arc::clone(&door.slots).try_acquire_owned() {
                            let door = Arc::clone(&door);
                            connections.spawn(async move {
                                door.admit(stream).await;
                                drop(slot);
                            });
                        }
                    }
                    // Out of descriptors, or the connection is gone already: others may fare better in a moment.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                },
            }
        }
        drop(listener);
        connections.shutdown().await;
        leases.clear();
    }

    async fn admit(&self, stream: TcpStream) {
        // Only a hint to the kernel.
        let _ = stream.set_nodelay(true);
        match &self.tls {
            None => self.converse(stream).await,
            Some(config) => {
                let handshake = TlsAcceptor::from(Arc::clone(config)).accept(stream);
                if let Ok(Ok(stream)) = tokio::time::timeout(self.request_timeout, handshake).await {
                    self.converse(stream).await;
                }
            }
        }
    }

    async fn converse<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(&self, stream: S) {
        let deadline = Deadline::default();
        let guarded = Guarded::new(stream, deadline.clone(), self.stall_timeout, Arc::clone(&self.bytes_sent));
        let answer = service_fn(|request| {
            let (service, deadline) = (Arc::clone(&self.service), deadline.clone());
            async move { Ok::<_, Never>(service.answer(request, &deadline).await) }
        });
        // An error is the peer's: it vanished, sent no HTTP, or was too slow. It has no one else to be told.
        let _ = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.request_timeout)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD)
            .half_close(false)
            .serve_connection(TokioIo::new(guarded), answer)
            .await;
    }
}
