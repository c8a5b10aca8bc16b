//! The token rows of startup adapters, kept on the host until the overlay tables are built from them.

use std::sync::Arc;

use crate::adapter::Resident;
use crate::block::HostBuffer;
use crate::convert::{convert, element};
use crate::error::Result;
use crate::extras::{ExtraInput, ExtraPart};
use crate::layout::{Dtype, Layout};
use crate::source::{SourceDtype, in_tensor};
use crate::sync::Ordering;
use crate::weights::LoraWeights;

/// The raw token rows of an adapter, from which the overlay tables are built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlayRawSlot {
    /// Rows by token id, in the adapter's order, site after site.
    pub rows: Vec<(u32, Vec<f32>)>,
}

impl OverlayRawSlot {
    /// Reads the rows of an adapter that fits `layout`; `None` if it has none.
    pub(crate) fn read(layout: &Layout, extras: &[ExtraInput<'_>]) -> Result<Option<Self>> {
        let mut with_rows: Vec<_> = extras.iter().filter(|extra| extra.part == ExtraPart::Rows).collect();
        with_rows.sort_by_key(|extra| extra.site);
        let mut raw = Self::default();
        let mut buffer = HostBuffer::default();
        for extra in with_rows {
            let source = extra.placed();
            let site = &layout.sites()[extra.site].path;
            let mut row = vec![0; source.cols * Dtype::F32.size()];
            for (index, &id) in extra.ids.iter().enumerate() {
                let bytes = source
                    .read(index * source.row_bytes(), source.row_bytes(), &mut buffer)
                    .map_err(|error| in_tensor(error, site, extra.part.name()))?;
                convert(bytes, source.dtype, &mut row, Dtype::F32);
                raw.rows.push((id, (0..source.cols).map(|col| element(&row, SourceDtype::F32, col)).collect()));
            }
        }
        Ok((!raw.rows.is_empty()).then_some(raw))
    }
}

impl LoraWeights {
    /// The raw token rows of each startup slot's adapter, if it came as one and has any; all `None` after
    /// [`set_lora_weights`](Self::set_lora_weights).
    #[must_use]
    pub fn overlay_raw(&self) -> Vec<Option<Arc<OverlayRawSlot>>> {
        // Relaxed: whoever builds the tables says so in its own order.
        let is_taken = self.is_overlay_taken().load(Ordering::Relaxed);
        self.registry().look(|directory| {
            let startup = directory.entries().iter().filter(|entry| entry.pinned);
            startup.map(|entry| entry.resident.as_ref().filter(|_| entry.listed && !is_taken)?.overlay_raw()).collect()
        })
    }

    /// Keeps the rows of a startup adapter that is about to be published.
    pub(crate) fn keep_overlay_raw(&self, resident: &Resident, rows: Arc<OverlayRawSlot>) {
        // Relaxed: as in `overlay_raw`.
        if !self.is_overlay_taken().load(Ordering::Relaxed) {
            resident.keep_overlay_raw(rows);
        }
    }

    /// Says that the overlay tables have been built: the raw rows are freed, and none are kept from here on.
    pub fn set_lora_weights(&self) {
        // Relaxed: as in `overlay_raw`.
        self.is_overlay_taken().store(true, Ordering::Relaxed);
        self.registry().look(|directory| {
            for resident in directory.entries().iter().filter_map(|entry| entry.resident.as_ref()) {
                resident.take_overlay_raw();
            }
        });
    }
}
