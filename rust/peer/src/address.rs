//! Where a peer is.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use crate::error::{PeerError, PeerErrorKind, Result, excerpt};

/// A host and a port, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    host: Host,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Host {
    Ip(SocketAddr),
    Name(String),
}

impl PeerAddress {
    /// Reads `10.0.0.7:41234`, `[fd00::7]:41234` or `name.example:41234`.
    ///
    /// # Errors
    /// [`PeerErrorKind::Address`] for everything else, such as a URL, a path, credentials or port 0.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |found: &str| {
            PeerError::new(
                PeerErrorKind::Address,
                &format!("{:?}", excerpt(text)),
                found,
                "an IP address or host name, a colon and a port from 1 to 65535",
            )
        };
        if let Ok(address) = text.parse::<SocketAddr>() {
            return match address.port() {
                0 => Err(bad("port 0")),
                port => Ok(Self { host: Host::Ip(address), port }),
            };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(|| bad("no port"))?;
        if host.contains([':', '[', ']']) {
            return Err(bad("no IPv6 address in brackets"));
        }
        let is_number = !port.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = if is_number { port.parse().unwrap_or(0) } else { 0 };
        if port == 0 {
            return Err(bad("no port number"));
        }
        if !is_host_name(host) {
            return Err(bad("no host name"));
        }
        Ok(Self { host: Host::Name(host.to_ascii_lowercase()), port })
    }

    /// The host without its port, as a TLS certificate names it.
    #[must_use]
    pub fn host(&self) -> String {
        match &self.host {
            Host::Ip(address) => address.ip().to_string(),
            Host::Name(name) => name.clone(),
        }
    }

    /// The port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// What to connect to, in order. A name is looked up by the system, for `patience` at most.
    pub(crate) fn resolve(&self, patience: Duration) -> Result<Vec<SocketAddr>> {
        let name = match &self.host {
            Host::Ip(address) => return Ok(vec![*address]),
            Host::Name(name) => name.clone(),
        };
        let failed = |kind, found: String| {
            PeerError::new(kind, &self.to_string(), found, format!("the name {name:?} to have an address"))
        };
        // The system's look-up has no deadline of its own, so a thread waits for it, and goes when it is done.
        let (send, receive) = mpsc::channel();
        let target = (name.clone(), self.port);
        let looking = std::thread::Builder::new().name("hotslot-resolve".to_owned()).spawn(move || {
            // Nobody may be waiting any more.
            let _ = send.send(target.to_socket_addrs().map(Iterator::collect::<Vec<_>>));
        });
        if let Err(error) = looking {
            return Err(failed(PeerErrorKind::Disconnected, error.to_string()));
        }
        match receive.recv_timeout(patience) {
            Ok(Ok(found)) if !found.is_empty() => Ok(found),
            Ok(Ok(_)) => Err(failed(PeerErrorKind::Disconnected, "no address".to_owned())),
            Ok(Err(error)) => Err(failed(PeerErrorKind::Disconnected, error.to_string())),
            Err(_) => Err(failed(PeerErrorKind::Timeout, format!("no answer of the resolver in {patience:.1?}"))),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(address) => address.fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Whether text is a DNS name, and no number that a resolver would take for an address (`127.1`, `0x7f000001`).
fn is_host_name(text: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = text.strip_suffix('.').unwrap_or(text).rsplit('.').next().unwrap_or("");
    text.len() <= 253
        && text.strip_suffix('.').unwrap_or(text).split('.').all(is_label)
        && !last.starts_with(|c: char| c.is_ascii_digit())
}

/// Whether only this machine can reach a server there.
pub(crate) fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in
            ["127.0.0.1:80", "[::1]:65535", "localhost:1", "a-b.example.org:9", "node_3:41234", "10.0.0.7.nip.io:5"]
        {
            assert_eq!(PeerAddress::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(PeerAddress::parse("[::1]:7").unwrap().host(), "::1");
        assert_eq!(PeerAddress::parse("Node:7").unwrap().host(), "node");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let long = format!("{}:80", "a".repeat(64));
        for text in [
            "",
            ":",
            ":80",
            "host",
            "host:",
            "host:0",
            "host:65536",
            "host:+80",
            "host:8o",
            "host: 80",
            " host:80",
            "http://host:80",
            "host:80/path",
            "user@host:80",
            "::1:80",
            "[::1]",
            "[::1]:0",
            "[host]:80",
            "127.0.0.1:0",
            "127.1:80",
            "0x7f000001:80",
            "2130706433:80",
            "-a:80",
            "a-:80",
            "a..b:80",
            "ho\nst:80",
            "h\u{f6}st:80",
            "host:80\r\nX: y",
            "999.1.1.1:80",
            &long,
        ] {
            let error = PeerAddress::parse(text).unwrap_err();
            assert_eq!(error.kind, PeerErrorKind::Address, "{text:?}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}
