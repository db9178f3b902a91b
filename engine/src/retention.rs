//! Retention of checkpoints, while an experiment runs and after it has ended.
//!
//! After the end, a checkpoint is kept if one of these holds:
//!
//! - it has a metric and is among the experiment's `saveExperimentBest` best;
//! - it has a metric and is among its trial's `saveTrialBest` best;
//! - it is among its trial's `saveTrialLatest` latest, with or without a metric.
//!
//! Then all copies of trials have ended too, so no pin is left.
//!
//! An attempt may have refused a checkpoint, because it was corrupt or written by a newer version.
//! Such a checkpoint takes no place of others, so its replacement is kept too. The refusal alone
//! does not delete it.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;

use stoker_api::contract::{FALLBACK_CHECKPOINTS, RESUME_FROM_MAX};
use stoker_api::experiment::{CheckpointStorage, SAVE_MAX};
use stoker_api::number;
use stoker_api::trial::{CheckpointRecord, Fact};

use crate::trial::{TrialRecord, compare_losses};

/// A checkpoint with its trial and its position in the trial's list.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    trial: u32,
    position: usize,
    checkpoint: &'a CheckpointRecord,
}

/// Refused checkpoints that each count keeps besides its own: as many as one attempt refuses. The
/// API server limits the length of a trial's list.
const REFUSED_MAX: usize = RESUME_FROM_MAX;

/// Returns the checkpoints to delete after the experiment's end as (trial, name), sorted by trial
/// and age. `trials` has each trial's checkpoints, oldest first.
///
/// A NaN metric ranks last. **Ties go to fewer batches**, then to the lower trial index, then to
/// the newer attempt, which trained these batches again because it could not use the older
/// checkpoint. A newer attempt's checkpoints are also later than all of an older attempt.
///
/// Each count keeps as many checkpoints that no attempt refused. Refused ones are kept besides, if
/// the count would keep them without their refusal. Of these, the latest have the most batches: an
/// attempt that refused all checkpoints starts from scratch, and must not replace a long training.
pub fn deletable(
    policy: &CheckpointStorage,
    smaller_is_better: bool,
    trials: &[(u32, &[CheckpointRecord])],
) -> Vec<(u32, String)> {
    let mut kept = BTreeSet::new();
    let mut keep = |usable: &[Candidate<'_>], all: &[Candidate<'_>], num: u32| {
        let num = num as usize;
        let is_refused = |candidate: &&Candidate<'_>| candidate.checkpoint.refused;
        let usable = usable.iter().filter(|candidate| !is_refused(candidate)).take(num);
        let refused = all.iter().take(num).filter(is_refused).take(REFUSED_MAX);
        kept.extend(usable.chain(refused).map(|candidate| (candidate.trial, candidate.position)));
    };
    let mut all = Vec::new();
    for &(trial, checkpoints) in trials {
        let candidate = |(position, checkpoint)| Candidate { trial, position, checkpoint };
        let newest: Vec<_> = checkpoints.iter().enumerate().map(candidate).rev().collect();
        all.extend_from_slice(&newest);
        let mut longest = newest.clone();
        longest.sort_by_key(|candidate| Reverse(candidate.checkpoint.batches));
        keep(&newest, &longest, policy.save_trial_latest);
        let best = best_first(newest, smaller_is_better);
        keep(&best, &best, policy.save_trial_best);
    }
    let best = best_first(all.clone(), smaller_is_better);
    keep(&best, &best, policy.save_experiment_best);
    all.retain(|candidate| !kept.contains(&(candidate.trial, candidate.position)));
    all.sort_by_key(|candidate| (candidate.trial, candidate.position));
    let names =
        all.into_iter().map(|candidate| (candidate.trial, candidate.checkpoint.name.clone()));
    names.collect()
}

