//! CUDA devices, reached through the driver that is opened when it is first asked for.
//!
//! Nothing of CUDA is needed to build, link or load this crate. Where there is no driver, [`CudaMemory::open`] says so in an
//! [`Error::NoDevice`](crate::Error::NoDevice); nothing panics.
//!
//! The memory belongs to whoever allocated it, in the device's primary context, which `PyTorch`, `CuPy` and the CUDA runtime
//! use too. Each call makes that context current and puts the caller's back, so any thread may call, whatever device it works on.
//!
//! | file | noun |
//! | --- | --- |
//! | `driver` | the entry points |
//! | `context` | a device's primary context, and the codes that lose it |
//! | `staging` | pinned host memory that copies go through |
//! | `capture` | when nothing may be written: while a graph is captured |
//! | `memory` | [`CudaMemory`] |
#![allow(unsafe_code)]

mod capture;
mod context;
mod driver;
mod memory;
mod staging;

pub use capture::{Capture, capture};
pub use driver::Driver;
pub use memory::CudaMemory;
