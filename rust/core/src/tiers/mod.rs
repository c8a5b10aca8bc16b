//! Where packed adapters wait for a slot: host memory and disk.
//!
//! A tier holds copies of what it was given, under a budget of bytes, and forgets the least recently used first. It is never the
//! only place of anything: what a tier has lost is fetched again from where it came.

pub mod disk;
pub mod file;
mod hold;
pub mod host;
mod refs;
