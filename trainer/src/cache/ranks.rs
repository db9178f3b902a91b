//! Comparison of cached data sets over the ranks of a gang.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::collective::{Distributed, all_gather_cbor};

/// Hashes of the data sets that a process has opened, by their description. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenedSets(Arc<Mutex<BTreeMap<String, String>>>);

impl OpenedSets {
    /// Records that a set was opened.
    pub(super) fn add(&self, set: String, sha256: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(set, sha256);
    }

    /// Checks that ranks which opened the same set read the same samples. Machines may have built
    /// their copies separately. Collective.
    ///
    /// # Errors
    ///
    /// Fails if two ranks have different contents of a set.
    pub(crate) fn check(&self, ranks: &Distributed) -> Result<()> {
        if ranks.size() == 1 {
            return Ok(());
        }
        let local = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let all = all_gather_cbor(ranks.collective(), "data sets", local)?;
        let mut first = BTreeMap::new();
        for (rank, sets) in all.iter().enumerate() {
            for (set, sha256) in sets {
                let (other, before) = *first.entry(set).or_insert((rank, sha256));
                if before != sha256 {
                    let text = format!(
                        "rank {rank} has another {set} than rank {other}: their machines have \
                         built it separately, with different samples or another order; let \
                         `cached` build the same samples in the same order everywhere, and change \
                         the version"
                    );
                    return Err(text.into());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::ThreadRank;

    #[test]
    fn ranks_with_different_cached_sets_are_rejected() {
        let check = |of_ranks: [&[(&str, &str)]; 3]| {
            std::thread::scope(|scope| {
                let ranks = ThreadRank::group(3).into_iter().zip(of_ranks);
                let check = |(rank, sets): (_, &[(&str, &str)])| {
                    let opened = OpenedSets::default();
                    for (set, sha256) in sets {
                        opened.add((*set).to_owned(), (*sha256).to_owned());
                    }
                    scope.spawn(move || {
                        let ranks = Distributed::from_collective(Box::new(rank));
                        opened.check(&ranks).map_err(|error| error.to_string())
                    })
                };
                let ranks: Vec<_> = ranks.map(check).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let train = ("data set train v1 (training)", "a");
        // A set that only some ranks open is compared among these.
        assert!(check([&[train], &[], &[train]]).iter().all(Result::is_ok));
        for answer in check([&[], &[train], &[(train.0, "b")]]) {
            let error = answer.unwrap_err();
            let expected = "rank 2 has another data set train v1 (training) than rank 1: their";
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
