//! A client whose peer dies, stops, lies or talks nonsense: one typed error each, in time, and nothing left behind.

mod support;

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use hotslot_peer::{ClientOptions, Facts, PeerClient, PeerErrorKind, Progress, ServerOptions};
use proptest::prelude::*;
use support::{
    FakePeer, Store, TTL, client, eventually, fetch, hasty, noise, ok, pull, request_head, serve, serve_with,
};

// ------------------------------------------------------------------------------------------------------ a second process

/// What a second process runs: serves until its input ends, or reads a manifest.
#[test]
#[ignore = "runs in a process of its own, started by other tests"]
fn second_process() {
    match std::env::var("HOTSLOT_PEER_TEST").as_deref() {
        Ok("serve") => {
            let store = Store::with(&[("big", 64 << 20)]);
            let server = serve(&store);
            println!("\nSERVING {}", server.address());
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        Ok("manifest") => {
            let address = std::env::var("HOTSLOT_PEER_ADDRESS").unwrap();
            let client = PeerClient::new(&address, ClientOptions::default()).unwrap();
            assert_eq!(client.manifest().unwrap().adapters.len(), 1);
        }
        _ => {}
    }
}

fn second(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "second_process", "--ignored", "--nocapture"]).env("HOTSLOT_PEER_TEST", role);
    command
}

struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn serving() -> Self {
        let mut child = second("serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        let address = lines.map(Result::unwrap).find_map(|line| line.strip_prefix("SERVING ").map(str::to_owned));
        Self { child, address: address.expect("the second process serves") }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does something to the peer as soon as part of the bytes has come.
fn fetch_while(client: &PeerClient, then: impl FnOnce() + Send) -> Result<(), hotslot_peer::PeerError> {
    let lease = client.lease("big", None, TTL).unwrap();
    let (mut bytes, progress) = (vec![0; lease.facts.nbytes as usize], Progress::default());
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            eventually("some bytes", || progress.received() > 100_000);
            then();
        });
        let outcome = client.fetch(&lease, &mut bytes, &progress);
        watcher.join().unwrap();
        outcome.map(|_| ())
    })
}

#[test]
fn a_peer_killed_in_mid_transfer_is_disconnected_at_once() {
    let peer = Process::serving();
    let client = PeerClient::new(&peer.address, ClientOptions::default()).unwrap();
    let started = Instant::now();
    // Stopped first, so that the transfer cannot be over before the kill.
    let error = fetch_while(&client, || {
        peer.signal("-STOP");
        peer.signal("-KILL");
    });
    let error = error.unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Disconnected, "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(client.manifest().unwrap_err().kind, PeerErrorKind::Disconnected);
}

#[test]
fn a_stopped_peer_is_a_timeout_and_serves_again_when_it_goes_on() {
    let peer = Process::serving();
    let options = ClientOptions { silence: Duration::from_millis(700), ..ClientOptions::default() };
    let client = PeerClient::new(&peer.address, options).unwrap();
    let started = Instant::now();
    let error = fetch_while(&client, || peer.signal("-STOP")).unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Timeout, "{error}");
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(client.manifest().unwrap_err().kind, PeerErrorKind::Timeout);
    peer.signal("-CONT");
    assert!(pull(&client, "big").unwrap() == noise(64 << 20, 1));
}

#[test]
fn a_proxy_of_the_environment_is_not_asked() {
    let proxy = FakePeer::saying(ok("{}"));
    let store = Store::with(&[("a", 10)]);
    let server = serve(&store);
    let url = format!("http://{}", proxy.address);
    let mut command = second("manifest");
    for variable in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env(variable, &url);
    }
    let status =
        command.env("HOTSLOT_PEER_ADDRESS", server.address().to_string()).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
    assert_eq!(proxy.num_connections.load(SeqCst), 0);
}

// ---------------------------------------------------------------------------------------------------------- lies

