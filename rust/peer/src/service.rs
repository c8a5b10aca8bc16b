//! The requests that a server answers. Everything else is refused, before anything is done.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::blob::{Blob, ReplyBody};
use crate::error::excerpt;
use crate::exports::{Exports, LeaseRefusal};
use crate::guarded::Deadline;
use crate::leases::Leases;
use crate::range::{self, Asked};
use crate::wire::{
    self, Agent, ErrorReply, LeaseReply, LeaseRequest, Manifest, ReleaseReply, ReleaseRequest, is_id, random_id,
};

/// The largest request body that is read.
const MAX_REQUEST: usize = 16 << 10;
const DEFAULT_TTL: f64 = 60.0;

type Reply = Response<ReplyBody>;

/// What all connections of one server share.
pub(crate) struct Service {
    pub(crate) exports: Arc<dyn Exports>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) token: Option<Token>,
    /// Whether clients have shown a certificate before they get here.
    pub(crate) is_mutual: bool,
    pub(crate) epoch: String,
    pub(crate) name: String,
    pub(crate) engines: Mutex<BTreeMap<String, String>>,
    pub(crate) max_ttl: Duration,
    /// For a request's body, and for an answer that is no blob.
    pub(crate) patience: Duration,
    pub(crate) num_leases: AtomicU64,
    pub(crate) num_refused: AtomicU64,
}

/// A bearer token, kept as a digest under a random key so that comparing takes the same time whatever it is compared with.
pub(crate) struct Token {
    key: [u8; 32],
    digest: blake3::Hash,
}

impl Token {
    pub(crate) fn new(token: &str) -> Result<Self, getrandom::Error> {
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        Ok(Self { key, digest: blake3::keyed_hash(&key, token.as_bytes()) })
    }

    fn is_in(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        let (scheme, token) = value.as_bytes().split_at(value.len().min("Bearer ".len()));
        // `blake3::Hash` compares in constant time.
        scheme.eq_ignore_ascii_case(b"Bearer ") && blake3::keyed_hash(&self.key, token) == self.digest
    }
}

/// A request that is answered by an error.
struct Refusal {
    status: StatusCode,
    message: String,
    header: Option<(HeaderName, String)>,
}

impl Refusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), header: None }
    }

    fn with(self, name: HeaderName, value: impl Into<String>) -> Self {
        Self { header: Some((name, value.into())), ..self }
    }

    /// A failure of this process's own.
    fn failure(error: &dyn std::fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }

    fn full() -> Self {
        Self::unavailable("all leases of this server are taken; expected one to end")
    }

    fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, reason).with(header::RETRY_AFTER, "1")
    }

    /// Ends the connection as well, whose request was not read to its end.
    fn closing(self) -> Self {
        self.with(header::CONNECTION, "close")
    }

    fn into_reply(self) -> Reply {
        let body = serde_json::to_vec(&ErrorReply { error: self.message }).unwrap_or_default();
        let mut reply = text(self.status, body.into());
        if let Some((name, value)) = self.header {
            insert(reply.headers_mut(), name, &value);
        }
        reply
    }
}

impl Service {
    /// Answers one request; `deadline` is that of the connection it came by.
    pub(crate) async fn answer(&self, request: Request<Incoming>, deadline: &Deadline) -> Reply {
        deadline.set(Instant::now() + 2 * self.patience);
        let answered = match self.admit(request.headers()) {
            Ok(()) => self.route(request, deadline).await,
            Err(refusal) => Err(refusal),
        };
        answered.unwrap_or_else(|refusal| {
            self.num_refused.fetch_add(1, Relaxed);
            refusal.into_reply()
        })
    }

    /// Whether who asks may ask anything at all.
    fn admit(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        if let Some(token) = &self.token
            && !token.is_in(headers)
        {
            let refusal = Refusal::new(StatusCode::UNAUTHORIZED, "expected this server's bearer token");
            return Err(refusal.with(header::WWW_AUTHENTICATE, "Bearer"));
        }
        // A web page that the user of this machine has open can make a browser send requests here, and can let a name of its own
        // point here to read the answers.
        let from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
        let is_open = self.token.is_none() && !self.is_mutual;
        if from_page || (is_open && !headers.get(header::HOST).is_some_and(|host| is_address(host.as_bytes()))) {
            return Err(Refusal::new(StatusCode::FORBIDDEN, "expected a peer that asks by address, not a web page"));
        }
        Ok(())
    }

