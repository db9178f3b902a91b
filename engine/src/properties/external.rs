//! Properties of external searches: answers have their effects once, whatever dies or is deleted.

use proptest::prelude::*;
use stoker_api::decisions::LogEvent;
use stoker_api::experiment::ExternalSearch;
use stoker_api::validate::Method;

use super::cases;
use super::runner::Runner;

fn runner() -> impl Strategy<Value = Runner> {
    (1..14_u32, 0..4_u32, 0..1000_u32, any::<bool>()).prop_map(
        |(max_trials, max_concurrent_trials, seed, is_slow)| {
            let command = vec!["searcher".to_owned()];
            let search = ExternalSearch { url: None, command, max_trials, max_concurrent_trials };
            Runner::new(Method::External(search), seed).with_slow_answers(is_slow)
        },
    )
}

proptest! {
    #![proptest_config(cases())]

    /// The runner dies between any two writes, answers are lost, and trials are deleted while it
    /// lives or is dead. The searcher checks that it gets each event once.
    #[test]
    fn answers_take_effect_once(
        mut runner in runner(),
        steps in prop::collection::vec((0..8_u8, 0..16_usize, any::<u8>()), 0..120),
    ) {
        for (kind, pick, die) in steps {
            match kind {
                0 => {
                    runner.settle(pick % 6);
                    runner.crash();
                }
                // A stored answer to a lost question may be impossible after a deletion.
                1 if die < 128 && !runner.has_slow_answers() => {
                    runner.settle(usize::MAX);
                    let index = runner.trials.keys().nth(pick).copied();
                    if let Some(index) = index {
                        runner.trials.remove(&index);
                    }
                }
                1 | 2 => runner.settle(usize::MAX),
                _ => runner.step(pick, die),
            }
        }
        runner.finish();
        // The entries of all earlier answers are dropped.
        let answers = runner.log().into_iter().filter(|entry| {
            matches!(entry.event, LogEvent::Answered(_))
        });
        prop_assert!(answers.count() <= 1);
        for record in runner.records() {
            let is_own = record.spec.tag == Some(format!("t{}", record.spec.index));
            prop_assert!(is_own, "{:?}", record.spec);
            let given = record.spec.hyperparameters["net"]["rate"] == 0.5;
            prop_assert!(given || record.spec.index % 4 == 3, "{:?}", record.spec);
        }
    }
}
