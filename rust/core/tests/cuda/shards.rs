//! A pool whose layers lie on two devices: whole on both, or empty on both.

use std::sync::Arc;

use hotslot_core::cuda::CudaMemory;
use hotslot_core::prelude::*;
use hotslot_core::shards::{Home, Shards};

use crate::fake::{Fake, LOST, ONCE};
use crate::pool::{Adapter, model, pool, spec, value_in_slot};

/// Three slots, the first pinned; layer 0 on device 0, layer 1 on device 1.
struct ShardedPool<'f> {
    shards: Shards,
    compute: [Stream; 2],
    regions: Vec<(i32, Region)>,
    fake: &'f Fake,
}

impl<'f> ShardedPool<'f> {
    fn empty(fake: &'f Fake) -> Self {
        let (sites, mut regions) = (model().sites(), Vec::new());
        let homes: Vec<usize> = sites.iter().map(|site| site.layer.unwrap()).collect();
        let compute = [0, 1].map(|device| fake.stream(device));
        let parts = [0, 1].map(|device| {
            let own = sites.iter().filter(|site| site.layer == Some(device as usize)).cloned().collect();
            let mut spec = PoolSpec { sites: own, ..spec(3, 1) };
            let bytes = spec.bytes().unwrap();
            let own = [fake.allocate(device, bytes.pool), fake.allocate(device, bytes.tables)];
            regions.extend(own.map(|region| (device, region)));
            // SAFETY: the regions are freed after the pool.
            let memory = unsafe { CudaMemory::open_with(fake.driver, device, &own) }.unwrap();
            spec.copy_stream = memory.new_stream().unwrap();
            spec.compute_stream = compute[device as usize];
            LoraWeights::new(spec, own[0], None, own[1], Arc::new(memory)).unwrap()
        });
        let shards = Shards::new(parts.to_vec(), sites, &homes).unwrap();
        Self { shards, compute, regions, fake }
    }

    /// With "s0" (value 1) in slot 0 and "a" (value 2) in slot 1.
    fn started(fake: &'f Fake) -> Self {
        let pool = Self::empty(fake);
        small("s0", 1.0).with_input(|input| pool.shards.pack_slot(0, input)).unwrap();
        small("a", 2.0).with_input(|input| pool.shards.promote(input, false)).unwrap();
        pool
    }

    fn values(&self, slot: usize) -> [Option<f32>; 2] {
        [0, 1].map(|part| value_in_slot(&self.shards.parts()[part], slot))
    }

    /// Each slot that can be looked up is whole on both devices.
    fn assert_whole(&self, what: &str) {
        self.shards.check_integrity().unwrap();
        for info in self.shards.slot_infos() {
            match info.name.as_str() {
                "" => assert_eq!((info.state, info.nbytes), (SlotState::Empty, 0), "{what}"),
                name => {
                    let values = self.values(info.slot);
                    assert_eq!(values[0], values[1], "{what}: {info:?}");
                    let old = if name == "s0" { 1.0 } else { 2.0 };
                    assert!([Some(old), Some(9.0)].contains(&values[0]), "{what}: {info:?} holds {values:?}");
                }
            }
        }
    }

    fn close(self) {
        let Self { shards, compute, regions, fake } = self;
        drop(shards);
        for device in [0, 1] {
            fake.destroy(device, compute[device as usize]);
        }
        for (device, region) in regions {
            fake.free(device, region);
        }
    }
}

/// Of one site on each device.
fn small(name: &str, value: f32) -> Adapter {
    Adapter::of_sites(name, value, 2, vec![1, 9])
}

type Change = fn(&Shards) -> Result<()>;

const CHANGES: [(&str, Change); 6] = [
    ("startup load", |shards| small("s0", 9.0).with_input(|input| shards.pack_slot(0, input)).map(drop)),
    ("swap", |shards| small("new", 9.0).with_input(|input| shards.pack_store_into_slot(1, input)).map(drop)),
    ("promotion", |shards| small("new", 9.0).with_input(|input| shards.promote(input, false)).map(drop)),
    ("rotation", |shards| small("new", 9.0).with_input(|input| shards.promote(input, true)).map(drop)),
    ("replace", |shards| small("a", 9.0).with_input(|input| shards.replace(input, false)).map(drop)),
    ("unload", |shards| shards.unload("a", false).map(drop)),
];

#[test]
fn a_sharded_pool_lives_like_one_pool() {
    let fake = Fake::take();
    let before = fake.all_live();
    let sharded = ShardedPool::started(&fake);
    let shards = &sharded.shards;
    let one = pool(3, 1);
    small("s0", 1.0).pack(&one, 0).unwrap();
    small("a", 2.0).promote(&one, false).unwrap();
    let held = [shards.leader().acquire_by_name("a"), one.acquire_by_name("a")];
    small("a", 5.0).with_input(|input| shards.replace(input, false)).unwrap();
    small("a", 5.0).replace(&one).unwrap();
    assert_eq!((sharded.values(1), sharded.values(2)), ([Some(2.0); 2], [Some(5.0); 2]));
    assert!(matches!(
        small("full", 3.0).with_input(|input| shards.promote(input, true)),
        Ok(Loaded { evicted: Some(evicted), .. }) if evicted == "a"
    ));
    small("full", 3.0).promote(&one, true).unwrap();
    shards.release_slot_after(held[0], &[vec![sharded.compute[0]], vec![sharded.compute[1]]]);
    one.release_slot(held[1]);
    assert_eq!(shards.slot_infos(), one.slot_infos());
    // Also what has no layer on the leader's device, or none on the other.
    for (name, sites, expected) in [("far", vec![8, 13], [None, Some(4.0)]), ("near", vec![0], [Some(4.0), None])] {
        let adapter = Adapter::of_sites(name, 4.0, 1, sites);
        let loaded = adapter.with_input(|input| shards.pack_store_into_slot(1, input)).unwrap();
        let on_one = adapter.swap(&one, 1).unwrap();
        assert_eq!((sharded.values(1), loaded.cache_id), (expected, on_one.cache_id), "{name}");
        assert_eq!(loaded, on_one);
        // Found again where it is.
        assert!(adapter.with_input(|input| shards.promote(input, false)).unwrap().was_resident);
        shards.check_integrity().unwrap();
    }
    assert_eq!(shards.unload("near", false).unwrap().slot, 1);
    assert_eq!(sharded.values(1), [None, None]);
    fake.assert_clean();
    sharded.close();
    assert_eq!(fake.all_live(), before);
}

