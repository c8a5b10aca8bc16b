//! A server whose clients vanish, dawdle, flood or talk nonsense: it serves the others, and keeps nothing pinned.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use hotslot_peer::{ClientOptions, PeerClient, PeerErrorKind, PeerServer, Progress, ServerOptions};
use proptest::prelude::*;
use support::{Store, TTL, client, eventually, fetch, num_descriptors, pull, raw, serve, serve_with, status};

const BIG: usize = 32 << 20;

/// Asks for a lease's bytes and reads none of them.
fn ask_for_blob(server: &PeerServer, lease: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    write!(stream, "GET /v1/peer/blob/{lease} HTTP/1.1\r\nHost: {}\r\n\r\n", server.address()).unwrap();
    let mut start = [0; 1000];
    stream.read_exact(&mut start).unwrap();
    stream
}

#[test]
fn a_client_that_vanishes_in_mid_blob_frees_its_lease() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve_with(&store, |options| options.grace = Duration::from_millis(200));
    let lease = client(&server).lease("a", None, TTL).unwrap();
    drop(ask_for_blob(&server, &lease.id));
    eventually("the lease ended", || server.stats().leases == 0 && store.num_pinned() == 0);
    assert_eq!(fetch(&client(&server), &lease).unwrap_err().kind, PeerErrorKind::Gone);
}

#[test]
fn a_lease_can_be_taken_up_again_within_the_grace_of_a_broken_transfer() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve(&store);
    let client = client(&server);
    let lease = client.lease("a", None, TTL).unwrap();
    drop(ask_for_blob(&server, &lease.id));
    assert!(fetch(&client, &lease).unwrap() == **store.bytes("a"));
}

#[test]
fn a_reader_that_takes_nothing_is_cut_off() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve_with(&store, |options| {
        options.stall_timeout = Duration::from_millis(300);
        options.grace = Duration::from_millis(100);
    });
    let lease = client(&server).lease("a", None, TTL).unwrap();
    let stream = ask_for_blob(&server, &lease.id);
    eventually("cut off and unpinned", || server.stats().connections == 0 && store.num_pinned() == 0);
    drop(stream);
}

#[test]
fn a_reader_by_drips_has_until_its_lease_ends() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve(&store);
    let lease = client(&server).lease("a", None, Duration::from_millis(600)).unwrap();
    let mut stream = ask_for_blob(&server, &lease.id);
    let started = Instant::now();
    eventually("unpinned", || {
        let _ = stream.read(&mut [0; 10]);
        store.num_pinned() == 0
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(server.stats().leases, 0);
}

#[test]
fn a_lease_ends_at_its_time() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.max_ttl = Duration::from_millis(200));
    let client = client(&server);
    let lease = client.lease("a", None, Duration::from_secs(3600)).unwrap();
    assert_eq!(lease.ttl, Duration::from_millis(200));
    eventually("unpinned", || store.num_pinned() == 0);
    assert_eq!(fetch(&client, &lease).unwrap_err().kind, PeerErrorKind::Gone);
    assert!(!client.release(&lease).unwrap());
}

#[test]
fn a_full_table_refuses_and_has_room_again_after_a_release() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.max_leases = 3);
    let client = client(&server);
    let leases: Vec<_> = (0..3).map(|_| client.lease("a", None, TTL).unwrap()).collect();
    let error = client.lease("a", None, TTL).unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Refused, "{error}");
    assert_eq!(store.num_pinned(), 3);
    assert!(client.release(&leases[1]).unwrap());
    client.lease("a", None, TTL).unwrap();
}

#[test]
fn releasing_in_mid_transfer_ends_the_transfer() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve(&store);
    let client = client(&server);
    let lease = client.lease("a", None, TTL).unwrap();
    let mut stream = ask_for_blob(&server, &lease.id);
    assert!(client.release(&lease).unwrap());
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.len() < BIG - 1000);
    eventually("unpinned", || store.num_pinned() == 0);
}

