//! [`CudaMemory`]: the memory of one GPU as the pool writes it.

use std::ffi::c_int;
use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use super::capture::{CAPTURE_UNSUPPORTED, Call};
use super::context::Context;
use super::driver::{Driver, Handle, Memcpy2D};
use super::staging::{CHUNK, NO_TIMING, Staging, handle, synchronize};
use crate::error::{Error, Result};
use crate::memory::{DeviceMemory, Mark, Region, Regions, Rows, Stream, read_exact_at};
use crate::sync::{Mutex, lock};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the legacy default stream, nor that for it.
const NON_BLOCKING: u32 = 1;
/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: what the legacy stream says while a stream that it waits for is captured.
const CAPTURE_IMPLICIT: i32 = 906;
/// How long a call waits for a capture that nobody announced, and how often it looks.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The memory of one GPU, which someone else allocated in the device's primary context.
///
/// Calls may be made from any thread, whatever context is current there. Copies go through pinned chunks, so the caller's memory is
/// free when a call returns. All calls pause while a graph is captured (see [`capture`](super::capture)).
#[derive(Debug)]
pub struct CudaMemory {
    regions: Regions,
    staging: Staging,
    /// Streams that this object made.
    streams: Mutex<Vec<Stream>>,
    /// Events that mark nothing at present.
    spare_events: Mutex<Vec<u64>>,
    /// All events that were made for marks.
    events: Mutex<Vec<u64>>,
    context: Context,
}

impl CudaMemory {
    /// Takes charge of `regions` on a device, without owning them; the system's driver is opened if it is not yet.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no driver or no such device; [`Error::Value`] if a region is no memory of that device, or
    /// as [`HostMemory::new`](crate::memory::HostMemory::new).
    ///
    /// # Safety
    /// Each region must be memory of the device for as long as this object lives, and nothing but work that is ordered with this
    /// object's by streams, events and the rules of slots may touch it.
    pub unsafe fn open(device: i32, regions: &[Region]) -> Result<Self> {
        // SAFETY: passed on.
        unsafe { Self::open_with(Driver::system()?, device, regions) }
    }

    /// As [`open`](Self::open), with a driver of the caller's.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Safety
    /// As [`open`](Self::open).
    pub unsafe fn open_with(driver: &'static Driver, device: i32, regions: &[Region]) -> Result<Self> {
        let regions_checked = Regions::new(regions)?;
        let memory = Self {
            regions: regions_checked,
            staging: Staging::default(),
            streams: Mutex::default(),
            spare_events: Mutex::default(),
            events: Mutex::default(),
            context: Context::retain(driver, device)?,
        };
        for region in regions {
            memory.check_device(region.base, *region)?;
            memory.check_device(region.base + region.len - 1, *region)?;
        }
        Ok(memory)
    }

    /// The device's number.
    #[must_use]
    pub fn device(&self) -> i32 {
        self.context.ordinal()
    }