#[test]
fn a_fault_at_any_call_of_either_device_leaves_each_slot_whole_on_both_or_empty_on_both() {
    let fake = Fake::take();
    for (what, change) in CHANGES {
        let pool = ShardedPool::started(&fake);
        fake.heal();
        change(&pool.shards).unwrap();
        let calls = fake.calls();
        pool.close();
        for n in 0..calls {
            let pool = ShardedPool::started(&fake);
            fake.fail_at(n, ONCE);
            let result = change(&pool.shards);
            let what = format!("{what}, call {n} of {calls}: {}", fake.failed());
            fake.heal();
            assert!(matches!(result, Ok(()) | Err(Error::Device { sticky: false, .. })), "{what}: {result:?}");
            pool.assert_whole(&what);
            if result.is_err() {
                let empty = [0, 1].map(|part| {
                    let infos = pool.shards.parts()[part].slot_infos();
                    infos.iter().map(|info| info.state == SlotState::Empty).collect::<Vec<_>>()
                });
                assert_eq!(empty[0], empty[1], "{what}: left on one device");
            }
            assert_eq!((pool.shards.leader().ref_counts(), fake.live("pushed")), (vec![0; 3], 0));
            assert!(matches!(change(&pool.shards), Ok(()) | Err(Error::AdapterNotFound { .. })), "{what}");
            pool.assert_whole(&what);
            pool.close();
        }
        fake.assert_clean();
    }
}

#[test]
fn a_device_that_is_lost_ends_the_loads_of_the_whole_pool() {
    let fake = Fake::take();
    let pool = ShardedPool::started(&fake);
    fake.fail_at(60, LOST);
    assert!(matches!(CHANGES[2].1(&pool.shards), Err(Error::Device { sticky: true, .. })));
    fake.heal();
    let names = pool.shards.leader().adapter_names();
    for (what, change) in CHANGES {
        assert!(matches!(change(&pool.shards), Err(Error::Device { sticky: true, .. })), "{what}");
    }
    assert_eq!(pool.shards.leader().adapter_names(), names);
    pool.close();
}

#[test]
fn readers_are_waited_for_on_each_device() {
    let fake = Fake::take();
    let pool = ShardedPool::started(&fake);
    let place = |part: usize| {
        let weights = &pool.shards.parts()[part];
        Region { base: weights.slot_bases(1).blocks, len: weights.layout().slot_bytes() }
    };
    let old = [0, 1].map(|part| {
        let mut bytes = vec![0; place(part).len as usize];
        pool.shards.parts()[part].read_pool(place(part).base, &mut bytes).unwrap();
        bytes
    });
    let held = pool.shards.leader().acquire_by_name("a");
    let found = [0, 1].map(|part| fake.read_later(part as i32, place(part), pool.compute[part]));
    pool.shards.release_slot_after(held, &pool.compute.map(|stream| vec![stream]));
    small("new", 9.0).with_input(|input| pool.shards.pack_store_into_slot(1, input)).unwrap();
    for part in [0, 1] {
        fake.synchronize(part as i32, pool.compute[part]);
        assert!(found[part][..] == old[part][..], "part {part}");
    }
    fake.assert_clean();
    pool.close();
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let sites = model().sites();
    let part = |of: std::ops::Range<usize>, max_loras| {
        LoraWeights::on_host(PoolSpec { sites: sites[of].to_vec(), ..spec(max_loras, 0) }).unwrap()
    };
    let homes = |first: usize| (0..14).map(|site| usize::from(site >= first)).collect::<Vec<_>>();
    let refused = |parts: Vec<LoraWeights>, homes: &[usize]| {
        let error = Shards::new(parts, sites.clone(), homes).unwrap_err();
        assert!(matches!(error, Error::Value { .. }), "{error}");
    };
    let good = Shards::new(vec![part(0..7, 2), part(7..14, 2)], sites.clone(), &homes(7)).unwrap();
    assert_eq!((good.home(9), good.home(14)), (Some(Home { part: 1, site: 2 }), None));
    refused(vec![], &[]);
    refused(vec![part(0..7, 2), part(7..14, 3)], &homes(7));
    refused(vec![part(0..7, 2), part(7..14, 2)], &homes(6));
    refused(vec![part(7..14, 2), part(0..7, 2)], &homes(7));
    refused(vec![part(0..7, 2), part(7..14, 2)], &homes(7)[..13]);
    refused(vec![part(0..7, 2)], &homes(14)[..7]);
    refused(vec![part(0..14, 2), part(7..14, 2)], &homes(14));
}