#[test]
fn closing_while_serving_ends_transfers_and_returns_all() {
    let store = Store::with(&[("a", BIG)]);
    let server = serve(&store);
    let client = client(&server);
    let lease = client.lease("a", None, TTL).unwrap();
    let _idle = client.lease("a", None, TTL).unwrap();
    let _stalled = ask_for_blob(&server, &lease.id);
    let progress = Progress::default();
    std::thread::scope(|scope| {
        let fetching = scope.spawn(|| {
            let mut bytes = vec![0; BIG];
            // Slow enough to be still running: many rounds.
            loop {
                client.fetch(&lease, &mut bytes, &progress)?;
            }
            #[allow(unreachable_code)]
            Ok::<(), hotslot_peer::PeerError>(())
        });
        eventually("some bytes", || progress.received() > 100_000);
        let started = Instant::now();
        server.close();
        assert!(started.elapsed() < Duration::from_secs(2));
        assert_eq!(store.num_pinned(), 0);
        let error = fetching.join().unwrap().unwrap_err();
        assert_eq!(error.kind, PeerErrorKind::Disconnected, "{error}");
    });
    assert!(server.is_closed());
    server.close();
    assert!(TcpStream::connect(server.address()).is_err());
}

#[test]
fn a_slow_head_or_body_is_cut_off_and_others_are_served_meanwhile() {
    let store = Store::with(&[("a", 100_000)]);
    let server = serve_with(&store, |options| options.request_timeout = Duration::from_millis(400));
    let mut slow: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    for (i, stream) in slow.iter_mut().enumerate() {
        let start: &[u8] = match i % 4 {
            0 => b"",
            1 => b"GET /v1/peer/mani",
            2 => b"GET /v1/peer/manifest HTTP/1.1\r\nHost: 127.0.0.1\r\n",
            _ => b"POST /v1/peer/lease HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{",
        };
        stream.write_all(start).unwrap();
    }
    let started = Instant::now();
    assert!(pull(&client(&server), "a").unwrap() == **store.bytes("a"));
    assert!(started.elapsed() < Duration::from_secs(3));
    // A byte now and then is no excuse.
    eventually("all cut off", || {
        for stream in &mut slow {
            let _ = stream.write(b"x");
        }
        std::thread::sleep(Duration::from_millis(50));
        server.stats().connections == 0
    });
}

#[test]
fn connections_beyond_the_limit_are_closed_and_the_server_recovers() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.max_connections = 4);
    let held: Vec<_> = (0..4).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    eventually("all four accepted", || server.stats().connections == 4);
    let error = client(&server).manifest().unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Disconnected, "{error}");
    drop(held);
    eventually("room again", || client(&server).manifest().is_ok());
}

#[test]
fn five_hundred_connections_leave_no_descriptor_and_no_pin_on_either_side() {
    let store = Store::with(&[("a", 20_000)]);
    let server = serve(&store);
    assert!(pull(&client(&server), "a").is_ok());
    eventually("the first connection gone", || server.stats().connections == 0);
    let before = num_descriptors();
    for i in 0..500 {
        match i % 5 {
            // Comes and goes, in the middle of things.
            0 => drop(TcpStream::connect(server.address()).unwrap()),
            1 => {
                let lease = client(&server).lease("a", None, TTL).unwrap();
                drop(ask_for_blob(&server, &lease.id));
                client(&server).release(&lease).unwrap();
            }
            2 => assert!(client(&server).lease("b", None, TTL).is_err()),
            _ => assert!(pull(&client(&server), "a").unwrap() == **store.bytes("a")),
        }
    }
    eventually("all connections gone", || server.stats().connections == 0);
    eventually("no descriptor more than before", || num_descriptors() <= before + 2);
    eventually("no pin", || store.num_pinned() == 0);
    assert_eq!(server.stats().leases, 0);
}

#[test]
fn an_exporter_that_panics_or_fails_takes_nobody_with_it() {
    let store = Store::with(&[("odd", 100), ("even", 5_000_000)]);
    let server = serve(&store);
    let client = client(&server);
    store.panics.store(true, SeqCst);
    assert_eq!(client.manifest().unwrap_err().kind, PeerErrorKind::Refused);
    store.panics.store(false, SeqCst);
    client.manifest().unwrap();
    *store.read_fails_at.lock().unwrap() = Some(3_000_000);
    let error = pull(&client, "even").unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Disconnected, "{error}");
    *store.read_fails_at.lock().unwrap() = None;
    assert!(pull(&client, "even").unwrap() == **store.bytes("even"));
}

