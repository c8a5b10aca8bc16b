//! A client: what another process exports, and its bytes into memory of the caller's.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use http::{HeaderValue, Method, Request, StatusCode, header};
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use ureq_proto::BodyMode;

use crate::address::PeerAddress;
use crate::background::step_back;
use crate::clock::Clock;
use crate::connection::{Answer, Connection, TlsTarget};
use crate::error::{PeerError, PeerErrorKind, Result, excerpt};
use crate::facts::{self, Facts};
use crate::hashing::{HashQueue, Wrong};
use crate::progress::Progress;
use crate::receive::Landing;
use crate::tls::ClientTls;
use crate::verify::{Checker, Verify};
use crate::wire::{self, Agent, ErrorReply, LeaseReply, LeaseRequest, Manifest, ReleaseReply, ReleaseRequest, is_id};

/// Below this a thread costs more than it saves.
const WORTH_A_THREAD: u64 = 512 << 10;
/// The longest time that a peer is given to hash an adapter.
const MAX_HASHING: Duration = Duration::from_secs(60);
/// The largest body of an answer that says no.
const MAX_ERROR: usize = 4 << 10;

/// How a client connects and how long it waits.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// What the peer wants as bearer token.
    pub token: Option<String>,
    /// Whom to trust; without it the connection is plain TCP.
    pub tls: Option<ClientTls>,
    /// For a connection.
    pub connect_timeout: Duration,
    /// For a whole exchange that is no transfer.
    pub exchange_timeout: Duration,
    /// For a whole transfer, beside what its bytes take at `min_rate`.
    pub transfer_timeout: Duration,
    /// Bytes a second that a transfer must reach; 0 for no such demand.
    pub min_rate: u64,
    /// For the next byte of a transfer.
    pub silence: Duration,
    /// How much is checked.
    pub verify: Verify,
    /// The largest manifest.
    pub max_manifest: usize,
    /// The largest header of an adapter.
    pub max_header: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            token: None,
            tls: None,
            connect_timeout: Duration::from_secs(2),
            exchange_timeout: Duration::from_secs(5),
            transfer_timeout: Duration::from_secs(5),
            min_rate: 50_000_000,
            silence: Duration::from_secs(5),
            verify: Verify::Full,
            max_manifest: 16 << 20,
            max_header: 32 << 20,
        }
    }
}

/// An adapter that a peer keeps as it is for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The peer's number for it, which nobody else knows.
    pub id: String,
    /// The adapter's name there.
    pub adapter: String,
    /// Which load it is there.
    pub generation: u64,
    /// How long from its grant.
    pub ttl: Duration,
    /// Address of the bytes in the peer's memory, if an engine can read them there.
    pub base: Option<u64>,
    /// The header, letter for letter.
    pub header: String,
    /// What it says of the adapter as a whole: an object of its `cache_id`, `base`, `config` and `extras`.
    pub summary: String,
    /// What a transfer needs of the header.
    pub facts: Facts,
}

/// What a transfer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fetched {
    /// Bytes received and verified.
    pub nbytes: u64,
    /// Time from the first request to the last byte's verification.
    pub elapsed: Duration,
    /// How often the connection broke and was taken up again.
    pub resumes: u64,
}

/// Reads from one peer. Can be shared between threads; keeps one connection for the next exchange.
pub struct PeerClient {
    address: PeerAddress,
    peer: String,
    options: ClientOptions,
    tls: Option<TlsTarget>,
    authorization: Option<HeaderValue>,
    host: HeaderValue,
    kept: Mutex<Option<Connection>>,
    /// The last manifest with its `ETag`.
    known: Mutex<Option<(HeaderValue, Manifest)>>,
}

impl fmt::Debug for PeerClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerClient").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// One request of this protocol.
struct Ask<'a> {
    method: Method,
    path: &'a str,
    header: Option<(header::HeaderName, HeaderValue)>,
    body: Vec<u8>,
}

