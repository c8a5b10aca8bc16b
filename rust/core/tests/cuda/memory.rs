use std::path::Path;
use std::sync::Arc;

use hotslot_core::Error;
use hotslot_core::cuda::{CudaMemory, Driver};
use hotslot_core::memory::{DeviceMemory, HostMemory, Region, Rows, Stream};

use crate::fake::{Fake, LOST, ONCE};

const MIB: u64 = 1 << 20;

fn open(fake: &Fake, device: i32, regions: &[Region]) -> hotslot_core::Result<CudaMemory> {
    // SAFETY: the regions are memory of the fake's, or the call refuses them.
    unsafe { CudaMemory::open_with(fake.driver, device, regions) }
}

/// Bytes without a period that a lost or doubled chunk could hide behind.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn read(memory: &CudaMemory, region: Region, stream: Stream) -> Vec<u8> {
    let mut bytes = vec![0; region.len as usize];
    memory.copy_d2h(&mut bytes, region.base, stream).unwrap();
    bytes
}

#[test]
fn what_is_copied_in_larger_pieces_than_the_staging_comes_out_again() {
    let fake = Fake::take();
    let region = fake.allocate(0, 21 * MIB);
    let memory = open(&fake, 0, &[region]).unwrap();
    let stream = memory.new_stream().unwrap();
    let bytes = noise(region.len as usize, 7);
    memory.copy_h2d(region.base, &bytes, stream).unwrap();
    assert!(read(&memory, region, stream) == bytes);
    // And from a file, into the middle.
    let path = std::env::temp_dir().join(format!("hotslot-cuda-{}", std::process::id()));
    std::fs::write(&path, noise(9 << 20, 8)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    memory.copy_from_file(region.base + 5, 9 * MIB - 3, &file, 3, stream).unwrap();
    let mut expected = bytes;
    expected[5..][..(9 << 20) - 3].copy_from_slice(&noise(9 << 20, 8)[3..]);
    assert!(read(&memory, region, stream) == expected);
    assert!(matches!(
        memory.copy_from_file(region.base, 64, &file, 9 * MIB - 3, stream),
        Err(Error::AdapterFile { .. })
    ));
    std::fs::remove_file(&path).unwrap();
    memory.copy_d2d(region.base, region.base + MIB, MIB, stream).unwrap();
    memory.zero(region.base + MIB, MIB, stream).unwrap();
    expected.copy_within(1 << 20..2 << 20, 0);
    expected[1 << 20..2 << 20].fill(0);
    assert!(read(&memory, region, stream) == expected);
    fake.assert_clean();
    drop(memory);
    fake.free(0, region);
}

#[test]
fn a_strided_copy_writes_what_the_host_would_write() {
    let fake = Fake::take();
    for (rows, size) in [
        (Rows { dst_pitch: 24, src_pitch: 8, width: 8, height: 1344 }, 1344 * 24),
        (Rows { dst_pitch: 5, src_pitch: 3, width: 2, height: 1000 }, 5000),
        // More than a chunk of staging.
        (Rows { dst_pitch: 16, src_pitch: 8, width: 8, height: 600_000 }, 600_000 * 16),
        (Rows { dst_pitch: 3 * MIB, src_pitch: 3 << 20, width: 3 << 20, height: 3 }, 9 << 20),
    ] {
        let region = fake.allocate(0, size);
        let memory = open(&fake, 0, &[region]).unwrap();
        let stream = memory.new_stream().unwrap();
        let source = noise(rows.src_pitch * rows.height, 3);
        let mut expected = noise(size as usize, 4);
        memory.copy_h2d(region.base, &expected, stream).unwrap();
        memory.copy_h2d_2d(region.base, &source, rows, stream).unwrap();
        let base = expected.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the vector is read after the object is gone.
        let host = unsafe { HostMemory::new(&[Region { base, len: size }]) }.unwrap();
        host.copy_h2d_2d(base, &source, rows, stream).unwrap();
        drop(host);
        assert!(read(&memory, region, stream) == expected, "{rows:?}");
        // Outside by one byte, or from too few bytes: refused before anything is enqueued.
        let before = fake.count(c"cuMemcpy2DAsync");
        assert!(matches!(
            memory.copy_h2d_2d(region.base + rows.dst_pitch, &source, rows, stream),
            Err(Error::Region { .. })
        ));
        let few = &source[..source.len() - (rows.src_pitch - rows.width) - 1];
        assert!(matches!(memory.copy_h2d_2d(region.base, few, rows, stream), Err(Error::Value { .. })));
        assert_eq!(fake.count(c"cuMemcpy2DAsync"), before);
        drop(memory);
        fake.free(0, region);
    }
    fake.assert_clean();
}

#[test]
fn a_source_may_change_as_soon_as_its_call_returns() {
    let fake = Fake::take();
    let region = fake.allocate(0, 4096);
    let memory = open(&fake, 0, &[region]).unwrap();
    let stream = memory.new_stream().unwrap();
    let mut source = vec![1; 4096];
    memory.copy_h2d(region.base, &source, stream).unwrap();
    source.fill(2);
    drop(source);
    memory.synchronize(stream).unwrap();
    assert_eq!(read(&memory, region, stream), [1; 4096]);
    fake.assert_clean();
    drop(memory);
    fake.free(0, region);
}

#[test]
fn no_call_leaves_the_memory_that_was_handed_over() {
    let fake = Fake::take();
    let whole = fake.allocate(0, 1024);
    let region = Region { base: whole.base + 256, len: 512 };
    let memory = open(&fake, 0, &[region]).unwrap();
    let stream = memory.new_stream().unwrap();
    let (first, end) = (region.base, region.base + region.len);
    for address in [first - 1, end - 7, 0, u64::MAX - 3] {
        assert!(matches!(memory.copy_h2d(address, &[0; 8], stream), Err(Error::Region { len: 8, .. })), "{address:#x}");
        assert!(matches!(memory.copy_d2h(&mut [0; 8], address, stream), Err(Error::Region { .. })));
        assert!(matches!(memory.zero(address, 8, stream), Err(Error::Region { .. })));
        assert!(matches!(memory.copy_d2d(first, address, 8, stream), Err(Error::Region { .. })));
        assert!(matches!(memory.copy_d2d(address, first, 8, stream), Err(Error::Region { .. })));
    }
    assert!(matches!(memory.copy_d2d(first, first + 4, 8, stream), Err(Error::Region { .. })));
    fake.assert_clean();
    drop(memory);
    fake.free(0, whole);
}

#[test]
fn memory_that_is_not_the_devices_is_refused() {
    let fake = Fake::take();
    let (here, there) = (fake.allocate(0, 512), fake.allocate(1, 512));
    assert!(open(&fake, 0, &[here]).is_ok() && open(&fake, 1, &[there]).is_ok());
    let text = open(&fake, 0, &[here, there]).unwrap_err().to_string();
    assert!(text.contains("of cuda:1") && text.contains("memory of cuda:0"), "{text}");
    let host = [0_u8; 64];
    let region = Region { base: host.as_ptr().expose_provenance() as u64, len: 64 };
    let text = open(&fake, 0, &[region]).unwrap_err().to_string();
    assert!(text.contains("no device memory"), "{text}");
    assert!(open(&fake, 0, &[Region { base: 0, len: 8 }]).is_err());
    assert!(open(&fake, 0, &[here, here]).is_err());
    fake.free(0, here);
    // Also what was freed.
    assert!(open(&fake, 0, &[here]).is_err());
    fake.free(1, there);
}

#[test]
fn where_there_is_no_driver_or_device_an_error_says_so() {
    let fake = Fake::take();
    let error = Driver::at(Path::new("/nowhere/libcuda.so.1")).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { call: "dlopen", .. }), "{error}");
    assert!(error.to_string().contains("/nowhere/libcuda.so.1"), "{error}");
    // Another library under its name.
    let error = Driver::at(Path::new("libm.so.6")).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { call: "dlsym", .. }) && error.to_string().contains("cuInit"), "{error}");
    let error = open(&fake, 7, &[Region { base: 4096, len: 8 }]).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { call: "cuDeviceGet", code: 101, .. }), "{error}");
    for found in ["cuda:7", "CUDA_ERROR_INVALID_DEVICE", "101"] {
        assert!(error.to_string().contains(found), "{error}");
    }
    // This machine may have a driver: whatever it has, asking twice gives the same answer and no panic.
    assert_eq!(Driver::system().is_ok(), Driver::system().is_ok());
}