#[test]
fn only_the_token_opens_the_server() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.token = Some("sesame-sesame".to_owned()));
    let with = |token: Option<&str>| {
        let options = ClientOptions { token: token.map(str::to_owned), ..ClientOptions::default() };
        PeerClient::new(&server.address().to_string(), options).unwrap()
    };
    for wrong in [None, Some("sesame"), Some("sesame-sesame-"), Some("Sesame-sesame")] {
        for error in [
            with(wrong).manifest().map(|_| ()).unwrap_err(),
            with(wrong).agent().map(|_| ()).unwrap_err(),
            with(wrong).lease("a", None, TTL).map(|_| ()).unwrap_err(),
        ] {
            assert_eq!(error.kind, PeerErrorKind::Refused);
            assert!(!error.to_string().contains("sesame"), "{error}");
        }
    }
    let lease = with(Some("sesame-sesame")).lease("a", None, TTL).unwrap();
    assert_eq!(fetch(&with(None), &lease).unwrap_err().kind, PeerErrorKind::Refused);
    assert_eq!(with(None).release(&lease).unwrap_err().kind, PeerErrorKind::Refused);
    assert!(fetch(&with(Some("sesame-sesame")), &lease).unwrap() == **store.bytes("a"));
    // Even a path that does not exist says nothing without it.
    assert_eq!(status(server.address(), "GET /", "", ""), 401);
    assert!(!format!("{:?}", with(Some("sesame-sesame"))).contains("sesame"));
}

#[test]
fn a_server_beyond_loopback_wants_a_token_or_certificates() {
    let store = Store::with(&[("a", 1000)]);
    let start = |host: &str, token: Option<&str>| {
        let options =
            ServerOptions { host: host.to_owned(), token: token.map(str::to_owned), ..ServerOptions::default() };
        PeerServer::start(Arc::clone(&store) as _, options)
    };
    for host in ["0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"] {
        let error = start(host, None).err().expect("refused");
        assert_eq!(error.kind, PeerErrorKind::Settings, "{host}: {error}");
        assert_eq!(start(host, Some("")).err().expect("refused").kind, PeerErrorKind::Settings);
    }
    let server = start("0.0.0.0", Some("sesame")).unwrap();
    let options = ClientOptions { token: Some("sesame".to_owned()), ..ClientOptions::default() };
    let address = format!("127.0.0.1:{}", server.address().port());
    assert!(pull(&PeerClient::new(&address, options).unwrap(), "a").is_ok());
    for host in ["127.0.0.1", "127.0.0.2", "::1", "localhost"] {
        assert!(start(host, None).is_ok(), "{host}");
    }
    for host in ["", "no such host", "192.0.2.1:80", "host/path"] {
        let kind = start(host, Some("sesame")).err().expect("refused").kind;
        assert!(matches!(kind, PeerErrorKind::Settings | PeerErrorKind::Bind), "{host}: {kind}");
    }
    let taken =
        ServerOptions { port: server.address().port(), token: Some("x".to_owned()), ..ServerOptions::default() };
    assert_eq!(PeerServer::start(Arc::clone(&store) as _, taken).err().expect("refused").kind, PeerErrorKind::Bind);
}

#[test]
fn a_web_page_is_refused() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let asked = |headers: &str| status(server.address(), "GET /v1/peer/manifest", headers, "");
    assert_eq!(asked(""), 200);
    assert_eq!(asked("Origin: http://evil.example\r\n"), 403);
    assert_eq!(asked("Sec-Fetch-Site: cross-site\r\n"), 403);
    let rebound = b"GET /v1/peer/manifest HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    assert!(raw(server.address(), rebound, Duration::from_secs(5)).starts_with(b"HTTP/1.1 403"));
}

