//! Who reads what, until when.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::exports::Leased;

/// The leases of one server: bounded in number, each with an end.
pub(crate) struct Leases {
    entries: Mutex<HashMap<String, Entry>>,
    /// How many there may be.
    limit: usize,
    /// How long a lease stays after a transfer of it broke, so that the reader can take it up again.
    grace: Duration,
    /// Told when an end may have come nearer.
    changed: Notify,
}

struct Entry {
    leased: Arc<dyn Leased>,
    /// The end that was granted.
    granted: Instant,
    /// The end as it is: nearer once a transfer broke.
    expires: Instant,
    num_readers: usize,
    is_revoked: Arc<AtomicBool>,
}

/// One transfer of a lease. When it is dropped the lease knows whether all was sent.
pub(crate) struct Reader {
    leases: Arc<Leases>,
    id: String,
    pub(crate) leased: Arc<dyn Leased>,
    pub(crate) expires: Instant,
    is_revoked: Arc<AtomicBool>,
    is_complete: bool,
}

impl Leases {
    pub(crate) fn new(limit: usize, grace: Duration) -> Self {
        Self { entries: Mutex::default(), limit, grace, changed: Notify::new() }
    }

    /// Every change of the table is complete before anything in it can panic, so a poisoned one is as good as new.
    fn entries(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries().len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Keeps `leased` under `id` for `ttl`, or gives it back if the table is full.
    pub(crate) fn insert(&self, id: String, leased: Box<dyn Leased>, ttl: Duration) -> Result<(), Box<dyn Leased>> {
        let expires = Instant::now() + ttl;
        let mut entries = self.entries();
        if entries.len() >= self.limit {
            return Err(leased);
        }
        let entry =
            Entry { leased: Arc::from(leased), granted: expires, expires, num_readers: 0, is_revoked: Arc::default() };
        entries.insert(id, entry);
        drop(entries);
        self.changed.notify_one();
        Ok(())
    }

    /// Begins a transfer, or `None` if there is no such lease (any more).
    pub(crate) fn open(self: &Arc<Self>, id: &str) -> Option<Reader> {
        let mut entries = self.entries();
        let entry = entries.get_mut(id).filter(|entry| entry.expires > Instant::now())?;
        entry.num_readers += 1;
        entry.expires = entry.granted;
        Some(Reader {
            leases: Arc::clone(self),
            id: id.to_owned(),
            leased: Arc::clone(&entry.leased),
            expires: entry.expires,
            is_revoked: Arc::clone(&entry.is_revoked),
            is_complete: false,
        })
    }

    /// Ends a lease, and its transfers with it; whether there was one.
    pub(crate) fn release(&self, id: &str) -> bool {
        // Dropped after the lock: what a lease holds may take its own locks.
        let entry = self.entries().remove(id);
        entry.inspect(Entry::revoke).is_some()
    }

    /// Ends all leases.
    pub(crate) fn clear(&self) {
        let entries = std::mem::take(&mut *self.entries());
        entries.values().for_each(Entry::revoke);
    }

    /// Ends the leases whose time is over; when the next one's will be.
    fn expire(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut entries = self.entries();
        let over: Vec<Entry> = entries.extract_if(|_, entry| entry.expires <= now).map(|(_, entry)| entry).collect();
        let next = entries.values().map(|entry| entry.expires).min();
        drop(entries);
        over.iter().for_each(Entry::revoke);
        next
    }

    /// Ends leases when their time is over, for ever.
    pub(crate) async fn keep_expiring(&self) {
        loop {
            match self.expire() {
                Some(next) => tokio::select! {
                    () = tokio::time::sleep_until(next.into()) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }
}

impl Entry {
    fn revoke(&self) {
        // Relaxed: the flag guards no data; a transfer holds the lease's content itself until it looks.
        self.is_revoked.store(true, Relaxed);
    }
}

impl Reader {
    /// Whether the lease ended meanwhile.
    pub(crate) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Relaxed)
    }

    /// Says that all that was asked for has been handed to the connection.
    pub(crate) fn set_complete(&mut self) {
        self.is_complete = true;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(entry) = self.leases.entries().get_mut(&self.id) {
            entry.num_readers -= 1;
            if entry.num_readers == 0 && !self.is_complete {
                entry.expires = entry.granted.min(Instant::now() + self.leases.grace);
            }
        }
        self.leases.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Leased for Nothing {
        fn generation(&self) -> u64 {
            0
        }
        fn header_json(&self) -> &'static str {
            "{}"
        }
        fn nbytes(&self) -> u64 {
            0
        }
        fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Ok(())
        }
    }

    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn the_table_is_bounded_and_a_lease_ends_once() {
        let leases = Arc::new(Leases::new(2, LONG));
        assert!(leases.insert("a".to_owned(), Box::new(Nothing), LONG).is_ok());
        assert!(leases.insert("b".to_owned(), Box::new(Nothing), LONG).is_ok());
        assert!(leases.is_full() && leases.insert("c".to_owned(), Box::new(Nothing), LONG).is_err());
        let reader = leases.open("a").unwrap();
        assert!(leases.release("a") && !leases.release("a"));
        assert!(reader.is_revoked() && leases.open("a").is_none());
        drop(reader);
        leases.clear();
        assert_eq!(leases.len(), 0);
    }

    #[test]
    fn a_broken_transfer_shortens_its_lease_and_the_next_one_restores_it() {
        let leases = Arc::new(Leases::new(2, Duration::from_secs(5)));
        assert!(leases.insert("a".to_owned(), Box::new(Nothing), LONG).is_ok());
        let left = || leases.expire().unwrap().saturating_duration_since(Instant::now());
        let (first, second) = (leases.open("a").unwrap(), leases.open("a").unwrap());
        drop(first);
        assert!(left() > Duration::from_secs(900), "another transfer still runs");
        drop(second);
        assert!(left() <= Duration::from_secs(5));
        let mut third = leases.open("a").unwrap();
        assert!(left() > Duration::from_secs(900));
        third.set_complete();
        drop(third);
        assert!(left() > Duration::from_secs(900), "nothing broke");
    }

    #[test]
    fn a_lease_past_its_end_is_gone() {
        let leases = Arc::new(Leases::new(2, LONG));
        assert!(leases.insert("a".to_owned(), Box::new(Nothing), Duration::ZERO).is_ok());
        assert!(leases.open("a").is_none());
        assert_eq!(leases.expire(), None);
        assert_eq!(leases.len(), 0);
    }
}
