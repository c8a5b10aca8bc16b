//! A server and a client that mean well.

mod support;

use std::sync::Arc;
use std::time::Duration;

use hotslot_peer::{ClientOptions, PeerClient, PeerErrorKind, Progress, Verify};
use support::{Store, TTL, client, eventually, fetch, noise, pull, serve, serve_with, status};

#[test]
fn bytes_arrive_as_they_were_whatever_their_length() {
    let lengths = [
        0,
        1,
        255,
        4096,
        (256 << 10) - 1,
        256 << 10,
        (256 << 10) + 1,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        5_000_003,
    ];
    let store = Arc::new(Store::default());
    for (i, &len) in lengths.iter().enumerate() {
        // Odd generations are sent from where they lie, even ones are read.
        store.put(&format!("direct-{i}"), 1, noise(len, i as u64));
        store.put(&format!("read-{i}"), 2, noise(len, i as u64));
    }
    let server = serve(&store);
    let client = client(&server);
    for i in 0..lengths.len() {
        for name in [format!("direct-{i}"), format!("read-{i}")] {
            assert!(pull(&client, &name).unwrap() == **store.bytes(&name), "{name}");
        }
    }
    eventually("every pin returned", || store.num_pinned() == 0);
    assert_eq!(server.stats().leases, 0);
    assert_eq!(server.stats().leases_granted, 2 * lengths.len() as u64);
}

#[test]
fn the_manifest_lists_what_is_exported_and_is_sent_again_only_when_it_changed() {
    let store = Store::with(&[("a", 10), ("b/c.d", 20)]);
    let server = serve(&store);
    let client = client(&server);
    let manifest = client.manifest().unwrap();
    let listed: Vec<_> = manifest.adapters.iter().map(|a| (a.adapter.as_str(), a.generation, a.nbytes)).collect();
    assert_eq!(listed, [("a", 1, 10), ("b/c.d", 2, 20)]);
    for i in 0..300 {
        store.put(&format!("many-{i}"), 7, vec![1]);
    }
    let changed = client.manifest().unwrap();
    assert_eq!((changed.adapters.len(), &changed.epoch), (302, &manifest.epoch));
    let sent = || server.stats().bytes_sent;
    eventually("the long manifest counted", || sent() > 20_000);
    let before = sent();
    assert_eq!(client.manifest().unwrap(), changed);
    assert!(sent() - before < 1000, "{} bytes for what is known", sent() - before);
}

#[test]
fn a_process_that_starts_anew_has_another_epoch() {
    let store = Store::with(&[("a", 10)]);
    let epoch = || client(&serve(&store)).manifest().unwrap().epoch;
    assert_ne!(epoch(), epoch());
}

#[test]
fn an_agent_names_its_engines() {
    let store = Store::with(&[("a", 10)]);
    let server = serve(&store);
    let client = client(&server);
    assert_eq!(client.agent().unwrap().engines["tcp"], server.address().to_string());
    server.set_engine("nixl", "bWV0YWRhdGE=");
    assert_eq!(client.agent().unwrap().engines["nixl"], "bWV0YWRhdGE=");
}

#[test]
fn a_lease_pins_until_it_is_released_and_only_once() {
    let store = Store::with(&[("a", 3000)]);
    let server = serve(&store);
    let client = client(&server);
    let lease = client.lease("a", Some(1), TTL).unwrap();
    assert_eq!((store.num_pinned(), server.stats().leases), (1, 1));
    assert_eq!(lease.header, store.adapters.lock().unwrap()["a"].header);
    assert_eq!(lease.ttl, TTL);
    // What is leased stays what it was, though the name has another content by now.
    let before = store.bytes("a");
    store.put("a", 2, noise(3000, 99));
    assert!(fetch(&client, &lease).unwrap() == *before);
    assert!(client.release(&lease).unwrap());
    assert!(!client.release(&lease).unwrap());
    assert_eq!(store.num_pinned(), 0);
    assert_eq!(fetch(&client, &lease).unwrap_err().kind, PeerErrorKind::Gone);
}