#[test]
fn an_error_names_its_call_and_code_and_whether_the_context_is_lost() {
    let fake = Fake::take();
    let mut seen = Vec::new();
    let region = fake.allocate(0, 4096);
    for (code, is_lost) in [
        (1, false),
        (ONCE, false),
        (400, false),
        (900, false),
        (123_456, false),
        (LOST, true),
        (719, true),
        (201, true),
    ] {
        let memory = open(&fake, 0, &[region]).unwrap();
        let stream = memory.new_stream().unwrap();
        // Until all staging is made and in use: from then on every copy makes the same calls.
        for _ in 0..8 {
            fake.heal();
            memory.copy_h2d(region.base, &[1; 64], stream).unwrap();
        }
        let calls = fake.calls();
        for n in 0..calls {
            fake.fail_at(n, code);
            let result = memory.copy_h2d(region.base, &[1; 64], stream);
            let failed = fake.failed();
            fake.heal();
            if failed.is_empty() {
                // A chunk was free this time, and there was nothing to wait for.
                assert!(result.is_ok());
            } else if result.is_ok() {
                // Put back at the second attempt.
                assert!(
                    ["cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"].contains(&failed.as_str()),
                    "{failed}"
                );
            } else {
                let Err(Error::Device { call, code: found, detail, sticky }) = result else {
                    panic!("{failed}: {result:?}")
                };
                assert_eq!((call, found, sticky), (failed.as_str(), code, is_lost));
                assert_eq!(detail.starts_with("CUDA_ERROR"), code != 123_456, "{detail}");
                seen.push(failed);
            }
        }
        memory.synchronize(stream).unwrap();
    }
    for call in ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"] {
        assert!(seen.iter().any(|seen| seen == call), "{call} of {seen:?}");
    }
    fake.free(0, region);
}

