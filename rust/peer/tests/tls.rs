//! TLS and mTLS, with certificates made for the test.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotslot_peer::{
    ClientOptions, ClientTls, Exports, PeerClient, PeerErrorKind, PeerServer, ServerOptions, ServerTls,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::{Store, client, eventually, hasty, pull, serve, serve_with};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate and its key.
fn issue(authority: &Authority, names: &[&str]) -> (Vec<u8>, Vec<u8>) {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, authority).unwrap();
    (certificate.pem().into_bytes(), key.serialize_pem().into_bytes())
}

fn server_tls(authority: &Authority, clients: Option<&Authority>) -> ServerTls {
    let (certificate, key) = issue(authority, &["127.0.0.1", "localhost", "replica-3"]);
    ServerTls { certificate, key, client_authority: clients.map(|clients| clients.pem().into_bytes()) }
}

fn client_with(server: &PeerServer, tls: ClientTls) -> PeerClient {
    let options = ClientOptions { tls: Some(tls), ..ClientOptions::default() };
    PeerClient::new(&server.address().to_string(), options).unwrap()
}

fn trusting(authority: &Authority) -> ClientTls {
    ClientTls { authority: authority.pem().into_bytes(), ..ClientTls::default() }
}

fn serve_tls(store: &Arc<Store>, tls: ServerTls) -> PeerServer {
    serve_with(store, |options| {
        options.tls = Some(tls);
        options.request_timeout = Duration::from_millis(700);
    })
}

#[test]
fn bytes_arrive_over_tls_as_they_were() {
    let (store, authority) = (Store::with(&[("a", 3_000_000), ("b", 10)]), authority());
    let server = serve_tls(&store, server_tls(&authority, None));
    let client = client_with(&server, trusting(&authority));
    for name in ["a", "b", "a"] {
        assert!(pull(&client, name).unwrap() == **store.bytes(name));
    }
    let named = ClientTls { server_name: Some("replica-3".to_owned()), ..trusting(&authority) };
    assert!(pull(&client_with(&server, named), "a").is_ok());
    // All over one connection each.
    eventually("one connection is left", || server.stats().connections == 1);
}

#[test]
fn a_server_of_another_authority_or_name_is_not_trusted() {
    let (store, authority, other) = (Store::with(&[("a", 10)]), authority(), authority());
    let server = serve_tls(&store, server_tls(&authority, None));
    let wrong_name = ClientTls { server_name: Some("replica-4".to_owned()), ..trusting(&authority) };
    for tls in [trusting(&other), wrong_name] {
        let error = client_with(&server, tls).manifest().unwrap_err();
        assert_eq!(error.kind, PeerErrorKind::Refused, "{error}");
    }
}

#[test]
fn with_mtls_only_clients_of_the_authority_are_served() {
    let (store, authority, clients) = (Store::with(&[("a", 1000)]), authority(), authority());
    let server = serve_tls(&store, server_tls(&authority, Some(&clients)));
    let with = |identity| client_with(&server, ClientTls { identity, ..trusting(&authority) });
    assert!(pull(&with(Some(issue(&clients, &["reader"]))), "a").unwrap() == **store.bytes("a"));
    for stranger in [None, Some(issue(&authority, &["reader"]))] {
        let error = with(stranger).manifest().unwrap_err();
        assert!(matches!(error.kind, PeerErrorKind::Refused | PeerErrorKind::Disconnected), "{error}");
    }
    assert_eq!(server.stats().leases_granted, 1);
    // Certificates are enough to serve beyond loopback; a certificate of the server alone is not.
    for (clients, expected) in [(Some(&clients), true), (None, false)] {
        let tls = Some(server_tls(&authority, clients));
        let options = ServerOptions { host: "0.0.0.0".to_owned(), tls, ..ServerOptions::default() };
        assert_eq!(PeerServer::start(Arc::clone(&store) as Arc<dyn Exports>, options).is_ok(), expected);
    }
}

#[test]
fn plain_and_tls_do_not_understand_each_other() {
    let (store, authority) = (Store::with(&[("a", 10)]), authority());
    let secure = serve_tls(&store, server_tls(&authority, None));
    let error = hasty(secure.address()).manifest().unwrap_err();
    assert!(matches!(error.kind, PeerErrorKind::Corrupt | PeerErrorKind::Disconnected), "{error}");
    let plain = serve(&store);
    let error = client_with(&plain, trusting(&authority)).manifest().unwrap_err();
    assert_eq!(error.kind, PeerErrorKind::Corrupt, "{error}");
    assert!(client(&plain).manifest().is_ok());
}

#[test]
fn a_handshake_that_does_not_end_is_cut_off() {
    let (store, authority) = (Store::with(&[("a", 10)]), authority());
    let server = serve_tls(&store, server_tls(&authority, None));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(&[0x16, 3, 1, 2, 0]).unwrap();
    eventually("accepted", || server.stats().connections == 1);
    let started = Instant::now();
    let _ = stream.read_to_end(&mut Vec::new());
    assert!(started.elapsed() < Duration::from_secs(5));
    eventually("cut off", || server.stats().connections == 0);
    for nonsense in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0; 300], &[0x16; 300], &[0xff; 5]] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let _ = stream.write_all(nonsense);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert!(client_with(&server, trusting(&authority)).manifest().is_ok());
}

#[test]
fn pem_that_is_none_is_refused_at_once() {
    let (store, authority) = (Store::with(&[("a", 10)]), authority());
    let good = server_tls(&authority, None);
    let other_key = issue(&authority, &["x"]).1;
    for tls in [
        ServerTls::default(),
        ServerTls { certificate: b"nonsense".to_vec(), ..good.clone() },
        ServerTls { key: good.certificate.clone(), ..good.clone() },
        ServerTls { key: other_key, ..good.clone() },
        ServerTls { client_authority: Some(Vec::new()), ..good.clone() },
    ] {
        let options = ServerOptions { tls: Some(tls), ..ServerOptions::default() };
        let error = PeerServer::start(Arc::clone(&store) as Arc<dyn Exports>, options).err().expect("refused");
        assert_eq!(error.kind, PeerErrorKind::Settings, "{error}");
    }
    for tls in [ClientTls::default(), ClientTls { server_name: Some("no name".to_owned()), ..trusting(&authority) }] {
        let options = ClientOptions { tls: Some(tls), ..ClientOptions::default() };
        assert_eq!(PeerClient::new("127.0.0.1:1", options).unwrap_err().kind, PeerErrorKind::Settings);
    }
}
