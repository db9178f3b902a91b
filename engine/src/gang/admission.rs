//! Which waiting gangs may make their pods now.
//!
//! Two gangs that start together may each get a part of the room that one of them needs, and wait for
//! ever. So gangs of several pods start one after the other, the oldest first, and one that finds no
//! room in time gives back what it has. A gang of one pod has all or nothing; of those only so many
//! wait in the scheduler's queue at a time.

use std::collections::BTreeSet;

use stoker_api::time::Timestamp;

/// A trial that starts, or wants to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// When the trial was created.
    pub created_at: Timestamp,
    /// Names the trial over all namespaces.
    pub key: String,
    /// Pods of its gang.
    pub num_pods: u32,
    /// Whether its pods were made and are not all scheduled yet. Otherwise it waits to make them.
    pub is_starting: bool,
}

/// How many gangs start at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Of several pods; at least 1.
    pub starting_gangs_max: u32,
    /// Of one pod; at least 1.
    pub starting_pods_max: u32,
}

/// The keys of the trials that may begin an attempt now.
pub fn admitted(mut candidates: Vec<Candidate>, caps: Caps) -> BTreeSet<String> {
    candidates.sort();
    let mut free = [caps.starting_pods_max.max(1), caps.starting_gangs_max.max(1)];
    let kind = |it: &Candidate| usize::from(it.num_pods > 1);
    for starting in candidates.iter().filter(|it| it.is_starting) {
        let free = &mut free[kind(starting)];
        *free = free.saturating_sub(1);
    }
    let mut admitted = BTreeSet::new();
    for waiting in candidates.into_iter().filter(|it| !it.is_starting) {
        let free = &mut free[kind(&waiting)];
        if *free > 0 {
            *free -= 1;
            admitted.insert(waiting.key);
        }
    }
    admitted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates are `name@created:pods`, with `*` where the gang starts already.
    #[track_caller]
    fn check(candidates: &str, expected: &str) {
        let candidate = |text: &str| {
            let (key, rest) = text.split_once('@').unwrap();
            let (created, pods) = rest.split_once(':').unwrap();
            Candidate {
                created_at: Timestamp(created.parse().unwrap()),
                key: key.to_owned(),
                num_pods: pods.trim_end_matches('*').parse().unwrap(),
                is_starting: pods.ends_with('*'),
            }
        };
        let candidates = candidates.split_whitespace().map(candidate).collect();
        let caps = Caps { starting_gangs_max: 1, starting_pods_max: 2 };
        let found: Vec<_> = admitted(candidates, caps).into_iter().collect();
        assert_eq!(found.join(" "), expected);
    }

    #[test]
    fn gangs_start_one_after_the_other_oldest_first() {
        check("b@2:4 a@3:4 c@1:4", "c");
        check("b@2:4 a@3:4 c@1:4*", "");
        check("b@2:4 a@2:4", "a");
    }

    #[test]
    fn single_pods_have_a_queue_of_their_own() {
        check("a@1:4* b@2:1 c@3:1 d@4:1", "b c");
        check("a@1:1* b@2:1 c@3:1 d@4:2", "b d");
        check("a@1:1* b@2:1* c@3:1", "");
    }
}
