//! One adapter over loopback: a raw socket, a plain HTTP read of the same server, and fetches with each kind of verification,
//! interleaved. Prints medians of rounds and their share of the raw socket.
//!
//!     cargo bench -p hotslot-peer --bench transfer [-- ROUNDS]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotslot_peer::{
    ClientOptions, Exported, Exports, Facts, LeaseRefusal, Leased, PeerClient, PeerServer, Progress, ServerOptions,
    Verify,
};

#[derive(Clone)]
struct Packed {
    header: String,
    bytes: Arc<Vec<u8>>,
    in_one_piece: bool,
}

impl Leased for Packed {
    fn generation(&self) -> u64 {
        1
    }
    fn header_json(&self) -> &str {
        &self.header
    }
    fn nbytes(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn piece(&self, offset: u64) -> Option<&[u8]> {
        self.in_one_piece.then(|| &self.bytes[offset as usize..])
    }
    fn read_at(&self, offset: u64, destination: &mut [u8]) -> std::io::Result<()> {
        destination.copy_from_slice(&self.bytes[offset as usize..][..destination.len()]);
        Ok(())
    }
}

struct Two(Packed, Packed);

impl Exports for Two {
    fn manifest(&self) -> Vec<Exported> {
        Vec::new()
    }
    fn lease(&self, adapter: &str, _: Option<u64>) -> Result<Box<dyn Leased>, LeaseRefusal> {
        Ok(Box::new(if adapter == "direct" { self.0.clone() } else { self.1.clone() }))
    }
}

/// Sends and receives over a bare socket.
fn raw(bytes: &Arc<Vec<u8>>, destination: &mut [u8]) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    let source = Arc::clone(bytes);
    let sender = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a reader");
        for piece in source.chunks(1 << 20) {
            stream.write_all(piece).expect("a reader");
        }
        let _ = stream.shutdown(Shutdown::Write);
    });
    let started = Instant::now();
    let mut stream = TcpStream::connect(address).expect("a sender");
    for piece in destination.chunks_mut(256 << 10) {
        stream.read_exact(piece).expect("all bytes");
    }
    let elapsed = started.elapsed();
    sender.join().expect("the sender");
    elapsed
}

/// Reads a blob as any HTTP client would, without looking at it.
fn plain(server: &PeerServer, client: &PeerClient, destination: &mut [u8]) -> Duration {
    let lease = client.lease("direct", None, Duration::from_secs(60)).expect("a lease");
    let started = Instant::now();
    let mut stream = TcpStream::connect(server.address()).expect("the server");
    write!(
        stream,
        "GET /v1/peer/blob/{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        lease.id,
        server.address()
    )
    .expect("the server");
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a head");
        head.push(byte[0]);
    }
    for piece in destination.chunks_mut(256 << 10) {
        stream.read_exact(piece).expect("all bytes");
    }
    let elapsed = started.elapsed();
    client.release(&lease).expect("the server");
    elapsed
}

fn fetch(client: &PeerClient, name: &str, destination: &mut [u8]) -> Duration {
    let lease = client.lease(name, None, Duration::from_secs(60)).expect("a lease");
    let fetched = client.fetch(&lease, destination, &Progress::default()).expect("all bytes");
    client.release(&lease).expect("the server");
    fetched.elapsed
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(9);
    println!("{:>8} {:<22} {:>9} {:>8} {:>8}", "MB", "way", "ms", "GB/s", "of raw");
    for megabytes in [5, 50, 200] {
        let len = megabytes * 1_000_000;
        let bytes: Arc<Vec<u8>> =
            Arc::new((0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect());
        let header = Facts::of(&bytes, 1 << 20).to_json();
        let packed = |in_one_piece| Packed { header: header.clone(), bytes: Arc::clone(&bytes), in_one_piece };
        let exports = Arc::new(Two(packed(true), packed(false)));
        let server = PeerServer::start(exports, ServerOptions::default()).expect("a server");
        let client = |verify| {
            let options = ClientOptions { verify, ..ClientOptions::default() };
            PeerClient::new(&server.address().to_string(), options).expect("a client")
        };
        let (full, fast) = (client(Verify::Full), client(Verify::Fast));
        let mut destination = vec![0; len];
        let ways = ["raw socket", "plain HTTP", "fetch, fast", "fetch, full", "fetch, full, copied"];
        let mut times = vec![Vec::new(); ways.len()];
        for _ in 0..rounds {
            for (way, times) in times.iter_mut().enumerate() {
                destination.fill(0);
                times.push(match way {
                    0 => raw(&bytes, &mut destination),
                    1 => plain(&server, &fast, &mut destination),
                    2 => fetch(&fast, "direct", &mut destination),
                    3 => fetch(&full, "direct", &mut destination),
                    _ => fetch(&full, "copied", &mut destination),
                });
                assert!(destination == *bytes, "{}", ways[way]);
            }
        }
        let base = median(&mut times[0]);
        for (way, times) in ways.iter().zip(&mut times) {
            let time = median(times);
            println!(
                "{megabytes:>8} {way:<22} {:>9.2} {:>8.2} {:>7.0}%",
                time.as_secs_f64() * 1e3,
                len as f64 / time.as_secs_f64() / 1e9,
                100.0 * base.as_secs_f64() / time.as_secs_f64(),
            );
        }
    }
}
