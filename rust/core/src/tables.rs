//! The tables: what kernels look up by slot.
//!
//! One arena holds three blocks, one per element type. Each row of a block is a table over the slots, so that one slot's cells
//! are one column of each block, and a column is one strided copy:
//!
//! ```text
//!            slot 0   slot 1   ...            rows
//! u64  block  A, B, gain, bias of site 0, A of site 1, ...    0 = the slot has none at the site
//! f32  block  scale of site 0, scale of site 1, ..., scaling of the adapter (0.0 = empty slot)
//! i32  block  rank of site 0, rank of site 1, ...
//! ```
//!
//! A kernel reads the pointer first and leaves the other cells alone where it is null. So a refresh writes scales and ranks
//! first and pointers last.

use crate::error::{Error, Result};
use crate::layout::BLOCK_ALIGN;
use crate::memory::{DeviceMemory, Region, Rows, Stream};

/// Rows of a site in the u64 block.
const POINTERS: usize = 4;

/// Addresses of a pool's tables, all fixed for its life.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    region: Region,
    num_sites: usize,
    max_loras: usize,
    scales: u64,
    ranks: u64,
}

/// The cells of one slot, on the host. New ones are those of an empty slot.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotCells {
    /// Addresses of A, B, gain and bias by site: those of site `i` from `4 * i` on; 0 where the slot has none.
    pub pointers: Vec<u64>,
    /// Scale by site, then the scaling of the whole adapter.
    pub scales: Vec<f32>,
    /// Rank by site.
    pub ranks: Vec<i32>,
}

impl SlotCells {
    /// The cells of an empty slot: all 0.
    #[must_use]
    pub fn empty(num_sites: usize) -> Self {
        Self { pointers: vec![0; POINTERS * num_sites], scales: vec![0.0; num_sites + 1], ranks: vec![0; num_sites] }
    }

    /// Enters a pair at `site`.
    ///
    /// # Panics
    /// If there is no such site.
    pub fn set_pair(&mut self, site: usize, a: u64, b: u64, scale: f32, rank: i32) {
        self.pointers[POINTERS * site] = a;
        self.pointers[POINTERS * site + 1] = b;
        self.scales[site] = scale;
        self.ranks[site] = rank;
    }

    /// Enters the address of a gain `[out]` of f32 at `site`.
    ///
    /// # Panics
    /// If there is no such site.
    pub fn set_gain(&mut self, site: usize, address: u64) {
        self.pointers[POINTERS * site + 2] = address;
    }

    /// Enters the address of a bias `[out]` of f32 at `site`.
    ///
    /// # Panics
    /// If there is no such site.
    pub fn set_bias(&mut self, site: usize, address: u64) {
        self.pointers[POINTERS * site + 3] = address;
    }

    /// Enters the adapter-wide scaling.
    pub fn set_scaling(&mut self, scaling: f32) {
        let last = self.ranks.len();
        self.scales[last] = scaling;
    }

    /// The adapter-wide scaling.
    #[must_use]
    pub fn scaling(&self) -> f32 {
        self.scales[self.ranks.len()]
    }

    /// Whether these are the cells of an empty slot.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::empty(self.ranks.len())
    }
}

impl Tables {
    /// Bytes of the arena.
    ///
    /// # Errors
    /// [`Error::Value`] if they would not fit the address space.
    pub fn bytes(num_sites: usize, max_loras: usize) -> Result<u64> {
        Self::offsets(num_sites, max_loras)
            .map(|[.., end]| end)
            .ok_or_else(|| Error::value("max_loras", max_loras, "tables of less than 2^63 bytes"))
    }

    /// Where the scales and the ranks begin, and where the ranks end.
    fn offsets(num_sites: usize, max_loras: usize) -> Option<[u64; 3]> {
        let block = |rows: u64, size: u64| {
            rows.checked_mul(max_loras as u64)?.checked_mul(size)?.checked_next_multiple_of(BLOCK_ALIGN)
        };
        let sites = num_sites as u64;
        let scales = block(sites.checked_mul(POINTERS as u64)?, 8)?;
        let ranks = scales.checked_add(block(sites.checked_add(1)?, 4)?)?;
        let end = ranks.checked_add(block(sites, 4)?).filter(|&end| end < 1 << 63)?;
        Some([scales, ranks, end])
    }

