//! A check that words, directory and tables tell one story. For tests, and for those who suspect their memory.

use crate::adapter::Resident;
use crate::directory::{Directory, Entry};
use crate::error::{Error, Result};
use crate::slot::Word;
use crate::tables::SlotCells;
use crate::weights::LoraWeights;

impl LoraWeights {
    /// Compares all that the pool knows of itself, and reads the tables back to do so. Holders go on; writers wait.
    ///
    /// # Errors
    /// [`Error::Integrity`] with every contradiction, or what the device says.
    pub fn check_integrity(&self) -> Result<()> {
        self.registry().while_writers_wait(|directory, words| {
            let mut problems = Vec::new();
            self.check_names(directory, &mut problems);
            for (slot, (entry, &word)) in directory.entries().iter().zip(words).enumerate() {
                let mut report = |problem: &str| problems.push(format!("slot {slot}: {problem} ({word:?})"));
                check_word(entry, word, &mut report);
                if self.slot_last_used(slot) > self.lru_tick() {
                    report("used after the last tick");
                }
                // A claimed slot's cells are its writer's business.
                if !word.is_claimed() && self.read_cells(slot)? != self.expected_cells(entry, slot) {
                    report("cells differ from its content");
                }
            }
            if problems.is_empty() { Ok(()) } else { Err(Error::Integrity { problems }) }
        })
    }

    fn check_names(&self, directory: &Directory, problems: &mut Vec<String>) {
        for (slot, entry) in directory.entries().iter().enumerate().filter(|(_, entry)| entry.listed) {
            if directory.find(entry.name()) != Some(slot) {
                problems.push(format!(
                    "name {:?} of slot {slot} leads to {:?}",
                    entry.name(),
                    directory.find(entry.name())
                ));
            }
        }
        if directory.active() > self.max_loras() {
            problems.push(format!("active slot {} of {}", directory.active(), self.max_loras()));
        }
        if directory.rotation().is_some() {
            problems.push("a rotation was left open".to_owned());
        }
    }

    /// The cells of one slot as the device has them. Cell by cell, so that writers of other slots can go on.
    ///
    /// # Errors
    /// [`Error::SlotRange`], or what the device says.
    pub fn read_cells(&self, slot: usize) -> Result<SlotCells> {
        let slot = self.check_slot(slot)?;
        let tables = self.tables();
        let num_sites = tables.num_sites();
        let mut cells = SlotCells::empty(num_sites);
        for site in 0..num_sites {
            let a = u64::from_ne_bytes(self.read_cell(tables.a_table(site), slot)?);
            let b = u64::from_ne_bytes(self.read_cell(tables.b_table(site), slot)?);
            let scale = f32::from_ne_bytes(self.read_cell(tables.site_scales(site), slot)?);
            let rank = i32::from_ne_bytes(self.read_cell(tables.site_ranks(site), slot)?);
            cells.set_pair(site, a, b, scale, rank);
            cells.set_gain(site, u64::from_ne_bytes(self.read_cell(tables.gain_table(site), slot)?));
            cells.set_bias(site, u64::from_ne_bytes(self.read_cell(tables.bias_table(site), slot)?));
        }
        cells.set_scaling(f32::from_ne_bytes(self.read_cell(tables.scale_table(), slot)?));
        Ok(cells)
    }

    fn read_cell<const SIZE: usize>(&self, table: u64, slot: usize) -> Result<[u8; SIZE]> {
        let mut cell = [0; SIZE];
        let read = self.memory().copy_d2h(&mut cell, table + (slot * SIZE) as u64, self.compute_stream());
        self.note(read).map(|()| cell)
    }

    /// Rewrites one slot's cells, and no other's, from what the pool knows of its adapter. Writers wait.
    ///
    /// # Errors
    /// [`Error::SlotRange`]; [`Error::SlotBusy`] if the slot is being written; or what the device says.
    pub fn rewrite_slot_tables(&self, slot: usize) -> Result<()> {
        self.registry().while_writers_wait(|directory, words| {
            let Some((entry, word)) = directory.entry(slot).zip(words.get(slot)) else {
                return Err(Error::SlotRange { slot: slot as i64, max_loras: self.max_loras() });
            };
            if word.is_claimed() {
                let name = entry.name().to_owned();
                return Err(Error::SlotBusy { slot, name, ref_count: word.refs(), action: "refresh its tables" });
            }
            self.refresh_slot_tables(slot, &self.expected_cells(entry, slot))
        })
    }

    fn expected_cells(&self, entry: &Entry, slot: usize) -> SlotCells {
        match &entry.resident {
            Some(resident) => self.cells_of(resident, slot),
            None => SlotCells::empty(self.layout().sites().len()),
        }
    }

    pub(crate) fn cells_of(&self, resident: &Resident, slot: usize) -> SlotCells {
        resident.content.cells(self.layout(), self.slot_bases(slot), resident.config.scaling() as f32)
    }
}

fn check_word(entry: &Entry, word: Word, report: &mut impl FnMut(&str)) {
    if entry.listed != word.is_ready() {
        report("a name leads here if and only if the slot is ready");
    }
    if entry.listed && entry.tag != word.tag() {
        report("the directory has another tag");
    }
    if entry.resident.is_some() != (word.is_filled() && !word.is_claimed()) {
        report("the content is known if and only if the slot is filled");
    }
    if word.is_claimed() && word.refs() > 0 {
        report("claimed with references");
    }
}