/// Returns the names of a trial's checkpoints that are kept while its experiment runs, whatever the
/// policy: those from which copies start, and that of the latest result, which may be copied next.
pub fn pinned(record: &TrialRecord) -> Vec<String> {
    let checkpoint = |fact: &Fact| match fact {
        Fact::Result(result) => Some(result.checkpoint.as_ref()?.name.clone()),
        Fact::Closed(_) | Fact::Reopened(_) => None,
    };
    let latest = record.status.facts.iter().rev().find_map(checkpoint);
    record.spec.pins.iter().cloned().chain(latest).collect()
}

const FALLBACKS: usize = FALLBACK_CHECKPOINTS as usize;

/// Returns the names of a trial's checkpoints that may be deleted while its experiment runs.
/// `checkpoints` is sorted oldest first. Those in `pins` stay; see [`pinned`].
///
/// [`deletable`] would delete them at the end, regardless of later checkpoints, and they are not
/// among the trial's latest three, of all or of those that no attempt refused. The checkpoint with
/// the most batches stays too. A checkpoint that
/// others of its trial outrank, by metric or by age, stays outranked. So a trial that saves for
/// weeks keeps only the policy's counts and a few more.
pub fn prunable(
    policy: &CheckpointStorage,
    smaller_is_better: bool,
    checkpoints: &[CheckpointRecord],
    pins: &[String],
) -> Vec<String> {
    // Experiments from before `SAVE_MAX` existed may have larger counts.
    let widest = CheckpointStorage {
        save_experiment_best: 0,
        save_trial_best: policy.save_trial_best.max(policy.save_experiment_best).min(SAVE_MAX),
        save_trial_latest: policy.save_trial_latest.min(SAVE_MAX),
        ..policy.clone()
    };
    let newest = checkpoints.iter().rev();
    let usable = newest.clone().filter(|checkpoint| !checkpoint.refused).take(FALLBACKS);
    // A refusal may be unknown: an earlier version of the operator does not record it. So an
    // attempt that starts from scratch does not delete the longest training.
    let longest = checkpoints.iter().max_by_key(|checkpoint| checkpoint.batches);
    let fallbacks: Vec<&CheckpointRecord> =
        newest.take(FALLBACKS).chain(usable).chain(longest).collect();
    let is_old = |name: &String| fallbacks.iter().all(|checkpoint| checkpoint.name != *name);
    let deleted = deletable(&widest, smaller_is_better, &[(0, checkpoints)]);
    let names = deleted.into_iter().map(|(_, name)| name);
    names.filter(|name| is_old(name) && !pins.contains(name)).collect()
}

