//! From what a request says to what a kernel reads.

use std::ptr::with_exposed_provenance;

use crate::adapter::LoraPair;
use crate::error::{Error, Result};
use crate::identity::adapter_id_hash;
use crate::kernels::SiteView;
use crate::layout::Site;
use crate::memory::Region;
use crate::module::LoraModule;
use crate::selector::{Selector, SlotId, routed_prefill_slot_of};
use crate::weights::LoraWeights;

impl LoraWeights {
    /// The slot of a name. Placeholders and retired slots never match.
    #[must_use]
    pub fn slot_of(&self, name: &str) -> Option<usize> {
        self.registry().look(|directory| directory.find(name))
    }

    /// The slot that a name has at present, as a selector.
    ///
    /// # Errors
    /// [`Error::AdapterNotFound`], with the resident names.
    pub fn resolve_adapter_slot(&self, name: &str) -> Result<Selector> {
        let directory = self.registry().directory();
        let not_found = || Error::AdapterNotFound { name: name.to_owned(), known: directory.names() };
        directory.find(name).map(Selector::Slot).ok_or_else(not_found)
    }

    /// [`routed_prefill_slot_of`] for this pool.
    #[must_use]
    pub fn routed_prefill_slot(&self, selector: Selector) -> Option<usize> {
        routed_prefill_slot_of(selector, self.active(), self.max_loras())
    }

    /// The pair that a prefill of one selector uses at a module of a layer: that of the routed slot. `None` if the active
    /// adapter's dense path serves it, or if the slot's adapter leaves the module alone.
    #[must_use]
    pub fn select_routed_pair(&self, selector: Selector, layer: usize, module: LoraModule) -> Option<LoraPair> {
        let slot = self.routed_prefill_slot(selector)?;
        let directory = self.registry().directory();
        self.adapter_slot(&directory, slot).layers.get(layer)?.module_pair(module)
    }

    /// The stable 64-bit id of a slot's adapter; 0 for base, a placeholder, or out of range.
    ///
    /// See [`adapter_id_hash`].
    #[must_use]
    pub fn adapter_id_for_slot(&self, selector: Selector) -> u64 {
        let directory = self.registry().directory();
        let slot = match selector {
            Selector::Base => return 0,
            Selector::Active => directory.active(),
            Selector::Slot(slot) => slot,
        };
        let slot = self.adapter_slot(&directory, slot);
        adapter_id_hash(&slot.name, slot.generation)
    }

    /// The slot ids of a decode batch: each selector's slot, the active one for [`Selector::Active`], no adapter for
    /// [`Selector::Base`] or if none is active.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot out of range.
    pub fn build_seq_slot_host(&self, selectors: &[Selector]) -> Result<Vec<SlotId>> {
        let directory = self.registry().directory();
        let active = directory.active();
        let has_active = directory.entry(active).is_some_and(|entry| entry.listed);
        let active = if has_active { SlotId::of(active) } else { SlotId::NO_ADAPTER };
        selectors
            .iter()
            .map(|&selector| match selector {
                Selector::Base => Ok(SlotId::NO_ADAPTER),
                Selector::Active => Ok(active),
                Selector::Slot(slot) => self.check_slot(slot).map(SlotId::of),
            })
            .collect()
    }

    /// Writes the slot ids of a prefill whose `n` tokens all use one selector into `ids`, an array of i32 in the pool's memory,
    /// and returns their place. `None`, and nothing written, if [`routed_prefill_slot`](Self::routed_prefill_slot) is.
    ///
    /// # Errors
    /// [`Error::SlotRange`] for a slot out of range, [`Error::Region`] if `ids` is too small, or what the device says.
    pub fn upload_seq_slot_uniform(&self, selector: Selector, n: usize, ids: Region) -> Result<Option<Region>> {
        if let Selector::Slot(slot) = selector {
            self.check_slot(slot)?;
        }
        let Some(slot) = self.routed_prefill_slot(selector) else {
            return Ok(None);
        };
        let bytes = SlotId::of(slot).get().to_ne_bytes().repeat(n);
        let place = ids.part("slot ids", 0, bytes.len() as u64)?;
        self.memory().copy_h2d(place.base, &bytes, self.compute_stream())?;
        Ok(Some(place))
    }

    /// A site's columns of the tables, for the CPU kernels. The pool must be in host memory.
    ///
    /// # Panics
    /// If there is no such site.
    #[must_use]
    pub fn site_view(&self, site: usize) -> SiteView {
        let tables = self.tables();
        let Site { in_features, out_features, .. } = self.layout().sites()[site];
        SiteView {
            in_features,
            out_features,
            a_table: with_exposed_provenance(tables.a_table(site) as usize),
            b_table: with_exposed_provenance(tables.b_table(site) as usize),
            gain_table: with_exposed_provenance(tables.gain_table(site) as usize),
            bias_table: with_exposed_provenance(tables.bias_table(site) as usize),
            scale: with_exposed_provenance(tables.site_scales(site) as usize),
            rank: with_exposed_provenance(tables.site_ranks(site) as usize),
            max_loras: self.max_loras(),
            weight_dtype: self.layout().dtype(),
        }
    }

    pub(crate) fn check_slot(&self, slot: usize) -> Result<usize> {
        let max_loras = self.max_loras();
        if slot < max_loras { Ok(slot) } else { Err(Error::SlotRange { slot: slot as i64, max_loras }) }
    }
}