#[test]
fn wrong_bytes_under_a_right_header_are_corrupt() {
    for len in [1000, 3_000_000] {
        let store = Store::with(&[("a", len)]);
        for at in [0, len / 2, len - 1] {
            let mut bad = noise(len, 1);
            bad[at] ^= 0x10;
            store.change("a", |packed| packed.bytes = Arc::new(bad));
            let error = pull(&client(&serve(&store)), "a").unwrap_err();
            assert_eq!(error.kind, PeerErrorKind::Corrupt, "byte {at}: {error}");
        }
        store.change("a", |packed| packed.bytes = Arc::new(noise(len, 1)));
        pull(&client(&serve(&store)), "a").unwrap();
    }
}

#[test]
fn the_right_regions_with_a_wrong_digest_are_corrupt() {
    for len in [1000, 3_000_000] {
        let store = Store::with(&[("a", len)]);
        let mut facts = Facts::of(&noise(len, 1), 1 << 20);
        facts.blake3 = Facts::of(&noise(len, 2), 1 << 20).blake3;
        store.change("a", |packed| packed.header = facts.to_json());
        let error = pull(&client(&serve(&store)), "a").unwrap_err();
        assert_eq!(error.kind, PeerErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("blake3"), "{error}");
    }
}

#[test]
fn a_header_that_makes_no_sense_is_corrupt_before_anything_is_received() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let client = client(&server);
    let good = Facts::of(&noise(1000, 1), 100).to_json();
    for bad in [
        "{}".to_owned(),
        "[]".to_owned(),
        good.replacen("\"offset\":100", "\"offset\":99", 1),
        good.replacen("1000", "1001", 1),
        good.replacen("\"len\":100", "\"len\":18446744073709551615", 1),
    ] {
        store.change("a", |packed| packed.header = bad.clone());
        let error = client.lease("a", None, TTL).unwrap_err();
        assert_eq!(error.kind, PeerErrorKind::Corrupt, "{bad}: {error}");
    }
    // An exporter whose header is no JSON at all is the server's own failure.
    store.change("a", |packed| packed.header = "{".to_owned());
    assert_eq!(client.lease("a", None, TTL).unwrap_err().kind, PeerErrorKind::Refused);
}

#[test]
fn a_stale_generation_or_an_unknown_name_is_gone() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let client = client(&server);
    assert_eq!(client.lease("a", Some(9), TTL).unwrap_err().kind, PeerErrorKind::Gone);
    assert_eq!(client.lease("b", None, TTL).unwrap_err().kind, PeerErrorKind::Gone);
    assert_eq!(client.lease("../etc", None, TTL).unwrap_err().kind, PeerErrorKind::Settings);
    assert_eq!(server.stats().leases, 0);
}

// ------------------------------------------------------------------------------------------- transfers cut short

