//! Where a pool is, by PyTorch's name for it; and `Capture`.

use std::sync::{Arc, Mutex, PoisonError};

use hotslot_core::cuda;
use hotslot_core::error::{Error, Result};
use hotslot_core::memory::{DeviceMemory, Region, Stream};
use hotslot_core::weights::PoolSpec;
use pyo3::prelude::*;

use crate::address;

/// Where a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// The host.
    Cpu,
    /// The GPU of this number.
    Cuda(i32),
}

impl Device {
    /// "cpu" or "cuda:N".
    pub(crate) fn from_name(name: &str) -> Result<Self> {
        let number = || name.strip_prefix("cuda:")?.parse().ok().filter(|number| *number >= 0);
        match (name, number()) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(number)) => Ok(Self::Cuda(number)),
            _ => Err(Error::Value {
                what: "device",
                found: format!("{name:?}"),
                expected: "\"cpu\" or \"cuda:N\"".to_owned(),
            }),
        }
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Cpu => "cpu".to_owned(),
            Self::Cuda(number) => format!("cuda:{number}"),
        }
    }

    /// The memory of a pool here. On a GPU its copies get a stream of their own.
    pub(crate) fn memory(
        self,
        regions: &[Region],
        compute: Stream,
        spec: &mut PoolSpec,
    ) -> Result<Arc<dyn DeviceMemory>> {
        match self {
            Self::Cpu => Ok(Arc::new(address::host_memory(regions)?)),
            Self::Cuda(number) => {
                let memory = address::cuda_memory(number, regions)?;
                spec.copy_stream = memory.new_stream()?;
                spec.compute_stream = compute;
                Ok(Arc::new(memory))
            }
        }
    }
}

/// Inside, this thread captures a CUDA graph: what would write a pool on a GPU pauses, in every thread and for every pool.
///
/// Entering waits for device calls under way. A load inside, in the same thread, raises `DeviceError` with code 900, for it would wait
/// for itself. References are taken and returned as ever.
#[pyclass(frozen, module = "hotslot._core")]
pub(crate) struct Capture {
    entered: Mutex<Vec<cuda::Capture>>,
}

#[pymethods]
impl Capture {
    #[new]
    fn new() -> Self {
        Self { entered: Mutex::default() }
    }

    fn __enter__(this: Py<Self>, py: Python<'_>) -> Py<Self> {
        let capture = py.detach(cuda::capture);
        this.get().entered.lock().unwrap_or_else(PoisonError::into_inner).push(capture);
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyAny>) {
        self.entered.lock().unwrap_or_else(PoisonError::into_inner).pop();
    }
}
