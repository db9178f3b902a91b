//! Namespaces that viewers have added. They belong to users, not to sessions: a proxy that sends a
//! new token starts another session.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Maximum number of namespaces that a viewer adds. Another one replaces the oldest: misspelled
/// names must not use up the limit.
const ADDED_MAX: usize = 50;
/// Maximum number of users with added namespaces. Another one replaces the user who was away
/// longest.
const USERS_MAX: usize = 2_000;

/// Added namespaces by the name of the user, the latest last, each with the time of the last use.
#[derive(Debug, Default)]
pub(super) struct Added(Mutex<HashMap<String, (Instant, Vec<String>)>>);

impl Added {
    /// Returns the namespaces that a user has added.
    pub(super) fn of(&self, user: &str) -> BTreeSet<String> {
        let mut users = self.lock();
        let Some((used, names)) = users.get_mut(user) else { return BTreeSet::new() };
        *used = Instant::now();
        names.iter().cloned().collect()
    }

    /// Adds a namespace for a user.
    ///
    /// # Errors
    ///
    /// The name is invalid.
    pub(super) fn add(&self, user: &str, name: &str) -> Result<(), String> {
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_valid = name.len() <= 63
            && name.bytes().all(|byte| is_inner(byte) || byte == b'-')
            && name.bytes().next().is_some_and(is_inner)
            && name.bytes().last().is_some_and(is_inner);
        if !is_valid {
            return Err(format!("{name:?} is not the name of a namespace"));
        }
        let mut users = self.lock();
        if users.len() >= USERS_MAX && !users.contains_key(user) {
            let oldest = users.iter().min_by_key(|(_, (used, _))| *used);
            let oldest = oldest.map(|(user, _)| user.clone());
            if let Some(oldest) = oldest {
                users.remove(&oldest);
            }
        }
        let (used, names) =
            users.entry(user.to_owned()).or_insert_with(|| (Instant::now(), Vec::new()));
        *used = Instant::now();
        names.retain(|one| one != name);
        if names.len() >= ADDED_MAX {
            names.remove(0);
        }
        names.push(name.to_owned());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (Instant, Vec<String>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_keep_their_own_namespaces() {
        let added = Added::default();
        added.add("ada", "ml").unwrap();
        added.add("ada", "vision").unwrap();
        added.add("grace", "audio").unwrap();
        let names = |user: &str| added.of(user).into_iter().collect::<Vec<_>>();
        assert_eq!(names("ada"), ["ml", "vision"]);
        assert_eq!(names("grace"), ["audio"]);
        assert!(names("eve").is_empty());
        for name in ["", "-a", "a-", "A", "a.b", "a/b", &"a".repeat(64)] {
            added.add("ada", name).unwrap_err();
        }
        assert_eq!(names("ada").len(), 2);
    }

    #[test]
    fn added_namespaces_are_limited() {
        let added = Added::default();
        for number in 0..ADDED_MAX {
            added.add("ada", &format!("n{number}")).unwrap();
        }
        added.add("ada", "n0").unwrap();
        added.add("ada", "other").unwrap();
        let names = added.of("ada");
        assert_eq!(["n0", "n1", "other"].map(|name| names.contains(name)), [true, false, true]);
        for number in 0..USERS_MAX - 1 {
            added.add(&format!("user-{number}"), "ml").unwrap();
        }
        added.of("ada");
        added.add("grace", "ml").unwrap();
        assert_eq!(added.lock().len(), USERS_MAX);
        assert_eq!(added.of("ada").len(), ADDED_MAX);
    }
}