    /// Tables in `region`.
    ///
    /// # Errors
    /// [`Error::Value`] if a count is 0, or if the region does not begin at a 256-byte boundary; [`Error::Region`] if it is too
    /// small.
    pub fn new(region: Region, num_sites: usize, max_loras: usize) -> Result<Self> {
        if num_sites == 0 || max_loras == 0 {
            return Err(Error::value(
                "tables",
                format!("{num_sites} sites, {max_loras} slots"),
                "at least one of each",
            ));
        }
        if !region.base.is_multiple_of(BLOCK_ALIGN) {
            return Err(Error::value("address of the tables", format!("{:#x}", region.base), "a multiple of 256"));
        }
        region.part("tables", 0, Self::bytes(num_sites, max_loras)?)?;
        let [scales, ranks, _] = Self::offsets(num_sites, max_loras).unwrap_or_default();
        Ok(Self { region, num_sites, max_loras, scales: region.base + scales, ranks: region.base + ranks })
    }

    /// The memory they lie in.
    #[must_use]
    pub const fn region(&self) -> Region {
        self.region
    }

    /// Sites that have a row.
    #[must_use]
    pub const fn num_sites(&self) -> usize {
        self.num_sites
    }

    /// Slots, which is the length of each table.
    #[must_use]
    pub const fn max_loras(&self) -> usize {
        self.max_loras
    }

    /// Address of a site's `[max_loras]` u64 table of A.
    #[must_use]
    pub const fn a_table(&self, site: usize) -> u64 {
        self.region.base + self.row(POINTERS * site, 8)
    }

    /// Address of a site's `[max_loras]` u64 table of B.
    #[must_use]
    pub const fn b_table(&self, site: usize) -> u64 {
        self.region.base + self.row(POINTERS * site + 1, 8)
    }

    /// Address of a site's `[max_loras]` u64 table of gains: f32 `[out]` each, 0 where the slot has none.
    #[must_use]
    pub const fn gain_table(&self, site: usize) -> u64 {
        self.region.base + self.row(POINTERS * site + 2, 8)
    }

    /// Address of a site's `[max_loras]` u64 table of biases: f32 `[out]` each, 0 where the slot has none.
    #[must_use]
    pub const fn bias_table(&self, site: usize) -> u64 {
        self.region.base + self.row(POINTERS * site + 3, 8)
    }

    /// Address of a site's `[max_loras]` f32 table of scales.
    #[must_use]
    pub const fn site_scales(&self, site: usize) -> u64 {
        self.scales + self.row(site, 4)
    }

    /// Address of a site's `[max_loras]` i32 table of ranks.
    #[must_use]
    pub const fn site_ranks(&self, site: usize) -> u64 {
        self.ranks + self.row(site, 4)
    }

    /// Address of the `[max_loras]` f32 table of adapter-wide scalings.
    #[must_use]
    pub const fn scale_table(&self) -> u64 {
        self.scales + self.row(self.num_sites, 4)
    }

    const fn row(&self, row: usize, size: usize) -> u64 {
        (row * self.max_loras * size) as u64
    }

    /// Zeroes all tables, so that every slot is empty.
    ///
    /// # Errors
    /// As [`DeviceMemory::zero`].
    pub fn clear(&self, memory: &dyn DeviceMemory, stream: Stream) -> Result<()> {
        memory.zero(self.region.base, Self::bytes(self.num_sites, self.max_loras)?, stream)?;
        memory.synchronize(stream)
    }

    /// Rewrites one slot's cells and no other: scales and ranks, then pointers, then waits. Four device calls.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot out of range, [`Error::Value`] for cells of another pool, or what the device says.
    pub fn refresh_slot_tables(
        &self,
        memory: &dyn DeviceMemory,
        slot: usize,
        cells: &SlotCells,
        stream: Stream,
    ) -> Result<()> {
        self.check(slot, cells)?;
        self.write_scales_and_ranks(memory, slot, cells, stream)?;
        self.write_pointers(memory, slot, cells, stream)?;
        memory.synchronize(stream)
    }

