//! The fake driver of `tests/gpu/fakecuda.c`, built once for this test program, and its memory.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use hotslot_core::cuda::Driver;
use hotslot_core::memory::{Region, Stream};
use libloading::{Library, Symbol};

/// A code that fails one call and loses nothing: `CUDA_ERROR_OUT_OF_MEMORY`.
pub const ONCE: i32 = 2;
/// A code that loses the context: `CUDA_ERROR_ILLEGAL_ADDRESS`.
pub const LOST: i32 = 700;

const DEVICES: i32 = 2;

/// The fake driver, for one test at a time: its faults and counters are the process's.
pub struct Fake {
    library: &'static Library,
    pub driver: &'static Driver,
    /// Copies of the test's own from or to memory that is not pinned.
    own_copies: Cell<i32>,
    _turn: MutexGuard<'static, ()>,
}

/// Calls a function of the fake: `call!(fake, c"name"(value: type, ...) -> type)`.
macro_rules! call {
    ($fake:expr, $name:literal($($value:expr => $type:ty),*) -> $result:ty) => {{
        type Function = unsafe extern "C" fn($($type),*) -> $result;
        // SAFETY: fakecuda.c defines the function with these types; pointers lead to variables of the caller's.
        unsafe {
            let function: Symbol<'_, Function> = $fake.library.get($name).unwrap();
            function($($value),*)
        }
    }};
}

/// As `call!`, for a driver function that must succeed.
macro_rules! succeed {
    ($fake:expr, $name:literal($($value:expr => $type:ty),*)) => {
        assert_eq!(call!($fake, $name($($value => $type),*) -> c_int), 0, "{:?}", $name)
    };
}

fn built() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gpu/fakecuda.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libfakecuda-{}.so", std::process::id()));
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .arg(source)
        .args(["-ldl", "-o"])
        .arg(&library)
        .status()
        .expect("cc builds the fake driver");
    assert!(status.success(), "cc failed on the fake driver");
    library
}