#[test]
fn a_fault_at_any_call_leaves_the_callers_context_and_later_copies_as_they_were() {
    let fake = Fake::take();
    let region = fake.allocate(0, 9 * MIB);
    let bytes = noise(region.len as usize, 5);
    let rows = Rows { dst_pitch: 16, src_pitch: 8, width: 8, height: 100 };
    let all = |memory: &CudaMemory, stream: Stream, found: &mut [u8]| -> hotslot_core::Result<()> {
        memory.copy_h2d(region.base, &bytes, stream)?;
        memory.zero(region.base, 16, stream)?;
        memory.copy_h2d_2d(region.base, &bytes, rows, stream)?;
        memory.copy_d2d(region.base, region.base + MIB, 64, stream)?;
        memory.synchronize(stream)?;
        memory.copy_d2h(found, region.base, stream)
    };
    let run = |n: u64| -> (hotslot_core::Result<()>, u64) {
        let before = fake.all_live();
        let memory = open(&fake, 0, &[region]).unwrap();
        let stream = memory.new_stream().unwrap();
        let other = fake.stream(0);
        let (mut found, mut again) = (vec![0; bytes.len()], vec![0; bytes.len()]);
        fake.fail_at(n, ONCE);
        let mut result = all(&memory, stream, &mut found);
        if result.is_ok() {
            result = memory.mark(other, &mut Vec::new());
        }
        let calls = fake.calls();
        fake.heal();
        assert_eq!(fake.live("pushed"), before[4], "call {n}");
        all(&memory, stream, &mut again).unwrap();
        if result.is_ok() {
            assert!(found == again);
        }
        drop(memory);
        fake.destroy(0, other);
        assert_eq!(fake.all_live(), before, "call {n}");
        (result, calls)
    };
    let (healthy, calls) = run(u64::MAX);
    healthy.unwrap();
    for n in 0..calls {
        let (result, _) = run(n);
        assert!(matches!(result, Ok(()) | Err(Error::Device { sticky: false, .. })), "call {n}: {result:?}");
    }
    fake.assert_clean();
    fake.free(0, region);
}

#[test]
fn threads_with_another_device_current_copy_at_the_same_time() {
    let fake = Fake::take();
    let regions = [0, 1].map(|device| fake.allocate(device, 16 * MIB));
    let memories = [0, 1].map(|device| Arc::new(open(&fake, device, &[regions[device as usize]]).unwrap()));
    std::thread::scope(|scope| {
        for thread in 0..6_usize {
            let (device, place) = (thread % 2, thread / 2);
            let (memory, base) = (Arc::clone(&memories[device]), regions[device].base + place as u64 * 5 * MIB);
            scope.spawn(move || {
                let stream = memory.new_stream().unwrap();
                for round in 0..8 {
                    let bytes = noise((5 << 20) - 1, 100 * thread as u64 + round);
                    memory.copy_h2d(base, &bytes, stream).unwrap();
                    let mut found = vec![0; bytes.len()];
                    memory.copy_d2h(&mut found, base, stream).unwrap();
                    assert!(found == bytes);
                }
            });
        }
    });
    assert_eq!(fake.live("pushed"), 0);
    fake.assert_clean();
    drop(memories);
    for (device, region) in regions.into_iter().enumerate() {
        fake.free(device as i32, region);
    }
}
