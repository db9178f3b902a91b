//! Where the turns of a search are recorded.

use std::collections::{BTreeMap, BTreeSet};

use stoker_api::decisions::LogEntry;
use stoker_api::time::Timestamp;
use stoker_api::trial::{Fact, Grant};

use crate::experiment::{Record, Unreadable};

/// Where a turn is recorded.
pub(super) enum Home<'a> {
    Log(&'a LogEntry),
    Grant(u32, &'a Grant),
    /// The home was deleted. Its effects are left.
    Deleted,
}

impl Home<'_> {
    /// Returns the time of the turn's event, if it is recorded.
    pub(super) fn time(&self, record: Record<'_>) -> Option<Timestamp> {
        match self {
            Self::Log(entry) => Some(entry.at),
            Self::Grant(trial, grant) => {
                let facts = &record.trials.get(trial)?.status.facts;
                match facts.get(grant.fact? as usize)? {
                    Fact::Result(result) => result.at,
                    Fact::Closed(closed) => closed.at,
                    Fact::Reopened(reopened) => reopened.at,
                }
            }
            Self::Deleted => None,
        }
    }
}

/// Returns where each turn is recorded, by its position.
pub(super) fn homes(record: Record<'_>) -> Result<BTreeMap<u64, Home<'_>>, Unreadable> {
    let mut homes = BTreeMap::new();
    let mut others = BTreeSet::new();
    for entry in record.log {
        if homes.insert(entry.order, Home::Log(entry)).is_some() {
            return Err(unreadable(&Home::Log(entry), entry.order, "is there twice"));
        }
    }
    for (trial, of_trial) in record.trials {
        others.extend(of_trial.spec.order);
        for grant in &of_trial.spec.grants {
            if grant.fact.is_none() {
                others.insert(grant.order);
                continue;
            }
            let home = Home::Grant(*trial, grant);
            if homes.contains_key(&grant.order) {
                return Err(unreadable(&home, grant.order, "is there twice"));
            }
            homes.insert(grant.order, home);
        }
    }
    for order in others {
        homes.entry(order).or_insert(Home::Deleted);
    }
    Ok(homes)
}

/// Returns an error about the record of a turn.
pub(super) fn unreadable(home: &Home<'_>, order: u64, reason: &str) -> Unreadable {
    let (object, field) = match home {
        Home::Log(_) => ("the experiment".to_owned(), "status.log"),
        Home::Grant(trial, _) => (format!("trial {trial}"), "spec.grants"),
        Home::Deleted => ("the trials".to_owned(), "spec.grants"),
    };
    let field = format!("{field}, order {order}");
    Unreadable { object, field, reason: reason.to_owned() }
}
