//! The driver's entry points, found by name in a library that is opened at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{Error, Result};

/// A pointer of the driver's: a context, a stream or an event.
pub(super) type Handle = *mut c_void;

/// `CUresult`. A number: a newer driver has codes that this crate does not know.
pub(super) type Code = c_int;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub(super) struct Memcpy2D {
    pub src_x: usize,
    pub src_y: usize,
    pub src_type: c_uint,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: Handle,
    pub src_pitch: usize,
    pub dst_x: usize,
    pub dst_y: usize,
    pub dst_type: c_uint,
    pub dst_host: Handle,
    pub dst_device: u64,
    pub dst_array: Handle,
    pub dst_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// Where the driver is looked for, in this order. The second is a name that some systems have alone.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

macro_rules! entry_points {
    ($($field:ident: $symbol:literal($($argument:ty),*);)*) => {
        /// An open CUDA driver. It is never closed: a process has one driver, for good.
        pub struct Driver {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Since CUDA 12.0.
            pub(super) stream_get_id: Option<unsafe extern "C" fn(Handle, *mut c_ulonglong) -> Code>,
            _library: Library,
        }

        impl Driver {
            fn of(library: Library) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the symbol is a function of this type in every driver that has it (cuda.h); it is called only
                        // while the library is open, which is for ever.
                        *unsafe { library.get($symbol) }.map_err(|_| too_old($symbol))?
                    },)*
                    // SAFETY: as above.
                    stream_get_id: unsafe { library.get(c"cuStreamGetId") }.ok().map(|symbol| *symbol),
                    _library: library,
                })
            }
        }
    };
}

entry_points! {
    init: c"cuInit"(c_uint);
    device_get: c"cuDeviceGet"(*mut c_int, c_int);
    primary_retain: c"cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    primary_release: c"cuDevicePrimaryCtxRelease_v2"(c_int);
    ctx_get_current: c"cuCtxGetCurrent"(*mut Handle);
    ctx_set_current: c"cuCtxSetCurrent"(Handle);
    ctx_synchronize: c"cuCtxSynchronize"();
    mem_host_alloc: c"cuMemHostAlloc"(*mut Handle, usize, c_uint);
    mem_free_host: c"cuMemFreeHost"(Handle);
    memcpy_h2d_async: c"cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
    memcpy_d2h_async: c"cuMemcpyDtoHAsync_v2"(Handle, u64, usize, Handle);
    memcpy_d2d_async: c"cuMemcpyDtoDAsync_v2"(u64, u64, usize, Handle);
    memcpy_2d_async: c"cuMemcpy2DAsync_v2"(*const Memcpy2D, Handle);
    memset_d8_async: c"cuMemsetD8Async"(u64, u8, usize, Handle);
    pointer_get_attribute: c"cuPointerGetAttribute"(*mut c_void, c_int, u64);
    stream_create: c"cuStreamCreate"(*mut Handle, c_uint);
    stream_destroy: c"cuStreamDestroy_v2"(Handle);
    stream_synchronize: c"cuStreamSynchronize"(Handle);
    stream_wait_event: c"cuStreamWaitEvent"(Handle, Handle, c_uint);
    stream_is_capturing: c"cuStreamIsCapturing"(Handle, *mut c_int);
    thread_exchange_capture_mode: c"cuThreadExchangeStreamCaptureMode"(*mut c_int);
    event_create: c"cuEventCreate"(*mut Handle, c_uint);
    event_destroy: c"cuEventDestroy_v2"(Handle);
    event_record: c"cuEventRecord"(Handle, Handle);
    event_query: c"cuEventQuery"(Handle);
    event_synchronize: c"cuEventSynchronize"(Handle);
    get_error_name: c"cuGetErrorName"(Code, *mut *const c_char);
    get_error_string: c"cuGetErrorString"(Code, *mut *const c_char);
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// The system's driver, opened and initialised by the first call.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none, it is too old, or it finds no device. The answer stays the same for the life of the
    /// process.
    pub fn system() -> Result<&'static Self> {
        static SYSTEM: OnceLock<Result<Driver>> = OnceLock::new();
        SYSTEM.get_or_init(|| Self::open_first(&LIBRARIES.map(Path::new))).as_ref().map_err(Clone::clone)
    }

    /// A driver at a path, for one that the loader does not find by itself.
    ///
    /// # Errors
    /// As [`system`](Self::system).
    pub fn at(path: &Path) -> Result<&'static Self> {
        Ok(Box::leak(Box::new(Self::open_first(&[path])?)))
    }

    fn open_first(paths: &[&Path]) -> Result<Self> {
        let mut reasons = Vec::new();
        for path in paths {
            // SAFETY: opening a driver runs its initialisers, as linking to it would.
            match unsafe { Library::new(*path) } {
                Ok(library) => {
                    let driver = Self::of(library)?;
                    // SAFETY: takes no pointer.
                    let code = unsafe { (driver.init)(0) };
                    return if code == 0 { Ok(driver) } else { Err(driver.no_device("any", "cuInit", code)) };
                }
                // The error's own text says only that opening failed; its source says why.
                Err(error) => {
                    reasons.push(std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string));
                }
            }
        }
        Err(Error::NoDevice { device: "any".to_owned(), call: "dlopen", code: 0, detail: reasons.join("; ") })
    }

    /// What the driver calls a code, and what it says of it.
    pub(super) fn describe(&self, code: Code) -> String {
        let text = |ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut found = std::ptr::null();
            // SAFETY: the pointer is written by the call, to a string that is never freed, or to null.
            unsafe {
                let known = ask(code, &raw mut found) == 0 && !found.is_null();
                known.then(|| CStr::from_ptr(found).to_string_lossy().into_owned())
            }
        };
        match (text(self.get_error_name), text(self.get_error_string)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => "a code that the driver has no name for".to_owned(),
        }
    }

    /// The error of a device that cannot be opened.
    pub(super) fn no_device(&self, device: &str, call: &'static str, code: Code) -> Error {
        Error::NoDevice { device: device.to_owned(), call, code, detail: self.describe(code) }
    }
}

fn too_old(symbol: &CStr) -> Error {
    let detail = format!("the driver has no {}, so it is older than CUDA 11", symbol.to_string_lossy());
    Error::NoDevice { device: "any".to_owned(), call: "dlsym", code: 0, detail }
}
