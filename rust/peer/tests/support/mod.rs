//! Exports in memory that count what is pinned, and peers that misbehave.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hotslot_peer::{
    ClientOptions, Exported, Exports, Facts, Lease, LeaseRefusal, Leased, PeerClient, PeerError, PeerServer, Progress,
    ServerOptions,
};

pub const LAYOUT: &str = "00ff";

/// Bytes without a pattern that a shifted or repeated piece could fit.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

#[derive(Clone)]
pub struct Packed {
    pub generation: u64,
    pub header: String,
    pub bytes: Arc<Vec<u8>>,
    /// Whether the bytes may be sent from where they lie.
    pub in_one_piece: bool,
}

/// Adapters in memory.
#[derive(Default)]
pub struct Store {
    pub adapters: Mutex<BTreeMap<String, Packed>>,
    pub pinned: Arc<AtomicUsize>,
    pub panics: AtomicBool,
    pub read_fails_at: Mutex<Option<u64>>,
}

pub struct Pin {
    packed: Packed,
    pinned: Arc<AtomicUsize>,
    fails_at: Option<u64>,
}

impl Store {
    pub fn with(adapters: &[(&str, usize)]) -> Arc<Self> {
        let store = Arc::new(Self::default());
        for (i, (name, len)) in adapters.iter().enumerate() {
            store.put(name, i as u64 + 1, noise(*len, i as u64 + 1));
        }
        store
    }

    pub fn put(&self, name: &str, generation: u64, bytes: Vec<u8>) {
        let header = Facts::of(&bytes, 1 << 20).to_json();
        let packed = Packed { generation, header, bytes: Arc::new(bytes), in_one_piece: generation % 2 == 1 };
        self.adapters.lock().unwrap().insert(name.to_owned(), packed);
    }

    pub fn bytes(&self, name: &str) -> Arc<Vec<u8>> {
        Arc::clone(&self.adapters.lock().unwrap()[name].bytes)
    }

    pub fn change(&self, name: &str, change: impl FnOnce(&mut Packed)) {
        change(self.adapters.lock().unwrap().get_mut(name).unwrap());
    }

    pub fn num_pinned(&self) -> usize {
        self.pinned.load(SeqCst)
    }
}

impl Exports for Store {
    fn manifest(&self) -> Vec<Exported> {
        assert!(!self.panics.load(SeqCst), "told to panic");
        let adapters = self.adapters.lock().unwrap();
        adapters
            .iter()
            .map(|(name, packed)| Exported::new(name, packed.generation, LAYOUT, packed.bytes.len() as u64))
            .collect()
    }

    fn lease(&self, adapter: &str, generation: Option<u64>) -> Result<Box<dyn Leased>, LeaseRefusal> {
        assert!(!self.panics.load(SeqCst), "told to panic");
        let packed = self.adapters.lock().unwrap().get(adapter).cloned().ok_or(LeaseRefusal::Unknown)?;
        if generation.is_some_and(|generation| generation != packed.generation) {
            return Err(LeaseRefusal::Changed);
        }
        self.pinned.fetch_add(1, SeqCst);
        Ok(Box::new(Pin { packed, pinned: Arc::clone(&self.pinned), fails_at: *self.read_fails_at.lock().unwrap() }))
    }
}

impl Leased for Pin {
    fn generation(&self) -> u64 {
        self.packed.generation
    }
    fn header_json(&self) -> &str {
        &self.packed.header
    }
    fn nbytes(&self) -> u64 {
        self.packed.bytes.len() as u64
    }
    fn piece(&self, offset: u64) -> Option<&[u8]> {
        self.packed.in_one_piece.then(|| &self.packed.bytes[offset as usize..])
    }
    fn read_at(&self, offset: u64, destination: &mut [u8]) -> io::Result<()> {
        if self.fails_at.is_some_and(|fails_at| offset + destination.len() as u64 > fails_at) {
            return Err(io::Error::other("the device failed"));
        }
        destination.copy_from_slice(&self.packed.bytes[offset as usize..][..destination.len()]);
        Ok(())
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.pinned.fetch_sub(1, SeqCst);
    }
}