/// A lease of 100 000 bytes from a peer that then answers requests for its blob with `answers`, one each; the last one again.
fn with_blob_answers(answers: Vec<Vec<u8>>) -> (FakePeer, hotslot_peer::Lease, Vec<u8>) {
    let bytes = noise(100_000, 5);
    let header = Facts::of(&bytes, 30_000).to_json();
    let reply = ok(&format!(r#"{{"lease":"{:032x}","generation":1,"expires_in":9.5,"header":{header}}}"#, 7));
    let num_blobs = AtomicUsize::new(0);
    let peer = FakePeer::new(move |_, mut stream| {
        let head = request_head(&mut stream);
        if head.starts_with("POST") {
            stream.write_all(reply.as_bytes()).unwrap();
        } else {
            let n = num_blobs.fetch_add(1, SeqCst).min(answers.len() - 1);
            let _ = stream.write_all(&answers[n]);
        }
        let _ = stream.shutdown(Shutdown::Both);
    });
    let lease = hasty(peer.address).lease("a", None, TTL).unwrap();
    (peer, lease, bytes)
}

fn answer(head: &str, body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 {head}\r\n\r\n").as_bytes(), body].concat()
}

#[test]
fn a_transfer_that_breaks_once_is_taken_up_where_it_broke() {
    let bytes = noise(100_000, 5);
    for cut in [1, 29_999, 30_000, 99_999] {
        let first = answer("200 OK\r\nContent-Length: 100000", &bytes[..cut]);
        let head = format!(
            "206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {cut}-99999/100000",
            100_000 - cut
        );
        let (peer, lease, bytes) = with_blob_answers(vec![first, answer(&head, &bytes[cut..])]);
        let (mut got, progress) = (vec![0; 100_000], Progress::default());
        let fetched = hasty(peer.address).fetch(&lease, &mut got, &progress).unwrap();
        assert!(got == bytes);
        assert_eq!(fetched.resumes, 1);
    }
}

#[test]
fn a_transfer_that_breaks_twice_or_resumes_elsewhere_fails() {
    use PeerErrorKind::{Corrupt, Disconnected, Gone, Unsupported};
    let bytes = noise(100_000, 5);
    let half = |head: &str| answer(head, &bytes[..50_000]);
    let cut = half("200 OK\r\nContent-Length: 100000");
    let rest = |range: &str, from: usize| {
        answer(
            &format!("206 Partial Content\r\nContent-Length: 50000\r\nContent-Range: {range}"),
            &bytes[from..][..50_000],
        )
    };
    for (what, answers, expected) in [
        ("cut, closed", vec![cut.clone(), Vec::new()], Disconnected),
        ("cut, cut", vec![cut.clone(), rest("bytes 50000-99999/100000", 50_000)[..30_000].to_vec()], Disconnected),
        ("the start again", vec![cut.clone(), rest("bytes 0-49999/100000", 0)], Corrupt),
        ("another start", vec![cut.clone(), rest("bytes 50001-99999/100000", 50_000)], Corrupt),
        ("another length", vec![cut.clone(), rest("bytes 50000-99999/100001", 50_000)], Corrupt),
        ("no range", vec![cut.clone(), half("206 Partial Content\r\nContent-Length: 50000")], Corrupt),
        ("the whole again", vec![cut.clone(), half("200 OK\r\nContent-Length: 50000")], Corrupt),
        ("wrong bytes", vec![cut.clone(), rest("bytes 50000-99999/100000", 49_999)], Corrupt),
        ("lease gone", vec![cut.clone(), answer("410 Gone\r\nContent-Length: 0", b"")], Gone),
        ("too short a length", vec![half("200 OK\r\nContent-Length: 50000")], Corrupt),
        ("too long a length", vec![half("200 OK\r\nContent-Length: 100001")], Corrupt),
        ("a length beyond all", vec![half("200 OK\r\nContent-Length: 18446744073709551615")], Corrupt),
        ("two lengths", vec![half("200 OK\r\nContent-Length: 100000\r\nContent-Length: 5")], Corrupt),
        ("no length", vec![half("200 OK")], Unsupported),
        ("chunks", vec![half("200 OK\r\nTransfer-Encoding: chunked")], Unsupported),
        ("gzip", vec![half("200 OK\r\nContent-Length: 100000\r\nContent-Encoding: gzip")], Unsupported),
        ("part of it unasked", vec![half("206 Partial Content\r\nContent-Length: 100000")], Corrupt),
        ("no content", vec![answer("204 No Content", b"")], Corrupt),
    ] {
        let (peer, lease, _) = with_blob_answers(answers);
        let error = fetch(&hasty(peer.address), &lease).unwrap_err();
        assert_eq!(error.kind, expected, "{what}: {error}");
    }
}

#[test]
fn a_destination_of_another_length_is_refused_before_the_peer_is_asked() {
    let (peer, lease, _) = with_blob_answers(vec![Vec::new()]);
    let asked = peer.num_connections.load(SeqCst);
    let error = hasty(peer.address).fetch(&lease, &mut vec![0; 99_999], &Progress::default()).unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Settings);
    assert_eq!(peer.num_connections.load(SeqCst), asked);
}

#[test]
fn a_cancelled_transfer_ends_soon() {
    let (peer, lease, _) = {
        let (peer, lease, bytes) = with_blob_answers(vec![Vec::new()]);
        drop(peer);
        let silent = FakePeer::new(|_, mut stream| {
            request_head(&mut stream);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n12345");
            std::thread::sleep(Duration::from_secs(2));
        });
        (silent, lease, bytes)
    };
    let client = PeerClient::new(&peer.address.to_string(), ClientOptions::default()).unwrap();
    let progress = Progress::default();
    let started = Instant::now();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("the first bytes", || progress.received() == 5);
            progress.cancel();
        });
        client.fetch(&lease, &mut vec![0; 100_000], &progress).unwrap_err()
    });
    assert_eq!(error.kind, PeerErrorKind::Cancelled, "{error}");
    assert!(started.elapsed() < Duration::from_millis(1500), "{:?}", started.elapsed());
}