    async fn route(&self, request: Request<Incoming>, deadline: &Deadline) -> Result<Reply, Refusal> {
        let path = request.uri().path().to_owned();
        let blob = path.strip_prefix(wire::BLOB);
        let expected = match path.as_str() {
            wire::MANIFEST | wire::AGENT => Method::GET,
            wire::LEASE | wire::RELEASE => Method::POST,
            _ if blob.is_some() => Method::GET,
            _ => return Err(Refusal::new(StatusCode::NOT_FOUND, "expected a path of /v1/peer")),
        };
        if request.method() != expected {
            let refusal = Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("expected {expected}"));
            return Err(refusal.with(header::ALLOW, expected.as_str()));
        }
        match path.as_str() {
            wire::MANIFEST => self.manifest(request.headers()).await,
            wire::AGENT => self.agent(),
            wire::LEASE => self.lease(request).await,
            wire::RELEASE => self.release(request).await,
            _ => self.blob(blob.unwrap_or_default(), request.headers(), deadline),
        }
    }

    async fn manifest(&self, headers: &HeaderMap) -> Result<Reply, Refusal> {
        let exports = Arc::clone(&self.exports);
        let adapters = elsewhere(move || exports.manifest()).await?;
        let body = to_json(&Manifest { format: 1, epoch: self.epoch.clone(), adapters })?;
        let etag = format!("\"{}\"", &blake3::hash(&body).to_hex()[..32]);
        let is_known = headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == etag.as_bytes());
        let (status, body) = if is_known { (StatusCode::NOT_MODIFIED, Bytes::new()) } else { (StatusCode::OK, body) };
        let mut reply = text(status, body);
        insert(reply.headers_mut(), header::ETAG, &etag);
        Ok(reply)
    }

    fn agent(&self) -> Result<Reply, Refusal> {
        let engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        json(&Agent { name: self.name.clone(), engines })
    }

    async fn lease(&self, request: Request<Incoming>) -> Result<Reply, Refusal> {
        let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, message);
        let asked: LeaseRequest = self.body(request).await?;
        hotslot_core::identity::check_adapter_name(&asked.adapter).map_err(|wrong| bad(wrong.to_string()))?;
        let ttl = asked.ttl.unwrap_or(DEFAULT_TTL);
        if !ttl.is_finite() || ttl <= 0.0 {
            return Err(bad(format!("found a ttl of {ttl}; expected seconds above 0")));
        }
        let ttl = Duration::from_secs_f64(ttl.min(self.max_ttl.as_secs_f64()));
        if self.leases.is_full() {
            return Err(Refusal::full());
        }
        let exports = Arc::clone(&self.exports);
        let leased = elsewhere(move || exports.lease(&asked.adapter, asked.generation).map_err(|why| (why, asked)))
            .await?
            .map_err(|(why, asked)| refuse(why, &asked))?;
        let header =
            RawValue::from_string(leased.header_json().to_owned()).map_err(|wrong| Refusal::failure(&wrong))?;
        let has_engines = self.engines.lock().unwrap_or_else(PoisonError::into_inner).len() > 1;
        let lease = random_id().map_err(|none| Refusal::failure(&none))?;
        let reply = json(&LeaseReply {
            lease: lease.clone(),
            generation: leased.generation(),
            expires_in: ttl.as_secs_f64(),
            // An address of this process is nobody's business who cannot read there.
            base: leased.base().filter(|_| has_engines),
            header,
        })?;
        self.leases.insert(lease, leased, ttl).map_err(|_| Refusal::full())?;
        self.num_leases.fetch_add(1, Relaxed);
        Ok(reply)
    }

    async fn release(&self, request: Request<Incoming>) -> Result<Reply, Refusal> {
        let asked: ReleaseRequest = self.body(request).await?;
        json(&ReleaseReply { released: is_id(&asked.lease) && self.leases.release(&asked.lease) })
    }

    fn blob(&self, id: &str, headers: &HeaderMap, deadline: &Deadline) -> Result<Reply, Refusal> {
        let gone = || Refusal::new(StatusCode::GONE, "found no such lease; expected one that has not ended");
        let mut reader = Some(id).filter(|id| is_id(id)).and_then(|id| self.leases.open(id)).ok_or_else(gone)?;
        let nbytes = reader.leased.nbytes();
        let asked = headers.get(header::RANGE).map(|value| range::parse(value.to_str().unwrap_or(""), nbytes));
        let (status, range) = match asked {
            None => (StatusCode::OK, 0..nbytes),
            Some(Asked::Part(range)) => (StatusCode::PARTIAL_CONTENT, range),
            Some(bad) => {
                reader.set_complete();
                let (status, expected) = match bad {
                    Asked::Malformed => (StatusCode::BAD_REQUEST, "expected a range as in bytes=0-99"),
                    _ => (StatusCode::RANGE_NOT_SATISFIABLE, "expected one range of bytes that exist"),
                };
                return Err(Refusal::new(status, expected).with(header::CONTENT_RANGE, format!("bytes */{nbytes}")));
            }
        };
        if range.is_empty() {
            reader.set_complete();
        }
        deadline.set(reader.expires);
        let mut reply = Response::new(ReplyBody::Blob(Blob::new(reader, range.clone())));
        *reply.status_mut() = status;
        insert(reply.headers_mut(), header::CONTENT_TYPE, "application/octet-stream");
        insert(reply.headers_mut(), header::ACCEPT_RANGES, "bytes");
        if status == StatusCode::PARTIAL_CONTENT {
            let value = format!("bytes {}-{}/{nbytes}", range.start, range.end - 1);
            insert(reply.headers_mut(), header::CONTENT_RANGE, &value);
        }
        Ok(reply)
    }

    /// Reads a request's body: bounded in size and time.
    async fn body<T: DeserializeOwned>(&self, request: Request<Incoming>) -> Result<T, Refusal> {
        let body = Limited::new(request.into_body(), MAX_REQUEST).collect();
        let body = match tokio::time::timeout(self.patience, body).await {
            Err(_) => {
                return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "expected the body sooner").closing());
            }
            Ok(Err(wrong)) if wrong.is::<http_body_util::LengthLimitError>() => {
                let expected = format!("expected a body of at most {MAX_REQUEST} bytes");
                return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, expected).closing());
            }
            Ok(Err(wrong)) => {
                return Err(Refusal::new(StatusCode::BAD_REQUEST, excerpt(&wrong.to_string())).closing());
            }
            Ok(Ok(body)) => body.to_bytes(),
        };
        serde_json::from_slice(&body)
            .map_err(|wrong| Refusal::new(StatusCode::BAD_REQUEST, excerpt(&wrong.to_string())))
    }
}