pub fn serve(store: &Arc<Store>) -> PeerServer {
    PeerServer::start(Arc::clone(store) as Arc<dyn Exports>, ServerOptions::default()).unwrap()
}

pub fn serve_with(store: &Arc<Store>, change: impl FnOnce(&mut ServerOptions)) -> PeerServer {
    let mut options = ServerOptions::default();
    change(&mut options);
    PeerServer::start(Arc::clone(store) as Arc<dyn Exports>, options).unwrap()
}

pub fn client(server: &PeerServer) -> PeerClient {
    PeerClient::new(&server.address().to_string(), ClientOptions::default()).unwrap()
}

/// A client that gives up soon, for peers that will not answer.
pub fn hasty(address: SocketAddr) -> PeerClient {
    let options = ClientOptions {
        exchange_timeout: Duration::from_millis(600),
        transfer_timeout: Duration::from_millis(900),
        silence: Duration::from_millis(500),
        ..ClientOptions::default()
    };
    PeerClient::new(&address.to_string(), options).unwrap()
}

pub const TTL: Duration = Duration::from_secs(30);

/// Lease, fetch, release.
pub fn pull(client: &PeerClient, name: &str) -> Result<Vec<u8>, PeerError> {
    let lease = client.lease(name, None, TTL)?;
    let bytes = fetch(client, &lease)?;
    client.release(&lease)?;
    Ok(bytes)
}

pub fn fetch(client: &PeerClient, lease: &Lease) -> Result<Vec<u8>, PeerError> {
    let mut bytes = vec![0; lease.facts.nbytes as usize];
    client.fetch(lease, &mut bytes, &Progress::default())?;
    Ok(bytes)
}

/// Waits for something that another thread brings about.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Sends `request` as it is and reads until the server closes or is silent for `silence`.
pub fn raw(address: SocketAddr, request: &[u8], silence: Duration) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(silence)).unwrap();
    // The server may close before it has read everything.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(n @ 1..) = stream.read(&mut chunk) {
        answer.extend_from_slice(&chunk[..n]);
    }
    answer
}

/// The status of the first answer to `request`, with `Connection: close` and a host added.
pub fn status(address: SocketAddr, request_line: &str, headers: &str, body: &str) -> u16 {
    let request = format!(
        "{request_line} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    );
    let answer = raw(address, request.as_bytes(), Duration::from_secs(15));
    let text = String::from_utf8_lossy(&answer);
    text.get(9..12).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no status in {text:?}"))
}

/// A listener whose every connection is handled by a function, until it is dropped.
pub struct FakePeer {
    pub address: SocketAddr,
    pub num_connections: Arc<AtomicUsize>,
    is_closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakePeer {
    /// Handles connections one after the other, each with its number.
    pub fn new(mut handle: impl FnMut(usize, TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (num_connections, is_closed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counter, closed) = (Arc::clone(&num_connections), Arc::clone(&is_closed));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if closed.load(SeqCst) {
                    return;
                }
                let stream = stream.unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                handle(counter.fetch_add(1, SeqCst), stream);
            }
        });
        Self { address, num_connections, is_closed, thread: Some(thread) }
    }

    /// Answers every request with the same bytes, then closes.
    pub fn saying(answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        Self::new(move |_, mut stream| {
            request_head(&mut stream);
            let _ = stream.write_all(&answer);
            let _ = stream.shutdown(Shutdown::Both);
        })
    }
}

impl Drop for FakePeer {
    fn drop(&mut self) {
        self.is_closed.store(true, SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Reads the head of a request.
pub fn request_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
        head.push(byte[0]);
    }
    String::from_utf8_lossy(&head).into_owned()
}

/// A good answer with a body.
pub fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}
