//! One connection to a peer: `ureq-proto` says what to write and what an answer's head means, this file moves the bytes. The body
//! of a blob goes from the socket straight to where it is wanted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use http::{HeaderMap, Method, Request, StatusCode, Version, header};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use ureq_proto::BodyMode;
use ureq_proto::client::state::{RecvBody, RecvResponse};
use ureq_proto::client::{Call, RecvResponseResult, SendRequestResult};

use crate::address::PeerAddress;
use crate::clock::{Clock, TICK};
use crate::error::{PeerError, PeerErrorKind, Result};

/// The largest head of an answer, informational ones before it included.
const MAX_HEAD: usize = 64 << 10;
const READ: usize = 16 << 10;

/// Whom to expect behind a TLS connection.
pub(crate) struct TlsTarget {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) name: ServerName<'static>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

pub(crate) struct Connection {
    stream: Stream,
    peer: String,
    /// Received and not used yet.
    ahead: Vec<u8>,
}

/// The head of an answer.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    call: Option<Call<RecvBody>>,
    /// Whether the connection can be used again once the body has been read.
    pub(crate) keeps: bool,
}

impl Answer {
    /// How the body's length is known.
    pub(crate) fn body_mode(&self) -> BodyMode {
        self.call.as_ref().map_or(BodyMode::NoBody, Call::body_mode)
    }
}