#[test]
fn requests_outside_the_protocol_are_refused_and_change_nothing() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let lease = client(&server).lease("a", None, TTL).unwrap();
    let blob = format!("/v1/peer/blob/{}", lease.id);
    for (request, body, expected) in [
        ("GET /", "", 404),
        ("GET /v1/peer", "", 404),
        ("GET /v1/peer/../../etc/passwd", "", 404),
        ("GET /v1/peer/manifest/", "", 404),
        ("POST /v1/peer/manifest", "", 405),
        ("DELETE /v1/peer/manifest", "", 405),
        ("GET /v1/peer/lease", "", 405),
        ("GET /v1/peer/release", "", 405),
        (&format!("PUT {blob}"), "x", 405),
        (&format!("DELETE {blob}"), "", 405),
        ("GET /v1/peer/blob/", "", 410),
        ("GET /v1/peer/blob/x", "", 410),
        ("GET /v1/peer/blob/00000000000000000000000000000000", "", 410),
        (&format!("GET {}", blob.to_uppercase()), "", 404),
        ("POST /v1/peer/lease", "", 400),
        ("POST /v1/peer/lease", "[]", 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","x":1}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","adapter":"a"}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"../a"}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":""}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","ttl":0}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","ttl":-1}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","ttl":1e999}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","generation":-1}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","generation":18446744073709551616}"#, 400),
        ("POST /v1/peer/lease", r#"{"adapter":"a","generation":2}"#, 410),
        ("POST /v1/peer/lease", r#"{"adapter":"b"}"#, 404),
        ("POST /v1/peer/release", r#"{"lease":1}"#, 400),
        ("POST /v1/peer/release", r#"{"lease":"../../x"}"#, 200),
        ("POST /v1/peer/lease", &format!("{{\"adapter\":\"{}\"}}", "a".repeat(20_000)), 413),
        ("POST /v1/peer/lease", &"[".repeat(10_000), 400),
    ] {
        assert_eq!(status(server.address(), request, "", body), expected, "{request} {}", &body[..body.len().min(60)]);
    }
    assert_eq!((server.stats().leases, store.num_pinned()), (1, 1));
    // A request whose head is too large, and one that would smuggle another.
    let huge = format!("GET /v1/peer/manifest HTTP/1.1\r\nHost: 127.0.0.1\r\nX: {}\r\n\r\n", "x".repeat(1_000_000));
    assert!(!raw(server.address(), huge.as_bytes(), Duration::from_secs(5)).starts_with(b"HTTP/1.1 200"));
    let many = format!("GET /v1/peer/manifest HTTP/1.1\r\nHost: 127.0.0.1\r\n{}\r\n", "X: y\r\n".repeat(300));
    assert!(!raw(server.address(), many.as_bytes(), Duration::from_secs(5)).starts_with(b"HTTP/1.1 200"));
    let both =
        b"POST /v1/peer/lease HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nxxxxx";
    assert!(raw(server.address(), both, Duration::from_secs(5)).starts_with(b"HTTP/1.1 400"));
    assert_eq!(server.stats().leases, 1);
}

#[test]
fn requests_in_one_go_are_answered_in_turn() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let one = "GET /v1/peer/agent HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let last = "GET /v1/peer/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n";
    let answer = raw(server.address(), format!("{}{last}", one.repeat(9)).as_bytes(), Duration::from_secs(5));
    assert_eq!(String::from_utf8_lossy(&answer).matches("HTTP/1.1 200").count(), 10);
}

#[test]
fn random_bytes_and_damaged_requests_harm_nobody() {
    let store = Store::with(&[("a", 10_000)]);
    let server = serve_with(&store, |options| options.request_timeout = Duration::from_millis(300));
    let good: Vec<u8> =
        b"POST /v1/peer/lease HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 15\r\n\r\n{\"adapter\":\"a\"}".to_vec();
    let damage = (any::<proptest::sample::Index>(), any::<u8>(), 0..4_u8);
    let damaged = proptest::collection::vec(damage, 1..6).prop_map(move |changes| {
        let mut bytes = good.clone();
        for (at, byte, how) in changes {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 if bytes.len() > 1 => _ = bytes.remove(at),
                _ => bytes.truncate(at.max(1)),
            }
        }
        bytes
    });
    let bytes = prop_oneof![proptest::collection::vec(any::<u8>(), 0..300), damaged];
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    proptest::test_runner::TestRunner::new(config)
        .run(&bytes, |bytes| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
            Ok(())
        })
        .unwrap();
    // Those that happened to be good requests hold leases; nothing else may be left.
    assert_eq!(server.stats().leases, store.num_pinned());
    assert!(server.stats().leases <= 64);
    eventually("all connections gone", || server.stats().connections == 0);
    server.close();
    assert_eq!(store.num_pinned(), 0);
    assert!(pull(&client(&serve(&store)), "a").unwrap() == **store.bytes("a"));
}