    /// A stream of this object's own, destroyed with it, on which copies wait for nothing but what they are told to.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new_stream(&self) -> Result<Stream> {
        let made = self.context.run_relaxed(|driver| {
            let mut made = std::ptr::null_mut();
            // SAFETY: the call writes the variable.
            let code = unsafe { (driver.stream_create)(&raw mut made, NON_BLOCKING) };
            self.context.check("cuStreamCreate", code).map(|()| made)
        })?;
        let stream = Stream(made.addr() as u64);
        lock(&self.streams).push(stream);
        Ok(stream)
    }

    fn check_device(&self, address: u64, region: Region) -> Result<()> {
        let found = self.context.run(|driver| {
            let mut ordinal: c_int = -1;
            // SAFETY: the call writes the variable, which is as large as the attribute.
            let code = unsafe { (driver.pointer_get_attribute)((&raw mut ordinal).cast(), DEVICE_ORDINAL, address) };
            self.context.check("cuPointerGetAttribute", code).map(|()| ordinal)
        });
        let refuse = |found: String| {
            Err(Error::value("memory region", found, format!("memory of cuda:{}", self.context.ordinal())))
        };
        match found {
            Ok(ordinal) if ordinal == self.context.ordinal() => Ok(()),
            Ok(ordinal) => refuse(format!("[{:#x}, +{}) of cuda:{ordinal}", region.base, region.len)),
            // CUDA_ERROR_INVALID_VALUE: an address that the driver never gave out.
            Err(Error::Device { code: 1, .. }) => {
                refuse(format!("[{:#x}, +{}), which is no device memory", region.base, region.len))
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until nobody captures `stream`; a capture that was announced is over already.
    fn wait_for_capture(&self, stream: Stream) -> Result<()> {
        if lock(&self.streams).contains(&stream) {
            return Ok(());
        }
        let begun = Instant::now();
        while self.is_capturing(stream)? {
            if begun.elapsed() > PATIENCE {
                let detail = "the stream is captured into a graph for too long; load after the capture".to_owned();
                let call = "cuStreamIsCapturing";
                return Err(Error::Device { call, code: CAPTURE_UNSUPPORTED, detail, sticky: false });
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.context.run(|driver| {
            let mut status = 0;
            // SAFETY: the call writes the variable.
            match unsafe { (driver.stream_is_capturing)(handle(stream), &raw mut status) } {
                CAPTURE_IMPLICIT => Ok(true),
                code => self.context.check("cuStreamIsCapturing", code).map(|()| status != 0),
            }
        })
    }

    /// Copies `len` bytes to `dst`, a chunk at a time, each filled by `fill` from its offset on.
    fn stage(
        &self,
        dst: u64,
        len: u64,
        stream: Stream,
        mut fill: impl FnMut(&mut [u8], u64) -> Result<()>,
    ) -> Result<()> {
        self.wait_for_capture(stream)?;
        let mut done = 0;
        while done < len {
            let size = (len - done).min(CHUNK as u64) as usize;
            let mut chunk = self.staging.lend(&self.context)?;
            fill(&mut chunk.bytes()[..size], done)?;
            chunk.copy(&self.context, stream, "cuMemcpyHtoDAsync", |driver, memory| {
                // SAFETY: the destination was checked by the caller of this function; the chunk has `size` bytes and is not
                // touched before the copy is done.
                unsafe { (driver.memcpy_h2d_async)(dst + done, memory, size, handle(stream)) }
            })?;
            done += size as u64;
        }
        Ok(())
    }

    fn new_event(&self, driver: &Driver) -> Result<u64> {
        if let Some(event) = lock(&self.spare_events).pop() {
            return Ok(event);
        }
        let mut made: Handle = std::ptr::null_mut();
        // SAFETY: the call writes the variable.
        self.context.check("cuEventCreate", unsafe { (driver.event_create)(&raw mut made, NO_TIMING) })?;
        let event = made.addr() as u64;
        lock(&self.events).push(event);
        Ok(event)
    }

    /// The stream's number, which no other stream of the process ever has; 0 where the driver is too old to tell.
    fn stream_id(&self, driver: &Driver, stream: Stream) -> Result<u64> {
        let Some(ask) = driver.stream_get_id else { return Ok(0) };
        let mut id = 0;
        // SAFETY: the call writes the variable.
        self.context.check("cuStreamGetId", unsafe { ask(handle(stream), &raw mut id) })?;
        Ok(id)
    }
}

/// Whether everything before a mark has happened. A failed query says no, so the mark is kept.
fn is_past(driver: &Driver, event: u64) -> bool {
    // SAFETY: an event of ours.
    unsafe { (driver.event_query)(event_handle(event)) == 0 }
}

fn event_handle(event: u64) -> Handle {
    std::ptr::without_provenance_mut(event as usize)
}

// SAFETY: every address passes `Regions::check`, which admits only what `open`'s caller handed over.
unsafe impl DeviceMemory for CudaMemory {
    fn copy_h2d(&self, dst: u64, src: &[u8], stream: Stream) -> Result<()> {
        self.regions.check("copy_h2d", dst, src.len() as u64)?;
        let _call = Call::begin("copy_h2d")?;
        self.stage(dst, src.len() as u64, stream, |chunk, done| {
            chunk.copy_from_slice(&src[done as usize..][..chunk.len()]);
            Ok(())
        })
    }

    /// One strided copy for as many rows as a chunk holds, which is all of them as a rule.
    fn copy_h2d_2d(&self, dst: u64, src: &[u8], rows: Rows, stream: Stream) -> Result<()> {
        if rows.height == 0 || rows.width == 0 {
            return Ok(());
        }
        rows.check(src)?;
        self.regions.check("copy_h2d_2d", dst, rows.dst_len().unwrap_or(u64::MAX))?;
        let _call = Call::begin("copy_h2d_2d")?;
        self.wait_for_capture(stream)?;
        if rows.width > CHUNK {
            return Err(Error::value("2-D copy", format!("rows of {} bytes", rows.width), format!("at most {CHUNK}")));
        }
        let at_once = CHUNK / rows.width;
        for first in (0..rows.height).step_by(at_once) {
            let height = at_once.min(rows.height - first);
            let mut chunk = self.staging.lend(&self.context)?;
            for (row, place) in chunk.bytes().chunks_exact_mut(rows.width).take(height).enumerate() {
                place.copy_from_slice(&src[(first + row) * rows.src_pitch..][..rows.width]);
            }
            let copy = Memcpy2D {
                src_x: 0,
                src_y: 0,
                src_type: HOST,
                src_host: chunk.memory(),
                src_device: 0,
                src_array: std::ptr::null_mut(),
                src_pitch: rows.width,
                dst_x: 0,
                dst_y: 0,
                dst_type: DEVICE,
                dst_host: std::ptr::null_mut(),
                dst_device: dst + first as u64 * rows.dst_pitch,
                dst_array: std::ptr::null_mut(),
                dst_pitch: rows.dst_pitch as usize,
                width: rows.width,
                height,
            };
            chunk.copy(&self.context, stream, "cuMemcpy2DAsync", |driver, _| {
                // SAFETY: the rows lie in a region (checked) and in the chunk, which is not touched before the copy is done.
                unsafe { (driver.memcpy_2d_async)(&raw const copy, handle(stream)) }
            })?;
        }
        Ok(())
    }

    fn copy_d2h(&self, dst: &mut [u8], src: u64, stream: Stream) -> Result<()> {
        self.regions.check("copy_d2h", src, dst.len() as u64)?;
        let _call = Call::begin("copy_d2h")?;
        self.wait_for_capture(stream)?;
        let mut from = src;
        for part in dst.chunks_mut(CHUNK) {
            let mut chunk = self.staging.lend(&self.context)?;
            chunk.copy(&self.context, stream, "cuMemcpyDtoHAsync", |driver, memory| {
                // SAFETY: the source was checked; the chunk has room for the part.
                unsafe { (driver.memcpy_d2h_async)(memory, from, part.len(), handle(stream)) }
            })?;
            chunk.wait(&self.context)?;
            part.copy_from_slice(&chunk.bytes()[..part.len()]);
            from += part.len() as u64;
        }
        Ok(())
    }

    fn copy_d2d(&self, dst: u64, src: u64, len: u64, stream: Stream) -> Result<()> {
        self.regions.check_apart(dst, src, len)?;
        let _call = Call::begin("copy_d2d")?;
        self.wait_for_capture(stream)?;
        self.context.run(|driver| {
            // SAFETY: both ranges were checked, and that they do not overlap.
            let code = unsafe { (driver.memcpy_d2d_async)(dst, src, len as usize, handle(stream)) };
            self.context.check("cuMemcpyDtoDAsync", code)
        })
    }

    fn zero(&self, dst: u64, len: u64, stream: Stream) -> Result<()> {
        self.regions.check("zero", dst, len)?;
        let _call = Call::begin("zero")?;
        self.wait_for_capture(stream)?;
        self.context.run(|driver| {
            // SAFETY: the range was checked.
            let code = unsafe { (driver.memset_d8_async)(dst, 0, len as usize, handle(stream)) };
            self.context.check("cuMemsetD8Async", code)
        })
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        let _call = Call::begin("synchronize")?;
        self.wait_for_capture(stream)?;
        synchronize(&self.context, stream)
    }

    /// Reads into pinned memory, and copies from there while the next part is read.
    fn copy_from_file(&self, dst: u64, len: u64, file: &File, offset: u64, stream: Stream) -> Result<()> {
        self.regions.check("copy_from_file", dst, len)?;
        let _call = Call::begin("copy_from_file")?;
        self.stage(dst, len, stream, |chunk, done| read_exact_at(file, chunk, offset.saturating_add(done)))
    }

    /// Pauses while a graph is captured.
    fn wait_until_writable(&self) -> Result<()> {
        Call::begin("capture").map(drop)
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    /// One event per stream, recorded anew at each call.
    fn mark(&self, stream: Stream, marks: &mut Vec<Mark>) -> Result<()> {
        // No pause for captures: this waits for nothing, and an event on a captured stream would mark nothing that runs.
        if self.is_capturing(stream)? {
            let known = marks.contains(&Mark::Everything);
            marks.extend((!known).then_some(Mark::Everything));
            return Ok(());
        }
        self.context.run_relaxed(|driver| {
            let id = self.stream_id(driver, stream)?;
            let own = |mark: &Mark| matches!(mark, Mark::Event { stream: of, .. } if *of == (stream, id));
            let event = if let Some(event) = marks.iter().find(|mark| own(mark)).and_then(Mark::event) {
                event
            } else {
                // Streams come and go; what they did is soon past.
                let past: Vec<u64> = marks.iter().filter_map(Mark::event).filter(|&it| is_past(driver, it)).collect();
                marks.retain(|mark| mark.event().is_none_or(|event| !past.contains(&event)));
                lock(&self.spare_events).extend(past);
                let event = self.new_event(driver)?;
                marks.push(Mark::Event { stream: (stream, id), event });
                event
            };
            // SAFETY: an event of ours; the stream is the caller's, of this context.
            self.context.check("cuEventRecord", unsafe { (driver.event_record)(event_handle(event), handle(stream)) })
        })
    }

    fn wait_for(&self, stream: Stream, marks: &[Mark]) -> Result<()> {
        let _call = Call::begin("wait_for")?;
        self.context.run_relaxed(|driver| {
            for mark in marks {
                match mark {
                    Mark::Event { event, .. } => {
                        // SAFETY: an event of ours; the stream is the caller's, of this context.
                        let code = unsafe { (driver.stream_wait_event)(handle(stream), event_handle(*event), 0) };
                        self.context.check("cuStreamWaitEvent", code)?;
                    }
                    Mark::Everything => {
                        // SAFETY: takes no arguments.
                        self.context.check("cuCtxSynchronize", unsafe { (driver.ctx_synchronize)() })?;
                    }
                }
            }
            Ok(())
        })
    }

    fn forget(&self, marks: &mut Vec<Mark>) {
        lock(&self.spare_events).extend(marks.drain(..).filter_map(|mark| mark.event()));
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let (staging, context) = (&mut self.staging, &self.context);
        let (streams, events) = (lock(&self.streams), lock(&self.events));
        // What fails here is nobody's any more: the device is lost, or the process is ending and the driver is gone.
        let _ = context.run_relaxed(|driver| {
            // SAFETY: made by this object, and used by nobody else.
            unsafe {
                for &stream in streams.iter() {
                    (driver.stream_synchronize)(handle(stream));
                }
                staging.free(driver);
                for &event in events.iter() {
                    (driver.event_destroy)(event_handle(event));
                }
                for &stream in streams.iter() {
                    (driver.stream_destroy)(handle(stream));
                }
            }
            Ok(())
        });
    }
}