/// Runs what may wait for locks, or hash, off the thread that serves the connections.
async fn elsewhere<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    // Fails only if the work panicked, or the server closes.
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| Refusal::failure(&"the exporting process failed; see its messages"))
}

fn refuse(why: LeaseRefusal, asked: &LeaseRequest) -> Refusal {
    let name = &asked.adapter;
    match why {
        LeaseRefusal::Unknown => Refusal::new(StatusCode::NOT_FOUND, format!("no adapter named {name:?} is exported")),
        LeaseRefusal::Changed => {
            let generation = asked.generation.unwrap_or(0);
            Refusal::new(StatusCode::GONE, format!("adapter {name:?} has no generation {generation} any more"))
        }
        LeaseRefusal::Unavailable(reason) => Refusal::unavailable(reason),
    }
}

fn json(message: &impl Serialize) -> Result<Reply, Refusal> {
    Ok(text(StatusCode::OK, to_json(message)?))
}

fn to_json(message: &impl Serialize) -> Result<Bytes, Refusal> {
    serde_json::to_vec(message).map(Bytes::from).map_err(|wrong| Refusal::failure(&wrong))
}

fn text(status: StatusCode, body: Bytes) -> Reply {
    let mut reply = Response::new(ReplyBody::Text(Some(body).filter(|body| !body.is_empty())));
    *reply.status_mut() = status;
    insert(reply.headers_mut(), header::CONTENT_TYPE, "application/json");
    reply
}

/// Sets a header of text of this crate's own, which has no forbidden characters.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = http::HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Whether a `Host` is an address or this machine's name for itself, and so no name that a page could have chosen.
fn is_address(host: &[u8]) -> bool {
    let host = std::str::from_utf8(host).unwrap_or("");
    let without_port = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    };
    let bare = without_port.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(without_port);
    bare.parse::<IpAddr>().is_ok() || bare.eq_ignore_ascii_case("localhost")
}

/// A service never fails; hyper wants a type for it.
pub(crate) type Never = io::Error;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_a_page_could_choose_is_no_address() {
        for host in ["127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:80", "localhost:9", "LOCALHOST", "10.0.0.7:1"] {
            assert!(is_address(host.as_bytes()), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "evil.example:80",
            "localhost.evil.example:80",
            "127.0.0.1.nip.io:80",
            "[",
            "\u{fe}",
        ] {
            assert!(!is_address(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        let token = Token::new("sesame").unwrap();
        let is_in = |value: &str| {
            let mut headers = HeaderMap::new();
            insert(&mut headers, header::AUTHORIZATION, value);
            token.is_in(&headers)
        };
        assert!(is_in("Bearer sesame") && is_in("bearer sesame"));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer sesam",
            "Bearer sesame ",
            "Bearer  sesame",
            "Basic sesame",
            "sesame",
            "Bearer Sesame",
        ] {
            assert!(!is_in(wrong), "{wrong:?}");
        }
        assert!(!token.is_in(&HeaderMap::new()));
    }
}
