//! The pairs and extras of an adapter, as Python describes them.

use std::fs::File;

use hotslot_core::extras::{ExtraInput, ExtraPart};
use hotslot_core::source::{PairInput, Source, SourceDtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::address;
use crate::error::raise;

/// An adapter's pairs and extras, with all that keeps their bytes alive.
pub(crate) struct Pairs {
    list: Vec<Pair>,
    extras: Vec<Extra>,
    /// Our own files behind Python's descriptors, each opened once.
    files: Vec<(i32, File)>,
    /// What owns the memory of tensors in memory.
    owners: Vec<Py<PyAny>>,
}

struct Pair {
    site: usize,
    rank: usize,
    scale: f64,
    a: Tensor,
    b: Tensor,
}

struct Extra {
    site: usize,
    part: ExtraPart,
    content: Tensor,
    stored: Option<Tensor>,
    ids: Vec<u32>,
}

struct Tensor {
    place: Place,
    dtype: SourceDtype,
    rows: usize,
    cols: usize,
}

enum Place {
    File { index: usize, offset: u64 },
    Memory { address: usize, len: usize },
}

impl Pairs {
    /// From a sequence of `(site_index, rank, scale, a, b)` and one of `(site_index, part, content, stored, ids)`.
    pub(crate) fn from_py(pairs: &Bound<'_, PyAny>, extras: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut this = Self { list: Vec::new(), extras: Vec::new(), files: Vec::new(), owners: Vec::new() };
        for pair in pairs.try_iter()? {
            let (site, rank, scale, a, b): (usize, usize, f64, Bound<'_, PyTuple>, Bound<'_, PyTuple>) =
                pair?.extract()?;
            let pair = Pair { site, rank, scale, a: this.tensor(&a)?, b: this.tensor(&b)? };
            this.list.push(pair);
        }
        let Some(extras) = extras else { return Ok(this) };
        for extra in extras.try_iter()? {
            type Item<'py> = (usize, String, Bound<'py, PyTuple>, Option<Bound<'py, PyTuple>>, Option<Vec<u32>>);
            let (site, part, content, stored, ids): Item<'_> = extra?.extract()?;
            let extra = Extra {
                site,
                part: ExtraPart::from_name(&part).map_err(raise)?,
                content: this.tensor(&content)?,
                stored: stored.map(|stored| this.tensor(&stored)).transpose()?,
                ids: ids.unwrap_or_default(),
            };
            this.extras.push(extra);
        }
        Ok(this)
    }

    /// The core's view of the pairs.
    pub(crate) fn inputs(&self) -> PyResult<Vec<PairInput<'_>>> {
        let input = |pair: &Pair| {
            let Pair { site, rank, scale, .. } = *pair;
            Ok(PairInput { site, rank, scale, a: self.source(&pair.a)?, b: self.source(&pair.b)? })
        };
        self.list.iter().map(input).collect::<Result<_, _>>().map_err(raise)
    }

    /// The core's view of the extras.
    pub(crate) fn extra_inputs(&self) -> PyResult<Vec<ExtraInput<'_>>> {
        let input = |extra: &'_ Extra| {
            let stored = extra.stored.as_ref().map(|stored| self.source(stored)).transpose()?;
            Ok((self.source(&extra.content)?, stored))
        };
        let inputs = self.extras.iter().map(|extra| {
            let (source, stored) = input(extra)?;
            Ok(ExtraInput { site: extra.site, part: extra.part, source, stored, ids: &extra.ids })
        });
        inputs.collect::<Result<_, _>>().map_err(raise)
    }

    fn source(&self, tensor: &Tensor) -> hotslot_core::Result<Source<'_>> {
        let Tensor { dtype, rows, cols, .. } = *tensor;
        Ok(match tensor.place {
            Place::File { index, offset } => Source::in_file(&self.files[index].1, offset, dtype, rows, cols),
            Place::Memory { address, len } => Source::in_memory(address::bytes(address, len)?, dtype, rows, cols),
        })
    }

    fn tensor(&mut self, source: &Bound<'_, PyTuple>) -> PyResult<Tensor> {
        let kind: String = source.get_item(0)?.extract()?;
        let (place, dtype, (rows, cols)): (_, String, (usize, usize)) = match kind.as_str() {
            "file" => {
                let (_, fd, offset, dtype, shape): (Bound<'_, PyAny>, i32, u64, _, _) = source.extract()?;
                (Place::File { index: self.file(fd)?, offset }, dtype, shape)
            }
            "memory" => {
                type Memory<'py> = (Bound<'py, PyAny>, usize, usize, Py<PyAny>, String, (usize, usize));
                let (_, address, len, owner, dtype, shape): Memory<'_> = source.extract()?;
                self.owners.push(owner);
                (Place::Memory { address, len }, dtype, shape)
            }
            _ => {
                return Err(PyValueError::new_err(format!(
                    "tensor source: found {kind:?}; expected 'file' or 'memory'"
                )));
            }
        };
        let dtype = SourceDtype::from_name(&dtype).map_err(raise)?;
        Ok(Tensor { place, dtype, rows, cols })
    }

    fn file(&mut self, fd: i32) -> PyResult<usize> {
        if let Some(index) = self.files.iter().position(|(known, _)| *known == fd) {
            return Ok(index);
        }
        self.files.push((fd, address::file(fd).map_err(raise)?));
        Ok(self.files.len() - 1)
    }
}