// -------------------------------------------------------------------------------------------------------- nonsense

#[test]
fn an_endless_or_a_huge_answer_ends_within_the_deadline() {
    use PeerErrorKind::{Corrupt, Timeout};
    let drip = |first: &'static [u8], each: &'static [u8]| {
        FakePeer::new(move |_, mut stream| {
            request_head(&mut stream);
            let _ = stream.write_all(first);
            let until = Instant::now() + Duration::from_secs(3);
            while Instant::now() < until && stream.write_all(each).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        })
    };
    let huge_head = [b"HTTP/1.1 200 OK\r\nX: ".as_slice(), &"x".repeat(70_000).into_bytes(), b"\r\n\r\n"].concat();
    let many_headers = [b"HTTP/1.1 200 OK\r\n".as_slice(), &b"X: y\r\n".repeat(500), b"\r\n"].concat();
    let huge_chunks =
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".as_slice(), &b"a;".repeat(99_000)].concat();
    let long_manifest = ok(&format!("[{}1]", "1,".repeat(9 << 20)));
    for (what, peer, expected) in [
        ("a head by drips", drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), Timeout),
        ("informational answers", drip(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), Timeout),
        ("a body by drips", drip(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"a"), Timeout),
        (
            "silence",
            FakePeer::new(|_, mut stream| _ = (request_head(&mut stream), std::thread::sleep(Duration::from_secs(2)))),
            Timeout,
        ),
        ("a huge head", FakePeer::saying(huge_head), Corrupt),
        ("many headers", FakePeer::saying(many_headers), Corrupt),
        ("a chunk without end", FakePeer::saying(huge_chunks), Corrupt),
        ("a huge length", FakePeer::saying("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{"), Corrupt),
        ("a long manifest", FakePeer::saying(long_manifest), Corrupt),
    ] {
        let started = Instant::now();
        let error = hasty(peer.address).manifest().unwrap_err();
        assert_eq!(error.kind, expected, "{what}: {error}");
        assert!(started.elapsed() < Duration::from_secs(2), "{what}: {:?}", started.elapsed());
    }
}