#[test]
fn many_readers_at_once_each_get_their_own_bytes() {
    let names: Vec<String> = (0..6).map(|i| format!("n{i}")).collect();
    let store = Arc::new(Store::default());
    for (i, name) in names.iter().enumerate() {
        store.put(name, i as u64 + 1, noise(700_000 + i, i as u64));
    }
    let server = serve(&store);
    std::thread::scope(|scope| {
        for (i, name) in names.iter().enumerate() {
            let (store, client) = (&store, client(&server));
            scope.spawn(move || {
                for _ in 0..3 {
                    assert!(pull(&client, name).unwrap() == **store.bytes(name), "reader {i}");
                }
            });
        }
    });
    eventually("every pin returned", || store.num_pinned() == 0);
}

#[test]
fn one_client_can_be_shared_between_threads() {
    let store = Store::with(&[("a", 900_000), ("b", 400_000)]);
    let server = serve(&store);
    let client = client(&server);
    std::thread::scope(|scope| {
        for name in ["a", "b", "a", "b"] {
            let (store, client) = (&store, &client);
            scope.spawn(move || assert!(pull(client, name).unwrap() == **store.bytes(name)));
        }
    });
}

#[test]
fn progress_ends_at_the_total_and_fast_finds_the_same_bytes() {
    let store = Store::with(&[("a", 3_000_000)]);
    let server = serve(&store);
    let options = ClientOptions { verify: Verify::Fast, ..ClientOptions::default() };
    let client = PeerClient::new(&server.address().to_string(), options).unwrap();
    let lease = client.lease("a", None, TTL).unwrap();
    let (mut bytes, progress) = (vec![0; 3_000_000], Progress::default());
    let fetched = client.fetch(&lease, &mut bytes, &progress).unwrap();
    assert_eq!((progress.received(), progress.verified(), progress.total()), (3_000_000, 3_000_000, 3_000_000));
    assert_eq!((fetched.nbytes, fetched.resumes), (3_000_000, 0));
    assert!(bytes == **store.bytes("a"));
}

#[test]
fn it_serves_over_ipv6_and_by_name() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve_with(&store, |options| options.host = "::1".to_owned());
    assert!(server.address().to_string().starts_with("[::1]:"));
    assert!(pull(&client(&server), "a").unwrap() == **store.bytes("a"));
    let server = serve_with(&store, |options| options.host = "localhost".to_owned());
    let by_name = PeerClient::new(&format!("localhost:{}", server.address().port()), ClientOptions::default()).unwrap();
    assert!(pull(&by_name, "a").unwrap() == **store.bytes("a"));
}

#[test]
fn a_range_is_exactly_what_was_asked_for() {
    let store = Store::with(&[("a", 1000)]);
    let server = serve(&store);
    let lease = client(&server).lease("a", None, TTL).unwrap();
    let path = format!("GET /v1/peer/blob/{}", lease.id);
    for (range, expected) in [
        ("bytes=0-99", 206),
        ("bytes=999-", 206),
        ("bytes=-1", 206),
        ("bytes=0-5000", 206),
        ("bytes=1000-", 416),
        ("bytes=-0", 416),
        ("bytes=0-1,1-2", 416),
        ("bytes=5-4", 400),
        ("lines=1-2", 400),
        ("bytes=\u{e9}", 400),
    ] {
        assert_eq!(status(server.address(), &path, &format!("Range: {range}\r\n"), ""), expected, "{range}");
    }
    let request = format!("{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=10-19\r\nConnection: close\r\n\r\n");
    let answer = support::raw(server.address(), request.as_bytes(), Duration::from_secs(5));
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("content-range: bytes 10-19/1000") && text.contains("content-length: 10"), "{text}");
    assert_eq!(answer[answer.len() - 10..], store.bytes("a")[10..20]);
    // A refused range breaks nothing: the lease keeps its time.
    assert_eq!(server.stats().leases, 1);
}
