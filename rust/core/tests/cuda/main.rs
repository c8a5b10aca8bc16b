//! The CUDA path on the fake driver of `tests/gpu/fakecuda.c`: memory, the life of a slot, readers, captures.
#![allow(unsafe_code)]

mod capture;
mod fake;
mod life_cycle;
mod memory;
#[path = "../pool/mod.rs"]
mod pool;
mod readers;
mod shards;

use std::sync::Arc;

use fake::Fake;
use hotslot_core::cuda::CudaMemory;
use hotslot_core::prelude::*;
use pool::{Adapter, spec};

/// A pool on a device, with what a test needs to look behind it.
struct CudaPool<'f> {
    weights: LoraWeights,
    compute: Stream,
    device: i32,
    regions: [Region; 2],
    fake: &'f Fake,
}

impl<'f> CudaPool<'f> {
    /// Three slots, the first pinned, all empty.
    fn empty(fake: &'f Fake, device: i32) -> Self {
        let mut spec = spec(3, 1);
        let bytes = spec.bytes().unwrap();
        let regions = [fake.allocate(device, bytes.pool), fake.allocate(device, bytes.tables)];
        // SAFETY: the regions are freed after the pool.
        let memory = unsafe { CudaMemory::open_with(fake.driver, device, &regions) }.unwrap();
        spec.copy_stream = memory.new_stream().unwrap();
        spec.compute_stream = fake.stream(device);
        let compute = spec.compute_stream;
        let weights = LoraWeights::new(spec, regions[0], None, regions[1], Arc::new(memory)).unwrap();
        Self { weights, compute, device, regions, fake }
    }

    /// With the startup adapter "s0" (value 1), and "a" (value 2) in slot 1.
    fn started(fake: &'f Fake) -> Self {
        let pool = Self::empty(fake, 0);
        Adapter::new("s0", 1.0).pack(&pool.weights, 0).unwrap();
        Adapter::new("a", 2.0).promote(&pool.weights, false).unwrap();
        pool
    }

    /// The memory of a slot.
    fn slot(&self, slot: usize) -> Region {
        Region { base: self.weights.slot_bases(slot).blocks, len: self.weights.layout().slot_bytes() }
    }

    /// The bytes of a slot now.
    fn slot_bytes(&self, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.slot(slot).len as usize];
        self.weights.read_pool(self.slot(slot).base, &mut bytes).unwrap();
        bytes
    }

    /// Ends the pool and frees its memory.
    fn close(self) {
        let Self { weights, compute, device, regions, fake } = self;
        drop(weights);
        fake.destroy(device, compute);
        for region in regions {
            fake.free(device, region);
        }
    }
}
