//! The one error type of the crate: a variant per kind of failure, numbers as fields.
//!
//! Every message says what was found, what was expected, and what to do about it. The Python binding maps each variant to
//! the class of the same name, in one match without a wildcard arm.

/// What can go wrong in the pool. Nothing here is a panic: each error belongs to the one caller who caused it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// No resident adapter has this name (`AdapterNotFoundError`).
    #[error(
        "no adapter named {name:?} is resident; expected one of [{}]; load or promote it first",
        known.join(", ")
    )]
    AdapterNotFound {
        /// The name that was asked for.
        name: String,
        /// The resident names, in slot order.
        known: Vec<String>,
    },

    /// The bytes of an adapter file are not there or not what they claim to be (`AdapterFileError`).
    #[error("adapter file {path:?}: found {found}; expected {expected}; save or copy the adapter again")]
    AdapterFile {
        /// The file, or the tensor in it.
        path: String,
        /// What was read.
        found: String,
        /// What a good file has there.
        expected: String,
    },

    /// A tensor holds a value that the pool cannot store (`AdapterFileError`).
    #[error(
        "tensor {half} of {site:?}: found {value:e} at element {index}; expected {expected}; the adapter is damaged or diverged"
    )]
    AdapterValue {
        /// The site's module path.
        site: String,
        /// `"A"`, `"B"`, or the name of an [`ExtraPart`](crate::extras::ExtraPart).
        half: &'static str,
        /// Row-major index of the first such element.
        index: usize,
        /// The element itself.
        value: f32,
        /// What the pool can store.
        expected: &'static str,
    },

    /// A field of an adapter's config is missing, unsupported or contradicts the file (`AdapterConfigError`).
    #[error("adapter config field {field:?}: found {found}; expected {expected}")]
    AdapterConfig {
        /// The field's name as PEFT writes it.
        field: String,
        /// Its value.
        found: String,
        /// The values that are supported.
        expected: String,
    },

    /// A tensor's shape does not fit its site (`AdapterShapeError`).
    #[error(
        "tensor {half} of {site:?}: found shape [{}, {}]; expected [{}, {}]; the adapter was trained for another model",
        found.0, found.1, expected.0, expected.1
    )]
    AdapterShape {
        /// The site's module path.
        site: String,
        /// `"A"`, `"B"`, or the name of an [`ExtraPart`](crate::extras::ExtraPart).
        half: &'static str,
        /// Rows and columns of the tensor.
        found: (usize, usize),
        /// Rows and columns that the site needs.
        expected: (usize, usize),
    },

    /// A rank is zero or above what a slot has room for (`RankError`).
    #[error(
        "rank {rank} at {site:?}; expected 1 to {max_rank}; build the pool with max_rank={rank} or use a smaller adapter"
    )]
    Rank {
        /// The site's module path.
        site: String,
        /// The adapter's rank there.
        rank: usize,
        /// The pool's limit.
        max_rank: usize,
    },

    /// A packed adapter is not what it claims to be (`AdapterFileError`).
    #[error("packed adapter: found {what} {found}; expected {expected}; pack or fetch it again")]
    Packed {
        /// The field, or the part of its bytes.
        what: &'static str,
        /// What was found there.
        found: String,
        /// What a good one has there.
        expected: String,
    },

    /// A packed adapter was made for a pool with other sites, another element type or another base (`AdapterShapeError`).
    #[error("packed adapter at {site:?}: found {found}; expected {expected}; it was packed for another model or pool")]
    PackedSite {
        /// The site's module path, or what of the pool differs.
        site: String,
        /// What the packed adapter has.
        found: String,
        /// What the pool has.
        expected: String,
    },

    /// A tier has no room for a copy (`TierError`).
    #[error(
        "{tier} tier: found {needed} bytes to keep and {room} of room; expected at most that; give it a larger budget"
    )]
    TierRoom {
        /// `"host"` or `"disk"`.
        tier: &'static str,
        /// Bytes of the copy.
        needed: u64,
        /// Bytes that could be made free for it.
        room: u64,
    },

    /// The disk cache could not be read or written (`TierError`).
    #[error(
        "disk cache {path:?}: {call} failed: {found}; expected a folder of our own with room; the cache is as it was"
    )]
    DiskCache {
        /// The file or folder.
        path: String,
        /// What was tried.
        call: &'static str,
        /// The operating system's text.
        found: String,
        /// Its error number; 0 if it has none.
        code: i32,
    },

    /// What an adapter holds beside its blocks does not fit a slot's place among the extras (`PoolError`).
    #[error(
        "the adapter needs {needed} bytes for what it holds beside A and B; found room for {room} in a slot; \
         attach with extras_bytes={needed}"
    )]
    ExtrasRoom {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes of a slot's place.
        room: u64,
    },

    /// No cache slot is free and none is idle (`PoolFullError`).
    #[error(
        "no slot for a promotion: {busy} of {cache_slots} cache slots are in use, {pinned} slots are pinned; \
         release a lease or build the pool with more than {max_loras} slots"
    )]
    PoolFull {
        /// All slots of the pool.
        max_loras: usize,
        /// Slots that promotions never take.
        pinned: usize,
        /// Slots that promotions may take.
        cache_slots: usize,
        /// Cache slots that are referenced, loading, or kept as the active one.
        busy: usize,
    },

    /// The operation needs an idle slot and this one is in use (`SlotBusyError`).
    #[error(
        "slot {slot} ({name:?}): found {ref_count} references; expected 0 to {action}; release them, wait, or use replace, which never waits"
    )]
    SlotBusy {
        /// The slot.
        slot: usize,
        /// Its adapter, `""` while one is being loaded into it.
        name: String,
        /// References held now (0 when another load owns the slot).
        ref_count: u32,
        /// What was refused: "swap", "rotate", "unload", ...
        action: &'static str,
    },

    /// A lease was used after its end or on another pool (`LeaseError`).
    #[error("lease on slot {slot}: found {found}; expected {expected}")]
    Lease {
        /// The lease's slot, -1 for none.
        slot: i64,
        /// What was found.
        found: &'static str,
        /// What was expected.
        expected: &'static str,
    },

    /// A route does not fit its batch or names no slot (`RouteError`).
    #[error("route: found {found}; expected {expected}")]
    Route {
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },

    /// A slot index outside the pool (`RouteError`).
    #[error("slot {slot} is out of range; expected 0 to {}, or -1 for the active adapter", max_loras.saturating_sub(1))]
    SlotRange {
        /// The index that was asked for.
        slot: i64,
        /// Slots in the pool.
        max_loras: usize,
    },

    /// The object was closed (`ClosedError`).
    #[error("{what} is closed; attach again to get a new one")]
    Closed {
        /// What was closed.
        what: &'static str,
    },

    /// A peer could not be reached or did not keep to the protocol (`PeerError`).
    #[error("peer {address}: found {found}; expected {expected}")]
    Peer {
        /// The peer's address.
        address: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },

    /// A call to the device failed (`DeviceError`).
    #[error(
        "device call {call} failed with code {code}: {detail}; {}",
        if *sticky { "the device context is lost: build a new pool in a new process" } else { "the slot is empty, load again" }
    )]
    Device {
        /// The call, by the name of its trait method or driver function.
        call: &'static str,
        /// The driver's code, or the operating system's error number.
        code: i32,
        /// The driver's text.
        detail: String,
        /// Whether every later call will fail as well; the pool then refuses all writes.
        sticky: bool,
    },

    /// There is no driver, or no such device (`DeviceError`).
    #[error(
        "no CUDA device ({device}): {call} said {detail} (code {code}); expected an NVIDIA driver with that device; \
         install the driver, choose another device, or keep the model on the CPU"
    )]
    NoDevice {
        /// The device that was asked for, as `cuda:0`.
        device: String,
        /// The call that failed, by the name of the driver's function, or `dlopen`.
        call: &'static str,
        /// The driver's code; 0 where it was not the driver that spoke.
        code: i32,
        /// What was said.
        detail: String,
    },

    /// The pool's records contradict each other: a bug of this crate, or foreign writes into its memory (`PoolError`).
    #[error("the pool is damaged: found {}; expected words, directory and tables to agree; build a new pool and report this", problems.join("; "))]
    Integrity {
        /// Every contradiction found.
        problems: Vec<String>,
    },

    /// An access outside the memory that the owner handed over (`ValueError`).
    #[error("{what}: found [{address:#x}, +{len}); expected a range inside [{base:#x}, +{region_len})")]
    Region {
        /// Which access.
        what: &'static str,
        /// Its first address.
        address: u64,
        /// Its length in bytes.
        len: u64,
        /// The region's first address.
        base: u64,
        /// The region's length in bytes.
        region_len: u64,
    },

    /// An argument that makes no sense (`ValueError`).
    #[error("{what}: found {found}; expected {expected}")]
    Value {
        /// Which argument.
        what: &'static str,
        /// Its value.
        found: String,
        /// The values that make sense.
        expected: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[allow(clippy::needless_pass_by_value, reason = "callers pass numbers and strings as they have them")]
impl Error {
    /// [`Error::Value`] from anything that can be shown.
    pub(crate) fn value(what: &'static str, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::Value { what, found: found.to_string(), expected: expected.into() }
    }

    /// [`Error::Packed`] from anything that can be shown.
    pub(crate) fn packed(what: &'static str, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::Packed { what, found: found.to_string(), expected: expected.into() }
    }

    /// [`Error::PackedSite`].
    pub(crate) fn packed_site(site: &str, found: String, expected: String) -> Self {
        Self::PackedSite { site: site.to_owned(), found, expected }
    }

    /// [`Error::AdapterConfig`] from anything that can be shown.
    pub(crate) fn config(field: &str, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::AdapterConfig { field: field.to_owned(), found: found.to_string(), expected: expected.into() }
    }
}
