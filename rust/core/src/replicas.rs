//! Which replicas an adapter belongs to: the same answer for everyone who asks, without a registry.

use crate::identity::field;

/// The `k` replicas that an adapter prefers, the first choice first: rendezvous hashing (Thaler and Ravishankar 1998).
///
/// A replica's score is the first eight bytes, little endian, of blake3 over `"hotslot replica 1"`, the adapter and the replica, each
/// preceded by its length as little-endian u64. The highest scores win; equal ones go by the replica's bytes. So when a replica comes
/// or goes only the adapters that it gains or loses move. A replica that is named twice counts once.
///
/// # Examples
/// ```
/// use hotslot_core::replicas::preferred_replicas;
///
/// let replicas = ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"];
/// let two = preferred_replicas("sql", &replicas, 2);
/// assert_eq!(two, preferred_replicas("sql", &[replicas[2], replicas[0], replicas[1]], 2));
/// assert_eq!(two.len(), 2);
/// ```
#[must_use]
pub fn preferred_replicas<'a>(adapter: &str, replicas: &[&'a str], k: usize) -> Vec<&'a str> {
    let mut scored: Vec<(u64, &str)> = replicas.iter().map(|&replica| (score(adapter, replica), replica)).collect();
    scored.sort_unstable_by(|(score, replica), (other_score, other)| {
        other_score.cmp(score).then_with(|| replica.cmp(other))
    });
    scored.dedup();
    scored.truncate(k);
    scored.into_iter().map(|(_, replica)| replica).collect()
}

fn score(adapter: &str, replica: &str) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in ["hotslot replica 1", adapter, replica] {
        field(&mut hasher, part.as_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}
