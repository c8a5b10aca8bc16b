//! From the core's errors to the classes of `hotslot.errors`, with the numbers as attributes.

use hotslot_core::Error;
use hotslot_core::source::tensor_name;
use hotslot_peer::PeerErrorKind;
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
import_exception!(hotslot.errors, TierError);

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

/// The exception of an error of a peer.
pub(crate) fn raise_peer(error: hotslot_peer::PeerError) -> PyErr {
    Python::attach(|py| peer_exception(py, error).unwrap_or_else(|failed| failed))
}

fn peer_exception(py: Python<'_>, error: hotslot_peer::PeerError) -> PyResult<PyErr> {
    let message = error.to_string();
    let hotslot_peer::PeerError { kind, peer, found, expected } = error;
    if kind == PeerErrorKind::Settings {
        return Ok(PyValueError::new_err(message));
    }
    let numbers = numbers!(py; peer = peer, reason = kind.name(), found = found, expected = expected);
    new::<PeerError>(py, message, &numbers)
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
        Error::Packed { what: _, found, expected } => {
            new::<AdapterFileError>(py, message, &numbers!(py; found = found, expected = expected))
        }
        Error::PackedSite { site, found: _, expected: _ } => {
            new::<AdapterShapeError>(py, message, &numbers!(py; module = site))
        }
        Error::TierRoom { tier, needed, room } => {
            new::<TierError>(py, message, &numbers!(py; tier = tier, needed = needed, room = room))
        }
        Error::DiskCache { path, call, found: _, code } => {
            let errno = (code != 0).then_some(code);
            new::<TierError>(py, message, &numbers!(py; tier = "disk", path = path, call = call, code = errno))
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
            new::<PeerError>(py, message, &numbers!(py; peer = address, found = found, expected = expected))
        }
        Error::Device { call, code, detail, sticky } => {
            let numbers = numbers!(py; call = call, code = code, detail = detail, sticky = sticky);
            new::<DeviceError>(py, message, &numbers)
        }
        Error::NoDevice { device: _, call, code, detail } => {
            new::<DeviceError>(py, message, &numbers!(py; call = call, code = code, detail = detail, sticky = false))
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