impl PeerClient {
    /// A client for the peer at `address`. Connects to nothing yet.
    ///
    /// # Errors
    /// [`PeerErrorKind::Address`] for what is no address (see [`PeerAddress::parse`]), [`PeerErrorKind::Settings`] for a token or
    /// certificates that make no sense.
    pub fn new(address: &str, options: ClientOptions) -> Result<Self> {
        let address = PeerAddress::parse(address)?;
        let peer = address.to_string();
        let wrong = |found: &str, expected: &str| PeerError::new(PeerErrorKind::Settings, &peer, found, expected);
        let authorization = match &options.token {
            None => None,
            Some(token) if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                return Err(wrong("a token that no header can carry", "visible ASCII characters, at least one"));
            }
            Some(token) => {
                let value = HeaderValue::try_from(format!("Bearer {token}"));
                let mut value =
                    value.map_err(|_| wrong("a token that no header can carry", "visible ASCII characters"))?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let tls = match &options.tls {
            None => None,
            Some(tls) => {
                let name = tls.server_name.clone().unwrap_or_else(|| address.host());
                let name = ServerName::try_from(name).map_err(|error| wrong(&error.to_string(), "a server's name"))?;
                Some(TlsTarget { config: tls.config(&peer)?, name })
            }
        };
        let host = match address.host().parse::<IpAddr>() {
            Ok(IpAddr::V6(ip)) => format!("[{ip}]:{}", address.port()),
            _ => format!("{}:{}", address.host(), address.port()),
        };
        let host = HeaderValue::try_from(host).map_err(|_| wrong("a host that no header can carry", "a host name"))?;
        Ok(Self { address, peer, options, tls, authorization, host, kept: Mutex::default(), known: Mutex::default() })
    }

    /// The peer's address.
    #[must_use]
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// What the peer exports.
    ///
    /// # Errors
    /// [`PeerError`] of any kind but `Cancelled` and `Gone`.
    pub fn manifest(&self) -> Result<Manifest> {
        let mut clock = self.clock(self.options.exchange_timeout, None);
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let header = known.as_ref().map(|(etag, _)| (header::IF_NONE_MATCH, etag.clone()));
        let ask = Ask { method: Method::GET, path: wire::MANIFEST, header, body: Vec::new() };
        let (mut connection, mut answer) = self.ask(&ask, &mut clock)?;
        if let (StatusCode::NOT_MODIFIED, Some((_, manifest))) = (answer.status, known) {
            self.keep(connection, &answer);
            return Ok(manifest);
        }
        let manifest: Manifest = self.json(&mut connection, &mut answer, self.options.max_manifest, &mut clock)?;
        self.keep(connection, &answer);
        if manifest.format != 1 {
            let found = format!("a manifest of format {}", manifest.format);
            return Err(self.error(PeerErrorKind::Unsupported, found, "format 1"));
        }
        for adapter in &manifest.adapters {
            self.check_name(&adapter.adapter)?;
        }
        if let Some(etag) = answer.headers.get(header::ETAG) {
            *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some((etag.clone(), manifest.clone()));
        }
        Ok(manifest)
    }

    /// How the peer can be read from.
    ///
    /// # Errors
    /// As [`manifest`](Self::manifest).
    pub fn agent(&self) -> Result<Agent> {
        let mut clock = self.clock(self.options.exchange_timeout, None);
        let ask = Ask { method: Method::GET, path: wire::AGENT, header: None, body: Vec::new() };
        let (mut connection, mut answer) = self.ask(&ask, &mut clock)?;
        let agent = self.json(&mut connection, &mut answer, MAX_ERROR << 4, &mut clock)?;
        self.keep(connection, &answer);
        Ok(agent)
    }

    /// Lets the peer keep an adapter as it is for `ttl`, or for less if the peer says so.
    ///
    /// # Errors
    /// [`PeerErrorKind::Gone`] if it is not there, or not in that generation; else as [`manifest`](Self::manifest).
    pub fn lease(&self, adapter: &str, generation: Option<u64>, ttl: Duration) -> Result<Lease> {
        hotslot_core::identity::check_adapter_name(adapter)
            .map_err(|error| self.error(PeerErrorKind::Settings, error.to_string(), "an adapter's name"))?;
        let request = LeaseRequest { adapter: adapter.to_owned(), generation, ttl: Some(ttl.as_secs_f64()) };
        // The first lease of an adapter has the peer hash it, in silence.
        let patience = self.options.exchange_timeout.saturating_add(self.time_to_hash(adapter));
        let mut clock = Clock::new(&self.peer, patience, patience, None);
        let reply: LeaseReply = self.post(wire::LEASE, &request, self.options.max_header, &mut clock)?;
        let corrupt = |found: String| self.error(PeerErrorKind::Corrupt, found, "a lease of this adapter");
        if !is_id(&reply.lease) {
            return Err(corrupt("a lease without a number".to_owned()));
        }
        let facts = Facts::parse(reply.header.get()).map_err(corrupt);
        let summary = facts::summary(reply.header.get()).map_err(corrupt);
        let ttl = Duration::try_from_secs_f64(reply.expires_in).map_err(|error| corrupt(error.to_string()));
        let lease = Lease {
            id: reply.lease,
            adapter: adapter.to_owned(),
            generation: reply.generation,
            ttl: ttl?,
            base: reply.base,
            header: reply.header.get().to_owned(),
            facts: facts?,
            summary: summary?,
        };
        match generation {
            Some(asked) if asked != lease.generation => {
                Err(corrupt(format!("generation {} where {asked} was asked for", lease.generation)))
            }
            _ => Ok(lease),
        }
    }

    /// Receives a lease's bytes into `destination`, and returns when all of them have been verified.
    ///
    /// They go from the socket to their place; a second thread hashes what has come meanwhile. A connection that breaks is taken up
    /// again once, where it broke. After an error the destination holds anything.
    ///
    /// # Errors
    /// [`PeerErrorKind::Settings`] if the destination has another length, [`PeerErrorKind::Corrupt`] if a checksum does not agree,
    /// [`PeerErrorKind::Cancelled`] after [`Progress::cancel`], [`PeerErrorKind::Timeout`] after the transfer's deadline (the
    /// options' `transfer_timeout` and the time of the bytes at `min_rate`) or silence, and the others.
    pub fn fetch(&self, lease: &Lease, destination: &mut [u8], progress: &Progress) -> Result<Fetched> {
        let nbytes = lease.facts.nbytes;
        if destination.len() as u64 != nbytes {
            let found = format!("a destination of {} bytes", destination.len());
            return Err(self.error(PeerErrorKind::Settings, found, format!("{nbytes}, as the header says")));
        }
        let started = Instant::now();
        progress.begin(nbytes);
        let patience = self.options.transfer_timeout.saturating_add(self.time_of(nbytes));
        let mut clock = self.clock(patience, Some(progress));
        let mut landing = Landing::new(destination);
        let is_worth_it = nbytes >= WORTH_A_THREAD && thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        if is_worth_it {
            self.receive_and_hash(lease, &mut landing, progress, &mut clock)?;
        } else {
            let mut checker = Checker::new(&lease.facts, self.options.verify);
            let mut outcome = Ok(());
            let received = self.receive(lease, &mut landing, progress, &mut clock, |piece| {
                outcome = checker.update(piece);
                outcome.is_ok()
            });
            outcome.map_err(|found| self.mismatch(found))?;
            received?;
            checker.finish().map_err(|found| self.mismatch(found))?;
        }
        progress.set_verified(nbytes);
        Ok(Fetched { nbytes, elapsed: started.elapsed(), resumes: progress.resumes() })
    }

    /// Receives on this thread, hashes on another; what that one has not got to at the end, this one hashes.
    fn receive_and_hash(
        &self,
        lease: &Lease,
        landing: &mut Landing<'_>,
        progress: &Progress,
        clock: &mut Clock<'_>,
    ) -> Result<()> {
        let queue = HashQueue::new(Checker::new(&lease.facts, self.options.verify), progress);
        let received = thread::scope(|scope| {
            let hashing = thread::Builder::new().name("hotslot-verify".to_owned());
            let hashing = hashing.spawn_scoped(scope, || {
                step_back();
                queue.work();
            });
            let received = self.receive(lease, landing, progress, clock, |piece| queue.push(piece));
            queue.close();
            queue.hash_waiting();
            // If there was no room for one more thread, this one has done all.
            drop(hashing);
            received
        });
        match queue.finish() {
            // It says more than that the transfer stopped there.
            Err(Wrong::Mismatch(found)) => Err(self.mismatch(found)),
            Err(Wrong::Incomplete(found)) => {
                received.and_then(|()| clock.check("verifying an adapter")).and(Err(self.mismatch(found)))
            }
            Ok(()) => received,
        }
    }

    /// Receives until the landing is complete or `deliver` wants no more, over one connection or, if that breaks, a second.
    fn receive<'d>(
        &self,
        lease: &Lease,
        landing: &mut Landing<'d>,
        progress: &Progress,
        clock: &mut Clock<'_>,
        mut deliver: impl FnMut(&'d [u8]) -> bool,
    ) -> Result<()> {
        let first = self.stream(lease, landing, progress, clock, &mut deliver);
        match first {
            Err(error) if error.kind == PeerErrorKind::Disconnected && landing.received() > 0 => {
                progress.count_resume();
                let again = self.stream(lease, landing, progress, clock, &mut deliver);
                again.map_err(|again| {
                    let (received, nbytes) = (landing.received(), lease.facts.nbytes);
                    PeerError { found: format!("{}, after {received} of {nbytes} bytes", again.found), ..again }
                })
            }
            other => other,
        }
    }

    /// Receives over one connection from where the landing is.
    fn stream<'d>(
        &self,
        lease: &Lease,
        landing: &mut Landing<'d>,
        progress: &Progress,
        clock: &mut Clock<'_>,
        deliver: &mut impl FnMut(&'d [u8]) -> bool,
    ) -> Result<()> {
        let (start, nbytes) = (landing.received(), lease.facts.nbytes);
        let path = format!("{}{}", wire::BLOB, lease.id);
        let header = match start {
            0 => None,
            start => {
                let value = HeaderValue::try_from(format!("bytes={start}-"));
                value.ok().map(|value| (header::RANGE, value))
            }
        };
        let ask = Ask { method: Method::GET, path: &path, header, body: Vec::new() };
        let (mut connection, mut answer) = self.ask(&ask, clock)?;
        self.check_status(&mut connection, &mut answer, clock)?;
        let expected = if start == 0 { StatusCode::OK } else { StatusCode::PARTIAL_CONTENT };
        let wanted = format!("bytes {start}-{}/{nbytes}", nbytes.saturating_sub(1));
        let is_range = start == 0 || answer.headers.get(header::CONTENT_RANGE).is_some_and(|range| range == &*wanted);
        if answer.status != expected || !is_range {
            let found = format!("status {} to a request for bytes {start} to {nbytes}", answer.status);
            return Err(self.error(PeerErrorKind::Corrupt, found, format!("status {expected} and those bytes")));
        }
        if answer.headers.contains_key(header::CONTENT_ENCODING) {
            return Err(self.error(PeerErrorKind::Unsupported, "an encoded body", "the bytes as they are"));
        }
        match answer.body_mode() {
            BodyMode::LengthDelimited(len) if len == nbytes - start => {}
            BodyMode::LengthDelimited(len) => {
                let found = format!("a body of {len} bytes");
                return Err(self.error(PeerErrorKind::Corrupt, found, format!("{} bytes", nbytes - start)));
            }
            BodyMode::NoBody if nbytes == start => {}
            _ => return Err(self.error(PeerErrorKind::Unsupported, "a body without a length", "a Content-Length")),
        }
        while !landing.is_complete() {
            let n = connection.read(landing.room(), clock)?;
            let piece = landing.fill(n);
            progress.set_received(landing.received());
            if piece.is_some_and(|piece| !deliver(piece)) {
                return Err(self.mismatch("bytes that do not verify".to_owned()));
            }
        }
        self.keep(connection, &answer);
        Ok(())
    }

    /// Tells the peer that a lease is no longer needed; whether it still stood.
    ///
    /// # Errors
    /// As [`manifest`](Self::manifest). The lease then ends by itself, at its time.
    pub fn release(&self, lease: &Lease) -> Result<bool> {
        let request = ReleaseRequest { lease: lease.id.clone() };
        let mut clock = self.clock(self.options.exchange_timeout, None);
        let reply: ReleaseReply = self.post(wire::RELEASE, &request, MAX_ERROR, &mut clock)?;
        Ok(reply.released)
    }

    fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        message: &impl serde::Serialize,
        limit: usize,
        clock: &mut Clock<'_>,
    ) -> Result<T> {
        let body = serde_json::to_vec(message)
            .map_err(|error| self.error(PeerErrorKind::Settings, error.to_string(), "a message"))?;
        let ask = Ask { method: Method::POST, path, header: None, body };
        let (mut connection, mut answer) = self.ask(&ask, clock)?;
        let reply = self.json(&mut connection, &mut answer, limit, clock)?;
        self.keep(connection, &answer);
        Ok(reply)
    }

