//! Where an adapter's tensors come from: files by positioned reads, or memory.

use std::fs::File;
use std::time::SystemTime;

use crate::block::HostBuffer;
use crate::error::{Error, Result};
use crate::extras::ExtraInput;
use crate::layout::Dtype;
use crate::memory::read_exact_at;

/// The element type of a tensor on its way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl SourceDtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name that safetensors uses: `F32`, `F16` or `BF16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    /// The dtype of that safetensors name.
    ///
    /// # Errors
    /// [`Error::Value`] for any other name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "F32" => Ok(Self::F32),
            "F16" => Ok(Self::F16),
            "BF16" => Ok(Self::Bf16),
            other => Err(Error::value("tensor dtype", other, "F32, F16 or BF16")),
        }
    }

    /// Whether a pool of `dtype` holds the very same bytes.
    #[must_use]
    pub const fn is_stored_as(self, dtype: Dtype) -> bool {
        matches!((self, dtype), (Self::Bf16, Dtype::Bf16) | (Self::F32, Dtype::F32))
    }
}

/// The bytes of a tensor: rows without padding, little endian.
#[derive(Clone, Copy, Debug)]
pub enum SourceData<'a> {
    /// In memory.
    Bytes(&'a [u8]),
    /// In a file, which is read without moving its cursor.
    File {
        /// The open file.
        file: &'a File,
        /// Of the tensor's first byte.
        offset: u64,
    },
}

/// A tensor to load: A `[rank, in]` or B `[out, rank]`.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its bytes.
    pub data: SourceData<'a>,
    /// Its element type.
    pub dtype: SourceDtype,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
}

impl<'a> Source<'a> {
    /// A tensor in memory.
    #[must_use]
    pub const fn in_memory(bytes: &'a [u8], dtype: SourceDtype, rows: usize, cols: usize) -> Self {
        Self { data: SourceData::Bytes(bytes), dtype, rows, cols }
    }

    /// A tensor in a file, from `offset` on.
    #[must_use]
    pub const fn in_file(file: &'a File, offset: u64, dtype: SourceDtype, rows: usize, cols: usize) -> Self {
        Self { data: SourceData::File { file, offset }, dtype, rows, cols }
    }

    /// Bytes of the tensor.
    #[must_use]
    pub const fn num_bytes(&self) -> usize {
        self.rows.saturating_mul(self.cols).saturating_mul(self.dtype.size())
    }

    /// Bytes of one row.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.cols.saturating_mul(self.dtype.size())
    }

    /// Bytes `[from, from + len)` of the tensor: borrowed if in memory, read into `buffer` if in a file.
    ///
    /// # Errors
    /// [`Error::AdapterFile`] if the file ends first or cannot be read.
    ///
    /// # Panics
    /// If the range is not inside a tensor in memory.
    pub(crate) fn read<'b>(&'b self, from: usize, len: usize, buffer: &'b mut HostBuffer) -> Result<&'b [u8]> {
        match self.data {
            SourceData::Bytes(bytes) => Ok(&bytes[from..from + len]),
            SourceData::File { file, offset } => {
                let bytes = buffer.take(len);
                read_exact_at(file, bytes, offset.saturating_add(from as u64))?;
                Ok(bytes)
            }
        }
    }
}

/// The two tensors that adapt one site.
#[derive(Clone, Copy, Debug)]
pub struct PairInput<'a> {
    /// Index of the site in the pool's layout.
    pub site: usize,
    /// Rank of the pair.
    pub rank: usize,
    /// What the product is multiplied by; kept as f32.
    pub scale: f64,
    /// A `[rank, in]`.
    pub a: Source<'a>,
    /// B `[out, rank]`.
    pub b: Source<'a>,
}

impl<'a> PairInput<'a> {
    /// Both halves, with the names that errors and digests use.
    pub(crate) const fn halves(&self) -> [(&'static str, &Source<'a>); 2] {
        [("A", &self.a), ("B", &self.b)]
    }
}

/// What errors call a tensor: `half` is `"A"`, `"B"`, or the name of an [`ExtraPart`](crate::extras::ExtraPart).
#[must_use]
pub fn tensor_name(site: &str, half: &str) -> String {
    match half {
        "A" | "B" => format!("{site}.lora_{half}.weight"),
        part => format!("{site}.{part}"),
    }
}

/// Names the tensor in an error about reading it.
pub(crate) fn in_tensor(error: Error, site: &str, half: &str) -> Error {
    match error {
        Error::AdapterFile { found, expected, .. } => {
            Error::AdapterFile { path: tensor_name(site, half), found, expected }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_have_the_names_of_safetensors() {
        for dtype in [SourceDtype::F32, SourceDtype::F16, SourceDtype::Bf16] {
            assert_eq!(SourceDtype::from_name(dtype.name()), Ok(dtype));
        }
        assert!(SourceDtype::from_name("F8_E4M3").is_err());
        assert!(SourceDtype::F16.size() == 2 && !SourceDtype::F16.is_stored_as(Dtype::Bf16));
    }
}

/// The files that an adapter is read from, and how they were when reading began: a file that changes meanwhile would give a
/// mixture of two adapters.
#[derive(Debug, Default)]
pub(crate) struct OpenedFiles<'a>(Vec<(&'a File, Stamp)>);

/// What changes when a file is written.
type Stamp = (u64, Option<SystemTime>);

impl<'a> OpenedFiles<'a> {
    pub(crate) fn of(pairs: &[PairInput<'a>], extras: &[ExtraInput<'a>]) -> Result<Self> {
        let mut files: Vec<(&File, Stamp)> = Vec::new();
        let of_pairs = pairs.iter().flat_map(|pair| [Some(&pair.a), Some(&pair.b)]);
        let of_extras = extras.iter().flat_map(|extra| [Some(&extra.source), extra.stored.as_ref()]);
        for source in of_pairs.chain(of_extras).flatten() {
            let SourceData::File { file, .. } = source.data else { continue };
            if !files.iter().any(|(known, _)| std::ptr::eq(*known, file)) {
                files.push((file, stamp(file)?));
            }
        }
        Ok(Self(files))
    }

    pub(crate) fn check_unchanged(&self) -> Result<()> {
        for (file, before) in &self.0 {
            if stamp(file)? != *before {
                return Err(Error::AdapterFile {
                    path: "the weights file".to_owned(),
                    found: "that it changed while it was read".to_owned(),
                    expected: "it to stay as it is until the load is done; load it again".to_owned(),
                });
            }
        }
        Ok(())
    }
}

fn stamp(file: &File) -> Result<Stamp> {
    let failed = |error: std::io::Error| Error::AdapterFile {
        path: "the weights file".to_owned(),
        found: error.to_string(),
        expected: "a readable file".to_owned(),
    };
    let metadata = file.metadata().map_err(failed)?;
    Ok((metadata.len(), metadata.modified().ok()))
}