    /// Zeroes one slot's cells and no other: pointers, then scales and ranks, then waits. Four device calls.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot out of range, or what the device says.
    pub fn clear_slot(&self, memory: &dyn DeviceMemory, slot: usize, stream: Stream) -> Result<()> {
        let cells = SlotCells::empty(self.num_sites);
        self.check(slot, &cells)?;
        self.write_pointers(memory, slot, &cells, stream)?;
        self.write_scales_and_ranks(memory, slot, &cells, stream)?;
        memory.synchronize(stream)
    }

    /// Reads one slot's cells back.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot out of range, or what the device says.
    pub fn read_slot(&self, memory: &dyn DeviceMemory, slot: usize, stream: Stream) -> Result<SlotCells> {
        let mut cells = SlotCells::empty(self.num_sites);
        self.check(slot, &cells)?;
        let mut arena = vec![0; Self::bytes(self.num_sites, self.max_loras)? as usize];
        memory.copy_d2h(&mut arena, self.region.base, stream)?;
        let cell = |address: u64, row: usize, size: usize| {
            let at = (address - self.region.base) as usize + (row * self.max_loras + slot) * size;
            &arena[at..at + size]
        };
        for (row, pointer) in cells.pointers.iter_mut().enumerate() {
            *pointer = u64::from_ne_bytes(array(cell(self.region.base, row, 8)));
        }
        for (row, scale) in cells.scales.iter_mut().enumerate() {
            *scale = f32::from_ne_bytes(array(cell(self.scales, row, 4)));
        }
        for (row, rank) in cells.ranks.iter_mut().enumerate() {
            *rank = i32::from_ne_bytes(array(cell(self.ranks, row, 4)));
        }
        Ok(cells)
    }

    fn check(&self, slot: usize, cells: &SlotCells) -> Result<()> {
        if slot >= self.max_loras {
            return Err(Error::SlotRange { slot: slot as i64, max_loras: self.max_loras });
        }
        let found = (cells.pointers.len(), cells.scales.len(), cells.ranks.len());
        let expected = (POINTERS * self.num_sites, self.num_sites + 1, self.num_sites);
        if found != expected {
            return Err(Error::value("cells by table", format!("{found:?}"), format!("{expected:?}")));
        }
        Ok(())
    }

    fn write_pointers(&self, memory: &dyn DeviceMemory, slot: usize, cells: &SlotCells, stream: Stream) -> Result<()> {
        let pointers: Vec<_> = cells.pointers.iter().map(|v| v.to_ne_bytes()).collect();
        self.write_column(memory, self.region.base, slot, &pointers, stream)
    }

    fn write_scales_and_ranks(
        &self,
        memory: &dyn DeviceMemory,
        slot: usize,
        cells: &SlotCells,
        stream: Stream,
    ) -> Result<()> {
        let scales: Vec<_> = cells.scales.iter().map(|v| v.to_ne_bytes()).collect();
        let ranks: Vec<_> = cells.ranks.iter().map(|v| v.to_ne_bytes()).collect();
        self.write_column(memory, self.scales, slot, &scales, stream)?;
        self.write_column(memory, self.ranks, slot, &ranks, stream)
    }

    /// One strided copy: the cells of `slot` in all rows of the block at `block`.
    fn write_column<const SIZE: usize>(
        &self,
        memory: &dyn DeviceMemory,
        block: u64,
        slot: usize,
        column: &[[u8; SIZE]],
        stream: Stream,
    ) -> Result<()> {
        let rows =
            Rows { dst_pitch: (self.max_loras * SIZE) as u64, src_pitch: SIZE, width: SIZE, height: column.len() };
        memory.copy_h2d_2d(block + (slot * SIZE) as u64, column.as_flattened(), rows, stream)
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}