#[test]
fn answers_that_are_none_are_typed() {
    use PeerErrorKind::{Corrupt, Disconnected, Refused, Unsupported};
    for (answer, expected) in [
        (String::new(), Disconnected),
        ("HTTP/1.1 200".to_owned(), Disconnected),
        ("SSH-2.0-OpenSSH_9.2\r\n".to_owned(), Corrupt),
        ("HTTP/2.0 200 OK\r\n\r\n".to_owned(), Corrupt),
        ("HTTP/1.1 099 Low\r\n\r\n".to_owned(), Corrupt),
        ("\u{16}\u{3}\u{1}\u{2}".to_owned(), Corrupt),
        (ok(""), Corrupt),
        (ok("{"), Corrupt),
        (ok("null"), Corrupt),
        (ok("<html>"), Corrupt),
        (ok(r#"{"format":1,"epoch":"e"}"#), Corrupt),
        (ok(r#"{"format":2,"epoch":"e","adapters":[]}"#), Unsupported),
        (
            ok(r#"{"format":1,"epoch":"e","adapters":[{"adapter":"../x","generation":0,"layout":"","nbytes":1}]}"#),
            Corrupt,
        ),
        (
            ok(r#"{"format":1,"epoch":"e","adapters":[{"adapter":"x","generation":-1,"layout":"","nbytes":1}]}"#),
            Corrupt,
        ),
        (ok(&"[".repeat(100_000)), Corrupt),
        ("HTTP/1.1 200 OK\r\n\r\n{}".to_owned(), Unsupported),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".to_owned(), Corrupt),
        ("HTTP/1.1 304 Not Modified\r\n\r\n".to_owned(), Unsupported),
        ("HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned(), Unsupported),
        ("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n".to_owned(), Refused),
        ("HTTP/1.1 403 No\r\nContent-Length: 99999999\r\n\r\n".to_owned(), Refused),
        ("HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}".to_owned(), Unsupported),
    ] {
        let peer = FakePeer::saying(answer.clone());
        let error = hasty(peer.address).manifest().unwrap_err();
        assert_eq!(error.kind, expected, "{:?}: {error}", &answer[..answer.len().min(80)]);
        assert!(error.to_string().contains(&peer.address.to_string()), "{error}");
    }
}

#[test]
fn what_a_peer_says_no_with_is_shown_as_one_short_line() {
    let body = format!(r#"{{"error":"no\nway\u001b[31m {}"}}"#, "x".repeat(3000));
    let peer = FakePeer::saying(format!("HTTP/1.1 403 No\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    let message = hasty(peer.address).manifest().unwrap_err().to_string();
    assert!(message.contains("no way") && message.len() < 500, "{message}");
    assert!(!message.contains(['\n', '\u{1b}']), "{message}");
}

#[test]
fn a_redirect_is_not_followed() {
    let elsewhere = FakePeer::saying(ok(r#"{"format":1,"epoch":"e","adapters":[]}"#));
    for status in [301, 302, 303, 307, 308] {
        let location = format!("http://{}/v1/peer/manifest", elsewhere.address);
        let peer =
            FakePeer::saying(format!("HTTP/1.1 {status} There\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"));
        assert_eq!(hasty(peer.address).manifest().unwrap_err().kind, PeerErrorKind::Unsupported);
    }
    assert_eq!(elsewhere.num_connections.load(SeqCst), 0);
}

#[test]
fn nobody_there_is_disconnected() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(hasty(address).manifest().unwrap_err().kind, PeerErrorKind::Disconnected);
    let unknown = PeerClient::new("no-such-host.invalid:80", ClientOptions::default()).unwrap();
    let kind = unknown.manifest().unwrap_err().kind;
    assert!(matches!(kind, PeerErrorKind::Disconnected | PeerErrorKind::Timeout), "{kind}");
}

#[test]
fn a_connection_that_the_server_closed_meanwhile_is_replaced() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.request_timeout = Duration::from_millis(100));
    let client = client(&server);
    client.manifest().unwrap();
    eventually("the idle connection closed", || server.stats().connections == 0);
    client.lease("a", None, TTL).unwrap();
}

#[test]
fn a_server_that_comes_back_at_its_port_is_used_again() {
    let store = Store::with(&[("a", 1000)]);
    let first = serve(&store);
    let (client, port) = (client(&first), first.address().port());
    let manifest = client.manifest().unwrap();
    first.close();
    assert_eq!(client.manifest().unwrap_err().kind, PeerErrorKind::Disconnected);
    let _second = hotslot_peer::PeerServer::start(store, ServerOptions { port, ..ServerOptions::default() }).unwrap();
    assert_ne!(client.manifest().unwrap().epoch, manifest.epoch);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn random_answers_are_errors_and_never_a_panic(
        head in prop_oneof![
            Just(Vec::new()),
            Just(b"HTTP/1.1 200 OK\r\n".to_vec()),
            Just(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n".to_vec()),
            Just(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec()),
        ],
        tail in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let peer = FakePeer::saying([head, tail].concat());
        let client = hasty(peer.address);
        prop_assert!(client.manifest().is_err());
        prop_assert!(client.lease("a", None, TTL).is_err());
    }
}

/// A connection that does nothing, so that its peer has someone to wait for.
#[test]
fn a_peer_that_accepts_and_says_nothing_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let started = Instant::now();
    let error = hasty(listener.local_addr().unwrap()).agent().unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Timeout, "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
    drop(TcpStream::connect(listener.local_addr().unwrap()));
}
