//! A device's primary context: made current for each call, and put back after it.

use std::ffi::c_int;

use super::driver::{Code, Driver, Handle};
use crate::error::{Error, Result};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// Codes after which, by cuda.h, every later call fails as well, or that say that the context or the driver is gone.
const LOSES_THE_CONTEXT: [Code; 18] =
    [4, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];

/// The primary context of one device, retained for as long as this object lives.
#[derive(Debug)]
pub(super) struct Context {
    driver: &'static Driver,
    ordinal: c_int,
    handle: Handle,
}

// SAFETY: a context may be made current in any thread.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; the driver's calls are thread-safe.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of a device, which makes it if nobody has yet.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn retain(driver: &'static Driver, ordinal: i32) -> Result<Self> {
        let name = format!("cuda:{ordinal}");
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: both calls write the variables that they are given, and read nothing of ours.
        unsafe {
            let code = (driver.device_get)(&raw mut device, ordinal);
            if code != 0 {
                return Err(driver.no_device(&name, "cuDeviceGet", code));
            }
            let code = (driver.primary_retain)(&raw mut handle, device);
            if code != 0 {
                return Err(driver.no_device(&name, "cuDevicePrimaryCtxRetain", code));
            }
        }
        Ok(Self { driver, ordinal: device, handle })
    }

    /// The device's number.
    pub const fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Runs calls with the context current. The caller's own, or none, is current again afterwards.
    ///
    /// Set and set back, not pushed and popped: a pop that reports an earlier failure may have popped or not, and a second one could
    /// take the caller's. Where `PyTorch` works on the same device there is nothing to set.
    ///
    /// # Errors
    /// What `calls` says, or [`Error::Device`].
    pub fn run<T>(&self, calls: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the call writes the variable.
        self.check("cuCtxGetCurrent", unsafe { (self.driver.ctx_get_current)(&raw mut before) })?;
        if before == self.handle {
            return calls(self.driver);
        }
        // SAFETY: the context is retained.
        self.check("cuCtxSetCurrent", unsafe { (self.driver.ctx_set_current)(self.handle) })?;
        let result = calls(self.driver);
        // SAFETY: what was current before, or null for none.
        let restored = twice(|| unsafe { (self.driver.ctx_set_current)(before) });
        // The first error is the one that says something.
        result.and_then(|value| self.check("cuCtxSetCurrent", restored).map(|()| value))
    }

    /// As [`run`](Self::run), for calls that another thread's capture would otherwise forbid. They touch nothing that is
    /// captured, so a capture that nobody announced is not spoiled by them.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_relaxed<T>(&self, calls: impl FnOnce(&Driver) -> Result<T>) -> Result<T> {
        self.run(|driver| {
            let mut mode = RELAXED;
            // SAFETY: swaps the thread's mode with the variable.
            let code = unsafe { (driver.thread_exchange_capture_mode)(&raw mut mode) };
            self.check("cuThreadExchangeStreamCaptureMode", code)?;
            let result = calls(driver);
            let restored = twice(|| {
                let mut before = mode;
                // SAFETY: as above.
                unsafe { (driver.thread_exchange_capture_mode)(&raw mut before) }
            });
            result.and_then(|value| self.check("cuThreadExchangeStreamCaptureMode", restored).map(|()| value))
        })
    }

    /// [`Error::Device`] for any code but success.
    pub fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let detail = self.driver.describe(code);
        Err(Error::Device { call, code, detail, sticky: LOSES_THE_CONTEXT.contains(&code) })
    }
}

/// Runs a call that must not be left undone, once more if it fails.
fn twice(call: impl Fn() -> Code) -> Code {
    match call() {
        0 => 0,
        _ => call(),
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `retain`. What the call says at the end of a process, when the driver is gone, means nothing.
        unsafe { (self.driver.primary_release)(self.ordinal) };
    }
}