impl Connection {
    /// Connects, with a TLS handshake if there is a target for one.
    pub(crate) fn open(
        address: &PeerAddress,
        tls: Option<&TlsTarget>,
        patience: std::time::Duration,
        clock: &mut Clock<'_>,
    ) -> Result<Self> {
        let peer = address.to_string();
        let mut last = None;
        for target in address.resolve(clock.left(patience))? {
            clock.check("connecting")?;
            match TcpStream::connect_timeout(&target, clock.left(patience)) {
                Ok(stream) => {
                    let set_up = stream
                        .set_nodelay(true)
                        .and_then(|()| stream.set_read_timeout(Some(TICK)))
                        .and_then(|()| stream.set_write_timeout(Some(TICK)));
                    set_up.map_err(|error| broken(&peer, &error, "a usable connection"))?;
                    clock.heard();
                    return Self::greet(stream, peer, tls, clock);
                }
                Err(error) => last = Some(error),
            }
        }
        let error = last.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into());
        Err(broken(&peer, &error, "a server that listens there"))
    }

    fn greet(stream: TcpStream, peer: String, tls: Option<&TlsTarget>, clock: &mut Clock<'_>) -> Result<Self> {
        let Some(TlsTarget { config, name }) = tls else {
            return Ok(Self { stream: Stream::Plain(stream), peer, ahead: Vec::new() });
        };
        let session = ClientConnection::new(Arc::clone(config), name.clone())
            .map_err(|error| PeerError::new(PeerErrorKind::Settings, &peer, error.to_string(), "a TLS client"))?;
        let mut stream = StreamOwned::new(session, stream);
        while stream.conn.is_handshaking() {
            clock.check("shaking hands")?;
            match stream.conn.complete_io(&mut stream.sock) {
                Ok(_) => clock.heard(),
                Err(error) if is_tick(&error) => {}
                Err(error) => return Err(broken(&peer, &error, "a TLS handshake")),
            }
        }
        Ok(Self { stream: Stream::Tls(Box::new(stream)), peer, ahead: Vec::new() })
    }

    /// Whether the peer closed a kept connection meanwhile, or sent what nobody asked for.
    pub(crate) fn is_stale(&self) -> bool {
        let socket = match &self.stream {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => &stream.sock,
        };
        let peeked = socket.set_nonblocking(true).and_then(|()| socket.peek(&mut [0]));
        let is_quiet = matches!(&peeked, Err(error) if error.kind() == ErrorKind::WouldBlock);
        !is_quiet || !self.ahead.is_empty() || socket.set_nonblocking(false).is_err()
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) fn ask(&mut self, request: Request<()>, body: &[u8], clock: &mut Clock<'_>) -> Result<Answer> {
        let is_get = request.method() == Method::GET;
        let nonsense = |error: ureq_proto::Error| {
            PeerError::new(PeerErrorKind::Settings, &self.peer, error.to_string(), "a request that can be sent")
        };
        let mut out = vec![0; READ + body.len()];
        let mut used = 0;
        let mut call = Call::new(request).map_err(nonsense)?.proceed();
        while !call.can_proceed() {
            used += call.write(&mut out[used..]).map_err(nonsense)?;
        }
        let call = match call.proceed().map_err(nonsense)? {
            Some(SendRequestResult::RecvResponse(call)) if is_get => call,
            Some(SendRequestResult::SendBody(mut call)) => {
                let (_, written) = call.write(body, &mut out[used..]).map_err(nonsense)?;
                used += written;
                call.proceed().ok_or_else(|| nonsense(ureq_proto::Error::BodyLargerThanContentLength))?
            }
            _ => return Err(nonsense(ureq_proto::Error::BodyNotAllowed)),
        };
        self.send(&out[..used], clock)?;
        self.head(call, clock)
    }

    fn send(&mut self, mut bytes: &[u8], clock: &mut Clock<'_>) -> Result<()> {
        let mut is_flushed = false;
        while !is_flushed {
            clock.check("sending a request")?;
            let done = match &mut self.stream {
                _ if bytes.is_empty() => match &mut self.stream {
                    Stream::Plain(_) => Ok(0),
                    Stream::Tls(stream) => stream.flush().map(|()| 0),
                },
                Stream::Plain(stream) => stream.write(bytes),
                Stream::Tls(stream) => stream.write(bytes),
            };
            match done {
                Ok(0) if bytes.is_empty() => is_flushed = true,
                Ok(0) => return Err(broken(&self.peer, &ErrorKind::WriteZero.into(), "to send a request")),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if is_tick(&error) => {}
                Err(error) => return Err(broken(&self.peer, &error, "to send a request")),
            }
        }
        Ok(())
    }

    fn head(&mut self, mut call: Call<RecvResponse>, clock: &mut Clock<'_>) -> Result<Answer> {
        let mut room = MAX_HEAD;
        let response = loop {
            let (used, response) = call.try_response(&self.ahead, false).map_err(|error| self.no_http(&error))?;
            self.ahead.drain(..used);
            if let Some(response) = response {
                break response;
            }
            if used > 0 {
                continue;
            }
            let start = self.ahead.len();
            let want = READ.min(room);
            if want == 0 {
                return Err(self.corrupt(format!("a head above {MAX_HEAD} bytes"), "an answer"));
            }
            self.ahead.resize(start + want, 0);
            let mut ahead = std::mem::take(&mut self.ahead);
            let got = self.receive(&mut ahead[start..], clock, "waiting for an answer");
            ahead.truncate(start + *got.as_ref().unwrap_or(&0));
            self.ahead = ahead;
            room -= got?;
        };
        let (parts, ()) = response.into_parts();
        let closes = parts.headers.get_all(header::CONNECTION).iter().any(|value| {
            value.to_str().is_ok_and(|value| value.split(',').any(|option| option.trim().eq_ignore_ascii_case("close")))
        });
        let call = match call.proceed() {
            Some(RecvResponseResult::RecvBody(call)) => Some(call),
            _ => None,
        };
        let keeps = !closes && parts.version == Version::HTTP_11 && parts.status != StatusCode::SWITCHING_PROTOCOLS;
        Ok(Answer { status: parts.status, headers: parts.headers, call, keeps })
    }

    /// Reads a body of at most `limit` bytes.
    pub(crate) fn text(&mut self, answer: &mut Answer, limit: usize, clock: &mut Clock<'_>) -> Result<Vec<u8>> {
        let too_long = |this: &Self| this.corrupt(format!("a body above {limit} bytes"), "a shorter answer");
        let mode = answer.body_mode();
        let Some(mut call) = answer.call.take() else { return Ok(Vec::new()) };
        match mode {
            BodyMode::LengthDelimited(len) if len > limit as u64 => return Err(too_long(self)),
            // Its end could not be told from a broken connection.
            BodyMode::CloseDelimited => return Err(self.unsupported("a body without a length")),
            _ => {}
        }
        let mut text = Vec::new();
        let mut chunk = vec![0; READ];
        while !call.can_proceed() {
            let (used, got) = call.read(&self.ahead, &mut chunk).map_err(|error| self.no_http(&error))?;
            self.ahead.drain(..used);
            if text.len() + got > limit {
                return Err(too_long(self));
            }
            text.extend_from_slice(&chunk[..got]);
            if used == 0 && got == 0 && !call.can_proceed() {
                // A chunk's head that has no end would grow here.
                if self.ahead.len() > MAX_HEAD {
                    return Err(self.corrupt("a chunk without end".to_owned(), "an answer"));
                }
                let mut fresh = vec![0; READ];
                let n = self.receive(&mut fresh, clock, "reading an answer")?;
                self.ahead.extend_from_slice(&fresh[..n]);
            }
        }
        Ok(text)
    }

    /// Reads bytes of a body whose length the caller counts, at least one; not more than one read's worth.
    pub(crate) fn read(&mut self, into: &mut [u8], clock: &mut Clock<'_>) -> Result<usize> {
        if self.ahead.is_empty() {
            return self.receive(into, clock, "receiving an adapter");
        }
        let n = self.ahead.len().min(into.len());
        into[..n].copy_from_slice(&self.ahead[..n]);
        self.ahead.drain(..n);
        Ok(n)
    }

    fn receive(&mut self, into: &mut [u8], clock: &mut Clock<'_>, doing: &str) -> Result<usize> {
        loop {
            clock.check(doing)?;
            let got = match &mut self.stream {
                Stream::Plain(stream) => stream.read(into),
                Stream::Tls(stream) => stream.read(into),
            };
            match got {
                Ok(0) => return Err(broken(&self.peer, &ErrorKind::UnexpectedEof.into(), doing)),
                Ok(n) => {
                    clock.heard();
                    return Ok(n);
                }
                Err(error) if is_tick(&error) => {}
                Err(error) => return Err(broken(&self.peer, &error, doing)),
            }
        }
    }

    fn no_http(&self, error: &ureq_proto::Error) -> PeerError {
        self.corrupt(format!("no HTTP ({error})"), "an answer of a hotslot peer")
    }

    fn corrupt(&self, found: String, expected: &str) -> PeerError {
        PeerError::new(PeerErrorKind::Corrupt, &self.peer, found, expected)
    }

    fn unsupported(&self, found: &str) -> PeerError {
        PeerError::new(PeerErrorKind::Unsupported, &self.peer, found, "a body of known length")
    }
}

/// Whether a call only came back to let the clock be looked at.
fn is_tick(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn broken(peer: &str, error: &io::Error, doing: &str) -> PeerError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let (kind, found) = match tls {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_)) => {
            (PeerErrorKind::Refused, format!("no trust: {error}"))
        }
        Some(_) => (PeerErrorKind::Corrupt, format!("no TLS: {error}")),
        None if error.kind() == ErrorKind::UnexpectedEof => {
            (PeerErrorKind::Disconnected, "the connection closed".to_owned())
        }
        None => (PeerErrorKind::Disconnected, error.to_string()),
    };
    PeerError::new(kind, peer, format!("{found} while {doing}"), "an answer")
}
