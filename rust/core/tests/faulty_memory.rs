//! Device calls counted and made to fail, one after the other.
#![cfg(feature = "fault-injection")]
#![allow(unsafe_code)]

use hotslot_core::Error;
use hotslot_core::config::PeftAdapterConfig;
use hotslot_core::identity::Digest;
use hotslot_core::layout::{Dtype, Layout, Site, SlotBases};
use hotslot_core::memory::{DeviceMemory, FaultyMemory, HostMemory, Region, Stream};
use hotslot_core::pack::{PairInput, Staged, Staging};
use hotslot_core::source::{Source, SourceDtype};
use hotslot_core::tables::{SlotCells, Tables};

const S: Stream = Stream(0);

/// Runs `test` on a device of `len` bytes at a 256-byte boundary.
fn on_device(len: u64, test: impl FnOnce(&FaultyMemory<HostMemory>, Region)) {
    let mut memory = vec![0xff_u8; len as usize + 256];
    let base = memory.as_mut_ptr().expose_provenance() as u64;
    let region = Region { base: base.next_multiple_of(256), len };
    // SAFETY: the vector is not touched by anything else until the test is over.
    let host = unsafe { HostMemory::new(&[region]) }.unwrap();
    test(&FaultyMemory::new(host), region);
    drop(memory);
}

fn cells(num_sites: usize, seed: u64) -> SlotCells {
    let mut cells = SlotCells::empty(num_sites);
    for site in 0..num_sites {
        cells.set_pair(site, seed + site as u64, seed * 3 + site as u64, seed as f32 + 0.5, seed as i32);
    }
    cells.set_scaling(seed as f32);
    cells
}

#[test]
fn a_refresh_of_48_layers_of_7_modules_makes_at_most_8_device_calls() {
    let num_sites = 48 * 7;
    on_device(Tables::bytes(num_sites, 16).unwrap(), |device, region| {
        let tables = Tables::new(region, num_sites, 16).unwrap();
        tables.clear(device, S).unwrap();
        device.heal();
        tables.refresh_slot_tables(device, 5, &cells(num_sites, 9), S).unwrap();
        assert!(device.calls() <= 8, "{} calls to refresh", device.calls());
        device.heal();
        tables.clear_slot(device, 5, S).unwrap();
        assert!(device.calls() <= 8, "{} calls to clear", device.calls());
    });
}

#[test]
fn a_refresh_rewrites_the_cells_of_its_slot_and_of_no_other() {
    let (num_sites, max_loras) = (5, 4);
    on_device(Tables::bytes(num_sites, max_loras).unwrap(), |device, region| {
        let tables = Tables::new(region, num_sites, max_loras).unwrap();
        tables.clear(device, S).unwrap();
        let read = |slot| tables.read_slot(device, slot, S).unwrap();
        for slot in 0..max_loras {
            assert!(read(slot).is_empty());
            tables.refresh_slot_tables(device, slot, &cells(num_sites, slot as u64 + 1), S).unwrap();
        }
        tables.clear_slot(device, 2, S).unwrap();
        for slot in 0..max_loras {
            let expected = if slot == 2 { SlotCells::empty(num_sites) } else { cells(num_sites, slot as u64 + 1) };
            assert_eq!(read(slot), expected);
        }
        let mut scale = [0; 4];
        device.copy_d2h(&mut scale, tables.scale_table() + 4 * 3, S).unwrap();
        assert_eq!(f32::from_ne_bytes(scale).to_bits(), 4_f32.to_bits());
        assert!(matches!(tables.clear_slot(device, 4, S), Err(Error::SlotRange { slot: 4, max_loras: 4 })));
        assert!(tables.refresh_slot_tables(device, 0, &cells(6, 1), S).is_err());
    });
}

#[test]
fn pointers_are_written_last_and_cleared_first() {
    let num_sites = 3;
    on_device(Tables::bytes(num_sites, 2).unwrap(), |device, region| {
        let tables = Tables::new(region, num_sites, 2).unwrap();
        let has_pointer = || tables.read_slot(device, 1, S).unwrap().pointers.iter().any(|&pointer| pointer != 0);
        let num_calls = 4;
        tables.clear(device, S).unwrap();
        for n in 0..num_calls {
            device.fail_at(n, false);
            assert!(tables.refresh_slot_tables(device, 1, &cells(num_sites, 7), S).is_err());
            assert_eq!(has_pointer(), n == num_calls - 1, "failed at {n}");
        }
        for n in 1..num_calls {
            device.heal();
            tables.refresh_slot_tables(device, 1, &cells(num_sites, 7), S).unwrap();
            device.fail_at(n, false);
            assert!(tables.clear_slot(device, 1, S).is_err());
            assert!(!has_pointer(), "failed at {n}");
        }
    });
}

#[test]
fn a_write_reports_the_failure_of_each_of_its_calls_and_works_the_next_time() {
    let sites = (0..3).map(|i| Site::linear(format!("layers.{i}.proj"), 16, 16)).collect();
    let layout = Layout::new(sites, 8, Dtype::Bf16).unwrap();
    let half = [1; 64];
    let pair = |site| PairInput {
        site,
        rank: 2,
        scale: 1.0,
        a: Source::in_memory(&half, SourceDtype::Bf16, 2, 16),
        b: Source::in_memory(&half, SourceDtype::Bf16, 16, 2),
    };
    let config = PeftAdapterConfig::new(2, 2.0, false).unwrap();
    let staged =
        Staged::read(&layout, &config, &[0, 1, 2].map(pair), &[], Digest::Compute, Staging::default()).unwrap();
    on_device(layout.slot_bytes(), |device, region| {
        let bases = SlotBases { blocks: region.base, extras: 0 };
        staged.write(device, bases, S).unwrap();
        let num_calls = device.calls();
        assert_eq!(num_calls, staged.num_copies() as u64 + 1);
        for n in 0..num_calls {
            device.fail_at(n, false);
            let error = staged.write(device, bases, S).unwrap_err();
            assert!(matches!(error, Error::Device { code: 719, sticky: false, .. }), "{error}");
            assert_eq!(device.calls(), n + 1);
            staged.write(device, bases, S).unwrap();
        }
        device.fail_at(1, true);
        assert!(staged.write(device, bases, S).is_err());
        assert!(staged.write(device, bases, S).is_err());
    });
}