fn best_first(mut candidates: Vec<Candidate<'_>>, smaller_is_better: bool) -> Vec<Candidate<'_>> {
    candidates.retain(|candidate| candidate.checkpoint.metric.is_some());
    let loss = |candidate: &Candidate<'_>| {
        let metric = candidate.checkpoint.metric.as_deref().and_then(number::parse);
        let metric = metric.unwrap_or(f64::NAN);
        if smaller_is_better { metric } else { -metric }
    };
    let tie = |candidate: &Candidate<'_>| {
        (candidate.checkpoint.batches, candidate.trial, Reverse(candidate.position))
    };
    candidates.sort_by(|a, b| match compare_losses(loss(a), loss(b)) {
        Ordering::Equal => tie(a).cmp(&tie(b)),
        unequal => unequal,
    });
    candidates
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::any;
    use proptest::{array, option, prop_assert, prop_assert_eq, proptest};

    use super::*;

    /// Trial index, and names and metrics of its checkpoints. The position gives the batches.
    type Trial<'a> = (u32, &'a [(&'a str, Option<f64>)]);

    fn records(checkpoints: &[(&str, Option<f64>)]) -> Vec<CheckpointRecord> {
        let record = |(batches, &(name, metric)): (u64, &(&str, Option<f64>))| CheckpointRecord {
            name: name.to_owned(),
            batches,
            metric: metric.map(number::format),
            manifest_sha256: String::new(),
            bytes: 1,
            refused: false,
        };
        (1..).zip(checkpoints).map(record).collect()
    }

    fn policy(counts: [u32; 3]) -> CheckpointStorage {
        let [save_experiment_best, save_trial_best, save_trial_latest] = counts;
        CheckpointStorage {
            save_experiment_best,
            save_trial_best,
            save_trial_latest,
            ..CheckpointStorage::default()
        }
    }

    /// `counts` has `saveExperimentBest`, `saveTrialBest` and `saveTrialLatest`.
    fn check(trials: &[Trial<'_>], smaller_is_better: bool, counts: [u32; 3], expected: &str) {
        let policy = policy(counts);
        let owned = trials.iter().map(|(trial, checkpoints)| (*trial, records(checkpoints)));
        let owned: Vec<_> = owned.collect();
        let borrowed = owned.iter().map(|(trial, records)| (*trial, records.as_slice()));
        let borrowed: Vec<_> = borrowed.collect();
        let deleted = deletable(&policy, smaller_is_better, &borrowed);
        let checkpoints = trials.iter().flat_map(|(_, checkpoints)| *checkpoints);
        let mut kept: Vec<&str> = checkpoints.map(|(name, _)| *name).collect();
        kept.retain(|name| deleted.iter().all(|(_, deleted)| deleted != name));
        assert_eq!(kept.join(" "), expected, "{counts:?}");
    }

    #[test]
    fn the_documented_table_holds() {
        let trials: [Trial<'_>; 2] = [
            (1, &[("1", None), ("2", None), ("3", Some(0.6)), ("4", Some(0.5)), ("5", Some(0.4))]),
            (2, &[("6", None), ("7", Some(0.2)), ("8", Some(0.3)), ("9", None), ("10", None)]),
        ];
        for (counts, expected) in [
            ([0, 0, 0], ""),
            ([2, 0, 0], "7 8"),
            ([5, 0, 0], "3 4 5 7 8"),
            ([9, 0, 0], "3 4 5 7 8"),
            ([0, 1, 0], "5 7"),
            ([0, 3, 0], "3 4 5 7 8"),
            ([0, 9, 0], "3 4 5 7 8"),
            ([0, 0, 1], "5 10"),
            ([0, 0, 3], "3 4 5 8 9 10"),
            ([2, 1, 0], "5 7 8"),
            ([2, 0, 1], "5 7 8 10"),
            ([0, 1, 1], "5 7 10"),
            ([2, 1, 1], "5 7 8 10"),
        ] {
            check(&trials, true, counts, expected);
        }
    }

    #[test]
    fn best_and_latest_of_one_trial_are_kept() {
        let names = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"];
        let scaled = |scale: f64| -> Vec<_> {
            (1..).zip(names).map(|(batches, name)| (name, Some(scale.powi(batches)))).collect()
        };
        check(&[(0, &scaled(0.9))], true, [3, 1, 2], "8 9 10");
        check(&[(0, &scaled(1.1))], true, [3, 1, 2], "1 2 3 9 10");
        check(&[(0, &scaled(1.1))], false, [3, 1, 2], "8 9 10");
    }

    #[test]
    fn running_trials_keep_at_most_the_maximum() {
        let names: Vec<String> = (0..SAVE_MAX + 50).map(|number| number.to_string()).collect();
        // The latest checkpoint is the best.
        let best = |name: &String| Some(-name.parse::<f64>().unwrap());
        let checkpoints: Vec<_> = names.iter().map(|name| (name.as_str(), best(name))).collect();
        let records = records(&checkpoints);
        for counts in [[SAVE_MAX + 50, 0, 0], [0, SAVE_MAX + 50, 0], [0, 0, SAVE_MAX + 50]] {
            assert_eq!(prunable(&policy(counts), true, &records, &[]), names[..50], "{counts:?}");
        }
    }

    /// The API server accepts at most 384 checkpoints of a trial, and 128 pins.
    #[test]
    fn refused_and_pinned_checkpoints_leave_the_list_short() {
        // The oldest are the best, and every other one was refused.
        let names: Vec<String> = (0..600).map(|number| number.to_string()).collect();
        let metric = |name: &String| name.parse().ok();
        let checkpoints: Vec<_> = names.iter().map(|name| (name.as_str(), metric(name))).collect();
        let mut records = records(&checkpoints);
        records.iter_mut().step_by(2).for_each(|record| record.refused = true);
        let deleted = prunable(&policy([0, SAVE_MAX, SAVE_MAX]), true, &records, &[]);
        let num_kept = 2 * (SAVE_MAX as usize + REFUSED_MAX);
        assert_eq!(records.len() - deleted.len(), num_kept);
        let pins = &deleted[..129];
        let deleted = prunable(&policy([0, SAVE_MAX, SAVE_MAX]), true, &records, pins);
        assert_eq!(records.len() - deleted.len(), num_kept + 129);
        assert!(num_kept + 129 + 2 * FALLBACKS < 384);
    }

    #[test]
    fn pinned_checkpoints_stay_while_copies_need_them() {
        let names = ["1", "2", "3", "4", "5", "6"];
        let records = records(&names.map(|name| (name, None)));
        let check = |pins: &[&str], expected: &[&str]| {
            let pins: Vec<String> = pins.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(prunable(&policy([0, 0, 1]), true, &records, &pins), expected, "{pins:?}");
        };
        check(&[], &["1", "2", "3"]);
        check(&["2"], &["1", "3"]);
        check(&["1", "3", "6"], &["2"]);
    }

    #[test]
    fn ties_prefer_fewer_batches_and_nan_is_last() {
        let nan = Some(f64::NAN);
        let trials: [Trial<'_>; 2] = [
            (0, &[("a", nan), ("b", Some(1.0)), ("c", Some(1.0))]),
            (1, &[("d", Some(1.0)), ("e", Some(1.0)), ("f", nan)]),
        ];
        check(&trials, true, [1, 0, 0], "d");
        check(&trials, true, [2, 0, 0], "b d");
        check(&trials, true, [3, 0, 0], "b d e");
        check(&trials, true, [5, 0, 0], "a b c d e");
        check(&trials, false, [0, 2, 0], "b c d e");
        check(&trials, false, [0, 3, 0], "a b c d e f");
    }

    /// Reads checkpoints, oldest first: `300-1:0.5` is of attempt 1 with metric 0.5, and `!` marks
    /// a refused one.
    fn parse(text: &str) -> Vec<CheckpointRecord> {
        let record = |word: &str| {
            let (word, refused) = match word.strip_suffix('!') {
                Some(word) => (word, true),
                None => (word, false),
            };
            let (name, metric) = word
                .split_once(':')
                .map_or((word, None), |(name, metric)| (name, Some(metric.to_owned())));
            let batches = name.split_once('-').unwrap().0.parse().unwrap();
            let (name, manifest_sha256) = (name.to_owned(), String::new());
            CheckpointRecord { name, batches, metric, manifest_sha256, bytes: 1, refused }
        };
        text.split_whitespace().map(record).collect()
    }

    #[test]
    fn refused_checkpoints_replace_no_others() {
        // Checkpoints kept while the experiment runs, and after its end.
        let check = |counts: [u32; 3], text: &str, running: &str, ended: &str| {
            let (policy, mut left) = (policy(counts), parse(text));
            let mut kept_without = |deleted: Vec<String>| {
                left.retain(|checkpoint| !deleted.contains(&checkpoint.name));
                let names: Vec<&str> = left.iter().map(|left| left.name.as_str()).collect();
                (names.join(" "), left.clone())
            };
            let deleted = prunable(&policy, true, &parse(text), &[]);
            let (names, rest) = kept_without(deleted);
            assert_eq!(names, running, "{counts:?} {text}");
            let deleted = deletable(&policy, true, &[(0, &rest)]).into_iter();
            let (names, _) = kept_without(deleted.map(|(_, name)| name).collect());
            assert_eq!(names, ended, "{counts:?} {text}");
        };
        let default = [0, 1, 1];
        // Attempt 1 trained batch 300 again, with the same metric or with a slightly worse one.
        let rest = "400-1:0.5 500-1:0.6 600-1:0.7";
        let (running, ended) = ("300-1 400-1 500-1 600-1", "300-1 600-1");
        check(default, &format!("100-0:0.9 300-0:0.1 300-1:0.1 {rest}"), running, ended);
        let (running, ended) = ("300-0 300-1 400-1 500-1 600-1", "300-0 300-1 600-1");
        check(default, &format!("100-0:0.9 300-0:0.1! 300-1:0.11 {rest}"), running, ended);
        check([1, 0, 1], &format!("100-0:0.9 300-0:0.1! 300-1:0.11 {rest}"), running, ended);
        // The new one is better.
        let (running, ended) = ("300-1 400-1 500-1 600-1", "300-1 600-1");
        check(default, &format!("100-0:0.9 300-0:0.1! 300-1:0.05 {rest}"), running, ended);
        // Attempt 1 stopped before the batch of the refused checkpoint.
        check(default, "100-0:0.2 300-0:0.9! 250-1:0.8", "100-0 300-0 250-1", "100-0 300-0 250-1");
        check(default, "100-0:0.2 300-0:0.9 250-1:0.8", "100-0 300-0 250-1", "100-0 250-1");
        // Two checkpoints to fall back to, besides refused ones.
        let (running, ended) = ("100-0 200-0 300-0 110-1", "300-0 110-1");
        check([0, 0, 1], "100-0 200-0! 300-0! 110-1", running, ended);
        // No checkpoint could be used, so attempt 1 started from scratch.
        let text = "100-0! 200-0! 300-0! 10-1 20-1 30-1 40-1";
        check([0, 0, 1], text, "300-0 20-1 30-1 40-1", "300-0 40-1");
        // Nor were the refusals recorded.
        let text = "100-0 200-0 300-0 10-1 20-1 30-1 40-1";
        check([0, 0, 1], text, "300-0 20-1 30-1 40-1", "40-1");
    }

    #[test]
    fn every_trial_keeps_its_latest_without_metric() {
        let trials: [Trial<'_>; 3] = [
            (0, &[("a", Some(0.1)), ("b", None)]),
            (1, &[("c", None), ("d", None)]),
            (2, &[("e", None)]),
        ];
        check(&trials, true, [0, 0, 1], "b d e");
    }

    proptest! {
        /// Early deletion also always keeps the latest checkpoints, to fall back to.
        #[test]
        fn early_deletion_does_not_change_final_retention(
            metrics in vec(option::of(0..5u8), 0..30),
            counts in array::uniform3(0..4u32),
            smaller_is_better: bool,
        ) {
            let policy = policy(counts);
            let names: Vec<_> = (0..metrics.len()).map(|position| position.to_string()).collect();
            let scored: Vec<_> = names
                .iter()
                .zip(&metrics)
                .map(|(name, metric)| (name.as_str(), metric.map(f64::from)))
                .collect();
            let all = records(&scored);
            let kept_of = |all: &[CheckpointRecord]| -> Vec<String> {
                let deleted = deletable(&policy, smaller_is_better, &[(0, all)]);
                let is_kept = |name: &String| deleted.iter().all(|(_, deleted)| deleted != name);
                all.iter().map(|checkpoint| checkpoint.name.clone()).filter(is_kept).collect()
            };
            let mut left = Vec::new();
            for checkpoint in &all {
                left.push(checkpoint.clone());
                let deleted = prunable(&policy, smaller_is_better, &left, &[]);
                left.retain(|checkpoint| !deleted.contains(&checkpoint.name));
                let num_kept = 2 * counts.iter().sum::<u32>() as usize + FALLBACKS;
                prop_assert!(left.len() <= num_kept, "{left:?}");
            }
            prop_assert_eq!(kept_of(&left), kept_of(&all));
            prop_assert!(left.ends_with(&all[all.len().saturating_sub(FALLBACKS)..]));
        }

        /// A refusal deletes no checkpoint, and does not change what happens to others.
        #[test]
        fn refusals_change_no_other_retention(
            checkpoints in vec((option::of(0..5u8), any::<bool>()), 0..REFUSED_MAX),
            counts in array::uniform3(0..4u32),
        ) {
            let policy = policy(counts);
            let scored: Vec<_> = checkpoints
                .iter()
                .map(|(metric, _)| ("", metric.map(f64::from)))
                .collect();
            let mut all = records(&scored);
            for (checkpoint, (_, refused)) in all.iter_mut().zip(&checkpoints) {
                checkpoint.name = checkpoint.batches.to_string();
                checkpoint.refused = *refused;
            }
            let deleted = |list: &[CheckpointRecord]| {
                let ended = deletable(&policy, true, &[(0, list)]).into_iter();
                let ended: Vec<String> = ended.map(|(_, name)| name).collect();
                [ended, prunable(&policy, true, list, &[])]
            };
            let usable: Vec<_> = all.iter().filter(|one| !one.refused).cloned().collect();
            let unmarked: Vec<_> =
                all.iter().map(|one| CheckpointRecord { refused: false, ..one.clone() }).collect();
            let (with, without, before) = (deleted(&all), deleted(&usable), deleted(&unmarked));
            for (with, (without, before)) in with.iter().zip(without.iter().zip(&before)) {
                for CheckpointRecord { name, refused, .. } in &all {
                    let expected = if *refused { before } else { without };
                    prop_assert_eq!(with.contains(name), expected.contains(name), "{}", name);
                }
            }
        }

        /// Each trial deletes its own checkpoints early, without knowing the other trials.
        #[test]
        fn experiment_best_survive_early_deletion(
            trials in vec(vec(option::of(0..9u8), 0..12), 0..5),
            num_best in 0..6u32,
            smaller_is_better: bool,
        ) {
            let policy = policy([num_best, 0, 0]);
            let mut left = Vec::new();
            let mut scored = Vec::new();
            for (trial, metrics) in (0..).zip(&trials) {
                let names = (0..metrics.len()).map(|position| position.to_string());
                let names: Vec<_> = names.collect();
                let metrics = metrics.iter().map(|metric| metric.map(f64::from));
                let of_trial: Vec<_> = names.iter().map(String::as_str).zip(metrics).collect();
                let mut kept = Vec::new();
                for checkpoint in records(&of_trial) {
                    if let Some(metric) = checkpoint.metric.as_deref().and_then(number::parse) {
                        let loss = if smaller_is_better { metric } else { -metric };
                        scored.push((loss, checkpoint.batches, trial, checkpoint.name.clone()));
                    }
                    kept.push(checkpoint);
                    let deleted = prunable(&policy, smaller_is_better, &kept, &[]);
                    kept.retain(|checkpoint| !deleted.contains(&checkpoint.name));
                }
                left.push((trial, kept));
            }
            let slices = left.iter().map(|(trial, kept)| (*trial, kept.as_slice()));
            let slices: Vec<_> = slices.collect();
            let deleted = deletable(&policy, smaller_is_better, &slices);
            let mut kept: Vec<(u32, String)> = left
                .iter()
                .flat_map(|(trial, kept)| {
                    kept.iter().map(|checkpoint| (*trial, checkpoint.name.clone()))
                })
                .filter(|checkpoint| !deleted.contains(checkpoint))
                .collect();
            scored.sort_by(|a, b| a.partial_cmp(b).unwrap());
            let best = scored.into_iter().take(num_best as usize);
            let mut best: Vec<_> = best.map(|(_, _, trial, name)| (trial, name)).collect();
            best.sort();
            kept.sort();
            prop_assert_eq!(kept, best);
        }
    }
}
