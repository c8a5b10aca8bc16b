//! From the core's errors to the classes of `hotslot.errors`, with the numbers as attributes.

use hotslot_core::Error;
use hotslot_core::source::tensor_name;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTypeInfo, import_exception};

import_exception!(hotslot.errors, AdapterConfigError);
import_exception!(hotslot.errors, AdapterFileError);
import_exception!(hotslot.errors, AdapterNotFoundError);
import_exception!(hotslot.errors, AdapterShapeError);
import_exception!(hotslot.errors, ClosedError);
import_exception!(hotslot.errors, DeviceError);
import_exception!(hotslot.errors, LeaseError);
import_exception!(hotslot.errors, PeerError);
import_exception!(hotslot.errors, PoolError);
import_exception!(hotslot.errors, PoolFullError);
import_exception!(hotslot.errors, RankError);
import_exception!(hotslot.errors, RouteError);
import_exception!(hotslot.errors, SlotBusyError);

/// A dict of keyword arguments.
macro_rules! numbers {
    ($py:ident; $($key:ident = $value:expr),* $(,)?) => {{
        let numbers = PyDict::new($py);
        $(numbers.set_item(stringify!($key), $value)?;)*
        numbers
    }};
}

/// The exception of an error.
pub(crate) fn raise(error: Error) -> PyErr {
    Python::attach(|py| exception(py, error).unwrap_or_else(|failed| failed))
}

fn exception(py: Python<'_>, error: Error) -> PyResult<PyErr> {
    let message = error.to_string();
    match error {
        Error::AdapterNotFound { name, known } => {
            new::<AdapterNotFoundError>(py, message, &numbers!(py; name = name, known = PyTuple::new(py, known)?))
        }
        Error::AdapterFile { path, found, expected } => {
            new::<AdapterFileError>(py, message, &numbers!(py; tensor = path, found = found, expected = expected))
        }
        Error::AdapterValue { site, half, index, value, expected } => {
            let tensor = tensor_name(&site, half);
            let numbers =
                numbers!(py; tensor = tensor, module = site, index = index, found = value, expected = expected);
            new::<AdapterFileError>(py, message, &numbers)
        }
        Error::AdapterConfig { field, found, expected } => {
            new::<AdapterConfigError>(py, message, &numbers!(py; key = field, value = found, expected = expected))
        }
        Error::AdapterShape { site, half, found, expected } => {
            let tensor = tensor_name(&site, half);
            let numbers = numbers!(py; tensor = tensor, module = site, found = found, expected = expected);
            new::<AdapterShapeError>(py, message, &numbers)
        }
        Error::Rank { site, rank, max_rank } => {
            new::<RankError>(py, message, &numbers!(py; module = site, rank = rank, max_rank = max_rank))
        }
        Error::ExtrasRoom { needed, room } => {
            new::<PoolError>(py, message, &numbers!(py; needed = needed, room = room))
        }
        Error::PoolFull { max_loras, pinned, cache_slots, busy } => {
            let numbers = numbers!(py; max_loras = max_loras, pinned = pinned, cache_slots = cache_slots, busy = busy);
            new::<PoolFullError>(py, message, &numbers)
        }
        Error::SlotBusy { slot, name, ref_count, action } => {
            let numbers = numbers!(py; slot = slot, name = name, ref_count = ref_count, action = action);
            new::<SlotBusyError>(py, message, &numbers)
        }
        Error::Lease { slot, found, expected } => {
            new::<LeaseError>(py, message, &numbers!(py; slot = slot, found = found, expected = expected))
        }
        Error::Route { found: _, expected: _ } => new::<RouteError>(py, message, &PyDict::new(py)),
        Error::SlotRange { slot, max_loras } => {
            new::<RouteError>(py, message, &numbers!(py; slot = slot, max_loras = max_loras))
        }
        Error::Closed { what: _ } => new::<ClosedError>(py, message, &PyDict::new(py)),
        Error::Peer { address, found, expected } => {
            new::<PeerError>(py, message, &numbers!(py; address = address, found = found, expected = expected))
        }
        Error::Device { call, code, detail, sticky } => {
            let numbers = numbers!(py; call = call, code = code, detail = detail, sticky = sticky);
            new::<DeviceError>(py, message, &numbers)
        }
        Error::Integrity { problems } => {
            new::<PoolError>(py, message, &numbers!(py; problems = PyTuple::new(py, problems)?))
        }
        Error::Region { what: _, address: _, len: _, base: _, region_len: _ }
        | Error::Value { what: _, found: _, expected: _ } => Ok(PyValueError::new_err(message)),
    }
}

fn new<E: PyTypeInfo>(py: Python<'_>, message: String, numbers: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    Ok(PyErr::from_value(E::type_object(py).call((message,), Some(numbers))?))
}