    /// Sends a request over the kept connection, or a new one if there is none or the peer has closed it meanwhile.
    fn ask(&self, ask: &Ask<'_>, clock: &mut Clock<'_>) -> Result<(Connection, Answer)> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut connection) = kept.filter(|connection| !connection.is_stale()) {
            match connection.ask(self.request(ask)?, &ask.body, clock) {
                Ok(answer) => return Ok((connection, answer)),
                // It may have been closed just now; at worst the peer keeps a lease that ends by itself.
                Err(error) if error.kind == PeerErrorKind::Disconnected => {}
                Err(error) => return Err(error),
            }
        }
        let mut connection = Connection::open(&self.address, self.tls.as_ref(), self.options.connect_timeout, clock)?;
        let answer = connection.ask(self.request(ask)?, &ask.body, clock)?;
        Ok((connection, answer))
    }

    fn request(&self, ask: &Ask<'_>) -> Result<Request<()>> {
        let mut request = Request::builder().method(&ask.method).uri(ask.path).header(header::HOST, &self.host);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        if let Some((name, value)) = &ask.header {
            request = request.header(name, value);
        }
        if ask.method == Method::POST {
            request =
                request.header(header::CONTENT_TYPE, "application/json").header(header::CONTENT_LENGTH, ask.body.len());
        }
        request.body(()).map_err(|error| self.error(PeerErrorKind::Settings, error.to_string(), "a request"))
    }

    fn json<T: DeserializeOwned>(
        &self,
        connection: &mut Connection,
        answer: &mut Answer,
        limit: usize,
        clock: &mut Clock<'_>,
    ) -> Result<T> {
        self.check_status(connection, answer, clock)?;
        let text = connection.text(answer, limit, clock)?;
        serde_json::from_slice(&text).map_err(|error| {
            let found = format!("JSON that is none of this protocol's: {}", excerpt(&error.to_string()));
            self.error(PeerErrorKind::Corrupt, found, "an answer of a hotslot peer")
        })
    }

    /// Turns an answer that says no into an error with the peer's own words.
    fn check_status(&self, connection: &mut Connection, answer: &mut Answer, clock: &mut Clock<'_>) -> Result<()> {
        let status = answer.status;
        if status.is_success() {
            return Ok(());
        }
        let kind = match status.as_u16() {
            404 | 410 => PeerErrorKind::Gone,
            401 | 403 | 429 | 500..=599 => PeerErrorKind::Refused,
            408 => PeerErrorKind::Timeout,
            416 => PeerErrorKind::Corrupt,
            _ => PeerErrorKind::Unsupported,
        };
        // Whatever its body is, or if there is none: the status is what counts.
        let said = connection.text(answer, MAX_ERROR, clock).unwrap_or_default();
        let said = serde_json::from_slice::<ErrorReply>(&said).map(|reply| excerpt(&reply.error)).unwrap_or_default();
        let found = if said.is_empty() { format!("status {status}") } else { format!("status {status}: {said}") };
        Err(self.error(kind, found, "what was asked for"))
    }

    /// Keeps a connection whose answer was read to its end.
    fn keep(&self, connection: Connection, answer: &Answer) {
        if answer.keeps {
            *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
        }
    }

    /// What a peer may need to hash one of its adapters, if its size is known; not for ever, whatever size it claims.
    fn time_to_hash(&self, adapter: &str) -> Duration {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let listed = known.iter().flat_map(|(_, manifest)| &manifest.adapters).find(|listed| listed.adapter == adapter);
        listed.map_or(Duration::ZERO, |listed| self.time_of(listed.nbytes).min(MAX_HASHING))
    }

    /// What bytes take at the lowest rate that is borne.
    fn time_of(&self, nbytes: u64) -> Duration {
        match self.options.min_rate {
            // No demand: silence alone ends a transfer.
            0 => Duration::MAX,
            rate => Duration::try_from_secs_f64(nbytes as f64 / rate as f64).unwrap_or(Duration::MAX),
        }
    }

    fn clock<'a>(&'a self, patience: Duration, progress: Option<&'a Progress>) -> Clock<'a> {
        Clock::new(&self.peer, patience, self.options.silence, progress)
    }

    fn check_name(&self, name: &str) -> Result<()> {
        hotslot_core::identity::check_adapter_name(name)
            .map_err(|_| self.error(PeerErrorKind::Corrupt, format!("an adapter named {:?}", excerpt(name)), "a name"))
    }

    fn mismatch(&self, found: String) -> PeerError {
        self.error(PeerErrorKind::Corrupt, found, "the bytes that the header announces")
    }

    fn error(&self, kind: PeerErrorKind, found: impl Into<String>, expected: impl Into<String>) -> PeerError {
        PeerError::new(kind, &self.peer, found, expected)
    }
}
