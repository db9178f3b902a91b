//! Properties of experiments whose trials continue after their end.

use proptest::prelude::*;
use stoker_api::experiment::ReopenedTrials::{Failed, Stopped};
use stoker_api::experiment::{ReopenRequest, ReopenedTrials, SearchLimits};
use stoker_api::trial::CloseCause;
use stoker_api::validate::Method;

use super::runner::Runner;
use super::{cases, check_equal, edit, runner, steps};
use crate::trial::closed;

proptest! {
    #![proptest_config(cases())]

    /// The user continues trials that have ended, while the search runs and after its end.
    #[test]
    fn reopened_trials_continue_and_end_again(
        mut runner in runner(),
        steps in steps(),
    ) {
        // A stored answer to a lost question may be impossible after a deletion.
        runner = runner.with_slow_answers(false);
        for (kind, pick, die) in steps {
            match kind {
                0 => request(&mut runner, [Stopped, Failed][pick % 2]),
                1 => {
                    let mut undisturbed = runner.clone();
                    undisturbed.settle(usize::MAX);
                    runner.settle(pick % 6);
                    runner.crash();
                    runner.settle(usize::MAX);
                    check_equal(&runner, &undisturbed, true);
                    runner.check_explained();
                }
                2 if die % 4 > 0 => edit(&mut runner, 3, die),
                2 => {
                    runner.settle(usize::MAX);
                    let indices: Vec<_> = runner.trials.keys().copied().collect();
                    // A deletion after the end of the search is not recorded.
                    let is_finished = runner.ledger().book().is_finished();
                    if let Some(index) = indices.get(pick).filter(|_| !is_finished) {
                        runner.trials.remove(index);
                        runner.num_closes.remove(index);
                        if die > 128 {
                            runner.crash();
                        }
                        runner.settle(usize::MAX);
                    }
                }
                3 => runner.settle(usize::MAX),
                _ => runner.step(pick, die),
            }
            runner.check();
        }
        runner.finish();
        runner.edit(|settings| settings.limits = SearchLimits::default());
        for trials in [Failed, Stopped, Failed, Stopped] {
            runner.finish();
            request(&mut runner, trials);
        }
        runner.finish();
        runner.check_explained();
        let causes: Vec<_> = runner.records().iter().map(closed).collect();
        let is_left = |cause: &Option<CloseCause>| {
            matches!(cause, Some(CloseCause::Failed | CloseCause::StoppedEarly))
        };
        // The trials of a population have continued without those of an earlier round, and an
        // external searcher may have replaced its trials.
        let is_strict = !matches!(runner.method(), Method::Pbt { .. } | Method::External(_));
        prop_assert!(!is_strict || !causes.iter().any(is_left), "{causes:?}");
        prop_assert!(runner.num_closes.values().all(|closes| *closes == 1));
    }
}

/// Asks to continue trials that have ended.
fn request(runner: &mut Runner, trials: ReopenedTrials) {
    let number = runner.reopen.map_or(0, |request| request.number) + 1;
    runner.reopen = Some(ReopenRequest { number, trials });
}