fn opened() -> (Library, &'static Driver) {
    // SAFETY: no other thread of this program reads or writes the environment meanwhile.
    unsafe { std::env::set_var("FAKE_CUDA_DEVICES", DEVICES.to_string()) };
    let path = built();
    // SAFETY: the library has no initialisers.
    let library = unsafe { Library::new(&path) }.unwrap();
    let driver = Driver::at(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    (library, driver)
}

fn handle(stream: Stream) -> *mut c_void {
    without_provenance_mut(stream.0 as usize)
}

impl Fake {
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        static OPEN: OnceLock<(Library, &'static Driver)> = OnceLock::new();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (library, driver) = OPEN.get_or_init(opened);
        let fake = Self { library, driver, own_copies: Cell::new(0), _turn: turn };
        fake.heal();
        call!(fake, c"fakecuda_forget"() -> ());
        // Contexts of the test's own, as a framework would have them.
        for device in 0..DEVICES {
            fake.retain(device);
        }
        fake
    }

    fn retain(&self, device: i32) -> *mut c_void {
        let mut context = null_mut();
        succeed!(self, c"cuDevicePrimaryCtxRetain"(&raw mut context => *mut *mut c_void, device => c_int));
        context
    }

    /// Counts from 0 and lets call `n` fail; a code that loses the context fails all later ones too.
    pub fn fail_at(&self, n: u64, code: i32) {
        let sticky = c_int::from(code == LOST);
        call!(self, c"fakecuda_fail_at"(n => u64, code => c_int, sticky => c_int) -> ());
    }

    /// Counts from 0 and lets no call fail.
    pub fn heal(&self) {
        self.fail_at(u64::MAX, 0);
    }

    pub fn calls(&self) -> u64 {
        call!(self, c"fakecuda_calls"() -> u64)
    }

    pub fn count(&self, name: &CStr) -> u64 {
        call!(self, c"fakecuda_count"(name.as_ptr() => *const c_char) -> u64)
    }

    /// The call that was made to fail.
    pub fn failed(&self) -> String {
        let name = call!(self, c"fakecuda_failed"() -> *const c_char);
        // SAFETY: the fake's own buffer, which only a call of a test changes.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    pub fn live(&self, what: &str) -> i32 {
        let what = CString::new(what).unwrap();
        call!(self, c"fakecuda_live"(what.as_ptr() => *const c_char) -> c_int)
    }

    /// What outlives the objects that made it, unless they free all.
    pub fn all_live(&self) -> [i32; 5] {
        ["pinned", "streams", "events", "contexts", "pushed"].map(|what| self.live(what))
    }

    /// Panics if the driver saw memory or handles used after their end, or a copy from memory that was not pinned.
    pub fn assert_clean(&self) {
        let mut text = null();
        let number = call!(self, c"fakecuda_problems"(&raw mut text => *mut *const c_char) -> c_int);
        // SAFETY: as in `failed`.
        assert_eq!(number, 0, "{}", unsafe { CStr::from_ptr(text) }.to_string_lossy());
        let pageable = call!(self, c"fakecuda_pageable"() -> c_int);
        assert_eq!(pageable, self.own_copies.get(), "copies from or to memory that is not pinned");
    }

    /// Runs driver calls of the test's own in a device's context.
    fn on_device<T>(&self, device: i32, run: impl FnOnce() -> T) -> T {
        let mut context = self.retain(device);
        succeed!(self, c"cuCtxPushCurrent_v2"(context => *mut c_void));
        let result = run();
        succeed!(self, c"cuCtxPopCurrent_v2"(&raw mut context => *mut *mut c_void));
        succeed!(self, c"cuDevicePrimaryCtxRelease_v2"(device => c_int));
        result
    }

    /// Device memory, as a framework would allocate it.
    pub fn allocate(&self, device: i32, len: u64) -> Region {
        let mut base = 0;
        self.on_device(device, || succeed!(self, c"cuMemAlloc_v2"(&raw mut base => *mut u64, len as usize => usize)));
        Region { base, len }
    }

    pub fn free(&self, device: i32, region: Region) {
        self.on_device(device, || succeed!(self, c"cuMemFree_v2"(region.base => u64)));
    }

    /// A stream that does not wait for the legacy one, as a framework's do not.
    pub fn stream(&self, device: i32) -> Stream {
        let mut made: *mut c_void = null_mut();
        self.on_device(device, || succeed!(self, c"cuStreamCreate"(&raw mut made => *mut *mut c_void, 1 => c_uint)));
        Stream(made.addr() as u64)
    }

    pub fn destroy(&self, device: i32, stream: Stream) {
        self.on_device(device, || succeed!(self, c"cuStreamDestroy_v2"(handle(stream) => *mut c_void)));
    }

    pub fn synchronize(&self, device: i32, stream: Stream) {
        self.on_device(device, || succeed!(self, c"cuStreamSynchronize"(handle(stream) => *mut c_void)));
    }

    /// Enqueues what stands for a kernel that reads the pool: a copy out of it. It runs when something waits for the stream.
    pub fn read_later(&self, device: i32, region: Region, stream: Stream) -> Box<[u8]> {
        let mut found = vec![0_u8; region.len as usize].into_boxed_slice();
        let to = found.as_mut_ptr().cast::<c_void>();
        self.on_device(device, || {
            succeed!(self, c"cuMemcpyDtoHAsync_v2"(
                to => *mut c_void, region.base => u64, region.len as usize => usize, handle(stream) => *mut c_void
            ));
        });
        self.own_copies.set(self.own_copies.get() + 1);
        found
    }

    /// Starts a capture of `stream` in this thread, in the mode that forbids most.
    pub fn begin_capture(&self, device: i32, stream: Stream) {
        self.on_device(device, || {
            succeed!(self, c"cuStreamBeginCapture_v2"(handle(stream) => *mut c_void, 0 => c_int));
        });
    }

    /// Ends it; the nodes of the graph, or the code.
    pub fn end_capture(&self, device: i32, stream: Stream) -> Result<usize, i32> {
        let (mut graph, mut number) = (null_mut(), 0);
        let code = self.on_device(device, || {
            call!(self, c"cuStreamEndCapture"(
                handle(stream) => *mut c_void, &raw mut graph => *mut *mut c_void
            ) -> c_int)
        });
        if code != 0 {
            return Err(code);
        }
        succeed!(self, c"cuGraphGetNodes"(
            graph => *mut c_void, null_mut() => *mut c_void, &raw mut number => *mut usize
        ));
        Ok(number)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.heal();
        for device in 0..DEVICES {
            call!(self, c"cuDevicePrimaryCtxRelease_v2"(device => c_int) -> c_int);
        }
    }
}
